"""A start from an existing head: every form of it, and what does not fit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import builtin, hub
from eyas.artifact import DONE, IDENTITY, MANIFEST, Artifact
from eyas.errors import MismatchError, MissingInputError
from eyas.lineage import head_manifest, sources
from eyas.model.target import Target
from eyas.operators.head import load_head
from eyas.operators.tensors import tensor_of, write_head
from eyas.operators.vocab import TargetVocabulary
from eyas.shards import Features, Sample
from eyas.train.start import initialise, recount, scale_to_states
from eyas.train.state import METRICS
from eyas.train.trainer import TrainConfig, train
from tests.test_cli import run_eyas
from tests.tiny import tiny_target
from tests.tiny_batch import tiny_vocabulary, wavy_head
from tests.tiny_features import greedy_answers, samples_of, write_features

CONFIG = TrainConfig(
    head={"draft_vocab_size": 160},
    objective={"num_ttt_steps": 3, "later_steps": "all"},  # losses that can be compared
    epochs=12,
    batches={"tokens": 256},
    learning_rate=1e-2,
    dtype="float32",
    stop={"measurements": 0},
)
TUNED = {"epochs": 2, "head": {}, "learning_rate": 1e-3}


@pytest.mark.parametrize("options", [{}, {"fc_norm": True}, {"norm_before_fc": True}])
@pytest.mark.parametrize("train_lm_head", [True, False])
def test_a_new_head_is_scaled_by_the_targets_states(train_lm_head, options):
    """One channel is 300 times the others, and position 0 a thousand times."""
    head, vocabulary = wavy_head(train_lm_head=train_lm_head, **options), tiny_vocabulary()
    initialise(head, vocabulary, seed=0)
    width, H = head.fc.in_features, head.config.hidden_size
    aux_TA = torch.randn(200, width, generator=torch.Generator().manual_seed(0))
    aux_TA[:, 7] *= 300
    aux_TA[0] *= 1000
    aux_TA[:, 9] = 0.0
    hidden_TH = torch.full((200, H), 32.0)
    hidden_TH[0] *= 1000
    whole = Sample("whole", torch.zeros(200), torch.ones(200) > 0, aux_TA, hidden_TH)
    prompt = replace(whole, loss_mask=torch.zeros(200) > 0)
    broken = replace(whole, aux_hidden=aux_TA * torch.nan)
    scale_to_states(head, [prompt, whole, broken])
    logits_W = head.norm.weight @ head.lm_head.weight.T
    torch.testing.assert_close(logits_W, 16.0 * vocabulary.lm_head[head.target_ids_W].sum(1))
    if options:
        assert torch.equal(head.feature_scale, torch.ones(width))
    else:
        size_A = head.fc_inputs(aux_TA[1:]).square().mean(0).sqrt()
        torch.testing.assert_close(size_A, (torch.arange(width) != 9).float())
    assert head.fuse(aux_TA).isfinite().all()


class World:
    """A target, two mixes of its own answers, and a head of the old one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = tiny_target(folder / "target", num_hidden_layers=8)
        target = Target.load(self.target)
        self.samples = samples_of(target, greedy_answers(self.target, 36), "sample")
        self.old = write_features(folder / "old", target, self.samples[:24], self.samples[:24])
        self.new = write_features(folder / "new", target, self.samples[24:], self.samples[24:])
        self.head = Artifact(str(folder / "head"))
        train(CONFIG, str(self.target), Features(self.old), self.head)

    def tune(self, name: str, start: dict | str, **changes) -> Artifact:
        output = Artifact(str(self.folder / name))
        config = TrainConfig(**{**CONFIG.model_dump(), **TUNED, "start": start, **changes})
        train(config, str(self.target), Features(self.new), output)
        return output


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def in_form(head: Artifact, form: str, folder: Path) -> Path:
    loaded = load_head(head.local_path(""))
    folder.mkdir()
    for name, data in write_head(loaded.config, loaded.state_dict(), form).items():
        (folder / name).write_bytes(data)
    return folder


def write_frozen(head: Artifact, folder: Path) -> Path:
    shutil.copytree(head.local_path(""), folder)
    settings = json.loads((folder / "eyas_head.json").read_text())
    (folder / "eyas_head.json").write_text(json.dumps({**settings, "train_lm_head": False}))
    (folder / "_DONE").unlink()
    return folder


