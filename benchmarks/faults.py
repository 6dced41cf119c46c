"""The fault table of `eyas check`: faults planted in the packaged head, in the forms that engines
load, and sound heads.

Each fault is one edit of a sound export. It is found if the check's exit code is not 0: by the
lint, from the files, or by the replay, from what each reading accepts. Sound heads are the packaged
one in every form of EAGLE-3 heads, and those given by --head: only warnings that their form brings
are allowed. For a head that was trained with a norm flag, the loss of that flag is planted too.

    python benchmarks/faults.py [--quick] [--head FOLDER ...]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from eyas.artifact import Artifact
from eyas.builtin import BUILTIN, demo_prompts, head_folder
from eyas.errors import MismatchError
from eyas.export.check import CheckFinding, check, exit_code
from eyas.export.replay import (
    NUM_CONVERSATIONS,
    AnswerTokens,
    answered,
    meanings,
    replay,
)
from eyas.export.verdict import verdict
from eyas.hub import resolve_target
from eyas.model.architecture import TargetConfig
from eyas.model.config import HeadConfig
from eyas.model.dialects import CONFIG_JSON, EMBED_TOKENS, FLAGS, LAYER, LM_HEAD, Form
from eyas.model.forms import Verifier
from eyas.model.target import Target
from eyas.model.weights import SINGLE, weight_files
from eyas.operators.tensors import array_of, arrays_of, read_head, tensor_of, write_head
from eyas.operators.vocab import TargetVocabulary

IDS = "eagle_aux_hidden_state_layer_ids"
QUICK = 12  # conversations
SHARD_BYTES = 2_000_000
Tensors = dict[str, Tensor]
Settings = dict[str, Any]


class Head:
    """A head on disk, to be edited; tensors by EAGLE's names."""

    def __init__(self, folder: Path, config: HeadConfig) -> None:
        self.folder, self.config = folder, config
        self.settings: Settings = json.loads((folder / "config.json").read_text())
        stored = safetensors.torch.load_file(folder / "model.safetensors")
        self.is_speculators = any(name.startswith("layers.0.") for name in stored)
        self.tensors = {name.replace("layers.0.", LAYER): one for name, one in stored.items()}

    def save(self) -> Path:
        (self.folder / "config.json").write_text(json.dumps(self.settings))
        layer = "layers.0." if self.is_speculators else LAYER
        kept = {name.replace(LAYER, layer): one.contiguous() for name, one in self.tensors.items()}
        safetensors.torch.save_file(kept, self.folder / "model.safetensors")
        return self.folder


@dataclass(frozen=True, slots=True)
class Fault:
    """An edit of a head in one form, and of its folder afterwards."""

    name: str
    form: Form
    plant: Callable[[Head], object] = lambda head: None
    in_folder: Callable[[Path], object] = lambda folder: None


def setting(**changes: Any) -> Callable[[Head], None]:
    """Change keys of config.json, or of its part for the layer."""

    def plant(head: Head) -> None:
        layer = head.settings.get("transformer_layer_config", {})
        for key, value in changes.items():
            (layer if key in layer else head.settings)[key] = value

    return plant


def without(*keys: str) -> Callable[[Head], None]:
    return lambda head: [head.settings.pop(key) for key in keys] and None


def weight(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Head], None]:
    return lambda head: head.tensors.update({name: change(head.tensors[name].clone())})


def noise(tensor: Tensor) -> Tensor:
    """Random numbers of a tensor's standard deviation."""
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
    return (drawn * tensor.float().std()).to(tensor.dtype)


def with_first(value: float) -> Callable[[Tensor], Tensor]:
    first = torch.tensor([0])
    return lambda one: one.flatten().index_fill(0, first, value).view(one.shape)


def other_words(head: Head) -> None:
    """d2t and t2d of another vocabulary, which agree: each token is its neighbour."""
    ids_W = head.tensors["d2t"] + torch.arange(len(head.tensors["d2t"]))
    mask_V = torch.zeros_like(head.tensors["t2d"]).index_fill(0, ids_W, True).roll(1)
    ids_W = mask_V.nonzero()[:, 0]
    head.tensors |= {"d2t": ids_W - torch.arange(len(ids_W)), "t2d": mask_V}


def as_exported(folder: Path) -> Path:
    """The folder with a manifest of what is in it."""
    output = Artifact(str(folder))
    output.begin("0" * 16)
    output.finish("export", {}, {}, {})
    return folder


def changed_later(folder: Path, name: str) -> None:
    """One weight of an export changed, or a key added to its config."""
    path = as_exported(folder) / name
    if name == "config.json":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"use_cache": True}))
        return
    tensors = safetensors.torch.load_file(path)
    fc = with_first(1.0)(tensors["fc.weight"])
    safetensors.torch.save_file(tensors | {"fc.weight": fc}, path)


