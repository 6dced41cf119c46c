"""The train stage on a tiny target's own answers: it learns, resumes, refuses.

`python -m tests.test_trainer` writes the golden of one training step, goldens/train_step.json.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from eyas.artifact import Artifact, Manifest
from eyas.errors import (
    ConfigError,
    EmptyInputError,
    EyasError,
    MismatchError,
    MissingInputError,
    StorageFullError,
)
from eyas.hub import locate
from eyas.log import quiet
from eyas.model.config import HeadOptions
from eyas.model.target import Target
from eyas.operators.batch import plan_batches
from eyas.operators.head import load_head
from eyas.operators.tensors import read_head
from eyas.settings import validated
from eyas.shards import Features
from eyas.train import trainer
from eyas.train.batches import BatchConfig, feed
from eyas.train.loss import ObjectiveConfig
from eyas.train.ranks import Ranks
from eyas.train.start import StartConfig, covering_size
from eyas.train.state import CHECKPOINT, METRICS, StopConfig, TrainingState
from eyas.train.step import (
    LossModule,
    RateConfig,
    optimizers_of,
    peak_flops,
    rows_of,
    step_flops,
    training_step,
    usual_learning_rate,
)
from eyas.train.trainer import TrainConfig, train
from tests.tiny import tiny_target
from tests.tiny_batch import (
    made_up_batch,
    made_up_samples,
    tiny_vocabulary,
    wavy_head,
    write_golden,
)
from tests.tiny_features import greedy_answers, samples_of, write_features

GOLDEN = Path(__file__).parent / "goldens" / "train_step.json"
CONFIG = TrainConfig(
    head={"draft_vocab_size": 64},
    objective={"num_ttt_steps": 4},
    epochs=2,
    batches={"tokens": 64},
    learning_rate=3e-3,
    dtype="float32",
    stop={"measurements": 0},
    checkpoint_every=3,
)


def run(target, features, output, track=quiet, config=CONFIG, **changes) -> Manifest:
    output = output if isinstance(output, Artifact) else Artifact(str(output))
    config = config.model_copy(update=changes)
    return train(config, str(target), Features(features), output, track)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)
    target = Target.load(folder)
    return folder, target, samples_of(target, greedy_answers(folder, 16), "train")


@pytest.fixture(scope="module")
def features(made, tmp_path_factory):
    _, target, samples = made
    return write_features(tmp_path_factory.mktemp("features"), target, samples, samples[:2])


@pytest.fixture(scope="module")
def whole(made, features, tmp_path_factory):
    output = Artifact(str(tmp_path_factory.mktemp("whole")))
    run(made[0], features, output)
    return output


def interrupt_at(step):
    def track(done, total=None, note=""):
        if done == step:
            raise KeyboardInterrupt

    return track


def weights(artifact: Artifact) -> bytes:
    return artifact.read("model.safetensors")


def learned(artifact: Artifact, *timed: str) -> list[dict]:
    """Rows of metrics.jsonl without the clock's."""
    clock = {"seconds", "tokens_per_s"} - set(timed)
    rows = artifact.read_jsonl(METRICS)
    return [{name: row[name] for name in row if name not in clock} for row in rows]


def test_learns_and_describes_itself(made, features, tmp_path):
    folder, target, samples = made
    notes, output = [], Artifact(str(tmp_path))
    manifest = run(folder, features, output, lambda *step: notes.append(step), epochs=24)
    rows = list(output.read_jsonl(METRICS))
    assert [row["step"] for row in rows] == list(range(1, manifest.counts["batches"] + 1))
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert len(rows[0]["accuracy"]) == len(rows[0]["step_losses"]) == 4
    assert notes[-1][:2] == (len(rows), len(rows))
    assert "loss" in notes[-1][2]
    assert "accuracy" in notes[-1][2]
    assert CHECKPOINT not in output.names()
    assert manifest.inputs["features"].identity == features.manifest().identity
    assert TrainConfig.model_validate(manifest.config).batches == CONFIG.batches, "as on its card"
    head = load_head(tmp_path)
    assert head.config.taps == target.config.default_taps
    assert head.config.target_lm_head_sha256 == target.lm_head_sha256
    assert all(weight.isfinite().all() for weight in head.parameters())
    counts = torch.zeros(320, dtype=torch.int64)
    for sample in samples:
        counts += torch.bincount(sample.token_ids[sample.loss_mask], minlength=320)
    kept = counts[head.target_ids_W].sum() / counts.sum()
    assert manifest.facts["draft_vocabulary_coverage"] == pytest.approx(float(kept))
    assert counts[~head.t2d].max() <= counts[head.t2d].min()


