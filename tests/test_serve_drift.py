"""Drift: slices and windows, what the card promises, and how often the rule is wrong, by
simulation.
"""

from __future__ import annotations

import functools
import json
import logging

import numpy as np
import pytest

from eyas.builtin import head_folder
from eyas.serve.drift import LONGEST, MOST_TAGS, OTHER, Drift, DriftConfig, Ratio, Rounds
from eyas.serve.reference import Reference, promised, stated

DEPTH = 5
ROUNDS = 20  # of a request, on average


class Clock:
    """A clock that the test turns."""

    now = 0.0

    def __call__(self):
        return self.now


def answers(rng, count, accepts):
    """Histograms of requests whose chance of an acceptance differs from one to the next, the same
    at every place.
    """
    chances = np.clip(rng.normal(accepts, 0.1, count), 0.01, 0.99)
    rounds = rng.poisson(ROUNDS - 1, count) + 1
    for chance, number in zip(chances, rounds, strict=True):
        accepted = np.minimum(rng.geometric(1 - chance, number) - 1, DEPTH)
        yield np.bincount(accepted, minlength=DEPTH + 1).tolist()


@functools.cache
def true_tau(accepts):
    """What `answers` come to, over many."""
    ratio = Ratio()
    for hist in answers(np.random.default_rng(99), 60_000, accepts):
        ratio.add(hist)
    return ratio.tau


def quiet(drift, clock, rng, count, accepts, explored, requests=40):
    """The same where `auto` has stopped: some requests draft in one round, to learn what it brings;
    the others never.
    """
    for number in range(count):
        for place in range(requests):
            hist = [0]
            if place < explored:
                chance = np.clip(rng.normal(accepts, 0.1), 0.01, 0.99)
                hist = np.bincount(
                    [min(rng.geometric(1 - chance) - 1, DEPTH)], minlength=DEPTH + 1
                ).tolist()
            drift.count(Rounds(hist, ROUNDS), "/v1/chat/completions", None, 10)
        clock.now += 300
        drift.close({})
        if drift._slices["all", "all"].is_low:
            return number
    return None


def windows(drift, clock, rng, count, accepts, requests=30):
    """Let traffic come for so many windows; the number of the first at which "all" is low, else
    None.
    """
    for number in range(count):
        for hist in answers(rng, requests, accepts):
            drift.count(Rounds(hist), "/v1/chat/completions", None, 10)
        clock.now += 300
        drift.close({})
        if drift._slices["all", "all"].is_low:
            return number
    return None


def made(reference, **config):
    clock = Clock()
    return Drift(DriftConfig(**config), reference, "tiny", clock), clock


def test_error_of_tau_is_that_of_repeated_traffic():
    rng, taus, errors = np.random.default_rng(0), [], []
    for _ in range(300):
        ratio = Ratio()
        for hist in answers(rng, 40, 0.6):
            ratio.add(hist)
        taus.append(ratio.tau)
        errors.append(ratio.error(ratio.spread))
    assert np.mean(errors) == pytest.approx(np.std(taus), rel=0.12)


def test_no_false_warning_where_tau_is_the_card_s_or_just_what_is_tolerated():
    tau = true_tau(0.6)
    # at the card's; at the limit itself
    for reference, count in ((stated(tau), 500), (stated(tau / 0.95), 1500)):
        drift, clock = made(reference)
        assert windows(drift, clock, np.random.default_rng(1), count, 0.6) is None


def test_a_loose_rule_is_wrong_as_often_as_theory_says():
    """At threshold 3 Siegmund's approximation gives one warning in 118 windows: the rule's
    arithmetic, not its silence.
    """
    tau, lengths = true_tau(0.6), []
    rng = np.random.default_rng(2)
    for _ in range(25):
        drift, clock = made(stated(tau), tolerance=0.0, threshold=3.0)
        lengths.append(1 + (windows(drift, clock, rng, 1000, 0.6) or 1000))
    assert 60 < np.mean(lengths) < 240


@pytest.mark.parametrize(("accepts", "most"), [(0.5, 8), (0.4, 4)])
def test_a_fall_is_told_soon(accepts, most):
    for seed in range(10):
        drift, clock = made(stated(true_tau(0.6)))
        assert windows(drift, clock, np.random.default_rng(seed), 5, 0.6) is None
        told = windows(drift, clock, np.random.default_rng(seed), most, accepts, requests=60)
        assert told is not None


