"""Rows of sources for tests, what an assistant says, which no prompt may hold, and a server."""

from __future__ import annotations

import gzip
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eyas.data.ledger import SourceRow

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
SAID_BY_ASSISTANT = "SAID-BY-ASSISTANT"


def shared(name: str) -> Path:
    """A file or folder of data beside this checkout. Without it the test is skipped."""
    if not (SHARED / name).exists():
        pytest.skip(f"no {SHARED / name}")
    return SHARED / name


def real_messages(name: str, count: int) -> list[list[dict[str, Any]]]:
    """Conversations of people."""
    with gzip.open(shared(f"{name}.jsonl.gz"), "rt", encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in itertools.islice(lines, count)]


def real_rows(name: str, count: int) -> list[SourceRow]:
    users = ((one for one in said if one["role"] == "user") for said in real_messages(name, count))
    return [row(*(one["content"] for one in of_user), source=name) for of_user in users]


def row(*turns: str, source: str = "set", **more: Any) -> SourceRow:
    return SourceRow(
        source, **{"licence": "MIT", "where": "set.jsonl:1", "id": None, "turns": turns} | more
    )


def openai(*turns: Any, **more: Any) -> dict[str, Any]:
    """A conversation in OpenAI's form, answered after each turn."""
    answer = {"role": "assistant", "content": SAID_BY_ASSISTANT}
    said = ({"role": "user", "content": turn} for turn in turns)
    return {**more, "messages": [message for one in said for message in (one, answer)]}


def sharegpt(*turns: Any, **more: Any) -> dict[str, Any]:
    """A conversation in ShareGPT's form, answered after each turn."""
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    said = [{"from": names[m["role"]], "value": m["content"]} for m in openai(*turns)["messages"]]
    return {**more, "conversations": said}


def json_lines(rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def written(path: Path, rows: Any) -> str:
    path.write_text(json_lines(rows), encoding="utf-8")
    return str(path)


@contextmanager
def served(handler: Callable[..., Any]) -> Iterator[str]:
    """The URL of a server on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
