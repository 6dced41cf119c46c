"""Heads on disk: every form reads back exactly, and whatever our Head would compute otherwise is
refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig

from eyas.errors import CorruptError, MismatchError, MissingInputError
from eyas.model.architecture import TargetConfig
from eyas.model.checkpoint import map_faults, open_checkpoint
from eyas.model.config import HeadConfig, RopeConfig
from eyas.model.dialects import OTHER_LAYER_IDS, Form
from eyas.model.forms import Verifier
from eyas.operators.tensors import array_of, read_head, write_head
from eyas.operators.vocab import TargetVocabulary, draft_vocabulary
from tests.tiny import read_tensors, tiny_target
from tests.tiny_head import edit_config, edit_tensors, head_folder, tiny_head, write_folder

FORMS = ("eyas", "sglang", "vllm")
FLAGS = [
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_output": True},
    {"own_rope": True},
    {"sliding_window": 128},
    {"norm_before_residual": True, "fc_norm": True, "norm_output": True, "own_rope": True},
]
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def written_config(config: HeadConfig, tensors: dict[str, torch.Tensor], form: Form) -> dict:
    name = "eyas_head.json" if form == "eyas" else "config.json"
    return json.loads(write_head(config, tensors, form)[name])


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


HALVES = [{"dtype": torch.bfloat16}, {"dtype": torch.float16}]


@pytest.mark.parametrize("options", [{}, *HALVES, *FLAGS], ids=lambda options: "+".join(options))
@pytest.mark.parametrize("form", FORMS)
def test_reads_back_bit_equal(target, tmp_path, form, options):
    config, tensors = tiny_head(target, **options)
    files = write_head(config, tensors, form)
    config_read, tensors_read = read_head(write_folder(files, tmp_path / form))
    assert config_read == config
    assert tensors_read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert tensors_read[name].dtype == tensor.dtype
        assert torch.equal(tensors_read[name], tensor), name
    backwards = dict(reversed(tensors_read.items()))
    assert write_head(config_read, backwards, form) == files
    assert open_checkpoint(tmp_path / form).form == form


def test_flags_that_are_off_are_not_written_in_our_form(target):
    settings = written_config(*tiny_head(target), "eyas")
    assert {*FLAGS[-1], "norm_before_fc"}.isdisjoint(settings)
    assert written_config(*tiny_head(target, fc_norm=True), "eyas")["fc_norm"] is True


def test_each_project_finds_the_flags_where_it_looks(target):
    flags = {"norm_before_fc": True, "norm_output": True}
    config, tensors = tiny_head(target, **flags)
    residual = config.model_copy(update={"norm_before_residual": True})
    vllm = written_config(residual, tensors, "vllm")
    sglang = written_config(config, tensors, "sglang")
    for written in (vllm, sglang):
        assert {key: written[key] for key in flags} == flags
        assert written["fc_norm"] is False
    assert (vllm["norm_before_residual"], sglang["norm_before_residual"]) == (True, False)
    assert sglang["eagle_config"]["norm_before_fc"] is True
    assert "norm_output" not in written_config(*tiny_head(target), "sglang")


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
def test_rope_length_and_taps_survive(target, tmp_path, form, rope):
    config, tensors = tiny_head(target)
    sizes = {"max_position_embeddings": 40960, "rms_norm_eps": 1e-5, "head_dim": 8}
    taps = (1, 3, 5) if form == "sglang" else (0, 3, 5)  # one that begins with 0 is ambiguous there
    config = config.model_copy(update={"rope": rope, "taps": taps, **sizes})
    assert read_head(write_folder(write_head(config, tensors, form), tmp_path / form))[0] == config


@pytest.mark.parametrize(
    "rope",
    [RopeConfig(theta=1e6), RopeConfig(theta=5e5, kind="llama3", factor=8.0)],
    ids=lambda rope: rope.kind,
)
def test_transformers_understands_what_engines_read_through_it(target, tmp_path, rope):
    """SGLang reads our config.json by AutoConfig, vLLM and speculators the layer's part by
    LlamaConfig.
    """
    config, tensors = tiny_head(target)
    config = config.model_copy(update={"rope": rope})
    sglang = AutoConfig.from_pretrained(
        write_folder(write_head(config, tensors, "sglang"), tmp_path / "sglang")
    )
    vllm = LlamaConfig(**written_config(config, tensors, "vllm")["transformer_layer_config"])
    for read in (sglang, vllm):
        assert RopeConfig.from_hf(read.to_dict()) == rope
        assert (read.num_hidden_layers, read.head_dim, read.vocab_size) == (1, 8, 320)
        assert read.max_position_embeddings == 256
        assert not read.tie_word_embeddings
        assert str(read.dtype).removeprefix("torch.") == "float32"
    assert sglang.eagle_config[LAYER_IDS] == [1, 3, 4]
    assert (sglang.draft_vocab_size, sglang.target_hidden_size) == (64, 32)


def test_layer_names_of_each_form(target, tmp_path):
    sglang, vllm = (
        stored_tensors(head_folder(target, tmp_path / form, form)) for form in ("sglang", "vllm")
    )
    renamed = {name.replace("midlayer.", "layers.0.") for name in sglang}
    assert renamed | {"embed_tokens.weight"} == set(vllm)
    assert sum(name.startswith("midlayer.") for name in sglang) == 10
    assert sglang["d2t"].dtype == vllm["d2t"].dtype == torch.int64
    assert sglang["t2d"].dtype == vllm["t2d"].dtype == torch.bool


def test_embeddings_are_left_out_where_they_are_said_to_be_the_targets(target, tmp_path):
    ours = head_folder(target, tmp_path / "ours", "vllm")
    assert "embed_tokens.weight" not in read_head(ours)[1]
    stored = stored_tensors(ours)["embed_tokens.weight"]
    theirs = head_folder(target, tmp_path / "theirs", "vllm")
    edit_config(theirs, target_embed_tokens_sha256=None)
    assert torch.equal(read_head(theirs)[1]["embed_tokens.weight"], stored)
    edit_tensors(ours, {"embed_tokens.weight": stored.roll(1, 0)})
    with pytest.raises(MismatchError, match="not the embeddings that the config names"):
        read_head(ours)


def test_own_embeddings_go_where_they_are_used(target, tmp_path):
    config, tensors = tiny_head(target)
    tensors["embed_tokens.weight"] = torch.randn(320, 32)
    for form in ("eyas", "vllm"):
        of_target = Verifier(embed_tokens=np.zeros((320, 32), np.float32))
        written = write_head(config, tensors, form, of_target)
        read = read_head(write_folder(written, tmp_path / form))[1]
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    tensors["embed_tokens.weight"] = torch.zeros(319, 32)
    with pytest.raises(MismatchError, match=r"embed_tokens\.weight has shape"):
        write_head(config, tensors, "eyas")


def test_a_full_vocabulary_may_share_the_targets_lm_head(target, tmp_path):
    config, tensors = tiny_head(target, draft_vocab_size=320)
    del tensors["lm_head.weight"]
    # SGLang would leave its own at random numbers
    assert written_config(config, tensors, "sglang")["draft_vocab_size"] is None
    for form in ("eyas", "sglang"):
        files = write_head(config, tensors, form)
        config_read, read = read_head(write_folder(files, tmp_path / form))
        assert config_read == config
        assert read.keys() == tensors.keys()
    config, tensors = tiny_head(target)
    del tensors["lm_head.weight"]
    with pytest.raises(MismatchError, match=r"lm_head\.weight is missing"):
        write_head(config, tensors, "eyas")


@pytest.mark.parametrize("n", [7, 8, 9, 10, 12, 24, 28, 32, 36, 61, 80])
def test_each_engine_taps_the_same_three_streams(target, n):
    """By each engine's own rule: vLLM takes what enters the listed layers, SGLang adds 1 and does
    the same.
    """
    config, tensors = tiny_head(target)
    taps = TargetConfig.from_folder(target).model_copy(update={"num_hidden_layers": n}).default_taps
    config = config.model_copy(update={"taps": taps})
    vllm = written_config(config, tensors, "vllm")
    sglang = written_config(config, tensors, "sglang")
    entering = [2, n // 2, n - 3]  # EAGLE's and both engines' default
    assert vllm[LAYER_IDS] == entering
    assert [index + 1 for index in sglang["eagle_config"][LAYER_IDS]] == entering
    assert LAYER_IDS not in sglang
    assert "eagle_config" not in vllm


def test_taps_that_are_not_given_are_the_targets_default(target, tmp_path):
    shape = TargetConfig.from_folder(target)
    sglang = edit_config(head_folder(target, tmp_path / "sglang", "sglang"), eagle_config=None)
    vllm = edit_config(head_folder(target, tmp_path / "vllm", "vllm"), **{LAYER_IDS: None})
    for folder in (sglang, vllm):
        assert read_head(folder, shape)[0].taps == shape.default_taps
        with pytest.raises(MismatchError, match="does not say which layers"):
            read_head(folder)


def test_a_config_with_the_fewest_keys(target, tmp_path):
    folder = head_folder(target, tmp_path / "head", "sglang")
    kept = ("architectures", "hidden_size", "intermediate_size", "num_attention_heads")
    kept = (*kept, "num_key_value_heads", "vocab_size", "draft_vocab_size", "eagle_config")
    config = json.loads((folder / "config.json").read_text())
    minimal = {key: config[key] for key in kept} | {
        "rope_scaling": None,
        "target_hidden_size": None,
    }
    (folder / "config.json").write_text(json.dumps(minimal))
    read, _ = read_head(folder)
    assert read.rope == RopeConfig(theta=10000.0)
    assert (read.max_position_embeddings, read.rms_norm_eps, read.head_dim) == (2048, 1e-6, 8)
    assert (read.taps, read.target_hidden_size, read.target_lm_head_sha256) == ((1, 3, 4), 32, "")


@pytest.mark.parametrize("form", ["sglang", "vllm"])
@pytest.mark.parametrize("size", [320, None])
def test_full_vocabulary_needs_no_maps(target, tmp_path, form, size):
    config, tensors = tiny_head(target, draft_vocab_size=320)
    folder = write_folder(write_head(config, tensors, form), tmp_path / "head")
    edit_config(folder, draft_vocab_size=size)
    assert {"d2t", "t2d"}.isdisjoint(stored_tensors(folder))
    config_read, read = read_head(folder)
    assert config_read.draft_vocab_size == 320
    assert read["t2d"].all()
    assert not read["d2t"].any()


def test_a_map_may_be_unordered_and_alone(target, tmp_path):
    folder = head_folder(target, tmp_path / "head", "sglang")
    ids = torch.tensor([300, *range(100, 163)])
    edit_tensors(folder, {"d2t": (ids - torch.arange(64)).to(torch.int32), "t2d": None})
    _, read = read_head(folder)
    assert read["d2t"].dtype == torch.int64
    assert read["t2d"].nonzero().flatten().tolist() == sorted(ids.tolist())


@settings(max_examples=50)
@given(st.data())
def test_any_choice_of_tokens_is_a_map_and_a_changed_offset_is_none(data):
    V = data.draw(st.integers(2, 40))
    W = data.draw(st.integers(1, V - 1))
    counts_V = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=V, max_size=V)))
    d2t, t2d = map(array_of, draft_vocabulary(counts_V, W))
    assert map_faults(d2t, t2d, V, W) == []
    place, shift = data.draw(st.integers(0, W - 1)), data.draw(st.integers(-V, V).filter(bool))
    d2t[place] += shift
    assert map_faults(d2t, t2d, V, W)


def saved(folder: Path, tensors: dict[str, torch.Tensor], **config) -> Path:
    """A head in another project's form: these tensors, and the fewest keys that it writes."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 1, "vocab_size": 320}
    shape |= {"draft_vocab_size": 64, "rms_norm_eps": 1e-6, "model_type": "llama"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**shape, **config}))
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def renamed(
    tensors: dict[str, torch.Tensor], layer: str = "midlayer.", model: str = ""
) -> dict[str, torch.Tensor]:
    """Under another project's names; `model` goes before all that is not lm_head or a map."""
    outside = ("lm_head.weight", "d2t", "t2d")
    return {
        (name if name in outside else model + name.replace("midlayer.", layer)): tensor
        for name, tensor in tensors.items()
    }


