"""When a run ends, what it keeps, and what is measured on the way."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from eyas.artifact import Artifact
from eyas.errors import ConfigError, EyasError
from eyas.model.target import Target
from eyas.shards import Features
from eyas.train import trainer
from eyas.train.state import (
    CHECKPOINT,
    METRICS,
    SETTLED,
    LossTrend,
    Patience,
    StopConfig,
    measured_steps,
)
from eyas.train.trainer import TrainConfig, train
from tests.tiny import tiny_target
from tests.tiny_features import greedy_answers, samples_of, write_features

CONFIG = TrainConfig(
    head={"draft_vocab_size": 64},
    objective={"num_ttt_steps": 2},
    epochs=8,
    batches={"tokens": 64},
    learning_rate=3e-3,
    dtype="float32",
    stop={"measurements": 6},
    checkpoint_every=5,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)
    target = Target.load(folder)
    samples = samples_of(target, greedy_answers(folder, 14), "sample")
    return str(folder), write_features(
        tmp_path_factory.mktemp("features"), target, samples[:9], samples[9:]
    )


def changed(**changes) -> TrainConfig:
    return TrainConfig(**{**CONFIG.model_dump(), **changes})


def run(made, config: TrainConfig, folder, track=trainer.quiet) -> Artifact:
    output = Artifact(str(folder))
    train(config, made[0], Features(made[1]), output, track, Features(made[1], "held_out"))
    return output


@given(st.integers(1, 3000), st.integers(0, 50))
def test_measurements_are_far_apart_and_the_last_step_is_among_them(num_steps, measurements):
    steps = measured_steps(num_steps, StopConfig(measurements=measurements))
    assert len(steps) == min(measurements, num_steps)
    assert steps <= set(range(1, num_steps + 1))
    assert not steps or max(steps) == num_steps


def test_tau_is_measured_on_the_way_and_shown(made, tmp_path):
    notes, config = [], changed(stop={**CONFIG.stop.model_dump(), "keep": True})
    output = run(made, config, tmp_path, lambda done, total, note: notes.append(note))
    rows, facts = list(output.read_jsonl(METRICS)), output.manifest().facts["held_out"]
    measured = [row for row in rows if "held_out_tau" in row]
    steps = [row["step"] for row in measured]
    assert steps == sorted(measured_steps(len(rows), CONFIG.stop))
    assert facts["start_tau"] >= 1
    assert facts["samples"] == 5
    assert "tau" not in notes[0]
    assert f"tau {max(row['held_out_tau'] for row in measured):.2f}" in notes[-1]
    for row in measured:
        counts = row["held_out_counts"]
        assert row["held_out_loss"] > 0
        assert len(counts["emitted"]) == len(counts["rounds"]) == 5
        assert sum(counts["emitted"]) / sum(counts["rounds"]) == row["held_out_tau"]
    # every measured head is kept
    assert sorted(int(path.name) for path in (tmp_path / "measured").iterdir()) == steps
    for name in ("eyas_head.json", "model.safetensors"):
        assert output.read(name) == output.read(f"measured/{facts['step']}/{name}")


def test_a_run_stops_when_tau_rises_no_more_and_keeps_the_best(made, tmp_path, monkeypatch):
    taus = iter([1.2, 1.5, 1.9, 1.8, 1.7, 2.5, 2.6])
    at_best = {}

    def measured(held_out, module, ranks):
        tau = next(taus)
        if tau == 1.9:
            at_best.update(module.head.state_dict())
            at_best["fc.weight"] = at_best["fc.weight"] * at_best.pop("feature_scale")
            at_best.update({name: weight.clone() for name, weight in at_best.items()})
        return torch.tensor([[round(10 * tau), 10]]), 1.0

    monkeypatch.setattr(trainer.HeldOutSample, "measure", measured)
    output = run(made, changed(stop={**CONFIG.stop.model_dump(), "patience": 2}), tmp_path)
    rows = list(output.read_jsonl(METRICS))
    facts = output.manifest().facts
    assert [row["held_out_tau"] for row in rows if "held_out_tau" in row] == [1.5, 1.9, 1.8, 1.7]
    assert len(rows) == output.manifest().counts["batches"] < facts["planned_batches"]
    assert facts["held_out"]["tau"] == 1.9
    best, last = (load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "last"))
    assert all(best[name].equal(weight) for name, weight in at_best.items())
    assert not last["fc.weight"].equal(best["fc.weight"])


def test_a_start_that_is_better_than_all_that_follows_is_kept(made, tmp_path, monkeypatch, caplog):
    """An existing head; a new one's start is no head yet."""
    first = run(made, changed(epochs=1, stop={"measurements": 0}), tmp_path / "first")
    for start, step in ((first.url, 0), (None, 9)):
        taus = iter([1.9, *[1.5] * 20])
        monkeypatch.setattr(trainer, "ratio_of_sums", lambda counts, taus=taus: next(taus))
        stop = {**CONFIG.stop.model_dump(), "max_steps": 9}
        config = changed(stop=stop, start=start, head={} if start else CONFIG.head.model_dump())
        caplog.clear()
        output = run(made, config, tmp_path / f"from {step}")
        held_out = output.manifest().facts["held_out"]
        assert (held_out["start_tau"], held_out["step"]) == (1.9, step)
        assert held_out["tau"] == (1.9 if start else 1.5)
        assert "no head of this run is better than its start" in caplog.text
        assert (output.read("model.safetensors") == first.read("model.safetensors")) == bool(start)
        assert len(list(output.read_jsonl(METRICS))) == 9


