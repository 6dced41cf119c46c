"""Metrics for Prometheus, and a line of log per request; neither holds any of a request's text.

Metrics have vLLM's names where vLLM has one, with the prefix `eyas:`. Requests count when they end;
each scrape reads the engine's counters.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request as HttpRequest

from eyas.card import CardTau, card_of_head, of_size
from eyas.errors import EyasError
from eyas.hub import locate
from eyas.serve.writers import CompletionWriter
from eyas.tau import accepted_by_position, num_accepted, sum_hists, tau_of

log = logging.getLogger("eyas.serve")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
_TOKENS = (*(10**power * digit for power in range(5) for digit in (1, 2, 5)), 100_000)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "from a request's arrival to its first token"),
    ("request_time_per_output_token_seconds", "after the first, mean of a sample"),
    ("e2e_request_latency_seconds", "from a request's arrival to its last token"),
    ("request_prompt_tokens", "tokens of a request's prompts"),
    ("request_generation_tokens", "tokens of a request's answers"),
)
# Name here, the engine's counter, what it counts.
_COUNTERS = (
    ("num_preemptions", "preemptions", "samples that gave up their pages and waited again"),
    ("prefix_cache_queries", "prompt_tokens", "tokens of prompts that were looked up"),
    ("prefix_cache_hits", "prompt_tokens_reused", "tokens of prompts that were found"),
    ("prefix_cache_evictions", "pages_evicted", "kept pages that were given away"),
    ("spec_decode_num_draft_tokens", "verified_nodes", "the head's and text's that were judged"),
    ("spec_decode_num_draft_steps", "draft_steps", "forwards of the draft after its first"),
    ("spec_decode_draft_failures", "draft_failures", "heads that failed and were switched off"),
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
_KINDS = ("plain", "tree")  # kinds of rounds
# The head's card, which deploy/prometheus-rules.yaml compares with the traffic.
_OF_CARD = {
    "tau": "what the head's card promises",
    "se": "standard error of that tau",
    "answers": "answers that it was measured on",
    "rounds": "rounds of these answers",
}
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# W3C Trace Context: version, trace, span of the caller, flags
_TRACE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass
class Exchange:
    """One HTTP request, for the log and the metrics. id: the client's own if it can be logged.
    completions: one, or one for each instance of a prediction. started: perf_counter, seconds.
    """

    http: HttpRequest
    client: str = ""
    completions: Sequence[CompletionWriter] = ()
    failure: str | None = None
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.endpoint: str = self.http.scope["route"].path
        sent = self.http.headers.get("x-request-id", "")
        self.id = sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        trace = self.http.headers.get("traceparent", "")
        # for the log and the answer
        self.traced = {"traceparent": trace} if _TRACE.fullmatch(trace) else {}

    def facts(self, status: int) -> dict[str, Any]:
        """What the log says."""
        facts: dict[str, Any] = {
            "request_id": self.id,
            **self.traced,
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
                "finish_reasons": [
                    choice.ending for one in self.completions for choice in one.choices
                ],
                "tau": None if tau is None else round(tau, 3),
                "ttft_ms": round(1000 * (min(firsts) - self.started), 1) if firsts else None,
            }
        return facts


def card_figures(place: str, speculation: str) -> list[CardTau]:
    """The figures of a served head's card for the drafts that are served; none without a card."""
    try:
        return of_size(card_of_head(locate(place)), speculation)
    except EyasError as error:  # the head serves all the same
        log.warning("the head's card is not watched: %s", error.what)
        return []


