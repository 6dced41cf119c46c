"""`eyas check --why`: readings undo their faults, and statistics name what makes tau jump."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas import builtin
from eyas.export import replay
from eyas.export.readings import DECLARED, misreadings
from eyas.export.verdict import ReadingScore, named, why_findings
from eyas.model.config import RopeConfig
from eyas.model.dialects import LM_HEAD
from eyas.operators.head import head_of
from eyas.operators.tensors import read_head, write_head
from eyas.operators.vocab import TargetVocabulary
from tests.test_cli import run_eyas
from tests.tiny import tiny_target
from tests.tiny_head import tiny_head, write_folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), rope_theta=500000.0)


FLAGS = ({}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True})


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_every_reading_is_a_head_and_says_what_to_do(tiny, flags):
    config, tensors = tiny_head(tiny, **flags)
    found = list(misreadings(config, tensors, TargetVocabulary.load(tiny), why=True))
    assert len({one.name for one in found}) == len(found) >= 9
    for one in found:
        head_of(one.config, one.tensors)  # its tensors fit its config
        assert one.hint
        assert one.config != config or one.tensors is not tensors


def layers(*moved_by: int):
    def plant(config, tensors):
        taps = tuple(tap + by for tap, by in zip(config.taps, moved_by, strict=True))
        return config.model_copy(update={"taps": taps}), tensors

    return plant


def with_config(**changes):
    return lambda config, tensors: (config.model_copy(update=changes), tensors)


def feature_first(config, tensors):
    """The layer's two inputs in the other order."""
    names = [f"midlayer.self_attn.{letter}_proj.weight" for letter in "qkv"]
    swapped = {name: torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1) for name in names}
    return config, tensors | swapped


def map_lost(config, tensors):
    """The target's first tokens as the vocabulary."""
    first_V = torch.arange(config.vocab_size) < config.draft_vocab_size
    return config, tensors | {"d2t": torch.zeros_like(tensors["d2t"]), "t2d": first_V}


def lm_head_lost(config, tensors):
    noise = torch.randn(tensors[LM_HEAD].shape, generator=torch.Generator().manual_seed(0))
    return config, tensors | {LM_HEAD: noise}


EDITS = {  # a fault: the reading that undoes it
    "outputs listed as inputs": ("layers one later (inputs taken for outputs)", layers(-1, -1, -1)),
    "inputs listed as outputs": ("layers one earlier (outputs taken for inputs)", layers(1, 1, 1)),
    "first layer one on": ("the target's default layers", layers(1, 0, 0)),
    "second layer one back": ("the target's default layers", layers(0, -1, 0)),
    "rope_theta": ("the target's rotary embedding", with_config(rope=RopeConfig(theta=100.0))),
    "a flag": ("norm_before_residual off", with_config(norm_before_residual=True)),
    "[feature, embedding]": ("the feature before the embedding", feature_first),
    "map lost": ("d2t by the rows of lm_head", map_lost),
    "lm_head lost": ("the target's lm_head", lm_head_lost),
}


@pytest.mark.parametrize(("name", "plant"), EDITS.values(), ids=EDITS)
def test_the_reading_undoes_the_fault(tiny, name, plant):
    """Exactly; of a lost lm_head as near as can be."""
    vocabulary = TargetVocabulary.load(tiny)
    config, tensors = tiny_head(tiny, fc_norm=True)
    ids_W = tensors["d2t"] + torch.arange(64)
    if "lm_head" in name:
        tensors["lm_head.weight"] = vocabulary.lm_head[ids_W]
    broken = plant(config, tensors)
    readings = misreadings(*broken, vocabulary, why=True)
    right = next(one for one in readings if one.name == name)
    sound, bad, good = (
        head_of(*one) for one in ((config, tensors), broken, (right.config, right.tensors))
    )
    assert good.config.taps == sound.config.taps
    assert torch.equal(good.target_ids_W, sound.target_ids_W)
    generator = torch.Generator().manual_seed(0)
    embeds, features = (torch.randn(1, 7, n, generator=generator) for n in (32, 96))
    with torch.inference_mode():
        expected, made, before = (
            one.logits(one(embeds, one.fuse(features))[0]).log_softmax(-1)
            for one in (sound, good, bad)
        )
    torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-3)
    is_same = torch.allclose(before, expected, rtol=1e-2, atol=1e-2)
    assert is_same == ("d2t" in name or "layers" in name)


