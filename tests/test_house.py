"""The size of the house, printed and held; its map held to the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from benchmarks import house

ROOT = Path(__file__).resolve().parents[1]
MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAME = re.compile(r"eyas/[\w/]+\.py(?::\w+)?")
MOST_FRAMES = 8  # from a command to the loss, and from the server's worker to the forward


def test_the_map_names_what_is_there():
    for name in sorted(set(NAME.findall(MAP))):
        path, _, function = name.partition(":")
        assert (ROOT / path).is_file(), name
        if function:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
            assert function in defined, name


def test_the_map_names_every_room():
    rooms = {path.name for path in (ROOT / "eyas").iterdir() if path.is_dir()} - {"__pycache__"}
    assert rooms <= set(re.findall(r"(\w+)/", MAP))


def test_settings_and_imports_are_counted(capsys):
    counts = house.counts(ROOT)
    with capsys.disabled():
        print(f"\nsettings: {counts['settings']}, by config: {counts['settings_by_config']}")
        print(f"files imported, by command: {counts['files_imported']}")
    assert counts["files_imported"]["train"] <= 50
    assert counts["class_names_with_two_meanings"] == 0


def test_few_frames_to_the_loss_and_to_the_forward(capsys):
    stacks = house.frames(ROOT)
    with capsys.disabled():
        for end, stack in stacks.items():
            print(f"\n{len(stack)} frames to {end}: {' > '.join(stack)}")
    assert set(stacks) == {*house.LOSS_ENDS, *house.FORWARD_ENDS}
    to_loss = stacks["train/loss.py:batch_loss"]
    assert len(to_loss[to_loss.index("cli/train.py:command") :]) <= MOST_FRAMES
    assert all(len(stacks[end]) <= MOST_FRAMES for end in house.FORWARD_ENDS)
