"""Prometheus and Grafana: every metric is one that servers have, and the rules, run by `promtool
test rules`, say what `eyas watch` says, replica by replica.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from eyas.bench import watch
from eyas.bench.server import counted_between, parse_metrics
from eyas.bench.watch import window_of
from eyas.card import CardTau
from eyas.cli.watch import LEAST_REQUESTS
from eyas.export.card import prometheus_rules
from tests.serving import ask
from tests.watched_pages import sglang_page, vllm_pages

promql = pytest.importorskip("promql_parser", reason="the group `dev` has it")
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool is installed here: apt-get install prometheus"
)

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
SPEC = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())["spec"]
(GROUP,) = SPEC["groups"]
RECORDS = {rule["record"]: rule["expr"] for rule in GROUP["rules"] if "record" in rule}
ALERTS = {rule["alert"]: rule for rule in GROUP["rules"] if "alert" in rule}
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text())
RATE = "$__rate_interval"
STALE, NOT_DRAFTING = ALERTS


@pytest.fixture(scope="module")
def pages(world, tmp_path_factory):
    """Two pages of each server: of ours now, of vLLM recorded, of SGLang written."""
    engine = world.drafting(tmp_path_factory.mktemp("drafts") / "head", "fixed(4,1,5)")
    with world.served(engine, has_head=True) as client:
        of_eyas = []
        for number in range(2):
            for seed in range(4 * number, 4 * number + 4):  # some draft is right by chance
                ask(client, n=4, temperature=1, seed=seed)
            of_eyas.append(httpx.get(f"{client.url}/metrics").text)
    sglang = [sglang_page(10, 100, 250), sglang_page(110, 2100, 4850)]
    return {"eyas": of_eyas, "vllm": vllm_pages(), "sglang": sglang}


def samples(page):
    """Values by metric and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def selector(name, labels):
    return name + "{" + ",".join(f"{key}={json.dumps(text)}" for key, text in labels) + "}"


def an_hour(before, after, more):
    """The series of a server that counted from one page to the next in an hour. more: labels."""
    first, read = samples(before), {name for rule in RECORDS.values() for name in metrics(rule)}
    return {
        selector(name, sorted(labels | more.items())): (first.get((name, labels), 0.0), value)
        for (name, labels), value in samples(after).items()
        if name in read
    }


