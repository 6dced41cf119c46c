"""A server's facts and counters over HTTP, and whether two arms did the same work.

Facts are in eyas' model card and OpenAPI document, SGLang's /server_info, llama.cpp's card (`meta`)
and vLLM's /version, which has no precision. Counters of speculation have the same names with other
prefixes in eyas, vLLM and llama.cpp, and other names in SGLang (`drafts_of`).

Differences between two arms are refused, unless the user insists, or only reported:

    engine      which engine, version and host      reported: a ratio of engines or hosts
    precision   what the servers compute in         refused where both report it
    prompts     tokens of one prompt                refused: another tokenizer or template
    counts      what counted the answers' tokens    refused
    lengths     tokens of all answers               refused where more than a tenth apart
    answers     greedy ones begin alike             refused below half of the prompts: another model
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from eyas.bench.stream import Reply
from eyas.client import KEY_VARIABLE, Client, RequestFailure
from eyas.errors import EyasError, MismatchError, MissingInputError
from eyas.tau import acceptance_of_positions

KINDS = {"eyas": "eyas", "vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}  # by owned_by
DTYPES = {
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "float": "float32",
    "f32": "float32",
}
# by name without prefix; of accepted tokens per position with that label: "..._total|0"
Counters = dict[str, float]
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total|"
SIZES = ("spec_num_steps", "spec_num_draft_tokens")  # SGLang's, of each of its schedulers
REQUESTS = ("request_success_total", "num_requests_total")  # finished answers; SGLang's name
_SAMPLE = re.compile(r"^(?:\w+:)?(\w+)(?:\{(.*)\})? (\S+)(?: \d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# every answer raises one of them; the second is llama.cpp's name of the first
ONLY_UP = ("generation_tokens_total", "tokens_predicted_total", *REQUESTS)
HALVES = {"bfloat16", "float16"}  # SGLang's "auto" is one of them
SETTLE_S = 0.05  # servers count an answer after its last byte
LENGTHS_APART = 0.1
BEGINNING = 16  # characters
ALIKE = 0.5
ENOUGH = 4  # pairs of greedy answers, to say that the models differ


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server; a fact it does not report is None."""

    url: str
    model: str
    kind: str
    version: str | None = None
    precision: str | None = None  # dtype, and the quantisation after a slash
    max_length: int | None = None
    has_head: bool | None = None
    speculation: str | None = None  # SGLang's algorithm and its sizes
    target_fingerprint: str | None = None

    @property
    def engine(self) -> str:
        """Engine, version and host."""
        return (
            f"{' '.join(filter(None, (self.kind, self.version)))} at {urlsplit(self.url).hostname}"
        )


async def ask_facts(client: Client) -> ServerFacts:
    """Facts of a server and its first model. Raises MissingInputError (no server), EyasError."""
    try:
        card, *_ = await client.cards()
    except RequestFailure as failure:
        if failure.kind == "lost":
            hint = "start it first, e.g. `eyas serve`, or check the address"
            raise MissingInputError(f"no server at {client.url}: {failure.what}", hint) from failure
        hint = f"give an OpenAI-compatible server, and a key that it asks for in {KEY_VARIABLE}"
        what = f"{client.url}/v1/models does not list a model: {failure.what}"
        raise EyasError(what, hint) from failure
    kind = KINDS.get(str(card.get("owned_by")), "other")
    own: Mapping[str, Any] = card.get("eyas") or {}
    meta: Mapping[str, Any] = card.get("meta") or {}
    info = (
        {}
        if own or meta
        else _object(await client.page("/server_info") or await client.page("/get_server_info"))
    )
    version = info.get("version")
    if kind == "eyas":
        version = (_object(await client.page("/openapi.json")).get("info") or {}).get("version")
    elif not version:
        version = _object(await client.page("/version")).get("version")
    head = own.get("has_head", info.get("speculative_algorithm") is not None if info else None)
    length = card.get("max_model_len") or meta.get("n_ctx") or info.get("context_length")
    return ServerFacts(
        url=client.url,
        model=card["id"],
        kind=kind,
        version=version,
        precision=precision(own, meta, info),
        max_length=length,
        has_head=head,
        speculation=speculation_of(info),
        target_fingerprint=own.get("target_fingerprint"),
    )


