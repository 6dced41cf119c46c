"""Folders that are no model, or nearly one: each is one error that names what is wrong, and nothing
outside the folder is read.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.chat import Chat
from eyas.cli.main import build
from eyas.engine.engine import Engine
from eyas.errors import CorruptError, EyasError, MismatchError
from eyas.export.check import check
from eyas.export.replay import replay_head
from eyas.hub import resolve_target
from eyas.model.architecture import TargetConfig
from eyas.model.arrangement import arranged
from eyas.model.arrays import nonfinite
from eyas.model.config import RopeConfig
from eyas.model.target import Target
from eyas.model.weights import INDEX, SINGLE
from eyas.operators.decoder import HookedDecoder
from eyas.operators.shape import target_shape
from eyas.operators.tensors import array_of, read_head
from eyas.operators.vocab import TargetVocabulary
from tests.architectures import SHAPE, saved_architecture
from tests.tiny import tiny_target
from tests.tiny_head import edit_config, edit_tensors, head_folder

NOT_NUMBERS: tuple[Any, ...] = ("x", "32", [1], {"a": 1}, 0, -1, 1.5, True, float("nan"))


@pytest.fixture
def target(tmp_path) -> Path:
    return tiny_target(tmp_path / "target")


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("kept"))


def assert_corrupt(folder: Path, match: str) -> None:
    for kind in (TargetVocabulary, Target):
        with pytest.raises(CorruptError, match=match):
            kind.load(folder)


# Configs


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"\x80\x81\x82", b'{"a":' + b"[" * 100_000],
    ids=["empty", "a list", "binary", "nested without end"],
)
def test_a_config_that_is_none(target, name, data):
    (target / name).write_bytes(data)
    assert_corrupt(target, name)


def test_a_config_that_is_a_folder_and_one_beside_an_adapter(target):
    (target / "config.json").unlink()
    (target / "config.json").mkdir()
    assert_corrupt(target, r"config\.json is no file")
    (target / "adapter_config.json").write_text("{}")
    with pytest.raises(MismatchError, match="holds an adapter"):
        Target.load(target)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_byte_order_mark_is_harmless(target, name):
    before = TargetConfig.from_folder(target)
    (target / name).write_bytes(b"\xef\xbb\xbf" + (target / name).read_bytes())
    assert TargetConfig.from_folder(target) == before
    head = head_folder(target, target.parent / "head", "sglang")
    read = read_head(head)[0]
    (head / "config.json").write_bytes(b"\xef\xbb\xbf" + (head / "config.json").read_bytes())
    assert read_head(head)[0] == read


SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "vocab_size")
NUMBERS = (*SIZES, "num_key_value_heads", "rms_norm_eps", "max_position_embeddings")


def not_numbers(key: str) -> list[Any]:
    return [one for one in NOT_NUMBERS if (key, one) != ("rms_norm_eps", 1.5)]


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_of_a_target_that_are_none(target, key):
    for value in not_numbers(key):
        assert_corrupt(edit_config(target, **{key: value}), key)


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("form", ["eyas", "sglang", "vllm"])
def test_numbers_of_a_head_that_are_none(kept, tmp_path, form, key):
    folder = head_folder(kept, tmp_path / "head", form)
    path = folder / ("eyas_head.json" if form == "eyas" else "config.json")
    whole = json.loads(path.read_text())
    for value in not_numbers(key):
        change = {key: value}
        if form == "vllm":
            change = {"transformer_layer_config": whole["transformer_layer_config"] | change}
        path.write_text(json.dumps(whole | change))
        with pytest.raises(EyasError, match=key):
            read_head(folder)


def test_a_flag_that_is_a_word_and_tokens_that_are_none(target):
    for key in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        edit_config(target, **{key: "false"})
        with pytest.raises(CorruptError, match="is 'false'"):
            TargetConfig.from_folder(target)
        edit_config(target, **{key: None})
    (target / "generation_config.json").unlink()
    with pytest.raises(CorruptError, match=r"eos_token_id is '</s>'"):
        TargetConfig.from_folder(edit_config(target, eos_token_id="</s>"))
    assert TargetConfig.from_folder(edit_config(target, eos_token_id=-1)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_attention_heads": 2, "num_key_value_heads": 4}, "2 attention heads cannot share 4"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_hidden_layers": 9}, r"model\.layers\.8\.[\w.]+: missing"),
        ({"num_hidden_layers": 7}, r"model\.layers\.7\.[\w.]+: not a tensor"),
    ],
)
def test_shapes_that_no_decoder_has(target, changes, named):
    edit_config(target, **changes)
    with pytest.raises((CorruptError, MismatchError), match=named):
        Target.load(target)


SLIDING = {"sliding_window": 64, "layer_types": 8 * ["sliding_attention"]}
GRANITE = {**SHAPE, "model_type": "granite"}
QUANTISED = {"quantization_config": {"load_in_4bit": True}}


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("glm4", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "turns 24 of a head's 16"),
        ("glm4", {"rope_parameters": {"partial_rotary_factor": 0.45}}, "turns 7 of a head's 16"),
        ("glm4", {"rope_parameters": [1]}, "does not describe a model"),
        ("phi4_mini", {"max_position_embeddings": None, "head_dim": 32}, "short_factor has 6"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, of 4 experts"),
        ("mixtral", {"num_local_experts": 10**9}, "num_experts is 1000000000"),
        ("mixtral", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ("granite", {"logits_scaling": float("nan")}, "logit_scale is nan"),
        ("smollm3", {"no_rope_layers": [1]}, "does not describe a model"),
        ("llama4", {"attention_chunk_size": 0}, "attention_chunk_size is 0"),
        ("llama4", {"moe_layers": None, "interleave_moe_layer_step": None}, "layer_step is None"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("granite", {"attention_multiplier": 0.0}, "attention_scale is 0"),
        ("gpt_oss", {"swiglu_alpha": 0.5}, "swiglu_limit"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e4}}, "form than Gemma3"),
        ("gemma3", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "without rope_type"),
        ("gemma3", {"rope_scaling": {"rope_type": "yarn", "truncate": False}}, "with truncate"),
        ("gemma3", {"sliding_window": None}, "no sliding_window in use"),
        ("smollm3", {**SLIDING, "use_sliding_window": False}, "no sliding_window in use"),
        ("llava", {"text_config": {**GRANITE, "logits_scaling": 2.0}}, "in text_config"),
        ("llava", QUANTISED, "quantised by None"),
    ],
)
def test_parts_of_an_architecture_that_are_none(tmp_path_factory, tmp_path, name, changes, named):
    saved = saved_architecture(tmp_path_factory.getbasetemp(), name)
    config = json.loads((saved / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((CorruptError, MismatchError), match=named):
        TargetConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tie_word_embeddings": True}, "weights hold another lm_head"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5, which Llama ignores"),
        ({"head_dim": 512}, "heads of 512"),
        (SLIDING, "unlike Llama"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "form than Llama"),
        ({"is_causal": False}, "later tokens"),
    ],
    ids=str,
)
def test_what_programs_read_in_several_ways_is_refused(target, changes, said):
    with pytest.raises(MismatchError, match=said):
        Target.load(edit_config(target, **changes))
    if "tie_word_embeddings" in changes:
        for load in (TargetVocabulary.load, lambda folder: HookedDecoder.load(folder, "float32")):
            with pytest.raises(MismatchError, match=said):
                load(target)


def test_the_names_of_a_type_are_its_name(target):
    for stated, read in (("torch.bfloat16", "bfloat16"), ("auto", "float32"), (None, "float32")):
        assert TargetConfig.from_folder(edit_config(target, dtype=stated)).dtype == read
    with pytest.raises(MismatchError, match="transformers does not load"):
        HookedDecoder.load(edit_config(target, dtype="bf17"), "float32")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "m.gguf"])
def test_a_pointer_of_git_lfs_is_said_to_be_one(target, name):
    (target / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    place = str(target / name) if name == "m.gguf" else str(target)
    with pytest.raises(CorruptError, match=rf"{name} is a pointer of Git LFS"):
        Engine.load(resolve_target(place)) if name != "tokenizer.json" else Chat(place)


def test_blocks_of_experts_without_scales_and_rows_that_are_not_there(tmp_path_factory):
    root, blocks = tmp_path_factory.getbasetemp(), "model.layers.0.mlp.experts.down_proj_blocks"
    config = TargetConfig.from_folder(saved_architecture(root, "gpt_oss"))
    stored = {blocks: np.zeros((4, 64, 3, 16), np.uint8)}
    for scales in ({}, {blocks.replace("blocks", "scales"): np.zeros((4, 64, 2))}):
        with pytest.raises(MismatchError, match="down_proj_blocks has no scales"):
            arranged(config, stored | scales)
    config = TargetConfig.from_folder(saved_architecture(root, "glm4"))
    with pytest.raises(MismatchError, match=r"q_proj\.weight is \(60, 64\), not as config"):
        arranged(config, {"model.layers.0.self_attn.q_proj.weight": np.zeros((60, 64))})


@pytest.mark.parametrize("theta", [0, -1.0, float("inf"), "x", True])
def test_a_rotary_base_that_is_none(target, theta):
    for written in ({"rope_theta": theta}, {"rope_parameters": {"rope_theta": theta}}):
        with pytest.raises(CorruptError, match=r"rotary embedding.*theta is"):
            RopeConfig.from_hf(written)
    assert_corrupt(edit_config(target, rope_parameters=None, rope_theta=theta), "theta is")
    head = head_folder(tiny_target(target.parent / "sound"), target.parent / "head", "sglang")
    with pytest.raises(CorruptError, match="theta is"):
        read_head(edit_config(head, rope_theta=theta))


def test_what_a_heads_config_lacks_is_a_key(kept, tmp_path):
    ids = "eagle_aux_hidden_state_layer_ids"
    for value in (5, "1 3 4", {"a": 1}):
        folder = head_folder(kept, tmp_path / str(value), "vllm")
        with pytest.raises(CorruptError, match=f"{ids} in the config is .*, not a JSON list"):
            read_head(edit_config(folder, **{ids: value}))
    for listed in (["2", "4", "5"], [True, 4, 5], [[2], 4, 5], [2.0, 4.0, 5.0]):
        with pytest.raises(MismatchError, match=f"{ids} is .*three numbers"):
            read_head(edit_config(folder, **{ids: listed}))
    with pytest.raises(MismatchError, match="lacks 'hidden_size'"):
        read_head(edit_config(folder, "transformer_layer_config", hidden_size=None))


def sharded(folder: Path, shard: str) -> Path:
    """All of a target's tensors promised in one shard, whose file lies beside the folder too."""
    tensors = load_file(folder / SINGLE)
    os.rename(folder / SINGLE, folder.parent / "out.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, shard)}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_a_shard_may_be_a_link(target, monkeypatch):
    sharded(target, "model.safetensors")  # MLX writes so
    os.rename(target.parent / "out.safetensors", target / SINGLE)
    with monkeypatch.context() as patch:
        patch.delattr("numpy.array_equal")
        Target.load(target)
    sharded(target, "model-1.safetensors")
    shard = target / "model-1.safetensors"
    shard.symlink_to(target.parent / "out.safetensors")
    shutil.copy(shard, target / SINGLE)
    for cache in (Path(256 * "x"), target.parent):  # one that can be neither read nor written
        monkeypatch.setattr("eyas.model.weights.cache_folder", lambda _, cache=cache: cache)
        Target.load(target)
    with monkeypatch.context() as patch:  # compared once
        patch.delattr("numpy.array_equal")
        Target.load(target)
    data = (target / SINGLE).read_bytes()
    (target / SINGLE).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptError, match="differs in model"):
        Target.load(target)
    shard.unlink()
    shard.mkdir()
    with pytest.raises(CorruptError, match=r"model-1\.safetensors cannot be read"):
        Target.load(target)


