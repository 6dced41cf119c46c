"""Answers are distributed as the target says, whatever was proposed: counts over thousands of seeds
through the whole engine, against the exact distribution of all continuations, by chi-square. The
options' effect is written down here once more, plainly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from eyas.chat.files import read_tokenizer
from eyas.engine.costs import CostTable, Curve
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import MAX_SAMPLES, Request, SamplingParams
from eyas.engine.sampling import Sampler
from eyas.model.draws import DrawState
from eyas.model.target import Target
from tests import tiny_engine
from tests.oracle.target import logits_of
from tests.tiny_engine import VOCAB, load_as, random_head

PROMPT = (5, 9, 5)
END = 2
HEAD = 1  # the seed of a head that proposes well behind this prompt
# requests of 128 samples
NUM_TOKENS, NUM_REQUESTS = 3, 6
LEAST_P = 1e-4  # the seeds are fixed: what passes once passes always
# drafting pays
COSTS = CostTable(*[Curve([1, 64], [10.0, 11.0])] * 2, *[Curve([1, 64], [0.1, 0.2])] * 3)

OPTIONS: dict[str, dict[str, object]] = {
    "temperature": {},
    "cool": {"temperature": 0.6},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15, "temperature": 1.3},
    "all cuts": {"min_p": 0.02, "top_k": 9, "top_p": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "frequency_penalty": {"frequency_penalty": 1.7},
    "presence_penalty": {"presence_penalty": -1.5},
    "logit_bias": {"logit_bias": {7: 1.0, 9: -3.0, 5: -0.7}},
    "min_tokens": {"logit_bias": {END: 4.0, 5: 1.0}, "min_tokens": 2},
    # tokens 3 to 18 of the tiny tokenizer
    "regex": {"regex": "[!-0]{1,2}", "logit_bias": {END: 4.0}},
}
ENGINES = {
    "fixed": {"speculation": "fixed(3,4,16)"},
    "auto": {"speculation": "auto(3,4,16)"},
}
THOROUGH = {"auto": ["temperature", "all cuts", "frequency_penalty", "regex"]}


folder = tiny_engine.folder


@pytest.fixture(scope="module")
def engine_of(folder: Path) -> Callable[[str], Engine]:
    """Engines by name. Costs are given, and rounds take what was predicted: auto chooses the same
    every time.
    """

    @cache
    def engine(name: str) -> Engine:
        target = load_as("native", folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("eyas.engine.rounds.round_costs", lambda work: COSTS)
            draft = Draft(*random_head(target, HEAD), target)
            made = Engine(
                target,
                draft,
                EngineConfig(max_batch=128, max_length=32, **ENGINES[name]),
                read_tokenizer(folder).backend,
            )
        observe = made.rounds.policy.observe
        made.rounds.policy.observe = lambda plan, emitted, ms: observe(
            plan, emitted, plan.predicted_ms or ms
        )  # type: ignore
        return made

    return engine


def params_of(option: str) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 1.0, "max_tokens": NUM_TOKENS, "n": MAX_SAMPLES, **OPTIONS[option]}
    )


# The exact distribution


def exact(target: Target, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every answer: all continuations, to their end token or to max_tokens."""
    answers: dict[tuple[int, ...], float] = {}
    prefixes: dict[tuple[int, ...], float] = {(): 1.0}
    while prefixes:
        with torch.inference_mode():
            logits_BV = (
                logits_of(target, torch.tensor([[*PROMPT, *prefix] for prefix in prefixes]))[:, -1]
                .double()
                .numpy()
            )
        longer: dict[tuple[int, ...], float] = {}
        for (prefix, mass), logits_V in zip(prefixes.items(), logits_BV, strict=True):
            probs_V = next_probs(logits_V, prefix, params)
            for token in np.flatnonzero(probs_V).tolist():
                is_over = token == END or len(prefix) + 1 == params.max_tokens
                (answers if is_over else longer)[(*prefix, token)] = mass * probs_V[token]
        prefixes = longer
    assert sum(answers.values()) == pytest.approx(1)
    return answers


