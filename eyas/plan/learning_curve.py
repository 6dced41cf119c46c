"""tau by the amount of data: a power law through runs of `eyas train` that differ in data_share
alone, and what it says of more data.

    tau(n) = ceiling - gap * (n / most) ** -exponent        n: answer tokens that are trained on

Loss and error fall with a power of the data towards a rest that stays (Hestness et al., arXiv
1712.00409; Kaplan et al., arXiv 2001.08361). That tau rises so is an assumption: points that do not
follow it get no forecast.

Knows the output of `eyas train` and counts of rounds; no model. Why the interval is as it is:
docs/decisions/learning-curve.md.

Letters: R runs, C held-out conversations, D draws, E exponents, M amounts of data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eyas.artifact import Artifact
from eyas.errors import ConfigError, EmptyInputError, MismatchError, MissingInputError
from eyas.tau import LEAST_ROWS, Interval, tau_interval
from eyas.train.state import METRICS

LEAST_AMOUNTS = 3  # a curve of three numbers
FURTHEST = 16  # times the data of the largest run
LEVEL = 0.95  # of the intervals
NUM_DRAWS = 1000
# Of error rates by data, Hestness et al. find 0.07 to 0.35; theory has up to 1.
EXPONENTS_E = np.geomspace(0.05, 1.5, 40)
# What another seed changes in a run's tau, as a share of it: docs/experiments/heads.md.
RUN_NOISE = 0.02
LARGEST_MISFIT = 3.0  # standard deviations that the points lie from the curve
MOST_UNEXPLAINED = 0.25  # of the rise: with few conversations no misfit is beyond chance
BETWEEN_RUNS = ("data_share", "seed")  # settings that may differ


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A run: its answer tokens, and the emitted tokens and rounds of each held-out conversation."""

    url: str
    answer_tokens: int
    num_draft_steps: int
    emitted: tuple[int, ...]
    rounds: tuple[int, ...]

    @property
    def tau(self) -> float:
        return sum(self.emitted) / sum(self.rounds)

    @property
    def interval(self) -> Interval | None:
        """Of the conversations' choice alone, as `eyas eval` has it."""
        return tau_interval(self.emitted, self.rounds, LEVEL)


@dataclass(frozen=True, slots=True)
class TauForecast:
    """tau of one run on so many answer tokens; gain: along the curve, from the largest run on."""

    answer_tokens: int
    tau: float
    interval: Interval
    gain: float
    gain_interval: Interval

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """Runs by their data, and forecasts; without these, problem says why and hint what to do.

    A forecast whose gain is less sure than all that the runs rise is left out.
    """

    points: tuple[CurvePoint, ...]
    forecasts: tuple[TauForecast, ...] = ()
    problem: str = ""
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        runs = [
            {
                "run": one.url,
                "answer_tokens": one.answer_tokens,
                "tau": one.tau,
                "interval": one.interval,
            }
            for one in self.points
        ]
        forecasts = [one.to_json() for one in self.forecasts]
        return {"runs": runs, "forecasts": forecasts, "problem": self.problem or None}


