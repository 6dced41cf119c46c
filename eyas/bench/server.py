"""What a server tells about itself over HTTP: who it is, in what precision it computes, what it
counts. Knows no figure.

All of it is voluntary, and each server tells something else: eyas in its model card, and its
version in its OpenAPI document, SGLang at /server_info, llama.cpp in its model card's `meta`, vLLM
its version and no precision. Counters are read from /metrics, where eyas, vLLM and llama.cpp have
the same names for speculation, each with a prefix of its own; SGLang has a gauge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from eyas.client import KEY_VARIABLE, Client, RequestFailure
from eyas.errors import EyasError, MissingInputError
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
# kinds that take vLLM's field cache_salt, and share no prefix between salts
SALTED = ("eyas", "vllm")
Counters = dict[str, float]  # name without prefix, with the labels in LABELS: "rounds_total|tree"
LABELS = ("position", "kind", "quantile")
_SAMPLE = re.compile(r"^(?:\w+:)?(\w+)(?:\{(.*)\})? (\S+)(?: \d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Facts:
    """One server; a fact that it does not tell is None."""

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
        """Who serves, and on which host: where it is not the same, a ratio of times is no speed-up
        by speculation.
        """
        return (
            f"{' '.join(filter(None, (self.kind, self.version)))} at {urlsplit(self.url).hostname}"
        )

    @property
    def takes_cache_salt(self) -> bool:
        return self.kind in SALTED

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


async def ask_facts(client: Client) -> Facts:
    """Whatever the server tells of itself and of the first model that it lists. Raises
    MissingInputError (no server), EyasError (no model).
    """
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
    version = info.get("version") or await _version(client, kind)
    head = own.get("has_head", info.get("speculative_algorithm") is not None if info else None)
    length = card.get("max_model_len") or meta.get("n_ctx") or info.get("context_length")
    told = (
        precision(own, meta, info),
        length,
        head,
        speculation_of(info),
        own.get("target_fingerprint"),
    )
    return Facts(client.url, card["id"], kind, version, *told)


async def _version(client: Client, kind: str) -> str | None:
    if kind == "eyas":
        return (_object(await client.page("/openapi.json")).get("info") or {}).get("version")
    return _object(await client.page("/version")).get("version")


def speculation_of(info: Mapping[str, Any]) -> str | None:
    """How a server speculates, from SGLang's server_info; None where nothing is told."""
    if not info.get("speculative_algorithm"):
        return None
    sizes = {"num_steps": "steps", "eagle_topk": "top-k", "num_draft_tokens": "draft tokens"}
    told = [
        f"{words} {info[f'speculative_{name}']}"
        for name, words in sizes.items()
        if info.get(f"speculative_{name}")
    ]
    return ", ".join([str(info["speculative_algorithm"]), *told])


def precision(
    own: Mapping[str, Any], meta: Mapping[str, Any], info: Mapping[str, Any]
) -> str | None:
    """From eyas' part of a model card, llama.cpp's, or SGLang's server_info; None where they do not
    tell.
    """
    told = (
        str(own.get("dtype") or meta.get("ftype") or info.get("dtype") or "")
        .lower()
        .removeprefix("torch.")
    )
    if told in ("", "auto") and meta.get("size") and meta.get("n_params"):
        told = f"{8 * meta['size'] / meta['n_params']:.1f} bits a weight"
    if told in ("", "auto"):
        return None
    quantized = own.get("quantization") or info.get("quantization")
    return "/".join(str(part) for part in (DTYPES.get(told, told), quantized) if part)


async def count(client: Client) -> Counters:
    """The server's counters now; empty where it has no /metrics."""
    return parse_metrics(await client.page("/metrics"))


def parse_metrics(page: str) -> Counters:
    """Prometheus' text format; samples that differ in other labels (engines, models) are added up."""
    found: Counters = {}
    for line in page.splitlines():
        if not (sample := _SAMPLE.match(line)):
            continue
        name, labels, value = sample.groups()
        kept = [text for label, text in _LABEL.findall(labels or "") if label in LABELS]
        key = "|".join([name, *kept])
        try:
            found[key] = found.get(key, 0.0) + float(value)
        except ValueError:
            continue
    return found


def difference(before: Counters, after: Counters) -> Counters:
    """What was counted in between; gauges (no `_total`) as they are at the end."""
    return {
        name: value - before.get(name, 0.0) if "_total" in name else value
        for name, value in after.items()
    }


def added(one: Counters, other: Counters) -> Counters:
    """Two differences as one; of gauges the later."""
    summed = {
        name: value + one.get(name, 0.0) if "_total" in name else value
        for name, value in other.items()
    }
    return {**one, **summed}


def speculation(counted: Counters) -> dict[str, Any]:
    """What the counters of a stretch say of its rounds; a figure that they do not say is left out.

    nodes_mean: drafted tokens that the target judged, a sample and round. plain_share: of the
    engine's rounds, those without drafts. predicted_over_real: of the rounds' time.
    nodes_quantiles: of the last rounds, by quantile.
    """
    drafts, accepted = (
        counted.get(f"spec_decode_num_{what}_total", 0.0) for what in ("drafts", "accepted_tokens")
    )
    nodes = counted.get("spec_decode_num_draft_tokens_total", 0.0)
    told: dict[str, Any] = {}
    if drafts > 0:
        told |= {"num_rounds": drafts, "tau": 1 + accepted / drafts, "nodes_mean": nodes / drafts}
        by_position = _series(counted, "spec_decode_num_accepted_tokens_per_pos_total")
        told["acceptance_by_position"] = acceptance_of_positions(drafts, list(by_position.values()))
        if quantiles := _series(counted, "spec_tree_nodes"):
            told["nodes_quantiles"] = {
                str(quantile): value for quantile, value in quantiles.items()
            }
    elif (
        "spec_decode_num_drafts_total" not in counted and counted.get("spec_accept_length", 0.0) > 0
    ):
        told["tau"] = counted["spec_accept_length"]
    plain, tree = (counted.get(f"rounds_total|{kind}", 0.0) for kind in ("plain", "tree"))
    if plain + tree > 0:
        told["plain_share"] = plain / (plain + tree)
    predicted, real = (
        sum(_series(counted, f"round_{what}_seconds_total", float_keys=False).values())
        for what in _TIMES
    )
    if predicted > 0 and real > 0:
        told["predicted_over_real"] = predicted / real
    return told


_TIMES = ("predicted", "real")


def _series(counted: Counters, name: str, float_keys: bool = True) -> dict[Any, float]:
    """The samples of one name by their label, in order."""
    own = {
        key.partition("|")[2]: value
        for key, value in counted.items()
        if key.partition("|")[0] == name
    }
    return dict(
        sorted(
            (float(label) if float_keys else label, value) for label, value in own.items() if label
        )
    )


def _object(text: str) -> dict[str, Any]:
    """A JSON object, or nothing."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
