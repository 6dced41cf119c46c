"""The size of the house, held by budgets; its map and its links held to what is there.

A change that needs more bytes in a room names what it displaces, or raises the room's budget here
with a reason (docs/decisions/house.md).
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from benchmarks import house
from tests.test_architecture import ORDER

ROOT = Path(__file__).resolve().parents[1]
MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAME = re.compile(r"eyas/[\w/]+\.py(?::\w+)?")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)")
MOST_FRAMES = 8  # from a command to the loss, and from the server's worker to the forward

# KB of Python (1,000 bytes; of C++ for cpp), and what the room is for
ROOMS = {
    "data": (193, "sources, licence gate, filters, duplicates, ledger, card"),
    "engine": (176, "exact speculative decoding: scheduler, rounds, drafters, policy, sampling"),
    "model": (195, "target and head on NumPy: configs, checkpoints, the native library's calls"),
    "operators": (77, "what PyTorch computes: the head that trains, features"),
    "cpp": (255, "the native decoder"),
    "serve": (204, "the HTTP server"),
    "privacy": (139, "personal data and secrets: search, surrogates, key"),
    "features": (119, "the target's answers and its hidden states"),
    "bench": (114, "any server measured over HTTP, and watched"),
    "train": (99, "objective, optimizer, runs"),
    "cli": (121, "one file per command"),
    "top": (158, "artifacts, stores, records, errors, names of models, pages, Python's API"),
    "export": (86, "forms of other engines, check by replay, card, foretold speed"),
    "chat": (42, "chat template and tokenizer"),
    "shards": (40, "the feature format"),
    "evaluate": (53, "tau before a head is served; what it kept of its answers"),
    "gguf": (63, "a GGUF file as a target: metadata as a folder, weights read from the file"),
    "plan": (10, "tokens and bytes of a run"),
    "builtin": (4, "the packaged models and prompts"),
    "tests": (1913, "proofs"),
    "benchmarks": (317, "the scripts behind the figures of README and results"),
}
MOST_SCRIPTS, MOST_DECISIONS, MOST_DECISION_KB, MOST_DEPENDENCIES = 15, 15, 90, 20
SCRIPT_PARTS = {"held_out.py", "natural.py", "random_models.py", "servers.py", "train_step.py"}


def test_every_room_stays_within_its_budget(capsys):
    sizes = house.room_bytes(ROOT)
    with capsys.disabled():
        print("\nKB:", {room: round(size / 1000, 1) for room, size in sizes.items()})
    assert set(sizes) - {"docs"} == set(ROOMS)
    over = {
        room: f"{sizes[room] / 1000:.1f} KB of {budget}: {purpose}"
        for room, (budget, purpose) in ROOMS.items()
        if sizes[room] > budget * 1000
    }
    assert not over, over


def test_scripts_pages_and_dependencies_are_few():
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")} - SCRIPT_PARTS
    assert len(scripts) <= MOST_SCRIPTS, sorted(scripts)
    assert len([*ROOT.glob("benchmarks/gpu/*.py")]) <= 4
    pages = list((ROOT / "docs" / "decisions").glob("*.md"))
    assert len(pages) <= MOST_DECISIONS
    assert sum(path.stat().st_size for path in pages) <= MOST_DECISION_KB * 1000
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert results.count("\n") <= 150
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= MOST_DEPENDENCIES, project["dependencies"]


def test_the_map_names_what_is_there():
    for name in sorted(set(NAME.findall(MAP))):
        path, _, function = name.partition(":")
        assert (ROOT / path).is_file(), name
        if function:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
            assert function in defined, name


def test_the_map_lists_the_rooms_in_the_order_of_imports():
    listed = re.search(r"^eyas/\n(.*?)^```", MAP, re.MULTILINE | re.DOTALL)[1]
    names = "\n".join(line.strip().partition("  ")[0] for line in listed.split("\n"))
    rows = [re.findall(r"\w+(?=\.py|/)", row) for row in names.strip().split("\n\n")]
    assert list(map(set, rows)) == list(map(set, ORDER))


def own(*suffixes: str) -> list[Path]:
    folders = ("eyas", "docs", "benchmarks", "recipes", "runs", "deploy", "tests")
    return [
        path
        for path in (*ROOT.glob("*.md"), *(p for f in folders for p in (ROOT / f).rglob("*")))
        if path.suffix in suffixes
    ]


def test_links_and_named_pages_exist():
    missing = []
    for path in own(".md"):
        for link in LINK.findall(path.read_text(encoding="utf-8")):
            if not (path.parent / link).exists():
                missing.append(f"{path.relative_to(ROOT)}: {link}")
    for path in own(".py", ".yaml", ".h", ".cpp", ".md"):
        text = path.read_text(encoding="utf-8")
        for page in set(re.findall(r"docs/[\w/-]+\.md", text)):
            if not (ROOT / page).exists():
                missing.append(f"{path.relative_to(ROOT)}: {page}")
    assert not missing, missing


@pytest.mark.parametrize("name", ["README.md", "docs/results.md"])
def test_commands_of_the_documents_name_scripts_that_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for script in set(re.findall(r"benchmarks/[\w/]+\.py", text)):
        assert (ROOT / script).exists(), script


def test_settings_and_imports_are_counted(capsys):
    counts = house.counts(ROOT)
    with capsys.disabled():
        print(f"\nsettings: {counts['settings']}, by config: {counts['settings_by_config']}")
        print(f"files imported, by command: {counts['files_imported']}")
    assert counts["files_imported"]["train"] <= 70
    assert counts["class_names_with_two_meanings"] == 0


def test_few_frames_to_the_loss_and_to_the_forward(capsys):
    stacks = house.frames(ROOT)
    with capsys.disabled():
        for end, stack in stacks.items():
            print(f"\n{len(stack)} frames to {end}: {' > '.join(stack)}")
    assert set(stacks) == {*house.LOSS_ENDS, *house.FORWARD_ENDS}
    to_loss = stacks[house.LOSS_ENDS[0]]
    ours = to_loss[to_loss.index("cli/train.py:command") :]
    assert len(ours) <= MOST_FRAMES
    assert all(len(stacks[end]) <= MOST_FRAMES for end in house.FORWARD_ENDS)
    listed = re.findall(r"^\| \d+ \| `eyas/([\w/]+\.py:\w+)` \|", MAP, re.MULTILINE)
    begins = listed.index("serve/worker.py:_run")
    assert to_loss[to_loss.index("cli/train.py:command") :] == listed[:begins]
    last = stacks[house.FORWARD_ENDS[0]]
    assert last == listed[begins : begins + len(last)]
