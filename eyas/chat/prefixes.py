"""The second way to a mask: the conversation's tokens up to the answer, its tokens with it, and
what lies between them.

Knows tokens and how they are spelled. Looks at no character offsets and at no rendered text: that
is the first way (spans).

    prompt    [p0 p1 p2 p3]
    ids       [p0 p1 p2 p3 o0 a0 a1 a2 e n]     e: the first end token after the prompt
    spelled                  `------'           the fewest tokens before e that spell the answer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eyas.chat.tokenizer import TemplateProblem

SpellTokens = Callable[[list[int]], str]
FindAnswer = Callable[[list[int]], tuple[int, int]]


def mask_by_prefixes(
    prompt: list[int], ids: list[int], ends: Sequence[int], find: FindAnswer
) -> list[bool]:
    """Mask [T] of the answer that ends the conversation `ids`, and of its end token.

    prompt: the tokens that the target continues. find: where the answer is among the tokens after
    the prompt and before its end token. Raises TemplateProblem when `ids` do not begin with the
    prompt's tokens, or have no end token after them.
    """
    first = len(prompt)
    if ids[:first] != prompt:
        raise TemplateProblem("joins the prompt and the answer into one token")
    end = next((at for at in range(first, len(ids)) if ids[at] in ends), None)
    if end is None:
        raise TemplateProblem(
            "does not end an answer with a token that ends the target's output (eos_token_id)"
        )
    start, stop = find(ids[first:end])
    return [first + start <= at < first + stop or at == end for at in range(len(ids))]


def by_spelling(answers: tuple[str, ...], spell: SpellTokens) -> FindAnswer:
    """Finds the fewest tokens that spell one of `answers` (as written, and as the tokenizer
    normalizes it), with nothing but white space after them. A token that spells the answer's
    beginning and the end of what is before it counts too.
    """

    def find(ids: list[int]) -> tuple[int, int]:
        stop = len(ids)
        while not spell(ids[:stop]).endswith(answers):
            stop -= 1
            if stop < 0 or spell(ids[stop:]).strip():
                raise TemplateProblem("does not render an answer as the target wrote it")
        start = _where_it_begins(ids, stop, answers, spell)
        return (_last_that_spells(ids, stop, answers, spell) if start is None else start), stop

    return find


def _where_it_begins(
    ids: list[int], stop: int, answers: tuple[str, ...], spell: SpellTokens
) -> int | None:
    """The last place between two tokens where what is before it and an answer spell the whole; None
    inside of a token.
    """
    text, found = spell(ids[:stop]), None
    for start in range(stop + 1):
        before = spell(ids[:start])
        if any(before + answer == text for answer in answers):
            found = start
        if len(before) > len(text) - min(map(len, answers)):
            break
    return found


def _last_that_spells(
    ids: list[int], stop: int, answers: tuple[str, ...], spell: SpellTokens
) -> int:
    """The last start from which tokens to `stop` end in an answer: one token holds its beginning
    and what is before it.
    """
    start = 0
    while start < stop and spell(ids[start + 1 : stop]).endswith(answers):
        start += 1
    return start


def by_others(others: Sequence[Sequence[int]], spell: SpellTokens) -> FindAnswer:
    """Finds what lies between the beginning and the end that two other answers share; for answers
    whose text the template makes up.

    others: the tokens after the prompt and before the end token when an answer with no letter in
    common with the other is in this one's place. spell: the text of tokens behind the prompt. A
    beginning that this answer does not have (another channel) is not the template's.
    """
    one, other = map(spell, map(list, others))
    before, after = _num_common(one, other), _num_common(one[::-1], other[::-1])
    opening, closing = one[:before], one[len(one) - after :]

    def find(ids: list[int]) -> tuple[int, int]:
        text, start, stop = spell(ids), 0, len(ids)
        if text.startswith(opening):
            while start < stop and len(spell(ids[: start + 1])) <= len(opening):
                start += 1
        if not text.endswith(closing):
            raise TemplateProblem("does not render an answer as the target wrote it")
        while closing and len(spell(ids[:stop])) > len(text) - len(closing):
            stop -= 1
        if len(spell(ids[:stop])) != len(text) - len(closing):
            raise TemplateProblem("joins the answer and the end of its turn into one token")
        return start, stop

    return find


def everything(ids: list[int]) -> tuple[int, int]:
    """Finds all of the tokens: for answers with their own reasoning, before which a template puts
    nothing.
    """
    return 0, len(ids)


def _num_common(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
