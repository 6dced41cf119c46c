"""The stage `export`: a head in the forms that engines load, each proved equal, and its card.

sglang/   config.json  model.safetensors     read back: same config, bit-equal tensors, equal
vllm/     config.json  model.safetensors     logits of a sample; openvino/ if asked for (forms)
README.md                                    the model card, with the commands
eval.json; sglang/, vllm/ prometheus.yaml    with an evaluation, for deploy/prometheus-rules.yaml
speed.json, sglang/adaptive.json             with an engine's costs: the expected speed
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor

from eyas.artifact import Artifact, Manifest, file_identity, identity
from eyas.card import EVAL, figures_of, of_size
from eyas.engine.tree import Speculation
from eyas.errors import ConfigError, CorruptError, MismatchError
from eyas.export.card import CARD, CardOrigin, HeadCard, prometheus_rules
from eyas.export.check import check
from eyas.export.engines import DTYPES, FORMS, EngineForm, Launch, engine_of
from eyas.export.speed import ADAPTIVE, SPEED, read_costs, speed_of
from eyas.families import FAMILIES
from eyas.gguf.configuration import SOURCE as GGUF
from eyas.hub import fetch, is_hub_id, resolve_head, resolve_target
from eyas.lineage import SOURCE, head_manifest
from eyas.log import Track, quiet
from eyas.model.config import HeadConfig, RopeConfig, read_config, refuse
from eyas.model.dialects import EMBED_TOKENS, HEAD_JSON, LM_HEAD
from eyas.model.forms import Verifier
from eyas.model.weights import fingerprint
from eyas.operators.head import Head, head_of, load_head
from eyas.operators.tensors import array_of, read_head, write_head
from eyas.operators.vocab import TargetVocabulary
from eyas.settings import Flag, Settings

REPLAYED_TOKENS, REPLAYED_STEPS = 16, 3
MAX_SHARD_BYTES = 5_000_000_000  # as the hub's tools split weights


class ExportConfig(Settings):
    """Settings of the export stage.

    target_name: what engines load the target by, if not its folder. speculation: drafts in the
    launch commands, as for `eyas serve`; null: the evaluation's first fixed tree, or our engine's.
    licence: for the card.
    """

    forms: tuple[EngineForm, ...] = Field(
        ("sglang", "vllm"), min_length=1, description="engines to write the head for"
    )
    target_name: str | None = None
    speculation: str | None = None
    licence: str | None = None
    costs: Annotated[str | None, Flag()] = Field(
        None, description="cost table of an engine (JSON): expected speed for the card"
    )
    publish: str | None = Field(
        None, description="folder of a head's versions: write a copy to VERSION below it"
    )

    @field_validator("speculation")
    @classmethod
    def _has_a_size(cls, text: str | None) -> str | None:
        if text is not None and Speculation.parse(text).mode != "fixed":
            raise ConfigError(
                f"speculation: {text} has no size for a launch command",
                "give fixed(6,3,12), or a chain such as fixed(4,1,5)",
            )
        return text


def export(
    config: ExportConfig,
    target: str,
    head: Artifact,
    output: Artifact,
    track: Track = quiet,
    evaluation: Artifact | None = None,
) -> Manifest:
    """Write a head in each form, prove each, and write its card, which quotes `evaluation`.

    head: an output of `eyas train`, or a folder with a head in any form. target: a folder, or
    "builtin". Raises MismatchError for a head that would serve badly or is another target's,
    CorruptError for what does not read back, and ConfigError.
    """
    source = Path(resolve_head(head.url))
    inputs = {"head": manifest_of(head, source)}
    if evaluation is not None:
        inputs["eval"] = evaluation.manifest("eval")
        if inputs["eval"].inputs["head"].identity != inputs["head"].identity:
            raise MismatchError(
                f"{evaluation.url} measured another head",
                "run `eyas eval` on the head that is exported",
            )
    elif config.costs:
        raise ConfigError(
            "costs: without an evaluation there is no tau to foretell speed from",
            "give --evaluation, the output of `eyas eval`",
        )
    folder = str(Path(resolve_target(target)).resolve())
    settings = config.model_dump(mode="json", exclude={"publish", "costs"})
    settings |= {"costs_sha256": file_identity(config.costs)} if config.costs else {}
    settings["target_fingerprint"] = fingerprint(folder)
    work = identity("export", settings, inputs)
    if output.is_done_for(work):
        return output.manifest("export")
    findings = check(source, folder, config.forms)
    wrong = [MismatchError(one.what, one.hint) for one in findings if one.level == "error"]
    refuse(head.url, wrong)
    vocabulary = TargetVocabulary.load(folder)
    shape, tensors = served_head(source, vocabulary)
    refuse(
        head.url,
        [fault for form in config.forms for fault in engine_of(form).faults(shape, tensors)],
    )
    measured = evaluation.read_json("eval.json") if evaluation is not None else None
    figures = figures_of(measured or {})
    speed = speed_of(read_costs(config.costs), figures) if config.costs else None
    with output.begun(work) as is_work:  # not before: a refused head leaves no folder
        if not is_work:
            return output.manifest("export")
        trees = [one["speculation"] for one in (measured or {}).get("trees", [])]
        fixed = (one for one in trees if one.startswith("fixed"))
        drafts = Speculation.parse(config.speculation or next(fixed, "fixed"))
        dtype, named = vocabulary.config.dtype, target if is_hub_id(target) else folder
        launch = Launch(
            config.target_name or named,
            drafts.num_draft_steps,
            drafts.tree_topk,
            drafts.num_verify_tokens,
            dtype if dtype in DTYPES else None,
            draft_window=shape.sliding_window,
            taps=shape.taps,
            family=vocabulary.config.model_type,
        )
        family = vocabulary.config.family
        name = FAMILIES[family].name if family in FAMILIES else family
        architectures = read_config(folder).get("architectures") or [f"{name}ForCausalLM"]
        hashes: dict[str, str] = {}
        for number, form in enumerate(config.forms):
            track(number, len(config.forms), form)
            embed_tokens = None
            if engine_of(form).target_embeddings:  # in the head's precision
                embed_tokens = array_of(vocabulary.embed_tokens.to(tensors["fc.weight"].dtype))
            of_target = launch.target, tuple(architectures), embed_tokens
            verifier = Verifier(*of_target, launch.num_draft_steps)
            files = write_head(shape, tensors, form, verifier, MAX_SHARD_BYTES)
            for name, data in files.items():
                output.write(f"{form}/{name}", data)
                hashes[f"{form}/{name}"] = hashlib.sha256(data).hexdigest()
            with TemporaryDirectory() as scratch:
                written = fetch(f"{output.url}/{form}", Path(scratch))
                prove_equal(shape, tensors, written, vocabulary)
            if promised := of_size(figures, str(launch.drafts(form))):
                rules = prometheus_rules(promised, launch.target, version_of(work), form)
                output.write(f"{form}/prometheus.yaml", rules.encode())
        track(len(config.forms), len(config.forms))

        weights = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
        num_parameters = sum(weight.numel() for weight in weights)
        card = HeadCard(
            launch,
            shape,
            num_parameters,
            dtype=str(tensors["fc.weight"].dtype).removeprefix("torch."),
            manifest=inputs["head"],
            measured=measured,
            hashes=hashes,
            licence=config.licence,
            origin=origin_of(head) if inputs["head"].stage == SOURCE else CardOrigin(),
            gguf=read_config(folder).get(GGUF),
            speed=speed,
        )
        if speed:
            output.write_json(SPEED, speed)
            if speed["settings"] and speed["engine"].lower() == "sglang":
                output.write_json(ADAPTIVE, speed["settings"])
        output.write(CARD, card.text().encode())
        if measured is not None:  # for `eyas watch`, since the card rounds
            output.write_json(EVAL, measured)
        counts = {"forms": len(config.forms), "tensors": len(tensors), "parameters": num_parameters}
        facts = {
            "target": launch.target,
            "commands": {
                form: launch.command(form) for form in config.forms if launch.is_served(form)
            },
            "warnings": [one.what for one in findings if one.level != "note"],
            "notes": [one.what for one in findings if one.level == "note"],
        }
        return output.finish("export", settings, inputs, counts, facts)


def version_of(identity: str) -> str:
    """The name of an export among a head's versions."""
    return identity[:8]


