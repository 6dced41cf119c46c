"""One matrix: dtype x speculation and cache x sampling, against plain decoding.

Every token, end and log-probability of an answer is that of its request alone, without drafts and
without reuse, whatever drafts, whatever the batch holds and wherever its pages are. The requests of
all kinds run in the same batch.
"""

from __future__ import annotations

import copy
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from eyas.chat.files import read_tokenizer
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.grammar import GrammarMatcher
from eyas.engine.request import Request, Result, SamplingParams
from eyas.gguf.blocks import KINDS as FORMATS
from eyas.gguf.blocks import Kind
from eyas.model.target import Dtype, Target
from tests import tiny_engine
from tests.oracle.target import OperatorTarget
from tests.test_packed import quantised
from tests.tiny import children_of, tiny_target
from tests.tiny_engine import (
    EVERYTHING,
    SAMPLED,
    idle,
    load_as,
    random_head,
    requests,
)

MIXED = (Kind.Q4_K, Kind.F16, Kind.Q6_K, Kind.BF16, Kind.Q8_0, Kind.F32)
WINDOW = 9  # shorter than configs allow, longer than a tree is deep

folder = tiny_engine.folder

DTYPES = ("float32", "bfloat16", "packed")
# speculation and cache; beside the config: no head, a head's window, costs by which all is drafted
ENGINES = {
    "plain": {"speculation": "off"},
    "a shallow chain": {"speculation": "fixed(1,1,2)", "max_batch": 4},
    "a chain, one at a time": {"speculation": "fixed(3,1,4)", "max_batch": 1},
    "a tree, short chunks": {"speculation": "fixed(4,3,8)", "prefill_chunk": 16},
    "a tree, few pages": {"speculation": "fixed(5,2,6)", "num_pages": 18, "max_batch": 6},
    "as near to EAGLE's (60, 7, 10) as masks let it": {"speculation": "fixed(8,9,60)"},
    "a window, few pages": {"speculation": "fixed", "num_pages": 18, "window": WINDOW},
    "no reuse": {"speculation": "fixed(2,4,16)", "prefix_reuse": False},
    "auto": {"speculation": "auto", "max_batch": 8},
    "auto, head and text": {"speculation": "auto(3,4,20)", "costs": EVERYTHING},
    "auto, text alone, few pages": {
        "speculation": "auto(2,4,16)", "costs": EVERYTHING, "head": False, "num_pages": 18,
    },
}  # fmt: skip
# cuts, penalties and what needs the host, on its own and together
KINDS = {
    "greedy": {},
    "greedy, past its end": {"ignore_eos": True, "max_tokens": 60},
    "sampled": {"temperature": 1.0, "ignore_eos": True},
    "all cuts": {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "logprobs": 3},
    "hot": {"temperature": 1.5, "top_p": 0.7, "ignore_eos": True},
    "penalised": {**SAMPLED, "ignore_eos": True, "logprobs": 0},
    "two samples": {"temperature": 0.8, "n": 2, "ignore_eos": True},
    "penalties of the answer": {
        "frequency_penalty": 0.5, "presence_penalty": 0.3, "ignore_eos": True, "max_tokens": 40,
    },
    "bias, least length, stop tokens": {
        "logit_bias": {5: 2.0, 9: -3.0}, "min_tokens": 4, "stop_token_ids": (7,), "logprobs": 3,
    },
    # tokens 3 to 18 of the tiny tokenizer
    "a grammar": {"regex": "[!-0]{9,12}", "logprobs": 2},
    "a sampled grammar": {"temperature": 1.0, "regex": "[!-0]{9,12}"},
}  # fmt: skip
Answers = dict[tuple[str, int], Result]


def asked() -> list[Request]:
    """Two requests of each kind, of prompts that begin alike, and one whose text repeats."""
    made = []
    for kind, params in KINDS.items():
        plain = requests(2, shared=35)
        repeating = replace(requests(1)[0], prompt_ids=(plain[0].prompt_ids[-7:] * 9)[:50])
        for place, one in enumerate((*plain, repeating)):
            sampling = SamplingParams(**{"max_tokens": 20, "seed": place, **params})
            made.append(replace(one, id=f"{kind}, {place}", params=sampling))
    return made


