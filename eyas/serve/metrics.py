"""What the server reports about itself: metrics for Prometheus, and a line of log per request.

Metrics have vLLM's names, where vLLM has one, with the prefix `eyas:`. Requests are counted as they
end; the engine's own counts are read at each scrape. No label, no value and no line of log holds
anything of a request's text.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest

from eyas.engine.engine import Engine
from eyas.engine.policy import RoundRecord
from eyas.serve.completion import CompletionWriter
from eyas.tau import accepted_by_position, num_accepted, sum_hists, tau_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_QUANTILES = (0.1, 0.5, 0.9)
# Of the engine's counters: name here, name there, what it counts.
_COUNTERS = (
    ("num_preemptions", "preemptions", "samples that gave up their pages and waited again"),
    (
        "prefix_cache_queries",
        "prompt_tokens",
        "tokens of prompts that were looked up among those kept",
    ),
    ("prefix_cache_hits", "prompt_tokens_reused", "tokens of prompts that were found there"),
    ("prefix_cache_evictions", "pages_evicted", "kept pages that were given away"),
    ("spec_decode_num_draft_tokens", "verified_nodes", "drafted tokens that the target judged"),
    (
        "spec_decode_num_draft_steps",
        "draft_steps",
        "sequential forwards of the draft after its first",
    ),
    ("spec_explored_rounds", "explored_rounds", "rounds run to measure the other choice"),
    ("device_busy_seconds", "device_busy_s", "seconds in jobs"),
    ("device_idle_seconds", "device_idle_s", "seconds between jobs while there was work"),
)
_OF_ROUNDS = (
    ("rounds", "rounds", 1.0, "rounds"),
    ("round_tokens", "tokens", 1.0, "tokens that rounds emitted"),
    ("round_expected_tokens", "expected_tokens", 1.0, "tokens expected of them"),
    ("round_predicted_seconds", "predicted_ms", 1e-3, "what they were predicted to take"),
    ("round_real_seconds", "real_ms", 1e-3, "what they took"),
)


_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


@dataclass
class Exchange:
    """One HTTP request, for the log and the metrics. id: the client's own if it can be logged.

    completions: one, or one for each instance of a prediction. failure: in one word. started:
    perf_counter, seconds.
    """

    http: HttpRequest
    endpoint: str
    id: str
    client: str = ""
    completions: Sequence[CompletionWriter] = ()
    failure: str | None = None
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, http: HttpRequest) -> Exchange:
        """Of a request that has a route."""
        sent = http.headers.get("x-request-id", "")
        request_id = sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        return cls(http, http.scope["route"].path, request_id)

    def facts(self, status: int) -> dict[str, Any]:
        """What the log says: client, counts and times."""
        facts: dict[str, Any] = {
            "request_id": self.id,
            "endpoint": self.endpoint,
            "status": status,
            "client": self.client,
            "ms": round(1000 * (time.perf_counter() - self.started), 1),
        }
        if self.failure is not None:
            facts["failure"] = self.failure
        if self.completions:
            tau = tau_of(sum_hists(one.accept_hist for one in self.completions))
            firsts = [one.first_at for one in self.completions if one.first_at is not None]
            facts |= {
                "num_prompt_tokens": sum(one.num_prompt_tokens for one in self.completions),
                "num_output_tokens": sum(one.num_tokens for one in self.completions),
                "finish_reasons": [ending for one in self.completions for ending in one.endings],
                "tau": None if tau is None else round(tau, 3),
                "ttft_ms": round(1000 * (min(firsts) - self.started), 1) if firsts else None,
            }
        return facts


@dataclass(frozen=True, slots=True)
class EngineState:
    """The engine's counters and its last rounds at one moment."""

    counters: dict[str, float]
    records: list[RoundRecord]

    @classmethod
    def of(cls, engine: Engine) -> EngineState:
        """For `EngineWorker.inspect`."""
        return cls(engine.metrics(), list(engine.policy.records))