def publish(output: Artifact, versions: str) -> str:
    """Copy a finished export to `versions`/VERSION, where it never changes; the URL. Raises
    InputError for a folder with other work, CorruptError.
    """
    source = output.manifest("export")
    copy = Artifact(f"{versions.rstrip('/')}/{version_of(source.identity)}")
    with copy.begun(source.identity) as is_work:
        if is_work:
            for name in source.files:
                copy.write(name, output.read(name))
            copy.finish("export", source.config, source.inputs, source.counts, source.facts)
            return copy.url
    for name in copy.manifest("export").files:
        copy.read(name)
    return copy.url


def manifest_of(head: Artifact, folder: Path) -> Manifest:
    """The head's manifest; for one that eyas did not train, config has its form and licence."""
    manifest = head_manifest(head.url, {})
    if manifest.stage != SOURCE:
        return manifest
    form = "eyas"
    if HEAD_JSON not in manifest.files:
        form = "vllm" if "speculators_model_type" in read_config(folder) else "sglang"
    config = {"form": form, "licence": origin_of(head).licence or "not given"}
    return manifest.model_copy(update={"config": config})


def origin_of(head: Artifact) -> CardOrigin:
    """A head's own card; that of an exported form lies in the folder above."""
    above, _, name = head.url.rstrip("/").rpartition("/")
    for folder in (head, Artifact(above or ".")) if name in FORMS else (head,):
        if folder.exists(CARD):
            return CardOrigin.of(folder.read(CARD).decode(errors="replace"))
    return CardOrigin()