def in_shards_too(folder: Path, change: Callable[[Tensor], Tensor] = torch.clone) -> Path:
    """The weights in shards beside the one file, fc changed."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["fc.weight"] = change(tensors["fc.weight"])
    for name, data in weight_files(arrays_of(tensors), SHARD_BYTES).items():
        (folder / name).write_bytes(data)
    return folder


def pickled_too(folder: Path, change: Callable[[Tensor], Tensor] = torch.clone) -> Path:
    """The weights as pytorch_model.bin beside the one file, fc changed."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    torch.save(tensors | {"fc.weight": change(tensors["fc.weight"])}, folder / "pytorch_model.bin")
    return folder


def truncated(head: Head) -> None:
    """A vocabulary cut to 1,500 tokens, and the old config."""
    head.tensors |= {name: head.tensors[name][:1500] for name in ("d2t", LM_HEAD)}


def foreign_embeddings(head: Head, change: Callable[[Tensor], Tensor] = noise) -> None:
    """Changed embeddings without a checksum of the target's."""
    head.settings.pop("target_embed_tokens_sha256")
    head.tensors[EMBED_TOKENS] = change(head.tensors[EMBED_TOKENS])


def all_noise(head: Head) -> None:
    """Another head's weights."""
    weights = {name: one for name, one in head.tensors.items() if one.ndim == 2}
    head.tensors |= {name: noise(one) for name, one in weights.items() if name != EMBED_TOKENS}


def renamed(head: Head) -> None:
    head.tensors["norm.wieght"] = head.tensors.pop("norm.weight")


def ids_for_offsets(head: Head, keep_mask: bool = True) -> None:
    """d2t as a map of ids; without t2d only the replay may tell."""
    head.tensors["d2t"] += torch.arange(len(head.tensors["d2t"]))
    if not keep_mask:
        del head.tensors["t2d"]


def rows_out_of_order(head: Head) -> None:
    """lm_head sorted by frequency, d2t by id."""
    order = torch.randperm(len(head.tensors[LM_HEAD]), generator=torch.Generator().manual_seed(0))
    head.tensors[LM_HEAD] = head.tensors[LM_HEAD][order]


