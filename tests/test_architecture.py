"""The house rules: imports, file names, docstrings."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "eyas"

# Data goes top to bottom: a file imports only from rows above its own, or from its own package.
ORDER = (
    ("errors", "records", "families", "fold", "code", "page", "tau", "cores"),
    ("stores",),
    ("artifact", "executor", "log", "chat", "builtin", "language", "figure", "client", "settings"),
    ("gguf",),
    ("hub", "model", "shards", "privacy"),
    ("lineage", "card", "engine", "operators"),
    ("data", "features", "train", "evaluate", "export", "serve"),
    ("bench", "plan", "llm"),
    ("cli",),
)
ROW = {name: row for row, names in enumerate(ORDER) for name in names}
WITHOUT_TORCH = (
    *("chat", "gguf", "hub", "model", "engine", "serve", "privacy", "data", "bench", "lineage"),
    "llm",
)
TORCH = ("torch", "transformers")
# import nothing of ours but the second set
PURE = {"eyas.engine.verify", "eyas.operators.ttt", "eyas.bench.metrics", "eyas.tau"}
PURE_MAY_IMPORT = {"eyas.errors", "eyas.records", "eyas.tau"}
FORBIDDEN_NAMES = {"utils", "common", "base", "helpers", "manager"}
ROLE_TOKEN = re.compile(
    r"<\|(im_start|im_end|assistant|user|system|start_header_id|end_header_id|eot_id)\|>"
)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
NAMES = sorted(MODULES)


@functools.cache
def imported(name: str) -> set[str]:
    """Modules imported anywhere in a module's source."""
    found: set[str] = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import in line {node.lineno}: write it out"
            assert node.module is not None
            found.update(
                f"{node.module}.{alias.name}"
                if f"{node.module}.{alias.name}" in MODULES
                else node.module
                for alias in node.names
            )
    return found


def ours(name: str) -> set[str]:
    return {target for target in imported(name) if target.split(".")[0] == "eyas"}


def part(name: str) -> str:
    """The entry of ORDER that a module belongs to."""
    return name.split(".")[1]


def reachable(name: str) -> set[str]:
    """A module and all of ours that it loads, packages' `__init__` included."""
    seen, todo = set(), [name]
    while todo:
        current = todo.pop()
        if current in seen or current not in MODULES:
            continue
        seen.add(current)
        todo.extend(ours(current))
        parents = current.split(".")
        todo.extend(".".join(parents[:depth]) for depth in range(1, len(parents)))
    return seen


def test_every_file_has_a_row():
    assert {part(name) for name in NAMES if name != "eyas"} <= set(ROW)


def test_imports_come_from_rows_above():
    wrong = []
    for name in NAMES[1:]:
        for target in ours(name) - {"eyas"}:
            assert target in MODULES, f"{name} imports {target}, which does not exist"
            if part(target) != part(name) and ROW[part(target)] >= ROW[part(name)]:
                wrong.append(f"{name} (row {ROW[part(name)]}) imports {target}")
    assert not wrong, wrong


def heavy_steps(name: str) -> list[str]:
    """The modules that importing `name` loads and that import torch or transformers."""
    return [
        step
        for step in reachable(name)
        if any(target.split(".")[0] in TORCH for target in imported(step))
    ]


def test_what_serves_and_measures_never_reaches_torch():
    for name in NAMES[1:]:
        if part(name) in WITHOUT_TORCH:
            assert not heavy_steps(name), f"{name} reaches torch"


def test_pure_functions_import_nothing_of_ours():
    for name in sorted(PURE):
        assert ours(name) <= PURE_MAY_IMPORT, name


def test_imported_packages_are_declared():
    """In pyproject.toml, or required by a package there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    stated = [*project["dependencies"], *(one for extra in extras for one in extra)]
    declared = {distribution(one) for one in stated}
    for name in [*declared]:
        with suppress(PackageNotFoundError):
            required = requires(name) or ()
            declared |= {distribution(one) for one in required if "extra ==" not in one}
    distributions = packages_distributions()
    missing = set()
    for package in {target.split(".")[0] for name in NAMES for target in imported(name)}:
        # features/vllm/eyas_states.py is loaded by vLLM, in vLLM's own environment
        if package not in {"eyas", "vllm", *sys.stdlib_module_names}:
            names = {distribution(one) for one in distributions.get(package, [package])}
            missing |= set() if names & declared else {package}
    assert not missing, missing


def distribution(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("-", "_")


def test_commands_are_imported_one_at_a_time():
    """The entry point reaches no torch, so that `eyas --help` is fast."""
    assert not heavy_steps("eyas.cli.main")


def test_file_names_are_nouns_of_the_field():
    for name in NAMES:
        assert not FORBIDDEN_NAMES & set(name.split(".")), name


def test_public_things_are_documented():
    missing = []
    for name, tree in TREES.items():
        missing += [] if ast.get_docstring(tree) else [name]
        for node in tree.body:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and not node.name.startswith("_") and not ast.get_docstring(node):
                missing.append(f"{name}.{node.name}")
    assert not missing, missing


def test_dunder_all_is_sorted_and_true():
    for name, tree in TREES.items():
        if name == "eyas":  # its names are imported when they are used: tests/test_api.py
            continue
        for node in tree.body:
            if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets):
                listed = ast.literal_eval(node.value)
                assert listed == sorted(listed), name
                bound = {
                    alias.asname or alias.name
                    for other in tree.body
                    if isinstance(other, ast.ImportFrom)
                    for alias in other.names
                }
                defined = ast.FunctionDef | ast.ClassDef
                bound |= {other.name for other in tree.body if isinstance(other, defined)}
                assert set(listed) <= bound, name


def test_only_chat_knows_role_tokens():
    for name in NAMES:
        if name != "eyas.chat":
            assert not ROLE_TOKEN.search(MODULES[name].read_text(encoding="utf-8")), name


def test_functions_take_seven_arguments_or_fewer():
    for name in NAMES:
        if name.startswith("eyas.cli."):  # a command's arguments are its options
            continue
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len([one for one in arguments if one.arg not in ("self", "cls")])
                assert count <= 7, f"{name}.{node.name} takes {count}"
