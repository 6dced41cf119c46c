"""The stage `export`: a trained head in the forms that SGLang and vLLM load, proved equal, with its card.

Knows the order of proofs. Does not know what a form looks like (checkpoint) nor what makes a head bad (check).

    sglang/   config.json  model.safetensors     each read back from where it was written: same config, bit-equal tensors,
    vllm/     config.json  model.safetensors     and equal logits of a replayed sample, before the artifact counts as done
    README.md                                    the model card, with the commands that launch both
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from eyas.artifact import Artifact, Manifest, identity
from eyas.builtin import resolve_target
from eyas.builtin.hub import is_hub_id
from eyas.errors import CorruptError, MismatchError
from eyas.export.card import Card, Launch
from eyas.export.check import check
from eyas.log import Track, quiet
from eyas.model.checkpoint import CONFIG_JSON, HEAD_JSON, Verifier, read_head, refuse, write_head
from eyas.model.config import FAMILIES, HeadConfig, RopeConfig, read_config
from eyas.model.fingerprint import fingerprint
from eyas.model.head import Head, load_head
from eyas.model.vocab import TargetVocabulary
from eyas.model.weights import SINGLE

CARD = "README.md"
REPLAYED_TOKENS, REPLAYED_STEPS = 16, 3


class ExportConfig(BaseModel):
    """Settings of the export stage. target_name: what the engines load the target by, if not its folder; the numbers go
    into the launch commands, num_verify_tokens with the root counted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    forms: tuple[Literal["sglang", "vllm"], ...] = Field(("sglang", "vllm"), min_length=1)
    target_name: str | None = None
    num_draft_steps: int = Field(4, ge=1, le=16)
    tree_topk: int = Field(4, ge=1)
    num_verify_tokens: int = Field(16, ge=2)


def export(
    config: ExportConfig,
    target: str,
    head: Artifact,
    output: Artifact,
    track: Track = quiet,
    evaluation: Artifact | None = None,
) -> Manifest:
    """Write a trained head in each form, prove each, and write its card; `evaluation`, if given, is quoted on the card.

    target: a folder, or "builtin". Raises MismatchError for a head that would serve badly or is another target's, and
    CorruptError when what was written does not read back as it was.
    """
    inputs = {"head": head.manifest("train")}
    if evaluation is not None:
        inputs["eval"] = evaluation_of(evaluation, inputs["head"])
    folder = str(Path(resolve_target(target)).resolve())
    settings = {**config.model_dump(mode="json"), "target_fingerprint": fingerprint(folder)}
    if not output.begin(identity("export", settings, inputs)):
        return output.manifest("export")
    found_by = target if is_hub_id(target) else folder
    launch = Launch(config.target_name or found_by, config.num_draft_steps, config.tree_topk, config.num_verify_tokens)
    with TemporaryDirectory() as scratch:
        source = local_folder(head, (HEAD_JSON, SINGLE), Path(scratch, "head"))
        findings = check(source, folder)
        refuse(head.url, [MismatchError(one.what, one.hint) for one in findings if one.level == "error"])
        shape, tensors = read_head(source)
        dtype = tensors["fc.weight"].dtype
        vocabulary = TargetVocabulary.load(folder, dtype)
        architectures = tuple(read_config(folder).get("architectures") or (f"{FAMILIES[vocabulary.config.family]}ForCausalLM",))
        verifier = Verifier(launch.target, architectures, vocabulary.embed_tokens, config.num_draft_steps)
        hashes = {}
        for number, form in enumerate(config.forms):
            track(number, len(config.forms), form)
            files = {f"{form}/{name}": data for name, data in write_head(shape, tensors, form, verifier).items()}
            for name, data in files.items():
                output.write(name, data)
                hashes[name] = hashlib.sha256(data).hexdigest()
            written = local_folder(output, files, Path(scratch, form)) / form
            prove_equal(source, written, vocabulary)
    track(len(config.forms), len(config.forms))
    num_parameters = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    measured = evaluation.read_json("eval.json") if evaluation is not None else None
    name_of_dtype = str(dtype).removeprefix("torch.")
    card = Card(launch, shape, num_parameters, name_of_dtype, inputs["head"], measured, hashes)
    output.write(CARD, card.text().encode())
    counts = {"forms": len(config.forms), "tensors": len(tensors), "parameters": num_parameters}
    facts = {
        "target": launch.target,
        "commands": {form: getattr(launch, form) for form in config.forms},
        "warnings": [finding.what for finding in findings],
    }
    return output.finish("export", settings, inputs, counts, facts)


