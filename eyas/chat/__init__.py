"""The target's tokenizer and chat template: messages to tokens, tokens to text. The only package
that knows role tokens, which it reads from the template.
"""

from eyas.chat.chat import Chat
from eyas.chat.tokenizer import TextStream, encoded

__all__ = ["Chat", "TextStream", "encoded"]
