"""The engines that load our heads, as one table: form, targets, limits and command of each. A new
engine is an entry of ENGINES (and a writer in model/forms.py for a new form).

Sources: the engines' code (SGLang's arg_groups/speculative_hook.py, vLLM's config/speculative.py),
proved by `benchmarks/engines.py` (docs/decisions/heads.md); llama-cpp-python 0.3.36, optimum-intel
2.2. SGLang verifies all drafts of a chain and the root, whatever number it is given.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from eyas.engine.tree import Speculation
from eyas.errors import MismatchError
from eyas.model.config import HeadConfig
from eyas.model.dialects import EMBED_TOKENS, FLAGS, LM_HEAD, Form

EngineForm = Literal["sglang", "vllm", "openvino"]
FORMS: tuple[EngineForm, ...] = get_args(EngineForm)
DTYPES = ("bfloat16", "float16", "float32")  # names that SGLang and vLLM know
EAGLE3_MODE = '<eagle3_mode value="True" />'  # in the file that OpenVINO's converter writes
REFUSES = "refuses to load it"
IGNORES = "ignores it, and loses acceptance without a word"


@dataclass(frozen=True, slots=True)
class Launch:
    """The target as the engine finds it, and the size of drafts (with the root).

    dtype: of target and head, one of DTYPES; None is the engine's choice. max_length: tokens of a
    request; None is the target's. draft_window: the head's `sliding_window`. taps: the layers whose
    outputs the head reads. family: the target's model_type, if known. num_gpus: of one server
    (tensor parallelism).
    """

    target: str
    num_draft_steps: int
    tree_topk: int
    num_verify_tokens: int
    dtype: str | None = None
    max_length: int | None = None
    draft_window: int | None = None
    taps: tuple[int, int, int] | None = None
    family: str | None = None
    num_gpus: int = 1

    @property
    def title(self) -> str:
        """The target's name; of a folder its last part."""
        return Path(self.target).name if Path(self.target).is_absolute() else self.target

    def drafts(self, form: EngineForm) -> Speculation:
        """The size of drafts that the engine's command asks for."""
        steps, topk, num_verified = self.num_draft_steps, self.tree_topk, self.num_verify_tokens
        if topk == 1 or form == "vllm":  # vLLM drafts chains only
            return Speculation("fixed", steps, 1, steps + 1)
        most = topk + (steps - 1) * topk**2 + 1  # that the draft steps can give
        return Speculation("fixed", steps, topk, min(num_verified, most))

    def is_served(self, form: EngineForm) -> bool:
        """Whether the engine of this form serves such a target with a head."""
        return self.family is not None and engine_of(form).serves(self.family)

    def arguments(self, form: EngineForm, head: str | None) -> list[str]:
        """The words of the command. head: its folder; None serves the target plainly."""
        command = engine_of(form).command
        assert command is not None, "an engine with a form of its own has a command"
        return command(self, head)

    def command(self, form: EngineForm) -> str:
        """The command for a shell in the card's folder, one option a line."""
        words = self.arguments(form, f"./{form}")
        first = next(at for at, word in enumerate(words) if word.startswith("--"))
        lines = [words[:first], *(words[at : at + 2] for at in range(first, len(words), 2))]
        command = " \\\n    ".join(map(shlex.join, lines))
        if form == "openvino" and self.taps is not None:
            script = f"s#{EAGLE3_MODE}#&{layers_info(self.taps)}#"
            command += "\n" + shlex.join(["sed", "-i", script, f"{words[-1]}/openvino_model.xml"])
        return command


def layers_info(taps: tuple[int, int, int]) -> str:
    """The line after EAGLE3_MODE in a converted head (numbers between spaces).

    OpenVINO's converter writes none, and GenAI then taps layers 2, L / 2 and L - 3, each one later
    than EAGLE-3's (openvino.genai's eagle3_model_transforms.cpp).
    """
    return f'<hidden_layers_list value="{" ".join(map(str, taps))}" />'


