"""Google Cloud DLP (Sensitive Data Protection) as a detector: the texts leave this machine, as rows
of a table, many in a request. Values are not sent back, and no error repeats what was sent.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from eyas.errors import ConfigError, EyasError, extra
from eyas.privacy.findings import Finding
from eyas.privacy.pii import PrivacyConfig
from eyas.privacy.spelling import LISTS

LIKELIHOOD = "POSSIBLE"  # the least that counts
MOST_BYTES = 450_000  # of texts in a request; the service takes 0.5 MB in all
ROW_BYTES = 50  # what a row adds to its text
MOST_FINDINGS = 3_000  # in an answer
OVERLAP = 250  # characters that halves of a text share
SMALLEST = 2_000  # characters; fewer cannot hold MOST_FINDINGS
PATIENCE_S = 300.0

INFO_TYPES = {one: type for type, some in LISTS["dlp"].items() for one in some.split()}

Piece = tuple[int, int, str]  # number of the text, first character, characters


class CloudDlp:
    """Finds the types of INFO_TYPES that the policy does not keep."""

    def __init__(self, config: PrivacyConfig) -> None:
        """Raises ConfigError without the client library or without credentials."""
        self._types = {info: type for info, type in INFO_TYPES.items() if type in config.types}
        self._request = {
            "parent": f"projects/{config.cloud_project}/locations/{config.cloud_location}",
            "inspect_config": {
                "info_types": [{"name": info} for info in self._types],
                "min_likelihood": LIKELIHOOD,
                "limits": {"max_findings_per_request": MOST_FINDINGS},
            },
        }
        self._client = client()
        self._faults, retry = (
            _library(f"google.api_core.{name}") for name in ("exceptions", "retry")
        )
        transient = retry.if_exception_type(self._faults.TooManyRequests, self._faults.ServerError)
        self._retry = retry.Retry(predicate=transient, timeout=PATIENCE_S)

    def __call__(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Findings in each text, in any order. Raises EyasError (no answer),
        ConfigError (refused).
        """
        found: list[list[Finding]] = [[] for _ in texts]
        pieces = [(number, 0, text) for number, text in enumerate(texts) if text]
        for number, finding in self._findings(pieces) if pieces else ():
            found[number].append(finding)
        return found

    def _findings(self, pieces: Sequence[Piece]) -> Iterator[tuple[int, Finding]]:
        """By halves, where the texts are too long for a request or its answer was cut."""
        result: Any = self._asked(pieces) if _num_bytes(pieces) <= MOST_BYTES else None
        was_cut = result is None or len(result.findings) >= MOST_FINDINGS
        halves = _halves(pieces) if was_cut or result.findings_truncated else []
        for half in halves:
            yield from self._findings(half)
        if halves:
            return
        for one in result.findings if result else ():
            location = one.location
            place = location.codepoint_range
            row = location.content_locations[0].record_location.table_location.row_index
            number, start, _ = pieces[row]
            if (type := self._types.get(one.info_type.name)) and place.end > place.start:
                yield number, Finding(type, start + place.start, start + place.end)

    def _asked(self, pieces: Sequence[Piece]) -> Any:
        rows = [
            {"values": [{"string_value": text.encode("utf-8", "replace").decode()}]}
            for _, _, text in pieces
        ]
        item = {"table": {"headers": [{"name": "text"}], "rows": rows}}
        try:
            return self._client.inspect_content(
                {**self._request, "item": item}, retry=self._retry
            ).result
        except (self._faults.Unauthorized, self._faults.Forbidden) as error:
            raise ConfigError(
                f"Cloud DLP refuses the credentials ({type(error).__name__})",
                "check the project and its permissions",
            ) from None
        except self._faults.ClientError as error:
            raise EyasError(
                f"Cloud DLP refuses the request ({type(error).__name__})",
                "check personal.cloud_location and the project's quota",
            ) from None
        except (self._faults.GoogleAPIError, OSError) as error:
            raise EyasError(
                f"Cloud DLP gave no answer in {PATIENCE_S:g} s ({type(error).__name__})",
                "run the same command again later: finished parts are kept",
            ) from None


def client() -> Any:
    """The service's client with the default credentials of this machine."""
    dlp, auth = _library("google.cloud.dlp_v2"), _library("google.auth.exceptions")
    try:
        return dlp.DlpServiceClient()
    except auth.DefaultCredentialsError as error:
        raise ConfigError(
            "Cloud DLP finds no credentials on this machine",
            "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS",
        ) from error


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError("Cloud DLP needs google-cloud-dlp", extra("dlp")) from error


def _num_bytes(pieces: Sequence[Piece]) -> int:
    return sum(len(text.encode("utf-8", "replace")) + ROW_BYTES for _, _, text in pieces)


def _halves(pieces: Sequence[Piece]) -> list[Sequence[Piece]]:
    """Half of the texts each, or overlapping halves of one; [] when that is too short."""
    middle = len(pieces) // 2
    if middle:
        return [pieces[:middle], pieces[middle:]]
    number, start, text = pieces[0]
    middle = len(text) // 2
    if len(text) <= SMALLEST:
        return []
    return [[(number, start, text[: middle + OVERLAP])], [(number, start + middle, text[middle:])]]
