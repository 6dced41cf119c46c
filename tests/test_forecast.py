"""The forecast of tau by data: its interval holds what it says, points that allow none get none;
`eyas plan --forecast` on runs of `eyas train`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.artifact import Artifact, Manifest
from eyas.errors import ConfigError, EmptyInputError, InputError, MismatchError, MissingInputError
from eyas.model.target import Target
from eyas.plan.forecast import (
    EXPONENTS_E,
    FURTHEST,
    RUN_NOISE,
    CurvePoint,
    curve_at,
    fit_curves,
    forecast,
    read_runs,
)
from eyas.shards import Features
from eyas.train.trainer import TrainConfig, train
from tests.test_cli import run_eyas
from tests.tiny import tiny_target
from tests.tiny_features import greedy_answers, samples_of, write_features

EIGHTHS = (1 / 8, 1 / 4, 1 / 2, 1)
MOST = 800_000  # answer tokens of the largest run


def curve_of(exponent: float, ceiling: float, gap: float, ratios: Any) -> np.ndarray:
    return ceiling - gap * np.asarray(ratios, dtype=float) ** -exponent


class World:
    """Conversations that are easy or hard, and heads of a seed's luck that meet them."""

    HARDNESS = 0.3

    def __init__(self, seed: int, conversations: int = 48, luck: float = RUN_NOISE) -> None:
        self.rng, self.luck = np.random.default_rng(seed), luck
        self.ease_C = self._ease(conversations, self.rng)
        self.tokens_C = self.rng.integers(20, 160, conversations)

    def _ease(self, count: int, rng: np.random.Generator) -> np.ndarray:
        drawn = rng.standard_normal(count)
        return np.asarray(np.exp(self.HARDNESS * drawn - self.HARDNESS**2 / 2))

    def run(self, tau: float, answer_tokens: float) -> CurvePoint:
        """A head that accepts tau - 1 drafts a round on average, measured on all conversations."""
        mine_C = 1.0 + 0.12 * self.rng.standard_normal(len(self.ease_C))
        accepted_C = (tau * (1 + self.luck * self.rng.standard_normal()) - 1) * self.ease_C * mine_C
        rounds_C = np.maximum(1, np.round(self.tokens_C / (1 + accepted_C)))
        tokens = tuple(self.tokens_C.tolist())
        return CurvePoint("run", round(answer_tokens), tokens, tuple(rounds_C.tolist()), 7)

    def runs(self, taus: Any, shares: Any = EIGHTHS) -> list[CurvePoint]:
        return [self.run(tau, MOST * share) for tau, share in zip(taus, shares, strict=True)]

    def of_all_traffic(self, tau: float) -> float:
        """tau over more conversations than anybody measures: tokens by rounds."""
        ease = self._ease(100_000, np.random.default_rng(1))
        return float(1 / np.mean(1 / (1 + (tau - 1) * ease)))


@pytest.mark.parametrize("truth", [(0.15, 4.5, 2.2), (0.3, 3.4, 1.0), (0.6, 2.8, 0.45)])
def test_the_interval_holds_tau_as_often_as_it_says(truth):
    """95 of 100: of 80 curves, 70 or more hold it with a probability above 0.99."""
    held: dict[int, list[bool]] = {2: [], 8: []}
    widths = []
    for seed in range(80):
        world = World(seed)
        taus = curve_of(*truth, EIGHTHS)
        found = forecast(world.runs(taus), [MOST * multiple for multiple in held])
        for one in found:  # eight times the data: where it is not left out
            multiple = one.answer_tokens // MOST
            tau = world.of_all_traffic(float(curve_of(*truth, multiple)))
            held[multiple].append(one.interval[0] <= tau <= one.interval[1])
        widths.append(np.ptp(found[0].interval))
    assert len(held[2]) == 80
    assert all(np.mean(of_multiple) >= 70 / 80 for of_multiple in held.values()), held
    assert np.mean(widths) < 0.6  # it does not hold tau for being wide


@given(
    st.sampled_from(EXPONENTS_E.tolist()),
    st.floats(2.0, 7.9),
    st.floats(0.05, 0.9),
    st.sampled_from([EIGHTHS, (0.25, 0.5, 1), (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)]),
)
def test_a_curve_without_noise_is_found_again(exponent, ceiling, gap, shares):
    ratios = np.array(shares)
    tau = curve_of(exponent, ceiling, gap, ratios)
    fit = fit_curves(tau[None], np.ones(len(ratios)), ratios, 8.0)
    places = np.array([1.0, 4.0])
    expected = curve_of(exponent, ceiling, gap, places)
    assert curve_at(fit, places)[0] == pytest.approx(expected, abs=2e-3)


