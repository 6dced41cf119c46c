"""Quantised weights multiplied as they lie in a GGUF file: the native products against their plain
twin to the bit, rows that depend on nothing beside them, and the engine on top.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.errors import CorruptError, MismatchError, MissingInputError
from eyas.gguf.blocks import HALVES, KINDS, PLAIN, BlockMatrix, Kind, refuse_other_kinds
from eyas.gguf.folder import LINK
from eyas.hub import resolve_target
from eyas.model import library
from eyas.model.architecture import TargetConfig
from eyas.model.arrangement import arranged
from eyas.model.arrays import BFLOAT16, FLOAT32, Array
from eyas.model.native import NativeTarget
from eyas.model.packed import PackedLinear, Packing, joined_linear, parts_of
from eyas.model.rows import PagedCache, prompt_rows
from eyas.model.structs import STRUCTS
from eyas.model.target import Target
from eyas.model.threads import threads
from eyas.model.weights import read_arrays
from eyas.operators.decoder import OwnDecoder
from eyas.operators.tensors import array_of
from tests.architectures import ARCHITECTURES, save_architecture
from tests.gguf_files import gguf_file
from tests.oracle.rows import TensorCache, TensorRows
from tests.quantised_twin import QuantisedLinear, fma, in_eight_bits, taken_apart, twin_layers
from tests.test_cli import assert_one_clear_error, run_eyas
from tests.test_native import (
    DTYPES,
    LONG,
    PAGE_SIZE,
    PAGES,
    PARTS,
    TAPS,
    TOKENS,
    chunk,
    needs_native,
    run,
    tree_rows,
)
from tests.tiny import read_tensors, tiny_target

# of what size the scales of half precision are in usual weights
SIZES_OF = {Kind.IQ4_NL: 1e-3, Kind.IQ4_XS: 1e-4, Kind.Q2_K: 5e-3, Kind.Q3_K: 1e-3} | {
    Kind.Q4_K: 5e-4,
    Kind.Q5_K: 2.5e-4,
    Kind.Q6_K: 1e-4,
}
SIZES = (48, 16, 32, 16, 64, 16, 32, 48, 16, 16, 32, 16, 37)  # rows of parts
ROWS = (1, 2, 3, 4, 8, 11, 12, 13, 24, 40)
SHAPES = {
    "llama": {},
    "tied, biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "odd parts": {"intermediate_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
    | {"head_dim": 32, "hidden_size": 96, "vocab_size": 331},
    "super-blocks": {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64},
}


EXPERTS = {"moe_intermediate_size": 64, "intermediate_size": 64}  # of whole blocks
ARCHITECTURE_SHAPES: dict[str, dict[str, int]] = {
    name: EXPERTS if "expert" in str(one.settings) else {}
    for name, one in ARCHITECTURES.items()
    if one.own and one.text is None and name not in SHAPES
}


def matrix(kind: Kind, N: int, K: int, seed: int = 0) -> BlockMatrix:
    """Random weights, among them a row of zeros, large ones and a block that is all alike; of the
    formats that the package of the format does not write, random bits with scales of some size.
    """
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((N, K)).astype(np.float32)
    values[0] = 0
    values[1] *= 1000
    values[2, :32] = -0.25
    if kind not in SIZES_OF:
        return BlockMatrix(kind, gguf.quantize(values, kind))
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    units = rng.integers(0, 256, (N, K // block, num_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = (rng.standard_normal((N, K // block, 1)) * SIZES_OF[kind]).astype(np.float16)
        units[..., at : at + 2] = scales.view(np.uint8)
    return BlockMatrix(kind, units.reshape(N, -1))


def inputs(M: int, K: int) -> Tensor:
    """Rows of different sizes; one of zeros, one with a single number far from the others."""
    x = (
        torch.randn(M, K, generator=torch.Generator().manual_seed(M))
        * torch.logspace(-3, 3, M)[:, None]
    )
    x[M // 2] = 0
    x[-1, K // 2] = 50
    return x


def product(linear: PackedLinear, x: Tensor, N: int, threads: int = 1) -> Tensor:
    """x [M, K] -> [M, N] by the library."""
    y = torch.empty(len(x), -(-N // 16) * 16)
    x = x.contiguous()
    call = STRUCTS["ProductCall"](x.data_ptr(), y.data_ptr(), len(x), threads)
    assert library.library().eyas_multiply(linear.handle, call) == 0
    return y[:, :N]


# Products


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_matrix_taken_apart_is_the_dequantised_one(kind):
    one = matrix(kind, 9, 512)
    codes, scales, mins = taken_apart(one)
    width = 32 // scales.shape[-1]
    mins = np.broadcast_to(mins, scales.shape)
    values = np.repeat(scales, width, axis=-1) * codes + np.repeat(mins, width, axis=-1)
    assert one.shape == (9, 512)
    np.testing.assert_array_equal(values.reshape(9, 512), one.dequantised())


@needs_native
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_products_are_the_twins_to_the_bit(kind):
    """Of a row's numbers alone: what stands beside it changes nothing."""
    for N, K in ((16, 256), (70, 512), (5, 256)):
        one, bias, x = matrix(kind, N, K), torch.randn(N), inputs(ROWS[-1], K)
        plain = QuantisedLinear([one]).float(x)
        for expected, biases in ((plain, []), (plain + bias, [array_of(bias)])):
            packed = {count: PackedLinear.of_blocks([one], biases, count) for count in (1, 2)}
            for M in ROWS:
                for rows in (slice(M), slice(ROWS[-1] - M, None)):
                    for count, linear in packed.items():
                        assert torch.equal(product(linear, x[rows], N, count), expected[rows])


