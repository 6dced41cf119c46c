"""The server: OpenAI's completions over HTTP, on one engine.

server -> app (host, key, rate; limits) -> bodies (fields, protocol, responses, vertex) ->
translation (tokenizer, tools) -> worker (the engine's thread) -> writers -> answers
"""
