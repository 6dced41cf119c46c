"""SGLang and vLLM on Kubernetes: every object against Kubernetes' own schemas, and the commands
against those that `eyas export` writes. No cluster ran them.

The schemas of the Prometheus operator's objects are in no package: of these, the fields that are
used are held against a list written after its API reference (v1).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from eyas.export.engines import Launch
from tests.test_deploy import amount

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the extra dev has it")

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
VERSIONS = ("1.30", kubernetes_validate.latest_version())
ENGINES = ("sglang", "vllm")
OPERATOR = "monitoring.coreos.com/v1"
LAUNCH = Launch("Qwen/Qwen3-8B", 4, 4, 16, "bfloat16", 8192)
KINDS = {
    "ServiceAccount", "Service", "StatefulSet", "PodDisruptionBudget", "HorizontalPodAutoscaler",
    "ServiceMonitor",
}  # fmt: skip
RULE = {"alert", "record", "expr", "for", "keep_firing_for", "labels", "annotations"}
GROUP = {"name", "interval", "rules", "labels", "limit", "query_offset"}
ENDPOINT = {"port", "path", "interval", "scheme", "scrapeTimeout", "honorLabels", "params"}


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / f"{name}.yaml").read_text()))


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


@pytest.fixture
def objects(engine):
    return {one["kind"]: one for one in documents(engine)}


@pytest.fixture
def pod(objects):
    return objects["StatefulSet"]["spec"]["template"]["spec"]


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


def test_all_that_is_promised_is_there_and_belongs_together(objects, engine):
    assert set(objects) == KINDS
    labels = {"app.kubernetes.io/name": engine}
    assert all(one["metadata"]["name"] == engine for one in objects.values())
    assert all(one["metadata"]["labels"] == labels for one in objects.values())
    stateful = objects["StatefulSet"]["spec"]
    assert stateful["template"]["metadata"]["labels"] == labels
    assert objects["Service"]["spec"]["selector"] == labels
    for kind in ("StatefulSet", "PodDisruptionBudget", "ServiceMonitor"):
        assert objects[kind]["spec"]["selector"]["matchLabels"] == labels
    scaled = objects["HorizontalPodAutoscaler"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == engine
    # one pod of two may go, and the autoscaler's number is not set back by `kubectl apply`
    assert scaled["minReplicas"] > objects["PodDisruptionBudget"]["spec"]["maxUnavailable"]
    assert "replicas" not in stateful


def test_the_command_is_the_one_that_export_writes(pod, engine):
    (container,) = pod["containers"]
    words = [*container["command"], *container["args"]]
    written = LAUNCH.arguments(engine, "/cache/head")
    assert words[: len(written)] == written
    rest = words[len(written) :]
    metrics = ["--enable-metrics"] if engine == "sglang" else []  # vLLM always counts
    assert rest == ["--host", "0.0.0.0", "--port", "8000", *metrics]
    (port,) = container["ports"]
    assert port["containerPort"] == 8000


def test_the_head_comes_from_its_form_s_folder_before_the_engine_starts(pod, engine):
    (fetching,) = pod["initContainers"]
    source, folder = fetching["args"]
    assert source.startswith("gs://")
    assert source.endswith(f"/{engine}")
    mounts = {one["mountPath"] for one in fetching["volumeMounts"]}
    assert folder == "/cache/head"
    assert "/cache" in mounts
    assert folder in "".join(pod["containers"][0]["args"])


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
        written = [
            env["value"] for env in one["env"] if env.get("value", "").startswith("/")
        ]  # caches
        mounts = tuple(f"{mount['mountPath']}/" for mount in one["volumeMounts"])
        assert written
        assert all(path.startswith(mounts) for path in written)
        resources = one["resources"]
        for what in ("cpu", "memory"):
            assert 0 < amount(resources["requests"][what]) <= amount(resources["limits"][what])
        assert ":" in one["image"]
        assert not one["image"].endswith(":latest")


def test_the_cache_outlives_its_pod(objects, pod):
    (claim,) = objects["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "cache"
    kept = objects["StatefulSet"]["spec"]["persistentVolumeClaimRetentionPolicy"]
    assert set(kept.values()) == {"Retain"}
    assert "cache" not in {volume["name"] for volume in pod["volumes"]}


def test_probes_and_an_end_in_time(pod):
    (container,) = pod["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"] == {"path": "/health", "port": "http"}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1200
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= pause + 120


def test_pods_are_added_by_the_queue(objects, engine):
    (metric,) = objects["HorizontalPodAutoscaler"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    series = {"sglang": "sglang:num_queue_reqs", "vllm": "vllm:num_requests_waiting"}[engine]
    assert name == series.replace(":", "_")
    recorded = {"sglang": "watched_pages.py", "vllm": "streams/vllm_watched.json"}[engine]
    assert f"# TYPE {series} gauge" in (Path(__file__).parent / recorded).read_text()
    text = (DEPLOY / f"{engine}.yaml").read_text()
    assert f"seriesQuery: '{series}{{" in text  # the adapter's rule, in the comment
    assert f"as: {name}}}" in text


def test_the_operator_s_objects_have_known_fields(objects):
    monitor = objects["ServiceMonitor"]
    assert monitor["apiVersion"] == OPERATOR
    assert set(monitor["spec"]) == {"selector", "endpoints"}
    (port,) = objects["Service"]["spec"]["ports"]
    for endpoint in monitor["spec"]["endpoints"]:
        assert set(endpoint) <= ENDPOINT
        assert endpoint["port"] == port["name"]
    (rules,) = documents("prometheus-rules")
    assert (rules["apiVersion"], rules["kind"]) == (OPERATOR, "PrometheusRule")
    assert set(rules["spec"]) == {"groups"}
    for group in rules["spec"]["groups"]:
        assert set(group) <= GROUP
        for rule in group["rules"]:
            assert set(rule) <= RULE
            assert ("alert" in rule) != ("record" in rule)
            assert all(isinstance(text, str) for text in rule.get("annotations", {}).values())