def next_probs(logits_V: np.ndarray, prefix: tuple[int, ...], params: SamplingParams) -> np.ndarray:
    logits_V = logits_V.copy()
    for token in {*PROMPT, *prefix}:
        logit, penalty = logits_V[token], params.repetition_penalty
        logits_V[token] = logit / penalty if logit > 0 else logit * penalty
    for token in prefix:
        logits_V[token] -= params.frequency_penalty
    for token in set(prefix):
        logits_V[token] -= params.presence_penalty
    for token, bias in params.logit_bias.items():
        logits_V[token] += bias
    allowed = set(range(VOCAB))
    if len(prefix) < params.min_tokens:
        allowed -= {END}
    if params.regex is not None:
        allowed = {0: set(range(3, 19)), 1: {END, *range(3, 19)}, 2: {END}}[len(prefix)]
    logits_V[sorted(set(range(VOCAB)) - allowed)] = -np.inf
    probs_V = np.exp((logits_V - logits_V.max()) / params.temperature)
    probs_V[probs_V < params.min_p] = 0
    best_first = np.argsort(-probs_V)
    if params.top_k:
        probs_V[best_first[params.top_k :]] = 0
    probs_V /= probs_V.sum()
    if params.top_p < 1:
        # a token stays unless those before it are enough
        before = np.cumsum(probs_V[best_first]) - probs_V[best_first]
        probs_V[best_first[before >= params.top_p]] = 0
    result: np.ndarray = probs_V / probs_V.sum()
    return result


# The engine's


def p_value(running: Engine, option: str, drafts: int = 10) -> float:
    """Of the engine's answers under the exact distribution; answers expected fewer than five times
    count as one. At least so many drafts must have been accepted."""
    params = params_of(option)
    probs = exact(running.target, params)
    counts = Counter(answers_of(running, params, drafts))
    total = sum(counts.values())
    assert not counts.keys() - probs.keys(), "answers that cannot be"
    expected = np.array([total * prob for prob in probs.values()])
    observed = np.array([counts[answer] for answer in probs])
    frequent = expected >= 5
    assert frequent.sum() >= 4
    expected = np.append(expected[frequent], expected[~frequent].sum())
    observed = np.append(observed[frequent], observed[~frequent].sum())
    some = expected > 0
    statistic = float(((observed[some] - expected[some]) ** 2 / expected[some]).sum())
    return float(chi2.sf(statistic, int(some.sum()) - 1))


def answers_of(running: Engine, params: SamplingParams, drafts: int) -> list[tuple[int, ...]]:
    seeds = range(1000, 1000 + NUM_REQUESTS)
    asked = [Request(str(seed), PROMPT, replace(params, seed=seed)) for seed in seeds]
    results = list(running.run(asked))
    running.check()
    accepted = sum(sum(result.accept_hist[1:]) for result in results)
    assert accepted >= drafts, "hardly a draft was accepted: a bias of it would not be seen"
    return [tuple(result.token_ids) for result in results]


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in ENGINES for option in THOROUGH.get(name, OPTIONS)],
)
def test_answers_are_distributed_as_the_target_says(engine_of, name, option):
    assert p_value(engine_of(name), option) > LEAST_P


def test_a_biased_acceptance_is_found(engine_of, monkeypatch):
    """Further draws where the first was not proposed: what a draft proposes comes too often, and
    every token is plausible. Of many, since most first draws are proposed.
    """

    def generous(
        tokens: Sequence[int], parents: Sequence[int], draw: Callable[[int], int]
    ) -> tuple[list[int], list[int]]:
        children = [token for token, parent in zip(tokens, parents, strict=True) if parent == 0]
        token = draw(0)
        for _ in range(6):
            if token not in children and children:
                token = draw(0)
        return [], [token]

    monkeypatch.setattr("eyas.engine.rounds.accept", generous)
    new_state = Sampler._new_state

    def walked_in_python(sampler: Sampler) -> DrawState:
        state = new_state(sampler)
        state.by_caller = True
        return state

    monkeypatch.setattr(Sampler, "_new_state", walked_in_python)
    assert p_value(engine_of("fixed"), "temperature", drafts=0) < 1e-6
