"""Object stores: which errors are retried, and which are reported in the store's own words."""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from eyas.errors import EyasError, InputError, StorageFullError, extra

log = logging.getLogger(__name__)
PATIENCE_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 0.1, 10.0
ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError, FileExistsError)
MISTAKES = (  # in code: asking again is no remedy
    *(TypeError, AttributeError, LookupError, ArithmeticError, AssertionError),
    *(NameError, NotImplementedError, MemoryError),
)
UNUSABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG}
MAKE_ROOM = "free some space there, and run the same command again: finished parts are kept"
# Remedies by codes of S3 and its clients, and by the status of GCS and of HEAD requests, which have
# no body.
REMEDIES = {
    "give credentials (AWS_PROFILE or AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY; gcloud auth "
    "application-default login), or sign in again: finished parts are kept": (
        "401 ExpiredToken ExpiredTokenException TokenRefreshRequired InvalidToken "
        "InvalidClientTokenId InvalidAccessKeyId SignatureDoesNotMatch NoCredentialsError "
        "PartialCredentialsError ProfileNotFound TokenRetrievalError UnauthorizedSSOTokenError "
        "SSOTokenLoadError DefaultCredentialsError RefreshError UnauthenticatedError Unauthorized"
    ),
    "let this account read and write there, or take another URL": (
        "403 Forbidden AccessDenied AllAccessDisabled AccountProblem InvalidObjectState "
        "PermissionDeniedError"
    ),
    "set AWS_DEFAULT_REGION to the bucket's region": (
        "PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException"
    ),
    "make the bucket, or check its name": "NoSuchBucket InvalidBucketName AllAccountsDisabled",
    "set this machine's clock": "RequestTimeTooSkewed RequestExpired",
    "the store takes no checksums: set AWS_REQUEST_CHECKSUM_CALCULATION=when_required and "
    "AWS_RESPONSE_CHECKSUM_VALIDATION=when_required": (
        "411 501 MissingContentLength NotImplemented XAmzContentSHA256Mismatch"
    ),
    MAKE_ROOM: "507 QuotaExceeded InsufficientStorage",
}
REMEDY = {code: remedy for remedy, codes in REMEDIES.items() for code in codes.split()}
AGAIN_STATUS = (408, 409, 423, 425, 429)  # statuses that may work another time
SAYS_WHY = "mend what the store says, and run the same command again: finished parts are kept"


def open_store(url: str) -> tuple[Any, str]:
    """The file system of a URL or path, a remote one as Persistent, and the path in it. Raises
    InputError.
    """
    if url.startswith("s3://"):  # R2, Ceph and older MinIO refuse checksums of requests
        for what in ("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION"):
            os.environ.setdefault(what, "when_required")
    try:
        store, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(
            f"{url} cannot be opened: {error}",
            f"check the URL; for gs:// {extra('gcs')}, for s3:// {extra('s3')}",
        ) from error
    return (store if isinstance(store, LocalFileSystem) else Persistent(store, url)), path


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Turn a full disk, and a place where no folder can be, into clear errors."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{url} is a file, or below one", "give a folder's path") from error
    except OSError as error:
        if error.errno in UNUSABLE:  # ENOENT: of /proc
            what = f"{url} cannot be read or written ({error.strerror})"
            raise InputError(what, "give another folder, or change who may use it") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(f"no room left at {url}", MAKE_ROOM) from error
        raise


class Persistent:
    """A remote file system that is asked again while it does not answer.

    A missing file and a mistake in the code are raised at once; so is a refusal, as InputError with
    the store's code and reason (StorageFullError where it has no room). EyasError after PATIENCE_S
    without an answer and the client's own last attempt (gcsfs tries for half a minute).
    """

    def __init__(self, store: Any, url: str) -> None:
        self._store, self._url = store, url

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not the store's: pickle asks before there is one
            raise AttributeError(name)
        method = getattr(self._store, name)
        return functools.partial(self._ask, method) if callable(method) else method

    def _ask(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        started, pause = time.monotonic(), FIRST_PAUSE_S
        while True:
            try:
                return method(*args, **options)
            except MISTAKES:
                raise
            # each client has its own tree of errors
            except Exception as error:
                if (found := refusal(error)) is not None:
                    code, reason, remedy = found
                    kind = StorageFullError if remedy == MAKE_ROOM else InputError
                    what = f"{self._url} refuses: {reason or code} ({code})"
                    raise kind(what, remedy) from error
                if isinstance(error, (*ABSENT, ValueError)):
                    raise
                what = type(error).__name__
                if time.monotonic() - started > PATIENCE_S:
                    raise EyasError(
                        f"{self._url} does not answer ({what})",
                        "see that the store runs and can be reached, and run the same command "
                        "again: finished parts are kept",
                    ) from error
            log.warning(
                "a store does not answer",
                extra={"data": {"url": self._url, "error": what, "pause_s": pause}},
            )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


def refusal(error: BaseException) -> tuple[str, str, str] | None:
    """A store's code, reason and remedy where an error or one of its causes is a refusal; None
    where it may work another time, or a file is missing.
    """
    cause: BaseException | None = error
    while cause is not None:
        code, reason, status = _answer(cause)
        if code in REMEDY:
            return code, reason, REMEDY[code]
        if status == 404:
            return None
        if 400 <= status < 500 and status not in AGAIN_STATUS:
            return code, reason, SAYS_WHY
        cause = cause.__cause__ or cause.__context__
    return None


def _answer(error: BaseException) -> tuple[str, str, int]:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        refused = response.get("Error", {})
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return str(refused.get("Code", status)), str(refused.get("Message", "")), int(status)
    text = str(error).strip()
    code = str(getattr(error, "code", None) or "")
    if code.isdigit():  # gcsfs
        return code, text.removesuffix(f", {code}"), int(code)
    if isinstance(error, OSError) and text.startswith("Forbidden: "):  # gcsfs
        return "403", text.partition("\n")[2] or text, 403
    return type(error).__name__, text.partition("\n")[0], 0
