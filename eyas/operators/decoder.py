"""Decoders that compute features: our own, or a causal language model of transformers with hooks.

The hooks assume a list of decoder layers and an lm_head, and no family: what they see is checked
against the model's own `output_hidden_states` and logits.

Letters: B batch, T longest of it, H the target's hidden size, V its vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from eyas.errors import ConfigError, MismatchError, extra
from eyas.gguf.checkpoint import whole_folder
from eyas.model.arrays import Array, refuse_nonfinite
from eyas.model.config import TargetShape
from eyas.model.target import Dtype, Target
from eyas.model.weights import array_sha256
from eyas.operators.foreign import (
    ANOTHER,
    FAULTS,
    MATRIX_ALONE,
    auto_class,
    first_line,
    refuse_partly_loaded,
    shape_of,
    transformers_config,
    transformers_matrices,
)
from eyas.operators.tensors import arrays_of, tensor_of
from eyas.operators.vocab import capped

FinalNorm = Callable[[Tensor], Tensor]
NO_STREAM = (
    "a head reads what the layers pass on, which cannot be told of this model: take another target"
)
PROOF_TOKENS = 40  # in each of two random rows
# relative to a stream's norm
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


def default_device() -> str:
    """A GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """aux_hidden [..., 3 * H], the taps side by side; last_hidden [..., H], which feeds lm_head."""

    aux_hidden: Tensor
    last_hidden: Tensor


class OwnDecoder:
    """Our own decoder: the built-in engine's values. lm_head_sha256: as TargetVocabulary's."""

    def __init__(self, target: Target) -> None:
        self._target, self.lm_head_sha256 = target, target.lm_head_sha256
        self.shape: TargetShape = target.config

    @classmethod
    def load(cls, folder: str | Path, dtype: Dtype) -> OwnDecoder:
        return cls(Target.load(folder, dtype))

    @torch.inference_mode()
    def states(
        self, tokens: Sequence[Sequence[int]], taps: Sequence[int] | None = None
    ) -> HiddenStates:
        """States [B, T, ...]; undefined beyond a row's end. taps: layers, by default EAGLE-3's."""
        tokens_BT = pad_sequence([torch.tensor(row) for row in tokens], batch_first=True)
        return HiddenStates(*map(tensor_of, self._target.features(tokens_BT.numpy(), taps)))


