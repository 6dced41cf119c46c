"""A target of Llama-3.1-8B's shape on one GPU: plain decoding and trees, by the normal and by the
overlapped loop.

    python benchmarks/gpu.py [--quick] [--concurrency 1 8 64] [--layers 32] [--hidden 4096]
    [--accept-hist 2 3 4 5 4 3 3]

Weights are random, in bf16. The head is random as well: it does all of its work, and so does the
target, but which nodes are accepted is replayed from --accept-hist (so many rounds with 0, 1, 2,
... accepted drafts; the default has tau about 4), and its probabilities are replaced by those of a
head that is fairly sure, so that trees are as deep as real ones.

At each concurrency the four ways (plain and tree, normal loop and overlapped) take turns, each on
its own caches; the first turn of each is a warm-up and not counted. Figures by way: TPOT (time by
tokens a request), idle share of the device between jobs (by events on CUDA), and the share of the
measured copy bandwidth at which a round reads weights and keys. `verify` is the target's forward
over the trees alone. `exact` runs a tiny model in fp32 with real acceptance: trees must change no
token. `attention` is benchmarks/attention.py: the kernel against its definition, and against one
dense-mask attention.

Without CUDA all of it runs on the CPU at a tiny size, and the figures say nothing about a GPU. The
last line of stdout is one JSON object. It takes about five minutes on an H100.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import attention
import numpy as np
import torch

from eyas.engine.cuda.device import Graphs
from eyas.engine.cuda.rounds import TensorRounds
from eyas.engine.cuda.tree import AcceptedPaths, TensorTrees
from eyas.engine.draft import Draft
from eyas.engine.pages import PagePool
from eyas.engine.policy import Policy
from eyas.engine.request import Request, SamplingParams
from eyas.engine.rounds import Trace
from eyas.engine.sampling import Sampler
from eyas.engine.scheduler import BatchLimits, Outcome, RunningSample, Scheduler
from eyas.engine.tree import Speculation
from eyas.model.config import HeadConfig, HeadOptions, TargetConfig
from eyas.model.rows import PagedCache, Rows, rows_of
from eyas.model.target import PAGE_SIZE, Target

ACCEPT_HIST = (2, 3, 4, 5, 4, 3, 3)
# of trees, by the most requests: the more of them, the dearer a node
SIZES = {1: (6, 3, 12), 8: (5, 2, 8), 64: (3, 1, 4)}
SURE = (0.8, 0.1, 0.05)  # what the replayed head gives its best tokens
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class Size:
    """What is measured: the model's shape, and how long prompts and turns are."""

    layers: int
    hidden: int
    inner: int
    heads: tuple[int, int, int]  # Hq, Hk, D
    vocab: int
    draft_vocab: int
    prompt: int
    rounds: int  # of a turn
    turns: int  # counted ones


def random_target(size: Size, dtype: str, device: str) -> Target:
    """A Llama of this size; std 0.02, norms 1."""
    Hq, Hk, D = size.heads
    shape = {
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": Hq,
        "num_key_value_heads": Hk,
        "head_dim": D,
        "vocab_size": size.vocab,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072 if device != "cpu" else 4096,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA_3_ROPE,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = TargetConfig.from_folder(folder)
    shapes = {
        "model.embed_tokens.weight": (size.vocab, size.hidden),
        "lm_head.weight": (size.vocab, size.hidden),
    }
    shapes["model.norm.weight"] = (size.hidden,)
    for layer in range(size.layers):
        shapes |= layer_shapes(f"model.layers.{layer}.", size, size.hidden)
        shapes |= {
            f"model.layers.{layer}.{name}_layernorm.weight": (size.hidden,)
            for name in ("input", "post_attention")
        }
    return Target(config, random_tensors(shapes, dtype, device), dtype, device, native=False)


def layer_shapes(prefix: str, size: Size, width: int) -> dict[str, tuple[int, ...]]:
    Hq, Hk, D = size.heads
    named = {
        "q": (Hq * D, width),
        "k": (Hk * D, width),
        "v": (Hk * D, width),
        "o": (size.hidden, Hq * D),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}self_attn.{name}_proj.weight": shape for name, shape in named.items()
    }
    shapes |= {
        f"{prefix}mlp.{name}_proj.weight": (size.inner, size.hidden) for name in ("gate", "up")
    }
    return shapes | {f"{prefix}mlp.down_proj.weight": (size.hidden, size.inner)}