def test_a_stopped_run_that_was_cut_stops_again(made, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "ratio_of_sums", lambda counts: 1.5)  # no gain after the first
    config = changed(stop={**CONFIG.stop.model_dump(), "patience": 1})
    whole = run(made, config, tmp_path / "whole")
    assert whole.manifest().counts["batches"] < whole.manifest().facts["planned_batches"]

    def cut(done, total, note):
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(made, config, tmp_path / "cut", cut)
    assert run(made, config, tmp_path / "cut").read("model.safetensors") == whole.read(
        "model.safetensors"
    )


def test_a_sample_without_a_round_judges_nothing(made, tmp_path):
    folder, features = made
    target = Target.load(folder)
    silent = write_features(
        tmp_path / "features", target, [], samples_of(target, [([5, 6, 7], [8])] * 2, "short")
    )
    output, config = Artifact(str(tmp_path / "head")), changed(epochs=2)
    train(config, folder, Features(features), output, held_out=Features(silent, "held_out"))
    assert output.manifest().facts["held_out"]["step"] == 0
    plain = run(made, changed(epochs=2, stop={"measurements": 0}), tmp_path / "plain")
    assert output.read("model.safetensors") == plain.read("model.safetensors")


def test_patience_needs_something_to_wait_for(made, tmp_path):
    config = changed(stop={"patience": 2, "measurements": 0})
    with pytest.raises(ConfigError, match=r"stop\.patience"):
        run(made, config, tmp_path / "a")
    with pytest.raises(ConfigError, match=r"stop\.patience"):
        train(
            changed(stop={"patience": 2}), made[0], Features(made[1]), Artifact(str(tmp_path / "b"))
        )


def test_patience_counts_measurements_without_a_gain():
    patience, config = Patience(), StopConfig(patience=2)
    told = ((1.0, True, 0), (1.06, True, 0), (1.06, True, 1), (1.05, False, 2))
    for step, (tau, is_best, misses) in enumerate(told, 1):
        assert patience.add(step, tau) == is_best
        assert patience.misses == misses
        assert patience.is_over(config) == (misses == 2)
    assert (patience.best, patience.best_step) == (1.06, 3)
    assert not patience.is_over(StopConfig())