def test_the_seed_decides(made, features, whole, tmp_path):
    """test_stages.py holds that one seed gives one head."""
    run(made[0], features, tmp_path, seed=1)
    assert weights(Artifact(str(tmp_path))) != weights(whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_costs_no_step(made, features, whole, tmp_path, number):
    def killed(done, total=None, note=""):
        if done == 4 and total:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    cut = Artifact(str(tmp_path / "cut"))
    with pytest.raises(EyasError, match=rf"stopped by {number.name} after step \d of") as raised:
        run(made[0], features, cut, killed)
    assert raised.value.exit_code == 128 + number
    assert "resumes" in raised.value.hint
    assert signal.getsignal(number) is before
    assert len(list(cut.read_jsonl(METRICS))) in (4, 5)
    assert cut.exists(CHECKPOINT)
    run(made[0], features, cut)
    assert weights(cut) == weights(whole)


def test_without_room_for_its_checkpoints_nothing_is_computed(
    made, features, tmp_path, monkeypatch
):
    monkeypatch.setattr(Artifact, "room", lambda _: 1_000)
    monkeypatch.setattr(trainer, "fresh_head", lambda *_: pytest.fail("computes"))
    with pytest.raises(StorageFullError, match=r"parameters needs .* are free"):
        run(made[0], features, tmp_path / "head")


@pytest.mark.parametrize("begun", ["bfloat16", "float32"])
def test_a_run_goes_on_in_the_precision_it_began_with(made, features, tmp_path, monkeypatch, begun):
    """On another machine too."""
    asked = run(made[0], features, tmp_path / "asked", dtype=begun)
    monkeypatch.setattr(trainer, "quickest", lambda device: begun)
    cut = Artifact(str(tmp_path / "cut"))
    for step in (4, 5):  # the second run goes on from the first's checkpoint, and makes none
        with pytest.raises(KeyboardInterrupt):
            run(made[0], features, cut, interrupt_at(step), dtype="auto")
    other = {"bfloat16": "float32", "float32": "bfloat16"}[begun]
    monkeypatch.setattr(trainer, "quickest", lambda device: other)
    manifest = run(made[0], features, cut, dtype="auto")
    assert manifest.facts["computed_in"] == asked.facts["computed_in"] == begun
    assert learned(cut) == learned(Artifact(str(tmp_path / "asked")))
    (ours, theirs) = (read_head(folder)[1] for folder in (tmp_path / "cut", tmp_path / "asked"))
    assert {one.dtype for one in ours.values() if one.is_floating_point()} == {torch.bfloat16}
    assert all(torch.equal(one, theirs[name].to(one.dtype)) for name, one in ours.items())


def test_metrics_are_in_the_file_as_they_are_made(made, features, whole, tmp_path):
    """A resume drops what is behind its checkpoint, half a row too."""
    output, seen = Artifact(str(tmp_path / "head")), []

    def look(done, total=None, note=""):
        if not total:  # the start's fit
            return
        seen.append(len((tmp_path / "head" / METRICS).read_bytes().splitlines()) - done)
        if done == 5 and len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(made[0], features, output, look)
    assert learned(output) == learned(whole)[:5], "the checkpoint is of step 3"
    row = learned(whole, "seconds", "tokens_per_s")[0]
    assert row["tokens"] / row["seconds"] == pytest.approx(row["tokens_per_s"])
    with (tmp_path / "head" / METRICS).open("ab") as file:
        file.write(b'{"step": 6, "lo')
    run(made[0], features, output.url, look)
    assert set(seen) == {0}, "as many rows as steps, at every step"
    assert learned(Artifact(output.url)) == learned(whole)


def test_a_run_cut_before_its_first_checkpoint_begins_its_metrics_again(
    made, features, whole, tmp_path
):
    output = Artifact(str(tmp_path / "head"))
    with pytest.raises(KeyboardInterrupt):
        run(made[0], features, output, interrupt_at(2))
    assert not output.exists(CHECKPOINT)
    run(made[0], features, output)
    assert learned(output) == learned(whole)


def test_an_object_store_has_metrics_before_a_checkpoint(made, features, whole, monkeypatch):
    monkeypatch.setattr("eyas.train.state.UPLOAD_S", 0.0)
    output, seen = Artifact("memory://metrics-as-they-are-made"), []

    def look(done, total=None, note=""):
        seen.append(len(list(output.read_jsonl(METRICS))) - done)

    run(made[0], features, output, look)
    assert set(seen) == {0}
    assert learned(output) == learned(whole)


@pytest.mark.parametrize("read_every", [1, 8])
def test_a_broken_feature_stops_the_run_and_is_named(made, tmp_path, monkeypatch, read_every):
    monkeypatch.setattr(trainer, "READ_EVERY", {"cpu": read_every})
    folder, target, samples = made
    broken = samples[5].aux_hidden.clone()
    broken[2, 7] = float("nan")
    samples = [*samples[:5], replace(samples[5], aux_hidden=broken), *samples[6:]]
    features = write_features(tmp_path / "features", target, samples, samples[:1])
    output = Artifact(str(tmp_path / "head"))
    config = CONFIG.model_copy(update={"batches": BatchConfig(tokens=128)})
    with pytest.raises(EyasError, match="loss nan") as raised:
        run(folder, features, output, config=config)
    keys = raised.value.what.split("samples: ")[1].split(", ")
    assert "train-5" in keys
    assert len(keys) > 1  # else naming it would be no choice
    assert "features of train-5 are not finite" in raised.value.hint
    assert not output.is_done()


def another(folder, **changes):
    return tiny_target(folder / "other", num_hidden_layers=8, **changes)


def test_answers_that_are_not_the_targets_are_refused_and_not_resumed(made, tmp_path):
    folder, target, samples = made
    said = {token for one in samples for token in one.token_ids.tolist()}
    unsaid = min(set(range(320)) - said)
    others = [replace(one, token_ids=one.token_ids * 0 + unsaid) for one in samples]
    features = write_features(tmp_path / "features", target, others, [])
    url, options = str(tmp_path / "output"), HeadOptions(draft_vocab_size=1)
    for _ in range(2):
        with pytest.raises(EyasError, match=r"is trained: at none of \d+ positions") as raised:
            run(folder, features, url, head=options)
        assert "let it answer the prompts itself" in raised.value.hint
        assert not Artifact(url).is_done()


@pytest.mark.parametrize(
    ("target", "given", "changes", "error", "message"),
    [
        (lambda folder: another(folder, seed=1), None, {}, MismatchError, "of the same shape"),
        (lambda folder: another(folder, hidden_size=48), None, {}, MismatchError, "hidden size 32"),
        (None, "short", {}, EmptyInputError, "no answer of two tokens"),
        (None, "absent", {}, MissingInputError, "does not exist"),
        (None, None, {"head": HeadOptions(draft_vocab_size=321)}, ConfigError, "321"),
    ],
    ids=["another target", "wider", "no answers", "no features", "vocabulary too large"],
)
def test_bad_input_is_refused(made, features, tmp_path, target, given, changes, error, message):
    folder, loaded, _ = made
    short = samples_of(loaded, [([5, 6, 7], [8])], "short")
    sources = {
        None: features,
        "short": write_features(tmp_path / "short", loaded, short, []),
        "absent": Artifact(str(tmp_path / "absent")),
    }
    with pytest.raises(error, match=message):
        run(target(tmp_path) if target else folder, sources[given], tmp_path / "head", **changes)
    assert target is None or not (tmp_path / "head").exists()


def test_settings_are_checked():
    with pytest.raises(ValidationError):
        TrainConfig(learning_rate=0)
    with pytest.raises(ValidationError):
        TrainConfig(rate=1)
    for section in (TrainConfig, BatchConfig, StopConfig, StartConfig):
        assert len(section.model_fields) <= 12


def test_the_learning_rate_follows_the_head_by_default(made, features, tmp_path):
    assert usual_learning_rate(4096) == pytest.approx(1e-4)
    assert usual_learning_rate(8192) == pytest.approx(5e-5)
    assert usual_learning_rate(320) == usual_learning_rate(32) == 1e-3
    short = [usual_learning_rate(4096, num_steps) for num_steps in (1, 62, 250, 1000, 10**6)]
    assert short == pytest.approx([4e-4, 4e-4, 2e-4, 1e-4, 1e-4], rel=0.01)
    manifest = run(made[0], features, tmp_path, epochs=1, learning_rate=RateConfig())
    assert manifest.facts["learning_rate"] == 4e-3
    rows = list(Artifact(str(tmp_path)).read_jsonl(METRICS))
    assert 2e-3 <= max(row["learning_rate"] for row in rows) <= 4e-3


def test_the_draft_vocabulary_covers_the_answers_by_default(made, features, tmp_path):
    counts_V = torch.zeros(1000, dtype=torch.int64)
    counts_V[:300] = torch.arange(300, 0, -1)
    covered = counts_V[: covering_size(counts_V)].sum() / counts_V.sum()
    assert covered >= 0.99
    assert covering_size(counts_V) == 384  # 271 tokens, in steps of 128
    assert covering_size(torch.ones(200, dtype=torch.int64)) == 200
    assert covering_size(torch.ones(128_256, dtype=torch.int64)) == 32_000
    manifest = run(made[0], features, tmp_path, epochs=1, head=HeadOptions())
    assert manifest.facts["draft_vocabulary_coverage"] >= 0.99
    assert manifest.facts["draft_vocab_size"] == load_head(tmp_path).config.draft_vocab_size


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedule_warms_up_and_falls_to_zero(schedule):
    rate = RateConfig(peak=1.0, schedule=schedule)
    rates = [rate.at(step, 100) for step in range(100)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[3] == 1.0
    assert rates[3:] == sorted(rates[3:], reverse=True)
    last = {"cosine": (0, 0.001), "linear": (0.01, 0.0104), "constant": (1, 1)}[schedule]
    assert last[0] <= rates[-1] <= last[1]
    assert rate.at(0, 1) > 0
    assert TrainConfig(learning_rate=0.1).learning_rate == RateConfig(peak=0.1)


def test_run_files_of_earlier_versions_are_read():
    card = (Path(locate("smollm2")) / "README.md").read_text()
    settings = yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0])["train"]
    assert settings["batches"].keys() > {"tokens", "packed"}
    assert validated(TrainConfig, settings, "train").batches.tokens == 16384
    for gone in ({"batches": {"packed": True}}, {"head": {"draft_tokens": "ids.npy"}}):
        with pytest.raises(ConfigError, match=r"(packed|tokens) is no setting any more.*leave it"):
            validated(TrainConfig, gone, "train")


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(10, 200), st.integers(0, 3)
)
@settings(max_examples=40)
def test_batches_hold_every_sample_once_within_their_room(lengths, room, seed):
    batches = plan_batches(lengths, room, str(seed))
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(len(lengths)))
    for numbers in batches:
        assert len(numbers) == 1 or len(numbers) * max(lengths[one] for one in numbers) <= room
    assert batches == plan_batches(lengths, room, str(seed))


