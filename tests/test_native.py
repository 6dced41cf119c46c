"""The native CPU path against transformers and the plain head, and against itself: a row's bits
depend on the row alone.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from eyas.engine.draft import Draft
from eyas.engine.tree import Tree, tree_of
from eyas.engine.verify import accept
from eyas.errors import MismatchError
from eyas.features.capture import CaptureConfig
from eyas.model import library, native, native_draft, packed
from eyas.model.architecture import MAX_HEAD_DIM, TargetConfig
from eyas.model.arrangement import arranged
from eyas.model.arrays import BFLOAT16, FLOAT32, Array, Arrays
from eyas.model.config import HeadConfig
from eyas.model.draws import DrawState
from eyas.model.native import NativeTarget
from eyas.model.native_draft import NativeDraft
from eyas.model.rows import (
    FeatureCache,
    Growth,
    NodesToVerify,
    PagedCache,
    Proposals,
    Roots,
    Rows,
    prompt_rows,
    slots_of,
)
from eyas.model.target import Target
from eyas.model.threads import threads
from eyas.model.weights import read_arrays
from eyas.operators.shape import target_shape
from eyas.operators.tensors import array_of, arrays_of, tensor_of
from tests.architectures import ARCHITECTURES, save_architecture
from tests.oracle.draft import grown, guessed
from tests.oracle.target import rows_of_trees
from tests.plain_eagle import Example, PlainHead
from tests.quantised_twin import in_eight_bits
from tests.tiny import LLAMA3, read_tensors, tiny_target
from tests.tiny_head import tiny_head

needs_native = pytest.mark.skipif(
    library.unavailable() is not None, reason=str(library.unavailable())
)
ODD: dict[str, Any] = {
    "hidden_size": 42,
    "intermediate_size": 74,
    "vocab_size": 331,
    "num_attention_heads": 6,
    "head_dim": 48,
}
SHAPES = {
    "llama": {},
    "bf16 weights": {"dtype": "bfloat16"},
    "tied": {"tie_word_embeddings": True},
    "MHA, head of 64": {"num_key_value_heads": 4, "head_dim": 64},
    "GQA of 3, odd sizes": ODD,
    "GQA of 8, head of 80": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 80},
    "long products": {"intermediate_size": 1200, "initializer_range": 0.1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    },
    "qwen2": {"family": "qwen2", "head_dim": 16, "hidden_size": 64},
    "qwen3": {"family": "qwen3"},
    "mistral": {"family": "mistral"},
}
HEADS = ["llama", "MHA, head of 64", "GQA of 3, odd sizes", "GQA of 8, head of 80"]
# by the name in tests/architectures.py
ARCHITECTURE_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {})
    for name, one in ARCHITECTURES.items()
    if one.own and one.text is None and name not in SHAPES
} | {
    "experts, odd sizes": ("gpt_oss", {**ODD, "num_local_experts": 19, "num_experts_per_tok": 3}),
    "convolution, odd sizes": ("lfm2", {**ODD, "conv_L_cache": 5, "conv_bias": True}),
    "norms of heads, odd sizes": ("olmo3", ODD),
    "chunks, odd sizes": (
        "llama4",
        {**ODD, "attention_chunk_size": 7, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
}
# each part that architectures differ in
PARTS = ["gemma2", "gpt_oss", "qwen3_moe", "lfm2", "olmo3", "ministral3", "glm4", "llama4"]
ODD_PARTS = [name for name in ARCHITECTURE_SHAPES if "odd" in name]
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16}
TAPS = (1, 3, 4)
T, PAGE_SIZE, PAGES = 21, 4, 32
TOKENS = torch.randint(3, 320, (T,), generator=torch.Generator().manual_seed(1)).tolist()
LONG = TOKENS + torch.randint(3, 320, (99,), generator=torch.Generator().manual_seed(2)).tolist()
STRAIGHT = np.arange(PAGES, dtype=np.int32)[None]
SHUFFLED = np.random.default_rng(0).permutation(PAGES).astype(np.int32)[None]


@functools.cache
def folder_of(shape: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="eyas-test-"))
    if shape in SHAPES:
        return tiny_target(folder, **SHAPES[shape])
    name, overrides = ARCHITECTURE_SHAPES[shape]
    return save_architecture(folder, name, **overrides)


@functools.cache
def target_of(shape: str, dtype: str, count: int = 1) -> NativeTarget:
    folder = folder_of(shape)
    with threads(count):
        config = TargetConfig.from_folder(folder)
        return new_target(config, arranged(config, read_arrays(folder)), dtype)


def new_target(
    config: TargetConfig, arrays: Arrays, dtype: str = "float32", squeezed: bool = True
) -> NativeTarget:
    """A tiny target whose weights are packed as those of a large one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "SQUEEZED_FROM", 0 if squeezed else 1 << 40)
        return NativeTarget(config, arrays, DTYPES[dtype])


