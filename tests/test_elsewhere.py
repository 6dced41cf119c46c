"""What runs on a GPU has the CPU's results on a device that refuses what a GPU refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.artifact import Artifact
from eyas.cli.eval import evaluate
from eyas.evaluate import evaluate as evaluate_module
from eyas.features.capture import CaptureConfig, capture
from eyas.model.target import Target
from eyas.operators import decoder as decoder_module
from eyas.operators.batch import Batch
from eyas.operators.chain import matched_spans
from eyas.operators.decoder import HookedDecoder
from eyas.operators.head import load_head
from eyas.shards import Features, FeatureSource, Sample, ShardWriter
from eyas.train import trainer as trainer_module
from eyas.train.ranks import Ranks
from eyas.train.trainer import TrainConfig, train
from tests.elsewhere import elsewhere
from tests.stages import all_samples, write_answers
from tests.test_codecs import NAMES, meta_of, sample_of
from tests.tiny import tiny_target
from tests.tiny_batch import made_up_samples, tiny_vocabulary, waves, wavy_head
from tests.tiny_features import greedy_answers, samples_of, write_features

CONFIG = TrainConfig(
    head={"draft_vocab_size": 160},
    objective={"num_ttt_steps": 3},
    epochs=2,
    batches={"tokens": 256},
    dtype="float32",
    stop={"measurements": 2},
)


def test_the_device_refuses_what_a_gpu_refuses(monkeypatch):
    with elsewhere(monkeypatch) as device:
        there = torch.arange(3.0, device=device)
        for refused in (
            lambda: there.numpy(),
            lambda: np.asarray(there),
            lambda: there + torch.arange(3.0),
            lambda: torch.arange(3.0)[there > 1],
            lambda: there.index_select(0, torch.tensor([1])),
            lambda: torch.cat([there, torch.from_numpy(np.ones(2, np.float32))]),
        ):
            with pytest.raises((RuntimeError, TypeError)):
                refused()
        there[torch.tensor([True, False, False])] = torch.tensor(7.0)
        assert (2 * there).tolist() == [14.0, 2.0, 4.0]
        assert torch.tensor([1, 2], device=device).cpu().numpy().tolist() == [1, 2]


@pytest.mark.parametrize("teacher", ["everywhere", "supervised"])
@pytest.mark.parametrize("codec", NAMES)
def test_features_are_stored_from_there(tmp_path, monkeypatch, codec, teacher):
    meta, samples = meta_of(codec, teacher=teacher), [sample_of(number, 300) for number in range(3)]

    def stored(name: str, samples: list[Sample]) -> bytes:
        artifact = Artifact(str(tmp_path / name))
        artifact.begin("test")
        writer = ShardWriter(artifact, "train", meta)
        for one in samples:
            writer.add(one)
        writer.close()
        return artifact.read("train-00000.safetensors") + artifact.read("train.index.json")

    expected = stored("here", samples)
    with elsewhere(monkeypatch) as device:
        states = [(one.aux_hidden.to(device), one.last_hidden.to(device)) for one in samples]
        there = [
            replace(one, aux_hidden=aux, last_hidden=last)
            for one, (aux, last) in zip(samples, states, strict=True)
        ]
        assert stored("there", there) == expected


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, Artifact]:
    folder = tmp_path_factory.mktemp("world")
    target = tiny_target(folder / "target", num_hidden_layers=8)
    loaded = Target.load(target)
    samples = samples_of(loaded, greedy_answers(target, 12), "sample")
    return target, write_features(folder / "features", loaded, samples[:8], samples[8:])


@contextmanager
def trains_on(device: str) -> Iterator[Ranks]:
    yield Ranks(device=device)


@pytest.fixture
def optimizer_of_any_device(monkeypatch) -> None:
    """Torch's fused AdamW, which knows found_inf, is for known devices."""

    class Plain(torch.optim.AdamW):
        def __init__(self, groups, betas, **_):
            super().__init__(groups, betas=betas)

        def step(self):
            self.found_inf = None
            super().step()

    monkeypatch.setattr(torch.optim, "AdamW", Plain)