@needs_native
@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.name)
def test_numbers_without_scales_are_multiplied_as_they_are(kind):
    """Rows of bfloat16 with weights that are not rounded to it: every output is one sum over the
    inputs in ascending order, rounded once for each.
    """
    values = np.random.default_rng(0).standard_normal((37, 45)).astype(np.float32)
    one = BlockMatrix(kind, np.ascontiguousarray(gguf.quantize(values, kind)).view(np.uint8))
    how = Packing(BFLOAT16, 2, False, {"lm_head.weight": one})
    packed, weights = joined_linear({}, ["lm_head"], how), torch.from_numpy(one.dequantised())
    for M in (1, 3, 7, 13):
        x = inputs(M, 45).bfloat16().float()
        expected = torch.zeros(M, 37)
        for k in range(45):
            expected = fma(x[:, k, None], weights[:, k], expected)
        found = product(packed, x, 37)
        if kind == Kind.BF16:  # by pairs
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(x.abs().max()))
        else:
            assert torch.equal(found, expected)


@needs_native
def test_parts_of_several_formats_are_one_product():
    parts = [matrix(kind, N, 256, N) for kind, N in zip(KINDS, SIZES, strict=True)]
    x, N = inputs(7, 256), sum(part.shape[0] for part in parts)
    expected = QuantisedLinear(parts).float(x)
    for count in (1, 2, 3):
        packed = PackedLinear.of_blocks(parts, [], count)
        assert torch.equal(product(packed, x, N, count), expected)


def test_formats_that_do_not_fit_together_are_no_product():
    q4, q8, odd = (
        matrix(kind, N, 64) for kind, N in ((Kind.Q4_1, 32), (Kind.Q8_0, 16), (Kind.Q4_1, 9))
    )
    blocks = {"a": q4, "b": q8, "odd": odd}
    assert parts_of(blocks, ["a", "b"]) == [q4, q8]
    assert parts_of(blocks, ["a", "odd"]) == [q4, odd]
    assert parts_of(blocks, ["a", "b"], gated=True) is None
    assert parts_of(blocks, ["odd", "b"]) is None
    assert parts_of(blocks, ["a", "elsewhere"]) is None


# Targets


@functools.cache
def quantised(
    folder: Path, kinds: tuple[Kind, ...] = ()
) -> tuple[TargetConfig, dict[str, Array], dict[str, BlockMatrix]]:
    """A tiny target with quantised matrices, in turn by two formats or these, and the values they
    have.
    """
    config, blocks = TargetConfig.from_folder(folder), {}
    tensors = arranged(config, read_arrays(folder))
    is_wide = config.hidden_size % 256 == 0
    kinds = kinds or ((Kind.Q4_K, Kind.Q6_K) if is_wide else (Kind.Q4_1, Kind.Q8_0))
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        if tensor.ndim == 2 and "conv.conv" not in name and "router" not in name:
            kind = kinds[number % len(kinds)]
            if kind in SIZES_OF:
                blocks[name] = matrix(kind, *tensor.shape, number)
            else:
                values = gguf.quantize(tensor.astype(np.float32), kind)
                blocks[name] = BlockMatrix(kind, np.ascontiguousarray(values).view(np.uint8))
            tensors[name] = blocks[name].dequantised()
    return config, tensors, blocks


@functools.cache
def folder_of(shape: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="eyas-test-"))
    if shape in SHAPES:
        return tiny_target(folder, **SHAPES[shape])
    return save_architecture(folder, shape, **ARCHITECTURE_SHAPES[shape])


def new_cache(config: TargetConfig, dtype: str) -> PagedCache:
    return PagedCache(config.num_hidden_layers, PAGES, PAGE_SIZE, config.slot_width, DTYPES[dtype])


