"""Any OpenAI-compatible server measured over HTTP, and the report."""