def expect(folder: Path, target: Path, tensors: dict[str, torch.Tensor], *flags: str) -> None:
    """The head reads as these tensors, with these flags and no other."""
    config, read = read_head(folder, TargetConfig.from_folder(target))
    assert {flag for flag in FLAGS[-1] | FLAGS[1] if getattr(config, flag)} == set(flags)
    assert config.taps == (1, 3, 4)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_the_eagle_repositorys_own_form(target, tmp_path):
    _, tensors = tiny_head(target)
    folder = saved(
        tmp_path / "head", tensors, architectures=["LlamaForCausalLM"], max_position_embeddings=2048
    )
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    expect(folder, target, tensors)
    torch.save(tensors["fc.weight"].T, folder / "pytorch_model.bin")
    with pytest.raises(CorruptError, match="more than named tensors"):
        read_head(folder)
    whole = tensors["fc.weight"]
    views = {"cut": whole[5:9, 3:], "turned": whole.T, "single": torch.ones(())}
    torch.save({**views, "short": tensors["fc.weight"].bfloat16()}, folder / "pytorch_model.bin")
    found = read_tensors(folder, pickled=True)
    assert all(torch.equal(found[name], one) for name, one in views.items())
    assert torch.equal(found["short"], tensors["fc.weight"].bfloat16())
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CorruptError, match="plain tensors"):  # of before PyTorch 1.6
        read_head(folder)