def new_cache(shape: str, dtype: str) -> PagedCache:
    config = TargetConfig.from_folder(folder_of(shape))
    return PagedCache(config.num_hidden_layers, PAGES, PAGE_SIZE, config.slot_width, DTYPES[dtype])


def chunk(
    tokens: list[int], start: int, page_table: np.ndarray = STRAIGHT, first_column: int = 0
) -> Rows:
    return prompt_rows([tokens], [start], page_table, PAGE_SIZE, first_column)


def tree_rows(
    tokens: list[int], parents: list[int], prefix: int, page_table: np.ndarray = STRAIGHT
) -> Rows:
    """Nodes of one tree behind a prefix: node i lies in column prefix + i."""
    roots = Roots([prefix], [prefix], [], page_table)
    return rows_of_trees(roots, [Tree(tokens, parents)], PAGE_SIZE)


def run(target: NativeTarget, cache: PagedCache, rows: Rows) -> tuple[Tensor, Tensor]:
    """Copies of aux_hidden and logits of all rows."""
    output = target.forward(rows, cache, TAPS)
    assert output.aux_hidden is not None
    assert np.array_equal(output.best, output.logits.argmax(-1))
    return tensor_of(output.aux_hidden).clone(), tensor_of(output.logits).clone()


@functools.cache
def one_by_one(shape: str, dtype: str) -> tuple[Tensor, Tensor]:
    """aux_hidden and logits of LONG, each token in a forward of its own."""
    target, cache = target_of(shape, dtype), new_cache(shape, dtype)
    outputs = [run(target, cache, chunk([token], place)) for place, token in enumerate(LONG)]
    return torch.cat([aux for aux, _ in outputs]), torch.cat([logits for _, logits in outputs])


# Values


