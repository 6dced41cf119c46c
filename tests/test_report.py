"""The report: one file without anything beside it, with every part that was given and none that was not."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from eyas.artifact import Manifest
from eyas.bench import figures
from eyas.bench.machine import machine
from eyas.bench.report import Contents, fates, render, write_report
from eyas.bench.summary import summarise
from tests.bench_rows import row

VOID = {"meta", "br", "use", "path", "img", "hr"}
EVALUATION = {
    "tau": 2.5,
    "acceptance_by_position": [0.7, 0.6, 0.5],
    "assumes": "greedy answers",
    "draft_vocabulary_coverage": 0.993,
}
LEDGER = {
    "rows_in": 1300,
    "rows_out": 1200,
    "dropped": {"too long": 30, "duplicate": 70},
    "rows_masked": 12,
    "masked": {"EMAIL_ADDRESS": 12},
    "sources": {"demo": {"rows_in": 1300, "rows_out": 1200, "dropped": {"too long": 30, "duplicate": 70}}},
}


def summary(concurrencies=(1, 4), arms=("plain", "eagle"), **fields):
    tpot_ms, hist = {"plain": 10.0, "eagle": 5.5}, {"plain": (), "eagle": (2, 1, 2)}
    rows = [
        row(arm, f"p{number}", concurrency=concurrency, tpot_ms=tpot_ms[arm], hist=hist[arm], started_s=number, **fields)
        for concurrency in concurrencies
        for arm in arms
        for number in range(7)
    ]
    config = {"num_prompts": 7, "prompts": "p.jsonl", "max_tokens": 11, "temperature": 0.0, "seed": 0}
    return {**summarise(rows, list(arms), is_greedy=True), "config": config, "machine": machine(), "load_average_after": []}


@pytest.fixture
def manifest():
    source = Manifest(stage="source", identity="5f" * 32, config={"licence": "CC0-1.0"}, counts={}, files={}, url="raw.jsonl")
    prompts = Manifest(
        stage="prompts",
        identity="aaaa",
        config={"seed": 3},
        counts={"rows": 1200},
        files={},
        inputs={"demo": source},
        facts={"ledger": LEDGER},
    )
    return Manifest(stage="bench", identity="bbbb", config={}, counts={"requests": 28}, files={}, inputs={"head": prompts})


class Tags(HTMLParser):
    """Checks that what opens closes, and keeps all tags with their attributes."""

    def __init__(self, page):
        super().__init__()
        self.open, self.all = [], []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.all.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.all.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def count(self, tag):
        return sum(name == tag for name, _ in self.all)


def test_everything_that_is_given_is_shown(manifest):
    page = render(Contents(summary(), EVALUATION, LEDGER, manifest, ["eyas demo"], "A title"))
    assert Tags(page).count("svg") == 4
    # tpot 10 -> 5.5; rounds (2, 1, 2) emit 2 + 2 + 6 tokens
    for shown in (
        "A title",
        "1.82×",
        "2.00",
        "7 / 7",
        "1,300",
        "duplicate",
        "CC0-1.0",
        "aaaa",
        "bbbb",
        "eyas demo",
        "tau 2.50",
    ):
        assert shown in page, shown
    assert "not the same" not in page


def test_nothing_is_loaded_from_elsewhere(manifest):
    page = render(Contents(summary(), EVALUATION, LEDGER, manifest, ["eyas demo"]))
    tags = Tags(page).all
    assert not [tag for tag, _ in tags if tag in ("script", "link", "iframe", "img", "object")]
    references = [value for _, attrs in tags for name, value in attrs.items() if name in ("src", "href", "xlink:href")]
    assert all(reference.startswith("#") for reference in references)
    assert not re.search(r"@import|url\((?!#)", page)


def test_ids_are_unique_across_pictures(manifest):
    ids = [attrs["id"] for _, attrs in Tags(render(Contents(summary(), EVALUATION))).all if "id" in attrs]
    drawn = [one for one in ids if re.fullmatch(r"[mp][0-9a-f]{10}", one)]  # markers and clips, which others refer to
    assert drawn
    assert len(drawn) == len(set(drawn))


def test_colours_are_the_pages_own_in_light_and_dark():
    page = render(Contents(summary(), EVALUATION))
    assert "prefers-color-scheme: dark" in page
    assert not [color for color in figures.VARIABLES if color in page]
    for variable in figures.VARIABLES.values():
        assert page.count(f"{variable[4:-1]}:") == 2, variable  # declared for light and for dark


def test_parts_that_are_not_given_are_left_out():
    page = render(Contents(summary(concurrencies=(1,))))
    assert Tags(page).count("svg") == 4
    for heading in ("Where the prompts went", "Lineage", "Commands", "held-out"):
        assert heading not in page


def test_one_arm_alone_is_a_report_too():
    page = render(Contents(summary(arms=("plain",))))
    assert Tags(page).count("svg") == 2
    assert "Speed-up</span>" not in page


def test_answers_without_a_second_token_leave_dashes():
    page = render(Contents(summary(tokens=1)))
    assert Tags(page).count("svg") == 3
    assert "no answers that can be compared" in page


def test_a_slowdown_and_a_difference_are_said_aloud():
    bench = summary()
    for compared in bench["comparisons"]:
        compared.update(speedup=0.8, identical=5)
    page = render(Contents(bench))
    assert "slower." in page
    assert "2 of 7 answers were not the same." in page


def test_what_comes_from_outside_is_escaped():
    bench = summary()
    bench["config"]["prompts"] = "<script>alert(1)</script>"
    page = render(Contents(bench, commands=["eyas bench --url 'http://x/?a=1&b=<2>'"]))
    assert "<script>" not in page
    assert "&lt;2&gt;" in page


def test_fates_add_up_to_the_rows_that_came_in():
    found = fates(LEDGER)
    assert [fate["name"] for fate in found] == ["kept", "duplicate", "too long"]
    assert sum(fate["count"] for fate in found) == LEDGER["rows_in"]
    assert sum(fate["share"] for fate in found) == pytest.approx(1)


def test_report_is_the_same_for_the_same_contents(tmp_path):
    contents = Contents(summary(), EVALUATION)
    path = write_report(tmp_path / "new" / "report.html", contents)
    assert (tmp_path / "new" / "report.html").read_text(encoding="utf-8") == render(contents)
    assert path.endswith("report.html")