def test_a_pickle_that_would_run_code_is_not_read(target, tmp_path):
    class Harm:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "harmed",))

    _, tensors = tiny_head(target)
    folder = saved(tmp_path / "head", tensors, architectures=["LlamaForCausalLM"])
    (folder / "model.safetensors").unlink()
    for content in ({"fc.weight": Harm()}, [torch.ones(3)], {"fc.weight": 3}):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(CorruptError, match=r"plain tensors|more than named tensors"):
            read_head(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cut")
    with pytest.raises(CorruptError):
        read_head(folder)
    assert not (tmp_path / "harmed").exists()


STOCK = {"architectures": ["LlamaForCausalLMEagle3"]}
WINDOW_OFF = {**STOCK, "fc_norm": True, "sliding_window": 128, "use_sliding_window": False}
MODELOPT = {**STOCK, "eagle_config": {"norm_before_fc": True, LAYER_IDS: [1, 3, 4]}}
VLLM = {"architectures": ["Eagle3LlamaForCausalLM"], LAYER_IDS: [2, 4, 5]}
NEMO = {"architectures": ["LlamaEagle3DraftModel"], "model_type": "qwen3"}
NEMO |= {"tie_word_embeddings": True, "fc_norm": True, "norm_output": True}
FREQUENCIES = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}
EMBEDDINGS = {"embed_tokens.weight": torch.ones(320, 32)}
# (config, flags of the head, the tensors' names, tensors beside them)
DIALECTS = {
    "SpecForge": (WINDOW_OFF, {"fc_norm"}, (), {}),
    "TorchSpec": ({**WINDOW_OFF, "norm_output": False}, {"fc_norm"}, (), {}),
    "ModelOpt": (
        {**MODELOPT, "norm_before_residual": True},
        {"norm_before_residual", "norm_before_fc"},
        ("layers.0.",),
        {},
    ),
    "vLLM, AngelSlim": (VLLM, set(), ("midlayer.",), {}),
    "vLLM's layer": (VLLM, set(), ("layers.0.",), {}),
    "NeMo": (NEMO, {"fc_norm", "norm_output"}, ("layers.0.", "model."), EMBEDDINGS),
    "saved frequencies": ({"architectures": ["LlamaForCausalLM"]}, set(), (), FREQUENCIES),
}


