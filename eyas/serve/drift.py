"""Acceptance by slice of traffic over time, and whether it has fallen under what the head's card
promises. Knows no text.

A request counts in four slices: all, its endpoint, its tag, the length of its prompt. A slice's
window closes when it is `window_s` old and has `min_requests` that drafted; then its tau is judged:

    limit   (1 - tolerance) x the lower end of the card's interval, at the depth that was drafted (reference.Reference.lowest)
    z       (tau - limit) / se, in [-4, 4]; se of a ratio with the request as the unit, since rounds of one answer are alike,
            from the spread of requests over the last windows: a low window's own is small, and
            would make it look lower
    cusum   max(0, cusum - z - 1/2); above `threshold` the slice drifts, until it is back at 0

At a tau of exactly the limit and threshold 9 that is one false warning in 52,000 windows
(Siegmund's approximation of a one-sided CUSUM's run length, Sequential Analysis, 1985: (e^b - b -
1) / 0.5 with b = 9 + 1.166), half a year of windows of five minutes; at the card's tau, none. A tau
four errors under the limit is told after three windows.

`auto` stops drafting where it does not pay, and then hardly a request is left to judge. So a slice
is looked at apart from its windows: where less than a twentieth of the rounds that could have
drafted did, in two looks of `window_s` and `min_requests` each, it is idle. What little drafts
there gathers in its window, which closes with as few as 8 requests when it is twelve times
`window_s` old. The error is then the largest of three: the window's own, that of the windows before
it, and what single rounds have at the limit itself, where each token is the last with the same
chance: a variance of limit x (limit - 1). Wide, not wrong.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector as MetricsOf
from pydantic import BaseModel, ConfigDict, Field

from eyas.serve.reference import Reference

MOST_TAGS = 16  # others are counted together
LENGTHS = ((128, "under-128"), (1024, "under-1024"), (8192, "under-8192"))  # tokens of a prompt
LONGEST = "8192-and-more"
OTHER, UNTAGGED = "other", "none"
_MOST_Z, _SLACK = 4.0, 0.5
_NEWEST = 0.1  # weight of a window's spread among those before it
_KINDS = ("by", "slice")
# a slice is idle where under this share of its rounds drafted in so many looks
_HARDLY, _LOOKS = 0.05, 2
_FEW, _LATE = 8, 12  # requests that drafted, and window_s, with which an idle slice's window closes

log = logging.getLogger("eyas.serve")


class DriftConfig(BaseModel):
    """expect_tau: what is expected in place of what the head's card says. window_s, min_requests: a
    window has both. tolerance: how far under it is still right, as a share. threshold: of the
    CUSUM. history: windows told of each slice.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    expect_tau: float | None = Field(None, ge=1)
    window_s: float = Field(300.0, gt=0)
    min_requests: int = Field(30, ge=2)
    tolerance: float = Field(0.05, ge=0, lt=1)
    threshold: float = Field(9.0, gt=0)
    history: int = Field(48, ge=1, le=10_000)


@dataclass(frozen=True, slots=True)
class Rounds:
    """Of one request: its histogram of accepted drafts, and the rounds in which it could have
    drafted and did not.
    """

    accept_hist: Sequence[int]
    num_plain: int = 0

    @property
    def num_drafted(self) -> int:
        return sum(self.accept_hist)


@dataclass(frozen=True, slots=True)
class Window:
    """What a slice did in one stretch of time. ended: seconds since 1970; limit, z: None where
    nothing is expected. requests, rounds: those that drafted."""

    ended: float
    seconds: float
    requests: int
    rounds: int
    tau: float
    limit: float | None
    z: float | None
    cusum: float
    accept_hist: list[int]


class Ratio:
    """tau of some requests with its standard error: emitted tokens over rounds, the request as the
    unit.
    """

    def __init__(self) -> None:
        self.requests = self.rounds = self.tokens = 0
        self.accept_hist: list[int] = []
        self._squares = [0, 0, 0]  # tokens^2, tokens x rounds, rounds^2

    def add(self, accept_hist: Sequence[int]) -> None:
        """A request by its histogram of accepted drafts."""
        rounds = sum(accept_hist)
        tokens = sum(count * (accepted + 1) for accepted, count in enumerate(accept_hist))
        self.requests, self.rounds, self.tokens = (
            self.requests + 1,
            self.rounds + rounds,
            self.tokens + tokens,
        )
        for number, square in enumerate((tokens * tokens, tokens * rounds, rounds * rounds)):
            self._squares[number] += square
        self.accept_hist += [0] * (len(accept_hist) - len(self.accept_hist))
        for accepted, count in enumerate(accept_hist):
            self.accept_hist[accepted] += count

    @property
    def tau(self) -> float:
        return self.tokens / self.rounds

    @property
    def spread(self) -> float:
        """Variance between requests of tokens - tau x rounds, a round: short requests have less of
        it than long ones.
        """
        tt, tr, rr = self._squares
        of_requests = max(tt - 2 * self.tau * tr + self.tau**2 * rr, 0.0) / (self.requests - 1)
        return of_requests * self.requests / self.rounds

    def error(self, spread: float) -> float:
        """Standard error of tau, linearised, where requests have this spread."""
        return math.sqrt(spread / self.rounds)


