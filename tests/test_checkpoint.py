"""Heads on disk: every form reads back exactly, and whatever our Head would compute otherwise is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig

from eyas.errors import CorruptError, MismatchError, MissingInputError
from eyas.model.checkpoint import Verifier, map_faults, open_checkpoint, read_head, write_head
from eyas.model.config import RopeConfig, TargetConfig
from eyas.model.vocab import draft_vocabulary
from tests.tiny import tiny_target
from tests.tiny_head import edit_config, edit_tensors, head_folder, tiny_head, write_folder

FORMS = ("eyas", "sglang", "vllm")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_reads_back_bit_equal(target, tmp_path, form, dtype):
    config, tensors = tiny_head(target, dtype=dtype)
    config_read, tensors_read = read_head(write_folder(write_head(config, tensors, form), tmp_path / form))
    assert config_read == config
    assert tensors_read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert tensors_read[name].dtype == tensor.dtype
        assert torch.equal(tensors_read[name], tensor), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=1e6),
        RopeConfig(theta=5e5, kind="llama3", factor=32.0, original_max_position_embeddings=4096),
        RopeConfig(kind="linear", factor=2.0),
    ],
    ids=lambda rope: rope.kind,
)
def test_rope_and_length_survive(target, tmp_path, form, rope):
    config, tensors = tiny_head(target)
    config = config.model_copy(update={"rope": rope, "max_position_embeddings": 40960, "rms_norm_eps": 1e-5, "head_dim": 8})
    assert read_head(write_folder(write_head(config, tensors, form), tmp_path / form))[0] == config


@pytest.mark.parametrize(
    "rope", [RopeConfig(theta=1e6), RopeConfig(theta=5e5, kind="llama3", factor=8.0)], ids=lambda rope: rope.kind
)
def test_transformers_understands_what_engines_read_through_it(target, tmp_path, rope):
    """SGLang reads our config.json by AutoConfig, vLLM and speculators the layer's part by LlamaConfig."""
    config, tensors = tiny_head(target)
    config = config.model_copy(update={"rope": rope})
    sglang = AutoConfig.from_pretrained(write_folder(write_head(config, tensors, "sglang"), tmp_path / "sglang"))
    vllm = LlamaConfig(**json.loads(write_head(config, tensors, "vllm")["config.json"])["transformer_layer_config"])
    for read in (sglang, vllm):
        assert RopeConfig.from_hf(read.to_dict()) == rope
        assert (read.num_hidden_layers, read.head_dim, read.vocab_size, read.max_position_embeddings) == (1, 8, 320, 256)
        assert not read.tie_word_embeddings
        assert str(read.dtype).removeprefix("torch.") == "float32"
    assert sglang.eagle_config[LAYER_IDS] == [1, 3, 4]
    assert (sglang.draft_vocab_size, sglang.target_hidden_size) == (64, 32)


@pytest.mark.parametrize("form", FORMS)
def test_equal_heads_give_equal_bytes(target, form):
    config, tensors = tiny_head(target)
    backwards = dict(reversed(tensors.items()))
    assert write_head(config, tensors, form) == write_head(config, backwards, form)


def test_form_is_found_by_looking(target, tmp_path):
    for form in FORMS:
        assert open_checkpoint(head_folder(target, tmp_path / form, form)).form == form


def test_layer_names_of_each_form(target, tmp_path):
    """SpecForge, SGLang: midlayer.*, without embeddings; speculators, vLLM: layers.0.*, with the target's embeddings."""
    sglang = safetensors.torch.load_file(head_folder(target, tmp_path / "sglang", "sglang") / "model.safetensors")
    vllm = safetensors.torch.load_file(head_folder(target, tmp_path / "vllm", "vllm") / "model.safetensors")
    assert {name.replace("midlayer.", "layers.0.") for name in sglang} | {"embed_tokens.weight"} == set(vllm)
    assert sum(name.startswith("midlayer.") for name in sglang) == 10
    assert sglang["d2t"].dtype == vllm["d2t"].dtype == torch.int64
    assert sglang["t2d"].dtype == vllm["t2d"].dtype == torch.bool
    assert "embed_tokens.weight" not in read_head(tmp_path / "vllm")[1]


