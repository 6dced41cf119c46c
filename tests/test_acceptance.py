"""Calibration of acceptance: paths, which candidates are judged, what is learned from how many
rounds. That the native library computes the same is for test_steps.py.
"""

import numpy as np
import pytest

from eyas.engine.acceptance import (
    HEAD,
    SPREAD,
    Acceptance,
    RequestAcceptance,
    judge,
    path_probs,
)
from eyas.model.rows import Proposals
from tests.test_tree import forest


def tree() -> Proposals:
    """Two requests, k = 2, one drafted level: candidates 0, 1 (depth 1), 2 .. 5 (depth 2)."""
    tokens = np.array([[10, 11, 20, 21, 22, 23], [30, 31, 40, 41, 42, 43]])
    parents = np.array([[-1, -1, 0, 0, 1, 1], [-1, -1, 1, 1, 0, 0]], dtype=np.int32)
    conditional = np.array([[0.6, 0.3, 0.5, 0.4, 0.7, 0.1]] * 2)
    scores = np.log(path_probs(conditional, parents, np.array([1, 1, 2, 2, 2, 2]))).astype(
        np.float32
    )
    return Proposals(tokens, scores, parents, np.array([1, 1, 2, 2, 2, 2], dtype=np.int32))


def chain(rng: np.random.Generator, B: int, depth: int) -> Proposals:
    """One candidate a level."""
    conditional = rng.uniform(0.05, 0.99, size=(B, depth))
    parents = np.broadcast_to(np.arange(-1, depth - 1, dtype=np.int32), (B, depth))
    tokens = rng.integers(0, 100, size=(B, depth))
    scores = np.log(conditional).cumsum(1).astype(np.float32)
    return Proposals(tokens, scores, parents, np.arange(1, depth + 1, dtype=np.int32))


def emit(rng: np.random.Generator, proposals: Proposals, accepted: np.ndarray) -> list[list[int]]:
    """Tokens of chains of which row b's level d is accepted with probability accepted[b, d]."""
    rows = []
    for tokens, probs in zip(proposals.tokens.tolist(), accepted, strict=True):
        hits = rng.uniform(size=len(tokens)) < probs
        length = len(tokens) if hits.all() else int(hits.argmin())
        rows.append([*tokens[:length], 1000])
    return rows


def plainly_judged(
    proposals: Proposals, emitted: list[list[int]]
) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    judged, drawn = set(), set()
    for b, row in enumerate(emitted):
        at = -1
        for token in row:
            children = [
                c for c in range(proposals.tokens.shape[1]) if proposals.parents[b, c] == at
            ]
            judged |= {(b, c) for c in children}
            hit = [c for c in children if proposals.tokens[b, c] == token]
            if not hit:
                break
            at = hit[0]
            drawn.add((b, at))
    return judged, drawn


def log_conditional(proposals: Proposals) -> np.ndarray:
    """Log-probabilities given the parent."""
    above = np.take_along_axis(
        proposals.scores, np.maximum(proposals.parents, 0).astype(np.int64), 1
    )
    return proposals.scores - np.where(proposals.parents < 0, 0, above)


def conditional(
    acceptance: Acceptance, proposals: Proposals, requests: list[RequestAcceptance]
) -> np.ndarray:
    return acceptance.calibrate(proposals, requests).conditional


def test_a_path_is_the_product_of_its_steps():
    rng = np.random.default_rng(8)
    for depth in range(1, 12):
        proposals = chain(rng, 3, depth)
        steps = rng.uniform(0.1, 0.99, size=(3, depth))
        assert path_probs(steps, proposals.parents, proposals.depths) == pytest.approx(
            steps.cumprod(1)
        )
    steps = np.array([[0.6, 0.3, 0.5, 0.4, 0.7, 0.1]] * 2)
    expected = [
        [0.6, 0.3, 0.6 * 0.5, 0.6 * 0.4, 0.3 * 0.7, 0.3 * 0.1],
        [0.6, 0.3, 0.3 * 0.5, 0.3 * 0.4, 0.6 * 0.7, 0.6 * 0.1],
    ]
    assert path_probs(steps, tree().parents, tree().depths) == pytest.approx(np.array(expected))


@pytest.mark.parametrize(
    "emitted",
    [
        [[10, 21, 99], [99]],
        [[11, 99], [31, 40]],
        [[10], [31, 40, 7]],
        [[10, 20, 5, 6], [30, 42]],
        [[], [30]],
    ],
)
def test_judged_are_the_children_of_what_was_drawn(emitted):
    judged, drawn = judge(tree(), emitted)
    expected_judged, expected_drawn = plainly_judged(tree(), emitted)
    assert {(int(b), int(c)) for b, c in zip(*judged.nonzero(), strict=True)} == expected_judged
    assert {(int(b), int(c)) for b, c in zip(*drawn.nonzero(), strict=True)} == expected_drawn


def test_before_any_round_the_draft_is_believed():
    acceptance, proposals = Acceptance(), chain(np.random.default_rng(0), 200, 6)
    calibrated = acceptance.calibrate(proposals, [RequestAcceptance(True)] * 200)
    ratio = calibrated.conditional / np.exp(log_conditional(proposals))
    assert ratio.mean() == pytest.approx(1.0, abs=0.02)
    assert (calibrated.paths[:, 1:] < calibrated.paths[:, :-1]).all()