def sglang_command(launch: Launch, head: str | None) -> list[str]:
    """SGLang takes a head's attention window from the command only."""
    options = {
        "--model-path": launch.target,
        "--dtype": launch.dtype,
        "--context-length": launch.max_length,
        "--tp-size": launch.num_gpus if launch.num_gpus > 1 else None,
    }
    if head is not None:
        options |= {
            "--speculative-algorithm": "EAGLE3",
            "--speculative-draft-model-path": head,
            "--speculative-num-steps": launch.num_draft_steps,
            "--speculative-eagle-topk": launch.tree_topk,
            "--speculative-num-draft-tokens": launch.drafts("sglang").num_verify_tokens,
            "--speculative-draft-window-size": launch.draft_window,
        }
    return ["python", "-m", "sglang.launch_server", *_words(options)]


def vllm_command(launch: Launch, head: str | None) -> list[str]:
    """`vllm serve`, with the options that the target needs."""
    speculation = {
        "method": "eagle3",
        "model": head,
        "num_speculative_tokens": launch.num_draft_steps,
    }
    options = {
        "--dtype": launch.dtype,
        "--max-model-len": launch.max_length,
        "--tensor-parallel-size": launch.num_gpus if launch.num_gpus > 1 else None,
        **VLLM_OPTIONS.get(launch.family or "", {}),
        "--speculative-config": None if head is None else json.dumps(speculation),
    }
    return ["vllm", "serve", launch.target, *_words(options)]


def openvino_command(_: Launch, head: str | None) -> list[str]:
    """OpenVINO has no server: convert a head for openvino_genai.draft_model."""
    assert head is not None, "there is nothing else to convert"
    task = ["--task", "text-generation-with-past", "--trust-remote-code"]
    program = ["optimum-cli", "export", "openvino"]
    return [*program, "--model", head, *task, f"{head.rstrip('/')}-ir"]


def _words(options: Mapping[str, object]) -> list[str]:
    given = ((name, str(value)) for name, value in options.items() if value is not None)
    return [word for option in given for word in option]


@dataclass(frozen=True, slots=True)
class EngineAbilities:
    """How an engine takes a head.

    version: that was read. form: the exported folder that it loads. families: model_types of the
    targets that it serves with an EAGLE-3 head, between spaces. command: None for an engine that
    reads another's form. options: by model_type, that the command needs. unread: flags of the
    head's config that it does not read, and the effect; where: the place in its source. any_taps:
    whether every list of layers has one reading. own_embeddings: whether it uses the head's.
    needs_lm_head: in the head's file. target_embeddings: whether its form holds the target's.
    """

    title: str
    version: str
    form: Form
    where: str
    families: str
    command: Callable[[Launch, str | None], list[str]] | None = None
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    any_taps: bool = True
    own_embeddings: bool = True
    needs_lm_head: bool = True
    target_embeddings: bool = True

    @property
    def release(self) -> str:
        return f"{self.title} {self.version}"

    def serves(self, family: str) -> bool:
        return family in self.families.split()

    def is_of(self, forms: Collection[Form]) -> bool:
        return self.command is not None and self.form in forms

    def unread_flags(self, config: HeadConfig) -> list[str]:
        return [flag for flag in self.unread if getattr(config, flag)]

    def faults(self, config: HeadConfig, tensors: Mapping[str, object]) -> list[MismatchError]:
        """What this engine cannot read of a correct head; its form is not exported then."""
        found = [
            f"{flag} is set: {self.title} {self.unread[flag]}" for flag in self.unread_flags(config)
        ]
        if not self.any_taps and config.taps[0] != 1:
            found.append(  # the default taps of every target begin with 1
                f"taps {config.taps} cannot be written for {self.title}: it has two readings of a "
                "list that does not begin with 1"
            )
        if not self.own_embeddings and EMBED_TOKENS in tensors:
            found.append(
                f"the head has embeddings of its own: {self.title} uses the target's in their place"
            )
        if self.needs_lm_head and LM_HEAD not in tensors:
            found.append(f"the head uses its target's lm_head: {self.title} needs one in the file")
        hint = f"leave {self.form} out of forms, or train a head without it"
        return [MismatchError(what, hint) for what in found]


