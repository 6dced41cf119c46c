"""What a round tells of its tree, to those who ask: the nodes that were judged, and which of them
became tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import DraftedTree
from eyas.engine.tree import drafted_tree
from eyas.model.rows import HEAD, TEXT, Proposals
from tests import tiny_engine
from tests.serving import ask, complete
from tests.tiny_engine import EVERYTHING, random_head, requests

SAMPLED = {"temperature": 0.8, "repetition_penalty": 1.2}


folder, target = tiny_engine.folder, tiny_engine.target


@pytest.fixture
def engine(target):
    config = EngineConfig(max_batch=3, max_length=120, speculation="fixed(4,3,9)")
    return Engine(target, Draft(*random_head(target), target), config)


def decoded(engine, asked):
    for request in asked:
        engine.add(request)
    updates = {request.id: [] for request in asked}
    while engine.has_work:
        for update in engine.step():
            updates[update.request_id].append(update)
    return updates


@pytest.mark.parametrize("params", [{}, SAMPLED])
def test_a_tree_that_is_told_is_that_of_the_round(engine, params):
    asked = requests(6, max_tokens=24, **params)
    # Every other one asks, so that what is told to one does not depend on its neighbours.
    asked = [replace(request, returns_trees=n % 2 == 0) for n, request in enumerate(asked)]
    updates = decoded(engine, asked)
    accepted_in_all, nodes = 0, []
    for request in asked:
        for update in updates[request.id]:
            if not request.returns_trees or update.num_accepted_drafts is None:
                assert update.tree is None
                continue
            tree = update.tree
            nodes.append(len(tree.token_ids))
            assert all(parent < node for node, parent in enumerate(tree.parents))
            length = len(tree.accepted)
            path = [-1, *tree.accepted][:length]
            assert [tree.parents[node] for node in tree.accepted] == path
            assert [tree.token_ids[node] for node in tree.accepted] == update.token_ids[:length]
            cut = update.finish_reason is not None and length == len(update.token_ids)
            assert update.num_accepted_drafts == length - cut
            if not cut:
                end = tree.accepted[-1] if tree.accepted else -1
                nodes_of_tree = set(zip(tree.parents, tree.token_ids, strict=True))
                assert (end, update.token_ids[length]) not in nodes_of_tree
            of_parent = {}
            for parent, probability in zip(tree.parents, tree.probabilities, strict=True):
                of_parent[parent] = of_parent.get(parent, 0.0) + probability
            assert max(of_parent.values()) <= 1 + 1e-5
            assert min(tree.probabilities) > 0
            accepted_in_all += length
    assert accepted_in_all > 0
    assert max(nodes) == 8  # of nine that are judged, the root is one


@pytest.mark.parametrize("params", [{}, SAMPLED])
def test_asking_changes_no_token(engine, params):
    asked, found = requests(4, max_tokens=20, **params), []
    for asks in (False, True):
        updates = decoded(engine, [replace(one, returns_trees=asks) for one in asked])
        rounds = {
            key: [(one.token_ids, one.num_accepted_drafts) for one in of]
            for key, of in updates.items()
        }
        found.append(rounds)
    assert found[0] == found[1]


def test_nodes_are_numbered_without_what_was_not_kept():
    # root -> 0 (5), 1 (6), 2 (7); 0 -> 3 (8), 4 (9), 5 (1); kept: 0, 2, 4
    scores = np.log([[0.5, 0.3, 0.1, 0.2, 0.25, 0.05]]).astype(np.float32)
    parents = np.array([[-1, -1, -1, 0, 0, 0]], dtype=np.int32)
    depths = np.array([1, 1, 1, 2, 2, 2], dtype=np.int32)
    proposals = Proposals(np.array([[5, 6, 7, 8, 9, 1]]), scores, parents, depths)
    kept = np.array([True, False, True, False, True, False])
    tree = drafted_tree(proposals, 0, kept, [5, 9, 3])
    assert (tree.token_ids, tree.parents, tree.accepted) == ([5, 7, 9], [-1, -1, 0], [0, 2])
    assert tree.probabilities == pytest.approx([0.5, 0.1, 0.5])
    assert drafted_tree(proposals, 0, kept, [6]).accepted == []  # it was drafted, but not kept
    # cut behind a draft: the answer's last token
    assert drafted_tree(proposals, 0, kept, [5]).accepted == [0]
    nothing = drafted_tree(proposals, 0, np.zeros(6, dtype=bool), [5])
    assert nothing == DraftedTree([], [], [], [], [])


def test_nodes_say_who_proposed_them():
    # root -> 0 (5) of the head; 0 -> 1 (8) of both, 2 (9) of text; 2 -> 3 (4) of text
    scores = np.log([[0.5, 0.2, 0.5, 0.5]]).astype(np.float32)
    parents = np.array([[-1, 0, 0, 2]], dtype=np.int32)
    depths, kinds = np.array([1, 2, 2, 3], dtype=np.int32), np.array([[0, 3, 0, 0]])
    sources = np.array([[HEAD, HEAD | TEXT, TEXT, TEXT]], dtype=np.int8)
    proposals = Proposals(np.array([[5, 8, 9, 4]]), scores, parents, depths, sources, kinds)
    tree = drafted_tree(proposals, 0, np.ones(4, dtype=bool), [5, 9, 4, 1])
    assert tree.sources == ["head", "both", "text", "text"]
    assert tree.accepted == [0, 2, 3]
    assert tree.probabilities[2:] == [None, None]  # text gives none
    assert tree.probabilities[:2] == pytest.approx([0.5, 0.4])
    unlikely = Proposals(proposals.tokens, scores - 60, parents, depths)
    assert drafted_tree(unlikely, 0, np.ones(4, dtype=bool), []).sources == ["head"] * 4


# Over HTTP


@pytest.fixture(scope="module")
def client(world, tmp_path_factory):
    engine = world.drafting(tmp_path_factory.mktemp("drafts") / "head", "fixed(3,2,6)")
    with world.served(engine, has_head=True) as client:
        yield client


ROUNDS = {"stream": True, "stream_options": {"include_rounds": True}}


def rounds_of(chunks, index=0):
    return [
        chunk.eyas["round"]
        for chunk in chunks
        if chunk.choices and chunk.choices[0].index == index and told(chunk)
    ]


def told(chunk):
    return "eyas" in (chunk.model_extra or {})


@pytest.mark.parametrize("call", [ask, complete])
def test_chunks_tell_rounds_where_that_is_asked_for(client, call):
    chunks = list(call(client, max_tokens=40, **ROUNDS))
    rounds = rounds_of(chunks)
    tokens = [token for one in rounds for token in one["tokens"]]
    assert len(tokens) == 40
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    said = "".join((one.text if call is complete else one.delta.content) or "" for one in choices)
    assert "".join(token["text"] for token in tokens) == said
    first = [{"text": rounds[0]["tokens"][0]["text"], "origin": "plain"}]
    assert rounds[0] == {"tokens": first, "tree": None, "head": False}
    for one in rounds[1:]:
        assert one["head"]
        accepted = [node for node in one["tree"] if node["accepted"]]
        origins = [token["origin"] for token in one["tokens"]]
        assert origins == ["drafted"] * len(accepted) + ["bonus"] * (len(origins) - len(accepted))
        assert {"parent", "text", "probability", "source", "accepted"} == set(one["tree"][0])
        assert {node["source"] for node in one["tree"]} == {"head"}
        assert 0 < len(one["tree"]) <= 5
    assert not any(map(told, call(client, max_tokens=4, stream=True)))


def test_text_s_tokens_are_told_apart_from_the_heads(world, tmp_path):
    engine = world.drafting(tmp_path / "head", "auto")
    engine.rounds.policy.costs = EVERYTHING
    with world.served(engine, has_head=True) as client:
        for _ in range(2):
            rounds = rounds_of(ask(client, max_tokens=60, **ROUNDS))
    origins = [token["origin"] for one in rounds for token in one["tokens"]]
    assert origins.count("text") > 0
    for one in rounds:
        nodes = one["tree"] or []
        accepted = [node for node in nodes if node["accepted"]]
        others = ["bonus" if nodes else "plain"] * (len(one["tokens"]) - len(accepted))
        told = ["text" if node["source"] == "text" else "drafted" for node in accepted]
        assert [token["origin"] for token in one["tokens"]] == told + others
        assert all((node["probability"] is None) == (node["source"] == "text") for node in nodes)


def test_each_choice_has_its_own_rounds_and_plain_ones_have_no_tree(client):
    chunks = list(ask(client, max_tokens=9, n=2, temperature=1, seed=1, **ROUNDS))
    for index in (0, 1):
        assert sum(len(one["tokens"]) for one in rounds_of(chunks, index)) == 9
    plain = rounds_of(ask(client, max_tokens=9, extra_body={"speculation": False}, **ROUNDS))
    found = [(one["tree"], one["tokens"][0]["origin"], len(one["tokens"])) for one in plain]
    assert found == [(None, "plain", 1)] * 9


def test_stop_strings_cut_the_text_and_not_what_is_told_of_its_rounds(client, world):
    text = ask(client, max_tokens=30).choices[0].message.content
    stop = text[10:14]
    chunks = list(ask(client, max_tokens=30, stop=[stop], **ROUNDS))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    tokens = "".join(token["text"] for one in rounds_of(chunks) for token in one["tokens"])
    assert said == text[: text.index(stop)]
    assert tokens.startswith(said + stop)
