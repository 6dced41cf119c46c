"""The data card: one file without anything beside it, with every part that was given, escaped, and
nothing that was found.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from eyas.artifact import File, Manifest
from eyas.data import streams
from eyas.data.card import (
    MEANINGS,
    CardContents,
    name_parts,
    personal_data,
    reasons,
    remaining,
    write_card,
)
from eyas.data.filters import FILTERS
from eyas.data.ledger import DamagedRow, Drop, Ledger, dropped_line
from eyas.data.match import GramBlock, Profile, match_report
from eyas.data.recall import Recall, measured, recall_of
from eyas.data.selection import REASONS
from eyas.data.streams import BrokenStream, Unreadable
from eyas.privacy.findings import Finding
from eyas.privacy.pii import TYPES
from tests.browser import framed, needs_chromium, run_chromium
from tests.page_tags import Tags
from tests.source_rows import row

NASTY = '<script>alert("1")</script>&\'"</svg></style>{{ 1234*77 }}'
OVERRULED = {"rule": "non-commercial", "field": "licence", "value": "CC-BY-NC-4.0", "because": ""}
OVERRULED["reason"] = "the owner agreed"


def verdict(source, licence, **more):
    made = {"source": source, "licence": licence, "prompts_by": "human", "answers_by": "human"}
    made |= {key: [] for key in ("refusals", "overruled", "notes", "mistakes")}
    return {**made, "duties": {}, "policy": "shipped", "known_as": "", "facts_from": "", **more}


SHARE_ALIKE = {
    "answers_by": "gpt-4",
    "duties": {"share-alike": "CC-BY-SA-4.0: pass it on"},
    "notes": ["the answers are dropped"],
    "facts_from": "a dataset card",
}
VERDICTS = [
    verdict("chat", "CC-BY-SA-4.0", verdict="allowed", **SHARE_ALIKE),
    verdict("code", "CC-BY-NC-4.0", verdict="overruled", overruled=[OVERRULED]),
]


def said(source="chat", characters=40, masked=()):
    return row("x" * characters, source=source, masked=masked)


def ledger(kept, dropped, sources=("chat", "code"), verdicts=VERDICTS):
    versions = {"eyas": measured()["versions"]["eyas"], "quality": 3}
    made = Ledger(versions, {"personal": {"policy": "surrogate"}}, verdicts)
    for number, source in enumerate(sources):
        made.came_in(source, kept)
        for place in range(kept):
            found = (Finding("PERSON", 0, 1), Finding("EMAIL_ADDRESS", 2, 3))
            one = said(source, 30 * (place + 1), () if place % 3 else found)
            made.went_out(one, ("en", "de")[number % 2])
    for reason, count in dropped.items():
        made.came_in(sources[0], count)
        for _ in range(count):
            found = (Finding("PHONE_NUMBER", 0, 9, 0),) if reason.startswith("pii") else ()
            damaged = DamagedRow(sources[0], "set.jsonl:2", Drop(reason))
            gone = damaged if reason == "malformed" else said(sources[0])
            made.dropped(dropped_line(gone, Drop(reason, "", found), lambda texts: [[]]))
    return made.to_json()


DROPPED = {"malformed": 2, "too_long": 1, "quality.repetition": 3, "pii.phone_number": 5}
DROPPED |= {"pii.iban_code": 1, "duplicate.near": 4, "contamination.spec_bench": 6, "match": 7}


def report():
    rng = np.random.default_rng(0)

    def profile(rows):
        made = Profile(sources=Counter(chat=rows, code=2 * rows), languages=Counter(en=rows))
        counts = rng.integers(1, 9, rows)
        grams = rng.integers(0, 60, counts.sum()).astype(np.uint16)
        made.add(GramBlock(grams, counts, rng.integers(0, 900, rows)))
        return made

    return match_report(profile(400), profile(100), profile(60), profile(62))


def full(**changes):
    sets = ["spec_bench", "mt_bench"]
    contents = CardContents(ledger(9, DROPPED), report(), sets, identity="0123456789abcdef")
    return dataclasses.replace(contents, **changes)


def test_everything_that_is_given_is_shown():
    assert not Tags(write_card(full())).count("svg")
    text = shown(full())
    for part in (
        "47 rows of 2 sources came in, 18 became prompts and 29 were dropped",
        "pii.phone_number",
        "eyas prompts OUT --show-dropped pii.phone_number eyas prompts OUT --show-dropped pii ",
        "CC-BY-SA-4.0: pass it on",
        "Overruled non-commercial (licence: CC-BY-NC-4.0), because: “the owner agreed”",
        "Facts from a dataset card",
        "spec_bench 6 6 0 mt_bench 0 0 0",
        "0123456789abcdef",
        "surrogate",
        "rows that were found to overlap 2 sets, and dropped",
        "prompts 18 38.3 % 9 9",
        f"duplicate.near {MEANINGS['duplicate']} 4 8.5 % 4 0",
        "words 0.",
    ):
        assert part in text, part
    assert "expect about half of the names to be found" in text
    assert "eyas does not know whether a person has read the prompts" in text


def test_parts_that_are_not_given_are_left_out():
    bare = ledger(3, {}, verdicts=())
    bare["languages"], bare["masked"], bare["rows_masked"] = {}, {}, 0
    page = write_card(CardContents(bare))
    for heading in ("<h2>Licences", "<h2>Overlap", "Match with the traffic", "show-dropped"):
        assert heading not in page
    assert "No row was dropped." in page
    assert "Nothing was found. That does not show that nothing is there." in page
    assert "overlap was not searched" in page


RECORD = {"date": "2026-11-22", "operator": "Example GmbH"}
RECORD |= {"legal basis": "Art. 6(1)(f)", "erasure": "by keyed hash"}


def source(name, url, identity):
    files = {"set.jsonl": File(bytes=1234, sha256=identity)}
    return Manifest(
        stage="source", identity=identity, config={}, counts={}, files=files, facts={}, url=url
    )


SOURCES = {name: source(name, f"data/{name}.jsonl", name * 8) for name in ("chat", "code")}
NAMES = [
    {"language": "en", "by": "eyas", "reason": "", "rows": 6, "characters": 900},
    {"language": "de", "by": "", "reason": "policy", "rows": 3, "characters": 100},
]


def signed(**record):
    made = ledger(9, DROPPED)
    made["sources"]["chat"]["names"] = NAMES
    made["sources"]["code"]["names"] = [{**NAMES[1], "language": "zxx", "reason": "code"}]
    return dataclasses.replace(
        full(),
        ledger=made,
        record={**RECORD, **record},
        sources=SOURCES,
        searched={"chat": ["PERSON", "EMAIL_ADDRESS"], "code": ["EMAIL_ADDRESS"]},
        dropping=["PHONE_NUMBER"],
        key={"id": "feedc0de", "from": "file"},
    )


def shown(contents):
    return re.sub(r"\s+", " ", " ".join(Tags(write_card(contents)).text))


def test_the_record_of_processing_is_shown():
    text = shown(signed(retention="a year"))
    for part in (
        "date 2026-11-22 operator Example GmbH legal basis Art. 6(1)(f) erasure by keyed hash "
        "retention a year",
        "data/chat.jsonl 1 1,234 chatchatchat",
        "id feedc0de",
        "a file that this user alone can read",
        "name and function place and date signature",
    ):
        assert part in text, part


def test_what_was_not_searched_is_said_by_language_and_source():
    text = shown(signed())
    assert "chat en eyas 6 900 90.0 % chat de not searched: the policy keeps names" in text
    assert "and places 3 100 10.0 %" in text
    assert "code code only not searched: code, commands, paths or formulas 3 100 100.0 %" in text
    assert "PERSON in code" in text
    assert "URL in any source" in text
    assert "whatever names it holds remain" in text
    assert "chat 9 3 33.3 % 6 2 code 9 3 33.3 % 0 1" in text  # changed rows by source


def test_what_is_expected_to_remain_follows_from_the_measured_recall():
    rows = {row["type"]: row for row in remaining(signed())}
    person = recall_of("PERSON")
    low, high = person.interval
    assert rows["PERSON"]["found"] == 6
    assert rows["PERSON"]["expected"] == pytest.approx(6 * (1 - person.share) / person.share)
    assert rows["PERSON"]["between"] == pytest.approx([6 * (1 - high) / high, 6 * (1 - low) / low])
    assert rows["PHONE_NUMBER"]["found"] == 6  # of a type that drops its rows, those in them
    made = signed()
    made.ledger["masked"]["MAC_ADDRESS"] = 2
    unknown = {row["type"]: row for row in remaining(made)}["MAC_ADDRESS"]
    assert (unknown["found"], unknown["recall"], unknown["expected"]) == (2, None, None)
    assert "MAC_ADDRESS 2 recall not measured: how many remain is not known" in shown(made)


def test_the_recall_of_nothing_and_of_all():
    assert Recall(0, 4).remaining(3)[0] == math.inf
    assert Recall(4, 4).remaining(3)[:2] == pytest.approx((0, 0))
    assert Recall(4, 4).remaining(3)[2] == pytest.approx(3 * 3.841459 / 4)  # Wilson: 4 of 4
    assert Recall(9, 10).remaining(0) == (0, 0, 0)


def test_the_measured_recall_says_what_it_was_measured_on():
    table = measured()
    assert set(table["types"]) <= set(TYPES)
    assert all(0 <= one["found"] <= one["of"] for one in table["types"].values())
    assert table["languages"]
    assert table["texts"] >= 1000
    text = shown(signed())
    assert f"Recall as measured on {table['set']}" in text
    assert table["policy"] in text


def test_a_run_with_another_search_than_the_measured_one_says_so():
    assert "It was measured with another search" not in shown(signed())
    made = signed()
    name, version = next(iter(measured()["versions"].items()))
    made.ledger["versions"][name] = "0.0.1"
    made.ledger["policies"]["personal"] = {"cloud_project": "ours"}
    text = shown(made)
    assert f"{name} {version} there, 0.0.1 here" in text
    assert "the Cloud DLP project ours of this run was not there" in text


# Sentences that one missed value would make false.
UNTRUE = re.compile(
    r"free of|no personal data|without personal data|all personal data|anonym|clean(ed)? (of|data)|"
    r"none (was|were) found|guarantee|ensure|complete(ly)? (remov|mask|replac)|all (names|values)|"
    r"no (value|name|secret)s? (is|are|remain)|every (name|value)|fully|safe\b",
    re.I,
)


def test_no_sentence_is_made_false_by_a_miss():
    for contents in (signed(), full(), CardContents(ledger(3, {}, verdicts=()))):
        text = shown(contents)
        assert not UNTRUE.search(text), UNTRUE.search(text)
    assert not UNTRUE.search(" ".join(MEANINGS.values()))
    assert UNTRUE.search("The prompts are free of personal data.")


def test_many_languages_are_shown_as_few():
    made = signed()
    made.ledger["sources"]["chat"]["names"] = [
        {**NAMES[1], "language": f"l{number}", "characters": number} for number in range(90)
    ]
    parts = name_parts(made.ledger)
    assert len(parts) == 41
    assert sum(part["characters"] for part in parts) == sum(range(90)) + 100
    assert "51 smaller parts" in shown(made)


def test_nothing_is_loaded_from_elsewhere():
    page = write_card(full())
    tags = Tags(page).all
    loading = {"script", "link", "iframe", "img", "object", "a", "use"}
    assert not [tag for tag, _ in tags if tag in loading]
    assert not [attrs for _, attrs in tags if {"src", "href", "xlink:href"} & set(attrs)]
    assert not [name for _, attrs in tags for name in attrs if name.startswith("on")]
    assert not re.search(r"@import|url\(|https?://|//\w", page)


def test_what_comes_from_outside_is_escaped():
    reasons = {"malformed": 1, f"contamination.{NASTY}": 2, NASTY: 1}
    made = ledger(2, reasons, sources=(NASTY, f"{NASTY}2"))
    made |= {"languages": {NASTY: 4}, "masked": {NASTY: 2}, "versions": {NASTY: NASTY}}
    made["policies"] = {NASTY: {NASTY: NASTY}}
    nasty = dict.fromkeys(("source", "licence", "facts_from"), NASTY)
    nasty |= {"overruled": [{**OVERRULED, "reason": NASTY, "value": NASTY}]}
    made["licences"] = [{**VERDICTS[1], **nasty, "notes": [NASTY], "duties": {NASTY: NASTY}}]
    matched = report()
    matched["sources"] = {NASTY: {"before": 1, "after": 1}}
    made["sources"][NASTY]["names"] = [{**NAMES[1], "language": NASTY, "reason": NASTY}]
    contents = CardContents(
        made,
        matched,
        [NASTY],
        NASTY,
        {NASTY: NASTY},
        {NASTY: source(NASTY, NASTY, NASTY)},
        {NASTY: [NASTY], f"{NASTY}2": []},
        [NASTY],
        {"id": NASTY, "from": "file"},
    )
    tags = Tags(write_card(contents))
    assert not tags.count("script")
    assert tags.count("style") == 1
    assert not tags.count("svg")
    assert sum(NASTY in text for text in tags.text) > 15
    assert "95018" not in "".join(tags.text)


def test_the_card_is_the_same_for_the_same_contents():
    assert write_card(full()) == write_card(full()) != write_card(full(identity="other"))


def test_reasons_stand_in_the_order_of_the_stage_with_their_meaning():
    listed = reasons(ledger(9, {**DROPPED, "some.day": 1}))
    assert {one["name"]: one["count"] for one in listed} == {**DROPPED, "some.day": 1}
    heads = list(dict.fromkeys(one["head"] for one in listed))
    assert heads == [
        *("malformed", "too_long", "quality", "contamination", "pii", "duplicate", "match", "some")
    ]
    assert [one["count"] for one in listed if one["head"] == "pii"] == [5, 1]
    assert all(one["meaning"] for one in listed[:-1])


def test_every_reason_of_the_code_has_a_meaning():
    given = {Unreadable("").reason, BrokenStream("").reason}
    for path in Path(streams.__file__).parent.glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Unreadable":
                given |= {ast.literal_eval(reason) for reason in call.args[1:]}
    given |= {entry.name for entry in FILTERS} | {reason.partition(".")[0] for reason in REASONS}
    assert given - {""} == {*MEANINGS} - {"pii"}


def test_personal_data_by_type_and_source():
    found = {one["type"]: one for one in personal_data(ledger(9, DROPPED))}
    assert (found["PERSON"]["replaced"], found["PERSON"]["dropped"]) == (6, 0)
    assert found["PHONE_NUMBER"]["by_source"] == {
        "chat": {"replaced": 0, "dropped": 6},
        "code": {"replaced": 0, "dropped": 0},
    }
    for one in found.values():
        assert one["replaced"] == sum(counts["replaced"] for counts in one["by_source"].values())
        assert one["dropped"] == sum(counts["dropped"] for counts in one["by_source"].values())
    assert next(iter(found)) in ("PERSON", "EMAIL_ADDRESS", "PHONE_NUMBER")


def test_no_row_at_all_is_a_card_too():
    assert "0 rows of 0 sources" in shown(CardContents(Ledger().to_json()))


@needs_chromium
def test_a_browser_draws_it_without_a_network(tmp_path):
    found = framed(tmp_path, write_card(signed()), (360, 1200))
    assert sorted(window for _, window, _ in found) == [360, 1200]
    assert all(wide <= window for wide, window, _ in found)
    picture = tmp_path / "card.png"
    shot = (f"--screenshot={picture}", "--window-size=1200,5000", "--virtual-time-budget=3000")
    run_chromium(tmp_path, *shot, (tmp_path / "framed.html").as_uri())
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.stat().st_size > 60_000  # a blank sheet of that size takes a fifth of it