@needs_native
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, "bfloat16") for shape in (*SHAPES, *ARCHITECTURE_SHAPES)),
        *((shape, "float32") for shape in (*SHAPES, *ODD_PARTS)),
    ],
)
def test_target_is_transformers(shape, dtype):
    """Every architecture in float32 too: test_families.py."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    load = functools.partial(AutoModelForCausalLM.from_pretrained, **eager)
    stored, exact = (load(folder_of(shape), dtype=TYPES[dtype]).eval() for _ in range(2))
    tokens_BT = torch.tensor(LONG[: 5 * T]).view(5, T)
    found = [
        run(target_of(shape, dtype), new_cache(shape, dtype), chunk(row, 0))
        for row in tokens_BT.tolist()
    ]
    ours = torch.cat([torch.cat([logits, aux], dim=-1) for aux, logits in found]).double()
    errors = []
    for model in (stored, exact.double()):
        with torch.inference_mode():
            plain = model(tokens_BT, output_hidden_states=True)
        states = [plain.hidden_states[layer + 1] for layer in TAPS]
        errors.append(ours - torch.cat([plain.logits, *states], dim=-1).flatten(0, 1).double())
    # What PyTorch is off by in this precision; its sums are shorter. By row: in bfloat16 some go to
    # another expert than in float64, with either, and what follows them attends to them.
    off, theirs = (error.norm(dim=-1).median() for error in (errors[1], errors[1] - errors[0]))
    assert float(off) < 3 * float(theirs)


@needs_native
def test_weights_of_bfloat16_are_stored_in_12_bits_for_either_precision():
    matrices = [
        tensor
        for name, tensor in read_tensors(folder_of("llama")).items()
        if tensor.dim() == 2 and "embed" not in name
    ]
    wide = target_of("llama", "float32").num_bytes
    assert wide == 4 * sum(matrix.numel() for matrix in matrices)
    narrow = target_of("llama", "bfloat16").num_bytes
    assert narrow == target_of("bf16 weights", "float32").num_bytes < 0.39 * wide


@needs_native
def test_positions_beyond_the_first_table(monkeypatch):
    folder = folder_of("llama")
    monkeypatch.setattr(native, "FIRST_POSITIONS", 2)
    grown = new_target(TargetConfig.from_folder(folder), read_arrays(folder))
    assert torch.equal(
        run(grown, new_cache("llama", "float32"), chunk(TOKENS, 0))[1],
        one_by_one("llama", "float32")[1][:T],
    )


# Bits


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*HEADS, "bf16 weights", "long products", *PARTS, *ODD_PARTS])
@pytest.mark.parametrize(
    ("sizes", "page_table", "threads"),
    [([21], STRAIGHT, 2), ([2, 3, 7, 9], SHUFFLED, 1), ([3, 101, 16], SHUFFLED, 2)],
)
def test_chunks_give_the_bits_of_single_tokens(shape, dtype, sizes, page_table, threads):
    """The long ones have more rows than a tile and more columns than a step."""
    target, cache = target_of(shape, dtype, threads), new_cache(shape, dtype)
    done, outputs = 0, []
    for size in sizes:
        outputs.append(run(target, cache, chunk(LONG[done : done + size], done, page_table)))
        done += size
    aux_hidden, logits = one_by_one(shape, dtype)
    assert torch.equal(torch.cat([aux for aux, _ in outputs]), aux_hidden[:done])
    assert torch.equal(torch.cat([logits for _, logits in outputs]), logits[:done])


@needs_native
@settings(max_examples=15)
@given(data=st.data())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*HEADS, *PARTS, *ODD_PARTS])
def test_a_path_in_any_tree_gives_the_bits_of_plain_decoding(shape, dtype, data):
    prefix = data.draw(st.integers(1, 60), label="prefix")
    depth = data.draw(st.integers(1, 12), label="depth")
    tokens, parents, on_path = [LONG[prefix]], [-1], [0]
    for _ in range(data.draw(st.integers(0, 40), label="nodes")):
        parent = data.draw(st.integers(0, len(tokens) - 1), label="parent")
        tokens.append(data.draw(st.integers(3, 319), label="token"))
        parents.append(parent)
        if len(on_path) < depth and data.draw(st.booleans(), label="grows"):
            tokens.append(LONG[prefix + len(on_path)])
            parents.append(on_path[-1])
            on_path.append(len(tokens) - 1)
    tokens, parents = tokens[:64], parents[:64]
    on_path = [node for node in on_path if node < 64]
    target = target_of(shape, dtype, data.draw(st.integers(1, 2), label="threads"))
    cache, end = new_cache(shape, dtype), prefix + len(on_path)
    run(target, cache, chunk(LONG[:prefix], 0, SHUFFLED))
    found = run(target, cache, tree_rows(tokens, parents, prefix, SHUFFLED))
    for ours, plain in zip(found, one_by_one(shape, dtype), strict=True):
        assert torch.equal(ours[on_path], plain[prefix:end])


@needs_native
def test_all_64_bits_of_a_tree():
    target, cache = target_of("llama", "bfloat16"), new_cache("llama", "bfloat16")
    tokens = [token % 320 for token in range(65)]
    plain = run(target, cache, chunk(tokens, 0))[1]
    run(target, cache, chunk(tokens[:1], 0, SHUFFLED))
    chain = run(target, cache, tree_rows(tokens[1:], list(range(-1, 63)), 1, SHUFFLED))[1]
    assert torch.equal(chain, plain[1:])


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["llama", *PARTS])
def test_batch_of_requests_gives_the_bits_of_each_alone(shape, dtype):
    target, cache = target_of(shape, dtype), new_cache(shape, dtype)
    page_table = SHUFFLED.reshape(4, -1)
    starts = [0, 3, 5, 2]
    begun = [TOKENS[:start] or [1] for start in starts]
    run(target, cache, prompt_rows(begun, [0] * 4, page_table, PAGE_SIZE))
    parts = [TOKENS[start : start + 1 + b] for b, start in enumerate(starts)]
    logits = run(target, cache, prompt_rows(parts, starts, page_table, PAGE_SIZE))[1]
    plain = one_by_one(shape, dtype)[1]
    expected = torch.cat([plain[start : start + 1 + b] for b, start in enumerate(starts)])
    assert torch.equal(logits, expected)


@needs_native
def test_rows_whose_logits_are_asked_for():
    target, cache = target_of("llama", "float32"), new_cache("llama", "float32")
    plain_aux, plain_logits = one_by_one("llama", "float32")
    for wanted in ([], [20], [3, 3, 0], list(range(12))):
        logits_of = np.array(wanted, dtype=np.int64)
        output = target.forward(chunk(TOKENS, 0), cache, TAPS, logits_of)
        assert output.logits.shape == (len(wanted), 320)
        assert np.array_equal(output.logits, plain_logits[wanted])
        assert np.array_equal(output.best, plain_logits[wanted].argmax(-1))
        assert output.aux_hidden is not None
        assert np.array_equal(output.aux_hidden, plain_aux[:T])
    assert target.forward(chunk(TOKENS, 0), cache).aux_hidden is None


@needs_native
def test_of_equal_logits_the_smallest_id_is_best():
    folder = folder_of("llama")
    tensors = read_tensors(folder)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:80].repeat(4, 1)
    target = NativeTarget(TargetConfig.from_folder(folder), arrays_of(tensors), FLOAT32)
    output = target.forward(chunk(TOKENS, 0), new_cache("llama", "float32"))
    first = [int((row == row.max()).nonzero()[0][0]) for row in output.logits]
    assert output.best.tolist() == first
    assert max(first) < 80


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rare", [0.0, 0.002, 0.2])  # share of weights of unusual size
@pytest.mark.parametrize("shape", ["GQA of 3, odd sizes", "long products"])
def test_squeezed_weights_give_the_bits_of_plain_ones(shape, rare, dtype):
    config, tensors = TargetConfig.from_folder(folder_of(shape)), read_tensors(folder_of(shape))
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        size = torch.randint(-60, 3, tensor.shape, generator=generator).float().exp2()
        is_rare = torch.rand(tensor.shape, generator=generator) < rare * (tensor.dim() > 1)
        tensors[name] = torch.where(is_rare, tensor * size, tensor).bfloat16()
    squeezed, plain = (new_target(config, arrays_of(tensors), dtype, way) for way in (True, False))
    assert rare or squeezed.num_bytes < 0.8 * plain.num_bytes
    for size in (1, 2, 5, 8, 21):
        logits = [
            run(target, new_cache(shape, dtype), chunk(TOKENS[:size], 0))[1]
            for target in (squeezed, plain)
        ]
        assert torch.equal(*logits)


# Guards


@needs_native
def test_what_is_not_there_is_refused():
    target, cache = target_of("llama", "float32"), new_cache("llama", "float32")
    early, beyond = chunk([1], 0), chunk([1], 0)
    early.position[0] = -1
    beyond.prefix_len[0] = PAGES * PAGE_SIZE + 1
    for rows, logits_of, message in (
        (chunk([320], 0), None, "vocabulary"),
        (chunk([1], 0, STRAIGHT + PAGES), None, "slot"),
        (chunk([1], 0), np.array([1]), "logits_of"),
        (early, None, "position"),
        (beyond, None, "prefix"),
    ):
        with pytest.raises(IndexError, match=message):
            target.forward(rows, cache, None, logits_of)


@needs_native
def test_heads_wider_than_the_sums_of_attention_are_refused(tmp_path):
    """They were written behind the end of these sums. Capture takes transformers for them."""
    Target.load(tiny_target(tmp_path / "fits", head_dim=MAX_HEAD_DIM))
    wide = tiny_target(tmp_path / "wide", head_dim=MAX_HEAD_DIM + 2)
    with pytest.raises(MismatchError, match="heads of 258"):
        Target.load(wide)
    assert CaptureConfig(target=str(wide)).decoder_of(target_shape(wide)) == "transformers"
    config, tensors = tiny_head(folder_of("llama"), head_dim=258)
    with pytest.raises(MismatchError, match="head_dim 258"):
        Draft(config, arrays_of(tensors), Target.load(folder_of("llama")))


@needs_native
def test_two_decoders_on_two_python_threads():
    folder = folder_of("llama")
    with threads(2):
        other = new_target(TargetConfig.from_folder(folder), read_arrays(folder), squeezed=False)
    targets = [other, target_of("llama", "float32", 2)]
    expected = one_by_one("llama", "float32")[1][:T]

    def decode(target: NativeTarget) -> bool:
        cache = new_cache("llama", "float32")
        return all(
            torch.equal(run(target, cache, chunk(TOKENS, 0))[1], expected) for _ in range(20)
        )

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(decode, targets)) == [True, True]


@needs_native
def test_a_forked_child_has_threads_of_its_own():
    target = target_of("llama", "float32", 2)
    expected = run(target, new_cache("llama", "float32"), chunk(TOKENS, 0))[1]
    child = os.fork()
    if child == 0:
        logits = run(target, new_cache("llama", "float32"), chunk(TOKENS, 0))[1]
        os._exit(0 if torch.equal(logits, expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


# The draft

NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FLAGS = [(), *((norm,) for norm in NORMS), NORMS, ("sliding_window",)]
EIGHT_BITS = "eight bits"  # as the engine reads a head in bfloat16
DRAFT_DTYPES = {**DTYPES, EIGHT_BITS: BFLOAT16}
DRAFT_TYPES = {**TYPES, EIGHT_BITS: torch.bfloat16}
WINDOW = 7  # shorter than configs allow, longer than the trees below are deep


@functools.cache
def head_of(flags: tuple[str, ...] = ()) -> tuple[HeadConfig, dict[str, Tensor]]:
    values = {flag: WINDOW if flag == "sliding_window" else True for flag in flags}
    return tiny_head(folder_of("llama"), **values)


def new_draft(
    config: HeadConfig, tensors: dict[str, Tensor], embed: Array, lm_head: Array, dtype: str
) -> NativeDraft:
    arrays = arrays_of(tensors)
    blocks = in_eight_bits(arrays) if dtype == EIGHT_BITS else None
    return NativeDraft(config, arrays, embed, lm_head, DRAFT_DTYPES[dtype], blocks)


def draft_of(flags: tuple[str, ...], dtype: str, count: int = 1, **others: Tensor) -> NativeDraft:
    config, tensors = head_of(flags)
    target = read_arrays(folder_of("llama"))
    lent = target["model.embed_tokens.weight"], target["lm_head.weight"]
    with threads(count):
        return new_draft(config, {**tensors, **others}, *lent, dtype)


def make_entries(draft: NativeDraft, rows: Rows, aux: Array, cache: PagedCache) -> None:
    draft._run(draft._lib.eyas_extend, rows, aux, cache, has_outputs=False)


def draft_cache(dtype: str) -> PagedCache:
    config, _ = head_of()
    return PagedCache(1, PAGES, PAGE_SIZE, config.slot_width, DRAFT_DTYPES[dtype])


def features(dtype: str) -> Array:
    aux_hidden = torch.randn(T, 3 * 32, generator=torch.Generator().manual_seed(2))
    return array_of(aux_hidden.to(DRAFT_TYPES[dtype]))


@needs_native
@pytest.mark.parametrize("dtype", DRAFT_DTYPES)
@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_extend_step_and_proposals_are_the_plain_heads(flags, dtype):
    config, tensors = head_of(flags)
    embed = read_tensors(folder_of("llama"))["model.embed_tokens.weight"]
    rounded = {
        name: tensor.to(DRAFT_TYPES[dtype]).double()
        for name, tensor in (tensors | {"embed": embed}).items()
        if tensor.is_floating_point()
    }
    embed = rounded.pop("embed")
    draft, cache, aux = draft_of(flags, dtype), draft_cache(dtype), features(dtype)
    if dtype == EIGHT_BITS:
        blocks = in_eight_bits(arrays_of(tensors)).items()
        rounded |= {name: torch.from_numpy(one.dequantised()).double() for name, one in blocks}
    exact = tensor_of(aux).double()
    plain, example = PlainHead(rounded, config), Example(TOKENS, [], exact, exact)
    expected = plain.unroll(example, embed, 11, 3, lambda step, _: TOKENS[12 + step])
    h = draft.extend(chunk(TOKENS[1:13], 1, first_column=1), aux[:12], cache)
    states = [h[-1:]]
    for column in (13, 14):
        rows = chunk([TOKENS[column]], column, first_column=1)
        states.append(draft.step(rows, states[-1], cache))
    share, close = {
        "float32": (2e-5, 1e-4),
        "bfloat16": (0.1, 0.3),
        EIGHT_BITS: (0.2, 0.5),  # the products' rows are in 8 bits too
    }[dtype]
    for ours, theirs in zip(states, expected, strict=True):
        assert float((tensor_of(ours)[0] - theirs).norm() / theirs.norm()) < share
    ids, log_probs = draft.proposals(np.concatenate(states), 5)
    for r, theirs in enumerate(expected):
        best, order = plain.logits(theirs).log_softmax(-1).topk(5)
        np.testing.assert_allclose(log_probs[r], best, rtol=0, atol=close)
        if dtype == "float32":
            assert ids[r].tolist() == (order + tensors["d2t"][order]).tolist()


@needs_native
@pytest.mark.parametrize("draw", [None, DrawState(temperature=0.6, seed=4)], ids=["best", "drawn"])
def test_an_lm_head_read_in_two_bits_proposes_what_the_whole_one_does(monkeypatch, draw):
    H, W, R, k = 320, 4096 + 16, 7, 4
    config, small = head_of()
    config = config.model_copy(
        update={"hidden_size": H, "target_hidden_size": H, "draft_vocab_size": W, "vocab_size": W}
    )
    rng = np.random.default_rng(0)

    def random(*size: int) -> np.ndarray:
        return (rng.standard_normal(size, np.float32) / 20).astype(DRAFT_DTYPES[EIGHT_BITS])

    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    inner = config.intermediate_size
    sizes = {"fc": (H, 3 * H), "lm_head": (W, H), "midlayer.self_attn.o_proj": (H, q)}
    rows = {"q": q, "k": kv, "v": kv}
    sizes |= {f"midlayer.self_attn.{n}_proj": (count, 2 * H) for n, count in rows.items()}
    sizes |= {f"midlayer.mlp.{n}_proj": (inner, H) for n in ("gate", "up")}
    sizes |= {"midlayer.mlp.down_proj": (H, inner)}
    tensors = {f"{name}.weight": random(*size) for name, size in sizes.items()}
    norms = (name for name, one in small.items() if one.ndim == 1 and "norm" in name)
    tensors |= {name: np.ones(H, dtype=np.float32) for name in norms}
    lm_head, embed = tensors["lm_head.weight"], random(W, H)
    # states that some tokens fit: the last tokens of the vocabulary, and any
    fits = np.concatenate([np.arange(W - 3, W), rng.integers(W, size=R * 5 - 3)])
    factors = np.array([1.0, 0.9, 0.8, 0.7, 0.6], dtype=np.float32)
    h = (lm_head[fits].astype(np.float32).reshape(R, 5, H) * factors[:, None]).sum(1)
    blocks = in_eight_bits(tensors)

    def proposals(count: int) -> tuple[np.ndarray, np.ndarray]:
        with threads(count):
            dtype = DRAFT_DTYPES[EIGHT_BITS]
            draft = NativeDraft(config, tensors, embed, lm_head, dtype, blocks)
        return draft.proposals(h, k, [draw] * R if draw else None)

    whole_ids, whole = proposals(1)
    monkeypatch.setattr(native_draft, "LARGE_FROM", 0)
    ids, log_probs = proposals(1)
    is_same = ids == whole_ids
    assert is_same.all() if draw is None else is_same.mean() > 0.8
    assert np.allclose(log_probs[is_same], whole[is_same], atol=0.3)
    for count in (2, 3):
        again = proposals(count)
        assert np.array_equal(again[0], ids)
        assert np.array_equal(again[1], log_probs)


@needs_native
@pytest.mark.parametrize("dtype", DRAFT_DTYPES)
@pytest.mark.parametrize(
    "flags", [("norm_before_residual", "fc_norm"), ("sliding_window",)], ids=" ".join
)
def test_a_drafts_rows_depend_on_nothing_beside_them(dtype, flags):
    draft, aux = draft_of(flags, dtype), features(dtype)
    together = draft.extend(chunk(TOKENS[1:], 1, first_column=1), aux[:-1], draft_cache(dtype))
    draft = draft_of(flags, dtype, 2)
    cache = draft_cache(dtype)
    alone = [
        draft.extend(chunk([token], c, SHUFFLED, first_column=1), aux[c - 1 : c], cache)
        for c, token in enumerate(TOKENS[1:], 1)
    ]
    assert np.array_equal(np.concatenate(alone), together)
    whole = draft.proposals(together, 4)
    for r in range(len(together)):
        for one, all_of_them in zip(draft.proposals(together[r : r + 1], 4), whole, strict=True):
            assert np.array_equal(one[0], all_of_them[r])


@needs_native
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.4}, {"min_p": 0.2}, {"seed": -9}], ids=str
)
def test_guesses_of_draws_are_the_plain_ones(options):
    """A request that draws between two that do not; the plain form is PyTorch's, of log-probs."""
    draft, place, k = draft_of((), "float32", 2), 2, 5
    draw = DrawState(**{"temperature": 1.0, "seed": 3, "num_drawn": 8} | options)
    h = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    ids, log_probs = draft.proposals(array_of(h), k, [None, draw, None], place)
    config, tensors = head_of()
    plain = PlainHead(tensors, config)
    target_ids_W = torch.arange(config.draft_vocab_size) + tensors["d2t"]
    for row in range(3):
        expected_W = plain.logits(h[row]).log_softmax(-1)
        if row == 1:
            expected_W = guessed(expected_W, target_ids_W, draw, place)
        best, order = expected_W.topk(k)
        assert ids[row].tolist() == target_ids_W[order].tolist()
        np.testing.assert_allclose(log_probs[row], best, rtol=0, atol=1e-4)


