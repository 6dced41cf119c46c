"""The report: one file that needs no other, with the given parts."""

from __future__ import annotations

import itertools
import re
from dataclasses import asdict

import pytest

from eyas.artifact import Artifact, Manifest
from eyas.bench.bench import BenchConfig
from eyas.bench.claims import quotable
from eyas.bench.machine import machine
from eyas.bench.report import (
    COLUMNS,
    Contents,
    charts,
    fates,
    markdown,
    render,
    table_rows,
    without_folders,
    write_reports,
)
from eyas.bench.server import ServerFacts
from eyas.bench.summary import summarise
from eyas.errors import InputError
from eyas.figure import LEFT, RIGHT, WIDTH, Point, Series, axis_ticks, line_chart
from tests.bench_rows import row
from tests.browser import framed, needs_chromium
from tests.page_tags import Tags

EVALUATION = {"tau": 2.5, "acceptance_by_position": [0.7, 0.6, 0.5], "assumes": "greedy answers"}
ROWS = {"rows_in": 1300, "rows_out": 1200, "dropped": {"too long": 30, "duplicate": 70}}
MASKED = {"rows_masked": 12, "masked": {"EMAIL_ADDRESS": 12}}
LEDGER = {**ROWS, **MASKED, "sources": {"demo": ROWS}}


def summary(concurrencies=(1, 4), arms=("plain", "eagle"), rates=(), categories=("",), **fields):
    tpot_ms = {"plain": 10.0, "eagle": 5.5, "general head": 8.0, "adapted head": 5.5}
    loads = [{"concurrency": concurrency} for concurrency in concurrencies]
    loads += [{"concurrency": 0, "rate": rate} for rate in rates]
    rows = [
        row(
            arm,
            f"p{number} {category}",
            category=category,
            tpot_ms=tpot_ms[arm],
            hist=(2, 1, 2) if arm != "plain" else (),
            started_s=number,
            block=number,
            **load,
            **fields,
        )
        for load in loads
        for arm in arms
        for number in range(8)
        for category in categories
    ]
    facts = ServerFacts("http://here", "target", "eyas", None, "bfloat16")
    return {
        **summarise(rows, arms, is_greedy=True),
        "differences": [],
        "compared_anyway": False,
        "num_cut_prompts": 0,
        "salted_arms": list(arms),
        "servers": {arm: asdict(facts) for arm in arms},
        "config": BenchConfig(prompts="p.jsonl", num_prompts=7).model_dump(mode="json"),
        "machine": machine(),
        "load_average_after": [0.5, 0.5, 0.5],
    }


@pytest.fixture(scope="module")
def manifest():
    def made(stage, identity, **fields):
        return Manifest(stage=stage, identity=identity, files={}, **fields)

    source = made("source", "5f" * 32, config={"licence": "CC0-1.0"}, counts={}, url="raw.jsonl")
    facts = {"inputs": {"demo": source}, "facts": {"ledger": LEDGER}}
    prompts = made("prompts", "aaaa", config={"seed": 3}, counts={"rows": 1200}, **facts)
    head = made("source", "7a" * 32, config={}, counts={}, url="a/published/head")
    trained = made("train", "cccc", config={}, counts={}, inputs={"in": prompts, "start": head})
    return made("bench", "bbbb", config={}, counts={"requests": 28}, inputs={"head": trained})


@pytest.fixture(scope="module")
def whole(manifest):
    """A page with every part, its cells as wide as figures come."""
    bench = summary((1, 2, 4, 6, 8, 10), rates=(0.5, 3), categories=("chat", "a long task"))
    for one in bench["results"]:
        one["throughput_tps_interval"] = (1_234_567.0, 2_345_678.0)
    bench["by_task"][0]["category"] = "Worte-ohne-" + "Leerzeichen" * 4
    commands = ["eyas bench http://127.0.0.1:8000 " + "--set a=b " * 20]
    return render(Contents(bench, EVALUATION, LEDGER, manifest, commands))


