"""What Prometheus and Grafana ask for: every metric is one that servers have, and the rules come to
what `eyas watch` says.

Expressions are parsed by Prometheus' own grammar (promql-parser) and evaluated here, as far as the
rules need it: `increase` is the difference of two pages, and all else is Prometheus' arithmetic on
vectors with the labels by which they were summed.
"""

from __future__ import annotations

import json
import math
import operator
from collections import defaultdict
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from eyas.bench import watch
from eyas.bench.server import counted_between, parse_metrics
from eyas.bench.watch import CardTau, read_card, window_of
from eyas.cli.watch import LEAST_REQUESTS
from eyas.hub import locate
from tests.serving import World, ask
from tests.watched_pages import sglang_page, vllm_pages

promql = pytest.importorskip("promql_parser", reason="the extra dev has it")

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
(GROUP,) = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())["spec"]["groups"]
RECORDS = {rule["record"]: rule["expr"] for rule in GROUP["rules"] if "record" in rule}
ALERTS = {rule["alert"]: rule["expr"] for rule in GROUP["rules"] if "alert" in rule}
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text())
MATHS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
MATHS["^"] = operator.pow
COMPARED = {"<": operator.lt, ">": operator.gt, ">=": operator.ge, "<=": operator.le}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Two pages of each server: of ours now, of vLLM recorded, of SGLang written."""
    folder = tmp_path_factory.mktemp("served")
    world = World.make(folder / "target")
    with world.served(world.drafting(folder / "head", "fixed(4,1,5)"), has_head=True) as client:
        of_eyas = []
        for number in range(2):
            for seed in range(4 * number, 4 * number + 4):  # some draft is right by chance
                ask(client, n=4, temperature=1, seed=seed)
            of_eyas.append(httpx.get(f"{client.url}/metrics").text)
    sglang = [sglang_page(10, 100, 250), sglang_page(110, 2100, 4850)]
    return {"eyas": of_eyas, "vllm": vllm_pages(), "sglang": sglang}


def series(page):
    """Values by metric and labels."""
    found = defaultdict(dict)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name][frozenset(sample.labels.items())] = sample.value
    return found


class Prometheus:
    """Two scrapes of some servers, an hour apart, and what rules recorded of them. A vector is a
    dict of values by labels, a scalar a number.
    """

    def __init__(self, pages):
        self.before, self.after = {}, {}
        for job, both in pages.items():
            for scrape, page in zip((self.before, self.after), both, strict=True):
                for name, own in series(page).items():
                    for labels, value in own.items():
                        scrape[name, labels | {("instance", job)}] = value
        self.recorded = {}

    def record(self, rules, **given):
        for name, text in rules.items():
            value = given.get(name.partition(":")[2]) if name.startswith("eyas_card") else None
            found = self.value(promql.parse(text))
            self.recorded[name] = found if value is None else {frozenset(): value}

    def value(self, one):
        match type(one).__name__:
            case "NumberLiteral":
                return one.val
            case "ParenExpr":
                return self.value(one.expr)
            case "VectorSelector":
                if one.name in self.recorded:
                    return self.recorded[one.name]
                return {labels: v for (name, labels), v in self.after.items() if name == one.name}
            case "AggregateExpr":
                return self.summed(self.value(one.expr), one.modifier.labels)
            case "Call":
                return self.called(one)
            case "BinaryExpr":
                return self.joined(one)
        raise AssertionError(f"{one} is not known here")

    def summed(self, vector, kept):
        found = defaultdict(float)
        for labels, value in vector.items():
            found[frozenset(pair for pair in labels if pair[0] in kept)] += value
        return dict(found)

    def called(self, one):
        name, (argument,) = one.func.name, one.args
        if name == "increase":
            wanted = argument.vector_selector.name
            assert argument.range.total_seconds() == 3600
            return {
                labels: value - self.before.get((metric, labels), 0.0)
                for (metric, labels), value in self.after.items()
                if metric == wanted
            }
        value = self.value(argument)
        if name == "vector":
            return {frozenset(): value}
        if name == "scalar":
            return next(iter(value.values())) if len(value) == 1 else math.nan
        assert name == "sqrt"
        return {labels: math.sqrt(one) for labels, one in value.items()}

    def joined(self, one):
        left, right, word = self.value(one.lhs), self.value(one.rhs), str(one.op)
        if word == "or":
            return {**right, **left}
        if word in ("and", "unless"):
            return {k: v for k, v in left.items() if (k in right) == (word == "and")}
        both = [isinstance(side, dict) for side in (left, right)]
        if not any(both):
            return MATHS[word](left, right)
        keys = left.keys() & right.keys() if all(both) else (left if both[0] else right).keys()
        pairs = {k: (left[k] if both[0] else left, right[k] if both[1] else right) for k in keys}
        if word in COMPARED:
            return {k: a for k, (a, b) in pairs.items() if COMPARED[word](a, b)}
        return {k: MATHS[word](a, b) for k, (a, b) in pairs.items()}


def metrics(expression):
    """Names of all metrics that an expression reads."""
    found = []

    def keep(one):
        if isinstance(one, promql.VectorSelector):
            found.append(one.name)

    promql.walk(promql.parse(expression), keep)
    return found


def test_every_metric_that_is_asked_for_is_one_that_servers_have(pages):
    known = {name for both in pages.values() for name in series(both[1])} | set(RECORDS)
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    asked = [*RECORDS.values(), *ALERTS.values(), *(one.replace(RATE, "5m") for one in panels)]
    read = {name for expression in asked for name in metrics(expression)}
    assert read - known == set()
    assert {name.partition(":")[0] for name in read} == {
        "eyas", "vllm", "sglang", "eyas_card", "eyas_head",
    }  # fmt: skip
    for name in ("sglang", "vllm"):  # the autoscaler's
        text = (DEPLOY / f"{name}.yaml").read_text()
        assert text.split("seriesQuery: '")[1].split("{")[0] in known


RATE = "$__rate_interval"


@pytest.mark.parametrize("server", ["eyas", "vllm", "sglang"])
@pytest.mark.parametrize("share", [0.5, 1.0, 3.0])
def test_the_rules_say_what_the_watch_says(pages, server, share):
    """Against a card whose tau is lower, the same, or higher."""
    before, after = map(parse_metrics, pages[server])
    counted = counted_between(before, after)
    plain = CardTau("fixed(4,1,5)", 0.0, 2.0, (1.9, 2.1), 80, 2000, (0.5,) * 4)
    tau = 1 + share * (window_of([plain], 0.0, {"a": counted}, {"a": after}).tau - 1)
    card = CardTau("fixed(4,1,5)", 0.0, tau, (tau - 0.1, tau + 0.1), 80, 2000, (0.5,) * 4)
    window = window_of([card], 0.0, {"a": counted}, {"a": after})
    prometheus = Prometheus({server: pages[server]})
    prometheus.record(RECORDS, tau=tau, se=card.se, answers=80, rounds=2000)
    expected = {"requests": window.num_requests, "rounds": window.num_rounds}
    expected |= {name: getattr(window, name) for name in ("tau", "worth", "se", "least_tau")}
    for name, value in expected.items():
        (found,) = prometheus.recorded[f"eyas_head:{name}"].values()
        assert found == pytest.approx(value, rel=1e-4), name
    enough = ALERTS["EyasHeadStale"].replace(f">= {LEAST_REQUESTS}", ">= 1")
    assert enough != ALERTS["EyasHeadStale"]
    assert bool(prometheus.value(promql.parse(enough))) == window.is_stale


def test_a_server_without_a_head_is_an_alert():
    idle = 'vllm:request_success_total{{model_name="m"}} {}\n'
    prometheus = Prometheus({"vllm": [idle.format(0), idle.format(40)]})
    prometheus.record(RECORDS)
    assert prometheus.value(promql.parse(ALERTS["EyasHeadNotDrafting"]))
    assert not prometheus.value(promql.parse(ALERTS["EyasHeadStale"]))


def test_the_numbers_in_the_rules_are_the_packaged_head_s():
    (card,) = read_card(locate("smollm2"))
    prometheus = Prometheus({})
    prometheus.record(RECORDS)
    expected = {"tau": card.tau, "se": round(card.se, 3), "rounds": card.num_rounds}
    for name, value in {**expected, "answers": card.num_answers}.items():
        assert prometheus.recorded[f"eyas_card:{name}"][frozenset()] == value
    assert f"- {watch.MARGIN:g} * (" in RECORDS["eyas_head:least_tau"]
    assert f"- {watch.Z:.4f} * " in RECORDS["eyas_head:least_tau"]


def test_panels_lie_side_by_side_and_name_their_source():
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    (variable,) = DASHBOARD["templating"]["list"]
    for panel in DASHBOARD["panels"]:
        assert panel["datasource"]["uid"] == f"${{{variable['name']}}}"
