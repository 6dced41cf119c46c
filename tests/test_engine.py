"""The engine: speculation changes no token, whatever the batch, the sampling, the cache and the
moment requests come or go.
"""

import logging
import re
from dataclasses import replace

import numpy as np
import pytest

from eyas.engine.draft import Draft
from eyas.engine.engine import EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.errors import ConfigError, InputError, MismatchError
from eyas.model.rows import Proposals
from tests import tiny_engine
from tests.tiny_engine import (
    VOCAB,
    decoded,
    engine,
    idle,
    plainly,
    random_head,
    requests,
    stepped,
)
from tests.tiny_head import head_folder

WINDOW = 9  # shorter than configs allow, longer than a tree is deep
folder, target = tiny_engine.folder, tiny_engine.target
costs_of_this_test = tiny_engine.costs_of_this_test


# The same tokens


def test_speculating_and_plain_requests_share_a_batch(target):
    mixed = [*requests(6)[::2], *requests(6, speculation=False)[1::2]]
    results = list(engine(target).run(mixed))
    assert decoded(results) == plainly(target, requests(6))
    assert all(sum(result.accept_hist) == 0 for result in results if int(result.request_id) % 2)


def test_requests_come_and_go_without_disturbing_others(target):
    expected = plainly(target, requests(12, ignore_eos=True))
    running, pending = engine(target, max_batch=2), requests(12, ignore_eos=True)

    def turn(step: int) -> bool:
        if pending and step % 2 == 0:
            running.add(pending.pop(0))
        if step == 5:
            running.cancel("1")
        return bool(pending)

    found = decoded(stepped(running, turn))
    for results in (expected, found):
        results.pop(("1", 0), None)
    assert found == expected
    idle(running)