def trained(target: Path, source: FeatureSource, output: Path, **changes) -> Artifact:
    made = Artifact(str(output))
    held_out = changes.pop("held_out", None)
    config = TrainConfig(**{**CONFIG.model_dump(), **changes})
    train(config, str(target), source, made, held_out=held_out)
    return made


@pytest.mark.usefixtures("optimizer_of_any_device")
@pytest.mark.parametrize(
    "changes",
    [
        {"objective": {"num_ttt_steps": 3, "later_steps": "all"}},
        {"batches": {"tokens": 256}, "head": {"norm_before_fc": True}},
    ],
)
def test_a_run_trains_there(world, tmp_path, monkeypatch, changes):
    target, features = world
    changes["held_out"] = Features(features, "held_out")
    heads = [trained(target, Features(features), tmp_path / "here", **changes)]
    with elsewhere(monkeypatch) as device:
        monkeypatch.setattr(trainer_module, "joined", lambda: trains_on(device))
        heads.append(trained(target, Features(features), tmp_path / "there", **changes))
    here, there = (load_head(one.local_path("")) for one in heads)
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        assert (one - other).norm() <= 1e-2 * one.norm()  # tiles of another size
    losses = [[row["loss"] for row in one.read_jsonl("metrics.jsonl")] for one in heads]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_chains_and_trees_are_measured_there(world, tmp_path, monkeypatch):
    target, features = world
    head = trained(target, Features(features), tmp_path / "head")
    asked = {"target": target, "features": features.url, "trees": ["fixed(3,2,5)"]}
    here = evaluate(head.url, **asked, progress=False)
    with elsewhere(monkeypatch) as device:
        monkeypatch.setattr(evaluate_module, "default_device", lambda: device)
        assert evaluate(head.url, **asked, progress=False).result == here.result


def test_a_heads_own_embeddings_go_there(monkeypatch):
    head, samples = wavy_head(), made_up_samples([[False] * 3 + [True] * 9] * 3)
    head.embed_tokens = waves(40, 12, seed=99)
    batch, embed_tokens = Batch.of(samples), tiny_vocabulary().embed_tokens
    here = matched_spans(head, embed_tokens, batch, 3)
    assert here != matched_spans(wavy_head(), embed_tokens, batch, 3)
    with elsewhere(monkeypatch) as device:
        there = head.to(device), embed_tokens.to(device), batch.to(device)
        assert matched_spans(*there, 3) == here


@pytest.mark.usefixtures("optimizer_of_any_device")
def test_transformers_computes_features_there(world, tmp_path, monkeypatch):
    target, _ = world
    turns = "A table for two.", "In San Jose.", "At seven.", "It is booked.", "Thanks.", "Bye now."
    dialogues = [turns[number % 4 :] for number in range(8)]
    answers = write_answers(target, tmp_path / "answers", dialogues)
    config = CaptureConfig(target=str(target), decoder="transformers", held_out_share=0.3)
    stores = [Artifact(str(tmp_path / name)) for name in ("here", "there")]
    capture(config, answers, stores[0])
    own = HookedDecoder.load(target, "float32")
    with elsewhere(monkeypatch) as device:
        monkeypatch.setattr(decoder_module, "default_device", lambda: device)
        capture(config, answers, stores[1])
        decoder = HookedDecoder.load(target, "float32")
        assert decoder.states([[5, 6, 7]]).aux_hidden.device.type == device
        assert decoder.answer([5, 6, 7], 6) == own.answer([5, 6, 7], 6)
        assert decoder.final_norm()(torch.zeros(3, 32)).device.type == device
    here, there = map(all_samples, stores)
    assert here.keys() == there.keys()
    for key, one in here.items():
        for name in ("aux_hidden", "last_hidden"):
            ours, theirs = getattr(one, name).float(), getattr(there[key], name).float()
            assert (ours - theirs).norm() < 0.01 * ours.norm()