@given(
    st.lists(st.floats(1, 8), min_size=4, max_size=4),
    st.lists(st.floats(0.1, 100), min_size=4, max_size=4),
)
def test_no_fit_falls_or_leaves_what_a_chain_can_reach(taus, weights):
    fit = fit_curves(np.array([taus]), np.array(weights), np.array(EIGHTHS), 8.0)
    (curve,) = curve_at(fit, np.array([1 / 8, 1 / 2, 1, 2, 16, 1e6]))
    assert (np.diff(curve) >= -1e-9).all()
    assert curve.max() <= 8.0 + 1e-9
    # and none is nearer: a flat line is one of them
    flat = np.average(taus, weights=weights)
    left = np.dot(weights, (np.array(taus) - curve_at(fit, np.array(EIGHTHS))[0]) ** 2)
    assert left <= np.dot(weights, (np.array(taus) - flat) ** 2) + 1e-6


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(4)))
def test_the_order_of_runs_does_not_matter(order):
    runs = World(3).runs(curve_of(0.3, 3.4, 1.0, EIGHTHS))
    shuffled = [runs[at] for at in order]
    assert forecast(runs, [2 * MOST]) == forecast(shuffled, [2 * MOST])


RISING = curve_of(0.3, 3.4, 1.0, EIGHTHS)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (World(1).runs([2.0, 2.0, 2.0, 2.0]), "within chance"),
        (World(1).runs([2.2, 2.1, 2.0, 1.9]), "within chance"),
        # faster with every doubling: a head that has only begun to learn
        (World(2).runs([1.05, 1.1, 1.3, 2.4]), "no power law"),
        (World(2, conversations=7).runs([1.11, 1.19, 1.24, 1.69]), "no power law"),
        (World(3, conversations=5).runs(RISING), "5 held-out conversations"),
    ],
)
def test_runs_that_allow_no_forecast(runs, message):
    with pytest.raises(EmptyInputError, match=message):
        forecast(runs, [2 * MOST])


def test_too_few_amounts_and_too_far():
    with pytest.raises(ConfigError, match="fewer than 3 amounts"):
        forecast(World(0).runs([1.6, 2.0, 2.1], [0.5, 1, 1]), [2 * MOST])
    with pytest.raises(ConfigError, match="more than 16 times"):
        forecast(World(0).runs([1.6, 1.8, 2.0, 2.2]), [FURTHEST * MOST + 1])


def test_a_gain_less_certain_than_the_rise_is_left_out():
    """Three runs close together do not say what twice the data brings."""
    world = World(4, luck=0.0)
    close = world.runs([2.0, 2.12, 2.2], (0.5, 0.7, 1.0))
    assert not forecast(close, [2 * MOST])
    wider = world.runs([1.5, 2.0, 2.4], (0.25, 0.5, 1.0))
    assert [one.answer_tokens for one in forecast(wider, [2 * MOST, FURTHEST * MOST])] == [2 * MOST]


def test_more_runs_at_the_same_shares_narrow_the_gain():
    taus, world = curve_of(0.3, 3.4, 1.0, EIGHTHS), World(5)
    few = world.runs(taus)
    many = [*few, *(world.run(tau, MOST * one) for tau, one in zip(taus, EIGHTHS, strict=True))]
    widths = [float(np.ptp(forecast(runs, [8 * MOST])[0].gain_interval)) for runs in (few, many)]
    assert widths[1] < widths[0]


# Runs and the command


def made_up_run(folder: Path, point: CurvePoint, **changes: Any) -> Artifact:
    """A finished output of `eyas train` with this point; changes: of config, features, or facts."""
    features = changes.pop("features", "one")
    config = {"data_share": point.answer_tokens / MOST, "seed": 0}
    config |= {"head": {"draft_vocab_size": 64}, **changes.pop("config", {})}
    given_features = Manifest(stage="capture", identity=features, config={}, counts={}, files={})
    artifact = Artifact(str(folder))
    artifact.begin("made up")
    counts = {"emitted": point.emitted, "rounds": point.rounds}
    rows = [{"step": 1}, {"step": 2, "held_out_tau": point.tau, "held_out_counts": counts}]
    if changes.pop("is_old", False):
        del rows[1]["held_out_counts"]
    artifact.write_jsonl("metrics.jsonl", rows)
    held_out = {"tau": point.tau, "step": 2, "samples": len(point.rounds), "num_draft_steps": 7}
    facts, counts = {"held_out": held_out, **changes}, {"answer_tokens": point.answer_tokens}
    artifact.finish("train", config, {"features": given_features}, counts, facts)
    return artifact


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    points = World(7).runs(curve_of(0.2, 4.5, 2.0, EIGHTHS))
    return [made_up_run(tmp_path / f"run-{at}", one).url for at, one in enumerate(points)]