@pytest.mark.parametrize("speculation", ["fixed(6,3,12)", "auto"])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_heads_that_take_turns_change_no_token(target, window, speculation):
    sizes = {"ignore_eos": True, "max_tokens": 40}
    asked = [one for shared in (0, 40) for one in requests(8, shared=shared, **sizes)]
    asked = [replace(request, id=str(number)) for number, request in enumerate(asked)]
    running = engine(target, window=window, num_pages=12, speculation=speculation)
    other_head = random_head(target, seed=1)
    heads = [running.draft, Draft(*other_head, target)]
    for request in asked:
        running.add(request)

    def turn(step: int) -> None:
        if step % 3 == 2:
            assert running.swap_draft(heads[step // 3 % 2])
            running.check()

    assert decoded(stepped(running, turn)) == plainly(target, asked)
    assert running.metrics()["preemptions"] > 0
    assert running.metrics()["prompt_tokens_reused"] > 0
    idle(running)


def test_a_head_swapped_in_drafts_as_if_it_had_been_there_from_the_start(target):
    other_head = random_head(target, seed=1)

    def proposed(swaps_at: int) -> list[list[list[int]]]:
        running, rounds = engine(target), []

        def nothing(_: object, proposals: Proposals) -> np.ndarray:
            rounds.append(proposals.tokens.tolist())
            return np.zeros(proposals.tokens.shape, dtype=bool)

        running.rounds.policy.choose = nothing  # no node is verified: a token a round
        for request in requests(3, shared=20, ignore_eos=True, max_tokens=20):
            running.add(request)
        step = 0
        while running.has_work:
            if step == swaps_at:
                running.swap_draft(Draft(*other_head, target))
            running.step()
            step += 1
        return rounds

    at_once, later = proposed(0), proposed(9)
    assert len(at_once) == len(later)
    same = [one == other for one, other in zip(at_once, later, strict=True)]
    first = same.index(True, same.index(False))
    assert all(same[first:])
    assert len(same) - first >= 8


def test_a_head_that_needs_other_caches_needs_a_restart(folder, tmp_path):
    target = tiny_engine.load_as("native", folder)
    running = engine(target)
    with pytest.raises(MismatchError, match="draft_vocab_size of the head is 16, of the served"):
        running.read_draft(head_folder(folder, tmp_path / "other", draft_vocab_size=16))
    same = running.read_draft(head_folder(folder, tmp_path / "same", draft_vocab_size=20))
    assert running.swap_draft(same)
    assert running.draft is same
    running.rounds.switch_off(ValueError("NaN"))
    assert not running.swap_draft(same)
    with pytest.raises(MismatchError, match="switched off"):
        running.read_draft(tmp_path / "same")


# Pages


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_reused_prefix_gives_the_draft_what_it_would_have_made(target, window):
    asked = requests(5, shared=50, ignore_eos=True, max_tokens=30)
    found = {}
    for reuse in (False, True):
        running = engine(target, window=window, max_batch=1, prefix_reuse=reuse)
        results = list(running.run(asked))
        found[reuse] = {one.request_id: (one.token_ids, one.accept_hist) for one in results}
        assert running.metrics()["prompt_tokens_reused"] == (4 * 48 if reuse else 0)
    assert found[True] == found[False]
    assert sum(sum(hist[1:]) for _, hist in found[True].values()) > 0


def test_the_hit_rate_is_the_same_with_and_without_speculation(target):
    rates = {}
    for config in ({"head": False}, {"speculation": "fixed"}, {"speculation": "auto"}):
        running = engine(target, max_batch=2, num_pages=80, **config)
        asked = requests(4, ignore_eos=True, max_tokens=21, temperature=1.0)
        prompts = {request.id: request for request in asked}
        for _ in range(3):
            for result in running.run(prompts.values()):
                name, last = result.request_id, prompts[result.request_id]
                longer = (*last.prompt_ids, *result.token_ids, 5)
                prompts[name] = Request(name, longer, last.params, int(name) % 2 == 0)
        metrics = running.metrics()
        rates[str(config)] = metrics["prompt_tokens_reused"] / metrics["prompt_tokens"]
    assert len(set(rates.values())) == 1, rates
    assert next(iter(rates.values())) > 0.5


def test_cancelling_frees_everything(target):
    running = engine(target)
    for request in requests(6, n=2, temperature=1.0):
        running.add(request)
    for _ in range(4):
        running.step()
    for request in requests(6):
        running.cancel(request.id)
    running.cancel("unknown")
    assert not running.has_work
    idle(running)


# Ends


def test_the_end_token_ends_a_request_and_is_the_last(target):
    results = list(engine(target).run(requests(20, max_tokens=80)))
    stopped = [result for result in results if result.finish_reason == "stop"]
    assert stopped
    assert all(result.token_ids[-1] == 2 and 2 not in result.token_ids[:-1] for result in stopped)
    assert all(len(result.token_ids) <= 80 for result in results)


def test_a_full_context_ends_with_length(target):
    prompt = tuple(range(3, 23))
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    (result,) = engine(target, max_length=40).run([Request("long", prompt, params)])
    assert (len(result.token_ids), result.finish_reason) == (20, "length")


def test_bad_requests_are_refused(target):
    running, few_pages = engine(target, max_length=40), engine(target, num_pages=6)
    twice = engine(target)
    twice.add(Request("twice", (3,)))
    stop, long = SamplingParams(stop=("x",)), SamplingParams(max_tokens=120)
    for asked, request, message in (
        (running, Request("empty", ()), "no tokens"),
        (running, Request("long", (3,) * 40), "the limit is 39"),
        (running, Request("foreign", (3, VOCAB)), "outside the vocabulary"),
        (running, Request("stop", (3,), stop), "need a tokenizer"),
        (twice, Request("twice", (4,)), "'twice' is under way"),
        (few_pages, Request("never", (3,), long), "may need 9 pages of 16 tokens, the cache has 6"),
    ):
        with pytest.raises(InputError, match=message):
            asked.add(request)
    assert not running.has_work


def test_the_tree_of_eagles_repository_is_refused_with_the_nearest():
    """Its depth does not count the first level: 7 x 10 columns are drafted for 60 tokens."""
    with pytest.raises(ConfigError, match="drafts 70 nodes, more than 64") as error:
        EngineConfig(speculation="fixed(8,10,60)")
    assert "7 draft steps or fewer, or 9 branches or fewer" in error.value.hint
    for near in ("fixed(7,10,60)", "fixed(8,9,60)"):
        assert str(EngineConfig(speculation=near).parsed()) == near


def test_sizes_of_speculation_are_said_in_one_place():
    assert str(EngineConfig(speculation="auto").parsed()) == "auto(6,3,12)"
    for name in ("num_draft_steps", "tree_topk", "num_verify_tokens"):
        with pytest.raises(ValueError, match="Extra inputs are not permitted"):
            EngineConfig(**{"speculation": "fixed(4,1,5)", name: 6})


def test_a_head_for_another_target_is_refused(target):
    config, tensors = random_head(target)
    with pytest.raises(MismatchError, match="hidden size 16"):
        Draft(config.model_copy(update={"target_hidden_size": 16}), tensors, target)
    with pytest.raises(MismatchError, match="lm_head 000000"):
        Draft(config.model_copy(update={"target_lm_head_sha256": "0" * 64}), tensors, target)


def test_text_that_the_head_hardly_helps_is_logged_with_its_share(target, caplog, monkeypatch):
    monkeypatch.setattr("eyas.engine.engine.TAU_WINDOW", 4)
    drafting = engine(target, speculation="fixed(1,1,2)")
    with caplog.at_level(logging.INFO, "eyas.engine"):
        for accepted in (1, 0, 0, 0, 0, 1):
            for _ in range(4):
                drafting._watch_tau(accepted)
    told = [record.getMessage() for record in caplog.records if "tau is" in record.getMessage()]
    figures = re.compile(r"helps (\d+)% .*, (\d of \d) stretches.* tau is (\S+) ")
    shares = [("50", "1 of 2", "1.00"), ("67", "2 of 3", "1.00"), ("80", "4 of 5", "1.00")]
    assert [figures.findall(one) for one in told] == [[one] for one in shares]
    assert all("Prompts unlike its own do that" in one for one in told)
    caplog.clear()
    with caplog.at_level(logging.INFO, "eyas.engine"):
        asked = requests(4, ignore_eos=True, max_tokens=40)
        list(engine(target, speculation="fixed(1,1,2)").run(asked))
    assert any("stretches" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("free", "sizes", "fits"),
    [
        (2_000_000, {"max_batch": 500}, r"num_pages=\d+, or max_batch=\d+$"),
        (2_000_000, {"max_batch": 20}, r"num_pages=\d+, or max_batch=\d+, or max_length=\d+$"),
        (2_000_000, {"num_pages": 50_000_000}, r"num_pages=\d+$"),
        (150_000, {}, r"max_length=\d+ with num_pages=\d+$"),
        (100, {}, None),
    ],
)
def test_caches_beyond_the_memory_are_refused_with_what_fits(
    target, monkeypatch, free, sizes, fits
):
    monkeypatch.setattr("eyas.engine.engine.free_memory", lambda: free)
    with pytest.raises(ConfigError) as refused:
        engine(target, **sizes)
    needed = r"need [\d,.]+ .B of memory; [\d.]+ (bytes|.B) are free"
    assert re.search(needed, refused.value.what)
    if fits is None:
        assert "more memory" in refused.value.hint
        return
    assert re.search(fits, refused.value.hint)
    for way in refused.value.hint.removeprefix("what fits: ").split(", or "):
        named = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", way)}
        taken = engine(target, **{**sizes, **named})
        head = taken.rounds.head
        caches = (taken.rounds._cache, head.cache, head.features)
        size = sum(cache.data.nbytes for cache in caches)
        assert 0.5 * free < size <= free
    monkeypatch.setattr("eyas.engine.engine.free_memory", lambda: None)
    engine(target)
