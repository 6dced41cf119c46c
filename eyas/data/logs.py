"""Requests out of the logs of servers, by consent and by a stable sample. A kind of log is one
entry of LOGS; `shapes` reads what a request says.

    OpenAI body     {"model": ..., "messages": [...], "metadata": {...}, "user": ...}; of the
                    Responses API {"input": ..., "instructions": ...}
    Langfuse        {"id": ..., "sessionId": ..., "userId": ..., "input": ..., "output": ...}
    vLLM 0.32       ... DEBUG 11-22 10:00:00 [...:76] Request ID JSON body: {...}
                    (RequestLogger.log_request_body: --enable-log-requests --log-level debug)
    SGLang 0.5.23   [2026-11-22 10:00:00] {"event": "request.received.openai", "obj": {...},
                    "headers": {...}}   (utils/request_logger.py: --log-requests
                    --log-requests-level 3 --log-requests-format json)

Of what no consent covers only the place is kept. The pickles of SGLang's --dump-requests-folder,
which run code when they are loaded, are not read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from eyas.data.streams import Unreadable
from eyas.settings import Settings

SGLANG_CUT = 2048  # characters of each text at --log-requests-level 2
YES = frozenset({"true", "yes", "1", "granted"})


class LogConfig(Settings):
    """What allows training on logged requests, and which of them are taken.

    A field of a record is named by its path, as `metadata.training` or `headers.x-training`, and
    must say yes (true, yes, 1, granted), or hold VALUE where `PATH=VALUE` is given.
    """

    consent: str | None = Field(
        None, description="PATH or PATH=VALUE of each request's own consent"
    )
    basis: str | None = Field(
        None,
        min_length=1,
        description="why requests without a consent of their own may be used, e.g. the contract",
    )
    opt_out: str | None = Field(
        None, min_length=1, description="PATH or PATH=VALUE by which a request refuses"
    )
    share: float = Field(
        1.0, gt=0, le=1, description="of the users (of requests, where none is named)"
    )
    max_per_user: int | None = Field(None, ge=1, description="requests of each user")

    @model_validator(mode="after")
    def _has_basis(self) -> LogConfig:
        if bool(self.consent) == bool((self.basis or "").strip()):
            raise ValueError(
                "log needs one stated basis: `consent: metadata.training`, the field by which "
                "each request agrees, or `basis: ...`, why all of them may be used"
            )
        return self


LOG_REASONS = {  # of readable requests that are not taken, with their meaning
    "consent": "a logged request that no consent covers",
    "sample": "a logged request outside the sample",
    "user limit": "a logged request of a user of whom enough were taken",
}


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """A request of a log. record: where consent is looked for."""

    body: dict[str, Any]
    record: dict[str, Any]
    id: str | None = None
    user: str | None = None

    @property
    def row(self) -> dict[str, Any]:
        """What `shapes` reads."""
        keys = ("messages", "prompt", "system", "tools", "functions")
        kept = {key: self.body[key] for key in keys if self.body.get(key) is not None}
        return {**kept, "id": self.id} if self.id else kept


def _openai(record: dict[str, Any], body: dict[str, Any] | None = None) -> LoggedRequest:
    named = _text(record, "id", "request_id"), _text(record, "user")
    return LoggedRequest(record if body is None else body, record, *named)


def _responses(record: dict[str, Any]) -> LoggedRequest:
    """OpenAI's Responses API: a text, or items, of which messages have roles."""
    given = record["input"]
    if isinstance(given, list):  # one without a role is a tool's call or answer
        given = [
            one if one.get("role") else {"role": "tool"}
            for one in given
            if isinstance(one, dict)
            and (one.get("role") or one.get("type") not in ("reasoning", "message"))
        ]
    body = {"messages" if isinstance(given, list) else "prompt": given}
    body |= {"system": record.get("instructions"), "tools": record.get("tools")}
    return _openai(record, body)


def _langfuse(record: dict[str, Any]) -> LoggedRequest | None:
    if record.get("type", "GENERATION") != "GENERATION":
        return None
    given = _value(record["input"]) or record["input"]
    if isinstance(given, list):
        given = {"messages": given}
    elif not isinstance(given, dict):
        given = {"prompt": given}
    named = _text(record, "id"), _text(record, "userId", "userid", "user_id")
    return LoggedRequest(given, record, *named)


def _sglang(record: dict[str, Any]) -> LoggedRequest | None:
    if record["event"] != "request.received.openai":
        return None  # others repeat it: without its roles, or with the answer
    body = record.get("obj")
    if not isinstance(body, dict):
        raise Unreadable("a logged request is not an object")
    if _is_cut(body):
        raise Unreadable("a logged request is cut: take --log-requests-level 3")
    return LoggedRequest(body, record, _text(body, "rid"), _text(body, "user"))


def _is_cut(value: Any) -> bool:
    """Whether SGLang shortened a text: half of 2,048 characters, "...", and half."""
    if isinstance(value, str):
        return len(value) == SGLANG_CUT + 3 and value[SGLANG_CUT // 2 :].startswith("...")
    values = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | list) and any(map(_is_cut, values))