@needs_native
@pytest.mark.parametrize(
    ("shape", "kinds"),
    [(shape, ()) for shape in (*SHAPES, *ARCHITECTURE_SHAPES)]
    + [("super-blocks", (kind,)) for kind in SIZES_OF],
    ids=str,
)
def test_a_target_is_its_twin(shape, kinds):
    """In float32 they differ by the order of sums, and where that rounds a number otherwise: a row,
    and what follows it. In the other order with Llama 4: of TOKENS (and 1 of 13 other sequences) a
    row of the first layer differs, taken for a tie of its router, and all later rows see it.
    """
    tokens = TOKENS[::-1] if shape == "llama4" else TOKENS
    config, tensors, blocks = quantised(folder_of(shape), kinds)
    target = NativeTarget(config, tensors, FLOAT32, blocks)
    lm_head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    aux, logits = run(target, new_cache(config, "float32"), chunk(tokens, 0))
    by_blocks = {}
    for quantises in (True, False):
        layers = twin_layers(config, tensors, lm_head, blocks if quantises else {})
        of_rows = TensorRows.of(chunk(tokens, 0)), TensorCache(new_cache(config, "float32"))
        hidden, states = layers.hidden(*of_rows, TAPS)
        by_blocks[quantises] = layers.logits(hidden), states
    (expected, expected_aux), (dense, dense_aux) = by_blocks[True], by_blocks[False]
    for ours, twins, others in ((logits, expected, dense), (aux, expected_aux, dense_aux)):
        off, apart = ((one - twins).norm(dim=-1) for one in (ours, others))
        assert off.sort().values[4] < 0.1 * apart.median()


@needs_native
def test_matrices_in_other_formats_are_multiplied_dequantised():
    config, tensors, blocks = quantised(folder_of("llama"))
    others = ("v_proj", "gate_proj", "embed_tokens", "lm_head")
    kept = {name: one for name, one in blocks.items() if not any(other in name for other in others)}
    target = NativeTarget(config, tensors, FLOAT32, kept)
    layers = twin_layers(config, tensors, tensors["lm_head.weight"], kept)
    _, logits = run(target, new_cache(config, "float32"), chunk(TOKENS, 0))
    of_rows = TensorRows.of(chunk(TOKENS, 0)), TensorCache(new_cache(config, "float32"))
    hidden, _ = layers.hidden(*of_rows, TAPS)
    assert (logits - layers.head(hidden)).abs().mean() < 0.02 * logits.std()


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, *PARTS])
def test_rows_of_a_target_depend_on_nothing_beside_them(shape, dtype):
    config, tensors, blocks = quantised(folder_of(shape))
    made = {}
    for count in (1, 2):
        with threads(count):
            made[count] = NativeTarget(config, tensors, DTYPES[dtype], blocks)
    cache = new_cache(config, dtype)
    alone = [run(made[1], cache, chunk([token], place)) for place, token in enumerate(TOKENS)]
    aux, logits = (torch.cat([one[part] for one in alone]) for part in (0, 1))
    for count, sizes in ((1, (21,)), (2, (21,)), (2, (1, 13, 7)), (1, (12, 9))):
        cache, at = new_cache(config, dtype), 0
        for size in sizes:
            found = run(made[count], cache, chunk(TOKENS[at : at + size], at))
            assert torch.equal(found[0], aux[at : at + size])
            assert torch.equal(found[1], logits[at : at + size])
            at += size
    nodes = [TOKENS[13], 5, TOKENS[14], 7, TOKENS[15], 9]
    cache = new_cache(config, dtype)
    run(made[2], cache, chunk(TOKENS[:13], 0))
    _, found = run(made[2], cache, tree_rows(nodes, [-1, 0, 0, 1, 2, 4], 13))
    assert torch.equal(found[[0, 2, 4]], logits[13:16])


@needs_native
def test_a_quantised_router_reads_its_own_rows_behind_a_shared_mlp(tmp_path):
    """A thread that is done with its part of the MLP quantises no rows over what others read."""
    config = TargetConfig.from_folder(save_architecture(tmp_path, "llama4", intermediate_size=4096))
    tensors = arranged(config, read_arrays(tmp_path))
    with threads(2):
        target = NativeTarget(config, tensors, FLOAT32, in_eight_bits(tensors))
    rows = chunk(LONG, 0)
    first, *others = (run(target, new_cache(config, "float32"), rows)[1] for _ in range(20))
    assert all(torch.equal(first, other) for other in others)


