"""The server: OpenAI's completions over HTTP, on one engine.

connection, limits            who gets in, and for how long
fields, chat_request, text_request, refusal   what may be asked, and the error of what may not
translation, tokenizer, tools   a request in the engine's terms
worker                        the thread that owns the engine
completion, stop, writer      updates become text, calls and events
metrics, openapi              what the server tells of itself
app, server                   the endpoints, and the process
"""