def drawn(rng, mean, num_answers=40, name=DECLARED, noise=None):
    """A score whose places accept `mean` drafts on average; most are those of `noise`, if given."""
    answers = []
    for number in range(num_answers):
        ease = 0.5 + rng.random() if noise is None else 1.0
        fresh = rng.poisson(mean * ease, 24).clip(0, 4)
        if noise is not None:
            old = np.array(noise.answers[number][0])
            fresh = np.where(rng.random(24) < 0.8, old, fresh)
        answers.append([fresh.tolist()])
    return ReadingScore(name, answers, "do this")


def test_sound_heads_raise_few_false_alarms():
    """Of 30 readings that change nothing: in 1 of 20 checks at most."""
    alarms = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        declared = drawn(rng, 1.0)
        alike = np.mean([np.mean(one[0]) for one in declared.answers])
        others = [drawn(rng, alike, name=str(n), noise=declared) for n in range(30)]
        alarms += bool(named([declared, *others]))
    assert alarms <= 4


def test_what_jumps_is_named_with_what_cannot_be_told_from_it():
    rng = np.random.default_rng(0)
    declared = drawn(rng, 0.4)
    right = drawn(rng, 1.5, name="right")
    twin = ReadingScore("twin", [*right.answers[1:], right.answers[0]], "do that")
    partly, other = drawn(rng, 0.8, name="partly"), drawn(rng, 0.1, name="other")
    found = named([declared, other, twin, partly, right])
    assert {one.score.reading for one in found} == {"right", "twin"}
    low, high = found[0].interval
    assert 1.02 < low < found[0].ratio < high
    assert found[0].ratio == pytest.approx(found[0].score.tau / declared.tau)
    assert [one.score.reading for one in named([declared, other, right])] == ["right"]
    assert named([declared]) == []
    (finding,) = why_findings([declared, other, twin, partly, right])
    assert finding.level == "error"
    assert "'right'" in finding.what
    assert "'twin'" in finding.what
    assert f"{declared.tau:.2f} -> {found[0].score.tau:.2f}" in finding.what
    assert set(finding.hint.split("; ")) == {"do this", "do that"}


def test_a_jump_of_few_answers_is_none():
    rng = np.random.default_rng(0)
    few = [drawn(rng, mean, num_answers=5, name=str(mean)) for mean in (0.2, 2.0)]
    assert named(few) == []
    (finding,) = why_findings(few)
    assert finding.level == "warning"
    assert "too few" in finding.what


def test_a_sound_head_is_said_to_be_and_what_it_lacks():
    rng = np.random.default_rng(0)
    declared = drawn(rng, 1.0, num_answers=60)
    kinds = ["sql" if n % 2 else "chat" for n in range(60)]
    declared = ReadingScore(DECLARED, declared.answers, kinds=kinds, covered=0.7)
    scores = [declared, drawn(rng, 0.5, 60, "other")]
    said = {one.what: one.hint for one in why_findings(scores)}
    assert all(one.level == "note" for one in why_findings(scores))
    for words in ("the head is sound", "covers 70%", "tau by kind: ", "from 17 "):
        assert any(words in what for what in said), words


def test_a_head_that_drafts_nothing_however_it_is_read_is_warned_of():
    rng = np.random.default_rng(0)
    found = list(why_findings([drawn(rng, 0.05), drawn(rng, 0.05, name="other")]))
    assert found[0].level == "warning"
    assert "next to nothing" in found[0].what


def test_the_command_names_a_fault_and_clears_a_sound_head(tmp_path, monkeypatch):
    kept = {"the feature before the embedding", "norm_output on"}

    def few(*args):
        return (one for one in misreadings(*args) if one.name in kept)

    monkeypatch.setattr(replay, "misreadings", few)
    monkeypatch.setattr(replay, "WHY_CONVERSATIONS", 12)
    config, tensors = feature_first(*read_head(builtin.head_folder()))
    folder = write_folder(write_head(config, tensors, "eyas"), tmp_path / "head")
    done = run_eyas("check", folder, "-t", "builtin", "--why", "--json")
    assert done.exit_code == 2, done.output
    told = json.loads(done.stdout)
    assert told["exit_code"] == 2
    (finding,) = [one for one in told["findings"] if one["level"] == "error"]
    assert finding["what"].startswith("why: read as 'the feature before the embedding': tau ")
    assert {one["reading"] for one in told["replay"]} == {DECLARED, *kept}
    done = run_eyas("check", "builtin", "-t", "builtin", "--why")
    assert done.exit_code == 0
    assert "the head is sound: no other reading makes tau" in done.stdout
    done = run_eyas("check", "builtin", "-t", "builtin", "--why", "--no-replay")
    assert done.exit_code == 2
    assert "--why replays" in done.stderr