def learning_curve(points: Sequence[CurvePoint], tokens: Sequence[int]) -> LearningCurve:
    """The curve through these runs, and its values at so many answer tokens.

    The interval is a parametric bootstrap (Efron, Tibshirani 1993, chapter 6): the curve's own
    values with noise as that of the runs, fitted again. Noise is the choice of conversations, which
    all runs share, what only this run and this conversation have, and RUN_NOISE; where the points
    lie further from the curve than that, as much more.

    Raises ConfigError for runs of fewer than LEAST_AMOUNTS amounts of data, and for tokens beyond
    FURTHEST times the most.
    """
    points = sorted(points, key=lambda one: one.answer_tokens)
    amounts_R = np.array([one.answer_tokens for one in points], dtype=np.float64)
    if (num_amounts := len(set(amounts_R.tolist()))) < LEAST_AMOUNTS:
        raise ConfigError(
            f"{len(points)} finished runs of {num_amounts} amounts of data: a curve takes "
            f"{LEAST_AMOUNTS} amounts or more",
            "train on more shares of the same features, e.g. eyas train ... -s data_share=0.125",
        )
    most = amounts_R.max()
    if max(tokens) > FURTHEST * most:
        raise ConfigError(
            f"{max(tokens):,} answer tokens are more than {FURTHEST} times those of the largest "
            f"run ({most:,.0f})",
            "train on a larger share first",
        )
    if len(points[0].rounds) < LEAST_ROWS:
        return LearningCurve(
            tuple(points),
            problem=f"tau is of {len(points[0].rounds)} held-out conversations, too few",
            hint="capture with a larger held_out_share",
        )
    noise = RunNoise.of(points)
    problem, hint = not_rising(points, noise), "give larger shares, or more epochs to all of them"
    if problem:
        return LearningCurve(tuple(points), problem=problem, hint=hint)

    tau_R, weight_R = np.array([one.tau for one in points]), 1.0 / noise.own_R
    ceiling = points[0].num_draft_steps + 1.0
    fit = fit_curves(tau_R[None], weight_R, amounts_R / most, ceiling)
    misfit = float(np.sqrt(fit.chi2_D[0] / max(1, len(points) - LEAST_AMOUNTS)))
    farthest = float(np.abs(tau_R - fit.at(amounts_R / most)[0]).max())
    rise = float(tau_R.max() - tau_R.min())
    if misfit > LARGEST_MISFIT or farthest > MOST_UNEXPLAINED * rise:
        return LearningCurve(
            tuple(points),
            problem=f"the runs follow no power law: of a rise of {rise:.2f} the best one leaves "
            f"{farthest:.2f} unexplained ({misfit:.1f} standard deviations)",
            hint=f"heads that have only begun to learn gain more with each doubling: {hint}",
        )
    scale = max(1.0, misfit)
    rng = np.random.default_rng(0)
    drawn_DR = fit.at(amounts_R / most) + noise.draws(rng, scale)
    refit = fit_curves(drawn_DR, weight_R, amounts_R / most, ceiling)
    ratios_M = np.array([*tokens, most]) / most
    tau_M, tau_DM = fit.at(ratios_M)[0], refit.at(ratios_M)
    luck_DM = scale * RUN_NOISE * tau_M * rng.standard_normal(tau_DM.shape)
    forecasts = tuple(
        TauForecast(
            answer_tokens=amount,
            tau=float(tau_M[at]),
            interval=middle(tau_DM[:, at] + luck_DM[:, at]),
            gain=float(tau_M[at] - tau_M[-1]),
            gain_interval=middle(tau_DM[:, at] - tau_DM[:, -1]),
        )
        for at, amount in enumerate(tokens)
    )
    known = tuple(one for one in forecasts if np.ptp(one.gain_interval) <= rise)
    if not known:
        low, high = forecasts[0].gain_interval
        return LearningCurve(
            tuple(points),
            problem=f"too noisy: with {tokens[0]:,} answer tokens tau gains {low:.2f} to "
            f"{high:.2f}, a wider range than the rise of all runs, {rise:.2f}",
            hint="give more shares, further apart, or the same ones with other seeds",
        )
    return LearningCurve(tuple(points), known)


@dataclass(frozen=True, slots=True)
class RunNoise:
    """The variance of the runs' taus. shared_RC: what each conversation does to each run's tau, so
    that its product with itself is their covariance; own_R: of a run beside what all runs share.
    """

    shared_RC: np.ndarray
    luck_R: np.ndarray
    own_R: np.ndarray

    @classmethod
    def of(cls, points: Sequence[CurvePoint]) -> RunNoise:
        """By linearisation (the delta method) of the ratio of sums over conversations."""
        emitted_RC = np.array([one.emitted for one in points], dtype=np.float64)
        rounds_RC = np.array([one.rounds for one in points], dtype=np.float64)
        (R, C), sums_R1 = rounds_RC.shape, rounds_RC.sum(1, keepdims=True)
        tau_R1 = emitted_RC.sum(1, keepdims=True) / sums_R1
        shared_RC = (emitted_RC - tau_R1 * rounds_RC) / sums_R1 * np.sqrt(C / (C - 1))
        own_RC = shared_RC - shared_RC.mean(0)
        luck_R = (RUN_NOISE * tau_R1[:, 0]) ** 2
        return cls(shared_RC, luck_R, (own_RC**2).sum(1) * R / (R - 1) + luck_R)

    def draws(self, rng: np.random.Generator, scale: float) -> np.ndarray:
        """Noise of the runs [D, R]; scale: of what is a run's own."""
        (R, C), own_R = self.shared_RC.shape, self.luck_R + (scale**2 - 1.0) * self.own_R
        together_DR = rng.standard_normal((NUM_DRAWS, C)) @ self.shared_RC.T
        return np.asarray(together_DR + rng.standard_normal((NUM_DRAWS, R)) * np.sqrt(own_R))


@dataclass(frozen=True, slots=True)
class CurveFit:
    """Curves by ceiling, slope (-gap) and exponent [D], with the weighted squares that are left."""

    ceiling_D: np.ndarray
    slope_D: np.ndarray
    exponent_D: np.ndarray
    chi2_D: np.ndarray

    def at(self, ratios_M: np.ndarray) -> np.ndarray:
        """tau [D, M] at these multiples of the largest run's data."""
        power_DM = ratios_M[None] ** -self.exponent_D[:, None]
        return np.asarray(self.ceiling_D[:, None] + self.slope_D[:, None] * power_DM)