class HookedDecoder:
    """A model of transformers with hooks on the tapped layers and lm_head."""

    def __init__(self, model: Any, shape: TargetShape, lm_head: Array) -> None:
        """lm_head: [V, H] as stored. Raises MismatchError if the layers' states are uncertain."""
        self._model, self.shape = model.eval().requires_grad_(False), shape
        self.lm_head_sha256 = array_sha256(lm_head)
        self._lm_head = model.get_output_embeddings()
        if self._lm_head is None:
            raise MismatchError(f"{type(model).__name__} has no lm_head", ANOTHER)
        self._device = model.get_input_embeddings().weight.device
        # accelerate keeps it elsewhere, and moves the input itself
        if self._device.type == "meta":
            self._device = torch.device(default_device())
        self._layers = decoder_layers(model, shape, self._proof_tokens())
        self._prove(tensor_of(lm_head))

    @classmethod
    def load(cls, folder: str | Path, dtype: str, device_map: str | None = None) -> HookedDecoder:
        """Load a folder by transformers. device_map: accelerate's, for models larger than a device.

        Raises ConfigError if accelerate is needed and absent, MismatchError, MissingInputError,
        CorruptError.
        """
        if device_map is not None and importlib.util.find_spec("accelerate") is None:
            raise ConfigError(
                f"device_map: {device_map} needs accelerate, which is not installed",
                f"{extra('large')}, or leave it out",
            )
        folder = whole_folder(folder)
        config = transformers_config(folder)
        shape = shape_of(config, folder)
        _, lm_head = transformers_matrices(folder, shape)
        options = {} if device_map is None else {"device_map": device_map}
        text_config = config.get_text_config(decoder=True)
        if getattr(text_config, "attn_logit_softcapping", None) is not None:
            options["attn_implementation"] = "eager"  # others leave the soft cap out
        try:
            model, loaded = auto_class(config).from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refuse_partly_loaded names them
                **options,
            )
            refuse_partly_loaded(folder, config, shape, loaded)
            # meta: kept elsewhere by accelerate
            here = ((name, one) for name, one in model.named_parameters() if not one.is_meta)
            broken = {name: one for name, one in here if not one.isfinite().all()}
            refuse_nonfinite(folder, arrays_of(broken))
            if device_map is None:
                model = model.to(default_device())
            return cls(model, shape, lm_head)
        except FAULTS as error:
            hint = ANOTHER
            if isinstance(error, torch.OutOfMemoryError):
                hint = "device_map: auto spreads a large target over devices"
            elif getattr(config, "quantization_config", None) is not None:
                hint = "install what it asks for, or give the checkpoint before it was quantised"
            what = f"transformers does not run {folder}: {first_line(error)}"
            raise MismatchError(what, hint) from error

    def states(
        self, tokens: Sequence[Sequence[int]], taps: Sequence[int] | None = None
    ) -> HiddenStates:
        """As OwnDecoder's."""
        # causal attention does not see padding on the right
        tokens_BT = pad_sequence([torch.tensor(row) for row in tokens], batch_first=True)
        return self._forward(tokens_BT, taps=taps, use_cache=False)[0]

    @torch.inference_mode()
    def answer(
        self, prompt_ids: Sequence[int], max_tokens: int, ignore_eos: bool = False
    ) -> list[int]:
        """The model's greedy answer with its end token. Raises MismatchError if it fails."""
        ends = () if ignore_eos else self.shape.eos_token_ids
        how = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(ends) or None,
            pad_token_id=0,
            use_cache=True,
        )
        # the checkpoint's own settings, such as a penalty, would fill in what is left open
        self._model.generation_config = GenerationConfig()
        tokens_BT = torch.tensor([list(prompt_ids)], device=self._device)
        try:
            whole_BT = self._model.generate(
                tokens_BT, attention_mask=torch.ones_like(tokens_BT), generation_config=how
            )
        except FAULTS as error:
            raise MismatchError(
                f"{type(self._model).__name__} does not answer: {first_line(error)}",
                "let a server answer: `eyas generate --server URL`, then `eyas capture`",
            ) from error
        answer_ids: list[int] = whole_BT[0, len(prompt_ids) :].tolist()
        return answer_ids

    def layers(self, tokens: Sequence[int]) -> Tensor:
        """The residual stream after every layer [layers, T, H], for proofs."""
        every, T = range(self.shape.num_hidden_layers), len(tokens)
        states, _ = self._forward(torch.tensor([list(tokens)]), taps=every, use_cache=False)
        return states.aux_hidden.view(T, len(every), -1).transpose(0, 1)

    def final_norm(self) -> FinalNorm:
        """From one sample's residual stream [T, H] to last_hidden [T, H]. Ends this decoder, whose
        layers are freed. Raises MismatchError if several modules are between layers and lm_head.
        """
        final = self._final_module()
        del self._layers[:]  # the model's own list
        return torch.inference_mode()(lambda hidden_TH: final(hidden_TH.to(self._device)))

    def _final_module(self) -> nn.Module:
        """The module between the last layer and lm_head. Raises MismatchError."""
        found: list[tuple[nn.Module, Any, Any]] = []

        def note(module: nn.Module, given: Any, output: Any) -> None:
            found.append((module, given[0] if given else None, output))

        with contextlib.ExitStack() as hooks:
            for module in self._model.modules():
                hooks.callback(module.register_forward_hook(note).remove)
            states, _ = self._forward(self._proof_tokens(), all_logits=True, use_cache=False)
        end = next(_hidden(output) for of, _, output in found if of is self._layers[-1])
        fed = states.last_hidden  # a view of it, in most models
        fits = [
            of
            for of, given, output in found
            if given is end
            and isinstance(output, Tensor)
            and (output.data_ptr(), output.shape) == (fed.data_ptr(), fed.shape)
        ]
        if len(fits) != 1:
            raise MismatchError(
                f"{type(self._model).__name__}: no single module is between its last layer and "
                "lm_head",
                "servers do not give what feeds lm_head: capture it here, without --server",
            )
        return fits[0]

    @torch.inference_mode()
    def _forward(
        self,
        tokens_BT: Tensor,
        all_logits: bool = False,
        taps: Sequence[int] | None = None,
        **options: Any,
    ) -> tuple[HiddenStates, Any]:
        """The states, and the model's output: of the last position alone, unless all_logits."""
        wanted = self.shape.default_taps if taps is None else taps
        tapped: dict[int, Tensor] = {}
        fed: list[Tensor] = []

        def tap(number: int, _module: nn.Module, _given: Any, output: Any) -> None:
            tapped[number] = _hidden(output)

        def feed(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            fed.append(given[0])
            if all_logits:
                return None
            # on a CPU, rows with a larger stride are hundreds of times slower
            return (given[0][:, -1:].contiguous(), *given[1:])

        with contextlib.ExitStack() as hooks:
            for number in wanted:
                handle = self._layers[number].register_forward_hook(partial(tap, number))
                hooks.callback(handle.remove)
            hooks.callback(self._lm_head.register_forward_pre_hook(feed).remove)
            output = self._model(input_ids=tokens_BT.to(self._device), **options)
        assert len(fed) == 1
        assert len(tapped) == len(wanted)
        device = fed[0].device
        streams = [tapped[number].to(device) for number in wanted]
        aux_hidden = torch.cat(streams, dim=-1) if streams else fed[0][..., :0]
        return HiddenStates(aux_hidden, fed[0]), output

    def _proof_tokens(self) -> Tensor:
        size = 2, min(PROOF_TOKENS, self.shape.max_position_embeddings)
        seed = torch.Generator().manual_seed(0)
        return torch.randint(self.shape.vocab_size, size, generator=seed).to(self._device)

    def _prove(self, lm_head: Tensor) -> None:
        """Check the hooks against the model's own outputs. Raises MismatchError."""
        name = type(self._model).__name__
        hooked, output = self._forward(
            self._proof_tokens(), all_logits=True, use_cache=False, output_hidden_states=True
        )
        layers = output.hidden_states
        if layers is None or len(layers) != self.shape.num_hidden_layers + 1:
            raise MismatchError(
                f"{name} does not put out a hidden state of each of its {len(self._layers)} layers",
                NO_STREAM,
            )
        device = hooked.aux_hidden.device
        stated = torch.cat([layers[tap + 1].to(device) for tap in self.shape.default_taps], dim=-1)
        if not alike(hooked.aux_hidden, stated):
            raise MismatchError(
                f"{name}: the layers' outputs are not the hidden states that it puts out", NO_STREAM
            )
        rows = hooked.last_hidden[:, -1].float().cpu()
        logits = rows @ lm_head.float().T * self.shape.logit_scale
        logits = capped(logits, self.shape.logit_softcap)
        if not alike(logits, output.logits[:, -1].float().cpu(), hooked.last_hidden.dtype):
            what = f"{name}: its logits are not lm_head times what feeds it"
            raise MismatchError(what, MATRIX_ALONE)


FeatureDecoder = OwnDecoder | HookedDecoder


def alike(one: Tensor, other: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether rows differ by this precision's rounding only, relative to their norm."""
    limit = TOLERANCE[dtype or one.dtype]
    error, size = (one.float() - other.float()).norm(dim=-1), other.float().norm(dim=-1)
    return bool((error <= limit * size + 1e-6).all())


def _hidden(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def decoder_layers(model: Any, shape: TargetShape, tokens_BT: Tensor) -> nn.ModuleList:
    """The list of decoder layers: as long as the config says, each called once, in order, with
    output [B, T, H]. tokens_BT: int64, for a trial run. Raises MismatchError.
    """
    lists = {name: one for name, one in model.named_modules() if isinstance(one, nn.ModuleList)}
    candidates = {name: one for name, one in lists.items() if len(one) == shape.num_hidden_layers}
    expected = (*tokens_BT.shape, shape.hidden_size)
    called: dict[str, list[int]] = {name: [] for name in candidates}

    def note(name: str, number: int, _module: nn.Module, _given: Any, output: Any) -> None:
        hidden = _hidden(output)
        if isinstance(hidden, Tensor) and tuple(hidden.shape) == expected:
            called[name].append(number)

    with contextlib.ExitStack() as hooks, torch.inference_mode():
        for name, layers in candidates.items():
            for number, layer in enumerate(layers):
                handle = layer.register_forward_hook(partial(note, name, number))
                hooks.callback(handle.remove)
        model(input_ids=tokens_BT, use_cache=False)
    in_order = list(range(shape.num_hidden_layers))
    found = [name for name, numbers in called.items() if numbers == in_order]
    if len(found) != 1:
        there = ", ".join(f"{name} of {len(module)}" for name, module in list(lists.items())[:8])
        raise MismatchError(
            f"{type(model).__name__}: looked for one list (nn.ModuleList) of "
            f"{shape.num_hidden_layers} decoder layers, each of which is called once and puts out "
            f"[batch, length, {shape.hidden_size}], and found {len(found)}; its lists: "
            f"{there or 'none'}",
            NO_STREAM,
        )
    return candidates[found[0]]
