"""What each engine that loads our exports cannot read of a head, as data.

Found in their sources, proved by `benchmarks/engines.py` (docs/decisions/heads-in-engines.md). A
head with such a flag loads all the same in some of them, and drafts badly: `eyas check` names it.
Versions: SGLang 0.5.23, vLLM 0.32.0, llama.cpp of llama-cpp-python 0.3.36, optimum-intel 2.2 with
OpenVINO GenAI 2026.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from eyas.model.config import HeadConfig
from eyas.model.dialects import Form
from eyas.model.forms import OPENVINO_DROPS

REFUSES = "refuses to load it"
IGNORES = "ignores it, and loses acceptance without a word"


@dataclass(frozen=True, slots=True)
class EngineLoader:
    """How an engine takes a head.

    form: the exported folder that it reads. unread: flags of the head's config that it has no word
    for, with what it does about them; where: the place in its source that says so.
    """

    form: Form
    where: str
    unread: Mapping[str, str] = field(default_factory=dict)

    def unread_flags(self, config: HeadConfig) -> list[str]:
        """The flags that this head sets and this engine does not read."""
        return [flag for flag in self.unread if getattr(config, flag)]


LOADERS = {
    "SGLang": EngineLoader(
        "sglang",
        "sglang/srt/models/llama_eagle3.py:97-100 (the residual is taken before the norm)",
        {"norm_before_residual": IGNORES},
    ),
    "vLLM": EngineLoader("vllm", "vllm/model_executor/models/llama_eagle3.py"),
    "llama.cpp": EngineLoader(
        "vllm",
        "conversion/llama.py:232-252 (no name for fc_norm.*), src/models/eagle3.cpp:286-288 "
        "(the layer's output is fed back before the norm)",
        {"fc_norm": REFUSES, "norm_output": IGNORES},
    ),
    "OpenVINO": EngineLoader(
        "openvino",
        "optimum/exporters/openvino/model_patcher.py:8447-8472, 8510-8520, 8586-8587, 8601 (one "
        "norm, the last; other weights are left out)",
        dict.fromkeys(OPENVINO_DROPS, IGNORES),
    ),
}
