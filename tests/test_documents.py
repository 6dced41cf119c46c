"""What the documents say: their Python runs, and the pages that are generated are up to date."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eyas.artifact import Artifact
from eyas.features.capture import CaptureConfig, capture
from eyas.hub import resolve_target
from eyas.serve.app import ModelService, create_app
from eyas.serve.server import ServeConfig, running_app
from eyas.serve.translation import ModelInfo
from tests.stages import ROOT, write_answers

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = {
    str(page.relative_to(ROOT)): found
    for page in PAGES
    if (found := EXAMPLE.findall(page.read_text(encoding="utf-8")))
}
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = {
    name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/clients.md")
}
# The test suite's small model stands for SmolLM2, which is 30 times as large.
STAND_IN = ('"smollm2"', '"builtin"')
DIALOGUES = [
    ["I need a table for two.", "Which city?", "San Jose.", "For when?"],
    ["Find me a hotel.", "I found 3 hotels. Do you like the Clarion?"],
    ["A taxi, please.", "Where to?"],
    ["What is on at the cinema?", "There are 4 films. Do you like comedies?"],
]


def test_python_is_shown():
    assert "docs/python.md" in EXAMPLES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where examples run: out/features are there, as `eyas capture` would have left them."""
    folder = tmp_path_factory.mktemp("examples")
    target = Path(resolve_target("builtin"))
    write_answers(target, folder / "answers", DIALOGUES)
    config = CaptureConfig(target="builtin", held_out_share=0.3)
    capture(config, Artifact(str(folder / "answers")), Artifact(str(folder / "out" / "features")))
    return folder


@pytest.mark.parametrize("page", EXAMPLES)
def test_examples_run(page, folder):
    """The examples of a page, one after the other, as one program."""
    program = "\n".join(EXAMPLES[page]).replace(*STAND_IN)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", SHELL)
def test_what_a_shell_asks_a_server_is_answered(page, tooled):
    """Each `curl`, under the name that a server of the page has."""
    targets = re.findall(r"eyas serve --target (\w+)", SHELL[page])
    names = {ServeConfig(target=target).served_model for target in targets}
    asked = [block for block in BLOCK.findall(SHELL[page]) if "curl" in block]
    (name,) = {found for block in asked for found in re.findall(r'"model": "(\w+)"', block)}
    assert name in names
    engine = tooled.engine(max_length=1024)
    info = ModelInfo(name, "float32", False, engine.max_length)
    service = ModelService.of(engine, tooled.chat, info)
    with running_app(create_app(name), service) as url:
        for block in asked:
            block = block.replace("curl ", "curl -sS --fail-with-body ")
            words = ["bash", "-ec", block.replace("localhost:8000", url)]
            done = subprocess.run(words, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            assert json.loads(done.stdout)["object"] in ("chat.completion", "response")


@pytest.mark.parametrize("script", ["settings", "results"])
def test_generated_pages_are_up_to_date(script):
    """`python docs/settings.py` and `python docs/results.py` write them."""
    path = ROOT / "docs" / f"{script}.py"
    spec = importlib.util.spec_from_file_location(f"{script}_page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page()
    if script == "results":
        assert module.PICTURE.read_text(encoding="utf-8") == module.picture()


def test_contributing_names_tests_that_there_are():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:tests|benchmarks)/[\w*]+\.py", text))
    assert len(named) > 30
    assert not [name for name in named if not list(ROOT.glob(name))]


def test_people_hooks_and_ci_run_the_same_checks():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (check,) = re.findall(r"^check: .*\n((?:\t.+\n)+)", makefile, re.MULTILINE)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    for hook in hooks:
        program, command = hook["entry"].split()[:2]
        assert program == ".venv/bin/ruff"
        assert f"$(BIN)/ruff {command}" in check
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yaml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    run = (ROOT / ".ci" / "run").read_text()
    assert "make check" in run
    assert "make test" in run