def test_batches_pad_little_and_differ_from_pass_to_pass():
    lengths = [20 + (37 * number) % 200 for number in range(1000)]
    one, two = (plan_batches(lengths, 4096, seed) for seed in ("0/0", "0/1"))
    padded = sum(len(numbers) * max(lengths[number] for number in numbers) for numbers in one)
    assert padded < 1.1 * sum(lengths)
    assert {tuple(numbers) for numbers in one} != {tuple(numbers) for numbers in two}


def golden_step() -> dict[str, object]:
    head, vocabulary = wavy_head(), tiny_vocabulary()
    state = TrainingState(head, optimizers_of(head), "float32")
    wanted = ObjectiveConfig(num_ttt_steps=7, later_steps="all")
    objective = LossModule(head, vocabulary, wanted, "float32")
    turns = [False] + [True] * 3 + [False] * 2 + [True] * 3
    batch = made_up_batch([[False] * 4 + [True] * 14, turns], seed=1)
    figures = training_step(state, objective, [objective.planned(batch, 0)], Ranks(), 1e-3)
    (row,) = rows_of([figures], Ranks(), head.config)
    sums = {
        name: [float(weight.sum()), float(weight.norm())]
        for name, weight in head.double().requires_grad_(False).named_parameters()
    }
    return {"metrics": row, "sum and norm of the weights after it": sums}


