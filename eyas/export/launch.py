"""The commands that start SGLang and vLLM with an exported head, and the one that converts it for
OpenVINO, which has no server: three templates, filled with values.

OpenVINO's converter writes no tapped layers, and GenAI then takes the outputs of layers 2, L / 2
and L - 3, each one later than EAGLE-3's: the layers are written into the converted model, where it
looks for them (openvino.genai's src/cpp/src/speculative_decoding/eagle3_model_transforms.cpp).

Read from SGLang 0.5.23 (docs.sglang.io/docs/advanced_features/speculative_decoding; the wheel's
sglang/srt/arg_groups/speculative_hook.py) and vLLM 0.32.0 (docs.vllm.ai, "EAGLE draft models"; the
wheel's vllm/config/speculative.py).
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

EngineForm = Literal["sglang", "vllm", "openvino"]
DTYPES = ("bfloat16", "float16", "float32")  # names that both engines know
EAGLE3_MODE = '<eagle3_mode value="True" />'  # of the runtime info that OpenVINO's converter writes


@dataclass(frozen=True, slots=True)
class Launch:
    """The target as the engine finds it, and the size of drafts (the root counted).

    dtype: the target's precision, one of DTYPES, which the engines compute the head in as well;
    None leaves it to them. max_length: of a request in tokens; None is the target's own.
    draft_window: the head's `sliding_window`, which SGLang takes from the command only. taps: the
    layers whose outputs the head reads, which OpenVINO takes from the converted file only.
    """

    target: str
    num_draft_steps: int
    tree_topk: int
    num_verify_tokens: int
    dtype: str | None = None
    max_length: int | None = None
    draft_window: int | None = None
    taps: tuple[int, int, int] | None = None

    @property
    def title(self) -> str:
        """The target's name for people: of a folder, its last part."""
        return Path(self.target).name if Path(self.target).is_absolute() else self.target

    @property
    def served_nodes(self) -> int:
        """Tokens that the target verifies: no more than the draft steps can give.

        SGLang verifies the drafts of a chain and the root, whatever number it is given.
        """
        if self.tree_topk == 1:
            return self.num_draft_steps + 1
        candidates = self.tree_topk + (self.num_draft_steps - 1) * self.tree_topk**2
        return min(self.num_verify_tokens, candidates + 1)

    def arguments(self, engine: EngineForm, head: str) -> list[str]:
        """The words of the command. head: the folder that the engine loads the head from."""
        if engine == "openvino":
            return ["optimum-cli", "export", "openvino", *self._openvino(head)]
        program, options = self._sglang(head) if engine == "sglang" else self._vllm(head)
        given = ((name, str(value)) for name, value in options.items() if value is not None)
        return [*program, *(word for option in given for word in option)]

    def command(self, engine: EngineForm) -> str:
        """The command for a shell, one option a line, run in the folder of the head's card."""
        words = self.arguments(engine, f"./{engine}")
        first = next(at for at, word in enumerate(words) if word.startswith("--"))
        lines = [words[:first], *(words[at : at + 2] for at in range(first, len(words), 2))]
        command = " \\\n    ".join(map(shlex.join, lines))
        if engine == "openvino" and self.taps is not None:
            script = f"s#{EAGLE3_MODE}#&{layers_info(self.taps)}#"
            command += "\n" + shlex.join(["sed", "-i", script, f"{words[-1]}/openvino_model.xml"])
        return command

    def _sglang(self, head: str) -> tuple[list[str], dict[str, object]]:
        return ["python", "-m", "sglang.launch_server"], {
            "--model-path": self.target,
            "--dtype": self.dtype,
            "--context-length": self.max_length,
            "--speculative-algorithm": "EAGLE3",
            "--speculative-draft-model-path": head,
            "--speculative-num-steps": self.num_draft_steps,
            "--speculative-eagle-topk": self.tree_topk,
            "--speculative-num-draft-tokens": self.served_nodes,
            "--speculative-draft-window-size": self.draft_window,
        }

    def _vllm(self, head: str) -> tuple[list[str], dict[str, object]]:
        """vLLM drafts chains only."""
        speculation = {
            "method": "eagle3",
            "model": head,
            "num_speculative_tokens": self.num_draft_steps,
        }
        return ["vllm", "serve", self.target], {
            "--dtype": self.dtype,
            "--max-model-len": self.max_length,
            "--speculative-config": json.dumps(speculation),
        }

    def _openvino(self, head: str) -> list[str]:
        """For openvino_genai.draft_model; the target is converted in the same way. The folder that
        is written comes last."""
        task = ["--task", "text-generation-with-past"]
        return ["--model", head, *task, "--trust-remote-code", f"{head.rstrip('/')}-ir"]


def layers_info(taps: tuple[int, int, int]) -> str:
    """What follows EAGLE3_MODE in a converted head: numbers between spaces, commas are not read."""
    return f'<hidden_layers_list value="{" ".join(map(str, taps))}" />'
