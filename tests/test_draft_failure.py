"""A head that fails while requests run: it is switched off, and every answer is that of plain
decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, Result
from eyas.errors import EyasError, MismatchError
from eyas.evaluate.trees import decode
from eyas.log import quiet
from eyas.model.rows import Proposals
from eyas.model.target import Target
from tests import tiny_engine
from tests.serving import World, ask, health
from tests.test_distribution import COSTS
from tests.tiny_engine import (
    SAMPLED,
    decoded,
    engine,
    idle,
    plainly,
    random_head,
    requests,
    stepped,
)

ROUNDS = 4  # drafted before the head fails


folder, target = tiny_engine.folder, tiny_engine.target
costs_of_this_test = tiny_engine.costs_of_this_test


def nan_scores(proposals: Proposals) -> Proposals:
    scores = proposals.scores.copy()
    scores[-1, -1] = np.nan
    return replace(proposals, scores=scores)


def infinite_scores(proposals: Proposals) -> Proposals:
    return replace(proposals, scores=np.full_like(proposals.scores, -np.inf))


def raising(error: Exception) -> Callable[[Any], Any]:
    def fail(_: Any) -> Any:
        raise error

    return fail


FAULTS = {
    "NaN": nan_scores,
    "infinite": infinite_scores,
    "RuntimeError": raising(RuntimeError("out of luck")),
    "MemoryError": raising(MemoryError()),
}


def failing(running: Engine, fault: Callable[[Any], Any], call: str, after: int = ROUNDS) -> Engine:
    """Let a call of the draft fail from some time on. After it, the head is never asked again."""
    assert running.draft is not None
    whole, calls = getattr(running.draft, call), []

    def failed(*args: Any) -> Any:
        calls.append(None)
        assert len(calls) <= after + 1, "a head that was switched off was asked again"
        return fault(whole(*args)) if len(calls) > after else whole(*args)

    setattr(running.draft, call, failed)
    return running


def run_all(running: Engine, asked: list[Request]) -> list[Result]:
    half = len(asked) // 2
    waiting = asked[half:]
    for request in asked[:half]:
        running.add(request)

    def turn(_: int) -> bool:
        if waiting:
            running.add(waiting.pop(0))
        return bool(waiting)

    return stepped(running, turn)


FEW_PAGES = {"num_pages": 13, "max_batch": 5, "prefill_chunk": 16}


@pytest.mark.parametrize(
    ("fault", "config", "params"),
    [
        ("NaN", {}, {}),
        ("NaN", FEW_PAGES, SAMPLED),
        ("infinite", {}, SAMPLED),
        ("RuntimeError", FEW_PAGES, {}),
        ("RuntimeError", {}, {}),
        ("MemoryError", FEW_PAGES, SAMPLED),
    ],
)
def test_every_answer_is_that_of_plain_decoding(target, caplog, fault, config, params):
    asked = requests(6, shared=35, ignore_eos=True, **params)
    running = failing(engine(target, **config), FAULTS[fault], "grow")
    with caplog.at_level(logging.WARNING, "eyas.engine"):
        results = run_all(running, asked)
    assert decoded(results) == plainly(target, asked)
    assert sum(sum(one.accept_hist) for one in results) >= ROUNDS, "nothing was drafted before"
    assert running.draft_failure
    assert running.metrics()["draft_failures"] == 1
    warnings = [one for one in caplog.records if "the head failed and is off" in one.getMessage()]
    assert len(warnings) == 1
    # Later requests are served plainly, also those whose beginnings are kept from before.
    later = list(idle(running).run(asked))
    assert decoded(later) == plainly(target, asked)
    assert all(not sum(one.accept_hist) for one in later)
    idle(running)


def test_a_head_that_fails_on_prompts(target):
    asked = requests(6, shared=35, ignore_eos=True)
    running = failing(engine(target), FAULTS["RuntimeError"], "enter", after=1)
    assert decoded(run_all(running, asked)) == plainly(target, asked)
    assert running.draft_failure == "RuntimeError"  # the type alone: a message may quote a client
    idle(running)


@pytest.mark.parametrize("error", [AssertionError, IndexError, KeyError])
def test_a_broken_invariant_is_no_fault_of_the_head(target, error):
    running = failing(engine(target), raising(error("lost a page")), "grow")
    with pytest.raises(error, match="lost a page"):
        list(running.run(requests(3)))


def overflowing(target: Target) -> Draft:
    config, tensors = random_head(target)
    tensors["fc.weight"] = tensors["fc.weight"] * 1e38
    return Draft(config, tensors, target)


@pytest.mark.parametrize(("params", "speculation"), [({}, "auto"), ({"temperature": 1.0}, "fixed")])
def test_a_head_that_overflows(target, params, speculation, monkeypatch):
    monkeypatch.setattr("eyas.engine.rounds.round_costs", lambda work: COSTS)
    sizes = EngineConfig(max_batch=3, max_length=120, speculation=speculation)
    running = Engine(target, overflowing(target), sizes)
    asked = requests(4, ignore_eos=True, **{"max_tokens": 40, **params})
    assert decoded(list(running.run(asked))) == plainly(target, asked)
    assert running.draft_failure
    assert "log-probabilities are NaN or infinite" in running.draft_failure
    idle(running)


def test_an_evaluation_does_not_take_plain_rounds_for_a_result(target):
    sizes = EngineConfig(max_batch=3, max_length=120, speculation="fixed")
    running = Engine(target, overflowing(target), sizes)
    with pytest.raises(EyasError, match="the head fails on the target's features"):
        decode(running, requests(3), quiet)


def test_fewer_tokens_to_draft_than_branches_are_refused(target):
    draft = Draft(*random_head(target, draft_vocab_size=2), target)
    with pytest.raises(MismatchError, match="2 tokens to draft, the tree has 3 branches"):
        Engine(target, draft, EngineConfig(max_length=120))
    chain = EngineConfig(max_length=120, speculation="fixed(2,1,3)")
    asked = requests(3)
    assert decoded(list(Engine(target, draft, chain).run(asked))) == plainly(target, asked)


def test_a_server_goes_on_and_says_so(tmp_path):
    world = World.make(tmp_path / "target", vocab_size=320)
    plain = world.truth(max_tokens=24)[0]
    draft = Draft(*random_head(world.target, draft_vocab_size=64), world.target)
    sizes = EngineConfig(max_batch=4, max_length=256, speculation="fixed")
    running = Engine(world.target, draft, sizes, world.chat.tokenizer)
    failing(running, nan_scores, "grow", after=2)
    with world.served(running, has_head=True) as client:
        assert health(client).json() == {"status": "ok", "requests": 0}
        for _ in range(2):
            assert ask(client, max_tokens=24).choices[0].message.content == plain
        found = health(client)
        assert (found.status_code, found.json()["status"]) == (200, "ok")
        assert "the head failed and is off" in found.json()["warning"]
        assert "restart" in found.json()["warning"]
        assert client.models.list().data[0].eyas["has_head"] is False
        info = client._client.get(str(client.base_url).replace("/v1/", "/server_info")).json()
        assert info["eyas"]["has_head"] is False
        page = client._client.get(str(client.base_url).replace("/v1/", "/metrics")).text
        name = "eyas:spec_decode_draft_failures_total"
        (line,) = [line for line in page.splitlines() if line.startswith(name)]
        assert line.endswith(" 1.0")
