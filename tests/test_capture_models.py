"""Capture by transformers: on every family the hooks see what the model itself says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from eyas.errors import ConfigError, MismatchError
from eyas.model.architecture import TargetConfig
from eyas.model.target import Target
from eyas.operators.decoder import HiddenStates, HookedDecoder, OwnDecoder, decoder_layers
from eyas.operators.foreign import shape_of
from eyas.operators.shape import target_shape
from eyas.operators.vocab import TargetVocabulary
from tests.architectures import save_architecture
from tests.tiny import FAMILIES, tiny_target

# those that have windows get short ones, which our own decoder does not run
WINDOWS = {name: {"sliding_window": 16} for name in ("gemma2", "gemma3", "gpt_oss")}
FOREIGN = ["deepseek_v3", "gemma", *WINDOWS, "gpt_neox", "granite", "qwen3_moe"]
EVERY = [*FAMILIES, *FOREIGN]
TOKENS = torch.randint(3, 320, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    made = {family: tiny_target(root / family, family) for family in FAMILIES}
    foreign = {
        name: save_architecture(root / name, name, **WINDOWS.get(name, {})) for name in FOREIGN
    }
    return made | foreign


@pytest.fixture(scope="module")
def decoders(folders) -> dict[str, HookedDecoder]:
    return {family: HookedDecoder.load(folder, "float32") for family, folder in folders.items()}


def stated(folder: Path, tokens_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three hidden states, the one that feeds lm_head, and the logits, as the model says."""
    attention = {"attn_implementation": "eager"} if folder.name == "gemma2" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **attention).eval()
    n = model.config.num_hidden_layers
    with torch.inference_mode():
        output = model(tokens_BT, output_hidden_states=True)
    states = output.hidden_states
    return torch.cat([states[at] for at in (2, n // 2, n - 3)], dim=-1), states[-1], output.logits


def assert_close(one: HiddenStates, aux_hidden: Tensor, last_hidden: Tensor) -> None:
    torch.testing.assert_close(one.aux_hidden, aux_hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one.last_hidden, last_hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", EVERY)
def test_streams_and_logits_are_those_that_the_model_puts_out(family, folders, decoders):
    """With soft caps and scales of logits."""
    aux_hidden, last_hidden, logits = stated(folders[family], TOKENS)
    assert_close(decoders[family].states(TOKENS.tolist()), aux_hidden, last_hidden)
    vocabulary = TargetVocabulary.load(folders[family])
    torch.testing.assert_close(vocabulary.logits(last_hidden[0]), logits[0], rtol=1e-4, atol=1e-4)
    embeddings = AutoModelForCausalLM.from_pretrained(folders[family]).get_input_embeddings()
    assert torch.equal(vocabulary.embed_tokens, embeddings.weight)
    assert vocabulary.config.eos_token_ids == (2,)
    assert vocabulary.config.default_taps == (1, 3, 4)


@pytest.mark.parametrize("family", EVERY)
def test_what_is_beyond_a_rows_end_changes_nothing_before_it(family, decoders):
    rows = [TOKENS[0, :40].tolist(), TOKENS[1, :23].tolist()]
    together, alone = decoders[family].states(rows), decoders[family].states(rows[1:])
    second = HiddenStates(together.aux_hidden[1:, :23], together.last_hidden[1:, :23])
    assert_close(second, alone.aux_hidden, alone.last_hidden)


@pytest.mark.parametrize("family", FAMILIES)
def test_our_own_decoder_and_transformers_agree(family, folders, decoders):
    own, hooked = OwnDecoder(Target.load(folders[family])), decoders[family]
    theirs = hooked.states(TOKENS.tolist())
    assert_close(own.states(TOKENS.tolist()), theirs.aux_hidden, theirs.last_hidden)
    assert own.lm_head_sha256 == hooked.lm_head_sha256
    assert own.shape == target_shape(folders[family])


def test_the_soft_cap_is_there_to_be_seen(folders):
    vocabulary = TargetVocabulary.load(folders["gemma2"])
    _, last_hidden, logits = stated(folders["gemma2"], TOKENS)
    assert (last_hidden[0] @ vocabulary.lm_head.T - logits[0]).abs().max() > 0.5
    assert logits.abs().max() <= 3.0


def test_a_target_says_its_shape_in_one_spelling(folders):
    neox, gemma3 = target_shape(folders["gpt_neox"]), target_shape(folders["gemma3"])
    assert (neox.num_key_value_heads, neox.head_dim, neox.rms_norm_eps) == (4, 16, 1e-5)
    assert (neox.family, neox.tie_word_embeddings, neox.dtype) == ("gpt_neox", False, "float32")
    assert neox.rope.theta == 10000.0
    assert gemma3.rope.theta == 1000000.0
    assert gemma3.tie_word_embeddings
    assert isinstance(target_shape(folders["llama"]), TargetConfig)


def test_a_window_or_a_rope_that_our_own_decoder_lacks_goes_by_transformers(tmp_path):
    window = tiny_target(tmp_path / "window", "mistral", sliding_window=12)
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 5000.0}
    dynamic = tiny_target(tmp_path / "dynamic", rope_parameters=rope, max_position_embeddings=512)
    for folder in (window, dynamic):
        with pytest.raises(MismatchError, match=r"12 positions|'dynamic'") as raised:
            Target.load(folder)
        assert "transformers" in raised.value.hint
        aux_hidden, last_hidden, _ = stated(folder, TOKENS)
        states = HookedDecoder.load(folder, "float32").states(TOKENS.tolist())
        assert_close(states, aux_hidden, last_hidden)
    assert target_shape(dynamic).rope.theta == 5000.0


def test_lm_head_is_given_contiguous_rows(decoders):
    """A product with strided rows takes a CPU hundreds of times as long."""
    seen, decoder = [], decoders["gemma3"]
    hook = decoder._lm_head.register_forward_hook(lambda _m, given, _o: seen.append(given[0]))
    decoder.states(TOKENS.tolist())
    hook.remove()
    assert seen[0].shape == (3, 1, 64)
    assert seen[0].is_contiguous()


def test_bfloat16_stays_bfloat16(folders):
    states = HookedDecoder.load(folders["gemma2"], "bfloat16").states(TOKENS.tolist())
    assert states.aux_hidden.dtype == states.last_hidden.dtype == torch.bfloat16


def test_an_lm_head_with_a_bias_is_refused(tmp_path):
    with pytest.raises(MismatchError, match="its lm_head has a bias"):
        HookedDecoder.load(save_architecture(tmp_path / "phi", "phi"), "float32")


def test_a_config_that_transformers_does_not_know(tmp_path):
    config = {"model_type": "hawk", "architectures": ["HawkForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    match = "'hawk' model, which the installed transformers does not load"
    with pytest.raises(MismatchError, match=match):
        target_shape(tmp_path)


class TwoLists(nn.Module):
    """Two lists of eight layers, each called in order."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.others = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, input_ids: Tensor, **options: object) -> Tensor:
        hidden = torch.zeros(*input_ids.shape, 64)
        for layer in self.others:
            hidden = layer(hidden)
        return self.inner(input_ids=input_ids, **options)


def test_layers_that_cannot_be_told_are_not_guessed(folders):
    model = AutoModelForCausalLM.from_pretrained(folders["gpt_neox"])
    shape = shape_of(model.config, folders["gpt_neox"])
    assert decoder_layers(model, shape, TOKENS) is model.gpt_neox.layers
    with pytest.raises(
        MismatchError, match=r"one list \(nn.ModuleList\) of 8 decoder layers.* found 2"
    ):
        decoder_layers(TwoLists(model), shape, TOKENS)
    fewer = shape.model_copy(update={"num_hidden_layers": 9})
    with pytest.raises(
        MismatchError, match=r"of 9 decoder layers.* found 0; its lists: gpt_neox.layers of 8"
    ):
        decoder_layers(model, fewer, TOKENS)


def test_device_map_needs_accelerate(folders, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs accelerate") as raised:
        HookedDecoder.load(folders["llama"], "float32", "auto")
    assert "eyas[large]" in raised.value.hint


def test_device_map_spreads_a_target(folders):
    pytest.importorskip("accelerate", reason="the extra large is not installed")
    spread = HookedDecoder.load(folders["gpt_neox"], "float32", "cpu")
    aux_hidden, last_hidden, _ = stated(folders["gpt_neox"], TOKENS)
    assert_close(spread.states(TOKENS.tolist()), aux_hidden, last_hidden)