def fit_curves(
    tau_DR: np.ndarray, weight_R: np.ndarray, ratios_R: np.ndarray, highest: float
) -> CurveFit:
    """Weighted least squares: ceiling (at most `highest`) and gap (at least 0) in closed form for
    every exponent of a grid, then the best of these.
    """
    power_ER = ratios_R[None] ** -EXPONENTS_E[:, None]
    w, x_E, xx_E = weight_R.sum(), power_ER @ weight_R, power_ER**2 @ weight_R
    y_D1, yy_D1 = (tau_DR @ weight_R)[:, None], (tau_DR**2 @ weight_R)[:, None]
    xy_DE = (tau_DR * weight_R) @ power_ER.T
    slope_DE = np.minimum((w * xy_DE - x_E * y_D1) / (w * xx_E - x_E**2), 0.0)
    ceiling_DE = (y_D1 - slope_DE * x_E) / w
    bound_DE = np.minimum((xy_DE - highest * x_E) / xx_E, 0.0)
    slope_DE = np.where(ceiling_DE > highest, bound_DE, slope_DE)
    ceiling_DE = np.minimum(ceiling_DE, highest)
    chi2_DE = yy_D1 - 2 * ceiling_DE * y_D1 - 2 * slope_DE * xy_DE + ceiling_DE**2 * w
    chi2_DE += 2 * ceiling_DE * slope_DE * x_E + slope_DE**2 * xx_E
    best_D, all_D = chi2_DE.argmin(1), np.arange(len(tau_DR))
    left_D = np.maximum(chi2_DE[all_D, best_D], 0.0)  # rounding of a perfect fit
    found = ceiling_DE[all_D, best_D], slope_DE[all_D, best_D]
    return CurveFit(*found, EXPONENTS_E[best_D], left_D)


def not_rising(points: Sequence[CurvePoint], noise: RunNoise) -> str:
    """Why the runs show no gain by more data; "" where the largest is better beyond chance."""
    first, last = points[0], points[-1]
    difference_C = noise.shared_RC[-1] - noise.shared_RC[0]
    deviation = np.sqrt((difference_C**2).sum() + noise.luck_R[0] + noise.luck_R[-1])
    if last.tau - first.tau > 1.96 * deviation:
        return ""
    return (
        f"tau does not rise beyond chance: {first.tau:.2f} with {first.answer_tokens:,} answer "
        f"tokens, {last.tau:.2f} with {last.answer_tokens:,}"
    )


def middle(values_D: np.ndarray) -> Interval:
    """The percentiles that hold LEVEL of the values."""
    low, high = np.quantile(values_D, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return low, high


# Runs


def read_runs(urls: Sequence[str]) -> list[CurvePoint]:
    """The finished runs at these places, each once: a place is the output of `eyas train`, or a
    folder of such outputs, as `eyas run` makes it.

    Raises MissingInputError, EmptyInputError for runs that measured nothing, and MismatchError for
    runs that differ in more than BETWEEN_RUNS.
    """
    runs = {run.manifest().identity: run for url in urls for run in trained_at(url)}
    first, *others = runs.values()
    for other in others:
        check_comparable(first, other)
    return [point_of(run) for run in runs.values()]


def trained_at(url: str) -> list[Artifact]:
    """The output of `eyas train` at a URL, or those directly below it."""
    place = Artifact(url)
    if place.is_done():
        place.manifest("train")
        return [place]
    below = [name.split("/") for name in place.all_names() if name.endswith("/_DONE")]
    found = [Artifact(f"{place.url}/{names[0]}") for names in below if len(names) == 2]
    trained = [one for one in found if one.manifest().stage == "train"]
    if not trained:
        raise MissingInputError(
            f"no finished run of `eyas train` is at {url}",
            "give its output folder, that of `eyas run`, or one with several of them below it",
        )
    return trained


def check_comparable(one: Artifact, other: Artifact) -> None:
    """Raise MismatchError unless two runs differ in BETWEEN_RUNS alone."""
    ours, theirs = one.manifest(), other.manifest()
    inputs = [{name: made.identity for name, made in run.inputs.items()} for run in (ours, theirs)]
    if inputs[0] != inputs[1]:
        raise MismatchError(
            f"{one.url} and {other.url} are not of the same features and start",
            "give runs on shares of the same features: what is held out is the same then",
        )
    here, there = (dict(leaves(run.config)) for run in (ours, theirs))
    for name in sorted((here.keys() | there.keys()) - {*BETWEEN_RUNS}):
        if here.get(name) != there.get(name):
            raise MismatchError(
                f"{name} is {here.get(name)} in {one.url} and {there.get(name)} in {other.url}",
                f"give runs that differ in {' and '.join(BETWEEN_RUNS)} alone",
            )


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by their dotted names."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def point_of(run: Artifact) -> CurvePoint:
    """What a run's manifest and metrics say. Raises EmptyInputError, MismatchError."""
    manifest = run.manifest("train")
    held_out = manifest.facts.get("held_out") or {}
    if not held_out.get("step"):
        raise EmptyInputError(
            f"{run.url} measured no tau",
            "capture with a held_out_share, and leave stop.measurements above 0",
        )
    best = next(row for row in run.read_jsonl(METRICS) if row["step"] == held_out["step"])
    counts = best.get("held_out_counts")
    if counts is None or "answer_tokens" not in manifest.counts:
        raise MismatchError(
            f"{run.url} is of an older version, which kept no held-out rounds", "train it again"
        )
    return CurvePoint(
        url=run.url,
        answer_tokens=manifest.counts["answer_tokens"],
        num_draft_steps=held_out["num_draft_steps"],
        emitted=tuple(counts["emitted"]),
        rounds=tuple(counts["rounds"]),
    )
