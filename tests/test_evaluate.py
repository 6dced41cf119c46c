"""Chains on features against the engine that they predict; figures of parts and ceilings."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.artifact import Artifact, Manifest
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.errors import EmptyInputError, MismatchError, WorseHeadError
from eyas.evaluate import walks
from eyas.evaluate.breakdown import AnswerCounts, figures, tau_ceiling, vocabulary_figures
from eyas.evaluate.comparison import _changes, change_of_tau, compare, described, refuse_worse
from eyas.evaluate.evaluate import EvalConfig, cautions, evaluate
from eyas.model.target import Target
from eyas.operators.chain import leading_matches, runs
from eyas.operators.head import load_head
from eyas.operators.tensors import arrays_of
from eyas.operators.ttt import Slots
from eyas.shards import Features
from eyas.tau import RoundCounts, bootstrap
from eyas.train.trainer import TrainConfig, train
from tests.tiny import tiny_target
from tests.tiny_batch import made_up_batch
from tests.tiny_features import greedy_answers, samples_of, write_features

K = 4
TRAIN = TrainConfig(
    head={"draft_vocab_size": 200},
    objective={"num_ttt_steps": K},
    epochs=40,
    batches={"tokens": 512},
    learning_rate=1e-2,
    dtype="float32",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target, its greedy answers, their features in both splits, and a head that overfits."""
    folder = tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)
    target = Target.load(folder)
    conversations = greedy_answers(folder, 16, max_tokens=24)
    samples = samples_of(target, conversations, "seen")
    features = write_features(tmp_path_factory.mktemp("features"), target, samples, samples)
    head = Artifact(str(tmp_path_factory.mktemp("head")))
    train(TRAIN, str(folder), Features(features), head)
    return folder, target, conversations, features, head


def run(target, head, output, features, **settings) -> Manifest:
    output = output if isinstance(output, Artifact) else Artifact(str(output))
    config = EvalConfig(trees=("fixed(1,1,2)",), **settings)
    return evaluate(config, str(target), head.url, output, features)


def held_out(features):
    return Features(features, "held_out")


def test_predicts_what_the_engine_does(made, tmp_path):
    """Chains in fp32: the engine's histogram of accepted drafts, round for round."""
    folder, target, conversations, features, head = made
    output = Artifact(str(tmp_path))
    manifest = run(folder, head, output, held_out(features), num_draft_steps=K)
    result = output.read_json("eval.json")
    loaded = load_head(head.local_path(""))
    engine = Engine(
        target,
        Draft(loaded.config, arrays_of(loaded.state_dict()), target),
        EngineConfig(speculation=f"fixed({K},1,{K + 1})"),
    )
    requests = [
        Request(str(number), tuple(prompt), SamplingParams(max_tokens=len(answer)))
        for number, (prompt, answer) in enumerate(conversations)
    ]
    hist = [0] * (K + 1)
    for served in engine.run(requests):
        assert served.token_ids == conversations[int(served.request_id)][1]
        hist = [total + count for total, count in zip(hist, served.accept_hist, strict=True)]
    assert sum(hist[1:]) > 20, "a head that accepts nothing would prove nothing"
    assert result["accept_hist"] == hist
    emitted = sum(len(answer) - 1 for _, answer in conversations)
    assert result["tau"] == pytest.approx(emitted / sum(hist))
    assert result["greedy_share"] == 1.0
    assert result["rounds"] == sum(hist)
    assert result["tokens"] == sum(len(answer) for _, answer in conversations)
    assert 0 < result["draft_vocabulary_coverage"] <= 1
    assert result["tau_by_num_draft_steps"][-1] == result["tau"]
    assert result["tau_by_num_draft_steps"] == sorted(result["tau_by_num_draft_steps"])
    assert set(result["by_source"]) == {"source-0", "source-1"}
    assert "greedy" in result["assumes"]
    assert result["tau_interval"][0] < result["tau"] < result["tau_interval"][1]
    assert result["tau"] <= result["tau_ceiling"] <= K + 1
    longer = sum(len(answer) > 1 for _, answer in conversations)
    languages = result["by_language"].values()
    assert sum(one["answers"] for one in languages) == result["answers"] == longer
    assert sum(one["rounds"] for one in result["by_source"].values()) == result["rounds"]
    assert manifest.facts["tau"] == result["tau"]
    assert run(folder, head, tmp_path, held_out(features), num_draft_steps=K) == manifest


def test_a_shorter_chain_is_the_same_as_evaluating_it(made, tmp_path, monkeypatch):
    folder, _, _, features, head = made
    monkeypatch.setattr(walks, "BATCH_TOKENS", 100)
    taus = []
    for steps in (2, K):
        output = Artifact(str(tmp_path / str(steps)))
        run(folder, head, output, held_out(features), num_draft_steps=steps)
        taus.append(output.read_json("eval.json")["tau_by_num_draft_steps"])
    assert taus[1][:2] == taus[0]


