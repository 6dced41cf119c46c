"""Our engines' form in the hands of transformers' own Llama parts: config, rotation, attention, MLP
and norms, put together by EAGLE-3's order and nothing of ours, against our Head. Step by step,
drafts of drafts included.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from transformers import AutoConfig, DynamicCache
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from eyas.operators.head import load_head
from eyas.operators.vocab import TargetVocabulary
from tests.greedy_server import with_cache
from tests.tiny import LLAMA3, tiny_target
from tests.tiny_head import head_folder

T, STEPS = 24, 3
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
FLAGS = [
    {},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_output": True},
    {"fc_norm": True, "norm_output": True},
]


class TheirHead:
    """An EAGLE-3 head of transformers' modules, loaded from an exported folder by names alone."""

    def __init__(self, folder: Path) -> None:
        self.config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
        self.stated = json.loads((folder / "config.json").read_text())
        self.tensors = safetensors.torch.load_file(folder / "model.safetensors")
        H = self.config.hidden_size
        self.attention, self.mlp = LlamaAttention(self.config, 0), LlamaMLP(self.config)
        for name in ("q_proj", "k_proj", "v_proj"):  # EAGLE's are of twice the width
            setattr(
                self.attention,
                name,
                torch.nn.Linear(2 * H, getattr(self.attention, name).out_features, bias=False),
            )
        for module, prefix in (
            (self.attention, "midlayer.self_attn."),
            (self.mlp, "midlayer.mlp."),
        ):
            own = {
                name.removeprefix(prefix): tensor
                for name, tensor in self.tensors.items()
                if name.startswith(prefix)
            }
            module.load_state_dict(own)
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.cache = DynamicCache()

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.tensors[name]
        module = LlamaRMSNorm(len(weight), self.config.rms_norm_eps)
        module.load_state_dict({"weight": weight})
        return module(x)

    def fuse(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        if self.stated["eagle_config"].get("norm_before_fc"):
            aux_hidden = self.norm("input_norm.weight", aux_hidden)
        if self.stated["fc_norm"]:
            chunks = aux_hidden.chunk(3, -1)
            aux_hidden = torch.cat(
                [self.norm(f"fc_norm.{at}.weight", chunk) for at, chunk in enumerate(chunks)], -1
            )
        return F.linear(aux_hidden, self.tensors["fc.weight"])

    def step(self, embeds: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is fed back, and logits; of tokens after those of the steps before."""
        at, count = self.cache.get_seq_length(), hidden.shape[1]
        positions = torch.arange(at, at + count)
        unseen = torch.arange(at + count) > positions[:, None]
        mask = torch.zeros(1, 1, count, at + count).masked_fill(
            unseen, torch.finfo(torch.float32).min
        )
        x = torch.cat(
            (
                self.norm("midlayer.input_layernorm.weight", embeds),
                self.norm("midlayer.hidden_norm.weight", hidden),
            ),
            -1,
        )
        turn = self.rotary(x, positions[None])
        kept = with_cache(self.attention, self.cache)
        mixed, _ = self.attention(x, position_embeddings=turn, attention_mask=mask, **kept)
        hidden = hidden + mixed
        hidden = hidden + self.mlp(self.norm("midlayer.post_attention_layernorm.weight", hidden))
        normed = self.norm("norm.weight", hidden)
        return normed if self.stated.get("norm_output") else hidden, F.linear(
            normed, self.tensors["lm_head.weight"]
        )


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags) or "plain")
@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "default", "rope_theta": 1e6}, LLAMA3, LINEAR],
    ids=lambda rope: rope["rope_type"],
)
def test_logits_of_every_step_are_the_same(tmp_path, rope, flags):
    target = tiny_target(tmp_path / "target", rope_parameters=rope)
    folder = head_folder(target, tmp_path / "head", "sglang", **flags)
    ours, theirs = load_head(folder), TheirHead(folder)
    embed_tokens = TargetVocabulary.load(target).embed_tokens
    generator = torch.Generator().manual_seed(0)
    aux_hidden = torch.randn(1, T, 96, generator=generator)
    tokens = torch.randint(320, (1, T), generator=generator)
    with torch.no_grad():
        our_hidden, their_hidden, past = ours.fuse(aux_hidden), theirs.fuse(aux_hidden), None
        torch.testing.assert_close(our_hidden, their_hidden, rtol=1e-5, atol=1e-5)
        for _ in range(STEPS):
            embeds = F.embedding(tokens, embed_tokens)
            our_hidden, past = ours(embeds, our_hidden, past)
            our_logits = ours.logits(our_hidden)
            their_hidden, their_logits = theirs.step(embeds, their_hidden)
            torch.testing.assert_close(
                our_logits, their_logits, rtol=1e-4, atol=1e-4 * float(their_logits.std())
            )
            tokens = ours.target_ids_W[our_logits[:, -1].argmax(-1)][:, None]
            our_hidden, their_hidden = our_hidden[:, -1:], their_hidden[:, -1:]