def answers(running: Engine, these: Sequence[Request]) -> Answers:
    found = {(one.request_id, one.index): one for one in running.run(these)}
    idle(running)
    return found


def same_answers(found: Answers, expected: Answers) -> None:
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        same = found[key]
        assert (same.token_ids, same.finish_reason) == (one.token_ids, one.finish_reason), key
        assert same.logprobs == one.logprobs, key


@pytest.fixture(scope="module")
def backend(folder: Path) -> Callable[[Dtype], tuple[Target, Draft, Answers]]:
    """A target, its head, and what plain decoding gives, one request at a time."""

    @cache
    def made(dtype: Dtype) -> tuple[Target, Draft, Answers]:
        if dtype == "packed":
            config, tensors, blocks = quantised(folder)
            target = Target(config, tensors, "packed", blocks=blocks)
        else:
            target = load_as("native", folder, dtype)
        sizes = {"max_batch": 1, "prefix_reuse": False, "speculation": "off"}
        alone = Engine(target, None, EngineConfig(max_length=120, **sizes), tokenizer_of(folder))
        return target, Draft(*random_head(target), target), answers(alone, asked())

    return made


def tokenizer_of(folder: Path) -> Tokenizer:
    return read_tokenizer(folder).backend


def engine_of(folder: Path, target: Target, draft: Draft, name: str) -> Engine:
    config = {"max_batch": 5, "max_length": 120, **ENGINES[name]}
    costs, head, window = (config.pop(key, None) for key in ("costs", "head", "window"))
    if window is not None:
        shape, tensors = random_head(target)
        shape = shape.model_copy(update={"sliding_window": window})
        draft = Draft(shape, tensors, target)
    with pytest.MonkeyPatch.context() as patch:
        if costs is not None:
            patch.setattr("eyas.engine.rounds.round_costs", lambda _: costs)
        sizes = EngineConfig(**config)
        return Engine(target, None if head is False else draft, sizes, tokenizer_of(folder))


@pytest.mark.parametrize(("dtype", "name"), [(dtype, name) for dtype in DTYPES for name in ENGINES])
def test_answers_are_those_of_plain_decoding(backend, folder, dtype, name, tmp_path, monkeypatch):
    monkeypatch.setattr("eyas.engine.costs.cache_folder", lambda _: tmp_path)
    target, draft, expected = backend(dtype)
    running = engine_of(folder, target, draft, name)
    found = answers(running, asked())
    same_answers(found, expected)
    metrics, accepted = running.metrics(), dict.fromkeys(KINDS, 0)
    for (request_id, _), one in found.items():
        assert sum(one.accept_hist) <= len(one.token_ids)
        accepted[request_id.rsplit(", ", 1)[0]] += sum(one.accept_hist[1:])
    if running.speculation.mode == "fixed":
        some = sum(count > 0 for count in accepted.values())
        assert some >= len(KINDS) - 1, f"a wrong cache would go unnoticed: {accepted}"
    if "few pages" in name:
        assert metrics["preemptions"] > 0
    if "text" in name:
        assert metrics["accepted_text"] > 0
        assert (metrics["accepted_head"] + metrics["accepted_both"] > 0) == ("head" in name)


@pytest.mark.parametrize(
    "kinds",
    [(kind,) for kind in FORMATS] + [MIXED],
    ids=lambda kinds: " ".join(kind.name for kind in kinds),
)
def test_every_quantisation_answers_as_plain_decoding(tmp_path, kinds):
    """MIXED: as files have them whose publisher keeps some matrices as they were."""
    folder = tiny_target(tmp_path, hidden_size=256, intermediate_size=256, head_dim=64)
    config, tensors, blocks = quantised(folder, kinds)
    target = Target(config, tensors, "packed", blocks=blocks)
    sizes = EngineConfig(max_length=120, max_batch=4)
    plain = Engine(target, None, sizes.model_copy(update={"speculation": "off"}))
    draft = Draft(*random_head(target), target)
    chosen = {f"{kind}, {place}" for kind in ("greedy", "sampled", "all cuts") for place in (0, 2)}
    these = [one for one in asked() if one.id in chosen]
    tree = Engine(target, draft, sizes.model_copy(update={"speculation": "fixed(2,16,33)"}))
    found = answers(tree, these)
    same_answers(found, answers(plain, these))
    assert all(sum(one.accept_hist) > 0 for one in found.values())  # rounds with drafts


