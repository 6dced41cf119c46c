"""One answer on its way out: updates become text, text becomes OpenAI's chunks. Knows no HTTP and no engine but its updates.

The counts that OpenAI has no place for go under `usage.eyas`: rounds (propose + verify), accept_hist and tau.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from eyas.chat import TextStream
from eyas.engine.request import FinishReason, Update
from eyas.serve.stop import StopFilter


class Completion:
    """What one request has been given so far."""

    def __init__(self, text_stream: TextStream, num_prompt_tokens: int, stops: Sequence[str]) -> None:
        self.finish_reason: FinishReason | None = None
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0
        self.accept_hist: list[int] = []
        self._text_stream = text_stream
        self._stop = StopFilter(stops) if stops else None

    def push(self, update: Update) -> str:
        """The text that the update adds; sets finish_reason when the answer ends, by the engine or by a stop string."""
        assert self.finish_reason is None, "an update after the end"
        if update.num_accepted_drafts is not None:
            missing = update.num_accepted_drafts + 1 - len(self.accept_hist)
            self.accept_hist.extend([0] * missing)
            self.accept_hist[update.num_accepted_drafts] += 1
        self.finish_reason = update.finish_reason
        return self._plain_text(update) if self._stop is None else self._text_before_stop(update, self._stop)

    def _plain_text(self, update: Update) -> str:
        self.num_tokens += len(update.token_ids)
        text = self._text_stream.push(update.token_ids)
        return text if update.finish_reason is None else text + self._text_stream.finish()

    def _text_before_stop(self, update: Update, stop: StopFilter) -> str:
        """Token by token, so that an answer ends, and is counted, the same with rounds of one token and of many."""
        text = ""
        for token_id in update.token_ids:
            self.num_tokens += 1
            text += stop.push(self._text_stream.push([token_id]))
            if stop.hit:
                self.finish_reason = "stop"
                return text
        if update.finish_reason is not None:
            text += stop.push(self._text_stream.finish()) + stop.finish()
            if stop.hit:
                self.finish_reason = "stop"
        return text

    def usage(self) -> dict[str, Any]:
        rounds = sum(self.accept_hist)
        emitted = sum((accepted + 1) * count for accepted, count in enumerate(self.accept_hist))
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
            "eyas": {"rounds": rounds, "accept_hist": self.accept_hist, "tau": emitted / rounds if rounds else None},
        }


class Writer:
    """Writes one answer as JSON, whole or in server-sent events; what all its chunks share is written once."""

    def __init__(self, model: str, with_usage: bool = False) -> None:
        self._shared = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        shared = json.dumps({**self._shared, "object": "chat.completion.chunk"})[:-1]
        self._head = f"data: {shared}, "
        self._tail = ', "usage": null}\n\n' if with_usage else "}\n\n"
        self._role = '"role": "assistant", '

    def chunk(self, text: str) -> bytes:
        """A piece of the answer; the first one brings the role along, so that no chunk comes before the first token."""
        role, self._role = self._role, ""
        choice = f'"choices": [{{"index": 0, "delta": {{{role}"content": {json.dumps(text)}}}, "finish_reason": null}}]'
        return (self._head + choice + self._tail).encode()

    def last_chunk(self, finish_reason: FinishReason) -> bytes:
        choice = f'"choices": [{{"index": 0, "delta": {{}}, "finish_reason": "{finish_reason}"}}]'
        return (self._head + choice + self._tail).encode()

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return f'{self._head}"choices": [], "usage": {json.dumps(usage)}}}\n\n'.encode()

    def whole(self, text: str, finish_reason: FinishReason, usage: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return {**self._shared, "object": "chat.completion", "choices": [choice], "usage": usage}


DONE = b"data: [DONE]\n\n"


def error_event(body: dict[str, Any]) -> bytes:
    """An error after the first chunk is sent: the status is gone, so it comes as an event."""
    return f"data: {json.dumps(body)}\n\n".encode()
