"""Rows of sources for tests, what an assistant says, which no prompt may hold, and a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from eyas.data.ledger import SourceRow

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
SAID_BY_ASSISTANT = "SAID-BY-ASSISTANT"


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
