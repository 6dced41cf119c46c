"""tau by the amount of data: a power law through runs of `eyas train` that differ only in
data_share, and its values for more data.

    tau(n) = ceiling - gap * (n / most) ** -exponent        n: answer tokens that are trained on

Loss and error fall with a power of the data towards a floor (Hestness et al., arXiv 1712.00409;
Kaplan et al., arXiv 2001.08361). That tau rises so is an assumption: runs that do not follow it get
no forecast.

Letters: R runs, C held-out conversations, D draws, E exponents, M amounts of data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.artifact import Artifact
from eyas.errors import ConfigError, EmptyInputError, MismatchError, MissingInputError
from eyas.tau import LEAST_ROWS, Interval, tau_interval
from eyas.train.state import METRICS

LEAST_AMOUNTS = 3  # of data: a curve has three parameters
FURTHEST = 16  # times the data of the largest run
NUM_DRAWS = 1000
EXPONENTS_E = np.geomspace(0.05, 1.5, 40)  # Hestness et al. find 0.07 to 0.35; theory has up to 1
RUN_NOISE = 0.02  # of tau, by another seed (docs/experiments/heads.md)
MOST_UNEXPLAINED = 0.25  # of the rise
BETWEEN_RUNS = {"data_share", "seed"}  # settings that may differ


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A run: its answer tokens, and the emitted tokens and rounds of each held-out conversation."""

    url: str
    answer_tokens: int
    emitted: tuple[int, ...]
    rounds: tuple[int, ...]
    num_draft_steps: int

    @property
    def tau(self) -> float:
        return sum(self.emitted) / sum(self.rounds)

    @property
    def interval(self) -> Interval | None:
        return tau_interval(self.emitted, self.rounds)


@dataclass(frozen=True, slots=True)
class TauForecast:
    """tau of a run on so many answer tokens, and what it gains over the largest run; 95 %."""

    answer_tokens: int
    tau: float
    interval: Interval
    gain: float
    gain_interval: Interval


def forecast(points: Sequence[CurvePoint], tokens: Sequence[int]) -> list[TauForecast]:
    """The curve's values at so many answer tokens; a gain less certain than the rise of all runs is
    left out.

    The interval is a parametric bootstrap (Efron, Tibshirani 1993, chapter 6): the curve's own
    values with the noise of the runs, fitted again. The noise is the choice of conversations, which
    all runs share, what a run alone does to a conversation, and RUN_NOISE.

    Raises ConfigError for too few amounts of data or tokens too far away, EmptyInputError for runs
    that allow no forecast.
    """
    points = sorted(points, key=lambda one: one.answer_tokens)
    amounts_R = np.array([one.answer_tokens for one in points], dtype=np.float64)
    tau_R, most, ceiling = np.array([one.tau for one in points]), amounts_R[-1], points[0]
    if len(set(amounts_R.tolist())) < LEAST_AMOUNTS:
        raise ConfigError(
            f"these runs have fewer than {LEAST_AMOUNTS} amounts of data",
            "train on more shares of the same features, e.g. eyas train ... -s data_share=0.125",
        )
    if max(tokens) > FURTHEST * most:
        raise ConfigError(
            f"{max(tokens):,} answer tokens are more than {FURTHEST} times the largest run's",
            "train on a larger share first",
        )
    if len(points[0].rounds) < LEAST_ROWS:
        raise EmptyInputError(
            f"no forecast: tau is of {len(points[0].rounds)} held-out conversations, too few",
            "capture with a larger held_out_share",
        )
    shared_RC, own_R = noise_of(points)
    last_deviation = np.sqrt(((shared_RC[-1] - shared_RC[0]) ** 2).sum() + own_R[0] + own_R[-1])
    rise = float(np.ptp(tau_R))
    fit_D3 = fit_curves(tau_R[None], 1 / own_R, amounts_R / most, ceiling.num_draft_steps + 1.0)
    misfit = float(np.abs(curve_at(fit_D3, amounts_R / most)[0] - tau_R).max())
    if tau_R[-1] - tau_R[0] <= 1.96 * last_deviation or misfit > MOST_UNEXPLAINED * rise:
        raise EmptyInputError(
            f"no forecast: tau goes from {tau_R[0]:.2f} to {tau_R[-1]:.2f} with the data, which is "
            f"within chance or no power law ({misfit:.2f} unexplained)",
            "give larger shares further apart, more epochs to all of them, or other seeds",
        )
    rng = np.random.default_rng(0)
    shared_DR = rng.standard_normal((NUM_DRAWS, shared_RC.shape[1])) @ shared_RC.T
    drawn_DR = curve_at(fit_D3, amounts_R / most) + shared_DR
    drawn_DR += rng.standard_normal(drawn_DR.shape) * np.sqrt(own_R)
    refit_D3 = fit_curves(drawn_DR, 1 / own_R, amounts_R / most, ceiling.num_draft_steps + 1.0)
    ratios_M = np.array([*tokens, most]) / most
    tau_M, tau_DM = curve_at(fit_D3, ratios_M)[0], curve_at(refit_D3, ratios_M)
    luck_DM = RUN_NOISE * tau_M * rng.standard_normal(tau_DM.shape)
    found = [
        TauForecast(
            amount,
            float(tau_M[at]),
            _middle(tau_DM[:, at] + luck_DM[:, at]),
            float(tau_M[at] - tau_M[-1]),
            _middle(tau_DM[:, at] - tau_DM[:, -1]),
        )
        for at, amount in enumerate(tokens)
    ]
    return [one for one in found if np.ptp(one.gain_interval) <= rise]