def test_a_head_of_any_form_is_the_same_start(world):
    outputs = [world.tune("from eyas", world.head.url)]
    # its lineage is part of the new head.s
    assert outputs[0].manifest().inputs["start"].identity == world.head.manifest().identity
    for form in ("sglang", "vllm"):
        folder = in_form(world.head, form, world.folder / form)
        outputs.append(world.tune(f"from {form}", {"head": str(folder), "licence": "Apache-2.0"}))
    assert len({output.read("model.safetensors") for output in outputs}) == 1
    assert len({output.manifest().identity for output in outputs}) == 3
    # of a head from elsewhere
    assert [source.licence for source in sources(outputs[1].manifest())] == ["Apache-2.0"]
    before, after = load_head(world.head.local_path("")), load_head(outputs[0].local_path(""))
    assert torch.equal(before.d2t, after.d2t)
    moved = (before.lm_head.weight - after.lm_head.weight).norm() / before.lm_head.weight.norm()
    assert 0 < moved < 0.1
    first = next(outputs[0].read_jsonl(METRICS))["loss"]
    assert first < next(world.head.read_jsonl(METRICS))["loss"]


def test_a_start_is_its_weights_not_its_place(world, tmp_path):
    copy = shutil.copytree(world.folder / "head", tmp_path / "copy")
    steps = []
    world.tune("placed", world.head.url)
    config = TrainConfig(**{**CONFIG.model_dump(), **TUNED, "start": str(copy)})
    output = Artifact(str(world.folder / "placed"))
    train(config, str(world.target), Features(world.new), output, lambda *one: steps.append(one))
    assert output.was_done
    assert not steps


@pytest.mark.parametrize("asked", [{}, {"draft_vocab_size": 64}, {"draft_vocab_size": 200}])
def test_draft_tokens_chosen_anew_keep_the_rows_they_had(world, asked):
    start = {"head": world.head.url, "vocabulary": "recount"}
    output = world.tune(f"recounted {asked}", start, learning_rate=1e-30, head=asked)
    before, after = load_head(world.head.local_path("")), load_head(output.local_path(""))
    counts = torch.zeros(320, dtype=torch.int64)
    for sample in world.samples[24:]:
        counts += torch.bincount(sample.token_ids[sample.loss_mask], minlength=320)
    assert len(after.d2t) == len(after.lm_head.weight) == asked.get("draft_vocab_size", 160)
    assert counts[~after.t2d].max() <= counts[after.t2d].min()
    lm_head = tensor_of(Target.load(world.target).lm_head)
    had = {int(token): row for row, token in enumerate(before.target_ids_W)}
    # the map from the target's rows to those that it had, by least squares beside a scale
    of_target, had_rows = lm_head[before.target_ids_W], before.lm_head.weight.detach()
    scale = (of_target * had_rows).sum() / of_target.square().sum()
    ridge = 0.01 * of_target.square().sum(0).mean() * torch.eye(of_target.shape[1])
    rest = torch.linalg.inv(of_target.T @ of_target + ridge) @ of_target.T
    mapped = scale * lm_head + lm_head @ (rest @ (had_rows - scale * of_target))
    kept, fresh = 0, 0
    for row, token in enumerate(after.target_ids_W.tolist()):
        if token in had:
            kept += 1
            assert torch.equal(after.lm_head.weight[row], before.lm_head.weight[had[token]])
        else:
            fresh += 1
            made = after.lm_head.weight[row]
            torch.testing.assert_close(made, mapped[token], rtol=0.02, atol=0.01)  # bfloat16
    assert kept
    assert fresh or asked == {"draft_vocab_size": 64}


def test_fresh_draft_tokens_have_the_scale_of_the_others():
    head, vocabulary = wavy_head(), tiny_vocabulary()
    initialise(head, vocabulary, seed=0)
    with torch.no_grad():
        head.lm_head.weight.mul_(3.0)  # as training may
    counts_V = torch.arange(head.config.vocab_size)
    recount(head, vocabulary, counts_V, 20)
    assert head.target_ids_W.tolist() == counts_V[-20:].tolist()
    torch.testing.assert_close(head.lm_head.weight, 3.0 * vocabulary.lm_head[-20:])
    assert head.lm_head(torch.ones(head.config.hidden_size)).shape == (20,)


