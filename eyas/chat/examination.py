"""What a chat template must do to be trusted, tried on made-up conversations before the first real
one.

    it refuses nothing that it must take: one question and one answer (several turns, a system
    prompt: it may) an answer follows the prompt that the target went on from, which ends where the
    target begins to write the answer is there as written, and ends with a token that ends the
    target's output nothing goes on after it; every message is there once, in its order; no BOS is
    doubled

Knows texts and tokens, no conversation of anybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eyas.chat.spans import Frame
from eyas.chat.template import Refused, Template
from eyas.chat.tokens import Tokens, Untrusted
from eyas.chat.turn import Turn

_MARKER = "the-answer-goes-here"
_EARLIER = 'Earlier, I said: it\'s "4" & <b>2</b>'
_AWKWARD = 'It\'s "4" & <b>that</b>:\n\n1.  x > y'


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


PROBES = (
    [_user("What's 2 + 2 & <i>why</i>?"), _assistant(_AWKWARD)],
    [
        _user("First\nquestion"),
        _assistant(_EARLIER),
        _user("Second question"),
        _assistant(_AWKWARD),
    ],
    [{"role": "system", "content": "Be brief."}, _user("Hello"), _assistant(_AWKWARD)],
)


def frame_of(template: Template, tokens: Tokens) -> tuple[Frame, set[str]]:
    """What the template puts around an answer, and the control tokens that it writes. Raises
    Untrusted, Refused.
    """
    prompt = template.render([_user("Hello")], True, None)
    whole = template.render([_user("Hello"), _assistant(_MARKER)], False, None)
    if not whole.startswith(prompt):
        raise Untrusted("rewrites the prompt once an answer follows")
    if whole.count(_MARKER) != 1:
        raise Untrusted("does not render an answer as the target wrote it")
    opening, _, rest = whole[len(prompt) :].partition(_MARKER)
    is_prompted = prompt != template.render([_user("Hello")], False, None)
    if tokens.control.search(opening) or (opening.strip() and not is_prompted):
        raise Untrusted("opens an answer with a role token that its generation prompt lacks")
    if not opening.strip() and "\n" in opening:
        raise Untrusted("breaks the line before an answer, and its generation prompt does not")
    ends = tuple(tokens.ends.values())
    end = min((at for name in ends if (at := rest.find(name)) >= 0), default=None)
    if end is None or rest[:end].strip():
        raise Untrusted(
            "does not end an answer with a token that ends the target's output (eos_token_id)"
        )
    after = rest[end:]
    for name in ends:
        after = after.replace(name, "")
    if after.strip():
        raise Untrusted("goes on after the end of the last answer")
    return Frame(opening, rest[:end], ends), {
        found.group() for found in tokens.control.finditer(whole)
    }


def examine(turn: Callable[[Sequence[Mapping[str, Any]]], Turn], bos_id: int | None) -> None:
    """Try the template on made-up conversations. turn: the mask of an answer, both ways; raises
    Untrusted.
    """
    for probe in PROBES:
        try:
            made = turn(probe)
        except Refused:
            if probe is PROBES[0]:
                raise
            # one question at a time, or no place for a system prompt: rows that have more are
            # refused one by one
            continue
        except Untrusted:
            if probe is not PROBES[2]:
                raise
            # the system prompt is lost, or stands in the last question (Mistral): rows that have
            # one are refused
            continue
        if bos_id is not None and made.ids[:2] == [bos_id, bos_id]:
            raise Untrusted("begins with two BOS tokens")
        if probe is PROBES[1] and _EARLIER not in made.encoded.text:
            raise Untrusted(
                "leaves out earlier answers, or does not render them as the target wrote them"
            )
