"""Whether two arms did the same work, from what their servers told and what they answered. Pure
functions.

    engine      who serves, in which version, on which host     not the same: a ratio of engines or hosts, said
    precision   what the servers say they compute in            not the same: not comparable
    prompts     tokens of one prompt                            not the same: another tokenizer or template; not comparable
    counts      who counted the answers' tokens                 not the same: not comparable
    lengths     tokens of all answers                           more than a tenth apart: not comparable
    answers     greedy ones begin with the same characters      for less than half of the prompts: another model

What is not comparable is refused, unless the user insists; then the report says it. What merely
differs is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eyas.bench.server import Facts
from eyas.bench.stream import Reply
from eyas.errors import MismatchError

LENGTHS_APART = 0.1
BEGINNING = 16  # characters
ALIKE = 0.5
ENOUGH = 4  # pairs of greedy answers, to say that the models differ


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which an arm is not like its baseline; `refused` unless the user insists."""

    what: str
    text: str
    refused: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def of_servers(baseline: Facts, arm: Facts) -> list[Difference]:
    """What two servers tell that differs, or do not tell."""
    if baseline.url == arm.url:
        return []
    return [*_engines(baseline, arm), *_precisions(baseline, arm)]


def _engines(baseline: Facts, arm: Facts) -> Iterable[Difference]:
    if baseline.engine != arm.engine:
        what = f"{baseline.engine} against {arm.engine}: the ratio of two engines or hosts"
        yield Difference(
            "engine", f"{what}, which is no speed-up by speculation and may be above tau", False
        )


def _precisions(baseline: Facts, arm: Facts) -> Iterable[Difference]:
    ours, theirs = baseline.precision, arm.precision
    if ours is None or theirs is None:
        silent = " and ".join(
            sorted({one.kind for one in (baseline, arm) if one.precision is None})
        )
        yield Difference(
            "precision", f"not told by {silent}: whether both have the same is not known", False
        )
    elif ours != theirs:
        yield Difference("precision", f"{ours} against {theirs}", True)


def of_answers(pairs: Sequence[tuple[Reply, Reply]], is_greedy: bool) -> list[Difference]:
    """What differs in the answers of two arms to the same prompts."""
    if not pairs:
        return []
    return [
        *_prompts(pairs),
        *_counters(pairs),
        *_lengths(pairs),
        *(_texts(pairs) if is_greedy else ()),
    ]


def _prompts(pairs: Sequence[tuple[Reply, Reply]]) -> Iterable[Difference]:
    counted = [
        (a.num_prompt_tokens, b.num_prompt_tokens)
        for a, b in pairs
        if a.num_prompt_tokens and b.num_prompt_tokens
    ]
    others = [pair for pair in counted if pair[0] != pair[1]]
    if others:
        what = (
            f"{len(others)} of {len(counted)} prompts are not of the same length, e.g. "
            f"{others[0][0]} and {others[0][1]} tokens"
        )
        yield Difference("prompts", f"{what}: another tokenizer or chat template", True)


def _counters(pairs: Sequence[tuple[Reply, Reply]]) -> Iterable[Difference]:
    ways = [
        sorted({reply.counted_by or "nobody" for reply in side})
        for side in zip(*pairs, strict=True)
    ]
    if ways[0] != ways[1]:
        yield Difference(
            "counts",
            f"tokens are counted by {', '.join(ways[0])} and by {', '.join(ways[1])}",
            True,
        )


def _lengths(pairs: Sequence[tuple[Reply, Reply]]) -> Iterable[Difference]:
    ours, theirs = (
        sum(reply.num_output_tokens for reply in side) for side in zip(*pairs, strict=True)
    )
    apart = abs(ours - theirs) / max(ours, theirs, 1)
    if ours != theirs:
        yield Difference(
            "lengths", f"{ours:,} and {theirs:,} tokens of answers", apart > LENGTHS_APART
        )


def _texts(pairs: Sequence[tuple[Reply, Reply]]) -> Iterable[Difference]:
    others = [pair for pair in pairs if pair[0].text != pair[1].text]
    if not others:
        return
    alike = sum(one.text[:BEGINNING] == other.text[:BEGINNING] for one, other in pairs) / len(pairs)
    what = (
        f"{len(others)} of {len(pairs)} greedy answers are not the same, {1 - alike:.0%} from "
        "their first words on"
    )
    yield Difference("answers", what, alike < ALIKE and len(pairs) >= ENOUGH)


def check_comparable(
    arm: str, baseline: str, differences: Iterable[Difference], compare_anyway: bool
) -> None:
    """Raises MismatchError for a difference that is refused, unless the user insists."""
    refused = [f"{one.what}: {one.text}" for one in differences if one.refused]
    if refused and not compare_anyway:
        raise MismatchError(
            f"{arm!r} and {baseline!r} did not do the same work; " + "; ".join(refused),
            "serve both alike, or give --compare-anyway: the report will say what differs",
        )