def speculation_of(info: Mapping[str, Any]) -> str | None:
    """Algorithm and sizes, from SGLang's server_info."""
    if not info.get("speculative_algorithm"):
        return None
    sizes = {"num_steps": "steps", "eagle_topk": "top-k", "num_draft_tokens": "draft tokens"}
    found = [
        f"{words} {info[f'speculative_{name}']}"
        for name, words in sizes.items()
        if info.get(f"speculative_{name}")
    ]
    return ", ".join([str(info["speculative_algorithm"]), *found])


def precision(
    own: Mapping[str, Any], meta: Mapping[str, Any], info: Mapping[str, Any]
) -> str | None:
    """The precision in eyas' part of a model card, in llama.cpp's, or in SGLang's server_info."""
    dtype = (
        str(own.get("dtype") or meta.get("ftype") or info.get("dtype") or "")
        .lower()
        .removeprefix("torch.")
    )
    if dtype in ("", "auto") and meta.get("size") and meta.get("n_params"):
        dtype = f"{8 * meta['size'] / meta['n_params']:.1f} bits a weight"
    if not dtype:
        return None
    quantized = own.get("quantization") or info.get("quantization")
    return "/".join(str(part) for part in (DTYPES.get(dtype, dtype), quantized) if part)


async def read_counters(client: Client) -> Counters:
    """The server's counters; empty without /metrics or an answer."""
    return parse_metrics(await client.page("/metrics"))


def parse_metrics(page: str) -> Counters:
    """Counters from Prometheus' text format, added up over all labels but the position; of SIZES
    the largest.
    """
    found: Counters = {}
    for line in page.splitlines():
        if not (sample := _SAMPLE.match(line)):
            continue
        name, labels, value = sample.groups()
        kept = [text for label, text in _LABEL.findall(labels or "") if label == "position"]
        key = "|".join([name, *kept])
        try:
            number = float(value)
        except ValueError:
            continue
        before = found.get(key, 0.0)
        found[key] = max(before, number) if name in SIZES else before + number
    return found


def is_restarted(before: Counters, after: Counters) -> bool:
    """Whether counters began anew between two readings."""
    return any(after.get(name, 0.0) < before.get(name, 0.0) for name in ONLY_UP)


def counted_between(before: Counters, after: Counters) -> Counters:
    """Counts from one reading to the next, or since a restart; gauges (no `_total`) as at the end.
    Empty where a reading failed.
    """
    if not before or not after:
        return {}
    if is_restarted(before, after):
        before = {}
    return {
        name: value - before.get(name, 0.0) if "_total" in name else value
        for name, value in after.items()
    }


def add_counters(one: Counters, other: Counters) -> Counters:
    """The sum of two stretches; of gauges the later."""
    summed = {
        name: value + one.get(name, 0.0) if "_total" in name else value
        for name, value in other.items()
    }
    return {**one, **summed}


def rounds_of(counted: Counters) -> dict[str, Any]:
    """The figures of a stretch's rounds, as far as counters give them.

    nodes_mean: judged drafts per round; 0: not known. num_draft_steps: counted positions; eyas
    counts those that accepted at all.
    """
    drafts, accepted, nodes = drafts_of(counted)
    found: dict[str, Any] = {}
    if drafts > 0:
        found |= {"num_rounds": drafts, "tau": 1 + accepted / drafts, "nodes_mean": nodes / drafts}
        positions = [key.removeprefix(PER_POSITION) for key in counted if PER_POSITION in key]
        by_position = [counted[PER_POSITION + one] for one in sorted(positions, key=float)]
        found["acceptance_by_position"] = acceptance_of_positions(drafts, by_position)
        found["num_draft_steps"] = int(counted.get("spec_num_steps", 0)) or len(by_position)
    elif (
        "spec_decode_num_drafts_total" not in counted and counted.get("spec_accept_length", 0.0) > 0
    ):
        found["tau"] = counted["spec_accept_length"]
    return found


def num_ended(counted: Counters) -> float:
    """Finished answers."""
    return sum(counted.get(name, 0.0) for name in REQUESTS)


