"""The eval stage: what a head would have accepted on held-out answers, in chains, before any server runs.

Does not know an engine: the target's features and tokens are on disk already, and `chain` counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from eyas.artifact import Artifact, Manifest, identity
from eyas.builtin import resolve_target
from eyas.errors import EmptyInputError, MismatchError
from eyas.log import Track, quiet
from eyas.model.batch import Batch, plan_batches
from eyas.model.chain import Tally, measure
from eyas.model.config import HeadConfig
from eyas.model.head import Head, load_head
from eyas.model.vocab import TargetVocabulary
from eyas.shards import FeatureMeta, Features

ASSUMES = "greedy answers; a chain of num_draft_steps drafts every round, never cut short; features in the precision served"


class EvalConfig(BaseModel):
    """Settings of the eval stage. batch_tokens counts padding."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_draft_steps: int = Field(7, ge=1, le=16)
    batch_tokens: int = Field(8192, ge=1)


def evaluate(
    config: EvalConfig, target: str, head: Artifact, features: Artifact, output: Artifact, track: Track = quiet
) -> Manifest:
    """Measure a trained head on the `held_out` split of a capture artifact and write eval.json.

    Raises MismatchError when head, features and target do not belong together, EmptyInputError without held-out answers.
    """
    settings = config.model_dump(mode="json")
    inputs = {"head": head.manifest("train"), "features": features.manifest("capture")}
    source = Features(features, "held_out")
    vocabulary = TargetVocabulary.load(resolve_target(target))
    loaded = read_artifact(head)
    check_belongs(loaded.config, source.meta, vocabulary)
    if not output.begin(identity("eval", settings, inputs)):
        return output.manifest("eval")
    by_length = [Tally(steps) for steps in range(1, config.num_draft_steps + 1)]
    by_source: dict[str, Tally] = {}
    totals = [0, 0, 0]
    done = 0
    for samples in source.batches(plan_batches(source.lengths, config.batch_tokens, "eval")):
        measured = measure(loaded, vocabulary, Batch.of(samples), config.num_draft_steps)
        for number, matches in measured.spans:
            own = by_source.setdefault(samples[number].source, Tally(config.num_draft_steps))
            for tally in [*by_length, own]:
                tally.walk(matches)
        counted = (measured.num_tokens, measured.num_draftable, measured.num_greedy)
        totals = [total + count for total, count in zip(totals, counted, strict=True)]
        done += len(samples)
        track(done, len(source), f"tau {by_length[-1].tau:.3f}")
    if by_length[-1].rounds == 0:
        raise EmptyInputError("the held-out features hold no answer of two tokens or more", "capture with more prompts")
    result = summary(by_length, by_source, totals)
    output.write_json("eval.json", result)
    counts = {"samples": len(source), "tokens": totals[0], "rounds": by_length[-1].rounds}
    return output.finish("eval", settings, inputs, counts, {"tau": result["tau"], "accept_hist": result["accept_hist"]})


def read_artifact(head: Artifact) -> Head:
    """A head from its artifact in any store, its files verified."""
    with TemporaryDirectory() as folder:
        for name in head.manifest("train").files:
            if name.endswith((".json", ".safetensors")):
                Path(folder, name).write_bytes(head.read(name))
        return load_head(folder)


def check_belongs(head: HeadConfig, meta: FeatureMeta, vocabulary: TargetVocabulary) -> None:
    """Raise MismatchError unless head, features and target are of one target."""
    ours = vocabulary.config
    if not head.target_lm_head_sha256 == meta.lm_head_sha256 == vocabulary.lm_head_sha256:
        raise MismatchError(
            "head, features and target are not of one target (their hashes of its lm_head differ)",
            "give the target and features that the head was trained on",
        )
    if head.taps != meta.taps or (meta.hidden_size, meta.vocab_size) != (ours.hidden_size, ours.vocab_size):
        raise MismatchError(
            f"the head taps layers {head.taps} of a target of hidden size {head.target_hidden_size}, "
            f"the features are layers {meta.taps} of one of {meta.hidden_size}",
            "capture the features again, or train the head again",
        )


def summary(by_length: Sequence[Tally], by_source: dict[str, Tally], totals: Sequence[int]) -> dict[str, Any]:
    """The content of eval.json. by_length: tallies of 1 .. K draft steps; totals as in Measured."""
    tokens, draftable, greedy = totals
    whole = by_length[-1]
    return {
        "tau": whole.tau,
        "num_draft_steps": len(by_length),
        "accept_hist": whole.accept_hist,
        "acceptance_by_position": whole.acceptance_by_position,
        "tau_by_num_draft_steps": [tally.tau for tally in by_length],
        "tau_by_source": {name: tally.tau for name, tally in sorted(by_source.items())},
        "draft_vocabulary_coverage": draftable / tokens,
        "greedy_share": greedy / tokens,
        "rounds": whole.rounds,
        "tokens": tokens,
        "assumes": ASSUMES,
    }