def test_calibration_follows_a_draft_that_is_too_sure():
    """The truth is the square of the draft's probability, and worse with depth."""
    rng, acceptance = np.random.default_rng(1), Acceptance()
    requests = [RequestAcceptance(True) for _ in range(4)]

    def truth(proposals: Proposals) -> np.ndarray:
        return np.exp(2 * log_conditional(proposals)) * 0.95 ** (proposals.depths - 1)

    for _ in range(600):
        proposals = chain(rng, 4, 3)
        emitted = emit(rng, proposals, truth(proposals))
        acceptance.observe(proposals, acceptance.calibrate(proposals, requests), emitted, requests)
    fresh = chain(rng, 500, 3)
    error = conditional(acceptance, fresh, [RequestAcceptance(True)] * 500) - truth(fresh)
    assert abs(error.mean()) < 0.03
    assert np.abs(error).mean() < 0.06


def test_a_few_rounds_already_help():
    """A draft that is never followed is believed half as much after ten rounds of one request."""
    rng, acceptance = np.random.default_rng(2), Acceptance()
    for _ in range(10):
        proposals = chain(rng, 1, 1)
        request = [RequestAcceptance(True)]
        acceptance.observe(proposals, acceptance.calibrate(proposals, request), [[1000]], request)
    fresh = chain(rng, 300, 1)
    new, old = (
        conditional(one, fresh, [RequestAcceptance(True)] * 300).mean()
        for one in (acceptance, Acceptance())
    )
    assert new < 0.93 * old


def test_greedy_and_sampled_are_counted_apart():
    rng, acceptance = np.random.default_rng(3), Acceptance()
    for _ in range(300):
        proposals = chain(rng, 2, 2)
        requests = [RequestAcceptance(True), RequestAcceptance(False)]
        emitted = emit(rng, proposals, np.array([[0.9, 0.9], [0.1, 0.1]]))
        acceptance.observe(proposals, acceptance.calibrate(proposals, requests), emitted, requests)
    fresh = chain(rng, 2, 2)
    greedy, sampled = (
        conditional(acceptance, fresh, [RequestAcceptance(flag)] * 2) for flag in (True, False)
    )
    assert (greedy > 0.7).all()
    assert (sampled < 0.3).all()


def test_never_certain():
    rng, acceptance = np.random.default_rng(4), Acceptance()
    requests = [RequestAcceptance(True)]
    for _ in range(2000):
        proposals = chain(rng, 1, 1)
        acceptance.observe(
            proposals,
            acceptance.calibrate(proposals, requests),
            [[int(proposals.tokens[0, 0]), 7]],
            requests,
        )
    assert conditional(acceptance, chain(rng, 50, 1), requests * 50).max() < 1


def test_a_request_of_its_own_kind_is_found_out():
    """Two requests with the same proposals, one followed always and one never."""
    rng, acceptance = np.random.default_rng(5), Acceptance()
    requests = [RequestAcceptance(True), RequestAcceptance(True)]
    for _ in range(40):
        proposals = chain(rng, 2, 2)
        emitted = emit(rng, proposals, np.array([[1.0, 1.0], [0.0, 0.0]]))
        acceptance.observe(proposals, acceptance.calibrate(proposals, requests), emitted, requests)
    fresh = chain(rng, 1, 3)
    twice = Proposals(
        *(np.repeat(part, 2, 0) for part in (fresh.tokens, fresh.scores, fresh.parents)),
        fresh.depths,
    )
    good, bad = conditional(acceptance, twice, requests)
    new = RequestAcceptance(True)
    assert (good > bad + 0.1).all()
    assert -4 < requests[1].log_odds(HEAD) < -1, "nothing was drawn 40 times, which is not never"
    assert max(one.deviation(HEAD) for one in requests) < 0.75 * new.deviation(HEAD)


def test_a_request_that_stops_drafting_is_known_less_and_less():
    request = RequestAcceptance(True)
    request.observe(HEAD, SPREAD**2, -5.0, 4.0)
    shift, known = request.log_odds(HEAD), request.deviation(HEAD)
    for _ in range(500):
        request.forget()
    assert shift < -0.5
    assert request.log_odds(HEAD) > shift / 2
    assert known < request.deviation(HEAD) < RequestAcceptance(True).deviation(HEAD)


def learned_spread(spread: float) -> float:
    """After 1,000 requests of 25 rounds whose log-odds differ by `spread`."""
    rng, acceptance = np.random.default_rng(6), Acceptance()
    for _ in range(250):
        shifts = spread * rng.normal(size=(4, 1))
        requests = [RequestAcceptance(True) for _ in shifts]
        for _ in range(25):
            proposals = chain(rng, 4, 3)
            odds = np.exp(log_conditional(proposals) + shifts)
            truth = odds / (1 - np.exp(log_conditional(proposals)) + odds)
            emitted = emit(rng, proposals, truth)
            calibration = acceptance.calibrate(proposals, requests)
            acceptance.observe(proposals, calibration, emitted, requests)
            for request in requests:
                request.forget()
    return float(acceptance.variance[HEAD] ** 0.5)


def test_how_much_requests_differ_is_learned():
    alike, different = learned_spread(0.2), learned_spread(1.5)
    assert alike < 0.6 < 1.0 < different < 1.6


def random_trees(rng: np.random.Generator, B: int, k: int, num_levels: int) -> Proposals:
    """Trees whose tokens are few, so that the same token stands in several places, but once among
    the children of a node.
    """
    _, parents, depths = forest(rng, B, k, num_levels)
    conditional = rng.uniform(0.001, 0.99, parents.shape)
    scores = np.log(path_probs(conditional, parents, depths)).astype(np.float32)
    tokens = np.concatenate([rng.permutation(2 * k)[:k] for _ in range(parents.size // k)]).reshape(
        parents.shape
    )
    return Proposals(tokens, scores, parents, depths)
