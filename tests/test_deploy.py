"""The image and the manifest: what the Containerfile installs and starts, and what fits it."""

import math
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from typer.testing import CliRunner

import eyas
from eyas.artifact import cache_folder
from eyas.cli import serve as serve_command
from eyas.cli.main import build
from eyas.serve.limits import LimitsConfig
from eyas.serve.server import LAST_ANSWERS_S

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
CONTAINERFILE = DEPLOY / "Containerfile.cpu"
QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|Ki|Mi|Gi|Ti)?")
UNITS = {None: 1.0, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def config_of(monkeypatch, arguments, **environment):
    """The settings of `eyas serve` with these arguments."""
    found = []
    monkeypatch.setattr(serve_command, "serve", lambda config, on_ready: found.append(config))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(build(["serve"]), ["serve", *arguments])
    assert done.exit_code == 0, done.output
    return found[0]


# The image


def instructions():
    """The Containerfile's instructions in order, each with its text."""
    lines = [line for line in CONTAINERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\s*\n\s*", "", "\n".join(lines))
    found = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in found]


def test_the_image_installs_this_package_and_starts_its_server(monkeypatch):
    steps = instructions()
    names, last = [name for name, _ in steps], dict(steps)
    assert names[0] == "FROM"
    # on Vertex AI arguments would stand in the way of AIP_STORAGE_URI
    assert "CMD" not in names
    assert names.count("ENTRYPOINT") == 1
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert "://" not in CONTAINERFILE.read_text()
    (final,) = (at for at, name in enumerate(names) if name == "FROM" and at)
    copied = {source for name, rest in steps[:final] if name == "COPY" for source in rest.split()}
    copied -= {"./", "./eyas"}
    assert all((ROOT / source).exists() for source in copied)
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "eyas"} <= copied
    taken = (ROOT / ".dockerignore").read_text().splitlines()
    assert taken[1] == "*"
    assert {line[1:] for line in taken if line.startswith("!")} == copied
    # what builds the package stays behind
    assert [rest for name, rest in steps[final:] if name == "COPY"] == [
        "--from=build /opt/eyas /opt/eyas"
    ]
    assert not any("install" in rest for _, rest in steps[final:])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = re.fullmatch(r"python:(\d+\.\d+)-slim", last["FROM"])[1]
    assert Version(version) in SpecifierSet(project["requires-python"])
    assert steps[0][1] == f"{last['FROM']} AS build"
    extras = set(",".join(re.findall(r"EXTRAS=([\w,]+)", CONTAINERFILE.read_text())).split(","))
    assert {"gcs", "train"} == extras <= set(project["optional-dependencies"])
    assert any(rest.endswith(' ".${EXTRAS:+[$EXTRAS]}"') for _, rest in steps[:final])
    users = " ".join(rest for name, rest in steps if name == "RUN" and "useradd" in rest)
    for text in (f"--uid {last['USER']} ", f"chown {last['USER']} /models", "mkdir -p /models"):
        assert text in users
    environment = dict(one.split("=", 1) for one in last["ENV"].split())
    assert environment["PATH"] == '"/opt/eyas/bin:$PATH"'
    entry = yaml.safe_load(last["ENTRYPOINT"])
    assert entry[:2] == ["eyas", "serve"]
    assert project["scripts"].keys() == {"eyas"}
    config = config_of(monkeypatch, [*entry[2:], "--target", "builtin"])
    assert (config.host, config.port) == ("0.0.0.0", int(last["EXPOSE"]))
    # on Vertex AI it needs no arguments
    uri = "gs://bucket/models/7"
    cache = environment["XDG_CACHE_HOME"]
    vertex = {"AIP_HTTP_PORT": "8080", "AIP_STORAGE_URI": uri, "XDG_CACHE_HOME": cache}
    config = config_of(monkeypatch, entry[2:], **vertex)
    assert (config.port, config.target, config.vertex.storage_uri) == (8080, None, uri)
    monkeypatch.delenv("EYAS_CACHE", raising=False)
    assert cache_folder("models") == Path("/models/eyas/models")


def test_the_version_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "eyas.artifact.VERSION"}
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+)", changes, re.MULTILINE)[1] == eyas.__version__


# The manifest


@pytest.fixture(scope="module")
def documents():
    text = (DEPLOY / "kubernetes.yaml").read_text()
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


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


def test_the_container_is_the_image_s(documents, pod, container, monkeypatch):
    steps = dict(instructions())
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
    environment = dict(one.split("=") for one in steps["ENV"].split())
    assert mounts["models"] == environment["XDG_CACHE_HOME"]
    # the keys are a file that is renewed, by the name of the secret's only key
    (keys,) = (volume["secret"] for volume in pod["volumes"] if "secret" in volume)
    assert keys == {"secretName": "eyas-api-keys"}
    assert str(config.limits.api_keys) == f"{mounts['keys']}/keys"
    assert "eyas-api-keys --from-file=keys)" in (DEPLOY / "kubernetes.yaml").read_text()


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
    # it outlasts heads and bodies that do not come, and clients that read nothing
    assert alive["periodSeconds"] * alive["failureThreshold"] >= 4 * LimitsConfig().body_timeout_s


def test_resources_are_asked_for_and_bounded(pod, container):
    resources = container["resources"]
    for name in ("cpu", "memory"):
        assert 0 < amount(resources["requests"][name]) <= amount(resources["limits"][name])
    folders = [volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume]
    assert all(amount(folder["sizeLimit"]) > 0 for folder in folders)
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