class Metrics(Collector):
    """All metrics of one server. num_pages: of the engine's cache."""

    def __init__(self, model: str) -> None:
        self.num_pages = 1.0
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self._accept_hist: list[int] = []
        self._state = EngineState({}, [])
        self._num_samples = 0
        self._responses = self._counter(
            "http_requests", "HTTP requests by their answer", "endpoint", "status"
        )
        self._ended = self._counter(
            "request_success", "samples that ended by themselves", "finished_reason"
        )
        self._failed = self._counter(
            "request_failure", "requests that ended before their answer did", "reason"
        )
        self._prompt_tokens = self._counter("prompt_tokens", "tokens of prompts that were answered")
        self._tokens = self._counter("generation_tokens", "tokens of answers")
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "from a request's arrival to its first token", _SECONDS
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "after the first, mean of a sample", _SECONDS
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "from a request's arrival to its last token", _SECONDS
        )
        self._num_prompt = self._histogram(
            "request_prompt_tokens", "tokens of a request's prompts", _TOKENS
        )
        self._num_answer = self._histogram(
            "request_generation_tokens", "tokens of a request's answers", _TOKENS
        )
        self._registry.register(self)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"eyas:{name}", about, ("model_name", *labels), registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"eyas:{name}", about, ("model_name",), registry=self._registry, buckets=buckets
        )

    @property
    def tau(self) -> float | None:
        """Since the start, of the answers that are over."""
        return tau_of(self._accept_hist)

    # When a request ends

    def count_response(self, endpoint: str, status: int) -> None:
        """Count an HTTP request. endpoint: a route of the server, not a path that a client sent."""
        self._responses.labels(**self._labels, endpoint=endpoint, status=str(status)).inc()

    def count_completion(
        self, answer: CompletionWriter, started: float, failure: str | None
    ) -> None:
        """Count an answer that is over. started: when its request arrived (perf_counter, seconds);
        failure: why it ended early, in one word, else None.
        """
        if failure is not None:
            self._failed.labels(**self._labels, reason=failure).inc()
        for ending in answer.endings:
            if ending is not None:
                self._ended.labels(**self._labels, finished_reason=ending).inc()
        if answer.first_at is not None:  # else the engine refused it, or the client left before
            self._prompt_tokens.labels(**self._labels).inc(answer.num_prompt_tokens)
        self._tokens.labels(**self._labels).inc(answer.num_tokens)
        self._accept_hist = sum_hists((self._accept_hist, answer.accept_hist))
        if failure is not None or answer.first_at is None or answer.last_at is None:
            return
        self._num_prompt.labels(**self._labels).observe(answer.num_prompt_tokens)
        self._num_answer.labels(**self._labels).observe(answer.num_tokens)
        self._ttft.labels(**self._labels).observe(answer.first_at - started)
        self._e2e.labels(**self._labels).observe(answer.last_at - started)
        per_sample = answer.num_tokens / answer.num_samples
        if per_sample > 1:
            tpot_s = (answer.last_at - answer.first_at) / (per_sample - 1)
            self._tpot.labels(**self._labels).observe(tpot_s)

    # At a scrape

    def page(self, state: EngineState, num_samples: int) -> bytes:
        """All metrics in Prometheus' text format. num_samples: running or waiting, as the server
        counts them.
        """
        self._state, self._num_samples = state, num_samples
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's part; Prometheus' registry calls it."""
        counters, records = self._state.counters, self._state.records
        if not counters:
            return
        yield self._gauge("num_requests_running", "samples that hold a slot", counters["running"])
        waiting = max(self._num_samples - counters["running"], counters["waiting"])
        yield self._gauge("num_requests_waiting", "samples that wait for one", waiting)
        yield self._gauge("kv_cache_pages", "pages of 16 tokens", self.num_pages)
        yield self._gauge(
            "kv_cache_pages_available",
            "pages that no sample holds, kept ones included",
            counters["pages_available"],
        )
        yield self._gauge(
            "kv_cache_pages_kept", "pages kept for prompts that begin alike", counters["pages_kept"]
        )
        used = 1 - counters["pages_available"] / self.num_pages
        yield self._gauge("kv_cache_usage_perc", "share of pages that are held, 0 to 1", used)
        for name, counter, about in _COUNTERS:
            family = CounterMetricFamily(f"eyas:{name}", about, labels=("model_name",))
            family.add_metric(list(self._labels.values()), counters[counter])
            yield family
        for name, counter, scale, about in _OF_ROUNDS:
            family = CounterMetricFamily(f"eyas:{name}", about, labels=("model_name", "kind"))
            for kind in ("plain", "tree"):
                family.add_metric(
                    [*self._labels.values(), kind], scale * counters[f"{kind}_{counter}"]
                )
            yield family
        time_s = counters["device_busy_s"] + counters["device_idle_s"]
        yield self._gauge(
            "device_idle_share",
            "of the time with work",
            counters["device_idle_s"] / time_s if time_s else 0.0,
        )
        yield from self._acceptance()
        yield from self._lately(records)
        yield self._speedups(counters)

    def _acceptance(self) -> Iterator[Metric]:
        """Of the answers that are over: a round accepts at position p when it accepts more than p
        drafts.
        """
        rounds = sum(self._accept_hist)
        accepted = num_accepted(self._accept_hist)
        for name, value, about in (
            ("spec_decode_num_drafts", rounds, "rounds that a sample drafted in"),
            ("spec_decode_num_accepted_tokens", accepted, "drafted tokens that were accepted"),
        ):
            family = CounterMetricFamily(f"eyas:{name}", about, labels=("model_name",))
            family.add_metric(list(self._labels.values()), value)
            yield family
        per_position = CounterMetricFamily(
            "eyas:spec_decode_num_accepted_tokens_per_pos",
            "accepted, by position",
            labels=("model_name", "position"),
        )
        for position, count in enumerate(accepted_by_position(self._accept_hist)):
            per_position.add_metric([*self._labels.values(), str(position)], count)
        yield per_position
        if self.tau is not None:
            yield self._gauge(
                "spec_accept_length", "tau: tokens a round and sample, since the start", self.tau
            )

    def _lately(self, records: list[RoundRecord]) -> Iterator[Metric]:
        """Of the last rounds that the engine remembers."""
        trees = [record for record in records if record.num_drafting]
        if trees:
            emitted = sum(one.tokens - (one.num_requests - one.num_drafting) for one in trees)
            tau = emitted / sum(one.num_drafting for one in trees)
            yield self._gauge("spec_accept_length_recent", "tau of the last rounds", tau)
            sizes = [one.num_nodes / one.num_drafting for one in trees]
            yield self._quantiles(
                "spec_tree_nodes", "drafted tokens a sample in the last rounds", sizes
            )
            yield self._quantiles(
                "spec_tree_depth", "levels of the last rounds' trees", [one.depth for one in trees]
            )
        errors = [
            abs(one.real_ms / one.predicted_ms - 1) for one in records if one.predicted_ms > 0
        ]
        if errors:
            yield self._quantiles(
                "round_cost_error",
                "relative error of the predicted time of the last rounds",
                errors,
            )

    def _speedups(self, counters: dict[str, float]) -> Metric:
        family = GaugeMetricFamily(
            "eyas:spec_speedup",
            "estimate for speculation over plain rounds",
            labels=("model_name", "speculating", "requests"),
        )
        for name, value in counters.items():
            if name.startswith("speedup_"):
                speculating, _, requests = name.removeprefix("speedup_").partition("_of_")
                family.add_metric([*self._labels.values(), speculating, requests], value)
        return family

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"eyas:{name}", about, labels=("model_name",))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _quantiles(self, name: str, about: str, values: Iterable[float]) -> Metric:
        family = GaugeMetricFamily(f"eyas:{name}", about, labels=("model_name", "quantile"))
        for quantile, value in zip(_QUANTILES, np.quantile(list(values), _QUANTILES), strict=True):
            family.add_metric([*self._labels.values(), str(quantile)], float(value))
        return family
