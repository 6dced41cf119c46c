"""Training runs in processes that one process forks, so that many can be killed.

    python -m tests.nursery FILE

FILE: JSON, a list of launches {config, target, features, output, size, kill}.

kill: {rank, step}: that rank is killed (SIGKILL) after that step. Every rank leaves the keys of
each step and its stderr in <output>.seen/. The last line of stdout lists the ranks' exit codes by
launch, negative for a signal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from eyas.artifact import Artifact
from eyas.errors import EyasError
from eyas.shards import Features
from eyas.train import trainer
from tests.object_stores import free_port

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 900.0  # with a rank that waits for one that is gone
UNEXPECTED = 99


def launched(launches: list[dict[str, Any]], folder: Path) -> list[list[int]]:
    """The exit codes of these launches, one after the other."""
    asked = folder / "launches.json"
    asked.write_text(json.dumps(launches))
    command = [sys.executable, "-m", "tests.nursery", str(asked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    codes: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return codes


def seen(output: str) -> dict[int, list[list[str]]]:
    """Of the last launch that did each step: the keys of its batches, in the order of the plan."""
    by_step: dict[int, dict[int, list[list[str]]]] = {}
    for path in sorted(Path(f"{output}.seen").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            for number, keys in enumerate(row["batches"]):
                by_step.setdefault(row["step"], {})[row["rank"] + number * row["size"]] = keys
    return {
        step: [keys for _, keys in sorted(batches.items())] for step, batches in by_step.items()
    }


def said(output: str, rank: int) -> str:
    """What a rank said on stderr, in all launches."""
    return "".join(
        path.read_text() for path in sorted(Path(f"{output}.seen").glob(f"*-{rank}.err"))
    )


def launch(asked: dict[str, Any], number: int) -> list[int]:
    """Fork the ranks and wait for all of them."""
    port = free_port()
    pids = [_forked(asked, number, rank, port) for rank in range(asked["size"])]
    codes: dict[int, int] = {}
    started = time.monotonic()
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            if time.monotonic() - started > PATIENCE_S:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def _forked(asked: dict[str, Any], number: int, rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = UNEXPECTED
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(asked["size"])}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        folder = Path(f"{asked['output']}.seen")
        folder.mkdir(exist_ok=True)
        with (folder / f"{number:02d}-{rank}.err").open("w") as errors:
            os.dup2(errors.fileno(), 2)
            code = _rank(asked, number, rank, folder)
    finally:
        os._exit(code)


def _rank(asked: dict[str, Any], number: int, rank: int, folder: Path) -> int:
    step, kill = trainer.training_step, asked.get("kill") or {}

    def watched(state: Any, objective: Any, batches: Any, *rest: Any) -> Any:
        figures = step(state, objective, batches, *rest)
        keys = {"step": figures.step, "rank": rank, "size": asked["size"]}
        keys["batches"] = [one.batch.keys for one in batches]
        with (folder / f"{number:02d}-{rank}.jsonl").open("a") as lines:
            lines.write(json.dumps(keys) + "\n")
        if kill.get("rank") == rank and kill["step"] == figures.step:
            os.kill(os.getpid(), signal.SIGKILL)
        return figures

    trainer.training_step = watched  # type: ignore[assignment]
    features = Artifact(asked["features"])
    sources = [Features(features, split) for split in ("train", "held_out")]
    try:
        config = trainer.TrainConfig(**asked["config"])
        trainer.train(
            config, asked["target"], sources[0], Artifact(asked["output"]), held_out=sources[1]
        )
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps([launch(one, number) for number, one in enumerate(asked)]))