@pytest.mark.parametrize("name", ["a tree, short chunks", "a tree, few pages", "plain"])
def test_masks_that_come_late_change_no_answer(backend, folder, name, monkeypatch):
    """A walk ends before a mask that is late, and its sample is left out until it is there."""
    target, draft, expected = backend("float32")
    wait, rng, num_late = GrammarMatcher.wait, random.Random(0), 0

    def late(matcher: GrammarMatcher, seconds: float) -> bool:
        nonlocal num_late
        if matcher.state is None and rng.random() < 0.5:
            num_late, matcher.is_late = num_late + 1, True
            return False
        return wait(matcher, 60)

    monkeypatch.setattr(GrammarMatcher, "wait", late)
    same_answers(answers(engine_of(folder, target, draft, name), asked()), expected)
    assert num_late > 9


def test_a_grammar_that_fails_ends_its_request_and_changes_no_other(backend, folder):
    target, draft, expected = backend("float32")
    running = engine_of(folder, target, draft, "a tree, short chunks")
    others = [one for one in asked() if "grammar" not in one.id]
    fails = Request("fails", (5, 6), SamplingParams(regex="[!-0]{90}", max_tokens=90, n=2))
    for one in (fails, *others):
        running.add(one)
    errors, found = [], dict[tuple[str, int], list[int]]()
    while running.has_work:
        for update in running.step():
            found.setdefault((update.request_id, update.index), []).extend(update.token_ids)
            if update.error is not None:
                errors.append((update.request_id, update.error.what))
        of_grammars = children_of(running._grammars._process.process.pid)
        if len(found.get(("fails", 0), ())) > 9 and of_grammars:
            os.kill(of_grammars[0], signal.SIGKILL)
    assert {name for name, _ in errors} == {"fails"}
    assert len(errors) == 2, "both samples"
    assert all("the regex [!-0]{90} needs more than" in what for _, what in errors)
    assert 9 < len(found.pop(("fails", 0))) < 90
    found.pop(("fails", 1))
    assert found == {key: one.token_ids for key, one in expected.items() if key in found}
    idle(running)


def test_a_walk_in_python_is_that_of_the_library(backend, folder):
    """Native forwards, of which Python draws, walks and moves."""
    target, draft, expected = backend("float32")
    walked = copy.copy(target)
    walked.verify = partial(OperatorTarget.verify, walked)
    running = engine_of(folder, walked, draft, "a tree, few pages")
    same_answers(answers(running, asked()), expected)


def test_the_plain_answers_tell_the_kinds_apart(backend):
    *_, expected = backend("float32")
    assert {one.finish_reason for one in expected.values()} == {"stop", "length"}
    for kind in ("two samples", "sampled"):
        own = [tuple(one.token_ids) for key, one in expected.items() if key[0].startswith(kind)]
        assert len(set(own)) == len(own)
    for one in expected.values():
        for entry in one.logprobs or ():
            assert all(logprob <= entry.top[0][1] for _, logprob in entry.top)
    scored = expected["bias, least length, stop tokens, 0", 0]
    assert scored.logprobs is not None
    assert [entry.token_id for entry in scored.logprobs] == scored.token_ids
    assert all(len(entry.top) == 3 for entry in scored.logprobs)


def test_plain_greedy_equals_transformers(backend, folder):
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    *_, expected = backend("float32")
    for request in asked()[:3]:  # the greedy ones
        prompt = torch.tensor([request.prompt_ids])
        generated = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=request.params.max_tokens,
        )
        own = generated[0, len(request.prompt_ids) :].tolist()
        assert expected[request.id, 0].token_ids == own
