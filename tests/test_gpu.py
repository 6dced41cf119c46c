"""The stages on a GPU by their commands, beside what the same commands give on the CPU:
`pytest -m gpu`, a minute.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from statistics import median

import pytest
import torch
from typer.testing import CliRunner

from eyas.artifact import Artifact
from eyas.cli.main import build
from eyas.operators.decoder import TOLERANCE, default_device
from eyas.shards import Features
from tests.stages import all_samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # of drivers
    pytest.mark.skipif(default_device() == "cpu", reason="no GPU, or a torch without CUDA"),
]
ARMS = "gpu", "cpu"
FEW_STEPS = ["-s", "stop.max_steps=3", "-s", "batches.tokens=1024"]


def eyas(output: Path, *words: str, arm: str = "gpu") -> Artifact:
    """What a command makes; the "cpu" arm sees no GPU."""
    line = [*words, "-o", str(output)]
    with pytest.MonkeyPatch.context() if arm == "cpu" else nullcontext() as patch:
        if patch is not None:
            patch.setattr(torch.cuda, "is_available", lambda: False)
        shown = CliRunner().invoke(build(line), line, prog_name="eyas")
    assert shown.exit_code == 0, shown.output
    return Artifact(str(output))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def answers(folder) -> Artifact:
    prompts = eyas(folder / "prompts", "prompts", "builtin", "-s", "max_prompts=40")
    few = ["-s", "max_tokens=48"]
    return eyas(folder / "answers", "generate", prompts.url, "-t", "builtin", *few)


@pytest.fixture(scope="module")
def features(folder, answers) -> dict[str, Artifact]:
    """With the default codec, by transformers on the GPU and by our own decoder on the CPU."""
    words = ["capture", answers.url, "-t", "builtin", "-s", "held_out_share=0.2"]
    return {arm: eyas(folder / f"features {arm}", *words, arm=arm) for arm in ARMS}


@pytest.fixture(scope="module")
def heads(folder, features) -> dict[str, Artifact]:
    words = ["train", features["cpu"].url, "-t", "builtin", *FEW_STEPS, "-s", "dtype=float32"]
    return {arm: eyas(folder / f"head {arm}", *words, arm=arm) for arm in ARMS}


def losses(head: Artifact) -> list[float]:
    return [row["loss"] for row in head.read_jsonl("metrics.jsonl")]


def test_features_are_the_cpus_but_for_bfloat16(features):
    """The median token, as a server's states are held to."""
    there, here = (all_samples(features[arm]) for arm in ARMS)
    assert there.keys() == here.keys()
    held_out = {one.key for one in Features(features["gpu"], "held_out")}
    assert held_out
    for name in ("aux_hidden", "last_hidden"):
        errors: dict[bool, list[float]] = {True: [], False: []}
        for key, one in here.items():
            ours, theirs = getattr(one, name).float(), getattr(there[key], name).float()
            off = (ours - theirs).norm(dim=-1) / ours.norm(dim=-1)
            errors[key in held_out].append(float(off.median()))
        limit = TOLERANCE[torch.bfloat16]
        assert median(errors[True]) < limit
        assert median(errors[False]) < limit + 0.08, "two roundings of the codec besides"


def test_training_has_the_cpus_losses(heads, folder, features, answers):
    there, here = (losses(heads[arm]) for arm in ARMS)
    assert there[0] == pytest.approx(here[0], rel=1e-3)
    assert there == pytest.approx(here, rel=2e-2)
    words = ["-t", "builtin", *FEW_STEPS]
    by_default = eyas(folder / "head bf16", "train", features["cpu"].url, *words)
    assert by_default.manifest().facts["computed_in"] == "bfloat16"
    assert losses(by_default) == pytest.approx(here, rel=5e-2)
    online = eyas(folder / "head online", "train", answers.url, "--online", *words)
    assert losses(online)[0] == pytest.approx(here[0], rel=0.1), "other samples are held out"


def test_tau_is_the_cpus(heads, folder, features):
    found = {}
    for arm in ARMS:
        words = ["eval", heads["cpu"].url, "-t", "builtin", "--features", features["cpu"].url]
        found[arm] = eyas(folder / f"eval {arm}", *words, arm=arm).read_json("eval.json")
    there, here = (found[arm] for arm in ARMS)
    assert there["tau"] == pytest.approx(here["tau"], rel=0.02)
    assert there["greedy_share"] == pytest.approx(here["greedy_share"], abs=0.02)
    for one, other in zip(there["trees"], here["trees"], strict=True):
        assert one["tau"] == pytest.approx(other["tau"], rel=0.02)
