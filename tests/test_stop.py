"""Stop strings: the text must not depend on how it was cut, and must be what a search in the whole
text gives.
"""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from eyas.engine.stop import StopFilter

TEXT = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4)


def before_first_stop(text, stops):
    """The definition: cut at the first end of any stop string; of those that end there, at the
    longest.
    """
    for end in range(len(text) + 1):
        found = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(found)]
    return None


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=8))
def test_text_before_the_first_stop_however_it_is_cut(text, stops, cuts):
    edges = [0, *sorted(cuts), len(text)]
    stop = StopFilter(stops)
    shown = (
        "".join(stop.push(text[start:end]) for start, end in itertools.pairwise(edges))
        + stop.finish()
    )
    expected = before_first_stop(text, stops)
    assert stop.hit == (expected is not None)
    assert shown == (text if expected is None else expected)


def test_only_what_may_become_a_stop_is_held_back():
    stop = StopFilter(["</end>"])
    assert stop.push("a < b") == "a < b"
    assert stop.push(" and </e") == " and "
    assert stop.push("m>") == "</em>"
    assert stop.push("</end>more") == ""
    assert stop.push("and more") == ""
    assert stop.finish() == ""
