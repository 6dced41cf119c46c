"""The fault table of `eyas check`: faults planted in the packaged head, in the forms that engines
load, and sound heads.

Each fault is one edit of a sound export, such as trainers, converters and people make. A fault is
found if the check ends with another exit code than 0: by the lint, from the files alone, or by the
replay, from what each reading accepts. Sound heads are the packaged one in every form of EAGLE-3
heads, and those given by --head: nothing may be reported on them but what their form brings with
it. For a head that was trained with a norm flag, the loss of that flag is planted too.

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
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from eyas.artifact import Artifact
from eyas.builtin import demo_prompts, head_folder, target_folder
from eyas.errors import MismatchError
from eyas.export.check import check, verdict
from eyas.export.lint import CheckFinding, exit_code
from eyas.export.replay import NUM_CONVERSATIONS, AnswerTokens, answered, meanings, replay
from eyas.model.architecture import TargetConfig
from eyas.model.config import HeadConfig
from eyas.model.dialects import EMBED_TOKENS, LAYER, LM_HEAD, Form
from eyas.model.forms import Verifier
from eyas.model.target import Target
from eyas.model.weights import weight_files
from eyas.operators.tensors import array_of, arrays_of, read_head, tensor_of, write_head
from eyas.operators.vocab import TargetVocabulary

IDS = "eagle_aux_hidden_state_layer_ids"
QUICK = 12  # conversations
SHARD_BYTES = 2_000_000
Tensors = dict[str, Tensor]
Settings = dict[str, Any]


class Head:
    """A head on disk as somebody may edit it; tensors by EAGLE's names."""

    def __init__(self, folder: Path, config: HeadConfig) -> None:
        self.folder, self.config = folder, config
        self.settings: Settings = json.loads((folder / "config.json").read_text())
        stored = safetensors.torch.load_file(folder / "model.safetensors")
        self.is_speculators = any(name.startswith("layers.0.") for name in stored)
        self.tensors: Tensors = {
            name.replace("layers.0.", LAYER): tensor for name, tensor in stored.items()
        }

    def save(self) -> Path:
        """Write it back."""
        (self.folder / "config.json").write_text(json.dumps(self.settings))
        layer = "layers.0." if self.is_speculators else LAYER
        kept = {
            name.replace(LAYER, layer): tensor.contiguous() for name, tensor in self.tensors.items()
        }
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
    """Keys of config.json; of the layer's part too where the form has one."""

    def plant(head: Head) -> None:
        layer = head.settings.get("transformer_layer_config", {})
        for key, value in changes.items():
            (layer if key in layer else head.settings)[key] = value

    return plant


def without(*keys: str) -> Callable[[Head], None]:
    """Keys of config.json left out."""
    return lambda head: [head.settings.pop(key) for key in keys] and None


def weight(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Head], None]:
    """One tensor changed."""
    return lambda head: head.tensors.update({name: change(head.tensors[name].clone())})


def noise(tensor: Tensor) -> Tensor:
    """Random numbers of a tensor's own spread."""
    return (
        torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)) * tensor.float().std()
    ).to(tensor.dtype)


def with_first(value: float) -> Callable[[Tensor], Tensor]:
    """The first value replaced."""
    return lambda tensor: (
        tensor.flatten().index_fill(0, torch.tensor([0]), value).view(tensor.shape)
    )


def other_words(head: Head) -> None:
    """d2t and t2d of another vocabulary, in themselves sound: each token is its neighbour."""
    ids_W = head.tensors["d2t"] + torch.arange(len(head.tensors["d2t"]))
    mask_V = torch.zeros_like(head.tensors["t2d"]).index_fill(0, ids_W, True).roll(1)
    ids_W = mask_V.nonzero()[:, 0]
    head.tensors |= {"d2t": ids_W - torch.arange(len(ids_W)), "t2d": mask_V}


def another_verifier(head: Head) -> None:
    """A config that names another target."""
    head.settings["speculators_config"]["verifier"] |= {
        "name_or_path": "another",
        "architectures": ["Qwen3ForCausalLM"],
    }