@needs_native
def test_of_equal_proposals_the_smaller_draft_id_goes_first():
    lm_head = head_of()[1]["lm_head.weight"].clone()
    lm_head[32:] = lm_head[:32]
    others = {"lm_head.weight": lm_head, "d2t": torch.zeros(64, dtype=torch.int64)}
    h = np.random.default_rng(0).standard_normal((7, 32), np.float32)
    ids, log_probs = draft_of((), "float32", **others).proposals(h, 6)
    assert np.array_equal(ids[:, 1::2], ids[:, ::2] + 32)
    assert np.array_equal(log_probs[:, 1::2], log_probs[:, ::2])


@needs_native
def test_a_head_with_embeddings_and_without_lm_head():
    config, tensors = head_of()
    config = config.model_copy(update={"draft_vocab_size": 320})
    tensors = {**tensors}
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    target = read_tensors(folder_of("llama"))
    embed, lm_head = target["model.embed_tokens.weight"], target["lm_head.weight"]
    with_both = {**tensors, "embed_tokens.weight": embed, "lm_head.weight": lm_head}
    lent = array_of(embed), array_of(lm_head)
    own = new_draft(config, with_both, lent[0] * 0, lent[1] * 0, "float32")
    shared = new_draft(config, tensors, *lent, "float32")
    rows, aux = chunk(TOKENS[1:9], 1, first_column=1), features("float32")[:8]
    h = own.extend(rows, aux, draft_cache("float32"))
    assert np.array_equal(h, shared.extend(rows, aux, draft_cache("float32")))
    ids, log_probs = own.proposals(h, 3)
    assert np.array_equal(ids, shared.proposals(h, 3)[0])
    plain = PlainHead({**tensors, "lm_head.weight": lm_head}, config)
    logits = torch.stack([plain.logits(row) for row in tensor_of(h)])
    best, expected = logits.log_softmax(-1).topk(3)
    assert ids.tolist() == expected.tolist()
    np.testing.assert_allclose(log_probs, best, rtol=0, atol=1e-5)


