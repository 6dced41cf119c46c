"""The server: OpenAI's chat completions over HTTP, on one engine."""
