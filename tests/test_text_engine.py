"""Text's drafts in the engine: no token changes, whatever drafts, and what a request may ask."""

from eyas.engine.drafters import DraftError
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.model.target import Target
from tests import tiny_engine
from tests.tiny_engine import EVERYTHING, decoded, plainly, requests

folder, target = tiny_engine.folder, tiny_engine.target
costs_of_this_test = tiny_engine.costs_of_this_test


def engine(target: Target, head: bool = True, **config: object) -> Engine:
    made = tiny_engine.engine(target, head, **{"speculation": "auto", **config})
    policy = made.rounds.policy
    policy.costs = EVERYTHING
    return made


def repeating(count: int, **params: object) -> list[Request]:
    """Prompts that repeat themselves: text always drafts."""
    return [
        Request(one.id, tuple((one.prompt_ids * 30)[: 12 + 5 * index]), one.params, one.speculation)
        for index, one in enumerate(requests(count, **params))
    ]


def test_requests_may_do_without_text(target):
    asked = [Request(one.id, one.prompt_ids, one.params, text_drafts=False) for one in repeating(4)]
    drafting = engine(target)
    assert decoded(list(drafting.run(asked))) == plainly(target, repeating(4))
    assert drafting.metrics()["accepted_text"] == drafting.metrics()["accepted_both"] == 0
    off = engine(target, text_drafts=False)
    assert decoded(list(off.run(repeating(4)))) == plainly(target, repeating(4))
    assert off.metrics()["accepted_text"] == 0


def test_salts_separate_drafts(target):
    """A request's rounds show whether an answer like its own was given."""

    def rounds_of(drafting: Engine, salt: str | None, text_drafts: bool = True) -> list[int]:
        one = requests(1, max_tokens=40, ignore_eos=True)[0]
        drafting.add(
            Request("0", one.prompt_ids, one.params, cache_salt=salt, text_drafts=text_drafts)
        )
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


def test_speculation_false(target):
    drafting = engine(target, head=False)
    found = decoded(list(drafting.run(repeating(3, speculation=False))))
    assert found == plainly(target, repeating(3))
    assert drafting.metrics()["accepted_text"] == 0


def test_a_tree_of_fixed_size_is_the_heads(target):
    drafting = engine(target, speculation="fixed(2,2,4)")
    list(drafting.run(repeating(2)))
    assert drafting.metrics()["accepted_text"] == drafting.metrics()["accepted_both"] == 0


def test_text_drafts_after_the_head_fails(target, monkeypatch):
    drafting = engine(target)

    def fail(*_: object) -> None:
        raise DraftError("broken")

    monkeypatch.setattr(drafting.rounds.head.draft, "grow", fail)
    asked = repeating(3, max_tokens=30, ignore_eos=True)
    assert decoded(list(drafting.run(asked))) == plainly(target, asked)
    assert drafting.draft_failure == "broken"
    assert drafting.metrics()["accepted_text"] > 0


def test_drafted_trees_are_returned_with_texts_nodes(target):
    drafting, seen = engine(target), set()
    for one in repeating(3, max_tokens=30):
        drafting.add(
            Request(one.id, one.prompt_ids, SamplingParams(max_tokens=30), returns_trees=True)
        )
    while drafting.has_work:
        for update in drafting.step():
            if (tree := update.tree) is None:
                continue
            assert all(parent < node for node, parent in enumerate(tree.parents))
            assert update.num_accepted_drafts in (None, len(tree.accepted)) or update.finish_reason
            for p, source in zip(tree.probabilities, tree.sources, strict=True):
                assert p is None if source == "text" else 0 <= p <= 1
            seen |= set(tree.sources)
    assert seen >= {"text", "head"}


def test_a_cost_table_without_a_head_is_measured(target, tmp_path):
    made = Engine(target, None, EngineConfig(max_batch=2, max_length=64))
    assert made.rounds.policy.costs is not None
    assert made.rounds.policy.costs.target(1) > 0
    assert list(tmp_path.glob("*.json"))
