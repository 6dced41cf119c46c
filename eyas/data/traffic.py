"""Requests out of the logs of servers and gateways, by consent and by a stable sample.

Knows what each log looks like and where it says who asked; what a request says is read by `shapes`.
What no consent covers is counted by its place, and neither its text nor its user is kept.

    OpenAI body     {"model": ..., "messages": [...], "metadata": {...}, "user": ...}
    vLLM 0.32       ... DEBUG 11-22 10:00:00 [...:76] Request ID JSON body: {...}
                    (RequestLogger.log_request_body: --enable-log-requests --log-level debug)
    SGLang 0.5.23   [2026-11-22 10:00:00] {"event": "request.received.openai", "obj": {...},
                    "headers": {...}}   (utils/request_logger.py: --log-requests
                    --log-requests-level 3 --log-requests-format json)
    LiteLLM 1.109   StandardLoggingPayload (types/utils.py), as its object stores get it
    Langfuse        an observation of type GENERATION (blob export and API of SDK 5.0)

SGLang's --dump-requests-folder holds pickles, which run code when they are loaded: they are not
read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.data.streams import Unreadable

# Anchored at the first bracket: what a user wrote stands behind it and cannot pass for a record.
VLLM_BODY = re.compile(r"[^\]]*\] Request (\S+) JSON body: (.*)", re.S)
SGLANG_LINE = re.compile(r"\[[\d :,-]+\] (\{.*)", re.S)
SGLANG_CUT = 2048  # characters of each text at --log-requests-level 2
YES = frozenset({"true", "yes", "1", "granted"})
NAMES_OF_LOGS = (
    "OpenAI bodies, and logs of vLLM, SGLang, LiteLLM or Langfuse with the text of requests"
)
# Keys of records that only a log has: such a file is no published set of prompts.
LOG_KEYS = (
    frozenset({"event", "obj", "timestamp"}),
    frozenset({"call_type", "model_parameters", "messages"}),
    frozenset({"input", "traceId", "type"}),
    frozenset({"input", "trace_id", "type"}),
    frozenset({"model", "messages"}),
)


class TrafficConfig(BaseModel):
    """What allows to train on logged requests, and which of them are taken.

    Fields of a record are named by their path, as `metadata.training` or `headers.x-training`; the
    field must say yes (true, yes, 1, granted), or hold VALUE where `PATH=VALUE` is given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    consent: str | None = Field(
        default=None, description="PATH or PATH=VALUE of each request's own consent"
    )
    basis: str | None = Field(
        default=None,
        min_length=1,
        description="why requests without a consent of their own may be used, e.g. the contract",
    )
    opt_out: str | None = Field(
        default=None, min_length=1, description="PATH or PATH=VALUE by which a request refuses"
    )
    share: float = Field(
        default=1.0, gt=0, le=1, description="of the users (of requests, where none is named)"
    )
    max_per_user: int | None = Field(default=None, ge=1, description="requests of each user")

    @model_validator(mode="after")
    def _has_basis(self) -> TrafficConfig:
        if bool(self.consent) == bool((self.basis or "").strip()):
            raise ValueError(
                "traffic needs one stated basis: `consent: metadata.training`, the field by which "
                "each request agrees, or `basis: ...`, why all of them may be used"
            )
        return self


class NotConsented(Unreadable):
    """A request that nobody agreed to train on."""

    reason = "consent"


class NotSampled(Unreadable):
    """A request outside the sample."""

    reason = "sample"


class OverUserLimit(Unreadable):
    """A request of a user of whom enough were taken."""

    reason = "user limit"


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request of a log: its body, id and user, and the record in which settings find consent."""

    body: dict[str, Any]
    record: dict[str, Any]
    id: str | None = None
    user: str | None = None

    @property
    def row(self) -> dict[str, Any]:
        """What `shapes` reads: the messages, or the text of a completion."""
        kept: dict[str, Any] = {
            key: self.body[key] for key in ("messages", "prompt") if key in self.body
        }
        return {**kept, "id": self.id} if self.id else kept


def logged_request(value: Any) -> LoggedRequest | None:
    """The request in a value of a log; None for a line about anything else (a start, an answer).

    Raises Unreadable for a request that was cut, or whose text was not logged.
    """
    value = _of_line(value) if isinstance(value, str) else value
    if value is None or isinstance(value, LoggedRequest):
        return value
    if not isinstance(value, dict):
        raise Unreadable("not an object")
    for fits, read in _READERS:
        if fits(value):
            found = read(value)
            if found is None or found.id is None:
                return found
            # some write a number, SGLang a list
            return LoggedRequest(found.body, found.record, str(found.id), found.user)
    raise Unreadable(f"no record known here: {NAMES_OF_LOGS}")


def _of_line(line: str) -> LoggedRequest | dict[str, Any] | None:
    """A line of a server's log."""
    if found := VLLM_BODY.match(line):
        body = _object(found.group(2), "cut: start vLLM without --max-log-len")
        return LoggedRequest(body, body, found.group(1), _user(body, "user"))
    found = SGLANG_LINE.match(line)
    return _object(found.group(1), "not JSON") if found else None