def test_it_warns_once_and_says_when_it_is_over(caplog):
    caplog.set_level(logging.INFO, logger="eyas.serve")
    drift, clock = made(stated(true_tau(0.6)))
    rng = np.random.default_rng(3)
    windows(drift, clock, rng, 20, 0.3)
    for _ in range(10):
        windows(drift, clock, rng, 1, 0.3)
    # slices
    assert [record.getMessage() for record in caplog.records].count(
        "tau has fallen under the head's card"
    ) == 4
    assert drift._slices["tag", "none"].warnings == 1
    for _ in range(40):
        windows(drift, clock, rng, 1, 0.8)
    assert "tau is back where the head's card has it" in [
        record.getMessage() for record in caplog.records
    ]
    assert not drift._slices["all", "all"].is_low


def test_a_window_has_its_time_and_its_requests():
    drift, clock = made(None)
    for hist in answers(np.random.default_rng(0), 29, 0.6):
        drift.count(Rounds(hist), "/v1/completions", "shop", 5000)
    clock.now = 301
    assert not drift.is_due
    drift.count(Rounds([1, 1]), "/generate", "shop", 10**6)
    assert drift.is_due
    drift.close({})
    assert not drift.is_due
    told = {(one["by"], one["slice"]): one for one in drift.told()["slices"]}
    assert set(told) == {
        ("all", "all"),
        ("endpoint", "/v1/completions"),
        ("endpoint", "/generate"),
        ("tag", "shop"),
        ("prompt_tokens", "under-8192"),
        ("prompt_tokens", LONGEST),
    }
    assert told["all", "all"]["windows"][0]["requests"] == told["tag", "shop"]["requests"] == 30
    assert told["endpoint", "/generate"]["windows"] == []
    assert {one["status"] for one in told.values()} == {"unknown"}
    json.dumps(drift.told(), allow_nan=False)


IDLE = "auto has stopped drafting: the head does not pay here, because of acceptance or load"


def test_a_slice_that_auto_no_longer_drafts_for_is_idle_and_said_to_be(caplog):
    """Most of what a bad head brings about: traffic changes, auto stops, and no window would ever
    close again.
    """
    caplog.set_level(logging.INFO, logger="eyas.serve")
    drift, clock = made(stated(true_tau(0.6)))
    rng = np.random.default_rng(5)
    windows(drift, clock, rng, 3, 0.6)
    quiet(drift, clock, rng, 1, 0.6, 0)
    told = {(one["by"], one["slice"]): one for one in drift.told()["slices"]}
    assert told["all", "all"]["status"] == "ok"  # one quiet look may be chance
    quiet(drift, clock, rng, 5, 0.6, 1)
    told = {(one["by"], one["slice"]): one for one in drift.told()["slices"]}
    assert {one["status"] for one in told.values()} == {"idle"}
    everything = told["all", "all"]
    assert (everything["requests"], everything["plain_requests"]) == (3 * 30 + 5, 40 + 5 * 39)
    assert everything["plain_rounds"] == 6 * 40 * ROUNDS
    assert everything["rounds"] > 3 * 30
    said = [record for record in caplog.records if record.getMessage() == IDLE]
    assert len(said) == 4  # slices, once each
    assert {record.levelname for record in said} == {"WARNING"}
    metrics = {metric.name: metric.samples for metric in drift.collect()}
    assert [one.value for one in metrics["eyas:spec_slice_is_idle"]] == [1.0] * 4
    assert {one.value for one in metrics["eyas:spec_slice_plain_rounds"]} == {6 * 40 * ROUNDS}
    windows(drift, clock, rng, 1, 0.6)
    assert drift._status(drift._slices["all", "all"]) == "ok"
    assert [record.getMessage() for record in caplog.records].count("auto drafts again") == 4


def test_a_server_that_never_drafted_has_slices_without_tau():
    drift, clock = made(stated(2.0))
    quiet(drift, clock, np.random.default_rng(0), 2, 0.6, 0)
    told = drift.told()["slices"][0]
    assert (told["status"], told["tau"], told["windows"]) == ("idle", None, [])
    assert len(list(drift.collect())) == 11
    json.dumps(drift.told(), allow_nan=False)


