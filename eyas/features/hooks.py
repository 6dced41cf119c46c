"""Features of any causal language model of transformers, by hooks on its layers.

Knows transformers' models by their structure: a list of decoder layers, and an lm_head that
something feeds. Knows no family by its name. What the hooks see is held against the model's own
`output_hidden_states` and logits before anything is captured.

Letters: B batch, T sequence, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from eyas.errors import ConfigError, MismatchError
from eyas.features.decoder import Beginning, Streams
from eyas.model.config import Taps, TargetShape
from eyas.model.vocab import (
    ANOTHER,
    first_line,
    shape_of,
    transformers_config,
    transformers_matrices,
)
from eyas.model.weights import tensor_sha256

PROOF_TOKENS = 40  # of each of two made-up rows
# of a stream's own size
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


class HookedDecoder:
    """A model of transformers, its taps and what feeds its lm_head."""

    def __init__(self, model: Any, shape: TargetShape, lm_head: Tensor) -> None:
        """lm_head: [V, H] as stored. Raises MismatchError for a model in which the streams cannot
        be told for certain.
        """
        self._model, self.shape = model.eval().requires_grad_(False), shape
        self.lm_head_sha256 = tensor_sha256(lm_head)
        self._lm_head = model.get_output_embeddings()
        if self._lm_head is None:
            raise MismatchError(f"{type(model).__name__} has no lm_head", ANOTHER)
        self._device = model.get_input_embeddings().weight.device
        # kept on the disk or in host memory by accelerate, which moves the input itself
        if self._device.type == "meta":
            self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._layers = decoder_layers(model, shape, self._proof_tokens())
        self._prove(lm_head)
        self.reuses = self._goes_on_alike()

    @classmethod
    def load(cls, folder: str | Path, dtype: str, device_map: str | None = None) -> HookedDecoder:
        """Load a folder by AutoModelForCausalLM. device_map: accelerate's, for a model larger than
        one device.

        Raises ConfigError where accelerate is asked for and absent, MismatchError,
        MissingInputError, CorruptError.
        """
        if device_map is not None and importlib.util.find_spec("accelerate") is None:
            raise ConfigError(
                f"device_map: {device_map} needs accelerate, which is not installed",
                "pip install 'eyas[large]', or leave it out",
            )
        config = transformers_config(folder)
        shape = shape_of(config, folder)
        _, lm_head = transformers_matrices(folder, shape)
        capped = (
            getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
            is not None
        )
        # the others leave the soft cap out
        options = {"attn_implementation": "eager"} if capped else {}
        if device_map is not None:
            options["device_map"] = device_map
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=False,
                **options,
            )
        except (ValueError, ImportError, KeyError, OSError) as error:
            raise MismatchError(
                f"transformers does not load {folder}: {first_line(error)}", ANOTHER
            ) from error
        if device_map is None:
            model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        return cls(model, shape, lm_head)

    @property
    def taps(self) -> Taps:
        return self.shape.default_taps

    def begin(self, tokens: Sequence[int]) -> Beginning:
        cache = DynamicCache(config=self._model.config)
        streams, _ = self._forward(
            torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True
        )
        return Beginning(len(tokens), Streams(streams.aux_hidden[0], streams.last_hidden[0]), cache)

    def streams(self, tokens: Sequence[Sequence[int]], after: Beginning | None = None) -> Streams:
        T = max(map(len, tokens))
        # causal: padding on the right is not seen
        tokens_BT = torch.tensor([[*row, *[0] * (T - len(row))] for row in tokens])
        if after is None:
            return self._forward(tokens_BT, use_cache=False)[0]
        cache = copy.deepcopy(after.kept)
        cache.batch_repeat_interleave(len(tokens))
        return self._forward(tokens_BT, past_key_values=cache, use_cache=True)[0]

    @torch.inference_mode()
    def _forward(
        self, tokens_BT: Tensor, all_logits: bool = False, **options: Any
    ) -> tuple[Streams, Any]:
        """The streams and the model's own output. lm_head computes the last position alone, unless
        all are asked for.
        """
        tapped: dict[int, Tensor] = {}
        fed: list[Tensor] = []

        def tap(number: int, output: Any) -> None:
            tapped[number] = output[0] if isinstance(output, tuple) else output

        def feed(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            fed.append(given[0])
            return None if all_logits else (given[0][:, -1:], *given[1:])

        with contextlib.ExitStack() as hooks:
            for number in self.taps:
                handle = self._layers[number].register_forward_hook(
                    lambda _m, _i, output, at=number: tap(at, output)
                )
                hooks.callback(handle.remove)
            hooks.callback(self._lm_head.register_forward_pre_hook(feed).remove)
            output = self._model(input_ids=tokens_BT.to(self._device), **options)
        assert len(fed) == 1
        assert len(tapped) == 3
        device = fed[0].device
        return Streams(
            torch.cat([tapped[number].to(device) for number in self.taps], dim=-1), fed[0]
        ), output

    def _proof_tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        length = min(PROOF_TOKENS, self.shape.max_position_embeddings)
        return torch.randint(self.shape.vocab_size, (2, length), generator=generator).to(
            self._device
        )

    def _prove(self, lm_head: Tensor) -> None:
        """Hold the hooks' streams against what the model says of itself. Raises MismatchError."""
        name = type(self._model).__name__
        streams, output = self._forward(
            self._proof_tokens(), all_logits=True, use_cache=False, output_hidden_states=True
        )
        states = output.hidden_states
        if states is None or len(states) != self.shape.num_hidden_layers + 1:
            raise MismatchError(
                f"{name} puts out no hidden state of each of its {len(self._layers)} layers",
                ANOTHER,
            )
        stated = torch.cat(
            [states[number + 1].to(streams.aux_hidden.device) for number in self.taps], dim=-1
        )
        if not alike(streams.aux_hidden, stated):
            raise MismatchError(
                f"{name}: the layers' outputs are not the hidden states that it puts out", ANOTHER
            )
        rows = streams.last_hidden[:, -1].float().cpu()
        logits = rows @ lm_head.float().T * self.shape.logit_scale
        if (cap := self.shape.logit_softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        bias = " (it has a bias)" if getattr(self._lm_head, "bias", None) is not None else ""
        if bias or not alike(logits, output.logits[:, -1].float().cpu(), streams.last_hidden.dtype):
            raise MismatchError(
                f"{name}: its logits are not lm_head{bias} times what feeds it",
                "a head is trained against lm_head's matrix, a scale and a soft cap alone",
            )

    def _goes_on_alike(self) -> bool:
        """Does it compute the same after a beginning as in one go? Not every model keeps its past
        so that it can be shared.
        """
        tokens = self._proof_tokens().cpu()
        tokens[1, :16] = tokens[0, :16]
        whole = self.streams(tokens.tolist())
        try:
            rest = self.streams(tokens[:, 16:].tolist(), self.begin(tokens[0, :16].tolist()))
        except (
            TypeError,
            ValueError,
            AttributeError,
            NotImplementedError,
            RuntimeError,
            IndexError,
        ):
            return False  # whatever it says: it has its own kind of past
        pairs = [
            (whole.aux_hidden[:, 16:], rest.aux_hidden),
            (whole.last_hidden[:, 16:], rest.last_hidden),
        ]
        return all(alike(one, other) for one, other in pairs)


def alike(one: Tensor, other: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Equal but for rounding in this precision: the error is small beside the size of the numbers,
    row by row.
    """
    limit = TOLERANCE[dtype or one.dtype]
    error, size = (one.float() - other.float()).norm(dim=-1), other.float().norm(dim=-1)
    return bool((error <= limit * size + 1e-6).all())


def decoder_layers(model: Any, shape: TargetShape, tokens_BT: Tensor) -> nn.ModuleList:
    """The list of decoder layers: as long as the config says, each called once, in order, putting
    out [B, T, H].

    tokens_BT: int64, to find it out with. Raises MismatchError, with what was looked for and what
    there was.
    """
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    }
    candidates = {
        name: module for name, module in lists.items() if len(module) == shape.num_hidden_layers
    }
    expected = (*tokens_BT.shape, shape.hidden_size)
    called: dict[str, list[int]] = {name: [] for name in candidates}

    def note(name: str, number: int, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and tuple(hidden.shape) == expected:
            called[name].append(number)

    with contextlib.ExitStack() as hooks, torch.inference_mode():
        for name, number, layer in _members(candidates):
            handle = layer.register_forward_hook(
                lambda _m, _i, output, of=name, at=number: note(of, at, output)
            )
            hooks.callback(handle.remove)
        model(input_ids=tokens_BT, use_cache=False)
    found = [
        name for name, numbers in called.items() if numbers == list(range(shape.num_hidden_layers))
    ]
    if len(found) != 1:
        there = ", ".join(f"{name} of {len(module)}" for name, module in list(lists.items())[:8])
        raise MismatchError(
            f"{type(model).__name__}: looked for one list (nn.ModuleList) of "
            f"{shape.num_hidden_layers} decoder layers, each of "
            f"which is called once and puts out [batch, length, {shape.hidden_size}], and found "
            f"{len(found)}; "
            f"its lists: {there or 'none'}",
            ANOTHER,
        )
    return candidates[found[0]]


def _members(lists: dict[str, nn.ModuleList]) -> Iterator[tuple[str, int, nn.Module]]:
    for name, layers in lists.items():
        for number, layer in enumerate(layers):
            yield name, number, layer
