"""The server: OpenAI's completions over HTTP, on one engine.

server                        the process: socket, event loop, loading, signals
app, answers                  the endpoints; the way of a request, and errors on it
limits                        keys, rates, sizes and times; the error that a client gets
fields, protocol, responses, vertex   the bodies of requests
translation, tokenizer, tools   a body -> the engine's requests
worker                        the thread that owns the engine
writers                       the engine's updates -> text, calls, counts -> JSON and events
metrics, openapi              what the server reports about itself
page/                         the page at /
"""
