"""`eyas check --why`: each counterfactual undoes its fault exactly, and the statistics name what
makes tau jump and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import faults
from eyas import builtin
from eyas.export import counterfactuals, replay, why
from eyas.export.counterfactuals import TABLE
from eyas.export.readings import DECLARED, HeadReading
from eyas.export.scores import ReadingScore
from eyas.export.why import jumps, named, why_findings
from eyas.operators.head import head_of
from eyas.operators.tensors import RoundedProducts, read_head, write_head
from eyas.operators.vocab import TargetVocabulary
from tests.test_cli import run_eyas
from tests.tiny import tiny_target
from tests.tiny_head import tiny_head, write_folder

FLAGS = {"plain": {}, "fc_norm": {"fc_norm": True}, "norm_before_fc": {"norm_before_fc": True}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"), rope_theta=500000.0)


def read_as(folder, **flags):
    """The readings of a random head, by name; the head, and its target's vocabulary."""
    vocabulary = TargetVocabulary.load(folder)
    declared = HeadReading(DECLARED, *tiny_head(folder, **flags))
    found = list(counterfactuals.counterfactuals(declared, vocabulary))
    return {one.name: one for one in found}, declared, found


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_every_entry_is_a_head_and_says_what_to_do(tiny, flags):
    by_name, declared, found = read_as(tiny, **flags)
    assert len(by_name) == len(found)
    for one in found:
        head_of(one.config, one.tensors)  # its tensors fit its config
        assert one.says
        same = one.config == declared.config and one.tensors is declared.tensors
        assert not same or one.later or one.embed_lag or one.is_loss, one.name


def test_every_entry_is_of_use_to_some_head(tiny):
    names = {name for flags in FLAGS.values() for name in read_as(tiny, **flags)[0]}
    of_rows = {"d2t by the rows of lm_head"}  # of a head that began with the target's
    as_the_target = {"rope_theta 500000"}  # a known misreading
    assert {*TABLE} - names <= of_rows | as_the_target


# Faults and what undoes them


@dataclass
class Bench:
    vocabulary: TargetVocabulary


EDITS = [one for one in faults.BROKEN if one.right and "trained" not in one.name]


def test_twenty_faults_and_more():
    assert len([one for one in faults.BROKEN if one.right]) >= 24
    known = {*TABLE} | {"the target's default layers"}
    assert {one.right for one in faults.BROKEN} - {""} <= known


@pytest.mark.parametrize("fault", EDITS, ids=[one.name for one in EDITS])
def test_the_counterfactual_undoes_the_fault(tiny, fault):
    """The head is again what it was: for what is lost (lm_head, a norm), as near as can be."""
    vocabulary = TargetVocabulary.load(tiny)
    config, tensors = tiny_head(tiny, fc_norm=True)
    ids_W = tensors["d2t"] + torch.arange(64)
    if "lm_head" in fault.right or "d2t" in fault.right:
        tensors["lm_head.weight"] = vocabulary.lm_head[ids_W]
    broken = HeadReading(DECLARED, *fault.plant(Bench(vocabulary), config, tensors))
    readings = counterfactuals.counterfactuals(broken, vocabulary)
    right = next(one for one in readings if one.name == fault.right)
    sound, bad, good = (
        head_of(*one)
        for one in (
            (config, tensors),
            (broken.config, broken.tensors),
            (right.config, right.tensors),
        )
    )
    if fault.right == "d2t as identity":
        assert torch.equal(good.target_ids_W, torch.arange(64))
        return
    if right.is_loss:
        good = bad  # in float32 it is the same head
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
    assert is_same == (right.is_loss or "d2t" in fault.right or "layers" in fault.right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounded_products_are_those_of_the_precision(tiny, dtype):
    config, tensors = tiny_head(tiny)
    head, generator = head_of(config, tensors).to(dtype), torch.Generator().manual_seed(0)
    embeds, features = (torch.randn(1, 7, n, generator=generator) for n in (32, 96))
    embeds, features = embeds.to(dtype), features.to(dtype)
    with torch.inference_mode():
        theirs = head.logits(head(embeds, head.fuse(features))[0])
        with RoundedProducts():
            ours = head.logits(head(embeds, head.fuse(features))[0])
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=4 * torch.finfo(dtype).eps, atol=1e-2)
    whole = head.float()(embeds.float(), head.fuse(features.float()))[0]
    assert not torch.equal(ours.float(), head.logits(whole))