@pytest.mark.parametrize("n", [7, 8, 9, 10, 12, 24, 28, 32, 36, 61, 80])
def test_each_engine_taps_the_same_three_streams(target, n):
    """By each engine's own rule: vLLM takes what enters the listed layers, SGLang adds 1 and does the same."""
    config, tensors = tiny_head(target)
    taps = TargetConfig.from_folder(target).model_copy(update={"num_hidden_layers": n}).default_taps
    config = config.model_copy(update={"taps": taps})
    vllm = json.loads(write_head(config, tensors, "vllm")["config.json"])
    sglang = json.loads(write_head(config, tensors, "sglang")["config.json"])
    entering = [2, n // 2, n - 3]  # EAGLE's and both engines' default
    assert vllm[LAYER_IDS] == entering
    assert [index + 1 for index in sglang["eagle_config"][LAYER_IDS]] == entering
    assert LAYER_IDS not in sglang
    assert "eagle_config" not in vllm


def test_taps_that_sglang_would_misread_are_refused(target, tmp_path):
    config, tensors = tiny_head(target)
    config = config.model_copy(update={"taps": (0, 3, 5)})
    with pytest.raises(MismatchError, match=r"\(0, 3, 5\) cannot be written for SGLang"):
        write_head(config, tensors, "sglang")
    for form in ("eyas", "vllm"):
        assert read_head(write_folder(write_head(config, tensors, form), tmp_path / form))[0].taps == (0, 3, 5)


def test_taps_that_are_not_given_are_the_targets_default(target, tmp_path):
    shape = TargetConfig.from_folder(target)
    sglang = edit_config(head_folder(target, tmp_path / "sglang", "sglang"), eagle_config=None)
    vllm = edit_config(head_folder(target, tmp_path / "vllm", "vllm"), **{LAYER_IDS: None})
    for folder in (sglang, vllm):
        assert read_head(folder, shape)[0].taps == shape.default_taps
        with pytest.raises(MismatchError, match="does not say which layers"):
            read_head(folder)


def test_a_config_with_the_fewest_keys(target, tmp_path):
    """What may be left out means what the engines take it for."""
    folder = head_folder(target, tmp_path / "head", "sglang")
    kept = ("architectures", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    config = json.loads((folder / "config.json").read_text())
    minimal = {key: config[key] for key in (*kept, "draft_vocab_size", "eagle_config")}
    (folder / "config.json").write_text(json.dumps({**minimal, "rope_scaling": None, "target_hidden_size": None}))
    read, _ = read_head(folder)
    assert read.rope == RopeConfig(theta=10000.0)
    assert (read.max_position_embeddings, read.rms_norm_eps, read.head_dim) == (2048, 1e-6, 8)
    assert (read.taps, read.target_hidden_size, read.target_lm_head_sha256) == ((1, 3, 4), 32, "")


@pytest.mark.parametrize("form", ["sglang", "vllm"])
@pytest.mark.parametrize("size", [320, None])
def test_full_vocabulary_needs_no_maps(target, tmp_path, form, size):
    config, tensors = tiny_head(target, draft_vocab_size=320)
    folder = edit_config(write_folder(write_head(config, tensors, form), tmp_path / "head"), draft_vocab_size=size)
    assert {"d2t", "t2d"}.isdisjoint(safetensors.torch.load_file(folder / "model.safetensors"))
    config_read, read = read_head(folder)
    assert config_read.draft_vocab_size == 320
    assert read["t2d"].all()
    assert not read["d2t"].any()


def test_a_map_may_be_unordered_and_alone(target, tmp_path):
    """One trainer sorts the draft vocabulary by frequency; and engines never read t2d."""
    folder = head_folder(target, tmp_path / "head", "sglang")
    ids = torch.tensor([300, *range(100, 163)])
    edit_tensors(folder, {"d2t": (ids - torch.arange(64)).to(torch.int32), "t2d": None})
    _, read = read_head(folder)
    assert read["d2t"].dtype == torch.int64
    assert read["t2d"].nonzero().flatten().tolist() == sorted(ids.tolist())


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_choice_of_tokens_is_a_map_and_a_changed_offset_is_none(data):
    V = data.draw(st.integers(2, 40))
    W = data.draw(st.integers(1, V - 1))
    counts_V = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=V, max_size=V)))
    d2t, t2d = draft_vocabulary(counts_V, W)
    assert map_faults(d2t, t2d, V, W) == []
    place, shift = data.draw(st.integers(0, W - 1)), data.draw(st.integers(-V, V).filter(bool))
    d2t[place] += shift
    assert map_faults(d2t, t2d, V, W)


