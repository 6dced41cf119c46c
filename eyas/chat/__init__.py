"""The target's tokenizer and chat template: messages to tokens, tokens to text.

The only package that knows role tokens, and it reads them from the template.

    tokenizer     text to tokens and back; control tokens' names in messages are never obeyed
    template      the chat template: messages to text, on a fixed day
    chat          Chat: both together; the answers of conversations that eyas did not generate
"""

from __future__ import annotations

from eyas.chat.chat import Chat
from eyas.chat.tokenizer import TextStream, encoded

__all__ = ["Chat", "TextStream", "encoded"]
