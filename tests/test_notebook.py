"""The notebook runs from top to bottom on the test model, and is kept with the outputs of a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks are run with the group `dev`")
nbclient = pytest.importorskip("nbclient", reason="notebooks are run with the group `dev`")

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "measure.ipynb"
# the test model, and less work
STAND_IN = (
    ('TARGET, HEAD = "smollm2", "smollm2"', 'TARGET, HEAD = "builtin", "builtin"'),
    ("--num-prompts 80 --concurrency 1,2,4,8,10", "--num-prompts 16 --concurrency 1,4"),
)


def outputs(notebook) -> list:
    return [one for cell in notebook.cells for one in cell.get("outputs", [])]


def printed(notebook) -> str:
    return "".join(one.text for one in outputs(notebook) if one.output_type == "stream")


def pictures(notebook) -> int:
    shown = [one.data for one in outputs(notebook) if one.output_type == "execute_result"]
    (drawn,) = [data["text/html"] for data in shown if "<svg" in data.get("text/html", "")]
    return drawn.count("<svg")


def test_it_is_kept_with_the_outputs_of_a_run():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    text = printed(notebook)
    assert "the same without the head: True" in text
    assert text.count("80 of 80 answers identical") == 5
    assert pictures(notebook) > 1
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert "/root/" not in NOTEBOOK.read_text()


def test_it_goes_from_a_server_to_the_pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        for theirs, ours in STAND_IN:
            cell.source = cell.source.replace(theirs, ours)
    nbclient.NotebookClient(notebook, timeout=1200, kernel_name="python3").execute(
        cwd=str(tmp_path)
    )
    assert "the same without the head: True" in printed(notebook)
    assert printed(notebook).count("16 of 16 answers identical") == 2
    assert pictures(notebook) > 1
    assert not [one for one in outputs(notebook) if one.output_type == "error"]