def feature_first(head: Head) -> None:
    """The layer's two inputs in the other order."""
    for letter in "qkv":
        weight(f"{LAYER}self_attn.{letter}_proj.weight", lambda w: w.roll(w.shape[1] // 2, 1))(head)


def faults(config: HeadConfig) -> list[Fault]:
    """All edits. config: the sound head's."""
    outputs = list(config.taps)
    earlier, entering, later = ([tap + by for tap in outputs] for by in (0, 1, 2))
    third = [*outputs[:2], outputs[2] + 1]
    twice = lambda d2t: torch.cat((d2t[:1], d2t[:1] - 1, d2t[2:]))  # noqa: E731
    flag = {"input_norm.weight": torch.ones(960)}
    other = {"name_or_path": "another", "architectures": ["Qwen3ForCausalLM"]}
    linear = {"rope_type": "linear", "factor": 8.0}
    llama = ["LlamaForCausalLM"]
    return [
        Fault("layers off by one: outputs in a list of inputs", "vllm", setting(**{IDS: earlier})),
        Fault("layers off by one: one later", "vllm", setting(**{IDS: later})),
        Fault("layers of the other convention", "sglang", setting(eagle_config={IDS: entering})),
        Fault("third layer one later", "sglang", setting(eagle_config={IDS: third})),
        Fault("layers beyond the target", "sglang", setting(eagle_config={IDS: [1, 5, 12]})),
        Fault("two lists of layers that disagree", "sglang", setting(**{IDS: [1, 5, 8]})),
        Fault("d2t holds ids", "sglang", ids_for_offsets),
        Fault("d2t holds ids, no t2d", "sglang", lambda head: ids_for_offsets(head, False)),
        Fault("d2t leads twice to one token", "sglang", weight("d2t", twice)),
        Fault("d2t one token on", "vllm", weight("d2t", lambda d2t: d2t + 1)),
        Fault("t2d of another vocabulary", "sglang", weight("t2d", lambda t2d: t2d.roll(7))),
        Fault("d2t and t2d one token on, in themselves sound", "sglang", other_words),
        Fault("lm_head's rows in another order than d2t", "sglang", rows_out_of_order),
        Fault("the feature before the embedding", "sglang", feature_first),
        Fault("truncated vocabulary", "sglang", truncated),
        Fault("draft_vocab_size of another head", "sglang", setting(draft_vocab_size=2000)),
        Fault("fc transposed", "sglang", weight("fc.weight", lambda fc: fc.T)),
        Fault("norm_before_residual where it was not", "vllm", setting(norm_before_residual=True)),
        Fault("norm_before_residual left open", "vllm", without("norm_before_residual")),
        Fault("norm_output where it was not", "vllm", setting(norm_output=True)),
        Fault("norm_output of two meanings", "sglang", setting(norm_output=True)),
        Fault("norm_before_fc without its norm", "sglang", setting(norm_before_fc=True)),
        Fault("a norm without its flag", "sglang", lambda head: head.tensors.update(flag)),
        Fault("random embeddings, said to be the target's", "vllm", weight(EMBED_TOKENS, noise)),
        Fault("random embeddings of nobody's", "vllm", foreign_embeddings),
        Fault(
            "embeddings of nobody's, one row on",
            "vllm",
            lambda head: foreign_embeddings(head, lambda one: one.roll(1, 0)),
        ),
        Fault("weights of another head", "sglang", all_noise),
        Fault("lm_head of another target", "sglang", setting(target_lm_head_sha256="0" * 64)),
        Fault("rope_theta of another target", "sglang", setting(rope_theta=1e6)),
        Fault("rope scaling of another target", "vllm", setting(rope_scaling=linear)),
        Fault("a context shorter than its own", "sglang", setting(max_position_embeddings=512)),
        Fault("rms_norm_eps of another target", "sglang", setting(rms_norm_eps=1e-3)),
        Fault("a tensor under a wrong name", "sglang", renamed),
        Fault("a tensor is missing", "vllm", lambda head: head.tensors.pop("norm.weight")),
        Fault("NaN", "sglang", weight("fc.weight", with_first(float("nan")))),
        Fault("infinity", "vllm", weight(LM_HEAD, with_first(float("inf")))),
        Fault("zeros", "sglang", weight("norm.weight", torch.zeros_like)),
        Fault("quantised", "sglang", weight("fc.weight", lambda fc: fc.to(torch.float8_e4m3fn))),
        Fault("dtype that the tensors do not have", "sglang", setting(torch_dtype="float32")),
        Fault("an architecture that SGLang lacks", "sglang", setting(architectures=llama)),
        Fault("num_key_value_heads of another head", "sglang", setting(num_key_value_heads=1)),
        Fault(
            "a verifier of another architecture",
            "vllm",
            lambda head: head.settings["speculators_config"]["verifier"].update(other),
        ),
        *(
            Fault(name, "sglang", in_folder=partial(work, **with_what))
            for name, work, with_what in (
                ("a weight changed after the export", changed_later, {"name": SINGLE}),
                ("the config changed after the export", changed_later, {"name": CONFIG_JSON}),
                ("other weights in shards beside the one file", in_shards_too, {"change": noise}),
                ("other weights in pytorch_model.bin", pickled_too, {"change": noise}),
            )
        ),
    ]


class Bench:
    """A target and its answers."""

    def __init__(self, scratch: Path, num_conversations: int) -> None:
        self.scratch = scratch
        self.folder = resolve_target(BUILTIN)
        self.vocabulary = TargetVocabulary.load(self.folder)
        self.shape = self.vocabulary.config
        assert isinstance(self.shape, TargetConfig)
        self.target = Target.load(self.folder, self.shape.dtype)
        self.answers: list[AnswerTokens] = answered(
            self.target, self.folder, demo_prompts(), num_conversations
        )
        self.numbers = iter(range(10**6))

    def written(self, config: HeadConfig, tensors: Tensors, form: Form) -> Path:
        """A sound head in a new folder."""
        embed_tokens = None
        if form == "vllm":
            embed_tokens = array_of(self.vocabulary.embed_tokens.to(tensors["fc.weight"].dtype))
        verifier = Verifier("builtin", ("LlamaForCausalLM",), embed_tokens)
        folder = self.scratch / str(next(self.numbers))
        folder.mkdir()
        for name, data in write_head(config, tensors, form, verifier).items():
            (folder / name).write_bytes(data)
        return folder

    def checked(self, folder: Path) -> tuple[list[CheckFinding], list[CheckFinding]]:
        """Findings of the lint and of the replay, without notes."""
        linted = check(folder, self.folder)
        try:
            ways = meanings(folder, self.shape)
        except MismatchError:
            return linted, []
        for way in ways:
            way.tensors.setdefault(LM_HEAD, tensor_of(self.target.lm_head))
        replayed = replay(ways, self.target, self.vocabulary, self.answers)
        heard = verdict([], replayed)
        found = [one for one in verdict(linted, replayed) if one.level != "note"]
        return [one for one in found if one not in heard], heard


def sound_heads(
    bench: Bench, config: HeadConfig, tensors: Tensors
) -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    """Name and folder of the packaged head in every form, and the form's warnings."""
    for form in ("eyas", "sglang", "vllm"):
        yield f"packaged, {form} form", bench.written(config, tensors, form), ()
    yield "an export with its manifest", as_exported(bench.written(config, tensors, "vllm")), ()
    yield "in shards and in one file", in_shards_too(bench.written(config, tensors, "sglang")), ()
    yield "pickled and not", pickled_too(bench.written(config, tensors, "sglang")), ()

    def theirs(form: Form = "sglang", *away: str, **changes: Any) -> Head:
        head = Head(bench.written(config, tensors, form), config)
        left = head.settings.keys() - {"target_lm_head_sha256", *away}
        head.settings = {key: head.settings[key] for key in left} | changes
        return head

    only = ("LlamaForCausalLMEagle3 only",)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm")
    own = {"architectures": ["LlamaForCausalLM"]}
    eagle = theirs("sglang", "eagle_config", "rope_theta", *flags, **own)
    eagle.save()
    torch.save(eagle.tensors, eagle.folder / "pytorch_model.bin")
    (eagle.folder / "model.safetensors").unlink()
    yield "EAGLE repository, pickled", eagle.folder, only
    specforge = theirs(max_position_embeddings=512, norm_output=False)
    yield "SpecForge, stock config", specforge.save(), ("max_position_embeddings is 512",)
    own = {"architectures": ["Eagle3LlamaForCausalLM"], IDS: [tap + 1 for tap in config.taps]}
    yield "vLLM, AngelSlim", theirs("sglang", "eagle_config", **own).save(), only
    own = {"architectures": ["LlamaEagle3DraftModel"], "model_type": "qwen3"}
    nemo = theirs(**own, tie_word_embeddings=False)
    nemo.is_speculators = True
    nemo.tensors[EMBED_TOKENS] = bench.vocabulary.embed_tokens.to(torch.bfloat16)
    yield "NeMo, with embeddings", nemo.save(), only
    modelopt = theirs()
    modelopt.is_speculators = True
    yield "ModelOpt's names", modelopt.save(), ()
    yield "speculators", theirs("vllm", "target_embed_tokens_sha256").save(), ()


def lost_flags(config: HeadConfig) -> Iterator[Fault]:
    """The loss of each flag that a head was trained with, and of its norms."""
    for flag, norms in FLAGS.items():
        if getattr(config, flag):

            def plant(head: Head, flag: str = flag, norms: tuple[str, ...] = norms) -> None:
                head.settings[flag] = False
                for name in norms:
                    del head.tensors[name]

            yield Fault(f"{flag} lost", "vllm", plant)


def run(num_conversations: int, heads: list[Path]) -> dict[str, Any]:
    """Check all; print a line for each."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), num_conversations)
        rows, sound = [], []
        config, tensors = read_head(head_folder(), bench.shape)
        trained = [(config, tensors, faults(config))]
        for folder in heads:
            own = read_head(folder, bench.shape)
            trained.append((*own, list(lost_flags(own[0]))))
        for one, weights, planted in trained:
            for fault in planted:
                head = Head(bench.written(one, weights, fault.form), one)
                fault.plant(head)
                fault.in_folder(head.save())
                linted, replayed = bench.checked(head.folder)
                found, which = [*linted, *replayed], (("lint", linted), ("replay", replayed))
                by = " + ".join(name for name, them in which if them) or "nothing"
                code, named_so = exit_code(found), {"fault": fault.name, "form": fault.form}
                rows.append({**named_so, "exit_code": code, "by": by})
                said = next((one.what for one in sorted(found, key=lambda one: one.level)), "")
                print(f"{fault.name:50} {fault.form:7} {code} {by:14} {said[:110]}", flush=True)
        given = [("/".join(folder.parts[-2:]), folder, ()) for folder in heads]
        for name, folder, allowed in [*sound_heads(bench, config, tensors), *given]:
            found = [finding for part in bench.checked(folder) for finding in part]
            reported = [one.what for one in found if not any(of in one.what for of in allowed)]
            sound.append({"head": name, "reported": reported})
            print(f"sound: {name:43} {reported or 'nothing reported'}", flush=True)
    return {
        "benchmark": "faults",
        "faults": len(rows),
        "found": sum(row["exit_code"] > 0 for row in rows),
        "missed": [row["fault"] for row in rows if row["exit_code"] == 0],
        "found_by": dict(Counter(row["by"] for row in rows)),
        "found_by_replay_alone": [row["fault"] for row in rows if row["by"] == "replay"],
        "sound_heads": len(sound),
        "reported_on_sound_heads": [one for one in sound if one["reported"]],
        "rows": rows,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer conversations")
    parser.add_argument(
        "--head", type=Path, action="append", default=[], help="another sound head of that target"
    )
    options = parser.parse_args()
    print(json.dumps(run(QUICK if options.quick else NUM_CONVERSATIONS, options.head)))


if __name__ == "__main__":
    main()
