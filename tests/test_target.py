"""The target's logits and taps against transformers', for every family, and the layouts of Linear against F.linear."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.errors import MismatchError
from eyas.model.config import TargetConfig
from eyas.model.linear import Linear
from eyas.model.target import Target
from eyas.model.weights import read_tensors
from tests.tiny import FAMILIES, tiny_target

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}
VARIANTS = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4}),
    ("qwen3", {"attention_bias": True, "head_dim": 16}),
]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=lambda value: str(value)[:40])
def test_logits_and_taps_equal_transformers(tmp_path: Path, family: str, overrides: dict) -> None:
    folder = tiny_target(tmp_path, family, **overrides)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens_BT = torch.randint(0, 320, (3, 50))
    ours = Target.load(folder, "float32")
    with torch.inference_mode():
        expected = theirs(tokens_BT, output_hidden_states=True)
    torch.testing.assert_close(ours.logits(tokens_BT), expected.logits, rtol=1e-4, atol=1e-4)
    aux_hidden, last_hidden = ours.features(tokens_BT)
    n = theirs.config.num_hidden_layers
    streams = torch.cat([expected.hidden_states[i] for i in (2, n // 2, n - 3)], dim=-1)
    torch.testing.assert_close(aux_hidden, streams, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last_hidden, expected.hidden_states[-1], rtol=1e-4, atol=1e-4)


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path, initializer_range=0.05)
    tokens_BT = torch.randint(0, 320, (2, 20))
    exact, rounded = Target.load(folder).logits(tokens_BT), Target.load(folder, "bfloat16").logits(tokens_BT)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8, 33])
def test_linear_layouts_equal_the_plain_product(dtype: torch.dtype, bias: bool, rows: int) -> None:
    weight, x, residual = (torch.randn(*shape).to(dtype) for shape in ((48, 37), (rows, 37), (rows, 48)))
    offset = torch.randn(48).to(dtype) if bias else None
    linear = Linear(weight, offset)
    linear.prepare({1, 3, 8})
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-1}
    expected = torch.nn.functional.linear(x, weight, offset)
    torch.testing.assert_close(linear(x), expected, **tolerance)
    torch.testing.assert_close(linear.add(x, residual.clone()), residual + expected, **tolerance)


def test_wrong_weights_and_unsupported_targets_are_named(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path / "a")
    config, tensors = TargetConfig.from_folder(folder), read_tensors(folder)
    del tensors["model.layers.3.mlp.up_proj.weight"]
    with pytest.raises(MismatchError, match=r"layers\.3\.mlp\.up_proj\.weight: missing"):
        Target(config, tensors, "float32")
    sliding = tiny_target(tmp_path / "b", "mistral", sliding_window=16)
    with pytest.raises(MismatchError, match="sliding"):
        Target.load(sliding)