@needs_native
def test_captured_states_are_those_of_decoding():
    """Rows beside each other, against the plain forward of each: features and, by the product with
    lm_head, logits. Of a few hundred random rows the scale of one or another rounds the other way
    if it is not divided as the native one is.
    """
    config, tensors, blocks = quantised(folder_of("llama"))
    target = Target(config, tensors, "packed", blocks=blocks)
    decoder = OwnDecoder(target)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(config.vocab_size, (16, 40), generator=generator).tolist()
    rows = [TOKENS[:9], TOKENS[3:8], *drawn]
    states = decoder.states(rows)
    for index, row in enumerate(rows):
        cache = target.new_cache(4)
        found = target.forward(
            prompt_rows([row], [0], np.arange(4, dtype=np.int32)[None], 16),
            cache,
            config.default_taps,
        )
        assert found.aux_hidden is not None
        assert np.array_equal(states.aux_hidden[index, : len(row)].float(), found.aux_hidden)
        head = QuantisedLinear([blocks["lm_head.weight"]])
        logits = head.float(states.last_hidden[index, : len(row)])
        assert np.array_equal(logits, found.logits)


# Files


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


@needs_native
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_a_file_is_run_as_it_is(tmp_path, tiny, kind):
    folder = resolve_target(str(gguf_file(tiny, tmp_path / "tiny.gguf", kind)))
    packed, dense = (Target.load(folder, dtype) for dtype in ("packed", "float32"))
    assert Target.load(folder).precision == "packed"
    name = "model.layers.3.self_attn.q_proj.weight"
    assert torch.equal(
        torch.from_numpy(packed.blocks[name].dequantised()).bfloat16(), read_tensors(folder)[name]
    )
    logits = []
    for target in (packed, dense):
        cache = target.new_cache(8)
        logits.append(target.forward(chunk(TOKENS, 0), cache).logits.copy())
    one, other = (torch.from_numpy(row).softmax(-1) for row in logits)
    apart = (one - other).abs().sum(-1)
    assert apart.mean() < 0.2
    assert packed.num_bytes < 0.7 * dense.num_bytes


@pytest.mark.usefixtures("cache")
def test_what_cannot_be_run_packed_is_refused(tmp_path, tiny):
    with pytest.raises(MismatchError, match="not made from a GGUF file"):
        Target.load(tiny, "packed")
    file = gguf_file(tiny, tmp_path / "half.gguf", Kind.BF16)
    with pytest.raises(MismatchError, match="no matrix in Q4_0"):
        Target.load(resolve_target(str(file)), "packed")
    file = gguf_file(tiny, tmp_path / "tiny.gguf", Kind.Q8_0)
    folder = resolve_target(str(file))
    moved = file.rename(tmp_path / "moved.gguf")
    with pytest.raises(MissingInputError, match=r"tiny\.gguf is no longer there"):
        Target.load(folder, "packed")
    moved.rename(file).write_bytes(file.read_bytes()[:-4096] + bytes(4096))
    with pytest.raises(MissingInputError, match="or another one"):
        Target.load(folder, "packed")


def test_a_type_without_a_product_is_refused_by_name():
    few = {
        "a": BlockMatrix(Kind.IQ2_XS, np.zeros((4, 74), np.uint8)),
        "b": BlockMatrix(Kind.TQ1_0, np.zeros((4, 54), np.uint8)),
        "c": matrix(Kind.Q4_K, 4, 256),
    }
    with pytest.raises(MismatchError, match="holds matrices in IQ2_XS, TQ1_0"):
        refuse_other_kinds(few)


@pytest.mark.parametrize(
    ("kind", "at", "scale"), [(Kind.Q4_1, 3, 0x7C), (Kind.Q6_K, 209, 0xFC), (Kind.MXFP4, 0, 255)]
)
def test_a_scale_that_is_no_number_is_refused(kind, at, scale):
    one = matrix(kind, 16, 256)
    one.data[5, at] = scale
    with pytest.raises(CorruptError, match=r"lm_head\.weight: 1 of .* NaN or infinite"):
        joined_linear({}, ["lm_head"], Packing(BFLOAT16, 1, False, {"lm_head.weight": one}))


@pytest.mark.usefixtures("cache")
def test_a_folder_follows_its_file(tmp_path, tiny):
    file = gguf_file(tiny, tmp_path / "tiny.gguf", Kind.Q8_0)
    folder = resolve_target(str(file))
    (tmp_path / "other").mkdir()
    moved = file.rename(tmp_path / "other" / "tiny.gguf")
    assert resolve_target(str(moved)) == folder
    assert (Path(folder) / LINK).samefile(moved)


def test_a_command_says_what_packed_is_for(tiny):
    packed = ("serve", "--target", str(tiny), "--set", "dtype=packed")
    assert_one_clear_error(run_eyas(*packed), "not made from a GGUF file")
    other = run_eyas(*packed, "--head", str(tiny), "--engine", "vllm", "--print-command")
    assert_one_clear_error(other, "only our own engine")
