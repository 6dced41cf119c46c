"""The benchmark: any OpenAI-compatible server, measured over HTTP, and the report of a whole
pipeline.
"""
