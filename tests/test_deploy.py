"""Images and manifest: the steps of a Containerfile give a server that answers, and the manifest
fits it.
"""

from __future__ import annotations

import math
import re
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from eyas.artifact import cache_folder
from eyas.cli import serve as serve_command
from eyas.cli.main import build
from eyas.serve.limits import LimitsConfig
from eyas.serve.server import LAST_ANSWERS_S
from tests.containerfile import Image, instructions
from tests.object_stores import free_port
from tests.serving import MESSAGES, World

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
CONTAINERFILES = sorted(DEPLOY.glob("Containerfile.*"))
QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|Ki|Mi|Gi|Ti)?")
UNITS = {None: 1.0, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def config_of(monkeypatch, arguments, **environment):
    """The settings that `eyas serve` reads out of its arguments."""
    found = []
    monkeypatch.setattr(serve_command, "serve", lambda config, on_ready: found.append(config))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(build(["serve"]), ["serve", *arguments])
    assert done.exit_code == 0, done.output
    return found[0]


# Images


def test_the_steps_of_the_image_give_a_server_that_answers(tmp_path):
    """In a clean folder, without a container engine; then the entry point ends well at SIGTERM."""
    image = Image(tmp_path / "image", ROOT).build((DEPLOY / "Containerfile.cpu").read_text())
    assert image.bases == ["python:3.12-slim"]
    assert any(line.startswith("apt-get install") for line in image.noted)
    assert image.user == "10001"
    assert (tmp_path / "image" / "models").is_dir()
    # compiled already by other tests: half a minute that shows nothing about the image
    native = cache_folder("native")
    if native.is_dir():
        shutil.copytree(native, image.path("/models/eyas/native"))
    world = World.make(tmp_path / "tiny")
    port = free_port()
    command = image.command(
        "--target", str(world.folder), "--port", str(port), "--set", "engine.max_length=256"
    )
    shown = subprocess.run(
        [image.path("/opt/eyas/bin/python"), "-c", "import eyas; print(eyas.__file__)"],
        env=image.environment(), cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.startswith(str(tmp_path / "image" / "opt" / "eyas"))
    with subprocess.Popen(
        command,
        env=image.environment(),
        cwd=image.path("."),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            url = next(line for line in process.stdout if line.startswith("serving")).split()[-1]
            body = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
            reply = httpx.post(
                f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60
            ).json()
            assert reply["choices"][0]["message"]["content"] == world.truth(max_tokens=24)[0]
            assert url.startswith("http://0.0.0.0:")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.name)
def test_images_are_alike_where_they_need_not_differ(path, monkeypatch):
    steps = instructions(path.read_text())
    names = [name for name, _ in steps]
    assert names[0] == "FROM"
    assert names.count("ENTRYPOINT") == 1
    # on Vertex AI its arguments would stand in the way of AIP_STORAGE_URI
    assert "CMD" not in names
    assert names.index("USER") < names.index("ENTRYPOINT")
    for name, rest in steps:
        if name == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
    assert "://" not in path.read_text()
    arguments = yaml.safe_load(dict(steps)["ENTRYPOINT"])
    assert arguments[:2] == ["eyas", "serve"]
    config = config_of(monkeypatch, [*arguments[2:], "--target", "builtin"])
    assert config.host == "0.0.0.0"
    assert config.device == path.suffix[1:]
    (port,) = [int(rest) for name, rest in steps if name == "EXPOSE"]
    assert config.port == port


def test_on_vertex_ai_the_image_needs_no_arguments(monkeypatch):
    arguments = yaml.safe_load(
        dict(instructions((DEPLOY / "Containerfile.cpu").read_text()))["ENTRYPOINT"]
    )
    uri = "gs://bucket/models/7"
    config = config_of(
        monkeypatch,
        arguments[2:],
        AIP_HTTP_PORT="8080",
        AIP_STORAGE_URI=uri,
        XDG_CACHE_HOME="/models",
    )
    assert (config.port, config.target, config.vertex.storage_uri) == (8080, None, uri)
    monkeypatch.delenv("EYAS_CACHE", raising=False)
    assert cache_folder("models") == Path("/models/eyas/models")


def test_steps_that_would_leave_the_folder_are_not_run(tmp_path):
    with pytest.raises(AssertionError, match="is not known here"):
        Image(tmp_path / "a", ROOT).build("FROM x\nADD a b\n")
    with pytest.raises(AssertionError, match="would be outside"):
        Image(tmp_path / "b", ROOT).build('FROM x\nRUN echo x >"/"/etc/none /../x\n')
    with pytest.raises(AssertionError, match="RUN false"):
        Image(tmp_path / "c", ROOT).build("FROM x\nRUN false && \\\n    true\n")


# The manifest


@pytest.fixture(scope="module")
def documents():
    return {
        document["kind"]: document
        for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    }


@pytest.fixture(scope="module")
def pod(documents):
    return documents["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod):
    (container,) = pod["containers"]
    return container


def amount(quantity):
    number, unit = QUANTITY.fullmatch(str(quantity)).groups()
    return float(number) * UNITS[unit]


def test_objects_have_what_kubernetes_needs(documents):
    assert {kind: one["apiVersion"] for kind, one in documents.items()} == {
        "Deployment": "apps/v1",
        "Service": "v1",
    }
    for one in documents.values():
        assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", one["metadata"]["name"])
    deployment, service = documents["Deployment"]["spec"], documents["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    for selector in (deployment["selector"]["matchLabels"], service["selector"]):
        assert selector.items() <= labels.items()
    assert all(
        isinstance(value, str)
        for value in deployment["template"]["metadata"]["annotations"].values()
    )


def test_the_container_is_the_image_s(documents, pod, container, monkeypatch):
    steps = dict(instructions((DEPLOY / "Containerfile.cpu").read_text()))
    assert container["image"] == "eyas:cpu"
    assert "command" not in container  # the image's entry point
    assert all(isinstance(one, str) for one in container["args"])
    config = config_of(monkeypatch, [*yaml.safe_load(steps["ENTRYPOINT"])[2:], *container["args"]])
    (port,) = container["ports"]
    assert port["containerPort"] == config.port
    (outside,) = documents["Service"]["spec"]["ports"]
    assert outside["targetPort"] == port["name"]
    assert str(pod["securityContext"]["runAsUser"]) == steps["USER"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert (
        mounts["models"] == dict(one.split("=") for one in steps["ENV"].split())["XDG_CACHE_HOME"]
    )
    assert {"name", "valueFrom"} == set(container["env"][0])


def test_a_pod_ends_later_than_its_server(pod, container, monkeypatch):
    config = config_of(monkeypatch, container["args"])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = pause + math.ceil(config.limits.shutdown_s + LAST_ANSWERS_S)
    assert pod["terminationGracePeriodSeconds"] >= needed + 10


def test_probes_ask_for_health_and_give_the_model_its_time(container):
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[name]
        assert probe["httpGet"] == {"path": "/health", "port": container["ports"][0]["name"]}
        assert probe["periodSeconds"] >= 1
        assert probe["failureThreshold"] >= 2
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 300
    alive, ready = container["livenessProbe"], container["readinessProbe"]
    assert ready["periodSeconds"] * ready["failureThreshold"] <= 15
    # Nothing that strangers may hold for nothing outlasts it: heads and bodies that do not come, a
    # client that takes nothing.
    assert alive["periodSeconds"] * alive["failureThreshold"] >= 4 * LimitsConfig().body_timeout_s


def test_resources_are_asked_for_and_bounded(pod, container):
    resources = container["resources"]
    for name in ("cpu", "memory"):
        assert 0 < amount(resources["requests"][name]) <= amount(resources["limits"][name])
    assert all(amount(volume["emptyDir"]["sizeLimit"]) > 0 for volume in pod["volumes"])
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
