"""Head against target: what cannot be right is refused with what to write, what differs harmlessly
is not.
"""

from __future__ import annotations

import pytest

from eyas.errors import MismatchError
from eyas.model.config import (
    HeadConfig,
    HeadOptions,
    RopeConfig,
    check_head,
    match_faults,
    same_rotation,
)
from tests.tiny_batch import TINY_TARGET
from tests.tiny_head import PLAIN_NORMS

LLAMA3 = RopeConfig(theta=5e5, kind="llama3", factor=8.0)
TARGET = TINY_TARGET.model_copy(update={"rope": LLAMA3, "max_position_embeddings": 131072})
HEAD = HeadConfig.for_target(TARGET, HeadOptions(draft_vocab_size=24, **PLAIN_NORMS)).model_copy(
    update={"target_lm_head_sha256": "a" * 64}
)

HARMLESS = {
    "its own head size": {"head_dim": 8, "num_attention_heads": 2},
    "a longer context": {"max_position_embeddings": 262144},
    "a shorter context, as SpecForge's stock configs have": {"max_position_embeddings": 2048},
    "no rope_theta": {"rope": RopeConfig()},
    "another inner size": {"intermediate_size": 7},
    "no hash": {"target_lm_head_sha256": ""},
    "other taps": {"taps": (0, 2, 7)},
    "a rope of its own that it says": {"rope": RopeConfig(theta=3e4), "own_rope": True},
}

WRONG = {
    "vocabulary": ({"vocab_size": 41}, "vocabulary of 41, this one 40", "trained on"),
    "hidden size": ({"target_hidden_size": 16}, "hidden size 16, this one 12", "trained on"),
    "taps": ({"taps": (1, 3, 8)}, "taps layer 8, the target has 8 layers", "trained on"),
    "lm_head": (
        {"target_lm_head_sha256": "b" * 64},
        "against the lm_head bbbbbbbbbbbb, this target's is aaaaaaaaaaaa",
        "features were captured from",
    ),
    "theta": (
        {"rope": RopeConfig(theta=1e6)},
        r"is rope_theta 1e\+06, the target's rope_theta 500000 with",
        "own_rope",
    ),
    "no scaling": ({"rope": RopeConfig(theta=5e5)}, "rotary embedding differs", '"own_rope": true'),
    "another scaling": (
        {"rope": LLAMA3.model_copy(update={"factor": 32.0})},
        "'factor': 32.0",
        '"own_rope": true',
    ),
    "a scaled 10000": (
        {"rope": RopeConfig(kind="linear", factor=4.0)},
        "rotary embedding differs",
        '"own_rope": true',
    ),
}


def test_the_default_head_fits():
    check_head(HEAD, TARGET, "a" * 64)


@pytest.mark.parametrize("changes", HARMLESS.values(), ids=HARMLESS)
def test_what_differs_harmlessly_is_let_through(changes):
    check_head(HEAD.model_copy(update=changes), TARGET, "a" * 64)


@pytest.mark.parametrize(("changes", "named", "hint"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_right_is_refused_with_what_to_write(changes, named, hint):
    with pytest.raises(MismatchError, match=named) as error:
        check_head(HEAD.model_copy(update=changes), TARGET, "a" * 64)
    assert hint in error.value.hint


def test_all_faults_are_named_at_once():
    head = HEAD.model_copy(
        update={"vocab_size": 41, "taps": (1, 3, 8), "rope": RopeConfig(theta=1e6)}
    )
    assert len(match_faults(head, TARGET, "a" * 64)) == 3
    with pytest.raises(MismatchError, match=r"vocabulary of 41.*taps layer 8.*rotary embedding"):
        check_head(head, TARGET, "a" * 64)


def test_rotations_are_compared_by_what_they_do():
    # a factor without a kind
    assert same_rotation(RopeConfig(theta=1e6, factor=4.0), RopeConfig(theta=1e6))
    assert same_rotation(RopeConfig(theta=1e6, kind="linear"), RopeConfig(theta=1e6))  # scaled by 1
    assert same_rotation(
        RopeConfig(kind="linear", factor=2.0, low_freq_factor=3.0),
        RopeConfig(kind="linear", factor=2.0),
    )
    assert not same_rotation(
        RopeConfig(kind="linear", factor=2.0), RopeConfig(kind="llama3", factor=2.0)
    )
    assert not same_rotation(
        LLAMA3, LLAMA3.model_copy(update={"original_max_position_embeddings": 4096})
    )