# model_types of targets; with another one the engine stops at its start.
# set_eagle3_layers_to_capture and get_embed_and_head in sglang/srt/models:
SGLANG_FAMILIES = """\
apertus deepseek_v2 deepseek_v3 deepseek_v32 exaone_moe gemma3 gemma3_text gemma4 gemma4_text
gemma4_unified glm4_moe glm4_moe_lite glm5_next glm_moe_dsa gpt_oss internlm3 iquestcoder llama
llama4 llama4_text longcat_flash mellum minimax_m2 minimax_m3_vl ministral3 mistral phi3 qwen2
qwen2_5_vl qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl
qwen3_vl_moe qwen4_exp"""
# SupportsEagle3 in vllm/model_executor/models, its transformers backend among them:
VLLM_FAMILIES = """\
afmoe apertus arcee cohere2_moe cwm deepseek_v2 deepseek_v3 deepseek_v4 ernie4_5 flex_olmo
gemma4 gemma4_text gemma4_unified glm glm5_next gpt_bigcode gpt_neox gpt_oss granite granite_swa
hunyuan_v1_dense hunyuan_v1_moe internlm3 iquestcoder jais2 laguna llama llama4 llama4_text
mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl ministral3 mistral mistral3 muse_glimmer
nemotron_h olmo olmo2 olmo3 phi phi3 qwen2 qwen2_5_vl qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text
qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe qwen4_exp seed_oss smollm3 starcoder2
vaultgemma"""
# vLLM's own code of these gives no hidden states; tried: features and tokens are transformers'
VLLM_OPTIONS = {
    family: {"--model-impl": "transformers"}
    for family in ("gemma2", "gemma3_text", "glm4", "glm4_moe", "mixtral")
}
# The graphs that set t_layer_inp in src/models:
LLAMA_CPP_FAMILIES = """\
deepseek_v4 gemma4 gemma4_text gemma4_unified gpt_oss hunyuan_v1_dense internlm3 iquestcoder
lfm2 lfm2_moe llama mimo_v2_flash minimax_m2 mistral mixtral muse_glimmer nemotron_h qwen3
qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp"""
# Converted, their layers have the one Add that eagle3_model_transforms.cpp looks for:
OPENVINO_FAMILIES = "llama mistral phi3 qwen2 qwen3 smollm3"

ENGINES = (
    EngineAbilities(
        "SGLang",
        "0.5.23",
        "sglang",
        "sglang/srt/models/llama_eagle3.py:97-100 (the residual is taken before the norm)",
        SGLANG_FAMILIES,
        sglang_command,
        unread={"norm_before_residual": IGNORES},
        any_taps=False,
        own_embeddings=False,
        needs_lm_head=False,
        target_embeddings=False,
    ),
    EngineAbilities(
        "vLLM",
        "0.32",
        "vllm",
        "vllm/model_executor/models/llama_eagle3.py",
        f"{VLLM_FAMILIES} {' '.join(VLLM_OPTIONS)}",
        vllm_command,
        options=VLLM_OPTIONS,
    ),
    EngineAbilities(
        "llama.cpp",
        "of llama-cpp-python 0.3.36",
        "vllm",
        "conversion/llama.py:232-252 (no name for fc_norm.*), src/models/eagle3.cpp:286-288 "
        "(the layer's output is fed back before the norm)",
        LLAMA_CPP_FAMILIES,
        unread={"fc_norm": REFUSES, "norm_output": IGNORES},
    ),
    EngineAbilities(
        "OpenVINO",
        "2026.4",
        "openvino",
        "optimum/exporters/openvino/model_patcher.py:8447-8472, 8510-8520, 8586-8587, 8601 (one "
        "norm, the last; other weights are left out)",
        OPENVINO_FAMILIES,
        openvino_command,
        unread=dict.fromkeys(FLAGS, IGNORES),
    ),
)


def engine_of(form: Form) -> EngineAbilities:
    """The engine whose own form it is."""
    return next(engine for engine in ENGINES if engine.form == form and engine.command)