def run_promtool(folder, series, spec=SPEC, cards=(), expressions=None, alerts=()):
    """Within an hour each series goes from its first to its second value; then every expression has
    its values by labels. cards: rules that record cards.
    """
    files = []
    for number, one in enumerate((spec, *(yaml.safe_load(text)["spec"] for text in cards))):
        files.append(str(folder / f"rules{number}.yaml"))
        Path(files[-1]).write_text(yaml.safe_dump(one))
    test = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": f"{first!r}+{(last - first) / 60!r}x60"}
            for name, (first, last) in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": expression,
                "eval_time": "60m",
                "exp_samples": [
                    {"labels": labels, "value": value} for labels, value in found.items()
                ],
            }
            for expression, found in (expressions or {}).items()
        ],
        "alert_rule_test": [*alerts],
    }
    (folder / "test.yaml").write_text(
        yaml.safe_dump({"rule_files": files, "evaluation_interval": "1m", "tests": [test]})
    )
    done = subprocess.run(
        [PROMTOOL, "test", "rules", str(folder / "test.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def metrics(expression):
    """Names of all metrics that an expression reads."""
    found = []

    def keep(one):
        if isinstance(one, promql.VectorSelector):
            found.append(one.name)

    promql.walk(promql.parse(expression), keep)
    return found


def test_every_metric_that_is_asked_for_is_one_that_servers_have(pages):
    known = {name for both in pages.values() for name, _ in samples(both[1])} | set(RECORDS)
    known |= {f"eyas:card_{name}" for name in CHAIN.series}
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    alerts = [rule["expr"] for rule in ALERTS.values()]
    asked = [*RECORDS.values(), *alerts, *(one.replace(RATE, "5m") for one in panels)]
    read = {name for expression in asked for name in metrics(expression)}
    assert read - known == set()
    assert {name.partition(":")[0] for name in read} == {
        "eyas", "vllm", "sglang", "eyas_card", "eyas_head", "eyas_replica",
    }  # fmt: skip
    for name in ("sglang", "vllm", "kubernetes"):  # the autoscaler's
        text = (DEPLOY / f"{name}.yaml").read_text()
        assert text.split("seriesQuery: '")[1].split("{")[0] in known
    assert f"- {watch.MARGIN:g} * (" in RECORDS["eyas_head:least_tau"]
    assert f"- {watch.Z:.4f} * " in RECORDS["eyas_head:least_tau"]
    assert f">= {LEAST_REQUESTS}" in ALERTS[STALE]["expr"]


CHAIN = CardTau("fixed(4,1,5)", 0.0, 2.4, (2.3, 2.5), 80, 2000, (0.5,) * 4)


@needs_promtool
@pytest.mark.parametrize("server", ["eyas", "vllm", "sglang"])
@pytest.mark.parametrize("share", [0.5, 1.0, 3.0])
def test_the_rules_say_what_the_watch_says(pages, tmp_path, server, share):
    """Against a card whose tau is lower, the same, or higher; a warmer one is of no concern."""
    before, after = map(parse_metrics, pages[server])
    counted = counted_between(before, after)
    tau = 1 + share * (window_of([CHAIN], 0.0, {"a": counted}, {"a": after}).tau - 1)
    card = CardTau("fixed(4,1,5)", 0.0, tau, (tau - 0.1, tau + 0.1), 80, 2000, (0.5,) * 4)
    warmer = CardTau("fixed(4,1,5)", 1.0, 1.1, (1.0, 1.2), 80, 2000, (0.5,) * 4)
    window = window_of([card], 0.0, {"a": counted}, {"a": after})
    assert window.is_stale == (share == 3.0 and server != "eyas")  # of ours 16 answers, no proof
    series = an_hour(*pages[server], {"instance": "a:8000", "head_version": "v1"})
    (model,) = {dict(labels)["model_name"] for _, labels in samples(pages[server][1]) if labels} - {
        ""
    }
    expected = {"requests": window.num_requests, "rounds": window.num_rounds}
    expected |= {name: getattr(window, name) for name in ("tau", "worth", "se", "least_tau")}
    own = selector("", sorted({"head_version": "v1", "model_name": model}.items()))
    near = {
        f"abs(eyas_head:{name} / {value!r} - 1) < bool 1e-4": {
            own: 1,
            own.replace("{head_version", '{instance="a:8000",head_version'): 1,
        }
        for name, value in expected.items()
    }
    stale = f'count(ALERTS{{alertname="{STALE}"}}) or vector(0)'  # of the replica, and of all
    few = yaml.safe_load(json.dumps(SPEC).replace(f">= {LEAST_REQUESTS}", ">= 1"))
    run_promtool(
        tmp_path,
        series,
        spec=few,
        cards=[prometheus_rules([card, warmer], model, "v1", "vllm")],
        expressions={**near, stale: {"{}": 2 * window.is_stale}},
    )


def replica(pod, tau, requests, version="v1", model="m", card=None):
    """The series of a vLLM pod that ended requests of 50 rounds in an hour. tau: None is no draft.
    card: the tau that a server of ours exports.
    """
    prefix, where = "vllm" if card is None else "eyas", f'model_name="{model}"'
    where += f',instance="{pod}:8000",pod="{pod}"' + (
        f',head_version="{version}"' if version else ""
    )
    counts = {"request_success": requests}
    if tau is not None:
        rounds = 50 * requests
        counts["spec_decode_num_drafts"] = rounds
        counts["spec_decode_num_accepted_tokens"] = (tau - 1) * rounds
    found = {f"{prefix}:{name}_total{{{where}}}": (0.0, float(n)) for name, n in counts.items()}
    if card is not None:
        figures = CardTau("fixed(4,1,5)", 0.0, card, (card - 0.1, card + 0.1), 80, 4000, ()).series
        at = where + ',temperature="0"'
        found |= {f"eyas:card_{name}{{{at}}}": (one, one) for name, one in figures.items()}
    return found


V1, V2 = (prometheus_rules([CHAIN], "m", version, "vllm") for version in ("v1", "v2"))
FLEET = {**replica("p0", 2.4, 300), **replica("p1", 2.35, 300), **replica("p2", 2.45, 300)}
FALLEN = {f"q{number}": replica(f"q{number}", 1.3, 20) for number in range(9)}


@needs_promtool
@pytest.mark.parametrize(
    ("series", "cards", "alerts"),
    [
        (FLEET, [V1], {}),
        # a canary on a tenth of the requests, alone among its version, or of a head that is the old
        ({**FLEET, **replica("p3", 1.01, 100, "v2")}, [V1, V2], {STALE: {"p3", "v2"}}),
        ({**FLEET, **replica("p3", 1.01, 100)}, [V1], {STALE: {"p3"}}),
        ({**FLEET, **replica("p3", 2.38, 100, "v2")}, [V1, V2], {}),
        # too few requests to tell, of each; enough of all
        ({**FLEET, **replica("p3", 1.01, 20, "v2")}, [V1, V2], {}),
        ({k: v for one in FALLEN.values() for k, v in one.items()}, [V1], {STALE: {"v1"}}),
        # another model with its own card, or with none; one that was never to have a head
        ({**FLEET, **replica("o", 1.6, 300, model="other", card=1.6)}, [V1], {}),
        ({**FLEET, **replica("o", 1.6, 300, model="other", card=2.4)}, [V1], {STALE: {"o", "v1"}}),
        ({**FLEET, **replica("o", 1.2, 300, model="other")}, [V1], {}),
        ({**FLEET, **replica("o", None, 300, "", model="plain")}, [V1], {}),
        # a replica that came up without the head that its version has
        ({**FLEET, **replica("p3", None, 300)}, [V1], {NOT_DRAFTING: {"p3"}}),
        ({**FLEET, **replica("p3", None, 300, "v2")}, [V1, V2], {NOT_DRAFTING: {"p3", "v2"}}),
        # outside of Kubernetes: no version, and nothing but the server's own card
        (replica("x", 1.2, 300, "", card=2.0), [], {STALE: {"x", ""}}),
    ],
)
def test_each_replica_is_held_to_the_card_of_its_head(tmp_path, series, cards, alerts):
    """Names of the pods that an alarm is about; of all replicas of a version, the version."""
    by_pod = {
        f'count by (pod) (ALERTS{{alertname="{name}",instance!=""}})': {
            f'{{pod="{pod}"}}': 1 for pod in alerts.get(name, ()) if pod[:1] not in ("v", "")
        }
        for name in ALERTS
    }
    by_version = {
        f'count by (head_version) (ALERTS{{alertname="{name}",instance=""}})': {
            f'{{head_version="{one}"}}' if one else "{}": 1
            for one in alerts.get(name, ())
            if one[:1] in ("v", "")
        }
        for name in ALERTS
    }
    run_promtool(tmp_path, series, cards=cards, expressions={**by_pod, **by_version})


@needs_promtool
def test_an_alarm_says_of_which_replica_and_what_to_do(tmp_path):
    texts = ALERTS[STALE]["annotations"]
    labels = {"head_version": "v2", "model_name": "m", "severity": "warning"}
    of_pod = {**labels, "pod": "p3", "instance": "p3:8000"}
    alarms = [
        {
            "exp_labels": given,
            "exp_annotations": {
                "summary": f"The draft head v2 of m is stale on {where}",
                "description": texts["description"].replace('{{ $value | printf "%.2f" }}', "1.01"),
            },
        }
        for given, where in ((of_pod, "p3"), (labels, "all its replicas"))
    ]
    case = {"eval_time": "60m", "alertname": STALE, "exp_alerts": alarms}
    run_promtool(tmp_path, replica("p3", 1.01, 100, "v2"), cards=[V2], alerts=[case])


@needs_promtool
def test_prometheus_finds_nothing_wrong_with_the_rules(tmp_path):
    for number, spec in enumerate((SPEC, yaml.safe_load(V1)["spec"])):
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(spec))
    subprocess.run([PROMTOOL, "check", "rules", *tmp_path.glob("*.yaml")], check=True)


def test_panels_lie_side_by_side_and_name_their_source():
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    (variable,) = DASHBOARD["templating"]["list"]
    for panel in DASHBOARD["panels"]:
        assert panel["datasource"]["uid"] == f"${{{variable['name']}}}"