def test_what_does_not_fit_is_refused(world, tmp_path):
    frozen = str(write_frozen(world.head, tmp_path / "frozen"))
    for start, head, error, words in (
        (str(tmp_path / "nothing"), {}, MissingInputError, "no head folder at"),
        (
            world.head.url,
            {"norm_output": False},
            MismatchError,
            "norm_output is False, its own is T",
        ),
        (world.head.url, {"draft_vocab_size": 64}, MismatchError, "size is 64, its own is 160"),
        # said, though it is the default
        (frozen, {"train_lm_head": True}, MismatchError, "train_lm_head is True, its own is False"),
    ):
        with pytest.raises(error, match=words):
            world.tune("refused", start, head=head)
    other = shutil.copytree(world.folder / "head", tmp_path / "other")
    for name in (MANIFEST, DONE, IDENTITY):  # without them the files may be edited
        (other / name).unlink()
    settings = json.loads((other / "eyas_head.json").read_text())
    taps = r"outputs of layers \(1, 2, 4\), the features are of \(1, 3, 4\)"
    for changed, words in (
        ({"taps": {"after_layer": [1, 2, 4]}}, taps),
        ({"target_lm_head_sha256": "another"}, "another target of the same shape"),
    ):
        (other / "eyas_head.json").write_text(json.dumps({**settings, **changed}))
        with pytest.raises(MismatchError, match=words):
            world.tune("refused", str(other))
    meant = world.tune("meant", {"head": str(other), "other_target": True})
    sha256 = load_head(meant.local_path("")).config.target_lm_head_sha256
    assert sha256 == Features(world.new).meta.lm_head_sha256
    wide = tiny_target(tmp_path / "wide", num_hidden_layers=8, hidden_size=48)
    config = TrainConfig(**{**CONFIG.model_dump(), **TUNED, "start": world.head.url})
    target = Target.load(wide)
    samples = samples_of(target, [([5, 6], [7, 8, 9])], "wide")
    features = write_features(tmp_path / "wide features", target, samples, [])
    with pytest.raises(MismatchError, match="a target of hidden size 32"):
        train(config, str(wide), Features(features), Artifact(str(tmp_path / "e")))
    # refused before any folder is taken
    assert not (world.folder / "refused").exists()


def test_embeddings_of_its_own_are_not_lost_in_silence(world, tmp_path):
    folder = in_form(world.head, "vllm", tmp_path / "own")
    tensors = load_file(folder / "model.safetensors")
    embeddings = tensor_of(Target.load(world.target).embed_tokens)
    save_file({**tensors, "embed_tokens.weight": embeddings.clone()}, folder / "model.safetensors")
    same = world.tune("same embeddings", str(folder))
    none = world.tune("none", world.head.url)
    assert same.read("model.safetensors") == none.read("model.safetensors")
    save_file({**tensors, "embed_tokens.weight": embeddings + 1}, folder / "model.safetensors")
    with pytest.raises(MismatchError, match="embeddings of its own"):
        world.tune("other embeddings", str(folder))


def test_the_command_line_names_the_start(world):
    same = world.tune("by file", {"head": world.head.url}, learning_rate=1e-6)
    settings = ["objective.num_ttt_steps=3", "objective.later_steps=all", "epochs=2"]
    settings += ["batches.tokens=256", "learning_rate=1e-6", "dtype=float32"]
    settings += ["stop={measurements: 0}"]
    words = ("train", world.new.url, "-t", world.target, "-o", world.folder / "by words")
    words += ("--start", world.head.url, *(word for one in settings for word in ("-s", one)))
    shown = run_eyas(*words)
    assert shown.exit_code == 0, shown.output
    assert Artifact(str(world.folder / "by words")).manifest().identity == same.manifest().identity


def test_a_start_may_be_the_packaged_head_or_one_of_the_hub(monkeypatch):
    vocabulary = TargetVocabulary.load(builtin.target_folder())
    packaged = str(builtin.head_folder())
    monkeypatch.setattr(hub, "hub_folder", lambda name, *_: {"owner/head": packaged}[name])
    borrowed = vocabulary.config, vocabulary.lm_head
    by_folder = load_head(packaged, *borrowed)
    for name in ("builtin", "owner/head"):
        assert head_manifest(name, {}).identity == head_manifest(packaged, {}).identity
        weight = load_head(hub.resolve_head(name), *borrowed).lm_head.weight
        assert torch.equal(weight, by_folder.lm_head.weight)
