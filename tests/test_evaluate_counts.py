"""What eval computes from counts alone: intervals, ceilings, slices, rounds as an engine tells
them.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.evaluate.coverage import ceilings, leading_runs, share, tau_ceiling
from eyas.evaluate.slices import Unit, by_language, by_source, figures
from eyas.tau import RoundCounts

Answers = list[list[bool]]


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
    tally = RoundCounts(3)
    tally.add_rounds(accepted)
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
