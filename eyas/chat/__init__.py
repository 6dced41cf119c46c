"""The target's tokenizer and chat template: messages to tokens, the mask of an answer, tokens to
text.

The only part that knows role tokens, and it learns them from the template. Knows no model and no
stage.

    tokenizer     text to tokens and back; control tokens' names in messages are never obeyed
    template      the chat template: messages to text, on a fixed day; what it must do to be trusted
    spans         the first way to a mask: characters of the rendered text, tokenizer offsets
    prefixes      the second way: tokens of the conversation up to the answer and with it
    chat          Chat: both ways on every answer; refuses what has no exact mask
    picture       tokens in colours for `eyas audit`, and MaskDisagreement, where the ways differ
    supervision   the mask options: which tokens a head learns to draft
"""

from __future__ import annotations

from eyas.chat.chat import Chat
from eyas.chat.picture import MaskDisagreement
from eyas.chat.tokenizer import TextStream, encoded
from eyas.chat.turn import Turn

__all__ = ["Chat", "MaskDisagreement", "TextStream", "Turn", "encoded"]
