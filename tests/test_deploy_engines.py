"""Servers on Kubernetes: every object fits Kubernetes' own schemas, and SGLang and vLLM get the
commands that `eyas export` writes. The Prometheus operator's schemas are in no package: its fields
are held against a list after its API reference (v1).
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from eyas.card import CardTau
from eyas.export.card import prometheus_rules
from eyas.export.engines import Launch
from tests.test_deploy import amount

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the group `dev` has it")

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
VERSIONS = ("1.30", kubernetes_validate.latest_version())
ENGINES = ("sglang", "vllm")
OPERATOR = "monitoring.coreos.com/v1"
LAUNCH = Launch("Qwen/Qwen3-8B", 4, 4, 16, "bfloat16", 8192)
KINDS = {
    "ServiceAccount", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "PodMonitor",
    "NetworkPolicy",
}  # fmt: skip
WORKLOADS = {"eyas": "Deployment", "sglang": "StatefulSet", "vllm": "StatefulSet"}
FILES = {"eyas": "kubernetes"}  # whose name is not the server's
VERSION = "metadata.labels['head_version']"
RULE = {"alert", "record", "expr", "for", "keep_firing_for", "labels", "annotations"}
GROUP = {"name", "interval", "rules", "labels", "limit", "query_offset"}
ENDPOINT = {"port", "path", "interval", "scheme", "scrapeTimeout", "honorLabels", "params"}


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / f"{name}.yaml").read_text()))


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


@pytest.fixture(params=WORKLOADS)
def server(request):
    return request.param


@pytest.fixture
def objects(request):
    name = request.getfixturevalue("server" if "server" in request.fixturenames else "engine")
    return {one["kind"]: one for one in documents(FILES.get(name, name))}


@pytest.fixture
def pod(objects):
    return workload(objects)["template"]["spec"]


def workload(objects):
    (found,) = (objects[kind]["spec"] for kind in set(WORKLOADS.values()) & set(objects))
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [*ENGINES, "kubernetes"])
def test_objects_fit_the_schemas_of_kubernetes(name, version):
    found = documents(name)
    for one in found:
        if one["apiVersion"] != OPERATOR:
            kubernetes_validate.validate(one, version, strict=True)
    wrong = next(one for one in found if one["kind"] in ("StatefulSet", "Deployment"))
    wrong["spec"]["template"]["spec"]["containers"][0]["comand"] = ["x"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_objects_belong_together(objects, server):
    assert set(objects) == KINDS | {WORKLOADS[server]}
    labels = {"app.kubernetes.io/name": server}
    assert all(one["metadata"]["name"] == server for one in objects.values())
    assert all(one["metadata"]["labels"] == labels for one in objects.values())
    spec = workload(objects)
    assert spec["template"]["metadata"]["labels"] == {**labels, "head_version": "VERSION"}
    assert objects["Service"]["spec"]["selector"] == labels
    for one in (spec, *(objects[kind]["spec"] for kind in ("PodDisruptionBudget", "PodMonitor"))):
        assert one["selector"]["matchLabels"] == labels
    scaled = objects["HorizontalPodAutoscaler"]["spec"]
    of = scaled["scaleTargetRef"]
    assert (of["kind"], of["name"]) == (WORKLOADS[server], server)
    # one pod of two may go, and `kubectl apply` keeps the autoscaler's number
    assert scaled["minReplicas"] > objects["PodDisruptionBudget"]["spec"]["maxUnavailable"]
    assert "replicas" not in spec
    (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == labels


def test_only_named_pods_and_prometheus_reach_a_server(objects, server):
    policy = objects["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": server}
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    assert [list(one) for one in rule["from"]] == [["podSelector"], ["namespaceSelector"]]
    (port,) = workload(objects)["template"]["spec"]["containers"][0]["ports"]
    assert rule["ports"] == [{"port": port["name"]}]


def test_the_heads_version_is_in_one_place(objects, pod, server):
    """The label of the pods, which the head's URL and the series' label follow. The first pod of a
    roll-out is a canary for half an hour.
    """
    where = [*pod.get("initContainers", ()), *pod["containers"]]
    (reads,) = (one for one in where if any("$(HEAD_VERSION)" in text for text in one["args"]))
    value = {"fieldRef": {"fieldPath": VERSION}}
    assert {"name": "HEAD_VERSION", "valueFrom": value} in reads["env"]
    monitor = objects["PodMonitor"]["spec"]
    assert monitor["podTargetLabels"] == ["head_version"]
    spec, kind = workload(objects), WORKLOADS[server]
    assert spec["minReadySeconds"] >= 1800
    if kind == "Deployment":  # the API server refuses less
        assert spec["progressDeadlineSeconds"] > spec["minReadySeconds"]
        assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    text = (DEPLOY / f"{FILES.get(server, server)}.yaml").read_text()
    patch = re.search(rf"kubectl patch {kind.lower()} {server} -p '(.*)'", text)[1]
    changed = json.loads(patch)["spec"]["template"]["metadata"]["labels"]
    assert changed == {"head_version": "VERSION"}
    assert f"kubectl rollout undo {kind.lower()} {server}\n" in text
    page = (DEPLOY.parent / "docs/production.md").read_text()
    assert patch in page
    assert "kubectl rollout undo " in page


def test_the_command_is_the_one_that_export_writes(pod, engine):
    (container,) = pod["containers"]
    words = [*container["command"], *container["args"]]
    written = LAUNCH.arguments(engine, "/cache/head")
    assert words[: len(written)] == written
    rest = words[len(written) :]
    own = {
        "sglang": ["--api-key", "$(API_KEY)", "--enable-metrics"],  # vLLM always counts
        "vllm": ["--shutdown-timeout", "150"],  # whose default, 0, cuts what runs
    }[engine]
    assert rest == ["--host", "0.0.0.0", "--port", "8000", "--revision", "COMMIT", *own]
    (key,) = (one for one in container["env"] if "valueFrom" in one)
    assert key["name"] == {"sglang": "API_KEY", "vllm": "VLLM_API_KEY"}[engine]
    assert key["valueFrom"]["secretKeyRef"] == {"name": f"{engine}-api-key", "key": "key"}
    (port,) = container["ports"]
    assert port["containerPort"] == 8000


def test_the_head_is_fetched_first(pod, engine):
    (fetching,) = pod["initContainers"]
    source, folder = fetching["args"]
    assert re.fullmatch(rf"gs://BUCKET/heads/[\w-]+/\$\(HEAD_VERSION\)/{engine}", source)
    mounts = {one["mountPath"] for one in fetching["volumeMounts"]}
    assert folder == "/cache/head"
    assert "/cache" in mounts
    assert folder in "".join(pod["containers"][0]["args"])


@pytest.mark.usefixtures("engine")
def test_nothing_runs_as_root_or_writes_outside_its_volumes(pod):
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 10001
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    for one in [*pod["initContainers"], *pod["containers"]]:
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        values = [env.get("value", "") for env in one["env"]]
        written = [value for value in values if value.startswith("/")]  # caches
        mounts = tuple(f"{mount['mountPath']}/" for mount in one["volumeMounts"])
        assert written
        assert all(path.startswith(mounts) for path in written)
        resources = one["resources"]
        for what in ("cpu", "memory"):
            assert 0 < amount(resources["requests"][what]) <= amount(resources["limits"][what])
        assert ":" in one["image"]
        assert not one["image"].endswith(":latest")


@pytest.mark.usefixtures("engine")
def test_the_cache_outlives_its_pod(objects, pod):
    (claim,) = objects["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "cache"
    kept = objects["StatefulSet"]["spec"]["persistentVolumeClaimRetentionPolicy"]
    assert set(kept.values()) == {"Retain"}
    assert "cache" not in {volume["name"] for volume in pod["volumes"]}


def test_probes_and_an_end_in_time(pod, engine):
    (container,) = pod["containers"]
    paths = dict.fromkeys(("startupProbe", "readinessProbe", "livenessProbe"), "/health")
    if engine == "sglang":  # of a token, which takes its 20 s behind long prompts
        paths |= dict.fromkeys(("startupProbe", "livenessProbe"), "/health_generate")
        off = {"name": "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "value": "0"}
        assert off in container["env"]
    for name, path in paths.items():
        probe = container[name]
        assert probe["httpGet"] == {"path": path, "port": "http"}
        assert probe["periodSeconds"] >= probe["timeoutSeconds"]
        assert path == "/health" or probe["timeoutSeconds"] > 20
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1200
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    words = container["args"]
    drain = int(words[words.index("--shutdown-timeout") + 1]) if engine == "vllm" else 120
    assert pod["terminationGracePeriodSeconds"] >= pause + drain + 10


def test_pods_are_added_by_the_queue(objects, server):
    (metric,) = objects["HorizontalPodAutoscaler"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    series = "sglang:num_queue_reqs" if server == "sglang" else f"{server}:num_requests_waiting"
    assert name == series.replace(":", "_")
    text = (DEPLOY / f"{FILES.get(server, server)}.yaml").read_text()
    assert f"seriesQuery: '{series}{{" in text  # the adapter's rule, in the comment
    assert f"as: {name}}}" in text


def test_the_operator_s_objects_have_known_fields(objects, server):
    monitor = objects["PodMonitor"]
    assert monitor["apiVersion"] == OPERATOR
    assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints", "podTargetLabels"}
    (port,) = workload(objects)["template"]["spec"]["containers"][0]["ports"]
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        assert set(endpoint) <= ENDPOINT
        assert endpoint["port"] == port["name"]


def test_the_rules_have_known_fields():
    tau = CardTau("fixed(4,1,5)", 0, 2, (1, 3), 8, 9, ())
    of_a_card = prometheus_rules([tau], "m", "1", "vllm")
    for rules in (*documents("prometheus-rules"), yaml.safe_load(of_a_card)):
        assert (rules["apiVersion"], rules["kind"]) == (OPERATOR, "PrometheusRule")
        assert set(rules["spec"]) == {"groups"}
        for group in rules["spec"]["groups"]:
            assert set(group) <= GROUP
            for rule in group["rules"]:
                assert set(rule) <= RULE
                assert ("alert" in rule) != ("record" in rule)
                assert all(isinstance(text, str) for text in rule.get("annotations", {}).values())