def test_the_few_drafts_of_an_idle_slice_are_judged_in_the_end():
    """One drafts in each look: the window closes when it is an hour old. A fall is told from what
    there is.
    """
    drift, clock = made(stated(true_tau(0.6)))
    quiet(drift, clock, np.random.default_rng(0), 11, 0.6, 1)
    assert not drift._slices["all", "all"].history
    quiet(drift, clock, np.random.default_rng(0), 1, 0.6, 1)
    (window,) = drift._slices["all", "all"].history
    assert (window.requests, window.rounds, window.seconds) == (12, 12, 12 * 300)
    for seed in range(3):
        drift, clock = made(stated(true_tau(0.6)))
        windows(drift, clock, np.random.default_rng(seed), 5, 0.6)
        assert quiet(drift, clock, np.random.default_rng(seed), 60, 0.25, 8) is not None


@pytest.mark.parametrize("accepts", [0.2, 0.4, 0.6, 0.8])
def test_windows_of_few_rounds_are_no_more_often_wrong(accepts):
    """At threshold 3 and a tau of exactly the limit: theory gives one warning in 118 windows of
    many requests.
    """
    rng, ratio, lengths = np.random.default_rng(6), Ratio(), []
    for _ in range(60_000):
        chance = np.clip(rng.normal(accepts, 0.1), 0.01, 0.99)
        ratio.add(np.bincount([min(rng.geometric(1 - chance) - 1, DEPTH)]).tolist())
    for _ in range(12):
        drift, clock = made(stated(ratio.tau), tolerance=0.0, threshold=3.0, window_s=300 / 12)
        lengths.append(1 + (quiet(drift, clock, rng, 400, accepts, 8, requests=30) or 400))
    assert np.mean(lengths) > 100


def test_tags_are_bounded():
    drift, _ = made(None)
    for number in range(100):
        drift.count(Rounds([0, 1]), "/v1/completions", f"tag-{number}", 1)
    tags = [slice_ for by, slice_ in drift._slices if by == "tag"]
    assert len(tags) == MOST_TAGS + 1
    assert drift._slices["tag", OTHER].total_requests == 100 - MOST_TAGS


def test_requests_without_drafts_say_nothing():
    drift, _ = made(None)
    drift.count(Rounds([]), "/v1/completions", None, 1)
    drift.count(Rounds([0, 0]), "/v1/completions", None, 1)
    assert drift.told()["slices"] == []


def test_less_is_expected_of_shallower_drafts():
    reference = Reference(tau=2.5, low=2.4, survival=(0.8, 0.5, 0.2), source="x")
    assert reference.lowest({}) == reference.lowest({3: 10}) == reference.lowest({7: 1}) == 2.4
    assert reference.lowest({1: 5}) == pytest.approx(2.4 * 1.8 / 2.5)
    assert reference.lowest({1: 5, 3: 5}) == pytest.approx(2.4 * (1.8 + 2.5) / 2 / 2.5)
    assert stated(3.0).lowest({1: 5}) == 3.0


def test_the_packaged_head_s_card_is_read():
    reference = promised(head_folder())
    assert reference is not None
    assert reference.source == "README.md"
    assert reference.tau == pytest.approx(1 + sum(reference.survival), abs=0.01)
    assert reference.tau - 0.15 < reference.low < reference.tau


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("eval.json", {"tau": 3.0, "tau_interval": [2.8, 3.2]}, (3.0, 2.8)),
        (
            "manifest.json",
            {"facts": {"measured": {"tau": 2.0, "accept_hist": [50, 0, 50]}}},
            (2.0, 2.0 - 1.96 * 0.1),
        ),
        ("README.md", "# x\n\ntau 3.39 on held-out answers\n", (3.39, 3.39)),
        (
            "README.md",
            "tau 3.39 (95 %: 3.30-3.48) on held-out answers (emitted tokens per round).\n",
            (3.39, 3.30),
        ),
        ("README.md", "tau 3.39 (3.30-3.48)\n\naccept_hist: 1, 2\n", (3.39, 3.30)),
    ],
)
def test_cards_are_read_wherever_they_stand(tmp_path, name, content, expected):
    (tmp_path / "sglang").mkdir()
    (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    for folder in (tmp_path, tmp_path / "sglang"):
        reference = promised(folder)
        assert reference is not None
        assert (reference.tau, reference.low) == pytest.approx(expected)


@pytest.mark.parametrize(
    "content", [{}, {"tau": "3"}, {"tau": 0.5}, {"tau": float("nan")}, [], {"measured": 3}]
)
def test_a_folder_that_promises_nothing(tmp_path, content):
    (tmp_path / "eval.json").write_text(json.dumps(content))
    (tmp_path / "manifest.json").write_text("{")
    assert promised(tmp_path) is None
