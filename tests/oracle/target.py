"""The target in PyTorch operators: what the native library computes, written plainly.

An `OperatorTarget` is used where a `Target` is, by an engine too, which walks its trees in Python.

Letters: M rows of one forward, R rows whose logits are asked for, V vocabulary, Ht hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from eyas.engine.tree import Tree, tree_of_line
from eyas.model.architecture import TargetConfig
from eyas.model.arrays import Array
from eyas.model.config import Taps
from eyas.model.draws import Draws
from eyas.model.native import Verified
from eyas.model.rows import (
    FeatureCache,
    NodesToVerify,
    PagedCache,
    Roots,
    Rows,
    TargetOutput,
    rows_of,
    slots_of,
)
from eyas.model.target import Target
from eyas.operators.tensors import array_of, tensor_of, tensors_of
from eyas.operators.vocab import capped
from tests.oracle.block import Block, Linear, PositionTables, rms_norm
from tests.oracle.rows import TensorCache, TensorRows


class Layers:
    def __init__(
        self,
        config: TargetConfig,
        tensors: dict[str, torch.Tensor],
        lm_head: torch.Tensor,
    ) -> None:
        """tensors: checked, of one dtype and device."""
        self._config, self._embed_tokens = config, tensors["model.embed_tokens.weight"]
        self.head = Linear(lm_head)
        self._norm, self._eps = tensors["model.norm.weight"], config.rms_norm_eps
        self._input_norms, self._blocks = [], []
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            own = {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            self._input_norms.append(own.get("input_layernorm.weight"))
            self._blocks.append(Block(config, own, layer))
        # The last position of a request and the nodes of its tree: a little beyond the trained
        # context never hurts.
        length = config.max_position_embeddings + 64
        self._positions = PositionTables(config, length, self._embed_tokens.dtype)

    def hidden(
        self, rows: TensorRows, cache: TensorCache, taps: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Last hidden [M, Ht] after the final norm; aux_hidden [M, taps * Ht] where there are."""
        h = F.embedding(rows.token, self._embed_tokens)
        if self._config.embed_scale != 1.0:
            h = h * torch.tensor(self._config.embed_scale, dtype=h.dtype, device=h.device)
        at = self._positions.place(rows, cache.page_size)
        tapped = []
        for layer, (input_norm, block) in enumerate(
            zip(self._input_norms, self._blocks, strict=True)
        ):
            x = h if input_norm is None else rms_norm(h, input_norm, self._eps)
            h = block(x, h, at, cache)
            if taps is not None and layer in taps:
                tapped.append(h)
        aux_hidden = torch.cat(tapped, dim=-1) if taps is not None else None
        return rms_norm(h, self._norm, self._eps), aux_hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of last hidden states [R, Ht], as the target has them: scaled, and cut softly."""
        logits = self.head(hidden)
        if self._config.logit_scale != 1.0:
            logits = logits * self._config.logit_scale
        return capped(logits, self._config.logit_softcap)


class OperatorTarget(Target):
    def _lay_out(self) -> None:
        arrays = {name: one for name, one in self._weights.cast.items() if "lm_head" not in name}
        self.layers = Layers(self.config, tensors_of(arrays), tensor_of(self.lm_head))

    @torch.inference_mode()
    def forward(
        self,
        rows: Rows,
        cache: PagedCache,
        taps: Taps | None = None,
        logits_of: Array | None = None,
        features: FeatureCache | None = None,
    ) -> TargetOutput:
        states = self.layers.hidden(TensorRows.of(rows), TensorCache(cache), taps)
        hidden, aux_hidden = states[0], None if states[1] is None else array_of(states[1])
        if features is not None and aux_hidden is not None:
            features.write(rows.slot, aux_hidden)
            aux_hidden = None
        logits = self.layers.logits(hidden if logits_of is None else hidden[tensor_of(logits_of)])
        return TargetOutput(aux_hidden, logits.float().numpy(), logits.argmax(-1).numpy())

    @torch.inference_mode()
    def hidden(self, rows: Rows, cache: PagedCache, taps: Taps) -> tuple[Array, Array]:
        last_hidden, aux_hidden = self.layers.hidden(TensorRows.of(rows), TensorCache(cache), taps)
        assert aux_hidden is not None
        return array_of(last_hidden), array_of(aux_hidden)

    def verify(
        self,
        roots: Roots,
        chosen: NodesToVerify,
        cache: PagedCache,
        taps: Taps | None,
        features: FeatureCache | None,
        draws: Draws,
    ) -> Verified:
        """The logits of all nodes: who asks draws, walks and moves."""
        trees = [tree_of_line(root, chosen, b) for b, root in enumerate(roots.tokens)]
        rows = rows_of_trees(roots, trees, cache.page_size)
        logits = self.forward(rows, cache, taps, None, features).logits
        parts = np.split(logits, np.cumsum([len(tree) for tree in trees])[:-1])
        return Verified([[] for _ in trees], dict(enumerate(parts)))


def rows_of_trees(roots: Roots, trees: Sequence[Tree], page_size: int) -> Rows:
    """The nodes of all trees, tree after tree, as rows."""
    sizes, table = [len(tree) for tree in trees], roots.page_table
    prefix = np.repeat(roots.lens, sizes)
    request = np.repeat(np.arange(len(trees)), sizes)
    node = np.concatenate([np.arange(size) for size in sizes])
    depths, seen = list[int](), list[int]()
    for tree in trees:
        first = len(depths)
        for number, parent in enumerate(tree.parents):
            depths.append(depths[first + parent] + 1 if number else 0)
            seen.append((seen[first + parent] if number else 0) | 1 << number)
    arrays = np.empty((6, len(node)), dtype=np.int64)
    arrays[0] = [token for tree in trees for token in tree.tokens]
    arrays[1] = request
    arrays[2] = prefix + depths
    arrays[3] = slots_of(table, request, prefix + node, page_size)
    arrays[4] = prefix
    arrays[5].view(np.uint64)[:] = seen
    return rows_of(arrays, table)


def logits_of(target: Target, tokens_BT: torch.Tensor) -> torch.Tensor:
    return tensor_of(target.logits(tokens_BT.numpy()))


def features_of(target: Target, tokens_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    aux_hidden, last_hidden = target.features(tokens_BT.numpy())
    return tensor_of(aux_hidden), tensor_of(last_hidden)
