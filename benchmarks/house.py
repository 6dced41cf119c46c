"""The size of this code base: bytes by room, files, functions, settings, imports of each command.

    python benchmarks/house.py [--root CHECKOUT] [--frames]

--frames runs `eyas train` and a server on the packaged model, and reads the call stack where the
loss and the target's forward are entered.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PORT = 18431
# Commands, the last with a hook on every call once its modules are loaded: writes stacks at ends.
DRIVER = """
import json, os, sys, threading
(ends, *lines), package, out = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
written = set()
def name(code):
    return code.co_filename.removeprefix(package) + ":" + code.co_name
def hook(frame, event, arg, package=package):  # bound: globals go first when the process ends
    if event != "call" or not frame.f_code.co_filename.startswith(package):
        return
    end = name(frame.f_code)
    if end not in ends or end in written:
        return
    stack = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(package):
            stack.append(name(frame.f_code))
        frame = frame.f_back
    if end.startswith("model/") and not any("/worker.py:" in one for one in stack):
        return
    written.add(end)
    with open(out, "a") as file:
        file.write(json.dumps([end, stack[::-1]]) + chr(10))
    if sys.argv[1] == "train" and written == set(ends):
        os._exit(0)  # no need to train on
from eyas.cli.main import build, main
for line in lines:
    sys.argv = ["eyas", *line.split()]
    if line == lines[-1]:
        build(sys.argv[1:])
        sys.setprofile(hook)
        threading.setprofile(hook)
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, line
"""
LOSS_ENDS = ("train/loss.py:batch_loss", "train/loss.py:loss_rows")
FORWARD_ENDS = ("model/native.py:verify", "model/native.py:forward")


def modules(root: Path) -> dict[str, Path]:
    """The package's modules by dotted name."""
    found = {}
    for path in sorted((root / "eyas").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.Module, known: dict[str, Path]) -> set[str]:
    """The modules that a source imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names & set(known)


def closure(name: str, graph: dict[str, set[str]]) -> set[str]:
    """A module and all that importing it loads, packages' `__init__` included."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo += graph.get(current, ())
            parts = current.split(".")
            todo += [".".join(parts[:depth]) for depth in range(1, len(parts))]
    return seen & set(graph)


def settings_of(trees: dict[str, ast.Module]) -> dict[str, int]:
    """The number of settings by class: fields of *Config, without shapes of models (eyas/model) and
    the run file's sections.
    """
    found = {}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config"):
                continue
            if name.startswith("eyas.model.") or node.name == "RunConfig":
                continue
            fields = (ast.unparse(one) for one in node.body if isinstance(one, ast.AnnAssign))
            count = sum("ClassVar" not in one and not one.startswith("_") for one in fields)
            found[f"{name.removeprefix('eyas.')}.{node.name}"] = count
    return found


def counts(root: Path) -> dict[str, Any]:
    """The counts that are read from the source of the checkout at `root`."""
    known = modules(root)
    texts = {name: path.read_text(encoding="utf-8") for name, path in known.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    graph = {name: imports(tree, known) for name, tree in trees.items()}
    lengths = []
    homes: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
            elif isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(name)
    settings = settings_of(trees)
    commands = sorted(
        name
        for name, tree in trees.items()
        if name.startswith("eyas.cli.")
        and any(isinstance(one, ast.FunctionDef) and one.name == "command" for one in tree.body)
    )
    return {
        "room_bytes": room_bytes(root),
        "files": len(known),
        "megabytes": round(sum(len(text.encode()) for text in texts.values()) / 1e6, 2),
        "lines": sum(text.count("\n") for text in texts.values()),
        "functions": len(lengths),
        "classes": sum(map(len, homes.values())),
        "mean_function_lines": round(sum(lengths) / len(lengths), 1),
        "class_names_with_two_meanings": sum(len({*at}) > 1 for at in homes.values()),
        "settings": sum(settings.values()),
        "settings_by_config": {name: count for name, count in settings.items() if count},
        "files_imported": {
            name.removeprefix("eyas.cli."): len(closure(name, graph)) for name in commands
        },
    }


def room_bytes(root: Path) -> dict[str, int]:
    """Bytes of Python of each room of the package ("top": its top level), of C++ ("cpp"), and of
    tests, benchmarks (all their text) and docs (Markdown).
    """
    sizes: dict[str, int] = defaultdict(int)
    for path in (root / "eyas").rglob("*"):
        parts = path.relative_to(root / "eyas").parts
        if path.suffix == ".py":
            sizes[parts[0] if len(parts) > 1 else "top"] += path.stat().st_size
        elif path.suffix in (".cpp", ".h"):
            sizes["cpp"] += path.stat().st_size
    for folder, suffixes in {
        "tests": (".py", ".json", ".txt"),
        "benchmarks": (".py", ".md", ".json"),
        "docs": (".md",),
    }.items():
        sizes[folder] = sum(
            path.stat().st_size
            for path in (root / folder).rglob("*")
            if path.suffix in suffixes and "__pycache__" not in path.parts
        )
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def traced(root: Path, ends: tuple[str, ...], out: Path, *lines: str) -> subprocess.Popen:
    """Start commands of the checkout at `root`, the last with the hook of DRIVER."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps([ends, *lines]), f"{root}/eyas/", str(out)],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=out.parent,
        stdout=subprocess.DEVNULL,
    )


def frames(root: Path) -> dict[str, list[str]]:
    """Call stacks of a real run: `eyas train` to the loss, the server's worker to the forward."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out, prompts = folder / "stacks.jsonl", folder / "prompts.jsonl"
        cities = ("Oslo", "Rome", "Lima", "Cairo", "Quito", "Bern", "Riga", "Seoul")
        rows = [json.dumps({"turns": [f"Find me a hotel in {city}."]}) for city in cities]
        prompts.write_text("\n".join(rows))
        stages = (
            "prompts prompts.jsonl --licence CC0-1.0 --prompts-by human -o p",
            "generate p -t builtin -o g -s max_tokens=16",
            "capture g -t builtin -o c",
            "train c -t builtin -o h -s epochs=1",
        )
        traced(root, LOSS_ENDS, out, *stages).wait()
        serve = f"serve -t builtin --head builtin --port {PORT} --speculation fixed(2,1,3)"
        server = traced(root, FORWARD_ENDS, out, serve)
        try:
            ask(f"http://127.0.0.1:{PORT}")
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
        return dict(map(json.loads, out.read_text().splitlines()))


def ask(url: str) -> None:
    """One answer of the server at `url`, which may still be loading."""
    body = {"model": "eyas", "messages": [{"role": "user", "content": "Find me a hotel."}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body | {"max_tokens": 32, "temperature": 0}).encode(),
        {"content-type": "application/json"},
    )
    for _ in range(240):
        try:
            urllib.request.urlopen(request, timeout=60).read()
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("the server did not answer within two minutes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to count")
    parser.add_argument("--frames", action="store_true", help="count call frames too, by a run")
    parser.add_argument("--quick", action="store_true", help="the same: it takes a second")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    found = counts(root)
    for end, stack in frames(root).items() if arguments.frames else ():
        print(f"{len(stack)} frames to {end}: {' > '.join(stack)}")
        found[f"frames to {end}"] = len(stack)
    for name, value in found.items():
        print(f"{name}: {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