@pytest.mark.parametrize(("config", "flags", "names", "beside"), DIALECTS.values(), ids=DIALECTS)
def test_each_dialect(target, tmp_path, config, flags, names, beside):
    _, tensors = tiny_head(target, **dict.fromkeys(flags, True))
    tensors |= {name: beside[name] for name in EMBEDDINGS.keys() & beside.keys()}
    folder = saved(tmp_path / "head", renamed(tensors | beside, *names), **config)
    expect(folder, target, tensors, *flags)


def test_the_keys_that_turn_a_window_on(target, tmp_path):
    _, tensors = tiny_head(target)
    shape = TargetConfig.from_folder(target)
    window = {"sliding_window": 128}
    for name, keys, expected in (
        ("list", {"layer_types": ["sliding_attention"]}, 128),
        ("flag", {"use_sliding_window": True}, 128),
        ("no flag", {"use_sliding_window": False}, None),
        ("both", {"layer_types": ["full_attention"], "use_sliding_window": True}, None),
    ):
        config, _ = read_head(saved(tmp_path / name, tensors, **window, **keys), shape)
        assert config.sliding_window == expected, name
    keys = {"layer_types": ["sliding_attention"]}
    for number in (63, True, "128"):  # 63: a tree can be deeper
        with pytest.raises(MismatchError, match="sliding_window"):
            read_head(saved(tmp_path / str(number), tensors, sliding_window=number, **keys), shape)