class Metrics(Collector):
    """All metrics of one server. num_pages: of the engine's cache. card: as `card_figures`."""

    def __init__(self, model: str) -> None:
        self.num_pages = 1.0
        self.card: Sequence[CardTau] = ()
        self._scrapes: deque[float] = deque(maxlen=2)
        self._has_news = False  # since the last scrape
        self._registry = CollectorRegistry()
        self._model = model
        self._accept_hist: list[int] = []
        self._engine: Mapping[str, float] = {}
        self._num_samples = 0
        self._responses = self._counter("http_requests", "by answer", "endpoint", "status")
        self._ended = self._counter("request_success", "samples that ended", "finished_reason")
        self._failed = self._counter("request_failure", "requests that ended early", "reason")
        self._prompt_tokens = self._counter("prompt_tokens", "tokens of prompts that were answered")
        self._tokens = self._counter("generation_tokens", "tokens of answers")
        self._histograms = [
            Histogram(
                f"eyas:{name}",
                about,
                ("model_name",),
                registry=self._registry,
                buckets=_SECONDS if name.endswith("seconds") else _TOKENS,
            ).labels(model)
            for name, about in _HISTOGRAMS
        ]
        self._registry.register(self)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"eyas:{name}", about, ("model_name", *labels), registry=self._registry)

    @property
    def tau(self) -> float | None:
        """Since the start, of finished answers."""
        return tau_of(self._accept_hist)

    # When a request ends

    def count(self, exchange: Exchange, status: int) -> None:
        """Count a request that has ended, and its answers."""
        self._has_news = True
        self._responses.labels(self._model, exchange.endpoint, str(status)).inc()
        for answer in exchange.completions:
            if exchange.failure is not None:
                self._failed.labels(self._model, exchange.failure).inc()
            for choice in answer.choices:
                if choice.ending is not None:
                    self._ended.labels(self._model, choice.ending).inc()
            self._tokens.labels(self._model).inc(answer.num_tokens)
            self._accept_hist = sum_hists((self._accept_hist, answer.accept_hist))
            if answer.first_at is None or answer.last_at is None:
                continue  # the engine refused it, or the client left before
            self._prompt_tokens.labels(self._model).inc(answer.num_prompt_tokens)
            if exchange.failure is not None:
                continue
            per_sample = answer.num_tokens / len(answer.choices)
            values = (
                answer.first_at - exchange.started,
                (answer.last_at - answer.first_at) / (per_sample - 1) if per_sample > 1 else None,
                answer.last_at - exchange.started,
                answer.num_prompt_tokens,
                answer.num_tokens,
            )
            for histogram, value in zip(self._histograms, values, strict=True):
                if value is not None:
                    histogram.observe(value)

    # At a scrape

    def page(self, engine: Mapping[str, float], num_samples: int) -> bytes:
        """All metrics in Prometheus' text format. engine: its counters; num_samples: that run or
        wait here.
        """
        self._scrapes.append(time.monotonic())
        self._has_news = False
        self._engine, self._num_samples = engine, num_samples
        return generate_latest(self._registry)

    @property
    def is_awaited(self) -> bool:
        """Whether requests have ended since the last scrape, and the next may still come: within
        1.5 times the pause between the last two.
        """
        if not self._has_news or len(self._scrapes) < 2:
            return False
        before, last = self._scrapes
        return time.monotonic() < last + 1.5 * (last - before)

    def collect(self) -> Iterator[Metric]:
        """The card's and the engine's part, for Prometheus' registry."""
        for name, about in _OF_CARD.items():
            of_card = GaugeMetricFamily(
                f"eyas:card_{name}", about, labels=("model_name", "temperature")
            )
            for one in self.card:
                of_card.add_metric((self._model, f"{one.temperature:g}"), one.series[name])
            if self.card:
                yield of_card
        if not (counters := self._engine):
            return
        gauge, counter, hist = GaugeMetricFamily, CounterMetricFamily, self._accept_hist
        running, available = counters["running"], counters["pages_available"]
        waiting = max(self._num_samples - running, counters["waiting"])
        busy_s, idle_s = counters["device_busy_s"], counters["device_idle_s"]
        single = [
            (gauge, "num_requests_running", running, "samples that hold a slot"),
            (gauge, "num_requests_waiting", waiting, "samples that wait for one"),
            (gauge, "kv_cache_pages", self.num_pages, "pages of 16 tokens"),
            (gauge, "kv_cache_pages_available", available, "pages no sample holds, kept ones too"),
            (gauge, "kv_cache_pages_kept", counters["pages_kept"], "kept for equal beginnings"),
            (gauge, "kv_cache_usage_perc", 1 - available / self.num_pages, "share held, 0 to 1"),
            (gauge, "device_idle_share", idle_s / (busy_s + idle_s or 1), "of the time with work"),
            *((counter, name, counters[key], about) for name, key, about in _COUNTERS),
            (counter, "spec_decode_num_drafts", sum(hist), "rounds that the head drafted in"),
            (counter, "spec_decode_num_accepted_tokens", num_accepted(hist), "accepted in them"),
        ]
        if self.tau is not None:
            single.append((gauge, "spec_accept_length", self.tau, "tau: tokens a round and sample"))
        sources = {source: counters[f"accepted_{source}"] for source in ("head", "text", "both")}
        places = {str(place): float(one) for place, one in enumerate(accepted_by_position(hist))}
        accepted = "spec_decode_num_accepted_tokens"
        families = [(kind, name, about, {"": value}, "") for kind, name, value, about in single]
        families += [
            (counter, name, about, {of: scale * counters[f"{of}_{key}"] for of in _KINDS}, "kind")
            for name, key, scale, about in _OF_ROUNDS
        ]
        families += [
            (counter, f"{accepted}_by_source", "of head, text, and both alike", sources, "source"),
            (counter, f"{accepted}_per_pos", "accepted, by position", places, "position"),
        ]
        for kind, name, about, values, label in families:
            names = ("model_name", label) if label else ("model_name",)
            family = kind(f"eyas:{name}", about, labels=names)
            for text, value in values.items():
                family.add_metric([self._model, text][: len(names)], value)
            yield family
