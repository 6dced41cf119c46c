"""What a request may cost, who may send one, and the error that a client gets."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import math
import os
import re
import stat
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.errors import ConfigError, EyasError, InputError, MissingInputError
from eyas.settings import Flag

log = logging.getLogger("eyas.serve")
ADDRESS = "Address and keys"  # panel of flags in --help
KEYS_VARIABLE = "EYAS_API_KEYS"
MAX_HOST = 64  # characters of a host that a message repeats
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]*)?")
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]+)?")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_CLIENTS = 10_000  # with a stored rate
FAILURES_PER_MINUTE = 60  # wrong keys of one address
MAX_KEYS_BYTES = 1 << 20  # in the file of API keys
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
# Sent before the body is read: its rest must not be read as a request.
_CLOSES = (403, 408, 413)


class LimitsConfig(BaseModel):
    """Who may send requests, and what they may cost. Without API keys every client that can connect
    is served. Hosts are checked where they are given, and without keys on the loopback.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    api_keys: Annotated[Path | None, Flag(panel=ADDRESS)] = Field(
        None, description="file, a key a line, read anew; EYAS_API_KEYS adds to it"
    )
    allowed_hosts: Annotated[list[str], Flag("--allowed-host", ADDRESS)] = Field(
        [], description="other names in the header Host; *: any"
    )
    allowed_origins: Annotated[list[str], Flag("--allowed-origin", ADDRESS)] = Field(
        [], description="pages of https://HOST may ask (CORS); *: any"
    )
    heads: Path | None = Field(
        None, description="folder: POST /v1/head serves another head of it; needs API keys"
    )
    requests_per_minute: int | None = Field(
        None, ge=1, description="of one key, or of one address without keys"
    )
    max_queue: int = Field(256, ge=0, description="samples that may wait beside those that run")
    max_body_bytes: int = Field(1 << 20, ge=1024, description="of a request")
    max_connections: int = Field(
        512, ge=1, description="at once; idle ones make room, then requests get 503"
    )
    body_timeout_s: float = Field(
        30.0, gt=0, description="for a request's headers to arrive, and for its body"
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="for a whole answer, sending included"
    )
    shutdown_s: float = Field(30.0, gt=0, description="for running requests after SIGINT, SIGTERM")

    @model_validator(mode="after")
    def _has_names(self) -> LimitsConfig:
        for one in self.allowed_hosts:
            if one != "*" and (not one or named_host(one) != one.lower()):
                hint = "give a name alone, as in eyas.example.org"
                raise ConfigError(f"{one!r} is no name of a host", hint)
        for one in self.allowed_origins:
            if one != "*" and not _ORIGIN.fullmatch(one):
                hint = "give scheme and host alone, as in https://chat.example.org"
                raise ConfigError(f"{one!r} is no origin of web pages", hint)
        return self


@dataclass(eq=False)
class ApiError(Exception):
    """An error answer: HTTP status, OpenAI's `message`, `param`, `code`; retry_after in seconds."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def headers(self) -> dict[str, str]:
        closes = self.status in _CLOSES or self.code == "shutting_down"
        headers = {"connection": "close"} if closes else {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        return headers

    def body(self) -> dict[str, Any]:
        """In OpenAI's form."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _KINDS.get(self.status, default)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def event(self) -> bytes:
        """As a server-sent event."""
        return f"data: {json.dumps(self.body())}\n\n".encode()


def unsupported(param: str, what: str) -> ApiError:
    """The error for a field or a value that this server does not support."""
    return ApiError(400, f"{param}: {what}", param, "unsupported_parameter")


def refused_by_engine(error: InputError) -> ApiError:
    """The engine's error as the client gets it; `param` is the setting that it begins with."""
    first = error.what.removeprefix("the ").split(" ", 1)[0]
    is_setting = "_" in first and first.replace("_", "").isalnum()
    is_setting = is_setting or first in ("temperature", "regex", "grammar", "seed")
    message = f"{error.what}: {error.hint}" if error.hint else error.what
    return ApiError(400, message, first if is_setting else None)


def named_host(header: str) -> str:
    """The host of a header Host, without port, in lower case; "" for none."""
    found = _HOST.fullmatch(header.strip().lower())
    return found["name"].strip("[]") if found else ""


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return not ipaddress.ip_address(host).is_unspecified
    return False