def drafts_of(counted: Counters) -> tuple[float, float, float]:
    """Rounds with drafts, accepted drafts, judged drafts.

    SGLang counts rounds and tokens when an answer ends: one token of the prefill, one of the target
    a round, and accepted drafts. Drafts beyond the end are not counted, so tau is slightly low. The
    gauge of the drafts' size is 0 until a round was logged.
    """
    if (rounds := counted.get("spec_verify_calls_total", 0.0)) > 0:
        of_rounds = counted.get("generation_tokens_total", 0.0) - num_ended(counted)
        nodes = max(counted.get("spec_num_draft_tokens", 0.0) - 1, 0.0)  # the root counted there
        return rounds, max(of_rounds - rounds, 0.0), nodes * rounds
    names = ("drafts", "accepted_tokens", "draft_tokens")
    drafts, accepted, nodes = (counted.get(f"spec_decode_num_{what}_total", 0.0) for what in names)
    return drafts, accepted, nodes


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class Difference:
    what: str
    text: str
    refused: bool


def differences_of_servers(baseline: ServerFacts, arm: ServerFacts) -> list[Difference]:
    """Differences of two servers' facts, and facts that are not known."""
    if baseline.url == arm.url:
        return []
    found = []
    if baseline.engine != arm.engine:
        what = f"{baseline.engine} against {arm.engine}: the ratio of two engines or hosts"
        what += ", which is no speed-up by speculation and may be above tau"
        found.append(Difference("engine", what, False))
    ours, theirs = baseline.precision, arm.precision
    if ours is None or theirs is None:
        silent = sorted({one.kind for one in (baseline, arm) if one.precision is None})
        what = f"not told by {' and '.join(silent)}: whether both have the same is not known"
        found.append(Difference("precision", what, False))
    elif ours != theirs and {ours, theirs} - HALVES != {"auto"}:
        found.append(Difference("precision", f"{ours} against {theirs}", True))
    return found


def differences_of_answers(
    pairs: Sequence[tuple[Reply, Reply]], is_greedy: bool
) -> list[Difference]:
    """Differences of two arms' answers to the same prompts."""
    if not pairs:
        return []
    found = []
    counted = [(one.num_prompt_tokens, other.num_prompt_tokens) for one, other in pairs]
    counted = [pair for pair in counted if all(pair)]
    if others := [pair for pair in counted if pair[0] != pair[1]]:
        what = f"{len(others)} of {len(counted)} prompts are not of the same length, e.g. "
        what += "{} and {} tokens: another tokenizer or chat template".format(*others[0])
        found.append(Difference("prompts", what, True))
    sides = list(zip(*pairs, strict=True))
    ways = [sorted({reply.counted_by or "none" for reply in side}) for side in sides]
    if ways[0] != ways[1]:
        what = f"tokens are counted by {', '.join(ways[0])} and by {', '.join(ways[1])}"
        found.append(Difference("counts", what, True))
    ours, theirs = (sum(reply.num_output_tokens for reply in side) for side in sides)
    if ours != theirs:
        is_far = abs(ours - theirs) / max(ours, theirs) > LENGTHS_APART
        found.append(Difference("lengths", f"{ours:,} and {theirs:,} tokens of answers", is_far))
    num_others = sum(one.text != other.text for one, other in pairs)
    if is_greedy and num_others:
        begin_alike = sum(one.text[:BEGINNING] == other.text[:BEGINNING] for one, other in pairs)
        alike = begin_alike / len(pairs)
        what = (
            f"{num_others} of {len(pairs)} greedy answers are not the same, {1 - alike:.0%} from "
        )
        what += "their first words on"
        found.append(Difference("answers", what, alike < ALIKE and len(pairs) >= ENOUGH))
    return found


def check_comparable(
    arm: str, baseline: str, differences: Iterable[Difference], compare_anyway: bool
) -> None:
    """Raise MismatchError for refused differences, unless the user insists."""
    refused = [f"{one.what}: {one.text}" for one in differences if one.refused]
    if refused and not compare_anyway:
        raise MismatchError(
            f"{arm!r} and {baseline!r} did not do the same work; " + "; ".join(refused),
            "serve both alike, or give --compare-anyway: the report will say what differs",
        )
