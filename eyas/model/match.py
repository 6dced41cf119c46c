"""Whether a head is its target's: shapes, taps, rotary embedding and the output matrix. Pure; knows
no tensor.

A head that does not fit still drafts, only badly, so what can be seen from the two configs is
refused before anything runs.
"""

from __future__ import annotations

from eyas.errors import MismatchError
from eyas.model.config import HeadConfig, RopeConfig, TargetShape

OWN_TARGET = "serve the head with the target that it was trained on"
# what a config without rope_theta means, to EAGLE's trainer and to every engine
EAGLE_ROPE = RopeConfig()


def check_head(config: HeadConfig, target: TargetShape, target_lm_head_sha256: str) -> None:
    """Raise one MismatchError that names all of `match_faults`, if there are any."""
    faults = match_faults(config, target, target_lm_head_sha256)
    if faults:
        raise MismatchError(
            "the head does not fit this target: " + "; ".join(fault.what for fault in faults),
            faults[0].hint,
        )


def match_faults(
    config: HeadConfig, target: TargetShape, target_lm_head_sha256: str
) -> list[MismatchError]:
    """Everything about the head that cannot be right on this target."""
    faults = shape_faults(config, target)
    trained_with = config.target_lm_head_sha256
    if trained_with and trained_with != target_lm_head_sha256:
        what = (
            f"the head was trained against the lm_head {trained_with[:12]}, this target's is "
            f"{target_lm_head_sha256[:12]}"
        )
        hint = (
            "give the very target that the features were captured from, or capture and train again"
        )
        faults.append(MismatchError(what, hint))
    return faults + rope_faults(config, target)


def shape_faults(config: HeadConfig, target: TargetShape) -> list[MismatchError]:
    """Where the head cannot be run on this target at all."""
    faults = []
    if config.vocab_size != target.vocab_size:
        what = (
            f"the head's target has a vocabulary of {config.vocab_size}, this one "
            f"{target.vocab_size}"
        )
        faults.append(MismatchError(what, OWN_TARGET))
    if config.target_hidden_size != target.hidden_size:
        what = (
            f"the head's target has hidden size {config.target_hidden_size}, this one "
            f"{target.hidden_size}"
        )
        faults.append(MismatchError(what, OWN_TARGET))
    if max(config.taps) >= target.num_hidden_layers:
        what = (
            f"the head taps layer {max(config.taps)}, the target has "
            f"{target.num_hidden_layers} "
            "layers"
        )
        faults.append(MismatchError(what, OWN_TARGET))
    return faults


def rope_faults(config: HeadConfig, target: TargetShape) -> list[MismatchError]:
    """A head turned otherwise than its target, which is a config copied from elsewhere unless the
    head says `own_rope`.

    A plain base of 10000 is let through: it is what heads without rope_theta were trained with,
    EAGLE's own among them.
    """
    if (
        config.own_rope
        or same_rotation(config.rope, target.rope)
        or same_rotation(config.rope, EAGLE_ROPE)
    ):
        return []
    what = (
        f"rotary embedding differs: the head's is {spelled(config.rope)}, the target's "
        f"{spelled(target.rope)}"
    )
    hint = (
        "write what the head was trained with into its config, as rope_theta and rope_scaling; if "
        "it was trained with just "
        'this, write "own_rope": true'
    )
    return [MismatchError(what, hint)]


def same_rotation(one: RopeConfig, other: RopeConfig) -> bool:
    """Whether two turn alike: parameters of a scaling that is not in use, or scales by 1, do not
    count.
    """
    return turning(one).to_hf() == turning(other).to_hf()


def turning(rope: RopeConfig) -> RopeConfig:
    """The rope without a scaling that changes nothing."""
    return RopeConfig(theta=rope.theta) if rope.factor == 1.0 else rope


def spelled(rope: RopeConfig) -> str:
    """As its config.json would say it."""
    scaling = rope.to_hf()["rope_scaling"]
    return f"rope_theta {rope.theta:g}" + (f" with rope_scaling {scaling}" if scaling else "")
