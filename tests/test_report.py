"""The report: one file without anything beside it, with every part that was given and none that was
not.
"""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
from collections import Counter
from dataclasses import asdict

import pytest
from markupsafe import Markup

from eyas.artifact import Artifact, Manifest
from eyas.bench import figures, tables
from eyas.bench.bench import BenchConfig
from eyas.bench.headline import quotable
from eyas.bench.machine import machine
from eyas.bench.report import (
    NAMES,
    Contents,
    fates,
    nodes_of_all,
    pictures,
    predicted,
    render,
    taus,
    write_reports,
)
from eyas.bench.server import ServerFacts
from eyas.bench.summary import RequestLoad, RunContext, summarise
from eyas.errors import EyasError, InputError
from tests.bench_rows import row
from tests.browser import CHROMIUM, needs_chromium
from tests.page_tags import Tags

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
    "sources": {
        "demo": {"rows_in": 1300, "rows_out": 1200, "dropped": {"too long": 30, "duplicate": 70}}
    },
}


COUNTED = {
    "spec_decode_num_drafts_total": 100.0,
    "spec_decode_num_draft_tokens_total": 700.0,
    "spec_decode_num_accepted_tokens_total": 100.0,
    "rounds_total|plain": 25.0,
    "rounds_total|tree": 75.0,
    "round_predicted_seconds_total|tree": 0.9,
    "round_real_seconds_total|tree": 1.0,
}