class Look:
    """Requests that could have drafted, and how many of their rounds did, over a stretch of time."""

    def __init__(self, opened: float) -> None:
        self.opened = opened
        self.requests = self.drafted = self.plain = 0

    def add(self, rounds: Rounds) -> None:
        """A request by its rounds."""
        self.requests += 1
        self.drafted += rounds.num_drafted
        self.plain += rounds.num_plain

    @property
    def is_idle(self) -> bool:
        return self.drafted < _HARDLY * (self.drafted + self.plain)


@dataclass
class Slice:
    """One slice of the traffic. spread: of its requests, over the last windows; looks: in how many
    on end it was idle; total_*: since the start, of requests and rounds that drafted; plain_*: of
    those that could have and did not."""

    opened: float
    history: deque[Window]
    look: Look
    now: Ratio = field(default_factory=Ratio)
    spread: float = 0.0
    num_windows: int = 0
    cusum: float = 0.0
    is_low: bool = False
    warnings: int = 0
    looks: int = 0
    total_requests: int = 0
    total_rounds: int = 0
    total_tokens: int = 0
    plain_requests: int = 0
    plain_rounds: int = 0

    def add(self, rounds: Rounds) -> None:
        """Count a request."""
        self.look.add(rounds)
        self.plain_rounds += rounds.num_plain
        if not rounds.num_drafted:
            self.plain_requests += 1
            return
        self.now.add(rounds.accept_hist)
        self.total_requests += 1
        self.total_rounds += rounds.num_drafted
        self.total_tokens += sum(
            count * (accepted + 1) for accepted, count in enumerate(rounds.accept_hist)
        )

    @property
    def is_idle(self) -> bool:
        return self.looks >= _LOOKS


