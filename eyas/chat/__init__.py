"""The target's tokenizer and chat template: messages to tokens, the mask of an answer, tokens to
text.

The only part that knows role tokens, and it learns them from the template. Knows no model and no
stage.

    tokens      the tokenizer: text to tokens; what people wrote is never read as a control token
    template    the chat template: messages to text, on a fixed day
    spans       the first way to a mask: characters of the rendered text, through the tokenizer's offsets
    prefixes    the second way: tokens of the conversation rendered up to the answer and with it
    chat        Chat: both ways on every answer, and what does not allow of an exact mask refused
    disagreement, picture   what is shown when the two ways differ, and by `eyas audit`
    supervision the mask options: which tokens a head learns to draft
"""

from __future__ import annotations

from eyas.chat.chat import Chat
from eyas.chat.disagreement import MaskDisagreement
from eyas.chat.stream import TextStream
from eyas.chat.turn import Turn

__all__ = ["Chat", "MaskDisagreement", "TextStream", "Turn"]