class Reads(TorchFunctionMode):
    """Raises where a tensor's numbers are read, which waits for a GPU."""

    NAMES = "tolist item cpu numpy __bool__ __int__ __float__ __index__ __contains__"

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in self.NAMES.split():
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


class Waits(TorchDispatchMode):
    """Raises where an operator waits for a GPU: its result, or its shape, is data."""

    NAMES = "_local_scalar_dense nonzero masked_select unique equal repeat_interleave bincount"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).split(".")[1]
        kinds = [one.dtype for one in tree_leaves(args[1:2]) if isinstance(one, torch.Tensor)]
        by_mask = name.startswith("index") and torch.bool in kinds
        if by_mask or any(name.startswith(wait) for wait in self.NAMES.split()):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("later_steps", ["all", "sampled"])
def test_a_step_waits_for_no_device_and_one_that_is_not_finite_changes_nothing(later_steps):
    head, vocabulary = wavy_head(fc_norm=True, norm_output=True), tiny_vocabulary()
    state = TrainingState(head, optimizers_of(head, weight_decay=0.1), "bfloat16")
    wanted = ObjectiveConfig(later_steps=later_steps)
    module = LossModule(head, vocabulary, wanted, "bfloat16")
    batches = [made_up_batch([[True] * 20, [False] * 4 + [True] * 9], seed=n) for n in range(4)]
    batches[2].aux_hidden_BTA[0, 3] = torch.nan
    figures, weights = [], []
    for number, batch in enumerate(batches):
        planned = module.planned(batch, number)
        with Waits() if number else nullcontext(), Reads() if number else nullcontext():
            figures.append(training_step(state, module, [planned], Ranks(), 1e-3))
        kept = [one for of in state.optimizers for one in of.state.values()]
        everything = [*head.parameters(), *tree_leaves(kept)]
        weights.append([one.detach().clone() for one in everything])
    assert not all(map(torch.equal, weights[0], weights[1]))
    assert all(map(torch.equal, weights[1], weights[2]))
    assert all(map(torch.equal, weights[1], weights[3]))
    rows = rows_of(figures, Ranks(), head.config)
    assert [math.isfinite(row["grad_norm"]) for row in rows] == [1, 1, 0, 1]


