"""Duplicates: what counts as the same and as nearly the same, and that what a row is called a
duplicate of is kept.
"""

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from eyas.data.duplicates import (
    BAND_SIZE,
    BANDS,
    CANDIDATES,
    NONE,
    exact,
    jaccard,
    mixed,
    near,
    normalised,
    runs,
    shingles,
    signature,
    text_hash,
    text_key,
)
from eyas.data.prompts import PromptsConfig
from tests.source_rows import row

THRESHOLD = 0.85
LONG = (
    "A train leaves the station at 9 in the morning and travels at 60 miles an hour towards a town "
    "that is 300 miles away. "
    "A second train leaves that town one hour later and travels towards the first at 40 miles an "
    "hour. When do they meet?"
)
GOLDEN = (8134291289113321708, 17356417945627057592)  # first and last band of LONG


def likeness(rows, threshold=THRESHOLD, alive=None, bands=None):
    """`near` over rows that are all held in memory."""
    bands = np.stack([signature(one) for one in rows]) if bands is None else bands
    alive = np.ones(len(rows), bool) if alive is None else np.array(alive)
    return near(bands, rows.__getitem__, alive, threshold)


def similarity(*rows):
    return jaccard(*(shingles("\n".join(one.turns)) for one in rows))


def edited(text, rng, share):
    """The text with about a share of its words changed, dropped or doubled."""
    words = []
    for word in text.split():
        words += (
            rng.choice(([f"other{rng.randrange(99)}"], [], [word, word]))
            if rng.random() < share
            else [word]
        )
    return " ".join(words)


def texts(rng, count, length=60):
    return [" ".join(f"word{rng.randrange(2000)}" for _ in range(length)) for _ in range(count)]


# Exactly the same.


@pytest.mark.parametrize(
    "again", ["WHERE is it?", "  Where\n\tis   it? ", "\uff37here is it?", "Where\u00a0is it?"]
)
def test_the_same_in_other_spelling(again):
    assert text_hash(row(again)) == text_hash(row("Where is it?"))


@pytest.mark.parametrize(
    "other",
    [
        row("Where is it"),
        row("Where is it?", "Thanks"),
        row("Where is", "it?"),
        row("Where is it?", system="Sir"),
    ],
)
def test_not_the_same(other):
    assert text_hash(other) != text_hash(row("Where is it?"))


def test_a_power_is_no_longer_number():
    assert normalised("10\u00b2\u00b3 (x)\u2074") == "10^23 (x)^4"
    assert text_hash(row("Is 10\u00b2 even?")) != text_hash(row("Is 102 even?"))


@given(st.lists(st.text(), min_size=1, max_size=3))
def test_normalising_is_done_once_and_for_all(turns):
    assert [normalised(normalised(turn)) for turn in turns] == [normalised(turn) for turn in turns]
    assert text_hash(row(*turns)) == text_hash(row(*(f" {normalised(turn)}\n" for turn in turns)))


def test_a_key_is_the_beginning_of_its_fingerprint():
    found = text_hash(row("Where is it?"))
    assert text_key(found).dtype == np.uint64
    assert "".join(f"{part:016x}" for part in text_key(found).tolist()) == found[:32]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2))))
def test_exact_names_the_first_row_with_the_same_key(keys):
    found = exact(np.array(keys, np.uint64).reshape(-1, 2))
    firsts = [keys.index(one) for one in keys]
    expected = [NONE if first == index else first for index, first in enumerate(firsts)]
    assert found.tolist() == expected
    assert found.dtype == np.int64


# Signatures.


def test_signatures_are_the_same_for_all_time():
    """They lie on disk while a run is resumed. Each test process has another hash seed."""
    found = signature(row(LONG))
    assert (found.shape, found.dtype) == ((BANDS,), np.uint64)
    assert (int(found[0]), int(found[-1])) == GOLDEN