class TestCommand:
    def test_table_and_json(self, runs: list[str]) -> None:
        shown = run_eyas("plan", "--forecast", *runs)
        assert shown.exit_code == 0, shown.output
        for words in ("measured", "100,000", "forecast", "1,600,000"):
            assert words in shown.stdout
        found = json.loads(run_eyas("plan", "--forecast", *runs, "--json").stdout)
        assert [one["answer_tokens"] for one in found["runs"]] == [100_000, 200_000, 400_000, MOST]
        assert [one["answer_tokens"] // MOST for one in found["forecasts"]] == [2, 4, 8, 16]
        taus = [one["tau"] for one in (*found["runs"], *found["forecasts"])]
        assert taus == sorted(taus)
        assert json.loads(run_eyas("plan", "--forecast", *runs, runs[0], "--json").stdout) == found

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["RUNS/run-0", "RUNS/run-1"], "one run file"),
            (["--forecast", "RUNS/run-1", "RUNS/run-2"], "fewer than 3 amounts"),
            (["--forecast", "RUNS/none"], "RUNS/none"),
        ],
    )
    def test_refusals(
        self, runs: list[str], tmp_path: Path, words: list[Any], message: str
    ) -> None:
        shown = run_eyas("plan", *(str(word).replace("RUNS", str(tmp_path)) for word in words))
        assert shown.exit_code == 2
        assert message.replace("RUNS", str(tmp_path)) in shown.stderr
        assert shown.stderr.count("error:") == 1


class TestRuns:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"features": "two"}, "features or start"),
            ({"config": {"head": {"draft_vocab_size": 32}}}, "differ in head"),
        ],
    )
    def test_runs_that_cannot_be_compared(
        self, runs: list[str], tmp_path: Path, changes: dict[str, Any], message: str
    ) -> None:
        other = made_up_run(tmp_path / "other", World(8).run(2.0, 5), **changes)
        with pytest.raises(MismatchError, match=message):
            read_runs([*runs, other.url])

    def test_another_seed_is_a_further_point(self, runs: list[str], tmp_path: Path) -> None:
        other = made_up_run(tmp_path / "other", World(8).run(2.0, MOST), config={"seed": 1})
        assert len(read_runs([*runs, other.url])) == 5

    def test_what_is_no_run(self, tmp_path: Path) -> None:
        point, capture = World(8).run(2.0, 5), Artifact(str(tmp_path / "features"))
        capture.begin("made up")
        capture.finish("capture", {}, {}, {})
        unmeasured = made_up_run(tmp_path / "other", point, held_out={"step": 0})
        old = made_up_run(tmp_path / "old", point, is_old=True)
        for url, error, message in (
            (unmeasured.url, EmptyInputError, "measured no tau"),
            (old.url, MissingInputError, "older version"),
            (str(tmp_path / "nowhere"), MissingInputError, "nowhere"),
            (capture.url, InputError, "holds 'capture', not 'train'"),
        ):
            with pytest.raises(error, match=message):
                read_runs([url])

    def test_trained_heads_are_read_as_they_measured(self, tmp_path: Path) -> None:
        folder = tiny_target(tmp_path / "target", num_hidden_layers=8)
        target = Target.load(folder)
        samples = samples_of(target, greedy_answers(folder, 24), "sample")
        made = write_features(tmp_path / "features", target, samples[:16], samples[16:])
        outputs = []
        small = {"head": {"draft_vocab_size": 64}, "objective": {"num_ttt_steps": 2}, "epochs": 2}
        small |= {"batches": {"tokens": 64}, "learning_rate": 3e-3, "dtype": "float32"}
        for share in (0.25, 0.5, 1.0):
            config = TrainConfig(**small, data_share=share)
            output = Artifact(str(tmp_path / "heads" / str(share)))
            held_out = Features(made, "held_out")
            train(config, str(folder), Features(made), output, held_out=held_out)
            outputs.append(output)
        points = read_runs([one.url for one in outputs])
        assert [one.url for one in points] == [one.url for one in outputs]
        for one, output in zip(points, outputs, strict=True):
            manifest = output.manifest()
            assert one.tau == manifest.facts["held_out"]["tau"]
            assert len(one.rounds) == manifest.facts["held_out"]["samples"] == 8
        total = sum(int(sample.loss_mask.sum()) for sample in samples[:16])
        assert points[0].answer_tokens < points[1].answer_tokens < points[2].answer_tokens == total