def test_norm_output_of_specforge_is_never_carried_over(target, tmp_path):
    _, tensors = tiny_head(target)
    config = {**STOCK, "norm_output": True}
    with pytest.raises(MismatchError, match="it has two meanings") as error:
        read_head(saved(tmp_path / "a", tensors, **config), TargetConfig.from_folder(target))
    assert '"norm_output_is_fed_back": false' in error.value.hint
    expect(saved(tmp_path / "b", tensors, **config, norm_output_is_fed_back=False), target, tensors)
    folder = saved(tmp_path / "c", tensors, **config, norm_output_is_fed_back=True)
    expect(folder, target, tensors, "norm_output")


def test_norm_output_of_others_is_the_fed_back_norm(target, tmp_path, caplog):
    _, tensors = tiny_head(target)
    named = {"architectures": ["Eagle3LlamaForCausalLM"], "norm_output": True}
    expect(saved(tmp_path / "a", tensors, **named), target, tensors, "norm_output")
    assert "the head is of vLLM, AngelSlim" in caplog.text
    caplog.clear()
    layers = {**STOCK, "norm_output": True, "norm_before_residual": True}
    folder = saved(tmp_path / "b", renamed(tensors, "layers.0."), **layers)
    expect(folder, target, tensors, "norm_output", "norm_before_residual")
    assert "the head is of ModelOpt, or a converted speculators head" in caplog.text


def test_modelopt_must_say_where_the_residual_is_taken(target, tmp_path):
    _, tensors = tiny_head(target, norm_before_fc=True)
    with pytest.raises(MismatchError, match="norm_before_residual is not given"):
        read_head(saved(tmp_path / "head", renamed(tensors, "layers.0."), **MODELOPT))


@pytest.mark.parametrize("form", FORMS)
def test_sharded_heads(target, tmp_path, form):
    config, tensors = tiny_head(target)
    files = write_head(config, tensors, form, max_shard_bytes=9000)
    folder = write_folder(files, tmp_path / "head")
    index = json.loads(files["model.safetensors.index.json"])
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    assert len(shards) > 2
    assert set(index["weight_map"].values()) == set(shards)
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    sizes = [
        sum(one.nbytes for one in safetensors.torch.load(files[name]).values()) for name in shards
    ]
    assert sum(sizes) == index["metadata"]["total_size"]
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert largest > 9000
    assert all(size <= 9000 or size == largest for size in sizes)
    expect(folder, target, tensors)
    assert files == write_head(*read_head(folder), form, max_shard_bytes=9000)
    (folder / shards[1]).unlink()
    with pytest.raises(MissingInputError, match="lacks the shard"):
        read_head(folder)


@pytest.mark.parametrize("form", ["sglang", "vllm"])
def test_the_targets_embeddings_go_along_if_given_and_are_known_for_it(target, tmp_path, form):
    config, tensors = tiny_head(target)
    embed_tokens = TargetVocabulary.load(target).embed_tokens
    files = write_head(config, tensors, form, Verifier(embed_tokens=array_of(embed_tokens)))
    with_them = write_folder(files, tmp_path / "with")
    without = write_folder(write_head(config, tensors, form), tmp_path / "without")
    assert torch.equal(stored_tensors(with_them)["embed_tokens.weight"], embed_tokens)
    assert "embed_tokens.weight" not in stored_tensors(without)
    for folder in (with_them, without):
        config_read, read = read_head(folder)
        assert config_read == config
        assert read.keys() == tensors.keys()


def test_sglangs_first_names_for_fc_norm(target, tmp_path):
    _, tensors = tiny_head(target, fc_norm=True)
    theirs = {**tensors}
    for stream, old in enumerate(("low", "mid", "high")):
        theirs[f"aux_norm_{old}.weight"] = theirs.pop(f"fc_norm.{stream}.weight")
    folder = saved(tmp_path / "head", theirs, **STOCK, use_aux_norm=True)
    expect(folder, target, tensors, "fc_norm")