def test_a_band_is_shared_with_the_probability_that_theory_gives():
    rng = random.Random(0)
    pairs = [(row(text), row(edited(text, rng, 0.04))) for text in texts(rng, 100)]
    expected = np.array([similarity(*pair) ** BAND_SIZE for pair in pairs])
    shared = np.array([(signature(one) == signature(other)).sum() for one, other in pairs])
    # Bands that come from the same texts are nearly independent: four standard deviations of a sum
    # of binomials, and a fifth.
    variance = BANDS * (expected * (1 - expected)).sum()
    assert abs(shared.sum() - BANDS * expected.sum()) < 5 * np.sqrt(variance)


def test_long_texts_are_taken_piece_by_piece():
    text = texts(random.Random(0), 1, length=5000)[0]
    members = shingles(text)
    scale, shift = mixed(np.arange(2 * BANDS * BAND_SIZE)).reshape(2, -1)
    pairs = zip(scale | np.uint64(1), shift, strict=True)
    least = np.array([(members * one + other).min() for one, other in pairs])
    bands = np.zeros(BANDS, np.uint64)
    for column in least.reshape(BANDS, BAND_SIZE).T:
        bands = mixed(bands ^ column)
    assert signature(row(text)).tolist() == bands.tolist()


@pytest.mark.parametrize(
    "text", ["", "?!", "...", "a", "\ud83d half a pair", "\u4f60\u597d", "\x00"]
)
def test_any_text_has_a_signature(text):
    assert signature(row(text)).shape == (BANDS,)
    assert likeness([row(text), row(text)]).tolist() == [NONE, 0]
    assert likeness([row(text), row("something else entirely")]).tolist() == [NONE, NONE]


@given(st.lists(st.sampled_from("abc"), max_size=12), st.integers(1, 4))
def test_runs_are_equal_where_their_words_are(words, size):
    hashes = np.array([ord(word) for word in words], np.uint64)
    found = runs(hashes, size).tolist()
    plain = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    assert len(found) == len(plain)
    assert len(set(found)) == len(set(plain)) == len(set(zip(found, plain, strict=True)))


# Nearly the same.


@pytest.mark.parametrize(
    "again",
    [
        LONG.upper(),
        LONG.replace(" ", " \n"),
        LONG.replace(",", "").replace(".", ""),
        LONG.replace("morning", "evening"),
        f"Please: {LONG}",
        LONG.replace("300", "350"),  # one number in a long text is one word of many
    ],
)
def test_nearly_the_same(again):
    assert likeness([row(LONG), row(again)]).tolist() == [NONE, 0]


def test_paragraphs_in_another_order_are_nearly_the_same():
    more = texts(random.Random(0), 1)[0]
    orders = [row(f"{LONG}\n\n{more}"), row(f"{more}\n\n{LONG}"), row(more, LONG)]
    assert likeness(orders).tolist() == [NONE, 0, 0]


NUMBERS = {"60": "70", "300": "420", "40": "55", "one hour": "two hours"}
OTHER_NUMBERS = re.sub("|".join(NUMBERS), lambda found: NUMBERS[found[0]], LONG)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 3+4?", "What is 3-4?"),
        ("What is 17 * 24?", "What is 18 * 24?"),
        ("With cal, how do I show the current month?", "With cal, how do I show the current year?"),
        (LONG, OTHER_NUMBERS),
        (LONG, " ".join(sorted(LONG.split()))),
    ],
)
def test_different_enough(one, other):
    assert likeness([row(one), row(other)]).tolist() == [NONE, NONE]


def test_a_common_system_prompt_makes_no_duplicates_and_another_one_saves_a_row():
    system = texts(random.Random(0), 1, length=500)[0]
    rows = [row("Where is it?", system=system), row("Who are you?", system=system), row(LONG)]
    assert likeness([*rows, row(LONG, system="Be terse.")]).tolist() == [NONE] * 4
    same = [row(LONG, system=system), row(LONG.lower(), system=system.upper())]
    assert likeness(same).tolist() == [NONE, 0]