@pytest.mark.parametrize("read_every", [1, 8])
def test_a_loss_that_runs_away_stops_the_run_and_names_its_samples(
    made, tmp_path, monkeypatch, read_every
):
    monkeypatch.setattr(trainer, "READ_EVERY", {"cpu": read_every})
    monkeypatch.setattr("eyas.train.step.MAX_GRAD_NORM", 1e6)
    monkeypatch.setattr("eyas.train.state.DIVERGED_AT", 1.3)
    rate = {"peak": 3.0, "warmup_share": 0.7}
    config = changed(learning_rate=rate, epochs=40, stop={})
    with pytest.raises(EyasError, match="the loss diverges") as raised:
        run(made, config, tmp_path)
    assert "sample-" in raised.value.what
    output = Artifact(str(tmp_path))
    assert not output.is_done()
    rows = list(output.read_jsonl(METRICS))
    assert f"at step {len(rows)}" in raised.value.what
    assert output.exists(CHECKPOINT)
    assert len(rows) > SETTLED


def test_drift_waits_until_it_is_settled_and_forgives_next_to_nothing():
    rising = LossTrend()
    for loss in (1.0, 50.0):
        rising.add(loss)
        assert not rising.has_diverged()  # a beginning has no lowest yet
    tiny = LossTrend()
    for loss in [10.0] * 5 + [1e-4] * 200 + [1e-2] * 50:
        tiny.add(loss)
        assert not tiny.has_diverged()
    for _ in range(30):
        tiny.add(5.0)
    assert tiny.has_diverged()


@pytest.fixture(scope="module")
def impatient(made, tmp_path_factory) -> bytes:
    """The head of a run that no error interrupted."""
    config = changed(stop={**CONFIG.stop.model_dump(), "patience": 1})
    return run(made, config, tmp_path_factory.mktemp("whole")).read("model.safetensors")


@pytest.mark.parametrize(("at", "read_every"), [(0, 1), (8, 1), (9, 8)])
def test_an_error_keeps_what_was_done(made, impatient, tmp_path, monkeypatch, at, read_every):
    """Whatever checkpoint_every says, and where figures are read later, as on a GPU."""
    step = trainer.training_step
    config = changed(stop={**CONFIG.stop.model_dump(), "patience": 1})

    def failing(state, *rest):
        if state.step == at:
            raise EyasError("made up")
        return step(state, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "training_step", failing)
        patched.setattr(trainer, "READ_EVERY", {"cpu": read_every})
        with pytest.raises(EyasError, match="made up"):
            run(made, config, tmp_path / "cut")
    steps = []
    output = run(made, config, tmp_path / "cut", lambda done, *_: steps.append(done))
    assert steps[0] == at + 1
    assert output.read("model.safetensors") == impatient
    assert not output.exists(CHECKPOINT)


def test_only_settings_with_an_effect_change_the_identity(made, tmp_path):
    identities = []
    for number, changes in enumerate(({}, {"checkpoint_every": 7}, {"seed": 1})):
        output = run(made, changed(epochs=1, **changes), tmp_path / str(number))
        identities.append(output.manifest().identity)
    assert identities[0] == identities[1] != identities[2]
    weights = [Artifact(str(tmp_path / name)).read("model.safetensors") for name in "01"]
    assert weights[0] == weights[1]


def test_a_callback_gets_every_row_and_ends_no_run(made, tmp_path, caplog):
    rows, output, given = [], Artifact(str(tmp_path)), (made[0], Features(made[1]))

    def failing(row):
        rows.append({**row})
        if row.pop("step") == 3:  # as some trackers want it: the run's own row stays whole
            raise ConnectionError("a server with a secret in its address")

    with caplog.at_level(logging.WARNING, "eyas"):
        train(changed(epochs=2), *given, output, on_row=failing)
    assert rows == list(output.read_jsonl(METRICS))[:3]
    warned = [record.data for record in caplog.records if "on_row" in record.message]
    assert warned == [{"step": 3, "error": "ConnectionError"}]
    assert "secret" not in caplog.text
