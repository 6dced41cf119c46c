"""The server: OpenAI's completions over HTTP, on one engine.

connection, limits            who gets in, and for how long
fields, chat_request, text_request, generate_request, vertex, refusal   what may be asked, and the error of what may not
translation, tokenizer, tools   a request in the engine's terms
worker                        the thread that owns the engine
completion, writer, generate_writer   updates become text, calls and events
metrics, openapi              what the server tells of itself
drift, reference              whether acceptance is what the head's card promises
consent, collection, cleaning   prompts that may be kept, cleaned, for the next head
exchange, events, app         one request, how it is sent, the endpoints
playground, page/             the page at /
waiting, server               the time until the model is loaded, the process
"""