def test_what_does_not_belong_together_is_refused(made, tmp_path):
    folder, _, conversations, features, head = made
    other = tiny_target(tmp_path / "other", num_hidden_layers=8, seed=1)
    loaded = Target.load(other)
    samples = samples_of(loaded, conversations[:2], "other")
    others = write_features(tmp_path / "features", loaded, [], samples)
    for of_target, of_features in ((other, features), (folder, others)):
        with pytest.raises(MismatchError, match="not of one target"):
            run(of_target, head, tmp_path / "out", held_out(of_features))
    assert not (tmp_path / "out").exists()


def test_nothing_held_out(made, tmp_path):
    folder, target, _, _, head = made
    samples = samples_of(target, [([5, 6, 7], [8])], "short")
    features = write_features(tmp_path / "features", target, [], samples)
    with pytest.raises(EmptyInputError, match="no answer of two tokens"):
        run(folder, head, tmp_path / "out", held_out(features))


def test_leading_matches_stop_at_a_miss_and_at_the_end_of_the_answer():
    batch = made_up_batch([[False, True, True, True, True, False], [True] * 4])
    slots = Slots.where(torch.tensor([[True] * 3 + [False] * 3, [True] * 2 + [False] * 4]))
    x, y = batch.tokens_BT.tolist()
    drafts_NK = torch.tensor(
        [
            [x[2], x[3], x[4], x[5]],  # the answer ends at x[4]
            [x[3], x[4] + 1, x[5], 0],
            [x[4] + 1, x[5], 0, 0],
            [y[2], y[3], 0, 0],  # the row ends at y[3]; padding is zeros
            [y[3], 0, 0, 0],
        ]
    )
    assert leading_matches(drafts_NK, batch, slots).tolist() == [3, 1, 0, 2, 1]


@given(st.lists(st.booleans(), max_size=12))
def test_runs_are_the_true_stretches(flags):
    found, true = list(runs(flags)), [at for at, flag in enumerate(flags) if flag]
    assert [at for first, end in found for at in range(first, end)] == true
    assert all(end < start for (_, end), (start, _) in pairwise(found))


@given(
    st.lists(st.lists(st.booleans(), min_size=2, max_size=9), min_size=1, max_size=3),
    st.integers(1, 4),
)
@settings(max_examples=50)
def test_the_ceiling_on_tau_is_the_best_of_all_ways_to_go_through_the_answers(answers, steps):
    """A round may accept any number of drafts up to what the vocabulary allows."""

    def fewest(answer):
        @cache
        def rounds_from(at):  # tokens up to and including `at` are emitted
            if at == len(answer) - 1:
                return 0
            reached, options = at + 1, [rounds_from(at + 1)]
            while reached - at <= steps and answer[reached] and reached < len(answer) - 1:
                reached += 1
                options.append(rounds_from(reached))
            return 1 + min(options)

        return rounds_from(0)

    emitted = sum(len(answer) - 1 for answer in answers)
    assert tau_ceiling(answers, steps) == pytest.approx(emitted / sum(map(fewest, answers)))


def test_what_the_vocabulary_allows_pictured():
    answer = [True, True, True, False, True, True, True, True, True]
    assert tau_ceiling([answer], 3) == pytest.approx(8 / 3)
    assert vocabulary_figures([answer, [False]], 3) == {
        "draft_vocabulary_coverage": 0.8,
        "tau_ceiling": pytest.approx(8 / 3),
        "tau_ceiling_full_vocabulary": 4.0,
    }
    assert vocabulary_figures([], 3)["draft_vocabulary_coverage"] == 0


def test_figures_of_parts_add_up_to_the_whole():
    answers = []
    for source, language, accepted in (
        ("a", "en", [3, 0]),
        ("b", "de", [1, 1, 2]),
        ("a", "de", []),
    ):
        answers.append(AnswerCounts(f"{len(answers)}", source, language, RoundCounts(3)))
        answers[-1].counts.add_rounds(accepted)
    whole = figures(answers, 3)
    assert whole["accept_hist"] == [1, 2, 1, 1]
    assert whole["tau"] == pytest.approx(12 / 5)
    assert (whole["rounds"], whole["answers"], whole["tau_interval"]) == (5, 3, None)
    by_source = {name: (one["tau"], one["answers"]) for name, one in whole["by_source"].items()}
    assert by_source == {"a": (2.5, 2), "b": (7 / 3, 1)}
    assert {name: one["rounds"] for name, one in whole["by_language"].items()} == {"de": 3, "en": 2}


numbers = itertools.count()  # of prompts


