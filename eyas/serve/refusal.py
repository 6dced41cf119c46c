"""The error that a client gets, in OpenAI's shape. Knows no request and no HTTP library."""

from __future__ import annotations

from typing import Any

from eyas.errors import InputError

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer that is an error: HTTP status and OpenAI's `message`, `type`, `param`, `code`;
    retry_after in seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str] | None:
        return None if self.retry_after is None else {"retry-after": str(self.retry_after)}

    def body(self) -> dict[str, Any]:
        kind = (
            "server_error"
            if self.status >= 500
            else _KINDS.get(self.status, "invalid_request_error")
        )
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


def unsupported(param: str, what: str) -> ApiError:
    """The refusal of a field, or of a value of it, that this server does not do."""
    return ApiError(400, f"{param}: {what}", param, "unsupported_parameter")


def refused_by_engine(error: InputError) -> ApiError:
    """The engine's refusal; its messages begin with the name of the setting where one setting is at
    fault.
    """
    first = error.what.removeprefix("the ").split(" ", 1)[0]
    param = (
        first
        if (first.replace("_", "").isalnum() and "_" in first)
        or first in ("temperature", "regex", "seed")
        else None
    )
    hint = f": {error.hint}" if error.hint else ""
    return ApiError(400, f"{error.what}{hint}", param)