# The statistics


def drawn(rng, mean, num_answers=40, name=DECLARED, noise=None, is_loss=False):
    """A score whose places accept `mean` drafts on average; with `noise`, mostly that one's."""
    answers = []
    for number in range(num_answers):
        ease = 0.5 + rng.random() if noise is None else 1.0
        fresh = rng.poisson(mean * ease, 24).clip(0, 4)
        if noise is not None:
            old = np.array(noise.answers[number][0])
            fresh = np.where(rng.random(24) < 0.8, old, fresh)
        answers.append([fresh.tolist()])
    return ReadingScore(name, answers, "do this", is_loss)


def test_sound_heads_raise_few_false_alarms():
    """Thirty counterfactuals that change nothing on average: an alarm in 1 of 20 at most."""
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


def test_a_precision_is_named_where_it_loses_and_only_there():
    rng = np.random.default_rng(0)
    declared = drawn(rng, 1.5)
    same = ReadingScore("bfloat16", declared.answers, "do", is_loss=True)
    better, worse = (drawn(rng, mean, name="float16", is_loss=True) for mean in (3.0, 0.3))
    assert named([declared, same, better]) == []
    findings = list(why_findings([declared, same, worse]))
    assert [one.level for one in findings][:2] == ["warning", "note"]
    assert "the head loses in 'float16'" in findings[0].what
    assert [one.interval for one in jumps([declared, same])] == [(1.0, 1.0)]


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


# The command


def test_the_command_names_a_fault_and_clears_a_sound_head(tmp_path, monkeypatch):
    """A head whose gate_proj and up_proj are exchanged, among few counterfactuals."""
    kept = {"gate_proj and up_proj exchanged", "features one token later", "bfloat16"}
    monkeypatch.setattr(counterfactuals, "TABLE", {name: TABLE[name] for name in kept})
    monkeypatch.setattr(counterfactuals, "misreadings", lambda *_: [])
    monkeypatch.setattr(replay, "WHY_CONVERSATIONS", 12)
    config, tensors = read_head(builtin.head_folder())
    mlp = "midlayer.mlp."
    gate, up = f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]
    folder = write_folder(write_head(config, tensors, "eyas"), tmp_path / "head")
    done = run_eyas("check", folder, "-t", "builtin", "--why", "--json")
    assert done.exit_code == 2, done.output
    told = json.loads(done.stdout)
    assert told["exit_code"] == 2
    (finding,) = [one for one in told["findings"] if one["level"] == "error"]
    assert finding["what"].startswith("why: read as 'gate_proj and up_proj exchanged': tau ")
    assert {one["reading"] for one in told["replay"]} == {DECLARED, *kept}
    done = run_eyas("check", "builtin", "-t", "builtin", "--why")
    assert done.exit_code == 0
    assert "the head is sound: no counterfactual makes tau" in done.stdout
    done = run_eyas("check", "builtin", "-t", "builtin", "--why", "--no-replay")
    assert done.exit_code == 2
    assert "--why replays" in done.stderr


def test_most_counterfactuals_are_given_up_early_and_the_rest_judged_by_other_answers(monkeypatch):
    """A quarter of the answers chooses; no answer chooses and judges."""
    seen = {}
    monkeypatch.setattr(replay, "batched", lambda _, answers, __: answers)
    monkeypatch.setattr(replay, "NUM_PROMISING", 3)
    readings = [HeadReading(str(n), None, {}) for n in range(6)]
    readings += [HeadReading("float16", None, {}, is_loss=True)]

    def acceptance(reading, answers, _):
        seen.setdefault(reading.name, []).append([one.token_ids[0] for one in answers])
        return ReadingScore(reading.name, [[[int(reading.name) % 4]]])

    monkeypatch.setattr(replay, "acceptance", acceptance)
    found = replay.promising(readings, [], None, lambda *_: None)
    assert [one.name for one in found] == ["float16", "3", "2"]
    assert why.LEAST_JUMP > 1
