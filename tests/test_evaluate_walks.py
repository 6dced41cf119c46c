"""Walks along stored answers: the engine's rounds, and acceptance expected over all draws."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from eyas.artifact import Artifact
from eyas.errors import ConfigError, MismatchError
from eyas.evaluate.breakdown import WAYS
from eyas.evaluate.evaluate import EvalConfig, evaluate
from eyas.evaluate.trees import decode
from eyas.evaluate.walks import (
    AnswerWalks,
    WalkedRound,
    answers_temperature,
    drawn_at,
    expected_drafts,
    walk,
)
from eyas.features.conversation import Sampling
from eyas.log import quiet
from eyas.operators.batch import Batch
from eyas.operators.chain import matched_spans
from eyas.operators.decoder import HookedDecoder
from eyas.operators.head import load_head
from eyas.operators.vocab import TargetVocabulary
from eyas.shards import Features, Sample
from eyas.tau import RoundCounts
from eyas.train.trainer import train
from tests.architectures import saved_architecture
from tests.oracle.target import logits_of
from tests.test_cli import assert_one_clear_error, run_eyas
from tests.tiny import tiny_target
from tests.tiny_features import samples_of, write_features
from tests.tiny_head import head_folder
from tests.tiny_prompts import (
    TRAIN,
    learned_head,
    learned_models,
    prompt_set,
    prompts_file,
)

COUNT, TOKENS = 8, 24
TREES = ("fixed(4,2,6)", "fixed(3,1,4)", "fixed(5,3,9)", "fixed(1,2,3)")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A target, a head that learned some of its answers, and these answers' features."""
    folder = tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)
    head = learned_head(folder, COUNT, tmp_path_factory.mktemp("head"))
    models = learned_models(folder, head)
    requests = prompt_set(folder, COUNT).requests(TOKENS, 0.0, 0)
    answers = decode(models.engine("off"), requests, quiet)
    samples = samples_of(models.target, conversations(requests, answers), "seen")
    return folder, head, models, requests, samples


def conversations(requests, answers) -> list[tuple[list[int], list[int]]]:
    pairs = zip(requests, answers, strict=True)
    return [(list(request.prompt_ids), answer.token_ids) for request, answer in pairs]


@pytest.fixture(scope="module")
def vocabulary(world):
    return TargetVocabulary.load(world[0])


@pytest.fixture(scope="module")
def walks_of(world, vocabulary):
    """Walks of the world's head, by trees."""
    return partial(AnswerWalks.load, vocabulary, world[1].url)


def add_all(walks: AnswerWalks, samples) -> AnswerWalks:
    walks.add(samples, ["en"] * len(samples))
    return walks


def rounds_of(walks: AnswerWalks) -> list[list[int]]:
    return [answer.counts.accept_hist for answer in walks.counts[0].answers]


def served_rounds(models, requests, tree) -> list[list[int]]:
    size = int(tree[6]) + 1
    served = decode(models.engine(tree), requests, quiet)
    return [[answer.accepted.count(n) for n in range(size)] for answer in served]


@pytest.mark.parametrize("tree", TREES)
def test_a_tree_on_features_is_the_engines_round_for_round(world, walks_of, tree):
    *_, models, requests, samples = world
    walks = add_all(add_all(walks_of([tree]), samples[:3]), samples[3:])
    (entry,) = walks.entries(0.0)
    assert rounds_of(walks) == served_rounds(models, requests, tree)
    assert sum(entry["accept_hist"][1:]) > 10, "a head that accepts nothing would prove nothing"