def assert_same(ours: Proposals, plain: Proposals) -> None:
    for name in ("tokens", "scores", "parents", "depths"):
        assert np.array_equal(getattr(ours, name), getattr(plain, name)), name


@needs_native
@pytest.mark.parametrize("dtype", DRAFT_DTYPES)
@pytest.mark.parametrize(
    ("growth", "flags", "drawn"),
    [
        ((4, 3, 3), (), True),
        ((4, 3, 3), ("norm_output",), False),
        ((4, 3, 3), ("sliding_window",), False),
        ((6, 1, 1), ("sliding_window",), True),
        ((3, 6, 6), ("norm_output",), True),
        ((1, 4, 4), (), True),
        ((5, 2, 2), (), False),
        ((6, 3, 1), ("sliding_window",), False),
        ((6, 3, 1), (), True),
        ((4, 5, 2), ("norm_output",), True),
        ((4, 5, 2), ("sliding_window",), False),
    ],
)
def test_propose_is_the_plain_growth_to_the_bit(dtype, growth, flags, drawn):
    least = 0.4 if growth == (5, 2, 2) else 0.0
    draft, cache, aux = draft_of(flags, dtype, 2), draft_cache(dtype), features(dtype)
    page_table, lens = SHUFFLED.reshape(2, -1), [7, 12]
    rows = [chunk(TOKENS[1 : n + 1], 1, page_table[b : b + 1], 1) for b, n in enumerate(lens)]
    h = [draft.extend(one, aux[:n], cache)[-1:] for one, n in zip(rows, lens, strict=True)]
    h = np.concatenate(h)
    draws = [None, DrawState(temperature=0.8, seed=4, num_drawn=6) if drawn else None]
    first = draft.proposals(h, growth[1], draws)
    thresholds = [least] * (growth[0] - 1) + [least / 8]
    roots = Roots(lens, lens, [], page_table)
    given = roots, h, first, cache, Growth(*growth), thresholds, draws
    ours = draft.propose(*given)
    assert_same(ours, grown(draft, *given))
    if least > 0:
        assert len(ours.depths) < 2 + 4 * 4  # so high a threshold ends the growth early