class AccessControl:
    """Checks hosts, API keys and rates; the log names a client by eight digits of its key's digest.
    Raises what `key_digests` raises.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        self._file = limits.api_keys
        self._file_state = _state_of(self._file)
        self._digests = key_digests(self._file)
        self.needs_key = bool(self._digests)  # an empty file later does not open the server
        self._rate = limits.requests_per_minute
        self._hosts = _LOOPBACK | {host.lower() for host in limits.allowed_hosts}
        self.checks_hosts = bool(limits.allowed_hosts)  # the server sets it on the loopback
        # name: (requests left, at which time)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        # known pairs of address and key: guesses at the same address do not lock them out
        self._let_in: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def check_host(self, header: str) -> None:
        """Raise ApiError 403 for a name that is not this server's: a web page can point its own
        name at the loopback (DNS rebinding) and read answers, unless there are keys.
        """
        if self.needs_key or not self.checks_hosts or "*" in self._hosts:
            return
        host = named_host(header)
        # a page cannot take an address for its name; probes of a kubelet ask at one
        if host not in self._hosts and not _is_address(host):
            named = f"the host {host[:MAX_HOST]!r}" if host else "no host that can be read"
            raise ApiError(
                403,
                f"the request names {named}, which is no name of this server: ask at localhost or "
                "127.0.0.1, or start the server with --allowed-host NAME",
                code="host_not_allowed",
            )

    async def client_name(self, authorization: str, address: str) -> str:
        """The client's name for the log. Raises ApiError 401, and 429 to an address with many wrong
        keys, except with a key that was right before.
        """
        if not self.needs_key:
            return address
        if _state_of(self._file) != self._file_state:
            await asyncio.to_thread(self._read_again)
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        failures = f"wrong keys of {address}"
        if (address, digest) not in self._let_in:
            self._take(failures, FAILURES_PER_MINUTE, "wrong API keys", 0)
        # all are compared, in constant time: the duration says nothing about the keys
        known = [hmac.compare_digest(digest, one) for one in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            self._take(failures, FAILURES_PER_MINUTE, "wrong API keys")
            what = "no such API key" if key else "an API key is needed"
            raise ApiError(401, f"{what}: send authorization: Bearer KEY", code="invalid_api_key")
        self._let_in[address, digest] = None
        if len(self._let_in) > MAX_CLIENTS:
            self._let_in.popitem(last=False)
        return f"key-{digest.hex()[:8]}"

    def _read_again(self) -> None:
        self._file_state = _state_of(self._file)
        try:
            self._digests = key_digests(self._file)
            log.info("read API keys", extra={"data": {"keys": len(self._digests)}})
        except EyasError as error:  # its keys may be revoked: none is valid any more
            self._digests = key_digests(None)
            log.error("API keys", extra={"data": {"error": f"{error.what}: none of it is valid"}})

    def count(self, name: str) -> None:
        """Count a request of this client. Raises ApiError 429."""
        if self._rate is not None:
            self._take(name, self._rate, "requests")

    def _take(self, name: str, rate: int, what: str, count: int = 1) -> None:
        """Take from a rate a minute. Raises ApiError 429 where less than one is left."""
        now = time.monotonic()
        left, since = self._buckets.get(name, (float(rate), now))
        left = min(rate, left + (now - since) * rate / 60)
        if left < 1:
            wait = max(1, math.ceil((1 - left) * 60 / rate))
            message = f"more than {rate} {what} a minute"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=wait)
        self._buckets[name] = (left - count, now)
        self._buckets.move_to_end(name)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)


def _state_of(file: Path | None) -> tuple[int, ...] | None:
    """What changes with the content of a file."""
    if file is not None:
        with suppress(OSError):
            found = file.stat()
            return found.st_mtime_ns, found.st_ino, found.st_size
    return None


def _read_text(path: Path) -> str:
    # does not wait for the writer of a pipe
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("no regular file")
        text = file.read(MAX_KEYS_BYTES + 1)
    if len(text) > MAX_KEYS_BYTES:
        raise OSError(f"over {MAX_KEYS_BYTES} bytes")
    return text.decode("utf-8-sig")


def key_digests(path: Path | None) -> list[bytes]:
    """Of the keys of the environment and of a file. Raises MissingInputError, ConfigError."""
    keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",")]
    if path is not None:
        try:
            lines = _read_text(path).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = "it is no UTF-8"
            if isinstance(error, OSError):
                why = error.strerror or str(error)
            raise MissingInputError(
                f"no API keys at {path}: {why}", "give a text file with one key per line"
            ) from error
        found = [line.strip() for line in lines if not line.lstrip().startswith("#")]
        if not any(found):
            raise ConfigError(
                f"{path} holds no API key",
                "write one per line; without the setting no key is needed",
            )
        keys += found
    return [hashlib.sha256(key.encode()).digest() for key in keys if key]
