"""What two arms must have in common, what is refused, and how to insist."""

from __future__ import annotations

import dataclasses

import pytest

from eyas.bench.server import (
    ServerFacts,
    check_comparable,
    differences_of_answers,
    differences_of_servers,
)
from eyas.bench.stream import Reply
from eyas.errors import MismatchError

HERE = ServerFacts("http://here", "m", "eyas", None, "bfloat16")


def served(**changes):
    return dataclasses.replace(HERE, **{"url": "http://here:8001", **changes})


def replies(count=8, **changes):
    base = Reply(1.0, 9.0, [], 20, 30, "stop", "The same beginning and the same end")
    return [dataclasses.replace(base, **changes) for _ in range(count)]


def refused(differences):
    return [one.what for one in differences if one.refused]


def test_one_server_is_like_itself_whatever_it_does_not_tell():
    silent = ServerFacts("http://here", "m", "vllm")
    assert differences_of_servers(silent, silent) == []


def test_another_precision_is_refused_and_silence_is_said():
    assert refused(differences_of_servers(HERE, served(precision="float32"))) == ["precision"]
    assert not differences_of_servers(HERE, served(precision="auto"))  # SGLang's: 16 bits here
    (said,) = differences_of_servers(HERE, served(precision=None))
    assert (said.what, said.refused) == ("precision", False)
    assert differences_of_servers(HERE, served()) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kind": "vllm", "version": "0.32"}, "eyas at here against vllm 0.32 at here"),
        ({"url": "http://there"}, "eyas at here against eyas at there"),
    ],
)
def test_another_engine_or_host_is_said(changes, text):
    (said,) = differences_of_servers(HERE, served(**changes))
    assert (said.what, said.refused) == ("engine", False)
    assert text in said.text


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_prompt_tokens": 21}, ["prompts"]),
        ({"counted_by": "timings"}, ["counts"]),
        ({"num_output_tokens": 34}, ["lengths"]),
        ({"num_output_tokens": 31}, []),
        ({"text": "Another model's answer"}, ["answers"]),
        ({"text": "The same beginning and another end"}, []),
        ({"num_prompt_tokens": 0}, []),  # not told
    ],
)
def test_answers_that_are_not_to_the_same_question_are_refused(change, what):
    pairs = list(zip(replies(), replies(**change), strict=True))
    assert refused(differences_of_answers(pairs, is_greedy=True)) == what
    if change != {"num_prompt_tokens": 0}:
        assert differences_of_answers(pairs, is_greedy=True)


def test_sampled_answers_may_differ():
    pairs = list(zip(replies(), replies(text="Another"), strict=True))
    assert differences_of_answers(pairs, is_greedy=False) == []
    assert differences_of_answers([], is_greedy=True) == []


def test_who_insists_is_let_through():
    differences = differences_of_servers(HERE, served(precision="float32"))
    with pytest.raises(MismatchError, match="bfloat16 against float32") as error:
        check_comparable("b", "a", differences, compare_anyway=False)
    assert "--compare-anyway" in error.value.hint
    check_comparable("b", "a", differences, compare_anyway=True)