def summary(concurrencies=(1, 4), arms=("plain", "eagle"), rates=(), categories=("",), **fields):
    tpot_ms = {"plain": 10.0, "eagle": 5.5, "general head": 8.0, "adapted head": 5.5}
    hist = {arm: (2, 1, 2) if arm != "plain" else () for arm in tpot_ms}
    loads = [{"concurrency": concurrency} for concurrency in concurrencies]
    loads += [{"concurrency": 0, "rate": rate} for rate in rates]
    rows = [
        row(
            arm,
            f"p{number} {category}",
            category=category,
            tpot_ms=tpot_ms[arm],
            hist=hist[arm],
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
    counted = {("eagle", RequestLoad(**load)): COUNTED for load in loads}
    return {
        **summarise(rows, RunContext(arms, True, counted)),
        "differences": [],
        "compared_anyway": False,
        "servers": {
            arm: asdict(ServerFacts("http://here", "target", "eyas", None, "bfloat16"))
            for arm in arms
        },
        "config": BenchConfig(prompts="p.jsonl", num_prompts=7, max_tokens=11).model_dump(
            mode="json"
        ),
        "machine": machine(),
        "load_average_after": [0.5, 0.5, 0.5],
    }


@pytest.fixture(autouse=True)
def quick_pictures(request, monkeypatch):
    """Drawing takes most of a report's time: tests of words get pictures of their labels alone."""
    if "drawn" not in request.fixturenames:
        picture = '<svg role="img" aria-label="{}"></svg>'
        monkeypatch.setattr(figures, "svg", lambda paint, label, *_: Markup(picture).format(label))


@pytest.fixture
def drawn():
    """For tests that look at the pictures."""


@pytest.fixture(scope="module")
def manifest():
    source = Manifest(
        stage="source",
        identity="5f" * 32,
        config={"licence": "CC0-1.0"},
        counts={},
        files={},
        url="raw.jsonl",
    )
    prompts = Manifest(
        stage="prompts",
        identity="aaaa",
        config={"seed": 3},
        counts={"rows": 1200},
        files={},
        inputs={"demo": source},
        facts={"ledger": LEDGER},
    )
    return Manifest(
        stage="bench",
        identity="bbbb",
        config={},
        counts={"requests": 28},
        files={},
        inputs={"head": prompts},
    )


@pytest.fixture(scope="module")
def whole(manifest):
    """A page with every part, its pictures drawn."""
    bench = summary((1, 2, 4, 6, 8, 10), categories=("chat", "a task with a long name"))
    for one in bench["results"]:
        one["throughput_interval"] = (1_234_567.0, 2_345_678.0)  # as wide as figures come
    bench["by_task"][0]["category"] = "Worte-ohne-" + "Leerzeichen" * 4
    commands = ["eyas bench http://127.0.0.1:8000 " + "--set a=b " * 20]
    return render(Contents(bench, EVALUATION, LEDGER, manifest, commands))


def words(page):
    """What a reader sees, spaces as one."""
    return " ".join(" ".join(Tags(page).text).split())


def test_everything_that_is_given_is_shown(manifest):
    page = render(Contents(summary(), EVALUATION, LEDGER, manifest, ["eyas demo"], "A title"))
    assert Tags(page).count("svg") == 6
    # tpot 10 -> 5.5; rounds (2, 1, 2) emit 2 + 2 + 6 tokens
    for shown in (
        "A title",
        "1.82×",
        "2.00",
        "8 / 8",
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


def test_nothing_is_loaded_from_elsewhere(whole, drawn):
    tags = Tags(whole).all
    assert not [tag for tag, _ in tags if tag in ("script", "link", "iframe", "img", "object")]
    references = [
        value
        for _, attrs in tags
        for name, value in attrs.items()
        if name in ("src", "href", "xlink:href")
    ]
    assert references
    assert all(reference.startswith("#") for reference in references)
    assert not re.search(r"@import|url\((?!#)", whole)


def test_pictures_have_ids_of_their_own_and_the_pages_colours(whole, drawn):
    ids = [attrs["id"] for _, attrs in Tags(whole).all if "id" in attrs]
    # markers and clips, which others refer to
    shared = [one for one in ids if re.fullmatch(r"[mp][0-9a-f]{10}", one)]
    assert shared
    assert len(shared) == len(set(shared))
    pictures = " ".join(re.findall("<svg.*?</svg>", whole, re.DOTALL))
    assert not re.findall("(?:fill|stroke): #", pictures)
    for variable in set(re.findall(r"var\((.*?)\)", pictures)):
        assert whole.count(f"{variable}:") == 2, variable  # declared for light and for dark


def test_parts_that_are_not_given_are_left_out():
    page = render(Contents(summary(concurrencies=(1,))))
    assert Tags(page).count("svg") == 5
    for heading in ("Where the prompts went", "Lineage", "Commands", "held-out"):
        assert heading not in page


def test_of_three_arms_one_has_the_headline_and_all_stand_side_by_side(drawn):
    bench = summary((1,), arms=("plain", "general head", "adapted head"))
    page = render(Contents(bench, arm="adapted head"))
    told = words(page)
    assert "adapted head against plain" in told
    assert "general head against plain" not in told
    rows = {row[0]: row for row in tables.arm_rows(bench)}
    assert list(rows) == ["plain", "general head", "adapted head"]
    assert rows["adapted head"][1].startswith("2.00 (")
    assert rows["adapted head"][3:] == ("1.82 (1.82–1.82)", "8 of 8")
    assert rows["plain"][1] == rows["plain"][3] == rows["plain"][4] == "–"
    picture = page.partition("Side by side")[2].partition("</svg>")[0]
    assert "general head: " in picture
    told = r"adapted head: \d+ tokens/s, tau 2\.00, 1\.82 times as fast"
    assert re.search(told, picture)
    markdown = tables.markdown(bench, None, [], "t", "adapted head")
    assert markdown.count("**eyas") + markdown.count("**target") == 1
    assert "| adapted head | 2.00 (" in markdown
    assert "Side by side" not in render(Contents(summary((1,))))


def test_one_arm_alone_is_a_report_too():
    page = render(Contents(summary(arms=("plain",))))
    assert Tags(page).count("svg") == 2
    assert "Speed-up</span>" not in page


def test_answers_without_a_second_token_leave_dashes():
    page = render(Contents(summary(tokens=1)))
    assert Tags(page).count("svg") == 4
    assert "is certain: time per token (TPOT) not known; throughput 1.00 to 1.00" in page


def test_a_slowdown_and_a_difference_are_said_aloud():
    bench = summary()
    for compared in bench["comparisons"]:
        compared.update(speedup=0.8, speedup_interval=(0.7, 0.9), identical=5)
    page = render(Contents(bench))
    assert "time per token (TPOT) slower, 0.80 times as fast (0.70 to 0.90)" in page
    assert "3 of 8 answers were not the same." in page


def not_drafted(**changes):
    """A summary in which eagle decoded plain but for a few rounds."""
    bench = summary(concurrencies=(1,))
    bench["comparisons"][0] |= {
        "tau": None,
        "speedup": 1.04,
        "tokens_per_forward": 1.1,
        "round_cost": None,
        **changes,
    }
    return bench


def test_of_an_arm_that_did_not_draft_no_ratio_is_the_heads():
    bench = not_drafted()
    page, text = words(render(Contents(bench))), tables.markdown(bench, None, (), "t")
    assert "1 request at a time: eagle did not draft, so there is no speed-up by a head" in page
    assert "times as fast" not in page
    assert "TPOT – did not draft; median time per token 10.00 → 5.50 ms" in page
    assert "**eagle did not draft, 1 at a time: no speed-up is a head's there.**" in text
    assert "| 1.04 (1.82–1.82), did not draft |" in text
    said = quotable(bench["comparisons"][0])
    assert (said["note"], said["speedup"], said["throughput_ratio"], said["num_pairs"]) == (
        "did not draft",
        None,
        None,
        8,
    )
    assert quotable(summary()["comparisons"][0]) == summary()["comparisons"][0]


def test_between_two_engines_a_ratio_is_theirs_whether_they_drafted_or_not():
    bench = not_drafted(same_engine=False, tokens_per_forward=None)
    page = words(render(Contents(bench)))
    assert "eagle against plain, time per token (TPOT) 1.04 times as fast" in page
    assert "is not known to have drafted; median time per token" in page
    assert "the server tells no tau that would bound these ratios" in page
    assert quotable(bench["comparisons"][0])["speedup"] == 1.04


def test_a_head_whose_speedup_is_not_certain_has_drafted_all_the_same():
    bench = summary((1,))
    bench["comparisons"][0]["speedup_interval"] = (0.9, 1.2)
    told = words(render(Contents(bench)))
    assert "no certain difference from 1" in told
    assert "hardly a round drafted" not in told


def test_a_speedup_that_is_withheld_says_why():
    bench = summary(concurrencies=(1,))
    bench["comparisons"][0] |= {
        "speedup": None,
        "speedup_interval": None,
        "paired_speedup": None,
        "withheld": "all of it is noise",
    }
    assert "no speed-up is claimed, all of it is noise." in words(render(Contents(bench)))


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


def test_the_three_files_are_the_same_for_the_same_contents(tmp_path, manifest, drawn):
    contents = Contents(summary(), EVALUATION, LEDGER, manifest, ["eyas demo"])
    path = write_reports(Artifact(str(tmp_path / "new")), contents)
    first = {name: (tmp_path / "new" / name).read_text(encoding="utf-8") for name in NAMES}
    assert first["report.html"] == render(contents)
    assert path.endswith("new/report.html")
    write_reports(Artifact(str(tmp_path / "new")), contents)
    assert first == {name: (tmp_path / "new" / name).read_text(encoding="utf-8") for name in NAMES}


@pytest.mark.parametrize("where", ["comparisons", "by_task"])
def test_a_report_with_a_speedup_above_tau_fails(where):
    bench = summary(categories=("chat", "maths"))
    render(Contents(bench))
    bench[where][-1]["speedup"] = bench[where][-1]["tau"] + 0.01
    with pytest.raises(EyasError, match="above tau"):
        render(Contents(bench))


def test_an_older_summary_is_told_from_a_new_one():
    with pytest.raises(InputError, match="older eyas"):
        render(Contents({"results": [], "comparisons": []}))
    bench = summary()
    del bench["comparisons"][0]["num_turns"]  # and so its intervals
    with pytest.raises(InputError, match="older eyas"):
        render(Contents(bench))


def test_each_task_has_a_line_and_each_load_a_column():
    page = render(Contents(summary(categories=("chat", "maths"))))
    text = words(page)
    assert "Speed-up of eagle over plain, by requests at a time task 1 4 tau prompts" in text
    assert text.count("maths 1.82") == 1
    assert "By task" not in render(Contents(summary()))


def test_tree_sizes_and_plain_rounds_are_the_servers_counters():
    text = words(render(Contents(summary())))
    assert "eagle 1 7.00 25 % 0.90" in text


def test_the_tree_size_is_that_of_all_rounds_the_plain_ones_too():
    told = {
        "tau_from": "usage",
        "accept_hist": [10, 20],
        "num_plain_steps": 90,
        "speculation": {"nodes_mean": 8.0},
    }
    assert nodes_of_all(told) == 2
    assert nodes_of_all({**told, "accept_hist": [], "speculation": {}}) == 0
    assert nodes_of_all({**told, "accept_hist": [], "num_plain_steps": 0}) is None
    assert nodes_of_all({**told, "tau_from": "metrics"}) == 8


def test_a_load_at_which_an_arm_never_drafted_stands_at_0_and_an_arm_that_never_did_is_left_out(
    monkeypatch,
):
    bench = summary()
    for one in bench["results"]:
        if one["arm"] == "plain" or one["concurrency"] == 4:
            one |= {
                "tau": None,
                "tau_from": "usage",
                "accept_hist": [],
                "num_plain_steps": 70,
                "speculation": {},
            }
        else:
            one["num_plain_steps"] = sum(one["accept_hist"])
    drawn = {}
    monkeypatch.setattr(
        figures, "against_load", lambda series, label, *_: drawn.setdefault(label, series) and ""
    )
    pictures(Contents(bench))
    (eagle,) = drawn["drafted tokens a round"]
    assert (eagle.name, [(point.x, point.y) for point in eagle.points]) == (
        "eagle",
        [(1, 7 / 2), (4, 0)],
    )


def foretold(speculation, concurrency, speedup, tau=2.1):
    return {"speculation": speculation, "concurrency": concurrency, "speedup": speedup, "tau": tau}


def test_what_was_predicted_stands_beside_what_came(drawn):
    said = {
        **EVALUATION,
        "predicted": {
            "by_concurrency": [foretold("auto(6,3,12)", 4, 2.0), foretold("auto(6,3,12)", 64, 1.0)]
        },
    }
    page = render(Contents(summary(), said))
    assert "eagle 4 2.00 1.82 +10 % 2.10 2.00" in words(page)
    assert "eagle, predicted" in page
    assert "stroke-dasharray" in page
    assert "Predicted and measured" not in render(Contents(summary(), EVALUATION))


def test_a_prediction_is_of_the_speculation_that_is_served(manifest):
    rows = [
        foretold("fixed(4,1,5)", 1, 1.5),
        foretold("auto(6,3,12)", 1, 1.9),
        foretold("fixed(6,3,12)", 1, None),
    ]
    said = {**EVALUATION, "predicted": {"by_concurrency": rows}}

    def of(arm, **served):
        inputs = (
            {
                "serve": Manifest(
                    stage="serve", identity="1", config={"engine": served}, counts={}, files={}
                )
            }
            if served
            else {}
        )
        made = manifest.model_copy(update={"inputs": inputs}) if served else None
        return {
            load: row["speedup"]
            for load, row in predicted(Contents({}, said, manifest=made), arm).items()
        }

    assert of("eagle") == of("auto") == {1: 1.9}
    assert of("fixed(4,1,5)") == of("eagle", speculation="fixed(4, 1, 5)") == {1: 1.5}
    assert of("fixed(3,1,4)") == of("eagle", speculation="off") == {}


def test_an_open_loop_has_pictures_of_its_own(drawn):
    page = render(Contents(summary(concurrencies=(), rates=(0.5, 2.0))))
    assert "requests a second" in page
    assert "Time to the first text" in page
    assert "0.5/s" in page
    assert "requests at a time</text>" not in page


def test_differences_and_who_counted_are_said_aloud():
    bench = summary(counted_by="tokenize")
    bench["differences"] = [
        {
            "arm": "eagle",
            "baseline": "plain",
            "what": "precision",
            "text": "bfloat16 against float32",
            "refused": True,
        }
    ]
    bench["compared_anyway"] = True
    for text in (words(render(Contents(bench))), tables.markdown(bench, None, (), "t")):
        assert "bfloat16 against float32" in text
    page = words(render(Contents(bench)))
    assert "although the arms may not have done the same work" in page
    assert "were counted by tokenize" in page


def test_markdown_has_the_same_figures_and_no_cell_can_break_out():
    bench = summary(categories=("chat", "a|b\n<script>"))
    text = tables.markdown(bench, None, ["eyas bench"], "Title")
    # an answer of 200 ms, one of 155 ms, and a turn is an answer or two
    ratios = "1.82 (1.82–1.82) | 1.29 (1.29–1.29) | 1.29 (1.29–1.29)"
    assert f"| eagle over plain | 1 at a time | {ratios} | 2.00 | 16 of 16 |" in text
    assert (
        "| chat | eagle over plain | 4 at a time | 8 | 10.00 → 5.50 | 1.82 (1.82–1.82) | 2.00 |"
        in text
    )
    assert "<script>" not in text
    of_tables = [line for line in text.splitlines() if line.startswith("|")]
    columns = {9: 0, 7: 0, 5: 0, 4: 0}
    for line in of_tables:
        columns[len(re.findall(r"(?<!\\)\|", line)) - 1] += 1
    assert columns == {9: 2 + 4, 7: 2 + 2 + 2 + 4, 5: 2 + 4, 4: 2 + 2}


def test_markdown_tells_gaps_whole_answers_and_acceptance_by_position():
    bench = summary(concurrencies=(1,), num_chunks=5)
    text = tables.markdown(bench, None, (), "t")
    assert "| eagle | 1 at a time | 5.50 / 5.50 | 155.00 / 155.00 / 155.00 | 2.20 |" in text
    assert "| accepted, by position | load | 1 | 2 |" in text
    assert "| eagle | 1 at a time | 60 % | 67 % |" in text
    bench["results"].append(
        {**bench["results"][1], "concurrency": 2, "acceptance_by_position": [0.5]}
    )
    assert "| eagle | 2 at a time | 50 % | – |" in tables.markdown(bench, None, (), "t")
    assert "by position" not in tables.markdown(summary(arms=("plain",)), None, (), "t")


def test_where_later_turns_were_left_out_it_is_said():
    bench = summary()
    said = "First turns only: the later turns of 3 conversations were not asked."
    for number, where in ((3, True), (0, False)):
        bench["num_cut_prompts"] = number
        assert (said in words(render(Contents(bench)))) is where
        assert (said in tables.markdown(bench, None, (), "t")) is where


def test_csv_has_a_line_for_every_result_and_comparison():
    bench = summary(categories=("chat", "maths"), rates=(2.0,))
    lines = list(csv.DictReader(io.StringIO(tables.csv(bench))))
    kinds = Counter(line["kind"] for line in lines)
    assert kinds == {"result": 6, "comparison": 3, "task": 6}
    first = next(line for line in lines if line["kind"] == "result" and line["arm"] == "eagle")
    assert (float(first["tpot_ms_median"]), float(first["tau"]), first["tree_nodes_mean"]) == (
        5.5,
        2.0,
        "7.0",
    )
    of_task = next(line for line in lines if line["task"] == "maths")
    assert float(of_task["speedup"]) == pytest.approx(10 / 5.5)
    assert {line["rate"] for line in lines} == {"", "2.0"}


def test_a_report_names_files_and_not_where_they_lie(tmp_path, manifest):
    """It is passed on: paths are those of somebody's machine. Endpoints and stores stay."""
    bench = summary()
    bench["config"]["prompts"] = "/home/me/my prompts/p.jsonl"
    bench["servers"]["eagle"]["model"] = "/models/mine"
    bench["results"][0]["errors"] = {"HTTP 400: no file ~/x/y.json at /v1/chat/completions": 1}
    config = {"target": "/data/models/t", "raw": ["../shared/raw.jsonl"], "store": "s3://b/me/x"}
    manifest = manifest.model_copy(update={"config": config, "url": "file:///tmp/out/bench"})
    command = "eyas bench http://h:8000/v1 --prompts '/home/me/my prompts/p.jsonl' -o /tmp/o/b"
    commands = [command, "eyas serve -t /data/models/t --set train.path=/home/me/f --head=~/h/k"]
    write_reports(Artifact(str(tmp_path)), Contents(bench, EVALUATION, LEDGER, manifest, commands))
    for name in NAMES[:2]:
        text = (tmp_path / name).read_text(encoding="utf-8")
        for folder in ("/home", "/data", "/tmp", "/models", "my prompts", "~/", "..", "file:"):
            assert folder not in text.replace("...", ""), (name, folder)
        for kept in ("http://h:8000/v1", "p.jsonl", "s3://b/me/x", "raw.jsonl", "train.path=f"):
            assert kept in text, (name, kept)
    assert "at /v1/chat/completions" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_every_tau_of_the_report_has_its_meaning():
    bench = summary(num_chunks=5)
    bench["results"][1] |= {"num_plain_steps": 30, "tokens_per_forward": 1.4}
    said = {**EVALUATION, "predicted": {"by_concurrency": [foretold("auto(6,3,12)", 1, 1.5)]}}
    found = taus(Contents(bench, said))
    assert [(name, value) for name, value, _ in found] == [
        ("tokens per chunk (plain, 1 at a time)", "2.20"),
        ("tau (eagle, 1 at a time)", "2.00"),
        ("tokens a forward (eagle, 1 at a time)", "1.40"),
        ("tokens per chunk (eagle, 1 at a time)", "2.20"),
        ("tau on held-out answers", "2.50"),
        ("tau predicted (eagle, 1 at a time)", "2.10"),
    ]
    assert "Which tau is which" in words(render(Contents(bench, said)))


def test_a_ratio_without_an_interval_is_drawn_and_printed_nowhere():
    bench = summary()
    for one in (*bench["comparisons"], *bench["by_task"]):
        one |= {"speedup_interval": None, "num_turns": 3}
    said = {**EVALUATION, "predicted": {"by_concurrency": [foretold("auto(6,3,12)", 4, 2.0)]}}
    page = words(render(Contents(bench, said)))
    assert "1.82" not in page
    assert "too few turns" in page
    assert "Speed-up" not in [name for name, _, _ in pictures(Contents(bench))]


def test_the_interval_of_a_bar_stands_out_from_it(drawn):
    """Ink on a lane of the card's colour, across the end of a bar; its ends are in figures too."""
    points = [figures.Point(1, 8.0, 7.5, 8.6)], [figures.Point(1, 6.0, 5.8, 6.1)]
    series = [figures.Series(name, at, points[at]) for at, name in enumerate(("plain", "eagle"))]
    picture = str(figures.against_load(series, "TPOT, ms", "requests at a time"))
    bars = re.findall(r"<g><title>(.*?)</title>(.*?)</g>\s*</g>", picture, re.S)
    assert [name for name, _ in bars] == ["7.5 to 8.6", "5.8 to 6.1"]
    assert all("var(--ink)" in drawn and "var(--series" not in drawn for _, drawn in bars)
    assert picture.count("var(--card)") >= 2
    assert "5.8 to 6.1</text>" in picture or "5.8 to 6.1</tspan>" in picture


@needs_chromium
def test_a_browser_draws_it_no_wider_than_the_screen(tmp_path, whole, drawn):
    """On a phone and on a desk; in frames, as a browser's window is no narrower than 500 pixels."""
    widths = (390, 1200, 1280)
    measured = """<script>
      const low = one => one.getBoundingClientRect().height < 90;
      const small = [...document.querySelectorAll("svg")].filter(low).length;
      const over = [...document.querySelectorAll(".scroll")].filter(
        one => one.scrollWidth > one.clientWidth).length;
      const bars = [...document.querySelectorAll("figure g:has(> title)")].map(one => {
        const box = one.getBoundingClientRect();
        return Math.max(box.width, box.height);
      });
      const row = [document.documentElement.scrollWidth, innerWidth, small, over, bars];
      parent.postMessage(row, "*");
    </script></body>"""
    report, page = tmp_path / "report.html", tmp_path / "page.html"
    report.write_text(whole.replace("</body>", measured), encoding="utf-8")
    style = "height:5000px;border:0;width:"
    frames = (f'<iframe src="report.html" style="{style}{width}px"></iframe>' for width in widths)
    page.write_text(
        "<body><script>const all = []; addEventListener('message', told => "
        "{ all.push(told.data); document.title = JSON.stringify(all) })</script>"
        f"{''.join(frames)}</body>"
    )
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={tmp_path}/profile", "--window-size=3100,5000"]
    command += ["--virtual-time-budget=3000", "--dump-dom", page.as_uri()]
    seen = subprocess.run(command, capture_output=True, timeout=120, check=True).stdout.decode()
    found = json.loads(re.search(r"<title>(\[.*?\])</title>", seen).group(1))
    assert sorted(one[1] for one in found) == sorted(widths)
    for wide, window, small, over, bars in found:
        assert wide <= window
        assert small == 0
        assert over == 0  # no table is wider than its card
        # TPOT and throughput of two arms, speed-up of one, at six loads: each bar has caps
        assert len(bars) == 5 * 6
        assert min(bars) >= 8  # and markers take 4: the shortest interval is seen