def random_tensors(
    shapes: dict[str, tuple[int, ...]], dtype: str, device: str, std: float = 0.02
) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    kind = getattr(torch, dtype)
    return {
        name: torch.ones(shape, dtype=kind, device=device)
        if len(shape) == 1
        else torch.empty(shape, dtype=kind, device=device).normal_(std=std, generator=generator)
        for name, shape in shapes.items()
    }


def head_tensors(
    target: Target, size: Size, std: float = 0.02
) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    config = HeadConfig.for_target(target.config, HeadOptions(draft_vocab_size=size.draft_vocab))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size.hidden, 3 * size.hidden),
        "norm.weight": (size.hidden,),
    }
    shapes |= layer_shapes("midlayer.", size, 2 * size.hidden) | {
        "lm_head.weight": (size.draft_vocab, size.hidden)
    }
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        shapes[f"midlayer.{name}.weight"] = (size.hidden,)
    tensors = random_tensors(shapes, str(target.dtype).removeprefix("torch."), target.device, std)
    tensors["d2t"] = torch.zeros(size.draft_vocab, dtype=torch.int64)
    tensors["t2d"] = torch.arange(size.vocab) < size.draft_vocab
    return config, tensors


class SureDraft(Draft):
    """Does the head's work and gives its best tokens the probabilities of SURE."""

    def proposals(self, h: torch.Tensor, tree_topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, log_probs = super().proposals(h, tree_topk)
        falling = torch.arange(tree_topk, device=h.device)
        sure = torch.full_like(falling, 1, dtype=torch.float32)
        for place, probability in enumerate(SURE):
            sure = torch.where(falling == place, probability, sure)
        sure = torch.where(falling >= len(SURE), SURE[-1] / (2 + falling), sure)
        return ids, sure.log().expand_as(log_probs)


class ReplayRounds(TensorRounds):
    """The accepted path is the recorded number of first children; the draws are made and then
    overruled.
    """

    def replay(self, accept_hist: Sequence[int]) -> None:
        counts = np.repeat(np.arange(len(accept_hist)), accept_hist)
        self._accepted = torch.from_numpy(np.random.default_rng(0).permutation(counts)).to(
            self._device
        )
        self._turn = torch.zeros(1, dtype=torch.int64, device=self._device)

    def _walk(
        self, trees: TensorTrees, depth: int, draw: Callable[[torch.Tensor, int], torch.Tensor]
    ) -> AcceptedPaths:
        B = trees.num_lines
        row = torch.arange(B, device=self._device)
        self._turn.add_(1)
        wanted = self._accepted[(self._turn + 37 * row) % len(self._accepted)]
        going, count = torch.ones_like(row, dtype=torch.bool), torch.ones_like(row)
        tokens, rows = [], []
        for place in range(depth + 1):
            token = draw(row, place)
            rows.append(row)
            if place < depth:
                is_child = trees.parent[B:] == row[:, None]
                going = going & is_child.any(1) & (place < wanted)
                row = torch.where(going, B + is_child.long().argmax(1), row)
                token = torch.where(going, trees.token[row], token)
                count = count + going
            tokens.append(token)
        return AcceptedPaths(torch.stack(tokens, 1), torch.stack(rows, 1), count)


class Loop:
    """Scheduler and rounds as in the engine, without requests that come and go."""

    def __init__(
        self, rounds: TensorRounds, pool: PagePool, limits: BatchLimits, overlaps: bool
    ) -> None:
        self.rounds, self._overlaps = rounds, overlaps
        self._scheduler = Scheduler(pool, limits)
        self._ahead: Callable[[], list[Outcome]] | None = None

    @classmethod
    def of(
        cls,
        target: Target,
        draft: Draft | None,
        sizes: tuple[int, int, int],
        B: int,
        length: int,
        overlaps: bool,
        kind: type[TensorRounds] = TensorRounds,
    ) -> Loop:
        """B samples of at most `length` tokens; sizes: K, k, N."""
        K, k, N = sizes
        speculation = Speculation("fixed" if draft is not None else "off", K, k, N)
        columns = max(N, 1 + (K - 1) * k, K + 2)
        limits = BatchLimits(
            B, 512, K + 1 if draft is not None else 1, columns if draft is not None else 1
        )
        pool = PagePool(B * -(-(length + columns + 2 * K + 2) // PAGE_SIZE), PAGE_SIZE)
        rounds = kind(target, draft, Speculation("fixed", K, k), B, pool.num_pages)
        rounds.policy = Policy(speculation)
        return cls(rounds, pool, limits, overlaps)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._ahead is not None

    def add(self, request: Request) -> RunningSample:
        sampler = Sampler(
            request.params, request.prompt_ids, self.rounds.target.config.vocab_size, frozenset()
        )
        running = RunningSample(request, 0, sampler, None, request.params.max_tokens)
        self._scheduler.add(running)
        return running

    def step(self) -> list[Outcome]:
        """One job: launched and waited for, or launched before the one ahead is waited for."""
        ahead, self._ahead = self._ahead, None
        job = self._scheduler.schedule(nothing_in_flight=ahead is None)
        launched = self.rounds.launch(job) if job is not None else None
        if self._overlaps:
            self._ahead, settled = launched, ahead
        else:
            settled = launched
        outcomes = settled() if settled is not None else []
        return [outcome for outcome in outcomes if self._scheduler.settle(outcome)]

    def drain(self) -> list[Outcome]:
        ahead, self._ahead = self._ahead, None
        outcomes = ahead() if ahead is not None else []
        return [outcome for outcome in outcomes if self._scheduler.settle(outcome)]


def settle(trace: Trace) -> None:
    """All that was launched is over and accounted for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    trace.rest()


@dataclass
class Way:
    """One way of decoding and what its turns gave."""

    loop: Loop
    runnings: list[RunningSample]
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    tpot_ms: list[float] = field(default_factory=list)

    def turn(self, rounds: int, counts: bool) -> None:
        trace = self.loop.rounds.trace
        settle(trace)
        before = trace.busy_s, trace.idle_s
        tokens = 0
        started = time.perf_counter()
        for _ in range(rounds):
            tokens += sum(len(outcome.update.token_ids) for outcome in self.loop.step())
        tokens += sum(len(outcome.update.token_ids) for outcome in self.loop.drain())
        seconds = time.perf_counter() - started
        settle(trace)
        if not counts:
            return
        self.tokens, self.rounds, self.seconds = (
            self.tokens + tokens,
            self.rounds + rounds,
            self.seconds + seconds,
        )
        self.busy_s, self.idle_s = (
            self.busy_s + trace.busy_s - before[0],
            self.idle_s + trace.idle_s - before[1],
        )
        self.tpot_ms.append(seconds * 1e3 * len(self.runnings) / tokens)

    def prefill(self) -> None:
        while not all(running.num_emitted for running in self.runnings):
            self.loop.step()
        self.loop.drain()

    def figures(self, bytes_of_round: float, bandwidth: float) -> dict[str, float]:
        return {
            "tpot_ms": round(statistics.median(self.tpot_ms), 4),
            "round_ms": round(self.seconds / self.rounds * 1e3, 4),
            "tau": round(self.tokens / self.rounds / len(self.runnings), 3),
            "idle_share": round(self.idle_s / (self.idle_s + self.busy_s), 4)
            if self.busy_s
            else 0.0,
            "bandwidth_share": round(bytes_of_round * self.rounds / self.seconds / bandwidth, 4),
        }


def prompts(count: int, length: int, vocab: int, max_tokens: int) -> list[Request]:
    generator = np.random.default_rng(1)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [
        Request(str(b), tuple(generator.integers(0, vocab, length).tolist()), params)
        for b in range(count)
    ]


def concurrent(
    size: Size, target: Target, B: int, accept_hist: Sequence[int], bandwidth: float
) -> dict[str, object]:
    """The four ways at one concurrency, in turns."""
    sizes = next((sizes for most, sizes in SIZES.items() if most >= B), SIZES[64])
    K, _, N = sizes
    budget = (size.turns + 1) * (size.rounds + 2) * (K + 1) + 64
    ways = {}
    for name in ("plain_normal", "plain_overlapped", "tree_normal", "tree_overlapped"):
        draft = SureDraft(*head_tensors(target, size), target) if name.startswith("tree") else None
        length = size.prompt + (budget if draft is not None else budget // (K + 1) + 64)
        loop = Loop.of(target, draft, sizes, B, length, name.endswith("overlapped"), ReplayRounds)
        assert isinstance(loop.rounds, ReplayRounds)
        loop.rounds.replay(accept_hist)
        ways[name] = Way(
            loop,
            [
                loop.add(request)
                for request in prompts(B, size.prompt, size.vocab, length - size.prompt)
            ],
        )
        ways[name].prefill()
    for turn in range(size.turns + 1):
        for way in list(ways.values())[:: 1 if turn % 2 else -1]:
            way.turn(size.rounds, counts=turn > 0)
    figures: dict[str, object] = {"concurrency": B, "sizes": sizes}
    for name, way in ways.items():
        length = sum(running.num_cached for running in way.runnings) - way.tokens // 2
        weights = target_bytes(target) + (
            draft_bytes(way.loop.rounds.draft, target, K) if way.loop.rounds.draft else 0
        )
        figures[name] = way.figures(weights + length * column_bytes(target), bandwidth)
    ms = {name: way.seconds / way.tokens for name, way in ways.items()}
    figures["overlap_speedup_plain"] = round(ms["plain_normal"] / ms["plain_overlapped"], 3)
    figures["overlap_speedup_tree"] = round(ms["tree_normal"] / ms["tree_overlapped"], 3)
    figures["tree_speedup_overlapped"] = round(ms["plain_overlapped"] / ms["tree_overlapped"], 3)
    figures["verify"] = verify(target, ways["tree_normal"].loop.rounds.cache, B, N, bandwidth)
    return figures


def target_bytes(target: Target) -> int:
    """Of the weights that a forward reads: all but the embeddings."""
    config = target.config
    Hq, Hk, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layer = config.hidden_size * ((2 * Hq + 2 * Hk) * D + 3 * config.intermediate_size)
    return (
        config.num_hidden_layers * layer + config.vocab_size * config.hidden_size
    ) * target.dtype.itemsize


def draft_bytes(draft: Draft, target: Target, K: int) -> int:
    """Of the head's weights in one round: K - 1 steps and one extension through the layer, K times
    the output weights.
    """
    config = draft.config
    Hq, Hk, D, H = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.hidden_size,
    )
    layer = H * (2 * (Hq + 2 * Hk) * D + Hq * D + 3 * config.intermediate_size)
    return (
        K * (layer + config.draft_vocab_size * H) + 3 * config.target_hidden_size * H
    ) * target.dtype.itemsize


def column_bytes(target: Target) -> int:
    config = target.config
    return (
        2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * config.head_dim
        * target.dtype.itemsize
    )


@torch.inference_mode()
def verify(target: Target, cache: PagedCache, B: int, N: int, bandwidth: float) -> dict[str, float]:
    """The forward over B trees of N nodes, as a graph on CUDA."""
    P = cache.num_pages // B
    length = min(512, P * PAGE_SIZE - N)
    node = np.tile(np.arange(N, dtype=np.int64), B)
    line = np.repeat(np.arange(B, dtype=np.int64), N)
    page_table = np.arange(B * P, dtype=np.int32).reshape(B, P)
    prefix_len = np.full(B * N, length, dtype=np.int64)
    column = prefix_len + node
    slot = page_table[line, column // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + column % PAGE_SIZE
    arrays = (node, line, column, slot, prefix_len, (np.int64(1) << node) | 1)
    rows = rows_of(arrays, page_table, target.device)
    inputs = (
        rows.token,
        rows.request,
        rows.position,
        rows.slot,
        rows.prefix_len,
        rows.seen,
        rows.page_table,
    )

    def forward(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (target.forward(Rows(*given), cache, target.config.default_taps).best,)

    graphs = Graphs(target.device != "cpu" and find_spec("triton") is not None)
    graphs.prepare("verify", forward, lambda: inputs)
    ms = attention.median_ms(lambda: graphs("verify", forward, inputs), target.device, 10)
    moved = target_bytes(target) + B * length * column_bytes(target)
    return {
        "rows": B * N,
        "length": length,
        "ms": round(ms, 4),
        "bandwidth_share": round(moved / ms * 1e3 / bandwidth, 4),
    }


def copy_bandwidth(device: str) -> float:
    """Bytes a second read and written by the copy of a large tensor."""
    source = torch.zeros(
        (1 << 30) if device != "cpu" else (1 << 26), dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    return 2 * source.numel() / attention.median_ms(lambda: target.copy_(source), device, 10) * 1e3


def exact(device: str) -> dict[str, object]:
    """A tiny model in fp32, its drafts accepted as they may: tokens of trees, overlapped, against
    plain ones.
    """
    size = Size(8, 64, 128, (4, 2, 64), 24, 20, 0, 0, 0)
    torch.backends.cuda.matmul.allow_tf32 = False
    tensors_of = partial(random_tensors, dtype="float32", device=device, std=0.3)
    target = random_target(size, "float32", device)
    target = Target(
        target.config,
        tensors_of({name: tuple(t.shape) for name, t in target._tensors.items()}),
        "float32",
        device,
        False,
    )
    found: dict[str, dict[str, list[int]]] = {}
    accepted = 0
    for name in ("plain", "tree"):
        draft = Draft(*head_tensors(target, size, 0.3), target) if name == "tree" else None
        loop = Loop.of(target, draft, (4, 3, 10), 6, 200, overlaps=name == "tree")
        found[name] = {}
        for b, length in enumerate((1, 5, 17, 30, 48, 64, 9, 33)):
            params = SamplingParams(
                max_tokens=60,
                ignore_eos=True,
                seed=b,
                temperature=0.8 * (b % 2),
                top_p=0.9 if b % 4 == 1 else 1.0,
            )
            ids = tuple(
                int(token) for token in np.random.default_rng(b).integers(0, size.vocab, length)
            )
            loop.add(Request(str(b), ids, params))
        while loop.has_work:
            for outcome in loop.step():
                found[name].setdefault(outcome.update.request_id, []).extend(
                    outcome.update.token_ids
                )
                accepted += outcome.update.num_accepted_drafts or 0
    same = sum(found["plain"][b] == found["tree"][b] for b in found["plain"])
    return {"identical": same, "of": len(found["plain"]), "accepted_drafts": accepted}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns")
    parser.add_argument("--concurrency", type=int, nargs="+")
    parser.add_argument("--layers", type=int, help="of the target, 7 or more")
    parser.add_argument("--hidden", type=int, help="a multiple of 128")
    parser.add_argument("--accept-hist", type=int, nargs="+", default=ACCEPT_HIST)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        hidden = args.hidden or 4096
        heads = (hidden // 128, max(1, hidden // 512), 128)
        size = Size(
            args.layers or 32,
            hidden,
            hidden * 7 // 2,
            heads,
            128256,
            32000,
            512,
            *((32, 2) if args.quick else (64, 3)),
        )
        concurrency = args.concurrency or [1, 8, 64]
    else:
        print(
            "no CUDA device: a tiny size on the CPU, to see that it runs; the GPU is not measured",
            file=sys.stderr,
        )
        hidden = args.hidden or 128
        size = Size(
            args.layers or 8,
            hidden,
            2 * hidden,
            (hidden // 32, max(1, hidden // 64), 32),
            512,
            256,
            32,
            *((6, 1) if args.quick else (16, 2)),
        )
        concurrency = args.concurrency or [1, 8]
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
    }
    report["gpu"] = "measured" if device == "cuda" else "not measured"
    report["exact"] = exact(device)
    print(json.dumps(report), file=sys.stderr)
    bandwidth = copy_bandwidth(device)
    report |= {
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
        "accept_hist": list(args.accept_hist),
        "results": [],
    }
    target = random_target(size, "bfloat16", device)
    report["target_gb"] = round(target_bytes(target) / 1e9, 3)
    results = []
    for B in concurrency:
        results.append(concurrent(size, target, B, args.accept_hist, bandwidth))
        print(json.dumps(results[-1]), file=sys.stderr)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    report["results"] = results
    heads, kind = (size.heads, torch.bfloat16)
    cases = [attention.Case(B, size.prompt, 8) for B in concurrency]
    report["attention"] = [
        attention.measured(case, heads, kind, device, 5 if args.quick else 20) for case in cases
    ]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
