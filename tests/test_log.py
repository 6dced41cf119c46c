"""Progress off a terminal: lines with rate and time left. (The bar of a terminal is rich's.)"""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from eyas import log


@pytest.fixture
def lines(monkeypatch):
    """What a stage prints to a stderr that is no terminal, a line every hundredth of a second."""
    printed = io.StringIO()
    monkeypatch.setattr(log, "console", Console(file=printed, width=200))
    monkeypatch.setattr(log, "LINE_EVERY_S", 0.01)
    return lambda: printed.getvalue().splitlines()


def wait_for(lines, text):
    for _ in range(500):
        if any(text in line for line in lines()):
            return
        log.time.sleep(0.01)
    raise AssertionError(lines())


def test_a_stage_that_does_not_move_still_prints_lines(lines):
    with log.progress_bar("capture"):
        wait_for(lines, "capture   preparing, 0 s")


def test_a_line_says_how_far_how_fast_and_how_long_still(lines):
    with log.progress_bar("train") as track:
        track(0, 100, "loss 2.31")
        track(10)
        wait_for(lines, "train     10 of 100")
        track(100, 100, "loss 1.02")
        wait_for(lines, "100 of 100, ")
    assert any("/s, 0:00:0" in line and line.endswith("loss 1.02") for line in lines())


def test_sizes_have_a_unit_that_fits():
    texts = "0 bytes, 999 bytes, 4.12 kB, 5.37 GB, 2e+03 TB"
    assert ", ".join(map(log.size_text, (0, 999, 4120, 5.368e9, 2e15))) == texts


def test_a_resumed_stage_counts_its_rate_from_where_it_began():
    progress = log._StageProgress()
    progress.track(900, 1000)
    since = progress._first[0]
    progress.track(910)
    assert progress.line(since + 5) == "910 of 1,000, 2.0/s, 0:00:45 left"


def test_a_new_part_of_a_stage_has_a_rate_of_its_own():
    progress = log._StageProgress()
    progress.track(50, 50)
    progress.track(0, 10, "readings")
    since = progress._first[0]
    progress.track(2, 10, "readings")
    assert progress.line(since + 4) == "2 of 10, 0.5/s, 0:00:16 left, readings"