def test_several_turns_of_one_conversation_are_answers_of_their_own(world, walks_of):
    *_, models, _, samples = world
    (tokens, mask), (more, more_mask) = (
        (one.token_ids.tolist(), one.loss_mask.tolist()) for one in samples[:2]
    )
    joined = samples_of(models.target, [([*tokens, *more], [])], "both")[0]
    joined.loss_mask[:] = torch.tensor([*mask, *more_mask])
    (tree,) = walks_of(TREES[:1]).trees
    (one,) = walk(models.draft, tree, [joined])
    firsts = [mask.index(True), len(tokens) + more_mask.index(True)]
    assert [rounds[0].root for rounds in one.rounds] == firsts
    emitted = [sum(r.num_accepted_drafts + 1 for r in rounds) for rounds in one.rounds]
    assert emitted == [sum(mask) - 1, sum(more_mask) - 1]


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("tree", ["fixed(3,2,5)", "fixed(3,1,4)"])
def test_expected_acceptance_is_that_over_all_draws(world, vocabulary, walks_of, tree, temperature):
    """A round's counts on every answer that the target could draw at the tree's nodes, weighted by
    its chance, add up to the target's chances of the nodes.
    """
    *_, models, _, samples = world
    walks, total = walks_of([tree]), 0.0
    for sample in samples[:3]:
        one = walk(walks.draft, walks.trees[0], [sample])[0].rounds[0][1]
        prefix = sample.token_ids[: one.root + 1].tolist()
        chance_of, counted = chances_of_nodes(models.target, prefix, one.tree, temperature), 0.0
        for node, chance in enumerate(chance_of):
            path = [node] if node else []
            while path and one.tree.parents[path[0]]:
                path.insert(0, one.tree.parents[path[0]])
            below = [n for n, parent in enumerate(one.tree.parents) if parent == node]
            stops_here = chance - sum(chance_of[n] for n in below)
            answer = [one.tree.tokens[n] for n in path] + [5] * 6
            (drawn,) = samples_of(models.target, [(prefix, answer)], "drawn")
            walked = WalkedRound(one.root, len(answer), one.tree, path)
            states = drawn.last_hidden, vocabulary
            counted += stops_here * expected_drafts([walked], *states, temperature)
        assert counted == pytest.approx(sum(chance_of[1:]), abs=1e-5)
        total += counted
    assert total > 0.01


def chances_of_nodes(target, prefix, tree, temperature) -> list[float]:
    """The chance of each node of a tree by the target's own forward; 1 for the root."""
    chances, texts = [1.0], [prefix]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        logits_V = logits_of(target, torch.tensor([texts[parent]]))[0, -1]
        chances.append(chances[parent] * float((logits_V / temperature).softmax(-1)[token]))
        texts.append([*texts[parent], token])
    return chances


def test_a_cold_target_accepts_what_the_greedy_one_does(world, walks_of):
    for entry in add_all(replace(walks_of(TREES), temperature=1e-4), world[-1]).entries(1e-4):
        assert entry["expected_tau"] == pytest.approx(entry["tau"], abs=2e-3)


def test_rounds_of_sampled_answers_are_what_is_expected(world, walks_of):
    """On average: an answer is one draw of many."""
    folder, _, models, *_ = world
    requests = prompt_set(folder, 40).requests(TOKENS, 1.0, 3)
    drawn = conversations(requests, decode(models.engine("off"), requests, quiet))
    walks = replace(walks_of(["fixed(4,2,6)"]), temperature=1.0)
    (entry,) = add_all(walks, samples_of(models.target, drawn, "drawn")).entries(1.0)
    assert entry["expected_tau"] == pytest.approx(entry["tau"], abs=0.1)


@pytest.mark.parametrize(
    ("asked", "stated", "known"),
    [
        ([Sampling()], 0.0, 0.0),
        ([Sampling(temperature=0.7)], 0.7, 0.7),
        ([Sampling(temperature=0.7, top_p=0.9)], 0.7, 0.0),
        ([Sampling(share=0.5), Sampling(share=0.5, temperature=1.0)], None, 0.0),
        ([], 0.0, 0.0),
    ],
)
def test_how_answers_were_drawn_is_read_from_their_manifest(asked, stated, known):
    """known: the temperature if the whole vocabulary was drawn from."""
    config = {"sampling": [one.model_dump() for one in asked]}
    answers = SimpleNamespace(config=config)
    source = SimpleNamespace(inputs={"features": SimpleNamespace(inputs={"answers": answers})})
    assert answers_temperature(source, greedy_share=1.0) == stated
    assert drawn_at(source) == known