@needs_native
@pytest.mark.parametrize("dtype", DRAFT_DTYPES)
def test_what_is_behind_a_window_is_not_read(dtype):
    """Its keys and values may be anything, and of its pages there need be none."""
    draft, aux, n = draft_of(("sliding_window",), dtype), features(dtype), 4 * PAGE_SIZE - 1
    results = []
    for is_there in (True, False):
        cache, pages = draft_cache(dtype), STRAIGHT.copy()
        rows = chunk(TOKENS[1 : n + 1], 1, pages, 1)
        h = draft.extend(rows, aux[:n], cache)[-1:]
        if not is_there:  # the root stands in column n and sees columns n - WINDOW + 1 .. n
            cache.data[:, : n - WINDOW + 1] = math.nan
            pages[:, : (n - WINDOW + 1) // PAGE_SIZE] = -1
        first, thresholds = draft.proposals(h, 2), [0.0] * 5
        found = draft.propose(Roots([n], [n], [], pages), h, first, cache, (5, 2, 2), thresholds)
        step = chunk([TOKENS[n]], n, pages, 1)
        results.append((found, draft.extend(step, aux[n - 1 : n], cache)))
    (found, own), (expected, whole) = results
    assert np.array_equal(own, whole)
    assert np.array_equal(found.tokens, expected.tokens)
    assert np.array_equal(found.scores, expected.scores)
    assert np.isfinite(expected.scores).all()


@needs_native
def test_proposing_where_no_page_is():
    draft, cache = draft_of((), "float32"), draft_cache("float32")
    h = np.ones((1, 32), np.float32)
    first = draft.proposals(h, 2)
    lens = [PAGES * PAGE_SIZE - 1]
    roots = Roots(lens, lens, [], STRAIGHT)
    with pytest.raises(IndexError, match="page"):
        draft.propose(roots, h, first, cache, (3, 2, 2), [0.0] * 3)


# A round in two calls


@needs_native
@pytest.mark.parametrize("dtype", DRAFT_DTYPES)
@pytest.mark.parametrize("growth", [(4, 3, 3), (5, 1, 1), (5, 3, 1)])
def test_growing_from_features_is_extending_and_proposing(dtype, growth):
    draft, aux, page_table = draft_of((), dtype), features(dtype), SHUFFLED.reshape(2, -1)
    kept = FeatureCache(PAGES * PAGE_SIZE, 3 * 32, DRAFT_DTYPES[dtype])
    caches = [draft_cache(dtype) for _ in range(2)]
    lens, starts = [7, 12], [5, 12]
    for b, n in enumerate(lens):
        slots = slots_of(page_table, np.full(n, b), np.arange(n), PAGE_SIZE)
        kept.write(slots, aux[:n])
    h, tokens = [], []
    for b, (start, n) in enumerate(zip(starts, lens, strict=True)):
        pages = page_table[b : b + 1]
        for cache in caches:
            make_entries(draft, chunk(TOKENS[1:start], 1, pages, 1), aux[: start - 1], cache)
        rows = chunk(TOKENS[start : n + 1], start, pages, 1)
        h.append(draft.extend(rows, aux[start - 1 : n], caches[0])[-1:])
        tokens += TOKENS[start : n + 1]
    draws = [DrawState(temperature=0.7, seed=-5, num_drawn=3), None]
    h = np.concatenate(h)
    first, thresholds = draft.proposals(h, growth[1], draws), [0.0] * growth[0]
    rest, roots = (growth, thresholds, draws), Roots(lens, lens, [], page_table)
    expected = draft.propose(roots, h, first, caches[0], *rest)
    ours = draft.grow(Roots(lens, starts, tokens, page_table), caches[1], kept, *rest)
    assert_same(ours, expected)
    assert np.array_equal(caches[0].data, caches[1].data)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["llama", "MHA, head of 64", *PARTS])
