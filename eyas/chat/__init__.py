"""The target's tokenizer and chat template: messages to tokens, tokens to text.

The only package that knows role tokens, and it reads them from the template.
"""

from __future__ import annotations

from eyas.chat.chat import Chat
from eyas.chat.tokenizer import TextStream, encoded

__all__ = ["Chat", "TextStream", "encoded"]
