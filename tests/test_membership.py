"""Membership: a head that learned its answers by heart is found out, equal sides are a guess."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from eyas.artifact import Artifact
from eyas.errors import EmptyInputError
from eyas.evaluate.membership import Membership, answer_losses
from eyas.model.target import Target
from eyas.operators.batch import Batch
from eyas.operators.head import load_head
from eyas.operators.vocab import TargetVocabulary
from eyas.shards import Features, ShardWriter
from tests.test_cli import run_eyas
from tests.tiny import tiny_target
from tests.tiny_features import greedy_answers, samples_of
from tests.tiny_prompts import learned_head


def test_the_share_of_pairs():
    found = Membership.of([1.0, 2.0, 9.0] * 2, [2.0, 3.0] * 3)
    assert found.auc == pytest.approx((2 + 1.5 + 0) / 6)
    won, lost = [1, 0.75, 0] * 2, [0.5, 2 / 3] * 3
    half = 1.96 * (np.var(won, ddof=1) / 6 + np.var(lost, ddof=1) / 6) ** 0.5
    assert found.interval == pytest.approx((found.auc - half, found.auc + half))
    with pytest.raises(EmptyInputError, match="6 trained and 5 held-out"):
        Membership.of([1.0] * 6, [2.0] * 5)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A target, a head that learned some answers, these and others."""
    folder = tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)
    output = tmp_path_factory.mktemp("head")
    learned_head(folder, 8, output)
    seen = [*Features(Artifact(str(output / "features"))).stream(range(8))]
    others = samples_of(Target.load(folder), greedy_answers(folder, 8), "others")
    return folder, output, seen, others


@pytest.mark.parametrize("is_told", [True, False])
def test_only_trained_answers_are_told(learned, tmp_path, is_told):
    """Trained ones are stored rounded, held-out ones exactly: that alone tells nothing."""
    folder, output, seen, others = learned
    features = Artifact(str(tmp_path))
    features.begin("made by a test")
    meta = Features(Artifact(str(output / "features"))).meta
    within = meta.model_copy(update={"codec": "within4"})
    sides = (("train", seen, within), ("held_out", others if is_told else seen, meta))
    for split, samples, stored in sides:
        writer = ShardWriter(features, split, stored)
        for sample in samples:
            writer.add(sample)
        writer.close()
    features.finish("capture", {}, {}, {})
    result = run_eyas(
        "check", output / "head", "-t", folder, "--no-replay", "--leaks", tmp_path, "--json"
    )
    found = json.loads(result.stdout)
    (said,) = (one for one in found["findings"] if "membership AUC" in one["what"])
    auc_of = float(said["what"].split()[2])
    assert "(8 and 8 answers)" in said["what"]
    assert said["level"] == ("warning" if is_told else "note")
    assert auc_of > 0.9 if is_told else auc_of == 0.5


def test_a_loss_is_the_divergence_of_first_drafts(learned):
    folder, output, seen, _ = learned
    vocabulary, head = TargetVocabulary.load(folder), load_head(output / "head")
    sample, ids_W = seen[0], head.target_ids_W
    embeds_TH = vocabulary.embed_tokens[sample.token_ids.long()]
    with torch.no_grad():
        hidden, _ = head(embeds_TH[None, 1:], head.fuse(sample.aux_hidden[:-1])[None])
        draft_TW = head.logits(hidden[0]).log_softmax(-1)
    target_TW = (sample.last_hidden @ vocabulary.lm_head[ids_W].T).log_softmax(-1)
    first = int(sample.loss_mask.nonzero()[0])
    terms = [
        float((target_TW[at].exp() * (target_TW[at] - draft_TW[at - 1])).sum())
        for at in range(first, len(sample.token_ids) - 1)
    ]
    loss_B = answer_losses(head, vocabulary, Batch.of([sample, seen[1]]))
    assert float(loss_B[0]) == pytest.approx(np.mean(terms), rel=1e-4)
