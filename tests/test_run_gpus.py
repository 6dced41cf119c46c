"""`eyas run` with `gpus`: a stand-in for SGLang serves by our own engine, and what would run on
GPUs runs on the CPU, in the same processes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from eyas.artifact import Artifact
from eyas.cli import gpus as gpus_of_a_run
from eyas.cli.gpus import GpusConfig, refuse_lacking, running_engines, to_serve
from eyas.cli.run import RunConfig, refuse_target, run
from eyas.errors import ConfigError, EyasError, MismatchError
from eyas.serve.server import ServeConfig
from eyas.settings import validated
from eyas.train.ranks import in_processes
from tests.architectures import save_architecture
from tests.fork_server import fork_server, imported_once
from tests.tiny import tiny_target

STAND_IN = Path(__file__).with_name("sglang_stand_in")
CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Quito", "Bern", "Riga", "Seoul", "Paris", "Dakar")
GIB = 1 << 30


@pytest.fixture
def engine(monkeypatch):
    """SGLang is installed, and this machine has two GPUs."""
    root = Path(__file__).resolve().parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{STAND_IN}:{root}")
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setattr(gpus_of_a_run, "gpu_bytes", lambda: [80 * GIB, 80 * GIB])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus_of_a_run.EngineName, "version", lambda *_: (0, 5, 23))


def content(folder: Path, target: str = "builtin", **gpus) -> dict:
    prompts = folder / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"A hotel in {city}."}]} for city in CITIES]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(prompts), "licence": "CC0-1.0", "prompts_by": "human"}
    return {
        "target": target,
        "output": str(folder / "out"),
        "gpus": {"engine": "sglang", "ids": [0, 1], **gpus},
        "prompts": {"sources": [{**source, "answers_by": "none"}]},
        "generate": {"max_tokens": 64},
        "capture": {"held_out_share": 0.3},
        "train": {"epochs": 1, "batches": {"tokens": 512}, "head": {"draft_vocab_size": 1024}},
        "serve": {"engine": {"speculation": "fixed(3,2,6)"}},
        "bench": {"num_prompts": 2, "max_tokens": 16},
    }


@pytest.fixture(scope="module")
def program():
    with fork_server() as found:
        yield str(found)


def test_all_stages_by_servers_workers_and_ranks(engine, program, tmp_path, capfd, monkeypatch):
    asked = content(tmp_path)
    monkeypatch.setenv("EYAS_PROGRAM", program)
    with imported_once():
        done = {name: Artifact(url) for name, url in run(asked).items()}
    answers = done["generate"].manifest()
    assert len(answers.facts["servers"]) == 2
    assert answers.config["answered_by"] == "servers, sent messages"
    assert done["train"].manifest().config["batches"]["per_step"] == 2
    assert done["capture"].manifest().counts["held_out"] > 0
    evaluation = done["eval"].read_json("eval.json")
    assert evaluation["trees"][0]["speculation"] == "fixed(3,2,6)"
    assert "prompts" not in evaluation.get("ways", {}).get("trees", "")
    summary = done["bench"].read_json("summary.json")
    assert summary["servers"]["plain"] != summary["servers"]["eagle"]
    logs = {path.name: path.read_text() for path in (tmp_path / "out").glob("server-*.log")}
    firsts = {name: text.splitlines()[0] for name, text in logs.items()}
    assert firsts == {
        "server-generate-0.log": "on GPUs 0 share None",
        "server-generate-1.log": "on GPUs 1 share None",
        "server-plain.log": "on GPUs 0 share None",
        "server-eagle.log": "on GPUs 1 share None",
    }
    assert "verify    EXACT" in capfd.readouterr().err
    assert done["verify"].exists("report.md")
    (report,) = (tmp_path / "out").glob("verify-*/verify.json")
    assert json.loads(report.read_text())["verdict"] == "EXACT"
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/manifest.json")}
    run(asked)  # nothing starts again
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert "--engine sglang --gpus 0" in (tmp_path / "out/report.html").read_text()


@pytest.mark.parametrize(
    ("gpus", "bytes_of_gpus", "serve", "words"),
    [
        ({"ids": [0, 3]}, [80 * GIB], {}, "GPU 3 is not there: PyTorch sees 1"),
        ({}, [1 << 20, 1 << 20], {}, "capture holds the target on one"),
        ({"ids": [0]}, [60 << 20], {}, "raise gpus.per_server"),
        ({}, [80 * GIB] * 2, {"threads": 2}, "threads: SGLang has no known flag"),
    ],
)
def test_what_a_machine_lacks_is_said_before_anything_is_done(
    engine, gpus, bytes_of_gpus, serve, words, tmp_path, monkeypatch
):
    monkeypatch.setattr(gpus_of_a_run, "gpu_bytes", lambda: bytes_of_gpus)
    asked = content(tmp_path, **gpus)
    asked["serve"] = {**asked["serve"], **serve}
    with pytest.raises(ConfigError, match="this machine lacks") as raised:
        run(asked)
    assert words in raised.value.what
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"capture": {"device_map": "auto"}}, "accelerate, by which"),
        ({"serve": {"engine": {"max_length": 64}}}, "is below generate.max_length"),
        ({"train": {"start": {"head": "builtin"}}}, "train.start, which is served too"),
    ],
)
def test_what_would_end_a_run_late_is_said_first(engine, changed, words, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "accelerate" else found(name)
    )
    monkeypatch.setattr(gpus_of_a_run.EngineName, "version", lambda *_: (0, 5, 16))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match="this machine lacks") as raised:
        run(content(tmp_path) | changed)
    assert words in raised.value.what
    assert "PyTorch compiles kernels for the GPU by Triton" in raised.value.what
    assert "SGLang gives token ids from 0.5.17 on" in raised.value.what


def test_an_engine_that_serves_no_such_target_with_a_head_is_refused(engine, tmp_path):
    file = tiny_target(tmp_path / "target") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "olmo2"}))
    with pytest.raises(ConfigError, match="serves no olmo2 with a head"):
        run(content(tmp_path, str(tmp_path / "target")))


def test_on_gpus_a_target_may_be_one_that_our_engine_does_not_run(engine, tmp_path):
    target = str(save_architecture(tmp_path / "target", "deepseek_v3"))
    config = validated(RunConfig, content(tmp_path, target), "run.yaml")
    refuse_target(config)
    refuse_lacking(config.gpus, config.serve, config.generate, config.capture, config.train)
    with pytest.raises(MismatchError):
        refuse_target(config.model_copy(update={"gpus": None}))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"gpus": {"engine": "sglang", "ids": [0, 1, 2], "per_server": 2}}, "a multiple of"),
        ({"gpus": {"engine": "sglang", "ids": [1, 1]}}, "each GPU once"),
        ({"export": {"forms": ["vllm"]}}, "add its form"),
        ({"generate": {"head": "builtin"}}, "answers plainly"),
    ],
)
def test_what_contradicts_itself_is_named(tmp_path, changed, words):
    with pytest.raises(ConfigError, match=words):
        validated(RunConfig, content(tmp_path) | changed, "run.yaml")


@pytest.mark.parametrize(
    ("ids", "heads", "expected"),
    [
        ((0,), 2, [("0", "0.44"), ("0", "0.786")]),  # .44 of all, then of what is left
        ((0, 1), 3, [("0", "0.44"), ("1", None), ("0", "0.786")]),
    ],
)
def test_servers_share_gpus_in_turns(ids, heads, expected, monkeypatch, tmp_path):
    started = []

    class Running:
        def __init__(self, server, words, log):
            options = dict(zip(words, [*words[1:], ""], strict=True))
            shown = words[1].removeprefix("CUDA_VISIBLE_DEVICES=")
            started.append((shown, options.get("--mem-fraction-static")))
            self.process = self

        def wait(self):
            pass

        terminate = end = wait

    monkeypatch.setattr(gpus_of_a_run, "RunningServer", Running)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = GpusConfig(engine="sglang", ids=ids)
    servers = to_serve({f"one-{number}": None for number in range(heads)})
    with running_engines(gpus, ServeConfig(target="builtin"), servers, str(tmp_path)):
        assert started == expected


def test_a_server_that_ends_shows_its_log_and_one_of_a_killed_run_ends(
    engine, program, tmp_path, monkeypatch
):
    monkeypatch.setenv("EYAS_PROGRAM", program)
    gpus = GpusConfig(engine="sglang", args="--no-such-flag 1")
    config = ServeConfig(target="builtin")
    with (
        pytest.raises(EyasError, match="unrecognized arguments: --no-such-flag 1"),
        running_engines(gpus, config, to_serve({"plain": None}), str(tmp_path)),
    ):
        pass
    code = (
        "import sys, time; from eyas.cli.gpus import *; "
        "servers = to_serve({'plain': None}); gpus = GpusConfig(engine='sglang')\n"
        "with running_engines(gpus, ServeConfig(target='builtin'), servers, sys.argv[1]):\n"
        "    print(servers[0].url, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        url = parent.stdout.readline().strip()
        assert httpx.get(f"{url}/health").status_code == 200
        parent.send_signal(signal.SIGKILL)
    for _ in range(3000):
        try:
            httpx.get(f"{url}/health", timeout=1)
        except httpx.TransportError:
            return
        time.sleep(0.1)
    raise AssertionError("the server goes on without the run that started it")


def fails_in_rank_one() -> str:
    if os.environ["RANK"] == "1":
        raise ConfigError("no room", "make some")
    return "made"


def test_an_error_in_a_rank_is_a_message_and_its_exit_code(capfd):
    with pytest.raises(EyasError, match="exit code 2") as raised:
        in_processes(2, fails_in_rank_one)
    assert raised.value.exit_code == 2
    assert "error: no room\n  -> make some" in capfd.readouterr().err
