"""The engine: requests in, tokens out, at the target's own distribution. Knows no text and no HTTP."""