def served_head(source: Path, vocabulary: TargetVocabulary) -> tuple[HeadConfig, dict[str, Tensor]]:
    """A head as served with this target: at least as long (SGLang does not start with less, and no
    weight depends on it), and without embeddings that equal the target's.
    """
    shape, tensors = read_head(source, vocabulary.config)
    length = max(shape.max_position_embeddings, vocabulary.config.max_position_embeddings)
    own = tensors.get(EMBED_TOKENS)
    if own is not None and torch.equal(own, vocabulary.embed_tokens.to(own.dtype)):
        del tensors[EMBED_TOKENS]
    return shape.model_copy(update={"max_position_embeddings": length}), tensors


def prove_equal(
    config: HeadConfig, tensors: Mapping[str, Tensor], written: Path, vocabulary: TargetVocabulary
) -> None:
    """Compare config, tensors bit by bit, and logits with what was written. Raises CorruptError."""
    hint = "check the disk or store, and export again"
    config_back, tensors_back = read_head(written, vocabulary.config)
    same = as_written(config) == as_written(config_back) and tensors.keys() == tensors_back.keys()
    if not same or not all(  # no NaN: `check` refuses them
        one.dtype == tensors_back[name].dtype and torch.equal(one, tensors_back[name])
        for name, one in tensors.items()
    ):
        raise CorruptError(f"{written} does not read back as the head", hint)
    embed_tokens, lm_head = vocabulary.embed_tokens.float(), {LM_HEAD: vocabulary.lm_head}
    ours = head_of(config, lm_head | dict(tensors))
    theirs = load_head(written, vocabulary.config, vocabulary.lm_head)
    if not torch.equal(made_up_logits(ours, embed_tokens), made_up_logits(theirs, embed_tokens)):
        raise CorruptError(f"{written} gives other logits than the head", hint)


def as_written(config: HeadConfig) -> HeadConfig:
    """The config without what no form writes: unused rope scaling, train_lm_head."""
    return config.model_copy(
        update={"rope": RopeConfig.from_hf(config.rope.to_hf()), "train_lm_head": True}
    )


@torch.inference_mode()
def made_up_logits(head: Head, embed_tokens_VH: Tensor) -> Tensor:
    """Logits [REPLAYED_TOKENS + REPLAYED_STEPS - 1, W] of a fixed random sample: all slots, then
    drafts of the last. Equal heads have equal ones.
    """
    generator = torch.Generator().manual_seed(0)
    embed_tokens_VH = embed_tokens_VH if head.embed_tokens is None else head.embed_tokens
    aux_hidden = torch.randn(
        1, REPLAYED_TOKENS, 3 * head.config.target_hidden_size, generator=generator
    )
    tokens = torch.randint(len(embed_tokens_VH), (1, REPLAYED_TOKENS), generator=generator)
    hidden, past = head(F.embedding(tokens, embed_tokens_VH), head.fuse(aux_hidden))
    logits = [head.logits(hidden)[0]]
    for _ in range(REPLAYED_STEPS - 1):
        drafted = head.target_ids_W[logits[-1][-1:].argmax(-1)]
        hidden, past = head(F.embedding(drafted[None], embed_tokens_VH), hidden[:, -1:], past)
        logits.append(head.logits(hidden)[0])
    return torch.cat(logits)
