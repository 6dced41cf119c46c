"""How a target is stored and read; test_families.py and test_native.py hold its numbers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.errors import CorruptError, MismatchError, MissingInputError
from eyas.model.architecture import TargetConfig
from eyas.model.library import address
from eyas.model.target import Target, resolve_dtype, stored_dtype
from eyas.model.weights import read_arrays
from tests.oracle.target import logits_of
from tests.tiny import tiny_target


@pytest.mark.parametrize(
    ("stored", "chosen"),
    [
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),  # the native decoder runs none
        ("float32", "float32"),
        ("float8_e4m3fn", "float32"),
    ],
)
def test_auto_is_the_checkpoints_precision_where_it_runs(tmp_path, stored, chosen):
    shape = TargetConfig.from_folder(tiny_target(tmp_path)).model_copy(update={"dtype": stored})
    assert resolve_dtype("auto", shape) == chosen
    in_blocks = shape.model_copy(update={"in_blocks": True})
    assert resolve_dtype("auto", in_blocks) == resolve_dtype("packed", shape) == "packed"
    assert resolve_dtype("float32", in_blocks) == "float32"
    assert stored_dtype(shape) == (stored if stored != "float8_e4m3fn" else "float32")
    with pytest.raises(MismatchError, match="float16"):
        Target.load(tmp_path, "float16")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_half_precision_in_any_precision(tmp_path, dtype, tolerance):
    """Against transformers in float32; other precisions: test_native.py."""
    folder = tiny_target(tmp_path, dtype="float16", initializer_range=0.05)
    tokens_BT = torch.randint(0, 320, (2, 20))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(tokens_BT).logits
    ours, near = logits_of(Target.load(folder, dtype), tokens_BT), tolerance * float(expected.std())
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=near)


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_weights_are_the_same_target(tmp_path, tied):
    folder = tiny_target(tmp_path / "whole", tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    tokens_BT = torch.randint(0, 320, (2, 20))
    whole, sharded = (Target.load(one) for one in (folder, tmp_path / "shards"))
    assert torch.equal(logits_of(sharded, tokens_BT), logits_of(whole, tokens_BT))


def test_what_is_wrong_with_shards_is_named(tmp_path):
    folder = tiny_target(tmp_path / "whole")
    shards = tmp_path / "shards"
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(shards, max_shard_size="60KB")
    index = shards / "model.safetensors.index.json"
    promised = json.loads(index.read_text())["weight_map"]

    def promise_more(shard: str) -> None:
        index.write_text(json.dumps({"weight_map": {**promised, "more.weight": shard}}))

    first = min(shards.glob("*.safetensors")).name
    promise_more(first)
    with pytest.raises(CorruptError, match=r"lacks more\.weight"):
        read_arrays(shards)
    promise_more("model-9.safetensors")
    with pytest.raises(MissingInputError, match=r"lacks the shard model-9\.safetensors"):
        read_arrays(shards)
    # what is not wanted is not looked for
    assert "model.norm.weight" in read_arrays(shards, {"model.norm.weight"})
    index.write_text("{}")
    with pytest.raises(CorruptError, match="no index of shards"):
        read_arrays(shards)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists what is mapped")
def test_weights_are_mapped_not_copied(tmp_path):
    folder = tiny_target(tmp_path)
    tensors = read_arrays(folder)
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0] for line in maps if f" {tmp_path}/model.safetensors" in line]
    ranges = [[int(end, 16) for end in one.split("-")] for one in mapped]
    assert ranges
    for tensor in tensors.values():
        assert any(start <= address(tensor) < end for start, end in ranges)


def test_wrong_weights_and_unsupported_targets_are_named(tmp_path):
    folder = tiny_target(tmp_path / "a")
    config, tensors = TargetConfig.from_folder(folder), read_arrays(folder)
    del tensors["model.layers.3.mlp.up_proj.weight"]
    with pytest.raises(MismatchError, match=r"layers\.3\.mlp\.up_proj\.weight: missing"):
        Target(config, tensors, "float32")
    for name, family, overrides in (
        ("b", "mistral", {}),
        ("c", "qwen2", {"use_sliding_window": True, "max_window_layers": 4}),
    ):
        sliding = tiny_target(tmp_path / name, family, sliding_window=16, **overrides)
        with pytest.raises(MismatchError, match="attends to 16 positions; trees need 64"):
            Target.load(sliding)