def test_features_of_a_target_that_our_engine_does_not_run_give_chains_and_trees(tmp_path):
    """A chain by the tree's code is the one of `operators.chain`, which shares none of it."""
    folder = saved_architecture(tmp_path, "gemma4")  # windows with heads of two sizes, soft caps
    decoder, samples = HookedDecoder.load(folder, "float32"), []
    for number, prompt in enumerate(prompt_set(folder, COUNT).prompt_ids):
        row = [*prompt, *decoder.answer(prompt, TOKENS)]
        states = decoder.states([row])
        mask = torch.arange(len(row)) >= len(prompt)
        both = states.aux_hidden[0], states.last_hidden[0]
        samples.append(Sample(f"s-{number}", torch.tensor(row).int(), mask, *both, ""))
    vocabulary = TargetVocabulary.load(folder)
    features = write_features(tmp_path / "features", vocabulary, samples, samples)
    head, output = Artifact(str(tmp_path / "head")), Artifact(str(tmp_path / "out"))
    train(TRAIN, str(folder), Features(features), head)
    config = EvalConfig(num_draft_steps=4, trees=("fixed(4,2,6)", "fixed(4,1,5)"))
    evaluate(config, str(folder), head.url, output, Features(features, "held_out"))
    on_features = output.read_json("eval.json")
    loaded, counts = load_head(head.local_path("")), RoundCounts(4)
    for _, matches in matched_spans(loaded, vocabulary.embed_tokens, Batch.of(samples), 4):
        counts.add_answer(matches)
    tree, chain = on_features["trees"]
    assert on_features["accept_hist"] == chain["accept_hist"] == counts.accept_hist
    assert tree["tau"] >= chain["tau"] > 1.2
    assert on_features["greedy_share"] == 1.0
    assert {one["by"] for one in on_features["trees"]} == {"features"}
    assert on_features["ways"] == {"chain": WAYS["features"], "trees": WAYS["features"]}
    assert "expected_tau" not in tree


def test_answers_that_were_sampled_are_said_to_be(world, vocabulary, tmp_path):
    folder, head, _, _, samples = world
    drawn = [replace(one, token_ids=one.token_ids.clone()) for one in samples]
    for sample in drawn:
        sample.token_ids[-8:] = torch.randint(3, 320, (8,)).int()
    features = write_features(tmp_path / "features", vocabulary, [], drawn)
    output = Artifact(str(tmp_path / "out"))
    source = Features(features, "held_out")
    manifest = evaluate(EvalConfig(), str(folder), head.url, output, source)
    result = output.read_json("eval.json")
    assert result["answers_temperature"] is None
    assert result["assumes"].startswith("sampled answers")
    assert [one["temperature"] for one in result["trees"]] == [None, None]
    (warning,) = manifest.facts["warnings"]
    assert "temperature 0, 1 is not measured" in warning
    assert "drawn in several ways" in warning
    words = ("eval", head.url, "-t", folder, "-o", tmp_path / "out", "--features", features.url)
    assert "as sampled" in run_eyas(*words).stdout


def test_trees_that_cannot_be_walked_are_refused(world, vocabulary, tmp_path, tmp_path_factory):
    few = head_folder(world[0], tmp_path / "few", draft_vocab_size=8)
    with pytest.raises(MismatchError, match="8 tokens to draft, the tree has 16 branches"):
        AnswerWalks.load(vocabulary, few, ["fixed(2,16,17)"])
    with pytest.raises(ConfigError, match=r"auto.* has no size of its own") as raised:
        AnswerWalks.load(vocabulary, few, ["auto"])
    assert "fixed(6,3,12)" in raised.value.hint
    target = saved_architecture(tmp_path_factory.getbasetemp(), "opt")
    words = ("eval", head_folder(target, tmp_path / "head"), "-t", target, "-o", tmp_path / "other")
    refused = run_eyas(*words, "--prompts", prompts_file(tmp_path, COUNT))
    assert_one_clear_error(refused, "is a 'opt' model", "--features", "eyas capture")
