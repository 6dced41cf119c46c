"""Text's drafts in the engine: no token changes, whatever drafts, and what a request may ask."""

from dataclasses import replace

import pytest

from eyas.engine.drafters import DraftError
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request
from eyas.model.target import Target
from tests import tiny_engine
from tests.tiny_engine import EVERYTHING, decoded, plainly, requests

folder, target = tiny_engine.folder, tiny_engine.target
costs_of_this_test = tiny_engine.costs_of_this_test


def engine(target: Target, head: bool = True, **config: object) -> Engine:
    made = tiny_engine.engine(target, head, **{"speculation": "auto", **config})
    made.rounds.policy.costs = EVERYTHING
    return made


def repeating(count: int, **params: object) -> list[Request]:
    """Prompts that repeat themselves: text always drafts."""
    return [
        replace(one, prompt_ids=(one.prompt_ids * 30)[: 12 + 5 * index])
        for index, one in enumerate(requests(count, **params))
    ]


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({"text_drafts": False}, {}),
        ({}, {"text_drafts": False}),
        ({"speculation": False}, {"head": False}),
        ({}, {"speculation": "fixed(2,2,4)"}),
    ],
    ids=str,
)
def test_no_text_is_drafted_where_it_is_off(target, options, config):
    asked = [replace(one, **options) for one in repeating(4)]
    drafting = engine(target, **config)
    assert decoded(list(drafting.run(asked))) == plainly(target, repeating(4))
    assert drafting.metrics()["accepted_text"] == drafting.metrics()["accepted_both"] == 0


def test_nothing_of_an_answer_is_drafted_under_another_salt(target):
    def rounds_of(drafting: Engine, salt: str | None, text_drafts: bool = True) -> list[int]:
        one = requests(1, max_tokens=40, ignore_eos=True)[0]
        drafting.add(replace(one, cache_salt=salt, text_drafts=text_drafts))
        rounds = []
        while drafting.has_work:
            rounds += [update.token_ids for update in drafting.step()]
        found = [token for tokens in rounds for token in tokens]
        assert {("0", 0): (found, "length")} == plainly(target, [one])
        return [len(tokens) for tokens in rounds]

    fresh = rounds_of(engine(target, head=False), "b")
    drafting = engine(target, head=False)
    rounds_of(drafting, "off", text_drafts=False)
    for salt in ("a", None, "off", "b"):
        assert rounds_of(drafting, salt) == fresh, salt
    again = rounds_of(drafting, "b")
    assert len(again) < len(fresh)
    assert len(again) <= 3 + 40 // 8


def test_tau_is_of_rounds_that_the_head_drafted_in(target):
    drafting = engine(target, head=False)
    results = list(drafting.run(repeating(3)))
    assert drafting.metrics()["accepted_text"] > 0
    assert all(sum(result.accept_hist) == 0 for result in results)


def test_text_goes_on_where_the_head_fails(target, monkeypatch):
    drafting = engine(target)

    def fail(*_: object) -> None:
        raise DraftError("broken")

    monkeypatch.setattr(drafting.rounds.head.draft, "grow", fail)
    asked = repeating(3, max_tokens=30, ignore_eos=True)
    assert decoded(list(drafting.run(asked))) == plainly(target, asked)
    assert drafting.draft_failure == "broken"
    assert drafting.metrics()["accepted_text"] > 0


def test_a_cost_table_without_a_head_is_measured(target, tmp_path):
    made = Engine(target, None, EngineConfig(max_batch=2, max_length=64))
    assert made.rounds.policy.costs is not None
    assert made.rounds.policy.costs.target(1) > 0
    assert list(tmp_path.glob("*.json"))