def test_layers_listed_twice_need_to_agree_in_one_reading(target, tmp_path):
    for number, outputs in enumerate(([2, 4, 5], [1, 3, 4])):
        folder = head_folder(target, tmp_path / str(number), "sglang")
        edit_config(folder, **{LAYER_IDS: [2, 4, 5], "eagle_config": {LAYER_IDS: outputs}})
        assert read_head(folder)[0].taps == (1, 3, 4)
    folder = head_folder(target, tmp_path / "inputs", "sglang")
    folder = edit_config(folder, **{LAYER_IDS: [3, 5, 6], "eagle_config": {LAYER_IDS: [2, 4, 5]}})
    assert read_head(folder)[0].taps == (2, 4, 5)


# as transformers 5 writes it
PART = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
REFUSED = {
    "norm_before_fc": ({"norm_before_fc": True}, "input_norm.weight is missing"),
    "fc_norm": ({"fc_norm": True}, "fc_norm.0.weight is missing.*fc_norm.2.weight is missing"),
    "both norms": ({"fc_norm": True, "norm_before_fc": True}, "in which order"),
    "norm_output": ({"norm_output": True}, "norm_output"),
    "contradiction": (
        {"norm_before_residual": False, "eagle_config": {"norm_before_residual": True}},
        "False and True",
    ),
    "part of the rotary embedding": ({"rope_parameters": PART}, "partial_rotary_factor"),
    "all at once": (
        {"fc_norm": True, "hidden_act": "gelu", "norm_before_fc": True},
        "norm_before_fc and fc_norm.*gelu",
    ),
    "no boolean": ({"norm_before_residual": "yes"}, "norm_before_residual is given as 'yes'"),
    "multi-head latent attention": (
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        "Eagle3DeepseekV2ForCausalLM",
    ),
    "a window": ({"sliding_window": 128}, "sliding_window is 128 of a context of 256"),
    "a window of no size": ({"sliding_window": "x"}, "sliding_window"),
    "two layers": ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
    "bias": ({"attention_bias": True}, "attention_bias"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "quantised": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "one feature": (
        {"eagle_config": {"use_aux_hidden_state": False, LAYER_IDS: [1, 3, 4]}},
        "use_aux_hidden_state",
    ),
    "inner flag": (
        {"eagle_config": {"norm_before_fc": True, LAYER_IDS: [1, 3, 4]}},
        "False and True",
    ),
    "ambiguous taps": ({"eagle_config": {LAYER_IDS: [2, 4, 5]}}, r"lists the layers \[2, 4, 5\]"),
    "two taps": ({"eagle_config": {LAYER_IDS: [1, 3]}}, "taps the outputs"),
    "unordered taps": ({"eagle_config": {LAYER_IDS: [1, 4, 3]}}, "taps the outputs"),
    "two conventions": ({LAYER_IDS: [1, 3, 4]}, "disagree"),
    "embeddings as tap": ({LAYER_IDS: [0, 3, 4], "eagle_config": {}}, "taps the outputs"),
    "another family": ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
    "rope": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    "another algorithm": ({"speculators_model_type": "dflash"}, "dflash"),
    "wrong rows": ({"draft_vocab_size": 63}, "lm_head.weight has shape"),
    "no draft vocabulary": ({"draft_vocab_size": None}, "lm_head.weight has shape"),
    "wrong heads": ({"num_key_value_heads": 4}, "k_proj.weight has shape"),
    "wider target": ({"target_hidden_size": 64}, "of another width"),
    "no such vocabulary": ({"vocab_size": 10**20}, "less than 2147"),
    **{
        f"ModelOpt's {key}": ({"eagle_config": {key: value}}, f"{key} is {value!r}")
        for key, value in {
            "parallel_draft_step": 4,
            "use_last_layernorm": False,
            "use_mtp_layernorm": True,
            "eagle_decoder_type": "kimik2",
        }.items()
    },
    **{
        key: ({key: [2, 4, 5], "eagle_config": None}, f"{key} lists the layers")
        for key in OTHER_LAYER_IDS
    },
}


@pytest.mark.parametrize(("changes", "named"), REFUSED.values(), ids=REFUSED)
def test_settings_that_would_be_run_wrong_are_refused_by_name(target, tmp_path, changes, named):
    folder = edit_config(head_folder(target, tmp_path / "head", "sglang"), **changes)
    with pytest.raises(MismatchError, match=named) as error:
        read_head(folder)
    assert error.value.hint


LAYER = "transformer_layer_config"


@pytest.mark.parametrize(
    ("path", "changes", "named"),
    [
        ("", {"norm_before_residual": None}, "vLLM takes that for true"),
        ("", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        (LAYER, {"fc_norm": True}, "fc_norm is given as False and True"),
        (LAYER, {"model_type": None}, "model_type is None"),
        (LAYER, {"model_type": "qwen3"}, "model_type is 'qwen3'"),
        (LAYER, {"mlp_bias": True}, "mlp_bias"),
        (LAYER, {"vocab_size": None}, "vocab_size"),
    ],
)
def test_speculators_settings_that_would_be_run_wrong_are_refused(
    target, tmp_path, path, changes, named
):
    folder = edit_config(head_folder(target, tmp_path / "head", "vllm"), path, **changes)
    with pytest.raises(MismatchError, match=named):
        read_head(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"norm.weight": None}, "norm.weight is missing"),
        ({"input_norm.weight": torch.ones(96)}, "input_norm.* although norm_before_fc is not set"),
        ({"fc_norm.0.weight": torch.ones(32)}, "fc_norm.0.* there although fc_norm is not set"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(8)}, "q_norm.weight is none"),
        ({"layers.1.mlp.weight": torch.ones(32)}, "layers.1.mlp.weight is none"),
        ({"layers.0.hidden_norm.weight": torch.ones(32)}, "two layers"),
        ({"model.norm.weight": torch.ones(32)}, "both with and without 'model.'"),
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