def words(page):
    """What a reader sees, spaces as one."""
    return " ".join(" ".join(Tags(page).text).split())


def test_everything_that_is_given_is_shown(manifest):
    contents = Contents(summary(), EVALUATION, LEDGER, manifest, ["eyas demo"], "A title")
    page = render(contents)
    assert Tags(page).count("svg") == 4  # TPOT, throughput, speed-up, acceptance
    # TPOT 10 -> 5.5; rounds (2, 1, 2) emit 2 + 2 + 6 tokens
    shown = ("A title", "1.82×", "2.00", "8 / 8", "1,300", "duplicate", "CC0-1.0", "aaaa", "bbbb")
    for text in (*shown, "eyas demo", "tau 2.50"):
        assert text in page, text
    assert "not the same" not in page
    assert "7a7a" not in page, "a head that training began from is no source of prompts"


def test_nothing_is_loaded_from_elsewhere(whole):
    tags = Tags(whole).all
    assert not [tag for tag, _ in tags if tag in ("script", "link", "iframe", "img", "object")]
    assert not [attrs for _, attrs in tags if attrs.keys() & {"src", "href", "xlink:href"}]
    assert not re.search(r"@import|url\(", whole)


def test_pictures_have_the_colours_of_the_page(whole):
    pictures = " ".join(re.findall("<svg.*?</svg>", whole, re.DOTALL))
    assert not re.findall("(?:fill|stroke)=.#", pictures)
    for variable in set(re.findall(r"var\((.*?)\)", pictures)):
        assert whole.count(f"{variable}:") == 2, variable  # declared for light and for dark


def test_parts_that_are_not_given_are_left_out():
    page = render(Contents(summary(concurrencies=(1,))))
    assert Tags(page).count("svg") == 3, "one load: no speed-up by load"
    assert page.count('stroke-width="28.0"') == 4, "two bars for TPOT, two for throughput"
    for heading in ("Where the prompts went", "Lineage", "Commands", "held-out", "By task"):
        assert heading not in page
    alone = render(Contents(summary(arms=("plain",))))
    assert Tags(alone).count("svg") == 2
    assert "TPOT</span>" not in alone


def test_of_three_arms_one_has_the_headline_and_all_are_in_the_table():
    bench = summary((1,), arms=("plain", "general head", "adapted head"))
    contents = Contents(bench, arm="adapted head")
    text = words(render(contents))
    assert "adapted head against plain" in text
    assert "general head against plain" not in text
    rows = {cells[0]: dict(zip(COLUMNS, cells, strict=True)) for cells in table_rows(bench)}
    assert list(rows) == ["plain", "general head", "adapted head"]
    assert rows["adapted head"]["tau"].startswith("2.00 (")
    assert rows["adapted head"]["TPOT, times as fast"] == "1.82 (1.82–1.82)"
    assert rows["adapted head"]["identical"] == "8 of 8"
    assert {rows["plain"][name] for name in ("tau", "identical", "throughput, times")} == {"–"}
    table = markdown(contents)
    assert table.count("against plain") == 1
    assert "| general head | 1 at a time |" in table


def test_a_slowdown_a_difference_and_answers_of_one_token_are_in_the_headline():
    bench = summary()
    for compared in bench["comparisons"]:
        compared.update(speedup=0.8, speedup_interval=(0.7, 0.9), identical=5)
    page = render(Contents(bench))
    assert "time per token (TPOT) slower, 0.80 times as fast (0.70 to 0.90)" in page
    assert "3 of 8 answers were not the same." in page
    page = render(Contents(summary(tokens=1)))
    assert "is certain: time per token (TPOT) not known; throughput 1.00 to 1.00" in page


def not_drafted(**changes):
    """A summary in which eagle decoded plainly but for a few rounds."""
    bench = summary(concurrencies=(1,))
    changes = {"tau": None, "speedup": 1.04, "tokens_per_forward": 1.1, **changes}
    bench["comparisons"][0] |= changes
    return bench


