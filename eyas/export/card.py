"""The model card of an exported head: what it is for, how to serve it, what it was made from. Pure text, from values.

Knows the launch commands of SGLang and vLLM. Names no folder of the machine that made the head, except the target's in the
commands where the target has no other name.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.artifact import Manifest
from eyas.lineage import Source, sources, stages
from eyas.model.checkpoint import FLAGS
from eyas.model.config import HeadConfig


@dataclass(frozen=True, slots=True)
class Launch:
    """How an engine is to start: the target as the engine finds it, and the size of drafts (the root counted)."""

    target: str
    num_draft_steps: int
    tree_topk: int
    num_verify_tokens: int

    @property
    def title(self) -> str:
        """The target's name for people: of a folder, its last part."""
        return Path(self.target).name if Path(self.target).is_absolute() else self.target

    @property
    def sglang(self) -> str:
        """SGLang's command, in the folder of the card. A chain verifies its drafts and the root."""
        num_verify_tokens = self.num_verify_tokens if self.tree_topk > 1 else self.num_draft_steps + 1
        options = {
            "--model-path": self.target,
            "--speculative-algorithm": "EAGLE3",
            "--speculative-draft-model-path": "./sglang",
            "--speculative-num-steps": self.num_draft_steps,
            "--speculative-eagle-topk": self.tree_topk,
            "--speculative-num-draft-tokens": num_verify_tokens,
        }
        lines = ["python -m sglang.launch_server", *(f"{name} {shlex.quote(str(value))}" for name, value in options.items())]
        return " \\\n    ".join(lines)

    @property
    def vllm(self) -> str:
        """vLLM's command, in the folder of the card. vLLM drafts chains only."""
        speculation = {"method": "eagle3", "model": "./vllm", "num_speculative_tokens": self.num_draft_steps}
        return f"vllm serve {shlex.quote(self.target)} \\\n    --speculative-config {shlex.quote(json.dumps(speculation))}"


@dataclass(frozen=True, slots=True)
class Card:
    """What the card is written from. measured: eval.json, if there is one; hashes: SHA-256 by file name."""

    launch: Launch
    head: HeadConfig
    num_parameters: int
    dtype: str
    made: Manifest
    measured: Mapping[str, Any] | None
    hashes: Mapping[str, str]

    def text(self) -> str:
        """The card as Markdown."""
        parts = (self._front(), self._serving(), self._head(), self._measured(), self._training(), self._data(), self._files())
        return "\n".join("\n".join(lines) + "\n" for lines in parts)

    def _front(self) -> Iterator[str]:
        yield from (
            "---",
            f"base_model: {json.dumps(self.launch.title)}",
            "tags:",
            "- eagle3",
            "- speculative-decoding",
            "---",
            "",
        )
        yield f"# EAGLE-3 draft head for {self.launch.title}"
        yield ""
        yield "It proposes tokens that the target verifies: decoding is faster and every output stays the target's own."
        yield "It works with this target only, down to the weights: `eyas check` compares."

    def _serving(self) -> Iterator[str]:
        forms = {"sglang": ("SGLang", self.launch.sglang), "vllm": ("vLLM", self.launch.vllm)}
        yield "## Serving"
        for form, (engine, command) in forms.items():
            if any(name.startswith(f"{form}/") for name in self.hashes):
                yield from ("", f"{engine}, in this folder:", "", "```sh", command, "```")
        yield ""
        yield "Each folder is for its engine: the two read the list of tapped layers by different conventions."

    def _head(self) -> Iterator[str]:
        head = self.head
        rows = {
            "parameters": f"{self.num_parameters:,}",
            "precision": self.dtype,
            "draft vocabulary": f"{head.draft_vocab_size:,} of {head.vocab_size:,} tokens",
            "taps": f"outputs of the target's layers {', '.join(map(str, head.taps))} (the first is 0)",
            "context": f"{head.max_position_embeddings:,} tokens",
            "norms": ", ".join(flag for flag in FLAGS if getattr(head, flag)) or "as in EAGLE",
            "target's lm_head, SHA-256": f"`{head.target_lm_head_sha256}`",
        }
        yield from ("## Head", "", *_table(rows))

    def _measured(self) -> Iterator[str]:
        yield from ("## Measured", "")
        if self.measured is None:
            yield "Not measured before export: `eyas eval` measures tau on held-out answers, `eyas bench` a running server."
            return
        yield f"tau {self.measured['tau']:.2f} on held-out answers (emitted tokens per round, the target's own included)."
        if "assumes" in self.measured:
            yield f"It assumes {self.measured['assumes']}."
        for name in ("acceptance_by_position", "accept_hist"):
            if name in self.measured:
                values = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in self.measured[name])
                yield f"\n{name}: {', '.join(values)}"

    def _training(self) -> Iterator[str]:
        yield from ("## Training", "", *_table(self.made.config), "", "Stages that led here, first to last:", "")
        for stage in stages(self.made):
            counts = ", ".join(f"{name} {count:,}" for name, count in stage.counts.items())
            yield f"- {stage.stage} `{stage.identity}`{': ' if counts else ''}{counts}"

    def _data(self) -> Iterator[str]:
        found = sources(self.made)
        yield from ("## Data", "")
        if not found:
            yield "The lineage of this head names no source."
            return
        yield "The target answered prompts from these sources; only their user turns were used."
        yield ""
        for source in found:
            yield _source_line(source)
            yield from (f"  - {line}" for line in source.terms())

    def _files(self) -> Iterator[str]:
        yield from (
            "## Files",
            "",
            *_table({f"`{name}`": f"`{digest}`" for name, digest in self.hashes.items()}, ("file", "SHA-256")),
        )


def _source_line(source: Source) -> str:
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in source.dropped.items())
    rows = f"; {source.num_kept:,} of {source.num_rows:,} rows kept" if source.num_rows else ""
    return f"- {source.name}: {source.licence}{rows}{f' (dropped: {dropped})' if dropped else ''}; SHA-256 `{source.sha256}`"


def _table(rows: Mapping[str, Any], titles: tuple[str, str] = ("", "")) -> list[str]:
    return [f"| {titles[0]} | {titles[1]} |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
