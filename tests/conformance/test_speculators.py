"""speculators, which defines our vLLM form, loads, computes, converts and saves the same head.

Skipped unless speculators is installed (requirements.txt; `make test` does it); if it is and cannot
be imported, that is a failure.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from eyas.operators.head import load_head
from eyas.operators.tensors import read_head
from eyas.operators.ttt import Slots, unroll
from eyas.operators.vocab import TargetVocabulary
from tests.tiny import tiny_target
from tests.tiny_head import edit_config, head_folder, with_flags

if importlib.util.find_spec("speculators") is None:
    pytest.skip(
        "speculators is not installed: see tests/conformance/requirements.txt",
        allow_module_level=True,
    )
speculators = importlib.import_module("speculators")
convert = importlib.import_module("speculators.convert.eagle.eagle3_converter")

pytestmark = pytest.mark.filterwarnings("default")  # other projects' warnings are theirs
T, STEPS = 24, 3
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(
    scope="module",
    params=[{"rope_theta": 1e6, "rope_type": "default"}, LLAMA3],
    ids=["theta 1e6", "llama3"],
)
def target(request, tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), rope_parameters=request.param)


def theirs(folder: Path):
    """speculators' own model, with attention written out."""
    config = speculators.SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    return speculators.SpeculatorModel.from_pretrained(str(folder), config=config).float().eval()


def their_logits(model, aux_hidden: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """lm_head's logits [T, W] of every step; tokens: that the slots embed at step 0."""
    caught: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(
        lambda module, inputs, output: caught.append(output[0].detach())
    )
    given = {"hidden_states": aux_hidden, "input_ids": tokens, "ttt_steps": STEPS}
    with torch.no_grad():
        model(**given, document_ids=torch.zeros_like(tokens))
    hook.remove()
    return caught


def our_logits(
    folder: Path, target: Path, aux_hidden: torch.Tensor, tokens: torch.Tensor
) -> list[torch.Tensor]:
    """The same by our unroll, teacher-forced; token 0 after the last one, as they pad."""
    head, embed_tokens = load_head(folder), TargetVocabulary.load(target).embed_tokens
    slots = Slots.where(torch.ones_like(tokens, dtype=torch.bool))

    def next_embeds(step: int, _: torch.Tensor) -> torch.Tensor:
        return F.embedding(F.pad(tokens[0, step:], (0, step)), embed_tokens)

    with torch.no_grad():
        steps = unroll(
            head, aux_hidden, F.embedding(tokens, embed_tokens), [slots] * STEPS, next_embeds
        )
        return [head.logits(hidden) for hidden in steps]


@with_flags
def test_logits_of_every_step_are_the_same(target, tmp_path, flags):
    size = 320 if len(flags) == 1 else 64  # with and without maps
    folder = head_folder(target, tmp_path / "head", "vllm", draft_vocab_size=size, **flags)
    generator = torch.Generator().manual_seed(0)
    aux_hidden = torch.randn(1, T, 96, generator=generator)
    tokens = torch.randint(320, (1, T), generator=generator)
    ours = our_logits(folder, target, aux_hidden, tokens)
    other = their_logits(theirs(folder), aux_hidden, tokens)
    assert len(ours) == len(other) == STEPS
    for one, two in zip(ours, other, strict=True):
        assert one.shape == two.shape == (T, size)
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4 * float(two.std()))


def test_nothing_is_missing_or_left_over_when_they_load_it(target, tmp_path):
    folder = head_folder(target, tmp_path / "head", "vllm")
    config, tensors = read_head(folder)
    model = theirs(folder)
    embed_tokens = TargetVocabulary.load(target).embed_tokens
    assert torch.equal(model.embed_tokens.weight, embed_tokens)
    state = model.state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(state[name.replace("midlayer.", "layers.0.")], tensor), name
    assert model.target_layer_ids == [tap + 1 for tap in config.taps]
    layer = model.config.transformer_layer_config
    assert (layer.max_position_embeddings, layer.rms_norm_eps, layer.head_dim) == (256, 1e-6, 8)
    assert layer.rope_parameters["rope_theta"] == config.rope.theta
    assert model.config.norm_before_residual is False


@with_flags
def test_what_they_save_we_read(target, tmp_path, flags):
    folder = head_folder(target, tmp_path / "head", "vllm", **flags)
    theirs(folder).save_pretrained(str(tmp_path / "saved"))
    edit_config(tmp_path / "saved", target_embed_tokens_sha256=None)  # they carry our key along
    (config, tensors), (config_read, read) = read_head(folder), read_head(tmp_path / "saved")
    assert config_read == config.model_copy(
        update={"target_lm_head_sha256": config_read.target_lm_head_sha256}
    )
    assert torch.equal(read.pop("embed_tokens.weight"), TargetVocabulary.load(target).embed_tokens)
    assert tensors.keys() == read.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_what_they_convert_from_our_sglang_form_is_our_vllm_form(target, tmp_path):
    source = head_folder(target, tmp_path / "sglang", "sglang")
    stated = (head_folder(target, tmp_path / "vllm", "vllm") / "config.json").read_text()
    entering = json.loads(stated)["eagle_aux_hidden_state_layer_ids"]
    convert.Eagle3Converter().convert(
        str(source),
        str(tmp_path / "converted"),
        str(target),
        validate=False,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=entering,
    )
    (config, tensors), (config_read, read) = read_head(source), read_head(tmp_path / "converted")
    assert config_read == config.model_copy(update={"target_lm_head_sha256": ""})
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
