"""Training by several processes: the loss of one, the same bits after a kill."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.artifact import Artifact
from eyas.cli.run import run as run_file
from eyas.errors import ConfigError
from eyas.model.target import Target
from eyas.operators.batch import Batch
from eyas.shards import Features
from eyas.train.batches import BatchConfig, plan_steps
from eyas.train.loss import ObjectiveConfig, batch_loss, plan_of, teach
from eyas.train.ranks import Ranks
from eyas.train.state import CHECKPOINT, METRICS, TrainingState
from eyas.train.step import LossModule, optimizers_of, rows_of, training_step
from eyas.train.trainer import TrainConfig, check_settings
from tests.nursery import PATIENCE_S, ROOT, launched, said, seen
from tests.object_stores import free_port
from tests.test_trainer import learned
from tests.tiny import tiny_target
from tests.tiny_batch import made_up_samples, tiny_vocabulary, wavy_head
from tests.tiny_features import greedy_answers, samples_of, write_features

SEED = int.from_bytes(os.urandom(4), "little")  # of the steps at which processes die
SPOILT_STEP = 4
CONFIG = {
    "head": {"draft_vocab_size": 64},
    "objective": {"num_ttt_steps": 3},
    "epochs": 2,
    "batches": {"tokens": 64, "per_step": 2},
    "learning_rate": 3e-3,
    "dtype": "float32",
    "stop": {"measurements": 2},
    "checkpoint_every": 2,
}
# CONFIG, for a command
SETTINGS = ["head.draft_vocab_size=64", "objective.num_ttt_steps=3", "epochs=2"]
SETTINGS += ["batches.tokens=64", "batches.per_step=2", "learning_rate=3e-3", "dtype=float32"]
SETTINGS += ["stop.measurements=2"]
TINY = [word for setting in SETTINGS for word in ("-s", setting)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ONE_CORE = {**os.environ, "OMP_NUM_THREADS": "1"}
BY_THREE = {**CONFIG, "batches": {"tokens": 48, "per_step": 3}, "dtype": "bfloat16"}
BY_FOUR = {**CONFIG, "batches": {"tokens": 40, "per_step": 4}}
AGAIN = {**BY_FOUR, "objective": {**CONFIG["objective"], "recompute": True}}  # the same run


class Runs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = tiny_target(folder / "target", num_hidden_layers=8)
        target = Target.load(self.target)
        samples = samples_of(target, greedy_answers(self.target, 24), "sample")
        self.features = write_features(folder / "features", target, samples, samples[:5])
        self.launches: list[dict] = []
        self.codes: dict[str, list[list[int]]] = {}
        self.spoilt_key = ""

    def add(
        self,
        name: str,
        size: int,
        kill: tuple[int, int] | None = None,
        config: dict = CONFIG,
        features: str = "",
    ) -> None:
        killed = {"rank": kill[0], "step": kill[1]} if kill else None
        places = {"target": str(self.target), "output": str(self.folder / name)}
        places["features"] = features or self.features.url
        self.launches.append({"config": config, **places, "size": size, "kill": killed})

    def launch(self) -> None:
        for asked, codes in zip(self.launches, launched(self.launches, self.folder), strict=True):
            self.codes.setdefault(Path(asked["output"]).name, []).append(codes)

    def output(self, name: str) -> Artifact:
        return Artifact(str(self.folder / name))

    def rows(self, name: str) -> list[dict]:
        return list(self.output(name).read_jsonl(METRICS))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    """Every launch of this file, in one process that forks them."""
    made = Runs(tmp_path_factory.mktemp("runs"))
    dice = random.Random(SEED)
    made.add("one", 1)
    made.add("two", 2)
    made.add("one by four", 1, config=BY_FOUR)
    made.add("fewer", 4, (dice.randrange(4), dice.randint(3, 4)), config=AGAIN)
    made.add("fewer", 2, (dice.randrange(2), dice.randint(5, 6)), config=BY_FOUR)
    made.add("fewer", 1, config=AGAIN)
    made.add("one by three", 1, config=BY_THREE)
    made.add("three", 3, config=BY_THREE)
    made.add("three cut", 3, (dice.randrange(3), dice.randint(1, 8)), config=BY_THREE)
    made.add("three cut", 3, config=BY_THREE)
    spoilt = made.folder / "spoilt features"
    shutil.copytree(made.folder / "features", spoilt)
    lengths = Features(made.features).lengths
    steps = plan_steps(BatchConfig(**CONFIG["batches"]), [range(len(lengths))], lengths, 0)
    late = steps[SPOILT_STEP - 1][1][0]
    entry = Features(made.features).entries[late]
    data = bytearray((spoilt / entry.shard).read_bytes())
    data[entry.start + entry.size - 1] ^= 1
    (spoilt / entry.shard).write_bytes(bytes(data))
    made.spoilt_key = entry.key
    # a new head is fitted to samples before the first step; one that goes on meets it in its batch
    config = {**CONFIG, "start": str(made.folder / "one")}
    made.add("spoilt", 2, config=config, features=str(spoilt))
    made.launch()
    return made


def assert_like_one(runs: Runs, name: str, one: str = "one", noise: float = 1.0) -> None:
    """Sums of more ranks have another order, and Muon's bf16 iteration turns a rounding into 2^-8
    of a weight's step. noise: of a step, by that of float32.
    """
    ours, ones = runs.rows(name), runs.rows(one)
    # one step: its gradient is the same up to rounding
    assert ours[0]["loss"] == pytest.approx(ones[0]["loss"], rel=1e-5 * noise)
    assert ours[0]["grad_norm"] == pytest.approx(ones[0]["grad_norm"], rel=1e-5 * noise)
    losses = [row["loss"] for row in ones]
    assert [row["loss"] for row in ours] == pytest.approx(losses, rel=1e-3 * noise)
    assert [row["trained"] for row in ours] == [row["trained"] for row in ones]
    weights = load_file(runs.folder / name / "model.safetensors")
    for key, weight in load_file(runs.folder / one / "model.safetensors").items():
        apart = (weights[key].double() - weight.double()).norm()
        # o_proj and down_proj begin as zeros: all of them is steps, .03 apart here
        assert apart <= 0.1 * weight.double().norm(), key


def test_two_processes_give_the_loss_of_one(runs):
    assert runs.codes["one"] == [[0]]
    two = str(runs.folder / "two")
    assert runs.codes["two"] == [[0, 0]], said(two, 0) + said(two, 1)
    assert_like_one(runs, "two")
    assert seen(two) == seen(str(runs.folder / "one"))
    assert all(len(batches) == 2 for batches in list(seen(two).values())[:-1])
    assert runs.output("two").manifest().identity == runs.output("one").manifest().identity


def test_four_processes_then_two_then_one_give_the_loss_of_one(runs):
    about = f"seed {SEED}, codes {runs.codes['fewer']}"
    assert runs.codes["one by four"] == [[0]], about
    assert [len(codes) for codes in runs.codes["fewer"]] == [4, 2, 1], about
    assert all(-signal.SIGKILL in codes for codes in runs.codes["fewer"][:2]), about
    assert runs.codes["fewer"][-1] == [0], about
    assert_like_one(runs, "fewer", "one by four")
    assert seen(str(runs.folder / "fewer")) == seen(str(runs.folder / "one by four")), about


def test_killed_processes_resume_to_the_same_weights_to_the_bit(runs):
    cut = runs.codes["three cut"]
    about = f"seed {SEED}, codes {cut}"
    assert runs.codes["three"] == [[0] * 3], about
    assert cut[-1] == [0] * 3, about
    assert -signal.SIGKILL in cut[0], about
    weights = [runs.output(one).read("model.safetensors") for one in ("three", "three cut")]
    assert weights[0] == weights[1], about
    assert learned(runs.output("three cut")) == learned(runs.output("three")), about


def test_processes_that_gather_weights_in_bf16_give_the_loss_of_one(runs):
    assert_like_one(runs, "three", "one by three", noise=20)


def test_three_processes_meet_the_same_data_in_the_same_steps(runs):
    assert seen(str(runs.folder / "three")) == seen(str(runs.folder / "three cut"))
    assert {len(batches) for batches in list(seen(str(runs.folder / "three")).values())[:-1]} == {3}


def test_a_rank_that_is_left_when_another_is_killed_says_so(runs):
    for name in ("fewer", "three cut"):
        for rank, code in enumerate(runs.codes[name][0]):
            if code != -signal.SIGKILL:
                assert code == 1
                assert "another rank of this run is gone" in said(str(runs.folder / name), rank)


def test_an_error_on_one_rank_stops_all_with_its_message(runs):
    (codes,) = runs.codes["spoilt"]
    told = [said(str(runs.folder / "spoilt"), rank) for rank in (0, 1)]
    assert codes == [1, 2]  # its second batch is of the second rank
    assert all(f"sample {runs.spoilt_key} " in text for text in told)
    assert all("does not match its checksum" in text for text in told)
    assert "stopped, because rank 1 failed" in told[0]
    assert all(text.count("error:") == 1 for text in told)
    output = runs.output("spoilt")
    assert not output.is_done()
    assert output.exists(CHECKPOINT)
    # what came before is kept
    assert [row["step"] for row in runs.rows("spoilt")] == list(range(1, SPOILT_STEP))


def test_two_hosts_by_the_commands_of_the_page(runs, tmp_path):
    """docs/several-hosts.md on this machine, tiny."""
    page = (ROOT / "docs" / "several-hosts.md").read_text().replace("\\\n", " ")
    commands = [shlex.split(line) for line in page.splitlines() if line.startswith("torchrun ")]
    assert len(commands) == 2
    here = {"host-a": "127.0.0.1", "29500": str(free_port()), "8": "1"}
    here["gs://bucket/features"] = runs.features.url
    here["meta-llama/Llama-3.3-70B-Instruct"] = str(runs.target)
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    hosts = []
    for number, command in enumerate(commands):
        places = {**here, "gs://bucket/head": str(tmp_path / f"host {number}" / "head")}
        words = [places.get(word, word) for word in command[1:]]
        host = subprocess.Popen([*TORCHRUN, *words, *TINY], cwd=ROOT, env=ONE_CORE, **pipes)
        hosts.append(host)
    told = [host.communicate(timeout=PATIENCE_S)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], told
    assert [text.count("train     done:") for text in told] == [1, 0]
    assert not (tmp_path / "host 1").exists()
    # the page says objective.recompute=true: the same run but for rounding
    (runs.folder / "hosts").symlink_to(tmp_path / "host 0" / "head")
    assert_like_one(runs, "hosts")
    assert runs.output("hosts").manifest().identity == runs.output("one").manifest().identity


def test_a_step_of_two_batches_is_the_step_of_one_that_holds_both():
    turns = [False] + [True] * 3 + [False] * 2 + [True] * 3
    samples = made_up_samples([[False] * 4 + [True] * 9, turns, [True] * 7])
    config = ObjectiveConfig(num_ttt_steps=4)
    vocabulary = tiny_vocabulary()
    whole = wavy_head()
    batch = Batch.of(samples)
    teacher = teach(batch, vocabulary, whole, plan_of(batch, config, whole.config))
    outcome = batch_loss(whole, vocabulary.embed_tokens, batch, teacher, config)
    outcome.loss.backward()
    norm = torch.stack([weight.grad.norm() for weight in whole.parameters()]).norm()
    parts = wavy_head()
    state = TrainingState(parts, optimizers_of(parts), "float32")
    batches = [Batch.of(samples[:1]), Batch.of(samples[1:])]
    module = LossModule(parts, vocabulary, config, "float32")
    planned = [module.planned(batch, 0) for batch in batches]
    (row,) = rows_of([training_step(state, module, planned, Ranks(), 0.0)], Ranks(), whole.config)
    assert row["loss"] == pytest.approx(float(outcome.loss.detach()), rel=1e-6)
    assert row["step_losses"] == pytest.approx(outcome.step_losses.tolist(), rel=1e-5)
    assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert row["trained"] == int(outcome.num_trained[0])


def test_more_processes_than_batches_in_a_step_are_refused():
    with pytest.raises(ConfigError, match="no work for 3 processes") as raised:
        check_settings(TrainConfig(batches={"per_step": 2}), Ranks(0, 3), True)
    assert "batches.per_step to 3" in raised.value.hint


def test_a_run_of_all_stages_is_work_for_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun started 2"):
        run_file({}, "eyas run mine.yaml")


def test_features_are_read_by_the_rank_that_needs_them(runs):
    """Each sample once an epoch."""
    files = Path(f"{runs.folder}/two.seen").glob("*.jsonl")
    num_batches = sum(len(path.read_text().splitlines()) for path in files)
    assert num_batches == 2 * len(runs.rows("two"))
    assert sum(row["samples"] for row in runs.rows("two")) == 2 * len(Features(runs.features))
