"""The native library under AddressSanitizer and UBSan, driven through odd shapes, ids that are none
and random rounds. A program of its own, started with the sanitizer's runtime before everything
else: `tests/test_native_memory.py`. A report of a sanitizer ends the process.

The tests of `tests/test_native.py` are called as functions: they have the shapes. With the argument
`build` the library is compiled and no more.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from eyas.engine.request import SamplingParams
from eyas.engine.sampling import Sampler
from eyas.model import library, variants

SANITIZERS = (
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
)
variants.FLAGS = ("-O0", *variants.FLAGS[1:], *SANITIZERS)
variants.LINKED = ()
if sys.argv[1:] == ["build"]:
    library.built(library.runnable()[0], variants.find_compiler() or "g++")
    raise SystemExit
if library.unavailable() is not None:
    print(f"unavailable: {library.unavailable()}")
    raise SystemExit(3)

from eyas.model.draws import DrawState  # noqa: E402
from eyas.model.native import NativeTarget  # noqa: E402
from eyas.model.packed import PackedLinear  # noqa: E402
from eyas.model.rows import NodesToVerify, Proposals, Roots  # noqa: E402
from eyas.model.threads import threads  # noqa: E402
from tests import test_native as native_tests  # noqa: E402
from tests import test_packed as packed_tests  # noqa: E402
from tests.test_draws import SIZES, drawn  # noqa: E402
from tests.test_native import (  # noqa: E402
    DRAFT_DTYPES,
    DTYPES,
    FLAGS,
    HEADS,
    ODD_PARTS,
    PAGE_SIZE,
    PAGES,
    SHUFFLED,
    STRAIGHT,
    TAPS,
    TOKENS,
    chunk,
    draft_cache,
    draft_of,
    features,
    new_cache,
    run,
    target_of,
    tree_rows,
)

# of a part that is there with odd sizes, those alone
WHOLE_PARTS = ("gemma2", "qwen3_moe", "ministral3", "glm4")
ODD_SHAPES = (*HEADS[1:], "long products", "biases", "tied", "qwen3", *WHOLE_PARTS, *ODD_PARTS)
DRAWS = (
    {},
    {"temperature": 0.0, "logprobs": 20},
    {"top_k": 7, "top_p": 0.5},
    {"top_p": 0.9, "min_p": 0.01, "logprobs": 1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.1, "logit_bias": {0: 1.0}, "min_tokens": 2},
)
GROWTHS = ((1, 1, 1), (9, 8, 8), (5, 16, 16), (16, 4, 4), (2, 16, 16), (16, 16, 1), (16, 5, 4))
NOT_IDS = (-1, 320, -(2**63), 2**62, 2**31, -(2**31) - 1)


def shapes() -> None:
    for shape in ODD_SHAPES:
        for dtype in DTYPES:
            target, cache = target_of(shape, dtype, 2), new_cache(shape, dtype)
            for rows in (chunk(TOKENS[:13], 0), chunk(TOKENS[13:14], 13), chunk(TOKENS[14:], 14)):
                run(target, cache, rows)
            run(target, cache, tree_rows(TOKENS[:6], [-1, 0, 0, 1, 2, 2], len(TOKENS), SHUFFLED))
    for dtype in DTYPES:
        native_tests.test_batch_of_requests_gives_the_bits_of_each_alone("llama", dtype)
        shape, rare = "GQA of 3, odd sizes", 0.002
        native_tests.test_squeezed_weights_give_the_bits_of_plain_ones(shape, rare, dtype)
        native_tests.test_verifying_in_one_call_is_forward_walk_and_move("llama", dtype)
    native_tests.test_all_64_bits_of_a_tree()
    native_tests.test_rows_whose_logits_are_asked_for()


def blocks() -> None:
    for kind in packed_tests.KINDS:
        packed = PackedLinear.of_blocks([packed_tests.matrix(kind, 70, 512)], [], 2)
        for M in (1, 2, 11, 13):
            packed_tests.product(packed, packed_tests.inputs(M, 512), 70, 2)
    packed_tests.test_parts_of_several_formats_are_one_product()
    for dtype in DTYPES:
        for shape in ("odd parts", "super-blocks", "gpt_oss", "lfm2"):
            config, tensors, matrices = packed_tests.quantised(packed_tests.folder_of(shape))
            with threads(2):
                target = NativeTarget(config, tensors, DTYPES[dtype], matrices)
            cache = packed_tests.new_cache(config, dtype)
            for rows in (chunk(TOKENS[:13], 0), chunk(TOKENS[13:14], 13), chunk(TOKENS[14:], 14)):
                run(target, cache, rows)
            run(target, cache, tree_rows(TOKENS[:6], [-1, 0, 0, 1, 2, 2], len(TOKENS), SHUFFLED))
            target.hidden(chunk(TOKENS, 0), cache, TAPS)


def drafts() -> None:
    for dtype in DRAFT_DTYPES:
        for flags in FLAGS:
            draft, cache = draft_of(flags, dtype, 2), draft_cache(dtype)
            rows = chunk(TOKENS[1:], 1, first_column=1)
            h = draft.extend(rows, features(dtype)[:-1], cache)
            native_tests.make_entries(draft, rows, features(dtype)[:-1], cache)
            roots = Roots([20], [20], [], STRAIGHT)
            for growth in GROWTHS:
                first, thresholds = draft.proposals(h[-1:], growth[1]), [0.0] * growth[0]
                draft.propose(roots, h[-1:], first, cache, growth, thresholds)
        native_tests.test_growing_from_features_is_extending_and_proposing(dtype, (4, 3, 1))


def ids() -> None:
    """Tokens, requests, slots, positions, prefixes, pages and bits that are none."""
    target, draft = target_of("llama", "float32"), draft_of((), "float32")
    fields = ("token", "request", "position", "slot", "prefix_len", "seen")
    for name in fields:
        for value in NOT_IDS:
            rows = chunk([5, 6], 0)
            getattr(rows, name)[1] = value
            refused(lambda rows=rows: target.forward(rows, new_cache("llama", "float32"), TAPS))
            rows = chunk([5, 6], 1, first_column=1)
            getattr(rows, name)[1] = value
            cache = draft_cache("float32")
            aux = features("float32")[:2]
            refused(lambda rows=rows, aux=aux, cache=cache: draft.extend(rows, aux, cache))
    for value in (-1, PAGES, 2**31 - 1, -(2**31)):
        table = STRAIGHT.copy()
        table[0, 0] = value
        refused(lambda table=table: target.forward(chunk([5], 0, SHUFFLED), _torn(table), TAPS))
        rows = chunk([5, 6], 0)
        rows.page_table[:] = table
        refused(lambda rows=rows: target.forward(rows, new_cache("llama", "float32"), TAPS))


def _torn(table: np.ndarray) -> object:
    cache = new_cache("llama", "float32")
    cache.data = np.ascontiguousarray(cache.data[:, : PAGE_SIZE * 2])
    return cache


def refused(call: Callable[[], object]) -> None:
    """Whether an id is refused or can be meant is for other tests: here nothing else is read."""
    with suppress(IndexError, AssertionError):
        call()


def rounds() -> None:
    rng = np.random.default_rng(0)
    target, depths = target_of("llama", "bfloat16"), np.repeat([1, 2, 3], [3, 9, 9])
    parents = np.concatenate([[-1] * 3, np.repeat([0, 1, 2], 3), np.repeat([3, 5, 9], 3)])
    scores = np.zeros((2, 21), dtype=np.float32)
    for turn in range(20):
        tokens, both = rng.integers(-2, 323, (2, 21)), np.array([parents] * 2, dtype=np.int32)
        proposals = Proposals(tokens, scores, both, depths.astype(np.int32))
        kept = rng.random((2, 21)) < (0.5 if turn % 2 else 1.0)
        chosen = NodesToVerify([int(rng.integers(-1, 2)), 1], proposals, kept)
        roots = Roots([int(rng.integers(0, 40)), 3], [0, 0], [5, 6], SHUFFLED.reshape(2, -1))
        refused(lambda c=chosen, r=roots: target.verify(r, c, new_cache("llama", "bfloat16")))


def draws() -> None:
    rng = np.random.default_rng(0)
    for V in SIZES:
        for options in DRAWS:
            if options.get("min_tokens") and V < 3:
                continue
            params = SamplingParams(**{"seed": V, "temperature": 1.0} | options)
            rows = np.round(rng.standard_normal((3, V)) * 4).astype(np.float32)
            rows[1, rng.permutation(V)[: V // 2]] = -np.inf
            rows[2, V // 2] = np.nan
            drawn(Sampler(params, [0, V - 1], V, frozenset({0})), rows)
    target = target_of("llama", "bfloat16", 2)
    V = target.config.vocab_size
    proposals = Proposals(
        rng.integers(0, 300, (2, 6)),
        np.zeros((2, 6), dtype=np.float32),
        np.array([[-1, -1, 0, 1, 2, 4]] * 2, dtype=np.int32),
        np.array([1, 1, 2, 2, 3, 4], dtype=np.int32),
    )
    chosen = NodesToVerify([0, 1, -1], proposals, np.ones((2, 6), dtype=bool))
    roots = Roots([3, 5, 7], [3, 5, 7], [5, 6, 7], SHUFFLED[:, :30].reshape(3, 10))
    for options in DRAWS:
        params = SamplingParams(**{"seed": 1, "temperature": 1.0} | options)
        samplers = [Sampler(params, [1], V, frozenset()) for _ in range(3)]  # the arrays' owners
        states = [sampler.draw_state() for sampler in samplers]
        states[1].by_caller = True
        verified = target.verify(roots, chosen, new_cache("llama", "bfloat16"), None, None, states)
        assert verified.logits[1].shape == (7, V)


def planted() -> None:
    """A read behind the end of an array, in a child: the sanitizer must end it."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        rows, tokens = np.zeros((1, 4096), dtype=np.float32), np.zeros(2, dtype=np.int64)
        state = DrawState()
        places = library.address(rows), 2, 4096, library.address(tokens)
        library.library().eyas_draw(ctypes.addressof(state), *places)
        os._exit(0)
    assert os.waitpid(child, 0)[1] != 0, "a read out of bounds went unnoticed: no sanitizer here"


if __name__ == "__main__":
    for part in (planted, shapes, blocks, drafts, ids, rounds, draws):
        part()
        print(part.__name__, flush=True)