def test_an_arm_that_did_not_draft_has_no_speedup_by_its_head():
    bench = not_drafted()
    page, table = words(render(Contents(bench))), markdown(Contents(bench))
    assert "1 request at a time: eagle did not draft, so there is no speed-up by a head" in page
    assert "TPOT – did not draft" in page
    assert "| 1.04 (1.82–1.82), did not draft |" in table
    claim = quotable(bench["comparisons"][0])
    assert claim["note"] == "did not draft"
    assert (claim["speedup"], claim["throughput_ratio"]) == (None, None)
    assert quotable(summary()["comparisons"][0]) == summary()["comparisons"][0]


def test_between_two_engines_a_ratio_is_theirs_whether_they_drafted_or_not():
    bench = not_drafted(same_engine=False, tokens_per_forward=None)
    page = words(render(Contents(bench)))
    assert "eagle against plain, time per token (TPOT) 1.04 times as fast" in page
    assert "is not known to have drafted" in page
    assert quotable(bench["comparisons"][0])["speedup"] == 1.04


def test_a_ratio_that_is_withheld_or_without_an_interval_is_shown_nowhere():
    bench = summary((1,))
    withheld = {"speedup": None, "speedup_interval": None, "withheld": "it is noise"}
    bench["comparisons"][0] |= withheld
    assert "no speed-up is claimed, it is noise." in words(render(Contents(bench)))
    bench = summary()
    for one in (*bench["comparisons"], *bench["by_task"]):
        one |= {"speedup_interval": None, "num_turns": 3}
    page = words(render(Contents(bench)))
    assert "1.82" not in page
    assert "too few turns" in page
    assert not [note for _, note in charts(Contents(bench)) if "over that of the arm" in note]


def test_input_is_escaped():
    bench = summary()
    bench["config"]["prompts"] = "<script>alert(1)</script>|x"
    contents = Contents(bench, commands=["eyas bench --url 'http://x/?a=1&b=<2>'"])
    page = render(contents)
    assert "<script>" not in page
    assert "&lt;2&gt;" in page
    assert "&lt;script>alert(1)&lt;/script>\\|x" in markdown(contents)


def test_fates_add_up_to_the_rows_that_came_in():
    found = fates(LEDGER)
    assert [fate["name"] for fate in found] == ["kept", "duplicate", "too long"]
    assert sum(fate["count"] for fate in found) == LEDGER["rows_in"]
    assert sum(fate["share"] for fate in found) == pytest.approx(1)


def test_the_files_are_the_same_for_the_same_contents(tmp_path, manifest):
    contents = Contents(summary(), EVALUATION, LEDGER, manifest, ["eyas demo"])
    output = Artifact(str(tmp_path / "new"))
    path = write_reports(output, contents)
    assert path.endswith("new/report.html")
    first = {name: output.read(name) for name in ("report.html", "report.md")}
    write_reports(output, contents)
    assert first == {name: output.read(name) for name in first}


@pytest.mark.parametrize("where", ["comparisons", "by_task"])
def test_a_report_with_a_speedup_above_tau_fails(where):
    bench = summary(categories=("chat", "maths"))
    render(Contents(bench))
    bench[where][-1]["speedup"] = bench[where][-1]["tau"] + 0.01
    with pytest.raises(InputError, match="impossible, tau is"):
        render(Contents(bench))


def test_an_older_summary_is_refused():
    bench = summary()
    del bench["comparisons"][0]["num_turns"]
    for old in (bench, {**summary(), "open_loop": {}}):
        with pytest.raises(InputError, match="older version"):
            render(Contents(old))


def test_each_task_has_a_row():
    text = words(render(Contents(summary(categories=("chat", "maths")))))
    assert text.count("maths eagle 1 at a time 8 1.82") == 1


