"""The target for inference: a Llama-family decoder with the three taps EAGLE-3 needs. Knows no request and no head.

Plain twin: transformers' own models; `tests/test_target.py` holds the logits of this one to theirs.

Letters: M tokens of one forward, B batch, T sequence, Ht hidden, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from eyas.errors import MismatchError
from eyas.model.attention import prefix_mask
from eyas.model.block import Block, Placement, Rope, rms_norm
from eyas.model.cache import KVCache
from eyas.model.config import Taps, TargetConfig
from eyas.model.linear import Linear
from eyas.model.weights import read_tensors, tensor_sha256

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Target:
    """Weights of a target, laid out for this machine."""

    def __init__(self, config: TargetConfig, tensors: dict[str, torch.Tensor], dtype: str, device: str = "cpu") -> None:
        """tensors: as in a Hugging Face checkpoint. Raises MismatchError when one is missing or has another shape."""
        self.config, self.dtype, self.device = config, DTYPES[dtype], device
        check_tensors(config, tensors)
        stored_head = tensors["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
        self.lm_head_sha256 = tensor_sha256(stored_head)
        cast = {name: tensor.to(device, self.dtype) for name, tensor in tensors.items()}
        self.embed_tokens = cast["model.embed_tokens.weight"]
        self.lm_head = self.embed_tokens if config.tie_word_embeddings else cast["lm_head.weight"]
        self.head = Linear(self.lm_head)
        self._norm = cast["model.norm.weight"]
        self._input_norms, self._blocks = [], []
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            own = {name.removeprefix(prefix): tensor for name, tensor in cast.items() if name.startswith(prefix)}
            self._input_norms.append(own["input_layernorm.weight"])
            self._blocks.append(Block(config, own, layer))
        # The last position of a request and the nodes of its tree: a little beyond the trained context never hurts.
        self.rope = Rope(config, config.max_position_embeddings + 64, self.dtype, device)

    @classmethod
    def load(cls, folder: str | Path, dtype: str = "float32", device: str = "cpu") -> Target:
        """Load a Hugging Face folder. dtype: a key of DTYPES. Raises MissingInputError, CorruptError, MismatchError."""
        return cls(TargetConfig.from_folder(folder), read_tensors(folder), dtype, device)

    def prepare(self, rows: set[int]) -> None:
        """Lay the weights out for forwards of these numbers of tokens (see `Linear.prepare`)."""
        for linear in [self.head, *(linear for block in self._blocks for linear in block.linears)]:
            linear.prepare(rows)

    def new_cache(self, rows: int, columns: int) -> KVCache:
        heads = (self.config.num_key_value_heads, self.config.head_dim)
        return KVCache(self.config.num_hidden_layers, rows, columns, heads, self.dtype, self.device)

    def forward(
        self, tokens_M: torch.Tensor, at: Placement, cache: KVCache, taps: Taps | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """tokens int64 [M] -> last hidden [M, Ht] after the final norm, and aux_hidden [M, 3 * Ht] when taps are given."""
        h = F.embedding(tokens_M, self.embed_tokens)
        tapped = []
        for layer, (input_norm, block) in enumerate(zip(self._input_norms, self._blocks, strict=True)):
            h = block(rms_norm(h, input_norm, self.config.rms_norm_eps), h, at, cache)
            if taps is not None and layer in taps:
                tapped.append(h)
        aux_hidden = torch.cat(tapped, dim=-1) if taps is not None else None
        return rms_norm(h, self._norm, self.config.rms_norm_eps), aux_hidden

    @torch.inference_mode()
    def features(self, tokens_BT: torch.Tensor, taps: Taps | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [B, T] -> aux_hidden [B, T, 3 * Ht] and last_hidden [B, T, Ht] (post-norm), in the target's dtype.

        Right padding is harmless: attention is causal. `taps` default to the three of EAGLE-3.
        """
        B, T = tokens_BT.shape
        positions_BT, slots_BT = np.tile(np.arange(T), (B, 1)), np.arange(B * T).reshape(B, T)
        at = self.rope.place(0, T, positions_BT, slots_BT, prefix_mask(np.tri(T, dtype=bool)[None], [0], T))
        hidden, aux_hidden = self.forward(tokens_BT.flatten(), at, self.new_cache(B, T), taps or self.config.default_taps)
        assert aux_hidden is not None
        return aux_hidden.view(B, T, -1), hidden.view(B, T, -1)

    @torch.inference_mode()
    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """int64 [B, T] -> logits [B, T, V]: for checks, not for decoding."""
        _, hidden_BTH = self.features(tokens_BT)
        return self.head(hidden_BTH.flatten(0, 1)).view(*tokens_BT.shape, -1)


def check_tensors(config: TargetConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Every tensor that the config asks for is there with its shape, and no weight is left over. Raises MismatchError."""
    H, inner, V = config.hidden_size, config.intermediate_size, config.vocab_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,)}
    if not config.tie_word_embeddings:
        expected["lm_head.weight"] = (V, H)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        expected |= {f"{prefix}{name}_layernorm.weight": (H,) for name in ("input", "post_attention")}
        for name, shape in {"q": (q, H), "k": (kv, H), "v": (kv, H), "o": (H, q)}.items():
            expected[f"{prefix}self_attn.{name}_proj.weight"] = shape
            if config.attention_out_bias if name == "o" else config.attention_bias:
                expected[f"{prefix}self_attn.{name}_proj.bias"] = shape[:1]
            if config.qk_norm and name in "qk":
                expected[f"{prefix}self_attn.{name}_norm.weight"] = (config.head_dim,)
        for name, shape in {"gate": (inner, H), "up": (inner, H), "down": (H, inner)}.items():
            expected[f"{prefix}mlp.{name}_proj.weight"] = shape
            if config.mlp_bias:
                expected[f"{prefix}mlp.{name}_proj.bias"] = shape[:1]
    ignored = {"lm_head.weight"} | {name for name in tensors if name.endswith("rotary_emb.inv_freq")}
    wrong = [
        f"{name}: {tuple(tensors[name].shape) if name in tensors else 'missing'}, expected {shape}"
        for name, shape in expected.items()
        if name not in tensors or tuple(tensors[name].shape) != shape
    ]
    wrong += [f"{name}: not a tensor of this architecture" for name in tensors.keys() - expected.keys() - ignored]
    if wrong:
        listed = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise MismatchError(f"the weights do not fit config.json: {listed}", "restore the checkpoint from its source")
