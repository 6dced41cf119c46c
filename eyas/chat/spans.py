"""The first way to a mask: the characters of the answer in the rendered text, then the tokens that
stand for them.

Knows texts and offsets. Compares no tokens with tokens: that is the second way (prefixes).

    whole     <turn>user\nHi<end>\n<turn>assistant\n<thoughts></thoughts>Hello!<end>\n
    prompt    `------------------------------------'
    opening                                         `-------------------'
    answer                                                               `----'
    end token                                                                  `---'
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from eyas.chat.tokenizer import RenderedText, TemplateProblem
from eyas.chat.turn import TokenizedText, Wording


@dataclass(frozen=True, slots=True)
class Thoughts:
    """A block of thoughts with which the generation prompt ends: `text`, from its tag `begin`.

    is_open: the target writes its thoughts first, and their closing tag `end`. instead: what
    rendered answers have in the block's place.
    """

    text: str
    begin: str
    end: str
    is_open: bool
    instead: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """What the template puts around an answer: opening after the prompt (an empty thinking block,
    or nothing), closing before the end token (a space, or nothing), all that follows an answer
    (tail: closing, end token, perhaps a line break), the texts of the tokens that may end it, and
    the thoughts that its generation prompt begins.

    channels: of a target that opens its answers with control tokens, what stands before thoughts
    and what between them and the answer. moved: words that a prompt has before the assistant's
    header, and rendered conversations at their end; and that header. next_turn: the token that ends
    an answer, where it is the first of the next turn and the template writes it only there.
    """

    opening: str
    closing: str
    tail: str
    ends: tuple[str, ...]
    thoughts: Thoughts | None = None
    channels: tuple[str, str] | None = None
    moved: tuple[str, str] | None = None
    next_turn: str = ""


def mask_by_spans(
    prompt: RenderedText,
    whole: RenderedText,
    encoded: TokenizedText,
    wording: Wording,
    frame: Frame,
) -> list[bool]:
    """Mask [T] of the answer that ends `whole`, and of its end token.

    prompt: the text that the target continues. encoded: the tokens of `whole`, without its shields.
    Raises TemplateProblem when the text does not hold the answer in its place as the target wrote
    it, or when a token stands for the answer and for more.
    """
    if not whole.text.startswith(prompt.text):
        raise TemplateProblem("rewrites the prompt once an answer follows")
    begin = len(prompt.text)
    end = min(
        (at for name in frame.ends if (at := whole.text.find(name, begin)) >= 0), default=None
    )
    if end is None:
        raise TemplateProblem(
            "does not end an answer with a token that ends the target's output (eos_token_id)"
        )
    start, stop = _answer(whole.text[begin:end], wording, frame)
    start, stop, end = (_unshielded(whole, begin + at) for at in (start, stop, end - begin))
    return _tokens_of(encoded, start, stop, end)


def _answer(body: str, wording: Wording, frame: Frame) -> tuple[int, int]:
    """Where the answer is in what lies between the prompt and the end token."""
    if not wording.is_within(body):
        raise TemplateProblem(
            "leaves out reasoning or a tool call of an answer",
            "give the answer as the target wrote it, all of it in `content`",
        )
    if wording.text is None:
        start = (
            0 if wording.has_reasoning or not body.startswith(frame.opening) else len(frame.opening)
        )
        if wording.has_reasoning and frame.closing:
            raise TemplateProblem("puts white space of its own behind an answer with reasoning")
        if not body.endswith(frame.closing):
            raise TemplateProblem("does not render an answer as the target wrote it")
        return start, len(body) - len(frame.closing)
    # right after the prompt, or after what the template opens every answer with
    for opening in ("", frame.opening):
        if body == opening + wording.text + frame.closing:
            if (opening[-1:].isspace() and wording.text[:1].isspace()) or (
                frame.closing and wording.text[-1:].isspace()
            ):
                raise TemplateProblem("puts its own white space beside that of an answer")
            return len(opening), len(opening) + len(wording.text)
    raise TemplateProblem("does not render an answer as the target wrote it")


def _unshielded(rendered: RenderedText, at: int) -> int:
    return at - rendered.text.count(rendered.shield, 0, at) if rendered.shield else at


def _tokens_of(encoded: TokenizedText, start: int, stop: int, end: int) -> list[bool]:
    """The tokens that overlap characters [start, stop), and the one that starts at `end`."""
    mask = [False] * len(encoded.ids)
    spans = encoded.offsets
    at = bisect_left(spans, start, key=lambda span: span[1])
    while at < len(spans) and spans[at][1] <= start:
        at += 1
    if at < len(spans) and encoded.text[spans[at][0] : start].strip():
        raise TemplateProblem("joins the answer and what is put before it into one token")
    while at < len(spans) and spans[at][0] < stop:
        if spans[at][1] > stop:
            raise TemplateProblem("joins the answer and the end of its turn into one token")
        mask[at] = True
        at += 1
    while at < len(spans) and spans[at][0] < end:
        at += 1
    if at == len(spans) or spans[at][0] != end:
        raise TemplateProblem("joins the answer and the end of its turn into one token")
    mask[at] = True
    return mask