MALFORMED = ("x", [], [1], {"a": 1}, 0, -1, 1.5, True)


@pytest.mark.parametrize(
    "key", ["architectures", "eagle_config", "rope_scaling", "rope_parameters", LAYER]
)
def test_parts_that_are_of_no_such_type_are_said(target, tmp_path, key):
    folder = head_folder(target, tmp_path / "head", "sglang")
    for value in MALFORMED:
        if not isinstance(value, list if key == "architectures" else dict):
            edit_config(folder, **{key: value})
            with pytest.raises(CorruptError, match=key):
                read_head(folder)


def test_an_output_matrix_tied_to_the_embedding(target, tmp_path):
    part = head_folder(target, tmp_path / "part", "sglang")
    whole = head_folder(target, tmp_path / "whole", "sglang", draft_vocab_size=320)
    lm_head = read_head(edit_config(part, tie_word_embeddings=True))[1]["lm_head.weight"]
    assert lm_head.shape == (64, 32)
    with pytest.raises(MismatchError, match="tie_word_embeddings"):
        read_head(edit_config(whole, tie_word_embeddings=True))
    theirs = head_folder(target, tmp_path / "theirs", "vllm")
    lm_head = read_head(edit_config(theirs, LAYER, tie_word_embeddings=True))[1]["lm_head.weight"]
    assert lm_head.shape == (64, 32)


def test_what_is_no_head(target, tmp_path):
    with pytest.raises(MismatchError, match="no EAGLE-3 head"):
        read_head(target)
    with pytest.raises(MissingInputError):
        read_head(tmp_path)
    ours = head_folder(target, tmp_path / "ours")
    for written, error, message in (
        ('{"format": "eyas head 2"}', MismatchError, "eyas head 2"),
        ('{"format": "eyas head 1"}', MismatchError, "lacks 'taps'"),
        ('{"format": "eyas head 1", "future": true}', MismatchError, "unknown key 'future'"),
        ("{", CorruptError, "JSON"),
    ):
        (ours / "eyas_head.json").write_text(written)
        with pytest.raises(error, match=message):
            read_head(ours)
    (head_folder(target, tmp_path / "cut") / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CorruptError):
        read_head(tmp_path / "cut")


def test_verifier_is_written_for_vllm(target):
    config, tensors = tiny_head(target)
    verifier = Verifier("org/model", ("LlamaForCausalLM",), num_draft_steps=3)
    files = write_head(config, tensors, "vllm", verifier)
    speculators = json.loads(files["config.json"])["speculators_config"]
    named = {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]}
    assert speculators["verifier"] == named
    assert speculators["proposal_methods"][0]["speculative_tokens"] == 3
