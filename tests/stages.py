"""Prompts on disk, tiny targets whose answers end, and processes that die while they write."""

from __future__ import annotations

import itertools
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eyas.artifact import Artifact
from eyas.chat import Chat
from eyas.model.weights import fingerprint
from eyas.records import RECORD, Answer, Prompt
from eyas.shards import Features, Sample
from tests.tiny import tiny_target

ROOT = Path(__file__).resolve().parents[1]
TURNS = ("A table for two.", "In San Jose?", "0123", "Thanks", "I would like the address.")


def patched(*places: tuple[Any, str, object]) -> Callable[[], Iterator[None]]:
    """A fixture for all of a module: each place's attribute has this value."""

    @pytest.fixture(autouse=True, scope="module")
    def all_patched() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for place, name, value in places:
                patch.setattr(place, name, value)
            yield

    return all_patched


def ending_target(folder: Path) -> Path:
    """A random target: a quarter of its vocabulary are end tokens, so an answer has about four."""
    return tiny_target(folder, eos_token_id=[2, *range(30, 110)])


def talking_target(folder: Path, strength: float = 1.8) -> Path:
    """A random target, most of whose answers of up to twelve tokens end by the end token; some are
    cut, some empty. strength: factor of the end token's logits.
    """
    tiny_target(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][2] *= strength
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def prompts_of(count: int) -> list[Prompt]:
    """Prompts of one to four turns; every fifth has a system message."""
    return [
        Prompt(
            id=f"p{number}",
            source=f"source-{number % 2}",
            licence="CC0-1.0",
            turns=tuple(
                f"{TURNS[(number + turn) % len(TURNS)]} {number}" for turn in range(1 + number % 4)
            ),
            system="Be brief." if number % 5 == 0 else None,
        )
        for number in range(count)
    ]


def write_prompts(folder: Path, prompts: Sequence[Prompt]) -> Artifact:
    artifact = Artifact(str(folder))
    artifact.begin("test")
    artifact.write_jsonl("prompts-00000.jsonl", [prompt.to_json() for prompt in prompts])
    artifact.finish("prompts", {"test": str(len(prompts))}, {}, {"prompts": len(prompts)})
    return artifact


def contents(artifact: Artifact) -> dict[str, bytes]:
    """The files of `generate` and `capture` that are the same in every run."""
    same = ("answers-", "dropped", "train", "held_out")
    return {name: artifact.read(name) for name in artifact.names() if name.startswith(same)}


def all_samples(artifact: Artifact) -> dict[str, Sample]:
    splits = (Features(artifact, split) for split in ("train", "held_out"))
    return {sample.key: sample for split in splits for sample in split}


def in_a_process(work: Callable[[], Any]) -> int:
    """The id of a forked process that does this."""
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(900)  # ends a child that hangs
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ended(pid: int) -> int:
    """The exit status of a process when it has ended, below zero for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at_a_write(name: str, work: Callable[[], Any], output: Artifact) -> dict[Path, int]:
    """Do this in a process that is killed as it writes `name`; the times of output's shards."""
    write = Artifact.write

    def write_or_die(self: Artifact, written: str, data: bytes) -> None:
        if written == name:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, written, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Artifact, "write", write_or_die)
        assert ended(in_a_process(work)) == -signal.SIGKILL
    return {path: path.stat().st_mtime_ns for path in Path(output.url).glob("*.safetensors")}


def write_answers(folder: Path, output: Path, dialogues: Sequence[Sequence[str]]) -> Artifact:
    """A finished `generate` artifact of dialogues, in which user and assistant alternate."""
    chat, artifact, rows = Chat(folder), Artifact(str(output)), []
    for number, turns in enumerate(dialogues):
        roles = itertools.cycle(("user", "assistant"))
        said: Any = [
            {"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)
        ]
        for turn in range(len(turns) // 2):
            messages = said[: 2 * turn + 2]
            prompt_ids, answer_ids = map(tuple, chat.answered(messages))
            rows.append(
                Answer(
                    *(f"k{number}/{turn}", f"p{number}", "made up", "CC0-1.0", turn),
                    *(tuple(messages), prompt_ids, answer_ids, "stop", 0.0),
                )
            )
    artifact.begin("made by a test")
    artifact.write_jsonl("answers-00000.jsonl", [row.to_json() for row in rows])
    settings = {"target_fingerprint": fingerprint(folder), "record": RECORD}
    artifact.finish("generate", settings, {}, {"answers": len(rows)}, {"target": str(folder)})
    return artifact
