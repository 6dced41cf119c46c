"""Rounds in tensors: the tokens of plain decoding and of the host's rounds, and a launch that looks
at nothing.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.engine import sampling
from eyas.engine.cuda.rounds import TensorRounds
from eyas.engine.cuda.sampling import Cuts, draw_keys, sampled, weights_of
from eyas.engine.cuda.tree import BatchLines, TensorProposals, choose, trees_of, walk
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import SamplingParams
from eyas.engine.rounds import Rounds
from eyas.engine.scheduler import Job, Outcome
from eyas.engine.tree import tree_of
from eyas.engine.verify import accept
from eyas.model.rows import Proposals, Rows
from eyas.model.target import Target
from tests import tiny_engine
from tests.test_sampling import draw, kept_weights
from tests.tiny import tiny_target
from tests.tiny_engine import decoded, idle, random_head, requests

VOCAB = 24
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01}
PENALISED = {"repetition_penalty": 1.2, "frequency_penalty": 0.3}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(
        tiny_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB), native=False
    )


costs_of_this_test = tiny_engine.costs_of_this_test


class TensorEngine(Engine):
    """The engine with the rounds that it has on CUDA. Counts launches before the last outcome was
    known, and those after.
    """

    def __init__(self, *args: Any) -> None:
        self.num_overlapped = self.num_alone = 0
        super().__init__(*args)

    @staticmethod
    def kind_of_rounds(target: Target) -> type[Rounds]:
        return TensorRounds

    def _launch(self, job: Job) -> Callable[[], list[Outcome]]:
        assert isinstance(self.rounds, TensorRounds)
        self.num_overlapped += self.rounds.num_in_flight > 0
        self.num_alone += self.rounds.num_in_flight == 0
        return self.rounds.launch(job)


def tensor_engine(target: Target, head: bool = True, **config: Any) -> TensorEngine:
    sizes = EngineConfig(**{"max_batch": 3, "max_length": 120, "speculation": "fixed", **config})
    return TensorEngine(target, Draft(*random_head(target), target) if head else None, sizes)


def plainly(target: Target, asked: list[Any]) -> dict[Any, Any]:
    config = EngineConfig(max_batch=3, max_length=120, prefix_reuse=False)
    return decoded(list(Engine(target, None, config).run(asked)))


# The same tokens


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_prompts_are_scored_beside_rounds_in_flight(target: Target, max_tokens: int) -> None:
    asked = [
        replace(one, params=replace(one.params, max_tokens=max_tokens, prompt_logprobs=1))
        if place % 2
        else one
        for place, one in enumerate(requests(6, max_tokens=20))
    ]
    engine = tensor_engine(target, overlap=True)
    results = list(engine.run(asked))
    idle(engine)
    assert engine.num_overlapped > 0
    plain = {one.request_id: one for one in Engine(target).run(asked)}
    for one in results:
        assert one.token_ids == plain[one.request_id].token_ids
        ours, theirs = one.prompt_logprobs or [], plain[one.request_id].prompt_logprobs or []
        np.testing.assert_allclose(
            [each.logprob for each in ours], [each.logprob for each in theirs], atol=1e-5
        )
    assert [len(one.prompt_ids) - 1 for one in asked[1::2]] == [
        len(plain[one.id].prompt_logprobs or []) for one in asked[1::2]
    ]


@pytest.mark.parametrize(
    ("shape", "overlap", "params"),
    [
        ((1, 1, 2), True, {}),
        ((1, 1, 2), True, SAMPLED),
        ((3, 1, 4), True, {}),
        ((3, 1, 4), True, {"temperature": 0.6, "top_k": 5}),
        ((4, 3, 8), True, {}),
        ((4, 3, 8), True, {"temperature": 1.0}),
        ((4, 3, 8), True, SAMPLED),
        ((4, 3, 8), False, SAMPLED),
        ((2, 4, 16), True, {}),
        ((2, 4, 16), True, SAMPLED),
        ((6, 2, 5), True, {"temperature": 1.0}),
    ],
)
def test_rounds_in_tensors_change_no_token(
    target: Target, shape: tuple[int, int, int], params: dict[str, Any], overlap: bool
) -> None:
    asked = requests(7, ignore_eos=True, **params)
    running = tensor_engine(
        target, overlap=overlap, speculation=f"fixed({','.join(map(str, shape))})"
    )
    results = list(running.run(asked))
    assert decoded(results) == plainly(target, asked)
    accepted = sum(
        count * drafts for result in results for drafts, count in enumerate(result.accept_hist)
    )
    assert accepted > 0, "no draft was ever accepted: this test would not notice a wrong cache"
    idle(running)


@pytest.mark.parametrize(
    ("config", "overlap"),
    [
        ({"max_batch": 1}, True),
        ({"max_batch": 7, "speculation": "auto"}, True),
        ({"prefill_chunk": 16}, True),
        ({"prefill_chunk": 16}, False),
        ({"num_pages": 14, "max_batch": 5}, True),
        ({"speculation": "off"}, True),
    ],
)
def test_neither_loop_nor_cache_nor_policy_changes_a_token(
    target: Target, config: dict[str, Any], overlap: bool
) -> None:
    """A prefix in common, two samples of each request, one sample in three without speculation."""
    asked = [
        replace(request, speculation=number % 3 != 0)
        for number, request in enumerate(requests(5, shared=35, ignore_eos=True, n=2, **SAMPLED))
    ]
    running = tensor_engine(target, overlap=overlap, **config)
    assert decoded(list(running.run(asked))) == plainly(target, asked)
    assert running.metrics()["prompt_tokens_reused"] > 0
    idle(running)


def test_a_small_cache_preempts_and_changes_no_token(target: Target) -> None:
    asked = requests(8, ignore_eos=True, **{**SAMPLED, "max_tokens": 70})
    running = tensor_engine(target, max_batch=6, num_pages=14, overlap=True)
    assert decoded(list(running.run(asked))) == plainly(target, asked)
    assert running.metrics()["preemptions"] > 0
    idle(running)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_rounds_as_the_hosts(target: Target, overlap: bool) -> None:
    """Not only the tokens: each round accepts what the host's would, so the draft's entries are the
    same, too.
    """
    asked = requests(6, ignore_eos=True, max_tokens=40)
    config = EngineConfig(
        max_batch=3, max_length=120, speculation="fixed(4,3,9)", prefix_reuse=False
    )
    host = list(Engine(target, Draft(*random_head(target), target), config).run(asked))
    ours = list(
        tensor_engine(target, speculation="fixed(4,3,9)", overlap=overlap, prefix_reuse=False).run(
            asked
        )
    )
    rounds = {result.request_id: result.accept_hist for result in host}
    assert {result.request_id: result.accept_hist for result in ours} == rounds
    assert sum(sum(hist[2:]) for hist in rounds.values()) > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_samples_that_need_the_host_share_the_batch(target: Target, overlap: bool) -> None:
    """Penalties and log-probabilities take the host's rounds while they run, least lengths for a
    while only.
    """
    asked = [
        replace(request, params=replace(request.params, **extra))
        for request, extra in zip(
            requests(9, **{**SAMPLED, "max_tokens": 30}),
            [
                {},
                {},
                {"min_tokens": 6},
                PENALISED,
                {},
                {"logprobs": 2, "max_tokens": 9},
                {},
                {},
                {"logit_bias": {5: 2.0}},
            ],
            strict=True,
        )
    ]
    running = tensor_engine(target, overlap=overlap)
    results = list(running.run(asked))
    assert decoded(results) == plainly(target, asked)
    assert sum(sum(result.accept_hist[1:]) for result in results) > 0
    if overlap:
        assert running.num_alone > 2
        assert running.num_overlapped > 0
    idle(running)


def test_a_sample_that_ends_wastes_a_round_and_nothing_else(target: Target) -> None:
    """End tokens, stop tokens and full lengths, seen a round late."""
    asked = requests(16, stop_token_ids=(7,), temperature=1.0)
    running = tensor_engine(target, max_batch=4, overlap=True)
    results = list(running.run(asked))
    assert decoded(results) == plainly(target, asked)
    assert {result.finish_reason for result in results} == {"stop", "length"}
    idle(running)


def test_the_context_may_be_filled_to_its_end(target: Target) -> None:
    """The wasted round behind the target's last position stays within the tables."""
    length = target.config.max_position_embeddings
    asked = [
        replace(one, prompt_ids=one.prompt_ids * 200)
        for one in requests(2, ignore_eos=True, max_tokens=40)
    ]
    asked = [replace(one, prompt_ids=one.prompt_ids[: length - 9]) for one in asked]
    running = tensor_engine(target, max_length=length, overlap=True, speculation="fixed(8,2,16)")
    results = list(running.run(asked))
    assert [len(result.token_ids) for result in results] == [9, 9] or [
        len(r.token_ids) for r in results
    ] == [9, 9][::-1]
    idle(running)


