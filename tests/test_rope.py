import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eyas.model.config import RopeConfig
from eyas.model.rope import rope_table
from eyas.operators.head import apply_rope, rotation

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=10000.0),
        RopeConfig(theta=1e6, kind="linear", factor=4.0),
        RopeConfig(theta=500000.0, kind="llama3", **LLAMA3),
    ],
    ids=lambda rope: rope.kind,
)
@pytest.mark.parametrize("head_dim", [6, 64, 128])
def test_table_and_rotation_equal_transformers(rope, head_dim):
    parameters = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.kind != "default":
        parameters |= {
            key: getattr(rope, key) for key in (LLAMA3 if rope.kind == "llama3" else ("factor",))
        }
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rope_parameters=parameters,
    )
    length = 3000
    q = torch.randn(1, 2, length, head_dim, generator=torch.Generator().manual_seed(0))
    their_cos, their_sin = LlamaRotaryEmbedding(config)(q, torch.arange(length)[None])
    cos, sin = rotation(rope, head_dim, torch.arange(length))
    for table, whole in zip(rope_table(rope, head_dim, length), (cos, sin), strict=True):
        np.testing.assert_allclose(table, whole[:, : head_dim // 2].numpy(), rtol=0, atol=1e-6)
    assert cos.shape == sin.shape == (length, head_dim)
    assert cos.dtype == sin.dtype == torch.float32
    # 3000 positions times one float32 rounding of a frequency
    torch.testing.assert_close(cos, their_cos[0], rtol=0, atol=2e-4)
    torch.testing.assert_close(sin, their_sin[0], rtol=0, atol=2e-4)
    theirs, _ = apply_rotary_pos_emb(q, q, cos[None], sin[None])
    assert torch.equal(apply_rope(q, cos, sin), theirs)