class Drift(MetricsOf):
    """All slices of one server. Not for several threads."""

    def __init__(
        self,
        config: DriftConfig,
        reference: Reference | None,
        model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reference = reference
        self._config, self._model, self._clock = config, model, clock
        self._slices: dict[tuple[str, str], Slice] = {}

    # Requests

    def count(self, rounds: Rounds, endpoint: str, tag: str | None, num_prompt_tokens: int) -> None:
        """A request that is over; one without rounds says nothing."""
        if not rounds.num_drafted and not rounds.num_plain:
            return
        length = next((name for limit, name in LENGTHS if num_prompt_tokens < limit), LONGEST)
        for key in (
            ("all", "all"),
            ("endpoint", endpoint),
            ("tag", self._known(tag)),
            ("prompt_tokens", length),
        ):
            if key not in self._slices:
                now = self._clock()
                self._slices[key] = Slice(now, deque(maxlen=self._config.history), Look(now))
            self._slices[key].add(rounds)

    def _known(self, tag: str | None) -> str:
        if tag is None or ("tag", tag) in self._slices:
            return tag or UNTAGGED
        return tag if sum(by == "tag" for by, _ in self._slices) < MOST_TAGS else OTHER

    # Windows

    @property
    def is_due(self) -> bool:
        """Whether a window can be closed, or a slice looked at."""
        return any(self._is_full(one) or self._is_seen(one) for one in self._slices.values())

    def _is_full(self, slice_: Slice) -> bool:
        age, requests = (self._clock() - slice_.opened) / self._config.window_s, slice_.now.requests
        if requests >= self._config.min_requests:
            return age >= 1
        return slice_.is_idle and requests >= _FEW and age >= _LATE

    def _is_seen(self, slice_: Slice) -> bool:
        old_enough = self._clock() - slice_.look.opened >= self._config.window_s
        return old_enough and slice_.look.requests >= self._config.min_requests

    def close(self, depths: Mapping[int, int]) -> None:
        """Look, close the windows that are due and judge them. depths: {levels of the tree:
        samples} of the rounds in them.
        """
        limit = (
            None
            if self.reference is None
            else (1 - self._config.tolerance) * self.reference.lowest(depths)
        )
        for key, slice_ in self._slices.items():
            if self._is_seen(slice_):
                self._look(key, slice_)
            if self._is_full(slice_):
                self._close(key, slice_, limit)

    def _look(self, key: tuple[str, str], slice_: Slice) -> None:
        look, was_idle = slice_.look, slice_.is_idle
        slice_.look = Look(self._clock())
        slice_.looks = slice_.looks + 1 if look.is_idle else 0
        facts = {
            "by": key[0],
            "slice": key[1],
            "requests": look.requests,
            "drafted_rounds": look.drafted,
        }
        data = {**facts, "plain_rounds": look.plain}
        if slice_.is_idle and not was_idle:
            log.warning(
                "auto has stopped drafting: the head does not pay here, because of acceptance or "
                "load",
                extra={"data": data},
            )
        elif was_idle and not slice_.is_idle:
            log.info("auto drafts again", extra={"data": data})

    def _close(self, key: tuple[str, str], slice_: Slice, limit: float | None) -> None:
        now, ratio = self._clock(), slice_.now
        spread = self._spread(slice_, limit)
        z = None
        if limit is not None:
            z = max(-_MOST_Z, min((ratio.tau - limit) / max(ratio.error(spread), 1e-9), _MOST_Z))
            slice_.cusum = min(max(0.0, slice_.cusum - z - _SLACK), 2 * self._config.threshold)
        slice_.history.append(
            Window(
                ended=round(time.time(), 3),
                seconds=round(now - slice_.opened, 3),
                requests=ratio.requests,
                rounds=ratio.rounds,
                tau=ratio.tau,
                limit=limit,
                z=z,
                cusum=slice_.cusum,
                accept_hist=ratio.accept_hist,
            )
        )
        slice_.now, slice_.opened = Ratio(), now
        self._judge(key, slice_)

    def _spread(self, slice_: Slice, limit: float | None) -> float:
        """What the window's requests are taken to have."""
        if slice_.now.requests < self._config.min_requests:
            return max(
                slice_.now.spread, slice_.spread, limit * (limit - 1) if limit is not None else 0.0
            )
        slice_.num_windows += 1
        slice_.spread += max(_NEWEST, 1 / slice_.num_windows) * (slice_.now.spread - slice_.spread)
        return slice_.spread

    def _judge(self, key: tuple[str, str], slice_: Slice) -> None:
        last = slice_.history[-1]
        facts = {
            "by": key[0],
            "slice": key[1],
            "tau": round(last.tau, 3),
            "limit": last.limit and round(last.limit, 3),
        }
        if not slice_.is_low and slice_.cusum > self._config.threshold:
            slice_.is_low = True
            slice_.warnings += 1
            log.warning("tau has fallen under the head's card", extra={"data": facts})
        elif slice_.is_low and slice_.cusum == 0:
            slice_.is_low = False
            log.info("tau is back where the head's card has it", extra={"data": facts})

    # What is told

    def told(self) -> dict[str, Any]:
        """All of it as JSON."""
        slices = [
            {
                "by": by,
                "slice": name,
                "status": self._status(one),
                "warnings": one.warnings,
                "requests": one.total_requests,
                "rounds": one.total_rounds,
                "plain_requests": one.plain_requests,
                "plain_rounds": one.plain_rounds,
                "tau": one.total_tokens / one.total_rounds if one.total_rounds else None,
                "windows": [asdict(window) for window in one.history],
            }
            for (by, name), one in self._slices.items()
        ]
        expected = None if self.reference is None else asdict(self.reference)
        return {"expected": expected, "rule": self._config.model_dump(), "slices": slices}

    def _status(self, slice_: Slice) -> str:
        if slice_.is_low:
            return "low"
        if slice_.is_idle:
            return "idle"
        return "unknown" if self.reference is None or not slice_.history else "ok"

    def collect(self) -> Iterator[Metric]:
        """For Prometheus' registry."""
        labels = ("model_name", *_KINDS)
        counters = (
            ("requests", "requests that were drafted for, by slice", "total_requests"),
            ("rounds", "rounds that their samples drafted in", "total_rounds"),
            ("tokens", "tokens that these rounds emitted", "total_tokens"),
            (
                "plain_requests",
                "requests that could have drafted and never did, by slice",
                "plain_requests",
            ),
            (
                "plain_rounds",
                "rounds that samples could have drafted in and did not",
                "plain_rounds",
            ),
            ("warnings", "times that tau fell under the head's card", "warnings"),
        )
        for name, about, value in counters:
            family = CounterMetricFamily(f"eyas:spec_slice_{name}", about, labels=labels)
            for key, one in self._slices.items():
                family.add_metric([self._model, *key], getattr(one, value))
            yield family
        gauges: tuple[tuple[str, str, Callable[[Slice], float | None]], ...] = (
            ("accept_length", "tau of the last window", lambda one: one.history[-1].tau),
            (
                "accept_length_limit",
                "under which tau is too low",
                lambda one: one.history[-1].limit,
            ),
            ("cusum", "evidence that it is", lambda one: one.cusum),
            (
                "is_low",
                "1 where tau has fallen under the head's card",
                lambda one: float(one.is_low),
            ),
            ("is_idle", "1 where auto has stopped drafting", lambda one: float(one.is_idle)),
        )
        for name, about, get in gauges:
            gauge = GaugeMetricFamily(f"eyas:spec_slice_{name}", about, labels=labels)
            for key, one in self._slices.items():
                value_now = get(one) if one.history or name == "is_idle" else None
                if value_now is not None:
                    gauge.add_metric([self._model, *key], value_now)
            yield gauge