def test_every_pair_that_is_alike_enough_is_found():
    """Against all pairs: planted copies with more and more edits."""
    rng = random.Random(1)
    originals = texts(rng, 80)
    copies = [edited(text, rng, share) for text in originals for share in (0.0, 0.02, 0.05)]
    rows = [row(text) for text in (*originals, *copies)]
    found = likeness(rows)
    sets = [shingles(one.turns[0]) for one in rows]
    expected = []
    for index, members in enumerate(sets):
        kept = [earlier for earlier in range(index) if expected[earlier] == NONE]
        alike = [earlier for earlier in kept if jaccard(sets[earlier], members) >= THRESHOLD]
        expected.append(alike[0] if alike else NONE)
    assert (found != NONE).tolist() == [one != NONE for one in expected]
    assert 80 < (found != NONE).sum() < 240


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_what_a_row_is_like_is_kept_and_alike(seed):
    rng = random.Random(seed)
    rows = [row(text) for text in texts(rng, 3, length=20)]
    while len(rows) < 40:
        rows.append(row(edited(rng.choice(rows).turns[0], rng, rng.choice((0, 0.05, 0.1)))))
    alive = [rng.random() < 0.8 for _ in rows]
    found = likeness(rows, alive=alive)
    for index, earlier in enumerate(found.tolist()):
        if earlier != NONE:
            assert earlier < index
            assert alive[index]
            assert alive[earlier]
            assert found[earlier] == NONE
            assert similarity(rows[index], rows[earlier]) >= THRESHOLD


def test_what_is_like_a_dropped_row_only_stays():
    words = texts(random.Random(0), 1, length=112)[0].split()
    chain = [row(" ".join(words[start : start + 100])) for start in (0, 6, 12)]
    assert similarity(chain[0], chain[1]) >= THRESHOLD <= similarity(chain[1], chain[2])
    assert similarity(chain[0], chain[2]) < THRESHOLD
    assert likeness(chain).tolist() == [NONE, 0, NONE]
    assert likeness([chain[0], chain[2], chain[1]]).tolist()[:2] == [NONE, NONE]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("ABA", [NONE, NONE, 0]), ("BAA", [NONE, NONE, 1]), ("ABBA", [NONE, NONE, 1, 0])],
)
def test_in_a_bucket_a_row_meets_the_first_and_the_one_before(order, expected):
    texts = {"A": LONG, "B": " ".join(reversed(LONG.split()))}
    rows = [row(texts[letter]) for letter in order]
    assert likeness(rows, bands=np.zeros((len(rows), BANDS), np.uint64)).tolist() == expected


def test_rows_that_share_one_band_only_are_not_compared():
    bands = np.arange(3 * BANDS, dtype=np.uint64).reshape(3, BANDS)
    bands[1, 0] = bands[0, 0]
    bands[2, :2] = bands[0, :2]
    assert likeness([row(LONG)] * 3, bands=bands).tolist() == [NONE, NONE, 0]


@pytest.mark.parametrize("count", [300, 1200])
def test_work_grows_with_the_rows_however_many_share_a_bucket(count):
    """Rows a little less alike than asked for meet in many buckets."""
    rng = random.Random(3)
    [shared] = texts(rng, 1)
    rows = [row(f"{shared} {text}") for text in texts(rng, count, length=6)]
    bands = np.stack([signature(one) for one in rows])
    assert max(np.unique(column, return_counts=True)[1].max() for column in bands.T) > count // 10
    asked = []
    row_of = lambda index: asked.append(index) or rows[index]  # noqa: E731
    near(bands, row_of, np.ones(count, bool), 0.99)
    assert len(asked) <= (CANDIDATES + 1) * count


def test_of_no_rows_none_are_alike():
    nothing = np.zeros((0, BANDS), np.uint64)
    assert near(nothing, [].__getitem__, np.zeros(0, bool), THRESHOLD).shape == (0,)
    assert exact(np.zeros((0, 2), np.uint64)).shape == (0,)


def test_a_threshold_that_the_bands_cannot_serve_is_refused():
    source = {"path": "set.jsonl"}
    assert PromptsConfig(sources=[source], near_duplicates=None).near_duplicates is None
    with pytest.raises(ValidationError):
        PromptsConfig(sources=[source], near_duplicates=0.5)
