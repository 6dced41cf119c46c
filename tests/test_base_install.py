"""What runs without PyTorch and transformers, which come with eyas[train] alone: here they cannot
be imported.
"""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from eyas.errors import extra

WITHOUT = """
import sys
sys.modules |= dict.fromkeys(["torch", "transformers"])  # an import of them fails
"""
COMMAND = "from eyas.cli.main import main\nmain()\n"
SERVE = """
import httpx
from eyas.serve.server import ServeConfig, running_app, load, create_app
config = ServeConfig(target="builtin", head="builtin", model="it")
with running_app(create_app("it"), load(config)) as url:
    asked = {"model": "it", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    for options in ({}, {"temperature": 1.0, "seed": 1}, {"regex": "[a-z]+"}):
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked | options, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"], answer.text
"""
LOAD = """
import eyas
with eyas.load("builtin", head="builtin") as llm:
    assert llm.chat("Hi", max_tokens=8).token_ids
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "name", ["", "prompts", "generate", "check", "serve", "bench", "watch", "lineage", "doctor"]
)
def test_a_command_of_the_base_install_starts(name):
    done = run(COMMAND, *filter(None, [name]), "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.lstrip().startswith("Usage")


@pytest.mark.parametrize("program", [SERVE, LOAD])
def test_a_request_is_served(program):
    done = run(program)
    assert done.returncode == 0, done.stderr


def test_a_head_is_linted_and_not_replayed():
    done = run(COMMAND, "check", "builtin", "-t", "builtin")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("OK: fits ")
    assert "\nnot replayed: it needs PyTorch: pip install 'eyas[train]'\n" in done.stdout


@pytest.mark.parametrize("name", ["train", "capture", "export"])
def test_a_command_that_needs_more_says_what(name):
    done = run(COMMAND, name, "--help")
    lines = f"error: eyas {name} needs PyTorch\n  -> pip install 'eyas[train]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", lines)


@pytest.mark.parametrize("name", ["train", "servers", "hub", "large"])
def test_the_command_for_an_extra_needs_no_index_to_find_eyas(name):
    words = shlex.split(extra(name).removeprefix("pip "))
    command = [sys.executable, "-m", "pip", *words, "--dry-run", "--no-index", "--no-deps"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"already satisfied: eyas[{name}]" in done.stdout
    assert "does not provide the extra" not in done.stdout + done.stderr
