import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eyas.model.config import RopeConfig
from eyas.model.rope import rope_table
from eyas.operators.head import apply_rope, rotation
from tests.tiny import LLAMA3


@pytest.mark.parametrize(
    "stated",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
        LLAMA3 | {"original_max_position_embeddings": 512},
    ],
    ids=lambda stated: stated["rope_type"],
)
@pytest.mark.parametrize("head_dim", [6, 64, 128])
def test_table_and_rotation_equal_transformers(stated, head_dim):
    rope = RopeConfig.of_target(stated)
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rope_parameters=stated,
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