def answer(emitted, rounds, source="a", prompt=None):
    counts = RoundCounts(99)
    counts.accept_hist[0], counts.accept_hist[emitted - rounds] = rounds - 1, 1
    assert (counts.emitted, counts.rounds) == (emitted, rounds)
    return AnswerCounts(prompt or f"{next(numbers)}", source, "en", counts)


def test_answers_to_one_prompt_are_one_row_of_an_interval():
    """The same answer five times is no more evidence than once; so for a pair of heads."""
    rng = random.Random(0)
    once = [answer(61, rng.randint(20, 60), prompt=f"p{number}") for number in range(20)]
    five = [one for one in once for _ in range(5)]
    assert figures(five, 99)["tau_interval"] == figures(once, 99)["tau_interval"]
    assert (figures(five, 99)["answers"], figures(five[:25], 99)["tau_interval"]) == (100, None)
    better = [replace(one, counts=answer(61, one.counts.rounds - 3).counts) for one in once]
    alone = compare(once, better)
    together = compare(five, [one for one in better for _ in range(5)])
    assert together["all"]["change_interval"] == alone["all"]["change_interval"]
    assert (together["all"]["answers"], together["all"]["prompts"]) == (100, 20)


def answers(gain, num_answers=60, source="a"):
    """Hard and easy ones, the same for both heads; `gain` rounds fewer in each."""
    rng = random.Random(0)
    return [answer(61, rng.randint(20, 40) - gain, source) for _ in range(num_answers)]


def test_intervals_are_paired_so_that_a_small_gain_is_seen():
    """The prompts' spread is four times the gain: unpaired intervals would overlap."""
    changes = compare(answers(0), answers(2))
    low, high = changes["all"]["change_interval"]
    assert 0.04 < low < changes["all"]["change"] < high
    assert changes["all"]["answers"] == 60
    refuse_worse(changes, 0.0)
    same = compare(answers(1), answers(1))["all"]
    assert (same["change"], same["change_interval"]) == (0.0, [0.0, 0.0])


def test_what_rests_on_few_conversations_says_so_and_its_interval_is_wider():
    """By Student's t: of 14 by a seventh, of 300 by nothing; none of 5."""
    rng = random.Random(1)
    pairs = [(answer(61, 30), answer(61, rng.randint(24, 34))) for _ in range(300)]
    widths = {}
    for number in (14, 300):
        rows = np.array([[61, new.counts.rounds, 61, 30] for _, new in pairs[:number]], dtype=float)
        low, high = bootstrap(rows, _changes)
        found = change_of_tau(pairs[:number])["change_interval"]
        widths[number] = (found[1] - found[0]) / (high - low)
    assert widths[14] == pytest.approx(2.160 / 1.960 * (14 / 13) ** 0.5, rel=0.05)
    assert widths[300] == pytest.approx(1, rel=0.02)
    few = compare(*zip(*pairs[:5], strict=True))["all"]
    assert few["change_interval"] is None
    assert described(few) == "unknown: 5 prompts, fewer than 6"
    for number, said in ((29, ["29 (all), 29 (a)"]), (30, [])):
        against = compare(*zip(*pairs[:number], strict=True))
        warned = list(cautions({"against": against}, EvalConfig(), 1))
        assert [one.partition("few prompts, ")[2].partition(":")[0] for one in warned] == said


@pytest.mark.parametrize(
    ("other", "new", "message", "hint"),
    [
        (answers(0), answers(0), "not shown to be better", "keep the other head"),
        (answers(0), answers(-2), "not shown to be better", "keep the other head"),
        (
            [answer(60, 30), answer(60, 30), answer(60, 30)],
            [answer(60, 20), answer(60, 31), answer(60, 30)],
            "not shown to be better",
            "measure on more prompts",
        ),
        (
            answers(0) + answers(0, 30, "b"),
            answers(5) + answers(-2, 30, "b"),
            r"loses more than 2\.0% on b: tau \d\.\d+ -> \d\.\d+ \(-",
            "eval.tolerance",
        ),
        (
            [*answers(0), answer(60, 30, "b"), answer(60, 30, "b")],
            [*answers(5), answer(60, 32, "b"), answer(60, 28, "b")],
            r"not shown to lose less than 2\.0% on b",
            "more prompts",
        ),
        (
            [answer(60, 30)],
            [AnswerCounts("p", "a", "en", RoundCounts(3))],
            "unknown",
            "keep the other",
        ),
    ],
    ids=["equal", "worse", "too few", "worse on a source", "too few of a source", "no round"],
)
def test_no_evidence_is_no_improvement(other, new, message, hint):
    with pytest.raises(WorseHeadError, match=message) as raised:
        refuse_worse(compare(other, new), 0.02)
    assert raised.value.exit_code == 3
    assert hint in raised.value.hint