def test_a_reader_learns_what_the_figures_may_depend_on():
    bench = summary((1,))
    bench |= {"num_cut_prompts": 3, "salted_arms": ["plain"], "compared_anyway": True}
    unlike = {"arm": "eagle", "baseline": "plain", "what": "precision", "refused": True}
    bench["differences"] = [{**unlike, "text": "bf16 against fp32"}]
    bench["results"][0] |= {"errors": {"timeout": 2}, "counted_by": ["timings"]}
    text = words(render(Contents(bench)))
    for note in (
        "the later turns of 3 conversations were not asked",
        "The server of eagle is not known to take `cache_salt`",
        "eagle and plain differ in precision: bf16 against fp32 (not comparable)",
        "2 × timeout",
        "tokens were counted by timings",
        "Compared on demand",
    ):
        assert note in text, note


def test_folders_of_this_machine_are_not_passed_on():
    shown = {
        "/home/me/models/mine": "mine",
        "eyas eval --head /a/b/head -o ../out/x": "eyas eval --head head -o x",
        "eyas serve --head out/mine/export-*/sglang": "eyas serve --head out/mine/export-*/sglang",
        "'/with a space/file'": "'file'",
        "file:///a/b/c.jsonl": "c.jsonl",
    }
    same = ("http://127.0.0.1:8000/v1/models", "s3://bucket/a/b", "POST /v1/chat/completions")
    shown |= {text: text for text in (*same, "runs/mine.yaml", "1/2 of 3/4")}
    assert without_folders({"a": [*shown]}) == {"a": [*shown.values()]}


@pytest.mark.parametrize("values", [[0, 10.0], [0.93, 1.9, 1], [5.0, 5.0], [0, 0.0], [-3, 0.1]])
def test_ticks_are_round_and_hold_all_values(values):
    ticks = axis_ticks(values)
    assert ticks[0] <= min(values)
    assert ticks[-1] >= max(values)
    assert 2 <= len(ticks) <= 6
    steps = {round(after - before, 9) for before, after in itertools.pairwise(ticks)}
    assert len(steps) == 1
    assert f"{steps.pop():.0e}"[0] in "125"


def test_a_chart_places_points_by_their_values_and_shows_intervals():
    points = [Point(1, 10.0, 8.0, 12.0), Point(64, 5.0)]
    picture = line_chart([Series("eagle<", 1, points)], "requests", "TPOT")
    assert "eagle&lt;: 10 (8 to 12)" in picture
    assert "eagle&lt;: 5<" in picture
    places = re.findall(r'circle cx="([\d.]+)" cy="([\d.]+)"', picture)
    (x1, y1), (x2, y2) = ([float(one) for one in place] for place in places)
    assert x1 < x2
    assert y1 < y2, "a larger value is higher up"
    assert 'class="key"' not in picture
    assert 'class="key"' in line_chart([Series("a", 0, points), Series("b", 1, points)], "x", "y")


@pytest.mark.parametrize("count", [2, 12])
def test_bars_of_one_load_stay_within_the_axes_and_under_their_intervals(count):
    series = [Series(f"arm {at}", at, [Point(1, 10.0, 8.0, 12.0)]) for at in range(count)]
    picture = line_chart([*series, Series("none", count, [])], "requests", "TPOT")
    bars = re.findall(r'polyline points="([\d.]+),.*?stroke-width="([\d.]+)"', picture)
    assert len(bars) == count
    edges = [float(x) + side * float(width) / 2 for x, width in bars for side in (-1, 1)]
    assert edges == sorted(edges), "no bar covers its neighbour"
    assert edges[0] >= LEFT
    assert edges[-1] <= WIDTH - RIGHT
    upright = r'line x1="([\d.]+)" y1="[\d.]+" x2="\1" [^>]*stroke="var\(--(.*?)\)"'
    assert re.findall(upright, picture) == [(x, "ink") for x, _ in bars]


@needs_chromium
def test_a_browser_draws_it_no_wider_than_the_screen(tmp_path, whole):
    widths = (390, 1280)
    found = framed(tmp_path, whole, widths)
    assert sorted(one[1] for one in found) == sorted(widths)
    assert all(wide <= window and small == 0 for wide, window, small in found)
