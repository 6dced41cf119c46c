"""docs/production.md: every command of the page, in order, in a fresh folder; tiny sizes, and in
place of SmolLM2 the packaged target with a spoilt head, which a refresh can only mend.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.builtin import general_prompts
from eyas.hub import resolve_head
from tests.fork_server import fork_server
from tests.object_stores import free_port

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/production.md").read_text()
PATIENCE_S = 600
# the command; watching looks twice a second in place of every five: requests go on meanwhile
EYAS = """
import sys
from eyas.cli.main import main
if sys.argv[1] == "watch":
    from eyas.cli import watch
    watch.POLL_S = 0.5
main()
"""
NOISE = 1.0  # of fc's weights, in their standard deviation
SIZES = {
    "eval": "-s num_prompts=24 -s max_tokens=16",
    "verify": "-s num_prompts=4 -s max_tokens=16",
    "watch": "--requests 30 --once",
    "run": "-s target=builtin -s train.start.head={head} -s prompts.max_prompts=140 "
    "-s prompts.workers=1 -s generate.max_tokens=32 -s capture.held_out_share=0.3 "
    "-s train.learning_rate=1e-3 -s train.epochs=3 -s train.stop.measurements=1 "
    "-s eval.tolerance=0.1 -s eval.num_prompts=80 -s eval.max_tokens=24 "
    "-s serve.engine.max_length=512 -s bench.num_prompts=4 -s bench.max_tokens=8",
}


def commands() -> list[str]:
    """The lines of the page's blocks, without remarks and output."""
    blocks = re.findall(r"^```\n(.*?)^```", PAGE, re.S | re.M)
    lines = [line.partition(" # ")[0].strip() for block in blocks for line in block.splitlines()]
    known = "eyas|mkdir|zcat|curl" if shutil.which("curl") else "eyas|mkdir|zcat"
    return [line for line in lines if re.match(rf"({known}) ", line)]


class Reader:
    def __init__(self, folder: Path, program: Path) -> None:
        self.folder = folder
        (folder / "eyas").symlink_to(ROOT / "eyas")
        shutil.copytree(ROOT / "runs", folder / "runs")
        self.env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
        self.env |= {"EYAS_PRIVACY_KEY": "a key of nobody's, for this test alone"}
        self.head = spoilt(folder / "served")
        self.ports = {"8000": str(free_port()), "8001": str(free_port())}
        self.servers: dict[str, subprocess.Popen[str]] = {}

    def here(self, command: str) -> str:
        """A command at this test's names and sizes."""
        line = re.sub(r"(--target )smollm2", r"\1builtin", command)
        line = re.sub(r"(--head |eyas eval |eyas export )smollm2", rf"\1{self.head}", line)
        for port, own in self.ports.items():
            line = line.replace(port, own)
        sizes = SIZES.get(line.split()[1], "") if line.startswith("eyas ") else ""
        return f"{line} {sizes.format(head=self.head)}"

    def run(self, line: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.returncode, done.stdout

    def serve(self, line: str) -> None:
        """In place of a server at the same port."""
        port = line.split("--port ")[1].split()[0]
        self.stop(port)
        server = subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.servers[port] = server
        assert any(line.startswith("serving") for line in server.stdout)

    def stop(self, *ports: str) -> None:
        for port in ports or tuple(self.servers):
            if server := self.servers.pop(port, None):
                server.terminate()
                server.wait(300)
                server.stdout.close()

    def watch(self, line: str) -> tuple[int, str]:
        """Watch a server that is asked all the while."""
        ended = threading.Event()
        url = re.search(r"http://\S+", line)[0]

        with gzip.open(general_prompts(), "rt") as lines:
            prompts = [json.loads(line)["turns"][0] for line in lines]

        def ask() -> None:
            model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
            for prompt in itertools.cycle(prompts):
                if ended.is_set():
                    return
                said = [{"role": "user", "content": prompt}]
                body = {"model": model, "messages": said, "max_tokens": 16, "temperature": 0}
                httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status()

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            return self.run(line)
        finally:
            ended.set()
            asking.join()


def spoilt(folder: Path) -> Path:
    """The packaged head with noise on fc."""
    shutil.copytree(resolve_head("builtin"), folder)
    weights = load_file(folder / "model.safetensors")
    fc = weights["fc.weight"].float()
    noise = torch.randn(fc.shape, generator=torch.Generator().manual_seed(0))
    weights["fc.weight"] = (fc + NOISE * fc.std() * noise).to(weights["fc.weight"].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def program():
    with fork_server(EYAS) as found:
        yield found


def test_every_command_of_the_page_does_what_the_page_says(tmp_path, program):
    reader = Reader(tmp_path, program)
    said: dict[str, list[str]] = {}
    try:
        for command in commands():
            line = reader.here(command)
            name = " ".join(command.split()[:2])
            if name == "eyas serve":
                reader.serve(line)
                continue
            code, text = reader.watch(line) if name == "eyas watch" else reader.run(line)
            assert code == 0, f"{command}\n{text}"
            said.setdefault(name, []).append(text)
            if name == "curl -f":  # the new head's card is watched
                url = re.search(r"http://[\w.:]+", line)[0]
                assert "\neyas:card_tau{" in httpx.get(f"{url}/metrics").text
    finally:
        reader.stop()
    assert len(said["eyas watch"]) == 2
    for text in said["eyas watch"]:
        assert json.loads(text.splitlines()[-1])["stale"] is False
    assert "goes on in gateway.jsonl" in said["eyas prompts"][1]
    (evaluation,) = (tmp_path / "out/refresh").glob("eval-*/eval.json")
    against = json.loads(evaluation.read_text())["against"]
    assert against["all"]["change_interval"][0] > 0
    assert against["general"]["change_interval"][0] > -0.1
    assert "metadata.training" in said["eyas lineage"][0]
    for answer in said.get("curl -f", ()):
        assert json.loads(answer) == {"head": "new", "before": None}


@pytest.mark.parametrize(
    "name", ["eval", "export", "lineage", "prompts", "run", "serve", "watch", "check", "verify"]
)
def test_the_page_has_each_step(name):
    assert any(line.startswith(f"eyas {name} ") for line in commands())
