"""The ledger: to the row, in little memory, and without a found value anywhere."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.data.ledger import (
    EXCERPT,
    LENGTHS,
    LOOK,
    DamagedRow,
    Drop,
    Ledger,
    dropped_line,
    excerpt,
    show_dropped,
)
from eyas.privacy.findings import Finding, NameSearch
from tests.source_rows import row

SECRET = re.compile(r"SECRET-\d+")
REASONS = ["empty", "malformed", "pii.phone_number", "pii.person", "duplicate.near", "match"]
REASONS.append("contamination.spec_bench")


def find(texts):
    return [
        [Finding("PHONE_NUMBER", *match.span()) for match in SECRET.finditer(text)]
        for text in texts
    ]


def drop(reason="pii.phone_number", *found):
    return Drop(reason, "the policy drops rows with it", found)


def test_counts_by_hand():
    overruled = [{"rule": "nc", "reason": "we asked"}]
    verdict = {"source": "set", "verdict": "overruled", "overruled": overruled}
    made = Ledger({"quality": 2}, {"personal": {"policy": "mask"}}, [verdict])
    made.came_in("set", 3)
    made.came_in("other")
    masked = (Finding("PERSON", 0, 3, 0), Finding("PERSON", 5, 8, 1))
    masked += (Finding("EMAIL_ADDRESS", 9, 12, 1),)
    names = (NameSearch("en", "eyas", "", 5), NameSearch("zxx", "", "code", 2))
    made.went_out(row("abc", "defg", masked=masked, names=names), language="en")
    made.went_out(row("x" * 60, source="other"))
    found = (Finding("PHONE_NUMBER", 0, 8, 0, "5f"), Finding("IBAN_CODE", 9, 12, None))
    gone = dropped_line(row("SECRET-1 x", id="a"), drop("pii.iban_code", *found), find)
    malformed = Drop("malformed", "not JSON")
    broken = dropped_line(DamagedRow("set", "set.jsonl:2", malformed), malformed, find)
    made.dropped(gone)
    made.dropped(broken)
    assert gone == {
        "source": "set",
        "where": "set.jsonl:1",
        "id": "a",
        "reason": "pii.iban_code",
        "note": "the policy drops rows with it",
        "found": [
            {"type": "PHONE_NUMBER", "start": 0, "end": 8, "turn": 0, "hash": "5f"},
            {"type": "IBAN_CODE", "start": 9, "end": 12, "turn": None, "hash": ""},
        ],
        "characters": 10,
        "turns": ["<PHONE_NUMBER> x"],
    }
    place = {"source": "set", "where": "set.jsonl:2", "id": None}
    assert broken == {**place, "reason": "malformed", "note": "not JSON"}
    whole = made.to_json()
    assert whole["sources"]["set"] == {
        "rows_in": 3,
        "rows_out": 1,
        "dropped": {"malformed": 1, "pii.iban_code": 1},
        "rows_masked": 1,
        "placeholders": 0,
        "masked": {"EMAIL_ADDRESS": 1, "PERSON": 2},
        "found_in_dropped": {"IBAN_CODE": 1, "PHONE_NUMBER": 1},
        "lengths_in": [2, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        "lengths_out": [1, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        "languages": {"en": 1},
        "names": [
            {"language": "en", "by": "eyas", "reason": "", "rows": 1, "characters": 5},
            {"language": "zxx", "by": "", "reason": "code", "rows": 1, "characters": 2},
        ],
    }
    assert (whole["rows_in"], whole["rows_out"]) == (4, 2)
    assert whole["dropped"] == {"malformed": 1, "pii.iban_code": 1}
    assert whole["lengths_out"] == [1, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert whole["lengths_from"] == list(LENGTHS)
    assert whole["versions"] == {"quality": 2}
    assert whole["policies"] == {"personal": {"policy": "mask"}}
    assert whole["licences"] == [verdict]
    assert json.loads(json.dumps(whole)) == whole
    facts = made.facts()
    nothing = {key: {} for key in ("dropped", "masked", "found_in_dropped")}
    nothing |= {"rows_masked": 0, "placeholders": 0}
    assert facts["sources"]["other"] == {"rows_in": 1, "rows_out": 1, **nothing}
    assert facts.items() <= {**whole, "sources": facts["sources"]}.items()


@pytest.mark.parametrize(
    ("came_in", "message"), [(0, "0 rows in, 1 out, 1 dropped"), (3, "3 rows in, 1 out, 1 dropped")]
)
def test_a_row_lost_or_made_up_is_noticed(came_in, message):
    made = Ledger()
    made.came_in("set", came_in)
    made.went_out(row("a"))
    made.dropped(dropped_line(row("b"), drop(), find))
    for written in (made.check, made.to_json, made.facts):
        with pytest.raises(AssertionError, match=f"set is out of balance: {message}"):
            written()


ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from(["", *REASONS]),
        st.lists(st.text(max_size=30) | st.just("call SECRET-12 now"), max_size=6),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(ROWS)
def test_it_balances_to_the_row_and_source_whatever_comes(rows):
    made, lines = Ledger(), []
    for number, (source, reason, turns) in enumerate(rows):
        made.came_in(source)
        one = row(*turns, source=source, where=f"{source}.jsonl:{number}")
        if reason:
            gone = DamagedRow(source, one.where, Drop(reason)) if reason == "malformed" else one
            lines.append(dropped_line(gone, drop(reason), find))
            made.dropped(lines[-1])
        else:
            made.went_out(one)
    whole = made.to_json()
    assert whole["rows_in"] == len(rows) == whole["rows_out"] + len(lines)
    assert sum(whole["lengths_in"]) == len(rows) - whole["dropped"].get("malformed", 0)
    for name in {source for source, _, _ in rows}:
        account = whole["sources"][name]
        assert account["rows_in"] == sum(source == name for source, _, _ in rows)
        assert account["dropped"] == Counter(
            reason for source, reason, _ in rows if reason and source == name
        )
        assert sum(account["lengths_out"]) == account["rows_out"]
    for key in ("rows_in", "rows_out", "rows_masked"):
        assert whole[key] == sum(account[key] for account in whole["sources"].values())
    assert "SECRET" not in json.dumps(lines)


def test_memory_does_not_grow_with_the_rows():
    made = Ledger()
    gone, kept = dropped_line(row("SECRET-1"), drop(), find), row("abc")

    def count(number):
        made.came_in("set", 2 * number)
        for _ in range(number):
            made.dropped(gone)
            made.went_out(kept)
        return len(json.dumps(made.facts()))

    count(100)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    size = count(3000)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after - before < 10_000  # bytes; a line of them alone is 200
    assert size < 600


@given(st.text(max_size=600), st.integers(0, 600), st.integers(1, 300))
def test_an_excerpt_is_the_beginning_and_holds_no_finding(text, start, digits):
    text, start = text.replace("SECRET", "").replace("7", ""), min(start, len(text))
    before = text[:start]
    text = f"{before} SECRET-{'7' * digits} {text[start:]}"
    shown = excerpt(text, *find([text]))
    assert "SECRET" not in shown
    assert "7" not in shown
    if len(before) < EXCERPT - 1:
        assert shown.startswith(f"{before} <PHONE_NUMBER>")
    assert len(shown) <= EXCERPT + len("<PHONE_NUMBER>") + len("...") + 2


def test_excerpts_of_overlapping_findings_leave_no_rest():
    person = Finding("PERSON", 4, 9), Finding("PERSON", 12, 20), Finding("PERSON", 6, 9)
    street, url = Finding("STREET_ADDRESS", 4, 16), Finding("URL", 20, 22)
    overlapping, nested = [person[0], street, person[1], url], [person[2], street]
    assert excerpt("abc 567890123456789012 rest", overlapping) == "abc <PERSON><URL> rest"
    assert excerpt("abc 567890123456 rest", nested) == "abc <STREET_ADDRESS> rest"


def test_short_texts_are_shown_whole_and_long_ones_searched_in_part():
    assert excerpt("short", []) == "short"
    assert excerpt("x" * 1000, []) == "x" * EXCERPT + "..."
    searched = []
    dropped_line(row("x" * 10**6), drop(), lambda texts: searched.append(len(texts[0])) or [[]])
    assert searched == [LOOK]


def dropped_lines():
    by_phone = drop("pii.phone_number", Finding("PHONE_NUMBER", 0, 8, 0, "5f00"))
    by_person = drop("pii.person", Finding("PERSON", 0, 8))
    like, broken = Drop("duplicate.near", "like set.jsonl:9 of set"), Drop("malformed")
    return [
        dropped_line(row("SECRET-1", id="a"), by_phone, find),
        dropped_line(row("SECRET-2 and\nmore", "b"), by_person, find),
        dropped_line(row("c"), like, find),
        dropped_line(DamagedRow("set", "set.jsonl:4", broken), broken, find),
    ]


def test_dropped_rows_can_be_read():
    assert list(show_dropped(dropped_lines(), "pii")) == [
        "set.jsonl:1 of set (id a): pii.phone_number: the policy drops rows with it",
        "    PHONE_NUMBER in turn 1, characters 0 to 8, hash 5f00",
        "    > <PHONE_NUMBER>",
        "set.jsonl:1 of set: pii.person: the policy drops rows with it",
        "    PERSON in the system prompt, characters 0 to 8",
        "    > <PHONE_NUMBER> and more",
        "    > b",
        "2 rows: pii.person 1, pii.phone_number 1",
    ]


ALL = "duplicate.near 1, malformed 1, pii.person 1, pii.phone_number 1"
NONE = "no dropped row has a reason that begins with 'pii.iban'; there are: "


@pytest.mark.parametrize(
    ("reason", "last"),
    [
        ("pii.phone", "1 rows: pii.phone_number 1"),
        ("PII.PHONE_NUMBER", "1 rows: pii.phone_number 1"),
        ("duplicate", "1 rows: duplicate.near 1"),
        ("", f"4 rows: {ALL}"),
        ("pii.iban", NONE + ALL),
    ],
)
def test_reasons_are_asked_for_by_their_beginning(reason, last):
    assert list(show_dropped(dropped_lines(), reason))[-1] == last
    assert list(show_dropped([], "pii.iban")) == [NONE + "none"]


def test_a_terminal_is_not_steered():
    steering = row("a\x1b[2Jb\x9b31mc\u202ed\re", source="s\x1bet")
    line = dropped_line(steering, Drop("empty", "n\x07"), find)
    for text in show_dropped([line], "empty"):
        assert text.isprintable()


def test_rows_are_shown_one_at_a_time():
    asked = []

    def endless():
        for number in range(3):
            asked.append(number)
            yield dropped_line(row("c"), Drop("empty"), find)

    shown = show_dropped(endless(), "empty")
    next(shown)
    assert asked == [0]