@pytest.mark.parametrize("read", ["tolist", "cpu", "item", "__bool__"])
def test_what_waits_is_seen(read):
    with Waits(), Reads(), pytest.raises(AssertionError, match=f"{read}.* waits"):
        getattr(torch.ones(1), read)()


def test_flops_are_those_of_the_products_with_weights():
    """As torch counts them without padding; `bmm` is attention's."""
    head, vocabulary, (T, K) = wavy_head(), tiny_vocabulary(), (514, 3)
    batch = made_up_batch([[True] * T])
    batch = replace(batch, argmax_BT=torch.zeros(1, T, dtype=torch.int32))
    wanted = ObjectiveConfig(num_ttt_steps=K, later_steps="all")
    module = LossModule(head, vocabulary, wanted, "float32")
    planned = module.planned(batch, 0)
    with FlopCounterMode(display=False) as counter:
        teacher = module.teach(planned)
        module(planned.batch, teacher, module.trained_slots([teacher])).loss.backward()
    counted = counter.get_flop_counts()["Global"]
    needed = step_flops(head.config, T, [T - 2 - step for step in range(K)])
    assert counted[torch.ops.aten.mm] == pytest.approx(needed, rel=0.01)


def test_a_devices_peak_is_known_or_absent(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert peak_flops("cuda:0", "bfloat16") == 989e12
    assert peak_flops("cuda:0", "float32") is None is peak_flops("cpu", "bfloat16")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another card")
    assert peak_flops("cuda:0", "bfloat16") is None


def test_an_error_in_the_feed_closes_its_reader():
    module = LossModule(wavy_head(), tiny_vocabulary(), ObjectiveConfig(), "float32")
    closed = []

    def batches():
        try:
            yield made_up_samples([[True] * 5])
            yield []  # no batch can be made of it
            yield []
        finally:
            closed.append(True)

    reader = batches()
    steps = feed(reader, [1, 1, 1], 0, module)
    assert len(next(steps)) == 1
    with pytest.raises(RuntimeError, match="empty list"):
        next(steps)
    assert closed


def test_one_step_equals_the_golden():
    golden = json.loads(GOLDEN.read_text())
    made = golden_step()
    for part, values in golden["step"].items():
        assert made[part].keys() == values.keys()
        for name, value in values.items():
            assert made[part][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


if __name__ == "__main__":
    write_golden(GOLDEN, "python -m tests.test_trainer", step=golden_step())