@dataclass(frozen=True, slots=True)
class LogKind:
    """How one server logs requests.

    keys: of a record, in lower case; read: its request, or None; prefix: of any line of its log;
    line: of a request's line, with groups `json` and, if it is there, `id`; cut: what to do about a
    line that is no JSON.
    """

    name: str
    keys: frozenset[str]
    read: Callable[[dict[str, Any]], LoggedRequest | None]
    prefix: str = ""
    line: re.Pattern[str] | None = None
    cut: str = ""


# Patterns are anchored at the first bracket: what a user wrote stands behind it and cannot pass for
# a record. A record is of the first kind whose keys it has.
LOGS = (
    LogKind(
        "SGLang",
        frozenset({"event", "timestamp"}),
        _sglang,
        prefix=r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d",
        line=re.compile(r"\[[\d :,-]+\] (?P<json>\{.*)", re.S),
    ),
    LogKind(
        "vLLM",
        frozenset({"messages", "model"}),
        _openai,
        prefix=r"(?:\([^)\n]*\) )?[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[",
        line=re.compile(r"[^\]]*\] Request (?P<id>\S+) JSON body: (?P<json>.*)", re.S),
        cut=": start vLLM without --max-log-len",
    ),
    LogKind("traces of Langfuse", frozenset({"input", "output", "sessionid"}), _langfuse),
    LogKind("observations of Langfuse", frozenset({"input", "type", "traceid"}), _langfuse),
    LogKind("OpenAI bodies", frozenset({"messages"}), _openai),
    LogKind("OpenAI bodies of completions", frozenset({"prompt"}), _openai),
    LogKind("OpenAI bodies of responses", frozenset({"input"}), _responses),
)
LOG_LINE = re.compile("|".join(f"^{kind.prefix}" for kind in LOGS if kind.prefix).encode(), re.M)


def looks_logged(columns: Collection[str]) -> bool:
    """Whether rows have the keys of a log, which no published set of prompts has together."""
    lower = {name.lower() for name in columns}
    return any(len(kind.keys) > 1 and kind.keys <= lower for kind in LOGS)


def logged_request(value: Any) -> LoggedRequest | None:
    """The request in a value of a log; None for a line about anything else.

    Raises Unreadable for a request that was cut, or whose text was not logged.
    """
    record = _of_line(value) if isinstance(value, str) else value
    if record is None:
        return None
    if not isinstance(record, dict):
        raise Unreadable("not an object")
    keys = {str(key).lower() for key in record}
    for kind in LOGS:
        if kind.keys <= keys:
            return kind.read(record)
    names = ", ".join(kind.name for kind in LOGS)
    raise Unreadable(f"no record known here, with the text of a request: {names}")


def _of_line(line: str) -> dict[str, Any] | None:
    for kind in LOGS:
        if kind.line and (found := kind.line.match(line)):
            try:
                record = json.loads(found["json"])
            except (ValueError, RecursionError) as error:
                raise Unreadable(f"a logged request is cut, or not JSON{kind.cut}") from error
            if not isinstance(record, dict):
                raise Unreadable("a logged request is not an object")
            named = found.groupdict().get("id")
            return {**record, "request_id": named} if named else record
    return None


class RequestSampler:
    """Which requests of one source are taken, in order."""

    def __init__(self, config: LogConfig) -> None:
        self._config = config
        self._taken: Counter[bytes] = Counter()

    def check(self, request: LoggedRequest) -> None:
        """Count a request as taken, or raise Unreadable with one of LOG_REASONS."""
        config, record = self._config, request.record
        if config.consent and not says(record, config.consent):
            raise Unreadable(f"{config.consent} does not say yes", "consent")
        if config.opt_out and says(record, config.opt_out):
            raise Unreadable(f"refused by {config.opt_out}", "consent")
        key = request.user or request.id or json.dumps(request.row, sort_keys=True, default=str)
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8]
        if int.from_bytes(digest) >= config.share * 2**64:
            raise Unreadable(f"outside the share of {config.share:g}", "sample")
        if request.user and config.max_per_user:
            if self._taken[digest] >= config.max_per_user:
                raise Unreadable(f"more than {config.max_per_user} of one user", "user limit")
            self._taken[digest] += 1


def says(record: Any, field: str) -> bool:
    """Whether the field PATH of a record says yes, or PATH=VALUE holds the value; or an item of it,
    if it is a list. Names that hold dots are found too.
    """
    path, _, value = field.partition("=")
    accepted = {value.casefold()} if value else YES
    found = _at(record, path)
    return any(
        isinstance(item, str | int | bool) and str(item).strip().casefold() in accepted
        for item in (found if isinstance(found, list) else [found])
    )


def _at(record: Any, path: str) -> Any:
    record = _value(record)
    if not isinstance(record, dict):
        return None
    if path in record:
        return record[path]
    dots = (at for at, sign in enumerate(path) if sign == ".")
    found = (_at(record[path[:at]], path[at + 1 :]) for at in dots if path[:at] in record)
    return next((one for one in found if one is not None), None)


def _value(value: Any) -> Any:
    """A value of a table, which may hold objects as JSON or as maps (pairs)."""
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return None
    is_map = isinstance(value, list) and all(isinstance(one, tuple) for one in value)
    return dict(value) if is_map else value


def _text(record: Any, *paths: str) -> str | None:
    """The first field that holds something: ids and users may be numbers."""
    found = (_at(record, path) for path in paths)
    return next((str(one) for one in found if one), None)
