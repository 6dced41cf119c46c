"""How fast the stages go, in tokens a second: stated, or estimated for a named GPU. (Measured here:
sample.)

Knows published peaks and an assumed share of them. Measures nothing.

Letters: P parameters of the target, b requests at once.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from eyas.errors import ConfigError
from eyas.plan.needs import Needs

Stage = Literal["generate", "capture", "train"]
STAGES: tuple[Stage, ...] = ("generate", "capture", "train")
# of the published peaks, assumed: good kernels on large matrices reach more
COMPUTE_SHARE, BANDWIDTH_SHARE = 0.4, 0.6
BYTES_PER_PARAMETER = 2  # bfloat16


@dataclasses.dataclass(frozen=True)
class Device:
    """Published peaks of one device: dense bfloat16 arithmetic, memory bandwidth, memory."""

    teraflops: float
    terabytes_per_s: float
    gigabytes: int


# From the makers' data sheets, without sparsity.
DEVICES = {
    "a10g": Device(70, 0.60, 24),
    "a100-40gb": Device(312, 1.555, 40),
    "a100-80gb": Device(312, 2.039, 80),
    "b200": Device(2250, 8.0, 180),
    "h100-pcie": Device(756, 2.0, 80),
    "h100-sxm": Device(989, 3.35, 80),
    "h200": Device(989, 4.8, 141),
    "l4": Device(121, 0.30, 24),
    "l40s": Device(362, 0.864, 48),
    "mi300x": Device(1307, 5.3, 192),
    "rtx-4090": Device(165, 1.008, 24),
}


@dataclasses.dataclass(frozen=True)
class Speed:
    """Tokens a second of a stage: of generate those answered, of capture and train those of
    samples. how: in words.
    """

    tokens_per_s: float
    how: str


Speeds = dict[Stage, Speed]


def stated(values: list[str]) -> Speeds:
    """Speeds from "stage=tokens a second". Raises ConfigError."""
    speeds: Speeds = {}
    for value in values:
        name, _, number = value.partition("=")
        stage = next((stage for stage in STAGES if stage == name.strip()), None)
        try:
            tokens = float(number)
        except ValueError:
            tokens = 0.0
        if stage is None or not 0 < tokens < float("inf"):
            hint = f"e.g. --speed capture=20000; the stages: {', '.join(STAGES)}"
            raise ConfigError(f"--speed {value} is no stage and its tokens a second", hint)
        speeds[stage] = Speed(tokens, "stated")
    return speeds


def published(name: str, parameters: int, batch: int, train_flops: float, count: int = 1) -> Speeds:
    """Estimates for `count` devices of a name in DEVICES. train_flops: of one token through the
    head's training.

    A decoding step of b requests reads all weights once and computes 2 P for each: what takes
    longer counts. Capture computes 2 P a token. Several devices are taken to share the work without
    loss. Raises ConfigError for an unknown name.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        raise ConfigError(
            f"no published peaks of {name} are known here",
            f"known: {', '.join(DEVICES)}; or state --speed",
        )
    flops, bandwidth = (
        COMPUTE_SHARE * device.teraflops * 1e12,
        BANDWIDTH_SHARE * device.terabytes_per_s * 1e12,
    )
    step_s = max(parameters * BYTES_PER_PARAMETER / bandwidth, 2 * parameters * batch / flops)
    peaks = (
        f"{device.teraflops:g} TFLOP/s and {BANDWIDTH_SHARE:.0%} of {device.terabytes_per_s:g} TB/s"
    )
    how = f"estimated: {COMPUTE_SHARE:.0%} of {peaks}, {name.lower()}'s published peaks" + (
        f", times {count}" if count > 1 else ""
    )
    return {
        "generate": Speed(count * batch / step_s, how),
        "capture": Speed(count * flops / (2 * parameters), how),
        "train": Speed(count * flops / train_flops, how),
    }


def devices_needed(name: str, parameters: int) -> int:
    """How many devices of a name hold the target in bfloat16 with a fifth of their memory to spare."""
    return max(
        1, -(-parameters * BYTES_PER_PARAMETER // round(0.8e9 * DEVICES[name.lower()].gigabytes))
    )


def train_flops_per_token(parameters: int, num_ttt_steps: int, target_matrix: int) -> float:
    """Arithmetic of one token: forward and backward of the head at every step of the unroll, and
    the target's lm_head once.
    """
    return 6.0 * parameters * num_ttt_steps + 2.0 * target_matrix


def hours(needs: Needs, speeds: Speeds, epochs: int) -> dict[Stage, float]:
    """Hours of each stage whose speed is known. A measured speed of `generate` holds the prompts'
    part; an estimated one does not, and takes them at capture's."""
    found: dict[Stage, float] = {}
    if "generate" in speeds:
        seconds = needs.answer_tokens / speeds["generate"].tokens_per_s
        if speeds["generate"].how.startswith("estimated"):
            seconds += needs.prompt_tokens / speeds["capture"].tokens_per_s
        found["generate"] = seconds / 3600
    if "capture" in speeds:
        found["capture"] = needs.feature_tokens / speeds["capture"].tokens_per_s / 3600
    if "train" in speeds:
        found["train"] = epochs * needs.feature_tokens / speeds["train"].tokens_per_s / 3600
    return found
