"""What eval computes from counts alone: intervals, ceilings, slices, rounds as an engine tells
them.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.evaluate.coverage import ceilings, leading_runs, share, tau_ceiling
from eyas.evaluate.intervals import LEAST_PROMPTS, tau_interval
from eyas.evaluate.slices import Unit, by_language, by_source, figures
from eyas.model.chain import Tally

Answers = list[list[bool]]


class TestIntervals:
    def test_holds_what_is_true_about_as_often_as_it_says(self):
        """Prompts of which each has an acceptance of its own: the interval over prompts holds the
        true tau, that over rounds would not."""
        rng = np.random.default_rng(0)
        true_tau, held, too_narrow = 3.0, 0, 0
        for draw in range(200):
            level = rng.gamma(2.0, 1.0, size=40)  # mean 2 accepted drafts
            accepted = rng.poisson(level[:, None], size=(40, 8))
            emitted, rounds = (accepted + 1).sum(1).tolist(), [8] * 40
            low, high = tau_interval(emitted, rounds, seed=draw)
            held += low <= true_tau <= high
            each = (accepted + 1).ravel().tolist()
            low, high = tau_interval(each, [1] * len(each), seed=draw)
            too_narrow += low <= true_tau <= high
        assert 175 <= held <= 200
        assert too_narrow < 150

    @given(
        st.lists(
            st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=LEAST_PROMPTS, max_size=30
        )
    )
    @settings(deadline=None, max_examples=30)
    def test_lies_within_the_prompts_own(self, counts):
        emitted, rounds = (
            [count[0] * count[1] for count in counts],
            [count[1] for count in counts],
        )
        low, high = tau_interval(emitted, rounds)
        own = [tokens / number for tokens, number in zip(emitted, rounds, strict=True)]
        assert min(own) - 1e-9 <= low <= high <= max(own) + 1e-9
        assert (low, high) == tau_interval(emitted, rounds), "the same counts, the same interval"

    def test_needs_some_prompts_and_rounds(self):
        assert tau_interval([3] * (LEAST_PROMPTS - 1), [1] * (LEAST_PROMPTS - 1)) is None
        assert tau_interval([0] * 10, [0] * 10) is None
        assert tau_interval([3] * LEAST_PROMPTS, [1] * LEAST_PROMPTS) == (3, 3)


class TestCoverage:
    @given(
        st.lists(st.lists(st.booleans(), min_size=2, max_size=9), min_size=1, max_size=3),
        st.integers(1, 4),
    )
    @settings(deadline=None, max_examples=100)
    def test_the_ceiling_is_the_best_of_all_ways_to_go_through_the_answers(
        self, answers: Answers, steps: int
    ):
        """By trying them all: a round may accept any number of drafts up to what the vocabulary
        allows.
        """

        def fewest(answer: list[bool]) -> int:
            @cache
            def rounds_from(at: int) -> int:  # tokens up to and including `at` are emitted
                if at == len(answer) - 1:
                    return 0
                reached, options = at + 1, [rounds_from(at + 1)]
                while reached - at <= steps and answer[reached] and reached < len(answer) - 1:
                    reached += 1
                    options.append(rounds_from(reached))
                return 1 + min(options)

            return rounds_from(0)

        emitted = sum(len(answer) - 1 for answer in answers)
        assert tau_ceiling(answers, steps) == pytest.approx(emitted / sum(map(fewest, answers)))

    def test_pictured(self):
        answer = [True, True, True, False, True, True, True, True, True]
        assert leading_runs(answer) == [2, 1, 0, 5, 4, 3, 2, 1]
        assert tau_ceiling([answer], 3) == pytest.approx(8 / 3)
        assert ceilings([answer], 3) == {
            "tau_ceiling": pytest.approx(8 / 3),
            "tau_ceiling_full_vocabulary": 4.0,
        }
        assert share([answer, [False]]) == 0.8
        assert share([]) == 0


def unit(source: str, language: str, accepted: list[int]) -> Unit:
    tally = Tally(3)
    tally.served(accepted)
    return Unit(source, language, tally)


class TestSlices:
    def test_parts_add_up_to_the_whole(self):
        units = [unit("a", "en", [3, 0]), unit("b", "de", [1, 1, 2]), unit("a", "de", [])]
        whole = figures(units, 3)
        assert whole["accept_hist"] == [1, 2, 1, 1]
        assert whole["tau"] == pytest.approx(12 / 5)
        assert (whole["rounds"], whole["answers"], whole["tau_interval"]) == (5, 3, None)
        assert {name: (one["tau"], one["answers"]) for name, one in by_source(units).items()} == {
            "a": (2.5, 2),
            "b": (7 / 3, 1),
        }
        assert {name: one["rounds"] for name, one in by_language(units).items()} == {
            "de": 3,
            "en": 2,
        }

    @given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=8))
    @settings(deadline=None, max_examples=60)
    def test_rounds_of_an_engine_are_judged_up_to_the_first_miss_but_for_the_last(self, hits):
        accepted = [next((at for at, hit in enumerate(row) if not hit), 3) for row in hits]
        tally = Tally(3)
        tally.served(accepted)
        for position in range(3):
            reached = [row for row in accepted if row >= position]
            more = [row for row in accepted if row > position]
            unknown = accepted[-1] == position
            assert tally.accepted[position] == len(more)
            assert tally.judged[position] == len(reached) - unknown
        assert tally.emitted == sum(accepted) + len(accepted)