REFUSED = {
    "norm_before_residual": ({"norm_before_residual": True}, "norm_before_residual"),
    "norm_before_fc": ({"norm_before_fc": True}, "norm_before_fc"),
    "fc_norm": ({"fc_norm": True}, "fc_norm"),
    "norm_output": ({"norm_output": True}, "norm_output"),
    "two layers": ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
    "bias": ({"attention_bias": True}, "attention_bias"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    "one feature": ({"eagle_config": {"use_aux_hidden_state": False, LAYER_IDS: [1, 3, 4]}}, "use_aux_hidden_state"),
    "inner flag": ({"eagle_config": {"norm_before_fc": True, LAYER_IDS: [1, 3, 4]}}, "norm_before_fc"),
    "ambiguous taps": ({"eagle_config": {LAYER_IDS: [2, 4, 5]}}, r"lists the layers \[2, 4, 5\]"),
    "two taps": ({"eagle_config": {LAYER_IDS: [1, 3]}}, "taps the outputs"),
    "unordered taps": ({"eagle_config": {LAYER_IDS: [1, 4, 3]}}, "taps the outputs"),
    "two conventions": ({LAYER_IDS: [1, 3, 4]}, "disagree"),
    "embeddings as tap": ({LAYER_IDS: [0, 3, 4], "eagle_config": {}}, "taps the outputs"),
    "another family": ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
    "rope": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    "another algorithm": ({"speculators_model_type": "dflash"}, "dflash"),
    "no shape": ({"hidden_size": None}, "hidden_size"),
    "wrong rows": ({"draft_vocab_size": 63}, "lm_head.weight has shape"),
    "no draft vocabulary": ({"draft_vocab_size": None}, "lm_head.weight has shape"),
    "wrong heads": ({"num_key_value_heads": 4}, "k_proj.weight has shape"),
    "wider target": ({"target_hidden_size": 64}, "embeddings of its own"),
    "not a number": ({"intermediate_size": "wide"}, "intermediate_size"),
}


@pytest.mark.parametrize(("changes", "named"), REFUSED.values(), ids=REFUSED)
def test_settings_that_would_be_run_wrong_are_refused_by_name(target, tmp_path, changes, named):
    folder = edit_config(head_folder(target, tmp_path / "head", "sglang"), **changes)
    with pytest.raises(MismatchError, match=named) as error:
        read_head(folder)
    assert error.value.hint


@pytest.mark.parametrize(
    ("path", "changes", "named"),
    [
        ("", {"norm_before_residual": True}, "norm_before_residual is set"),
        ("", {"norm_before_residual": None}, "vLLM takes that for true"),
        ("", {"norm_output": True}, "norm_output"),
        ("transformer_layer_config", {"model_type": None}, "model_type is None"),
        ("transformer_layer_config", {"model_type": "qwen3"}, "model_type is 'qwen3'"),
        ("transformer_layer_config", {"mlp_bias": True}, "mlp_bias"),
        ("transformer_layer_config", {"vocab_size": None}, "vocab_size"),
    ],
)
def test_speculators_settings_that_would_be_run_wrong_are_refused(target, tmp_path, path, changes, named):
    folder = edit_config(head_folder(target, tmp_path / "head", "vllm"), path, **changes)
    with pytest.raises(MismatchError, match=named):
        read_head(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm.weight": None}, "norm.weight is missing"),
        ({"input_norm.weight": torch.ones(96)}, "input_norm.weight is none"),
        ({"fc_norm.0.weight": torch.ones(32)}, "fc_norm.0.weight is none"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(8)}, "q_norm.weight is none"),
        ({"layers.1.input_layernorm.weight": torch.ones(32)}, "layers.1.input_layernorm.weight is none"),
        ({"layers.0.hidden_norm.weight": torch.ones(32)}, "two layers"),
        ({"fc.weight": torch.ones(32, 32)}, "fc.weight has shape"),
        ({"fc.weight": torch.ones(32, 96).to(torch.float8_e4m3fn)}, "float8"),
        ({"fc.weight": None}, "no EAGLE-3 head"),
        ({"d2t": torch.arange(64) + 300}, "out of the target's"),
        ({"d2t": torch.zeros(64)}, "whole offsets"),
        ({"d2t": -torch.arange(64)}, "taken already"),
        ({"d2t": None, "t2d": None}, "d2t is missing"),
        ({"t2d": torch.zeros(320, dtype=torch.bool)}, "t2d is not the mask"),
        ({"t2d": torch.ones(319, dtype=torch.bool)}, "t2d has shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(target, tmp_path, changes, named):
    folder = edit_tensors(head_folder(target, tmp_path / "head", "sglang"), changes)
    with pytest.raises(MismatchError, match=named):
        read_head(folder)


def test_all_faults_are_named_at_once(target, tmp_path):
    folder = edit_config(head_folder(target, tmp_path / "head", "sglang"), fc_norm=True, hidden_act="gelu", norm_before_fc=True)
    with pytest.raises(MismatchError, match=r"norm_before_fc.*fc_norm.*gelu"):
        read_head(folder)


def test_what_is_no_head(target, tmp_path):
    with pytest.raises(MismatchError, match="no EAGLE-3 head"):
        read_head(target)
    with pytest.raises(MissingInputError):
        read_head(tmp_path)
    ours = head_folder(target, tmp_path / "ours")
    (ours / "eyas_head.json").write_text('{"format": "eyas head 2"}')
    with pytest.raises(MismatchError, match="eyas head 2"):
        read_head(ours)
    (ours / "eyas_head.json").write_text('{"format": "eyas head 1"}')
    with pytest.raises(MismatchError, match="lacks 'taps'"):
        read_head(ours)
    (ours / "eyas_head.json").write_text("{")
    with pytest.raises(CorruptError):
        read_head(ours)
    (head_folder(target, tmp_path / "cut") / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CorruptError):
        read_head(tmp_path / "cut")


def test_a_head_that_does_not_fit_its_config_is_not_written(target):
    config, tensors = tiny_head(target)
    with pytest.raises(MismatchError, match=r"lm_head.weight has shape"):
        write_head(config.model_copy(update={"draft_vocab_size": 65}), tensors, "eyas")


def test_verifier_is_written_for_vllm(target):
    config, tensors = tiny_head(target)
    files = write_head(config, tensors, "vllm", Verifier("org/model", ("LlamaForCausalLM",), num_draft_steps=3))
    speculators = json.loads(files["config.json"])["speculators_config"]
    assert speculators["verifier"] == {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]}
    assert speculators["proposal_methods"][0]["speculative_tokens"] == 3