def test_verifying_in_one_call_is_forward_walk_and_move(shape, dtype):
    """Three requests: one with a tree whose second branch the target takes, one with none, one with
    a tree that it does not.
    """
    target, rng = target_of(shape, dtype), np.random.default_rng(0)
    width = 3 * TargetConfig.from_folder(folder_of(shape)).hidden_size
    page_table = SHUFFLED[:, :30].reshape(3, 10)
    lens, roots = [7, 5, 9], [11, 12, 13]
    caches = [new_cache(shape, dtype) for _ in range(2)]
    kept_features = [FeatureCache(PAGES * PAGE_SIZE, width, DTYPES[dtype]) for _ in range(2)]
    for cache, kept in zip(caches, kept_features, strict=True):
        rows = prompt_rows([TOKENS[:n] for n in lens], [0] * 3, page_table, PAGE_SIZE)
        target.forward(rows, cache, TAPS, None, kept)
    follow = roots[:1]
    for _ in range(3):  # what the target itself says, one token after the other
        rows = chunk(follow, lens[0], page_table[:1])
        follow = [*follow, int(target.forward(rows, copy.deepcopy(caches[0])).best[-1])]
    parents = np.array([[-1, -1, 0, 1, 3], [-1, -1, 0, 1, 3]], dtype=np.int32)
    others = rng.integers(3, 300, 5)
    tokens = np.array([[others[0], follow[1], others[1], follow[2], others[2]], others])
    depths = np.array([1, 1, 2, 2, 3], dtype=np.int32)
    proposals = Proposals(tokens, np.zeros((2, 5), dtype=np.float32), parents, depths)
    kept = np.array([[True, True, False, True, True], [False, True, False, False, False]])
    chosen = NodesToVerify([0, -1, 1], proposals, kept)
    where = Roots(lens, lens, roots, page_table)
    ours = target.verify(where, chosen, caches[0], TAPS, kept_features[0]).tokens

    trees = [
        tree_of(roots[b], proposals, line, kept[line].nonzero()[0].tolist()) if line >= 0 else None
        for b, line in enumerate(chosen.line)
    ]
    for b, tree in enumerate(trees):
        nodes, above = (tree.tokens, tree.parents) if tree else ([roots[b]], [-1])
        rows = tree_rows(nodes, above, lens[b], page_table[b : b + 1])
        output = target.forward(rows, caches[1], TAPS, None, kept_features[1])
        path, emitted = accept(nodes, above, output.best.tolist().__getitem__)
        assert ours[b] == emitted
        slots = rows.slot.tolist()
        for place, node in enumerate(path, start=1):
            caches[1].move([slots[node]], [slots[place]])
            kept_features[1].move([slots[node]], [slots[place]])
        columns = np.arange(lens[b] + len(emitted))
        filled = slots_of(page_table, np.full_like(columns, b), columns, PAGE_SIZE)
        assert np.array_equal(caches[0].data[:, filled], caches[1].data[:, filled])
        assert np.array_equal(kept_features[0].data[filled], kept_features[1].data[filled])
    assert ours[0] == follow[1:]
    assert len(ours[1]) == 1


@needs_native
def test_a_tree_that_does_not_hang_together_is_refused():
    target, cache = target_of("llama", "float32"), new_cache("llama", "float32")
    parents, depths = np.array([[-1, 0]], dtype=np.int32), np.array([1, 2], dtype=np.int32)
    proposals = Proposals(np.array([[5, 6]]), np.zeros((1, 2), np.float32), parents, depths)
    orphan = NodesToVerify([0], proposals, np.array([[False, True]]))
    with pytest.raises(IndexError):
        target.verify(Roots([0], [0], [1], STRAIGHT), orphan, cache)
