"""The stages on a GPU by their commands, beside the CPU: `pytest -m gpu`, a minute."""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import train_step
from eyas.artifact import Artifact
from eyas.cli.main import build
from eyas.operators.decoder import TOLERANCE, default_device
from eyas.operators.ttt import sent
from eyas.shards import Features
from eyas.train.loss import ObjectiveConfig, plan_of
from eyas.train.ranks import Ranks
from eyas.train.state import TrainingState
from eyas.train.step import LossModule, PlannedBatch, optimizers_of, rows_of, training_step
from tests.stages import all_samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # of drivers
    pytest.mark.skipif(default_device() == "cpu", reason="no GPU, or a torch without CUDA"),
]
ARMS = "gpu", "cpu"
DEVICE = default_device()
FEW_STEPS = ["-s", "stop.max_steps=3", "-s", "batches.tokens=1024"]


def eyas(output: Path, *words: str, arm: str = "gpu") -> Artifact:
    """The "cpu" arm sees no GPU."""
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
    """By transformers on the GPU and by our own decoder on the CPU."""
    words = ["capture", answers.url, "-t", "builtin", "-s", "held_out_share=0.2"]
    return {arm: eyas(folder / f"features {arm}", *words, arm=arm) for arm in ARMS}


@pytest.fixture(scope="module")
def heads(folder, features) -> dict[str, Artifact]:
    words = ["train", features["cpu"].url, "-t", "builtin", *FEW_STEPS, "-s", "dtype=float32"]
    return {arm: eyas(folder / f"head {arm}", *words, arm=arm) for arm in ARMS}


def losses(head: Artifact) -> list[float]:
    return [row["loss"] for row in head.read_jsonl("metrics.jsonl")]


def test_features_are_the_cpus_but_for_bfloat16(features):
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


@pytest.fixture(scope="module")
def made() -> train_step.World:
    args = Namespace(hidden=128, intermediate=448, heads=4, kv_heads=2, head_dim=32)
    args.vocab, args.draft_vocab, args.tokens = 2048, 512, 1024
    samples = [train_step.sample(args, length, 0.5, length) for length in (600, 424)]
    return train_step.world(args, samples, DEVICE)


@pytest.mark.parametrize("window", [None, 100])
def test_attentions_gradients_are_those_of_the_plain_form(made, window):
    """FlexAttention and the loop over tiles, in float32."""
    head = copy.deepcopy(made.head)
    head.config = head.config.model_copy(update={"sliding_window": window})
    config = ObjectiveConfig(num_ttt_steps=4, later_steps="all")
    module = LossModule(head, made.vocabulary, config, "float32")
    found = {}
    for kind in (torch.device(DEVICE).type, "cpu"):
        plan = plan_of(made.batch, config, head.config, kind=kind)
        planned = PlannedBatch(made.batch.to(DEVICE), sent(plan, DEVICE))
        teacher = module.teach(planned)
        head.zero_grad()
        loss = module(planned.batch, teacher, module.trained_slots([teacher])).loss
        loss.backward()
        gradients = {name: one.grad for name, one in head.named_parameters()}
        found[kind] = float(loss.detach()), {name: grad.clone() for name, grad in gradients.items()}
    (loss, fused), (expected, plain) = found.values()
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, gradient in fused.items():
        assert (gradient - plain[name]).norm() <= 1e-3 * plain[name].norm(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_waits_for_no_device(made, dtype):
    """As the driver sees it, once kernels are compiled."""
    head = copy.deepcopy(made.head)
    state = TrainingState(head, optimizers_of(head, weight_decay=0.1), dtype)
    module = LossModule(head, made.vocabulary, ObjectiveConfig(), dtype)
    for number in range(4):
        planned = module.planned(made.batch, number % 2)
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        try:
            figures = training_step(state, module, [planned], Ranks(device=DEVICE), 1e-3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    (row,) = rows_of([figures], Ranks(device=DEVICE), head.config)
    assert math.isfinite(row["loss"] + row["grad_norm"])