@pytest.mark.parametrize(
    "shard",
    ["", ".", "..", "a\0b", "sub/model.safetensors", "../out.safetensors", "{}/out.safetensors"],
)
def test_an_index_names_files_of_its_folder_only(target, shard):
    assert_corrupt(sharded(target, shard.format(target.parent)), "which is no file of this folder")


def test_a_tensor_in_two_shards(target):
    sharded(target, "model-1.safetensors")
    tensors = load_file(target.parent / "out.safetensors")
    save_file(tensors, target / "model-1.safetensors")
    norm = {"model.norm.weight": tensors["model.norm.weight"] + 1}
    save_file({**norm, "more": ONE}, target / "model-2.safetensors")
    index = json.loads((target / INDEX).read_text())
    index["weight_map"]["more"] = "model-2.safetensors"
    (target / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptError, match=r"norm\.weight lies in model-2.*in another shard"):
        Target.load(target)


def test_a_header_that_promises_more_than_there_is(target):
    header = {"x": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}}
    data = json.dumps(header).encode()
    (target / SINGLE).write_bytes(len(data).to_bytes(8, "little") + data)
    with pytest.raises(CorruptError, match="cannot be read"):
        Target.load(target)


# Weights that are no numbers

BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", BAD)
def test_one_value_among_many_is_found_wherever_it_stands(dtype, value):
    for size in (1, 15, 1000, 70_000):
        weights = torch.ones(size).to(dtype)
        assert nonfinite({"w": array_of(weights)}) == []
        for at in {0, size // 2, size - 1}:
            damaged = weights.clone()
            damaged[at] = value
            said = [f"w: 1 of {size} values are NaN or infinite"]
            assert nonfinite({"w": array_of(damaged)}) == said
    assert nonfinite({"none": np.empty(0), "ids": np.array([1])}) == []
    most = torch.tensor([torch.finfo(dtype).max] * 9, dtype=dtype)
    assert nonfinite({"most": array_of(most)}) == []


@pytest.mark.parametrize(
    ("name", "value"),
    zip(("lm_head.weight", "norm.weight", "midlayer.mlp.up_proj.weight"), BAD, strict=True),
)
def test_a_head_with_a_weight_that_is_no_number_is_refused(kept, tmp_path, name, value):
    folder = head_folder(kept, tmp_path / "head")
    weights = load_file(folder / SINGLE)[name]
    weights.view(-1)[-1] = value
    edit_tensors(folder, {name: weights})
    said = rf"{name}: 1 of {weights.numel()} values are NaN or infinite"
    with pytest.raises(MismatchError, match=said):
        Engine.load(kept, folder)
    findings = check(folder, kept)
    assert [one.what for one in findings if one.level == "error"] == [said]
    replayed, why_not = replay_head(folder, kept)
    assert not replayed
    assert said in why_not


ONE, QUERY = torch.ones(1), "model.layers.3.self_attn.q_proj."


@pytest.mark.parametrize(
    ("edit", "said", "apart"),
    [
        (lambda of: {k: v for k, v in of.items() if ".layers.3." not in k}, "6 more", None),
        (lambda of: {k.replace("model", "base"): v for k, v in of.items()}, "missing", None),
        (lambda of: {**of, QUERY + "weight": torch.ones(32, 16)}, r"is \(32, 16\) and has", None),
        (lambda of: {**of, QUERY + "scale": ONE}, "scale is not a t", "hf_quant_config.json"),
        (lambda of: {**of, QUERY + "qweight": ONE}, "qweight is not", "quantize_config.json"),
    ],
    ids=["a layer is missing", "other names", "another shape", "fp8", "gptq"],
)
def test_what_transformers_would_fill_or_drop_is_refused(tmp_path, kept, edit, said, apart):
    """It warns, and computes with random weights, or without the scales."""
    folder = shutil.copytree(kept, tmp_path / "target")
    tensors = edit(load_file(folder / SINGLE))
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    if apart:
        (folder / apart).write_text("{}")
    with pytest.raises(MismatchError, match=said) as raised:
        HookedDecoder.load(folder, "float32")
    assert (apart or "restore the checkpoint") in raised.value.hint


def test_tensors_that_no_layer_computes_with_are_no_fault(tmp_path, kept):
    folder = shutil.copytree(kept, tmp_path / "target")
    more = (
        "model.layers.8.fc.weight",
        "mtp.fc.weight",
        "model.mtp_layers.0.fc.weight",
        "model.mtp_block.fc.weight",
        "v_head.summary.weight",
        QUERY.replace("q_proj", "rotary_emb.inv_freq"),
    )
    edit_tensors(folder, {name.rstrip("."): torch.ones(4) for name in more})
    HookedDecoder.load(folder, "float32")


def test_a_quantised_target_goes_by_transformers_or_says_what_to_do(tmp_path):
    folder = tiny_target(tmp_path / "fp8", dtype="bfloat16", hidden_size=128, head_dim=32)
    tensors = load_file(folder / SINGLE)
    plain = HookedDecoder.load(folder, "bfloat16").states([[5, 6, 7]])
    for name in [name for name in tensors if "_proj" in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        blocks = [-(-size // 128) for size in tensors[name].shape]
        tensors[name.replace("weight", "weight_scale_inv")] = torch.ones(blocks)
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    edit_config(
        folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    with pytest.raises(MismatchError, match="quantised by 'fp8'") as raised:
        Target.load(folder)
    assert "transformers" in raised.value.hint
    assert not isinstance(target_shape(folder), TargetConfig), "capture takes transformers then"
    states = HookedDecoder.load(folder, "bfloat16").states([[5, 6, 7]])
    assert torch.cosine_similarity(states.last_hidden, plain.last_hidden, dim=-1).min() > 0.9
    edit_config(folder, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    with pytest.raises(MismatchError, match="transformers does not run") as raised:
        HookedDecoder.load(folder, "bfloat16")
    assert "before it was quantised" in raised.value.hint


@pytest.mark.parametrize("tied", [False, True])
def test_a_target_with_a_weight_that_is_no_number_is_refused(tmp_path, tied):
    folder = tiny_target(tmp_path / "target", tie_word_embeddings=tied)
    layer, embeddings = "model.layers.3.mlp.up_proj.weight", "model.embed_tokens.weight"
    tensors = load_file(folder / SINGLE)
    edit_tensors(folder, {layer: tensors[layer].index_fill(0, torch.tensor([5]), float("nan"))})
    said = f"{layer}: 32 of 2048 values are NaN or infinite"
    with pytest.raises(CorruptError, match=said):
        Target.load(folder)
    with pytest.raises(CorruptError, match=said):
        HookedDecoder.load(folder, "float32")
    edit_tensors(folder, {layer: tensors[layer], embeddings: tensors[embeddings] / 0})
    with pytest.raises(CorruptError, match="embed_tokens: 10240 of 10240 values"):
        TargetVocabulary.load(folder)


def test_the_commands_say_it_and_end_with_2(kept, tmp_path, capsys):
    head = head_folder(kept, tmp_path / "head")
    weights = load_file(head / SINGLE)["fc.weight"]
    edit_tensors(head, {"fc.weight": weights * float("inf")})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "messages": [{"role": "user", "content": "Hello there"}]}\n')
    for arguments in (
        ["serve", "--target", str(kept), "--head", str(head), "--port", "0"],
        ["eval", str(head), "-t", str(kept), "-o", str(tmp_path / "o"), "--prompts", str(prompts)],
        ["check", str(head), "--target", str(kept)],
    ):
        with pytest.raises(SystemExit) as end:
            build(arguments)(arguments)
        assert end.value.code == 2, arguments
        told = "".join(capsys.readouterr())
        assert "fc.weight: 3072 of 3072 values are NaN or infinite" in told, arguments