def as_exported(folder: Path) -> Path:
    """The folder with a manifest of what is in it."""
    output = Artifact(str(folder))
    output.begin("0" * 16)
    output.finish("export", {}, {}, {})
    return folder


def weight_changed_later(folder: Path) -> None:
    """One weight of an export changed."""
    path = as_exported(folder) / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(
        tensors | {"fc.weight": with_first(1.0)(tensors["fc.weight"])}, path
    )


def config_changed_later(folder: Path) -> None:
    """A key added to the config of an export."""
    path = as_exported(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_cache": True}))


def in_shards_too(folder: Path, change: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Path:
    """The weights in shards beside the one file, fc changed."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["fc.weight"] = change(tensors["fc.weight"])
    for name, data in weight_files(arrays_of(tensors), SHARD_BYTES).items():
        (folder / name).write_bytes(data)
    return folder


def pickled_too(folder: Path, change: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Path:
    """The weights as pytorch_model.bin beside the one file, fc changed."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    torch.save(tensors | {"fc.weight": change(tensors["fc.weight"])}, folder / "pytorch_model.bin")
    return folder


def truncated(head: Head) -> None:
    """A vocabulary cut to its first 1,500 tokens, and a config that does not know of it."""
    head.tensors |= {name: head.tensors[name][:1500] for name in ("d2t", LM_HEAD)}


def foreign_embeddings(head: Head, change: Callable[[Tensor], Tensor] = noise) -> None:
    """Embeddings that were changed where nothing says whose they are."""
    head.settings.pop("target_embed_tokens_sha256")
    head.tensors[EMBED_TOKENS] = change(head.tensors[EMBED_TOKENS])


def all_noise(head: Head) -> None:
    """Another head's weights, as good as random here."""
    head.tensors |= {
        name: noise(tensor)
        for name, tensor in head.tensors.items()
        if tensor.ndim == 2 and name != EMBED_TOKENS
    }


def renamed(head: Head) -> None:
    """A tensor under a name that no engine knows."""
    head.tensors["norm.wieght"] = head.tensors.pop("norm.weight")


def ids_for_offsets(head: Head, keep_mask: bool = True) -> None:
    """d2t as a map of ids; without t2d, nothing but the replay may tell."""
    head.tensors["d2t"] += torch.arange(len(head.tensors["d2t"]))
    if not keep_mask:
        del head.tensors["t2d"]


def rows_out_of_order(head: Head) -> None:
    """lm_head sorted by frequency, d2t by id."""
    order = torch.randperm(len(head.tensors[LM_HEAD]), generator=torch.Generator().manual_seed(0))
    head.tensors[LM_HEAD] = head.tensors[LM_HEAD][order]


def faults(config: HeadConfig) -> list[Fault]:
    """All edits. config: the sound head's."""
    outputs = list(config.taps)
    earlier, later = ([tap + by for tap in outputs] for by in (0, 2))
    return [
        Fault("layers off by one: outputs in a list of inputs", "vllm", setting(**{IDS: earlier})),
        Fault("layers off by one: one later", "vllm", setting(**{IDS: later})),
        Fault(
            "layers of the other convention",
            "sglang",
            setting(eagle_config={IDS: [tap + 1 for tap in outputs]}),
        ),
        Fault(
            "third layer one later",
            "sglang",
            setting(eagle_config={IDS: [*outputs[:2], outputs[2] + 1]}),
        ),
        Fault("layers beyond the target", "sglang", setting(eagle_config={IDS: [1, 5, 12]})),
        Fault("two lists of layers that disagree", "sglang", setting(**{IDS: [1, 5, 8]})),
        Fault("d2t holds ids", "sglang", ids_for_offsets),
        Fault(
            "d2t holds ids, no t2d", "sglang", lambda head: ids_for_offsets(head, keep_mask=False)
        ),
        Fault(
            "d2t leads twice to one token",
            "sglang",
            weight("d2t", lambda d2t: torch.cat((d2t[:1], d2t[:1] - 1, d2t[2:]))),
        ),
        Fault("d2t one token on", "vllm", weight("d2t", lambda d2t: d2t + 1)),
        Fault("t2d of another vocabulary", "sglang", weight("t2d", lambda t2d: t2d.roll(7))),
        Fault("d2t and t2d one token on, in themselves sound", "sglang", other_words),
        Fault("lm_head's rows in another order than d2t", "sglang", rows_out_of_order),
        Fault("truncated vocabulary", "sglang", truncated),
        Fault("draft_vocab_size of another head", "sglang", setting(draft_vocab_size=2000)),
        Fault("fc transposed", "sglang", weight("fc.weight", lambda fc: fc.T)),
        Fault("norm_before_residual where it was not", "vllm", setting(norm_before_residual=True)),
        Fault("norm_before_residual left open", "vllm", without("norm_before_residual")),
        Fault("norm_output where it was not", "vllm", setting(norm_output=True)),
        Fault("norm_output of two meanings", "sglang", setting(norm_output=True)),
        Fault("norm_before_fc without its norm", "sglang", setting(norm_before_fc=True)),
        Fault(
            "a norm without its flag",
            "sglang",
            lambda head: head.tensors.update({"input_norm.weight": torch.ones(960)}),
        ),
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
        Fault(
            "rope scaling of another target",
            "vllm",
            setting(rope_scaling={"rope_type": "linear", "factor": 8.0}),
        ),
        Fault(
            "a shorter context than the target's", "sglang", setting(max_position_embeddings=512)
        ),
        Fault("rms_norm_eps of another target", "sglang", setting(rms_norm_eps=1e-3)),
        Fault("a tensor under a wrong name", "sglang", renamed),
        Fault("a tensor is missing", "vllm", lambda head: head.tensors.pop("norm.weight")),
        Fault("NaN", "sglang", weight("fc.weight", with_first(float("nan")))),
        Fault("infinity", "vllm", weight(LM_HEAD, with_first(float("inf")))),
        Fault("zeros", "sglang", weight("norm.weight", torch.zeros_like)),
        Fault("quantised", "sglang", weight("fc.weight", lambda fc: fc.to(torch.float8_e4m3fn))),
        Fault("dtype that the tensors do not have", "sglang", setting(torch_dtype="float32")),
        Fault(
            "an architecture that SGLang does not load",
            "sglang",
            setting(architectures=["LlamaForCausalLM"]),
        ),
        Fault("num_key_value_heads of another head", "sglang", setting(num_key_value_heads=1)),
        Fault("a verifier of another architecture", "vllm", another_verifier),
        Fault("a weight changed after the export", "sglang", in_folder=weight_changed_later),
        Fault("the config changed after the export", "vllm", in_folder=config_changed_later),
        Fault(
            "other weights in shards beside the one file",
            "sglang",
            in_folder=lambda folder: in_shards_too(folder, noise),
        ),
        Fault(
            "other weights in pytorch_model.bin",
            "sglang",
            in_folder=lambda folder: pickled_too(folder, noise),
        ),
    ]


class Bench:
    """The target, its answers and a sound head, for as many checks as there are."""

    def __init__(self, scratch: Path, num_conversations: int) -> None:
        self.scratch = scratch
        self.folder = target_folder()
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
        embed_tokens = (
            array_of(self.vocabulary.embed_tokens.to(tensors["fc.weight"].dtype))
            if form == "vllm"
            else None
        )
        verifier = Verifier("builtin", ("LlamaForCausalLM",), embed_tokens)
        folder = self.scratch / str(next(self.numbers))
        folder.mkdir()
        for name, data in write_head(config, tensors, form, verifier).items():
            (folder / name).write_bytes(data)
        return folder

    def checked(self, folder: Path) -> tuple[list[CheckFinding], list[CheckFinding]]:
        """What the lint and what the replay say of a head, notes left out."""
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
    """Name, folder, and the warnings that such a form brings with it, of the packaged head in every
    form.
    """
    for form in ("eyas", "sglang", "vllm"):
        yield f"packaged, {form} form", bench.written(config, tensors, form), ()
    yield "an export with its manifest", as_exported(bench.written(config, tensors, "vllm")), ()
    yield "in shards and in one file", in_shards_too(bench.written(config, tensors, "sglang")), ()
    yield "pickled and not", pickled_too(bench.written(config, tensors, "sglang")), ()
    eagle = Head(bench.written(config, tensors, "sglang"), config)
    eagle.settings |= {"architectures": ["LlamaForCausalLM"]}
    for key in (
        "target_lm_head_sha256",
        "eagle_config",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "rope_theta",
    ):
        eagle.settings.pop(key, None)
    eagle.save()
    torch.save(eagle.tensors, eagle.folder / "pytorch_model.bin")
    (eagle.folder / "model.safetensors").unlink()
    yield "EAGLE repository, pickled", eagle.folder, ("LlamaForCausalLMEagle3 only",)
    specforge = Head(bench.written(config, tensors, "sglang"), config)
    specforge.settings.pop("target_lm_head_sha256")
    specforge.settings |= {"max_position_embeddings": 512, "norm_output": False}
    yield "SpecForge, stock config", specforge.save(), ("max_position_embeddings is 512",)
    angelslim = Head(bench.written(config, tensors, "sglang"), config)
    angelslim.settings.pop("target_lm_head_sha256")
    angelslim.settings.pop("eagle_config")
    angelslim.settings |= {
        "architectures": ["Eagle3LlamaForCausalLM"],
        IDS: [tap + 1 for tap in config.taps],
    }
    yield "vLLM, AngelSlim", angelslim.save(), ("LlamaForCausalLMEagle3 only",)
    nemo = Head(bench.written(config, tensors, "sglang"), config)
    nemo.is_speculators = True
    nemo.settings.pop("target_lm_head_sha256")
    nemo.settings |= {
        "architectures": ["LlamaEagle3DraftModel"],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
    }
    nemo.tensors[EMBED_TOKENS] = bench.vocabulary.embed_tokens.to(torch.bfloat16)
    yield "NeMo, with embeddings", nemo.save(), ("LlamaForCausalLMEagle3 only",)
    modelopt = Head(bench.written(config, tensors, "sglang"), config)
    modelopt.is_speculators = True
    modelopt.settings.pop("target_lm_head_sha256")
    yield "ModelOpt's names", modelopt.save(), ()
    speculators = Head(bench.written(config, tensors, "vllm"), config)
    for key in ("target_lm_head_sha256", "target_embed_tokens_sha256"):
        speculators.settings.pop(key)
    yield "speculators", speculators.save(), ()


def lost_flags(config: HeadConfig) -> Iterator[Fault]:
    """For a head that was trained with flags: each of them lost, with its norms."""
    norms = {
        "norm_before_fc": ("input_norm.weight",),
        "fc_norm": tuple(f"fc_norm.{stream}.weight" for stream in range(3)),
    }
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if getattr(config, flag):

            def plant(head: Head, flag: str = flag) -> None:
                head.settings[flag] = False
                for name in norms.get(flag, ()):
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
                found = [*linted, *replayed]
                by = (
                    " + ".join(
                        name for name, them in (("lint", linted), ("replay", replayed)) if them
                    )
                    or "nothing"
                )
                rows.append(
                    {
                        "fault": fault.name,
                        "form": fault.form,
                        "exit_code": exit_code(found),
                        "by": by,
                    }
                )
                said = next(
                    (finding.what for finding in sorted(found, key=lambda finding: finding.level)),
                    "",
                )
                print(
                    f"{fault.name:50} {fault.form:7} {exit_code(found)} {by:14} {said[:110]}",
                    flush=True,
                )
        given = [("/".join(folder.parts[-2:]), folder, ()) for folder in heads]
        for name, folder, allowed in [*sound_heads(bench, config, tensors), *given]:
            found = [finding for part in bench.checked(folder) for finding in part]
            reported = [
                one.what for one in found if not any(words in one.what for words in allowed)
            ]
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
    """Parse options, run, end with one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer conversations")
    parser.add_argument(
        "--head",
        type=Path,
        action="append",
        default=[],
        help="another sound head of the packaged target",
    )
    options = parser.parse_args()
    print(json.dumps(run(QUICK if options.quick else NUM_CONVERSATIONS, options.head)))


if __name__ == "__main__":
    main()
