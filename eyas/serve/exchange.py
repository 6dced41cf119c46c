"""One HTTP request from its arrival to its end: who asks, what came of it, and what the log tells
of it. No text.
"""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest

from eyas.serve.completion import Answer
from eyas.serve.fields import TAG
from eyas.serve.refusal import ApiError

CONSENT_HEADER, TAG_HEADER = "x-eyas-consent", "x-eyas-tag"
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_TAG = re.compile(TAG)


@dataclass
class Exchange:
    """One HTTP request, for the log and the metrics. id: the client's own, if it sent one that can
    be logged.

    answers, tags: one, or one for each instance of a prediction. tag, consents: what the client
    says of all, by header.
    """

    http: HttpRequest
    endpoint: str
    id: str
    client: str = ""
    tag: str | None = None
    consents: bool = False
    answers: list[Answer] = field(default_factory=list)
    tags: list[str | None] = field(default_factory=list)
    failure: str | None = None  # in one word
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, http: HttpRequest) -> Exchange:
        """Of a request that has a route."""
        sent = http.headers.get("x-request-id", "")
        return cls(
            http,
            http.scope["route"].path,
            sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex,
        )

    def read_headers(self) -> None:
        """Take tag and consent from the headers. Raises ApiError for values that are none."""
        tag = self.http.headers.get(TAG_HEADER)
        if tag is not None and not _TAG.fullmatch(tag):
            raise ApiError(400, f"{TAG_HEADER}: give up to 32 letters, digits and _.:-", TAG_HEADER)
        consent = self.http.headers.get(CONSENT_HEADER, "no").strip().lower()
        if consent not in ("yes", "no"):
            raise ApiError(400, f"{CONSENT_HEADER}: give yes or no", CONSENT_HEADER)
        self.tag, self.consents = tag, consent == "yes"

    def facts(self, status: int) -> dict[str, Any]:
        """What the log tells: who, what, how long; no text."""
        facts: dict[str, Any] = {
            "request_id": self.id,
            "endpoint": self.endpoint,
            "status": status,
            "client": self.client,
            "ms": round(1000 * (time.perf_counter() - self.started), 1),
        }
        if self.failure is not None:
            facts["failure"] = self.failure
        if self.answers:
            rounds, emitted = (
                sum(counts)
                for counts in zip(*(one.rounds_and_tokens for one in self.answers), strict=True)
            )
            firsts = [
                one.first_at - one.started for one in self.answers if one.first_at is not None
            ]
            facts |= {
                "num_prompt_tokens": sum(one.num_prompt_tokens for one in self.answers),
                "num_output_tokens": sum(one.num_tokens for one in self.answers),
                "finish_reasons": [ending for one in self.answers for ending in one.endings],
                "tau": round(emitted / rounds, 3) if rounds else None,
                "ttft_ms": round(1000 * min(firsts), 1) if firsts else None,
            }
        return facts
