"""What keeps a server on its feet: who may ask, how often, how much, and for how long. Knows no
request and no HTTP library.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import time
from collections import OrderedDict
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from eyas.errors import ConfigError, MissingInputError
from eyas.serve.refusal import ApiError

KEYS_VARIABLE = "EYAS_API_KEYS"
_MOST_CLIENTS = 10_000  # of whom a rate is remembered


class LimitsConfig(BaseModel):
    """api_keys: a file with a key a line; the variable EYAS_API_KEYS, keys parted by commas, adds
    to it. Without keys everybody is served who can connect.

    requests_per_minute: of one key, or of one address where there are no keys; as many may come at
    once after a rest. max_queue: samples that may wait beside those that run. max_body_bytes: of a
    request. max_connections: more take the place of idle ones, or are turned away. read_timeout_s:
    what a client has for sending a request's head, its body, and for taking what it is sent.
    request_timeout_s: for a whole answer. shutdown_s: what running requests get to finish after
    SIGINT or SIGTERM.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    api_keys: Path | None = None
    requests_per_minute: int | None = Field(None, ge=1)
    max_queue: int = Field(256, ge=0)
    max_body_bytes: int = Field(8 << 20, ge=1024)
    max_connections: int = Field(512, ge=1)
    read_timeout_s: float = Field(30.0, gt=0)
    request_timeout_s: float = Field(600.0, gt=0)
    shutdown_s: float = Field(30.0, gt=0)


class Door:
    """Lets in who has a key, as often as the rate allows. Keys are held as digests, which is also
    what logs may name.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        self._digests = [
            hashlib.sha256(key.encode()).digest() for key in read_keys(limits.api_keys)
        ]
        self._rate = limits.requests_per_minute
        # name: requests left, as of when
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def name(self, authorization: str, address: str) -> str:
        """The name of the client, for the log: of its key, else its address. Raises ApiError 401."""
        if not self._digests:
            return address
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        # All are compared, each in constant time: how long it takes tells nothing of the keys.
        known = [hmac.compare_digest(digest, one) for one in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            what = "no such API key" if key else "an API key is needed"
            raise ApiError(401, f"{what}: send authorization: Bearer KEY", code="invalid_api_key")
        return f"key-{digest.hex()[:8]}"

    def count(self, name: str) -> None:
        """A request of this client. Raises ApiError 429."""
        if (rate := self._rate) is None:
            return
        now = time.monotonic()
        left, since = self._buckets.pop(name, (float(rate), now))
        left = min(rate, left + (now - since) * rate / 60)
        if len(self._buckets) >= _MOST_CLIENTS:
            self._buckets.popitem(last=False)
        self._buckets[name] = (left - 1 if left >= 1 else left, now)
        if left < 1:
            wait = max(1, math.ceil((1 - left) * 60 / rate))
            raise ApiError(
                429,
                f"more than {rate} requests a minute",
                code="rate_limit_exceeded",
                retry_after=wait,
            )


def read_keys(path: Path | None) -> list[str]:
    """The keys of the environment and of a file with one a line. Raises MissingInputError,
    ConfigError.
    """
    keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",")]
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise MissingInputError(
                f"no API keys at {path}: {type(error).__name__}", "give a text file, a key a line"
            ) from error
        found = [line.strip() for line in lines if not line.lstrip().startswith("#")]
        if not any(found):
            raise ConfigError(
                f"{path} holds no API key", "write one a line; without the setting no key is needed"
            )
        keys += found
    return [key for key in keys if key]