def evaluation_of(evaluation: Artifact, head: Manifest) -> Manifest:
    """The manifest of an evaluation, which must be this head's. Raises MismatchError."""
    manifest = evaluation.manifest("eval")
    if manifest.inputs["head"].identity != head.identity:
        raise MismatchError(f"{evaluation.url} measured another head", "run `eyas eval` on the head that is exported")
    return manifest


def local_folder(artifact: Artifact, names: Iterable[str], scratch: Path) -> Path:
    """A folder on this machine's disk with these files of an artifact, each read once to verify it: its own, or a copy."""
    for name in names:
        data, path = artifact.read(name), artifact.local_path(name)
        if path is None:
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_bytes(data)
    own = artifact.local_path(CONFIG_JSON)
    return scratch if own is None else Path(own).parent


def prove_equal(source: Path, written: Path, vocabulary: TargetVocabulary) -> None:
    """The same head in two folders: config, every tensor bit by bit, and the logits of a replay. Raises CorruptError."""
    (config, tensors), (config_back, tensors_back) = read_head(source), read_head(written)
    same = as_written(config) == as_written(config_back) and tensors.keys() == tensors_back.keys()
    if not same or not all(bit_equal(tensor, tensors_back[name]) for name, tensor in tensors.items()):
        raise CorruptError(f"{written} does not read back as {source}", "check the disk or store, and export again")
    embed_tokens, lm_head = vocabulary.embed_tokens.float(), vocabulary.lm_head
    ours, theirs = (load_head(folder, target_lm_head=lm_head) for folder in (source, written))
    if not torch.equal(replay(ours, embed_tokens), replay(theirs, embed_tokens)):
        raise CorruptError(f"{written} gives other logits than {source}", "check the disk or store, and export again")


def as_written(config: HeadConfig) -> HeadConfig:
    """The config without what no form writes: parameters of a rope scaling that is not in use."""
    return config.model_copy(update={"rope": RopeConfig.from_hf(config.rope.to_hf())})


def bit_equal(one: Tensor, other: Tensor) -> bool:
    """Equal dtype, shape and values; the tensors hold no NaN, or `check` would have said so."""
    return one.dtype == other.dtype and torch.equal(one, other)


@torch.inference_mode()
def replay(head: Head, embed_tokens_VH: Tensor) -> Tensor:
    """Logits [REPLAYED_TOKENS + REPLAYED_STEPS - 1, W] of a fixed made-up sample: all its slots, then drafts of its last.

    Features are normal draws of a fixed seed: what is proved is that two heads compute alike, not that they draft well.
    """
    generator = torch.Generator().manual_seed(0)
    embed_tokens_VH = embed_tokens_VH if head.embed_tokens is None else head.embed_tokens
    V, H = embed_tokens_VH.shape
    aux_hidden = torch.randn(1, REPLAYED_TOKENS, 3 * H, generator=generator)
    tokens = torch.randint(V, (1, REPLAYED_TOKENS), generator=generator)
    hidden, past = head(F.embedding(tokens, embed_tokens_VH), head.fuse(aux_hidden))
    logits = [head.logits(hidden)[0]]
    for _ in range(REPLAYED_STEPS - 1):
        drafted = head.target_ids_W[logits[-1][-1:].argmax(-1)]
        hidden, past = head(F.embedding(drafted[None], embed_tokens_VH), hidden[:, -1:], past)
        logits.append(head.logits(hidden)[0])
    return torch.cat(logits)