@pytest.mark.parametrize("params", [{"temperature": 1.0}])
def test_the_hit_rate_is_that_of_plain_decoding(target: Target, params: dict[str, Any]) -> None:
    rates = []
    for config in ({"head": False}, {}, {"overlap": True}):
        running = tensor_engine(target, max_batch=2, num_pages=80, **config)
        prompts = {
            request.id: request for request in requests(4, ignore_eos=True, max_tokens=21, **params)
        }
        for _ in range(3):
            for result in running.run(prompts.values()):
                last = prompts[result.request_id]
                prompts[result.request_id] = replace(
                    last, prompt_ids=(*last.prompt_ids, *result.token_ids, 5)
                )
        rates.append(running.metrics()["prompt_tokens_reused"] / running.metrics()["prompt_tokens"])
    assert len(set(rates)) == 1, rates
    assert rates[0] > 0.5


def test_cancelling_in_flight_frees_everything(target: Target) -> None:
    asked = requests(6, ignore_eos=True, max_tokens=40)
    running = tensor_engine(target, overlap=True)
    for request in asked:
        running.add(request)
    for step in range(200):
        if step % 4 == 3:
            running.cancel(str(step // 4))
        running.step()
        if not running.has_work:
            break
    assert not running.has_work
    idle(running)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: graphs, the kernel, events"
)
@pytest.mark.parametrize("params", [{}, SAMPLED])
def test_on_cuda_the_same_tokens(tmp_path: Path, params: dict[str, Any]) -> None:
    folder = tiny_target(tmp_path, vocab_size=VOCAB, head_dim=64)
    target = Target.load(folder, device="cuda")
    asked = requests(7, ignore_eos=True, **params)
    running = tensor_engine(target, overlap=True, speculation="fixed(4,3,8)")
    results = list(running.run(asked))
    assert decoded(results) == plainly(target, asked)
    assert sum(sum(result.accept_hist[1:]) for result in results) > 0
    assert running.metrics()["device_busy_s"] > 0


def test_the_gpu_benchmark_runs_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr("sys.argv", ["gpu.py", "--quick", "--concurrency", "2"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    runpy.run_path(str(folder / "gpu.py"), run_name="__main__")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["device"], report["gpu"]) == ("cpu", "not measured")
    assert report["exact"]["identical"] == report["exact"]["of"] > 0
    (result,) = report["results"]
    assert result["plain_normal"]["tau"] == 1
    # both replay the same acceptance
    assert result["tree_normal"]["tau"] == result["tree_overlapped"]["tau"] > 2


# Launching looks at nothing


class NothingToTheHost(TorchDispatchMode):
    """Fails on operators whose result or shape the host must wait for."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        assert not name.startswith(self.FORBIDDEN), f"{name} waits for the device"
        if name.startswith("index"):
            masks = (
                [one for one in args[1] if one is not None and one.dtype == torch.bool]
                if isinstance(args[1], list)
                else []
            )
            assert not masks, "an index of truth values has a shape that only the device knows"
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_to_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the host asked for a value")

    with monkeypatch.context() as patched, NothingToTheHost():
        for name in (
            "item",
            "tolist",
            "cpu",
            "numpy",
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
        ):
            patched.setattr(torch.Tensor, name, refuse)
        yield


class DevicePlan:
    """Attention by one dense mask over all columns of the page table: plain, and without a look at
    the rows.
    """

    def __init__(self, rows: Rows, page_size: int) -> None:
        columns = torch.arange(rows.page_table.shape[1] * page_size)
        self._slots = (
            rows.page_table.long()[:, columns // page_size] * page_size + columns % page_size
        )[rows.request]
        e = columns - rows.prefix_len[:, None]
        in_tree = (e >= 0) & (e < 64) & ((rows.seen[:, None] >> e.clamp(0, 63)) & 1 > 0)
        self._mask = ((columns >= rows.first_column) & (e < 0)) | in_tree

    def attend(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        k, v = (
            kv[self._slots].repeat_interleave(q.shape[1] // kv.shape[2], 3).permute(2, 0, 3, 1, 4)
        )
        return F.scaled_dot_product_attention(
            q[:, :, None], k, v, attn_mask=self._mask[:, None, None]
        )[:, :, 0]


@pytest.mark.parametrize("params", [{}, SAMPLED])
def test_a_launch_waits_for_nothing(
    target: Target, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch of a round, tree or plain, sampled or not, after prefill or a round."""
    monkeypatch.setattr("eyas.model.block.attention_plan", DevicePlan)
    asked = requests(6, ignore_eos=True, **params)
    running = tensor_engine(target, overlap=True, prefill_chunk=32)
    launch: Callable[..., Any] = running.rounds.launch
    guarded = 0

    def guarded_launch(job: Any) -> Callable[[], list[Outcome]]:
        nonlocal guarded
        if job.chunks is not None:
            return launch(job)
        guarded += 1
        with nothing_to_the_host(monkeypatch):
            return launch(job)

    monkeypatch.setattr(running.rounds, "launch", guarded_launch)
    results = decoded(list(running.run(asked)))
    assert guarded > 10
    monkeypatch.undo()
    assert results == plainly(target, asked)


def test_the_guard_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(4)
    for peek in (
        lambda: values.tolist(),
        lambda: bool(values[0] > 0),
        lambda: values[values > 1],
        lambda: values.max().item(),
    ):
        with pytest.raises(AssertionError), nothing_to_the_host(monkeypatch):
            peek()


# The parts


def proposals_at_random(
    generator: np.random.Generator, B: int, topk: int, levels: int, ties: bool
) -> Proposals:
    """Candidates as a draft would grow them, few tokens and, with ties, few scores."""
    C = topk + levels * topk * topk
    tokens = np.zeros((B, C), np.int64)
    scores, parents = np.zeros((B, C), np.float32), np.full((B, C), -1, np.int32)
    depths = np.repeat(np.arange(1, levels + 2, dtype=np.int32), [topk] + [topk * topk] * levels)
    for b in range(B):
        frontier, above = np.array([-1]), np.zeros(1, np.float32)
        for level in range(levels + 1):
            start = 0 if level == 0 else topk + (level - 1) * topk * topk
            for place, parent in enumerate(frontier):
                at = slice(start + place * topk, start + (place + 1) * topk)
                tokens[b, at] = generator.permutation(12)[:topk]
                step = (
                    -generator.integers(0, 2, topk) if ties else -generator.exponential(1.0, topk)
                )
                scores[b, at], parents[b, at] = above[place] + np.sort(step)[::-1], parent
            new = np.arange(start, start + len(frontier) * topk)
            frontier = np.sort(new[np.argsort(-scores[b, new], kind="stable")[:topk]])
            above = scores[b, frontier]
    return Proposals(tokens, scores, parents, depths)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_chosen_trees_and_walks_are_the_hosts(seed: int, ties: bool) -> None:
    generator = np.random.default_rng(seed)
    B, topk, levels, max_nodes, num_nodes = 4, 3, 3, 9, 20
    proposals = proposals_at_random(generator, B, topk, levels, ties)
    candidates = TensorProposals(
        torch.from_numpy(proposals.tokens).long(),
        torch.from_numpy(proposals.scores),
        torch.from_numpy(proposals.parents).long(),
        topk,
    )
    assert candidates.depths().tolist() == proposals.depths.tolist()
    drafts = np.array([True, False, True, True])
    C = proposals.tokens.shape[1]
    num_nodes = min(num_nodes, B * max_nodes)
    chosen = choose(candidates.scores, torch.from_numpy(drafts), max_nodes, num_nodes)
    root, length = torch.arange(100, 100 + B), torch.tensor([3, 20, 7, 16])
    lines = BatchLines(
        root, length, torch.arange((B + 1) * 8, dtype=torch.int32).view(B + 1, 8), 16
    )
    trees = trees_of(lines, candidates, chosen, levels + 1)
    rows = trees.rows(lines)
    best = torch.from_numpy(generator.integers(0, 12, B + num_nodes))
    walked = walk(trees, levels + 1, lambda row, place: best[row])
    ranked = sorted(
        (-proposals.scores[b, c], b, c) for b in range(B) if drafts[b] for c in range(C)
    )
    worst_kept = sorted(
        proposals.scores[b, c]
        for b, c in zip(*divmod(chosen[chosen < B * C].numpy(), C), strict=True)
    )[0]
    assert (
        sum(-score > worst_kept for score, _, _ in ranked) <= (chosen < B * C).sum()
        or max_nodes < C
    )
    for b in range(B):
        kept = [c - b * C for c in chosen.tolist() if b * C <= c < (b + 1) * C]
        assert len(kept) <= (max_nodes if drafts[b] else 0)
        host = tree_of(100 + b, proposals, b, kept)  # raises KeyError for a node without its parent
        own = [b, *[row for row in range(B, B + num_nodes) if trees.line[row] == b]]
        assert trees.token[own].tolist() == host.tokens
        assert rows.seen[own].tolist() == host.seen
        assert (rows.position[own] - length[b]).tolist() == host.depths
        assert rows.prefix_len[own].tolist() == [length[b]] * len(own)
        assert rows.slot[own].tolist() == [
            b * 128 + int(length[b]) + node for node in range(len(own))
        ]
        path, emitted = accept(
            host.tokens, host.parents, lambda node, own=own: int(best[own[node]])
        )
        count = int(walked.count[b])
        assert walked.tokens[b, :count].tolist() == emitted
        assert walked.rows[b, :count].tolist() == [own[node] for node in [0, *path]]
    void = (trees.line == B).nonzero()[:, 0]
    assert rows.slot[void].tolist() == [B * 128] * len(void)
    assert rows.prefix_len[void].tolist() == [1] * len(void)


def test_too_few_candidates_leave_nodes_in_the_void() -> None:
    scores = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
    chosen = choose(scores, torch.tensor([True, False]), max_nodes=2, num_nodes=4)
    assert chosen.tolist() == [0, 1, 4, 4]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.2},
        {"top_k": 7, "top_p": 0.8, "min_p": 0.02},
        {"top_k": 500},
    ],
)
@pytest.mark.parametrize("ties", [False, True])
def test_draws_are_the_hosts(params: dict[str, Any], ties: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, 40, generator=generator) * 2
    if ties:
        logits = logits.round()
    keys = draw_keys(torch.full((200,), 3), torch.arange(200))
    wanted = SamplingParams(temperature=0.7, **params)
    values = (wanted.temperature, wanted.top_p, wanted.min_p)
    cuts = Cuts(
        *(torch.full((200,), value, dtype=torch.float64) for value in values),
        torch.full((200,), wanted.top_k),
    )
    ours = sampled(logits, keys, cuts, is_cut=bool(params)).tolist()
    theirs = [
        draw(kept_weights(row.numpy(), wanted), key % 2**64)
        for row, key in zip(logits, keys.tolist(), strict=True)
    ]
    assert ours == theirs


def test_weights_have_the_hosts_bits() -> None:
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(3)) * 9
    logits[2, ::3] = -torch.inf
    temperature = torch.tensor([0.3, 1.0, 1.7, 1e-5], dtype=torch.float64)
    for row, value, ours in zip(
        logits, temperature.tolist(), weights_of(logits, temperature), strict=True
    ):
        assert np.array_equal(ours.numpy(), sampling.weights_of(row.numpy(), value))
