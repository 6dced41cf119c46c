"""OpenVINO GenAI as a worker of engines.py.

Weights are stored as they came (bf16); the CPU plugin computes in fp32. A chain sets
num_assistant_tokens alone, a tree also branching_factor and tree_depth. A tree needs a precision of
keys and values: where none is named, GenAI moves those of an accepted branch as if they had
another, and the answers are wrong.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from wire import Decoded, serve

HERE = Path(__file__).parent


class OpenVino:
    """One pipeline with an EAGLE-3 head."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        device = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "INFERENCE_NUM_THREADS": settings["threads"],
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_HYPER_THREADING": True,
        }
        head = exported(settings, settings["head_openvino"], settings["layers_openvino"])
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.enable_prefix_caching = False
        scheduler.max_num_seqs = 1
        # a prompt whole: one whose last part is a single token ends a tree with an error
        scheduler.max_num_batched_tokens = settings["max_length"]
        self.pipeline = genai.LLMPipeline(
            exported(settings, settings["target"]),
            "CPU",
            draft_model=genai.draft_model(head, "CPU", **device),
            scheduler_config=scheduler,
            **device,
        )

    def decode(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Decoded:
        end = self.settings["eos_token_id"]
        config = genai.GenerationConfig(
            max_new_tokens=max_tokens, ignore_eos=ignore_eos, do_sample=False, eos_token_id=end
        )
        config.apply_chat_template = False
        config.num_assistant_tokens = self.settings["num_draft_steps"]
        if "tree_topk" in self.settings:
            config.branching_factor = self.settings["tree_topk"]
            config.tree_depth = self.settings["num_draft_steps"]
            config.num_assistant_tokens = self.settings["num_verify_tokens"] - 1
        ids = ov.Tensor(np.array([prompt], dtype=np.int64))
        inputs = genai.TokenizedInputs(ids, ov.Tensor(np.ones((1, len(prompt)), dtype=np.int64)))
        answer = self.pipeline.generate(inputs, config)
        tokens = list(answer.tokens[0])
        # ms, one for each forward that gave tokens
        measured = answer.perf_metrics.raw_metrics
        times = measured.m_new_token_times
        return Decoded(tokens, (times[-1] - times[0]) / 1e3, len(times) - 1)


def exported(settings: dict[str, Any], folder: str, *info: str) -> str:
    """The model of a Hugging Face folder in OpenVINO's form, exported once. info: of a head, its
    layers.
    """
    made = Path(settings["work"], f"{Path(folder).name}-openvino")
    if not made.exists():
        half = made.with_name(made.name + ".half")
        command = [sys.executable, str(HERE / "convert_openvino.py"), folder, str(half)]
        subprocess.run([*command, *info], check=True, stdout=sys.stderr)
        half.rename(made)
    return str(made)


if __name__ == "__main__":
    serve(OpenVino)