def _object(text: str, otherwise: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"a logged request is {otherwise}") from error
    if not isinstance(value, dict):
        raise Unreadable("a logged request is not an object")
    return value


def _user(record: Mapping[str, Any], *keys: str) -> str | None:
    return next((str(record[key]) for key in keys if record.get(key)), None)


def _sglang(record: dict[str, Any]) -> LoggedRequest | None:
    if record["event"] != "request.received.openai":
        # others repeat it: without its roles, or with the answer
        return None
    body = record.get("obj")
    if not isinstance(body, dict):
        raise Unreadable("a logged request is not an object")
    if _is_cut(body):
        raise Unreadable("a logged request is cut: take --log-requests-level 3")
    return LoggedRequest(body, record, body.get("rid"), _user(body, "user"))


def _is_cut(value: Any) -> bool:
    """Whether a text was shortened as SGLang does: half of 2,048 characters, "...", and half."""
    if isinstance(value, str):
        return len(value) == SGLANG_CUT + 3 and value[SGLANG_CUT // 2 :].startswith("...")
    values = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list) and any(map(_is_cut, values))


def _litellm(record: dict[str, Any]) -> LoggedRequest | None:
    if record["call_type"] not in ("completion", "acompletion"):
        return None
    if not isinstance(record.get("messages"), list):
        raise Unreadable("LiteLLM did not log the messages (turn_off_message_logging)")
    metadata = record.get("metadata") or {}
    user = _user(record, "end_user") or _user(metadata, "user_api_key_user_id", "user_api_key_hash")
    return LoggedRequest({"messages": record["messages"]}, record, record.get("id"), user)


def _langfuse(record: dict[str, Any]) -> LoggedRequest | None:
    if record["type"] != "GENERATION":
        return None
    given = record["input"]
    if isinstance(given, str):  # blob exports hold it as JSON in a text
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise Unreadable("the input of a generation says nothing of who speaks") from error
    body = {"messages": given} if isinstance(given, list) else given
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise Unreadable("the input of a generation holds no messages")
    return LoggedRequest(body, record, record.get("id"), _user(record, "user_id", "userId"))


def _openai(record: dict[str, Any]) -> LoggedRequest:
    return LoggedRequest(record, record, _user(record, "id", "request_id"), _user(record, "user"))


_READERS: tuple[
    tuple[Callable[[dict[str, Any]], bool], Callable[[dict[str, Any]], LoggedRequest | None]], ...
] = (
    (lambda record: "event" in record and "timestamp" in record, _sglang),
    (lambda record: "call_type" in record and "model_parameters" in record, _litellm),
    (
        lambda record: (
            "input" in record and "type" in record and bool({"traceId", "trace_id"} & {*record})
        ),
        _langfuse,
    ),
    (lambda record: "messages" in record or "prompt" in record, _openai),
)


# Reasons of requests that can be read and are not taken.
NOT_TAKEN = frozenset(one.reason for one in (NotConsented, NotSampled, OverUserLimit))


class RequestSampler:
    """Which requests of one source are taken, in order. Holds a count by hash of each user."""

    def __init__(self, config: TrafficConfig) -> None:
        self._config = config
        self._taken: Counter[bytes] = Counter()

    def check(self, request: LoggedRequest) -> None:
        """Raises NotConsented, NotSampled or OverUserLimit; else counts the request as taken."""
        config, record = self._config, request.record
        if config.consent and not says(record, config.consent):
            raise NotConsented(f"{config.consent} does not say yes")
        if config.opt_out and says(record, config.opt_out):
            raise NotConsented(f"refused by {config.opt_out}")
        key = request.user or request.id or json.dumps(request.row, sort_keys=True)
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8]
        if int.from_bytes(digest) >= config.share * 2**64:
            raise NotSampled(f"outside the share of {config.share:g}")
        if request.user and config.max_per_user:
            if self._taken[digest] >= config.max_per_user:
                raise OverUserLimit(f"more than {config.max_per_user} of one user")
            self._taken[digest] += 1


def says(record: Any, field: str) -> bool:
    """Whether the field PATH of a record says yes, or PATH=VALUE holds the value; in a list, one of
    its items does. Names that hold dots are found too.
    """
    path, _, value = field.partition("=")
    accepted = {value.casefold()} if value else YES
    found = _at(record, path)
    items = found if isinstance(found, list) else [found]
    return any(
        isinstance(item, str | int | bool) and str(item).strip().casefold() in accepted
        for item in items
    )


def _at(record: Any, path: str) -> Any:
    if isinstance(record, str) and record.lstrip().startswith("{"):  # tables hold objects as JSON
        try:
            record = json.loads(record)
        except (ValueError, RecursionError):
            return None
    if not isinstance(record, dict):
        return None
    if path in record:
        return record[path]
    dots = (at for at, sign in enumerate(path) if sign == ".")
    found = (_at(record[path[:at]], path[at + 1 :]) for at in dots if path[:at] in record)
    return next((one for one in found if one is not None), None)
