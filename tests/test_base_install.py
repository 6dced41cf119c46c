"""What runs without PyTorch and transformers, which only eyas[train] installs: importing them fails
in these processes.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import eyas
from eyas.errors import extra

WITHOUT = """
import sys
sys.modules |= dict.fromkeys(["torch", "transformers"])
"""
COMMAND = "from eyas.cli.main import main\nmain()\n"
HELP = """
from eyas.cli.main import main
for name in sys.argv[1:]:
    sys.argv = ["eyas", *filter(None, [name]), "--help"]
    try:
        main()
    except SystemExit as ended:
        print("exit code", ended.code or 0)
"""
SERVE = """
import httpx
from eyas.serve.server import ServeConfig, running_app, load, create_app
config = ServeConfig(target="builtin", head="builtin", model="it")
with running_app(create_app("it"), load(config)) as url:
    asked = {"model": "it", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    for options in ({}, {"temperature": 1.0, "seed": 1}, {"regex": "[a-z]+"}):
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked | options, timeout=300)
        assert answer.json()["choices"][0]["message"]["content"], answer.text
import eyas
with eyas.load("builtin", head="builtin") as llm:
    assert llm.chat("Hi", max_tokens=8).token_ids
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_commands_of_the_base_install_start():
    names = ["", "prompts", "generate", "check", "serve", "bench", "watch", "lineage", "doctor"]
    done = run(HELP, *names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("exit code 0") == done.stdout.count("Usage") == len(names)


def test_a_request_is_served():
    done = run(SERVE)
    assert done.returncode == 0, done.stderr


def test_a_head_is_linted_and_not_replayed():
    done = run(COMMAND, "check", "builtin", "-t", "builtin")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("OK: fits ")
    assert "\nnot replayed: it needs PyTorch: pip install 'eyas[train]'\n" in done.stdout


def test_a_command_that_needs_more_says_what():
    names = ["train", "capture", "export"]
    done = run(HELP, *names)
    needs = "error: eyas {} needs PyTorch\n  -> pip install 'eyas[train]'\n"
    assert done.stdout == "exit code 1\n" * 3
    assert done.stderr == "".join(map(needs.format, names))


def test_the_command_for_an_extra_needs_no_index_to_find_eyas():
    package = Path(eyas.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in package.rglob("*.py")]
    named = set(re.findall(r"""\bextra\(["'](\w+)["']\)""", "".join(texts)))
    assert {"train", "servers", "s3"} <= named <= set(metadata("eyas").get_all("Provides-Extra"))
    words = shlex.split(extra("train").removeprefix("pip "))
    command = [sys.executable, "-m", "pip", *words, "--dry-run", "--no-index", "--no-deps"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "already satisfied: eyas[train]" in done.stdout
    assert "does not provide the extra" not in done.stdout + done.stderr
