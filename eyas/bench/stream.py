"""A streamed answer, read from server-sent events of OpenAI's chat completions.

Servers differ: a first chunk with a role and no text; `reasoning_content` or `reasoning`; several
tokens in a chunk, several chunks in a read; usage in the last chunk, in every chunk, beside
`choices: null`, or nowhere; llama.cpp's `timings`; comments; CRLF; errors as events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from eyas.client import StreamPiece, StreamRecord, error_message, unbroken

TEXTS = ("reasoning_content", "reasoning", "content")  # in a delta, as a reader sees them


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. Times are ms since the request; with an `error`, all figures are zero.

    accept_hist: from usage.eyas, if tells_rounds. counted_by: "usage", "timings", or "" (no tokens
    are counted). num_accepted_drafts: llama.cpp's.
    """

    ttft_ms: float = 0.0
    e2e_ms: float = 0.0
    # gaps between chunks of one or several tokens, as a reader sees them
    itl_ms: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str = ""
    text: str = ""
    accept_hist: list[int] = field(default_factory=list)
    error: str = ""
    counted_by: str = "usage"
    tells_rounds: bool = False
    num_accepted_drafts: int | None = None


def read_reply(record: StreamRecord) -> Reply:
    """The reply in a stream. The first text, not the first chunk, is the first token."""
    if record.error:
        return Reply(error=record.error)
    try:
        return _reply(events(record.pieces))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return Reply(error=f"not a stream of chat completions: {type(error).__name__}: {error}")


def _reply(timed_events: Iterable[tuple[float, dict[str, Any]]]) -> Reply:
    times, texts, finish_reason = [], [], ""
    usage: Mapping[str, Any] = {}
    timings: Mapping[str, Any] = {}
    for at, event in timed_events:
        if "error" in event or event.get("object") == "error":
            return Reply(error=error_message(json.dumps(event).encode()))
        usage, timings = event.get("usage") or usage, event.get("timings") or timings
        for choice in event.get("choices") or ():
            text = _text(choice.get("delta") or {})
            finish_reason = choice.get("finish_reason") or finish_reason
            if text or choice.get("finish_reason"):
                times.append(at)
                texts.append(text)
    if not finish_reason:
        return Reply(error="the stream ended before the answer did")
    of_text = [at for at, text in zip(times, texts, strict=True) if text]
    rounds = usage.get("eyas") or {}
    num_prompt_tokens, num_output_tokens, counted_by = 0, 0, ""
    if usage:
        num_prompt_tokens, num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        counted_by = "usage"
    elif "predicted_n" in timings:
        num_prompt_tokens = timings.get("prompt_n", 0) + timings.get("cache_n", 0)
        num_output_tokens, counted_by = timings["predicted_n"], "timings"
    num_accepted, accept_hist = timings.get("draft_n_accepted"), rounds.get("accept_hist", [])
    counts = [num_prompt_tokens, num_output_tokens, num_accepted or 0, *accept_hist]
    if odd := [value for value in counts if type(value) is not int]:
        raise TypeError(f"a count is {odd[0]!r}")
    return Reply(
        ttft_ms=times[0],
        e2e_ms=times[-1],
        itl_ms=[after - before for before, after in pairwise(of_text)],
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        finish_reason=str(unbroken(finish_reason)),
        text=unbroken("".join(texts)),
        accept_hist=accept_hist,
        counted_by=counted_by,
        tells_rounds="accept_hist" in rounds,
        num_accepted_drafts=num_accepted,
    )


def _text(delta: Mapping[str, Any]) -> str:
    calls = (call.get("function") or {} for call in delta.get("tool_calls") or ())
    called = ((call.get("name") or "") + (call.get("arguments") or "") for call in calls)
    return "".join([*(delta.get(name) or "" for name in TEXTS), *called])


def events(pieces: Iterable[StreamPiece]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The JSON of each `data:` line but [DONE], with the time of the piece that completed it."""
    rest = b""
    for at, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if data and len(data) < len(line.strip()) and data != b"[DONE]":
                yield at, json.loads(data)