def noise_of(points: Sequence[CurvePoint]) -> tuple[np.ndarray, np.ndarray]:
    """What each conversation does to each run's tau [R, C], and the variance of each run beside
    that [R]: the delta method on the ratio of sums.
    """
    emitted_RC = np.array([one.emitted for one in points], dtype=np.float64)
    rounds_RC = np.array([one.rounds for one in points], dtype=np.float64)
    (R, C), sums_R1 = rounds_RC.shape, rounds_RC.sum(1, keepdims=True)
    tau_R1 = emitted_RC.sum(1, keepdims=True) / sums_R1
    effect_RC = (emitted_RC - tau_R1 * rounds_RC) / sums_R1 * np.sqrt(C / (C - 1))
    own_RC = effect_RC - effect_RC.mean(0)
    return effect_RC, (own_RC**2).sum(1) * R / (R - 1) + (RUN_NOISE * tau_R1[:, 0]) ** 2


def fit_curves(
    tau_DR: np.ndarray, weight_R: np.ndarray, ratios_R: np.ndarray, highest: float
) -> np.ndarray:
    """(ceiling, -gap, exponent) [D, 3] by weighted least squares: ceiling (at most `highest`) and
    gap (at least 0) in closed form for every exponent of a grid, then the best of these.
    """
    power_ER = ratios_R[None] ** -EXPONENTS_E[:, None]
    w, x_E, xx_E = weight_R.sum(), power_ER @ weight_R, power_ER**2 @ weight_R
    y_D1, xy_DE = (tau_DR @ weight_R)[:, None], (tau_DR * weight_R) @ power_ER.T
    slope_DE = np.minimum((w * xy_DE - x_E * y_D1) / (w * xx_E - x_E**2), 0.0)
    ceiling_DE = (y_D1 - slope_DE * x_E) / w
    bound_DE = np.minimum((xy_DE - highest * x_E) / xx_E, 0.0)
    slope_DE = np.where(ceiling_DE > highest, bound_DE, slope_DE)
    ceiling_DE = np.minimum(ceiling_DE, highest)
    squares_DE = -2 * ceiling_DE * y_D1 - 2 * slope_DE * xy_DE + ceiling_DE**2 * w
    squares_DE += 2 * ceiling_DE * slope_DE * x_E + slope_DE**2 * xx_E
    best_D, all_D = squares_DE.argmin(1), np.arange(len(tau_DR))
    return np.stack(
        [ceiling_DE[all_D, best_D], slope_DE[all_D, best_D], EXPONENTS_E[best_D]], axis=1
    )


def curve_at(fit_D3: np.ndarray, ratios_M: np.ndarray) -> np.ndarray:
    """tau [D, M] at these multiples of the largest run's data."""
    return np.asarray(fit_D3[:, :1] + fit_D3[:, 1:2] * ratios_M[None] ** -fit_D3[:, 2:])


def _middle(values_D: np.ndarray) -> Interval:
    low, high = np.quantile(values_D, [0.025, 0.975]).tolist()
    return low, high


def read_runs(urls: Sequence[str]) -> list[CurvePoint]:
    """The finished runs at these outputs of `eyas train`, each once.

    Raises MissingInputError, EmptyInputError for runs that measured no tau, MismatchError for runs
    that differ in more than BETWEEN_RUNS.
    """
    runs = {run.manifest("train").identity: run for run in map(Artifact, urls)}
    made = [run.manifest() for run in runs.values()]
    for other in made[1:]:
        names = {
            name
            for name in {*made[0].config, *other.config} - BETWEEN_RUNS
            if made[0].config.get(name) != other.config.get(name)
        }
        if names or {k: v.identity for k, v in made[0].inputs.items()} != {
            k: v.identity for k, v in other.inputs.items()
        }:
            raise MismatchError(
                f"these runs differ in {', '.join(sorted(names)) or 'features or start'}",
                f"give runs that differ in {' and '.join(sorted(BETWEEN_RUNS))} alone",
            )
    return [point_of(run) for run in runs.values()]


def point_of(run: Artifact) -> CurvePoint:
    """The counts in a run's manifest and metrics. Raises EmptyInputError, MissingInputError."""
    manifest = run.manifest("train")
    held_out = manifest.facts.get("held_out") or {}
    if not held_out.get("tau"):
        raise EmptyInputError(
            f"{run.url} measured no tau",
            "capture with a held_out_share, and leave stop.measurements above 0",
        )
    if not held_out["step"]:
        raise EmptyInputError(
            f"{run.url} has learned nothing: its best head is its start",
            "train it on more answers, or with a lower learning_rate",
        )
    best = next(row for row in run.read_jsonl(METRICS) if row["step"] == held_out["step"])
    if "held_out_counts" not in best or "answer_tokens" not in manifest.counts:
        raise MissingInputError(
            f"{run.url} is of an older version, which kept no held-out rounds", "train it again"
        )
    return CurvePoint(
        run.url,
        manifest.counts["answer_tokens"],
        tuple(best["held_out_counts"]["emitted"]),
        tuple(best["held_out_counts"]["rounds"]),
        held_out["num_draft_steps"],
    )
