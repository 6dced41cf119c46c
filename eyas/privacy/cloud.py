"""Google Cloud DLP (Sensitive Data Protection) as a detector: the texts leave this machine.

Knows its REST method content:inspect, its limits, and its names for our types.

A text is a row of a table, so that one request carries many: at most 0.5 MB, and 3,000 findings in
the answer. A truncated answer is requested again in halves. Values are not sent back (includeQuote
is false), and no error repeats what was sent.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import httpx

from eyas.errors import ConfigError, EyasError
from eyas.privacy.policy import Finding, PrivacyConfig

TOKEN_VARIABLE = "EYAS_DLP_TOKEN"
URL = "https://dlp.googleapis.com"
LIKELIHOOD = "POSSIBLE"  # the least at which a finding counts
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
MOST_BYTES = 500_000  # of a request; the limit is 0.5 MB
# what JSON adds to a text, and what a request holds besides its texts
ROW_BYTES, REST_BYTES = 50, 5_000
MOST_FINDINGS = 3_000
PIECE, OVERLAP = 50_000, 250  # characters of a row; longer texts are cut
SMALLEST = 2_000  # characters; a shorter text cannot hold MOST_FINDINGS
ATTEMPTS = 7
RETRIED = (429, 500, 502, 503, 504)
TIMEOUT_S = 60.0

NATIONAL_IDS = """
    AUSTRALIA_TAX_FILE_NUMBER BELGIUM_NATIONAL_ID_CARD_NUMBER BRAZIL_CPF_NUMBER
    CANADA_SOCIAL_INSURANCE_NUMBER CHILE_CDI_NUMBER CHINA_RESIDENT_ID_NUMBER
    CROATIA_PERSONAL_ID_NUMBER DENMARK_CPR_NUMBER FINLAND_NATIONAL_ID_NUMBER FRANCE_CNI
    FRANCE_NIR GERMANY_IDENTITY_CARD_NUMBER GERMANY_TAXPAYER_IDENTIFICATION_NUMBER
    INDIA_AADHAAR_INDIVIDUAL INDIA_PAN_INDIVIDUAL IRELAND_PPSN ISRAEL_IDENTITY_CARD_NUMBER
    ITALY_FISCAL_CODE JAPAN_INDIVIDUAL_NUMBER KOREA_RRN MEXICO_CURP_NUMBER
    NETHERLANDS_BSN_NUMBER NORWAY_NI_NUMBER PASSPORT POLAND_PESEL_NUMBER SPAIN_NIE_NUMBER
    SPAIN_NIF_NUMBER SWEDEN_NATIONAL_ID_NUMBER UK_NATIONAL_HEALTH_SERVICE_NUMBER
    UK_NATIONAL_INSURANCE_NUMBER US_DRIVERS_LICENSE_NUMBER
    US_INDIVIDUAL_TAXPAYER_IDENTIFICATION_NUMBER
"""
INFO_TYPES = {
    **dict.fromkeys(NATIONAL_IDS.split(), "NATIONAL_ID"),
    "EMAIL_ADDRESS": "EMAIL_ADDRESS",
    "PHONE_NUMBER": "PHONE_NUMBER",
    "IP_ADDRESS": "IP_ADDRESS",
    "URL": "URL",
    "PERSON_NAME": "PERSON",
    "STREET_ADDRESS": "STREET_ADDRESS",
    "LOCATION": "LOCATION",
    "CREDIT_CARD_NUMBER": "CREDIT_CARD",
    "IBAN_CODE": "IBAN_CODE",
    "US_SOCIAL_SECURITY_NUMBER": "US_SSN",
    "PASSWORD": "PASSWORD",
    "AUTH_TOKEN": "API_KEY",
    "AWS_CREDENTIALS": "API_KEY",
    "AZURE_AUTH_TOKEN": "API_KEY",
    "BASIC_AUTH_HEADER": "API_KEY",
    "GCP_API_KEY": "API_KEY",
    "GCP_CREDENTIALS": "API_KEY",
    "JSON_WEB_TOKEN": "API_KEY",
    "ENCRYPTION_KEY": "PRIVATE_KEY",
}


class CloudDlp:
    """Finds the types of INFO_TYPES that the policy does not keep."""

    def __init__(self, config: PrivacyConfig) -> None:
        """Raises ConfigError without credentials."""
        self._types = {info: type for info, type in INFO_TYPES.items() if type in config.types}
        where = f"projects/{config.cloud_project}/locations/{config.cloud_location}"
        self._url = f"{URL}/v2/{where}/content:inspect"
        self._inspect = {
            "infoTypes": [{"name": info} for info in self._types],
            "minLikelihood": LIKELIHOOD,
            "limits": {"maxFindingsPerRequest": MOST_FINDINGS},
            "includeQuote": False,
        }
        self._token = BearerToken()

    def __call__(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Findings in each text, in any order. Raises EyasError when the service does not answer,
        ConfigError when it refuses.
        """
        found: list[list[Finding]] = [[] for _ in texts]
        pieces = [
            (number, start, piece)
            for number, text in enumerate(texts)
            for start, piece in cut(text, PIECE)
        ]
        with httpx.Client(timeout=TIMEOUT_S) as client:
            for batch in batches([piece for _, _, piece in pieces]):
                of_batch = self._batch(client, [pieces[at][2] for at in batch])
                for at, findings in zip(batch, of_batch, strict=True):
                    number, start, _ = pieces[at]
                    found[number] += _shifted(findings, start)
        return found

    def _batch(self, client: httpx.Client, texts: list[str]) -> list[list[Finding]]:
        """The findings in texts that fit one request; where the answer was truncated, of each half,
        down to halves of a text.
        """
        rows = [{"values": [{"stringValue": text}]} for text in texts]
        item = {"table": {"headers": [{"name": "text"}], "rows": rows}}
        body = {"item": item, "inspectConfig": self._inspect}
        answer = self._post(client, body).get("result") or {}
        findings = answer.get("findings") or []
        if not answer.get("findingsTruncated") and len(findings) < MOST_FINDINGS:
            return self._read(findings, len(texts))
        if len(texts) > 1:
            middle = len(texts) // 2
            return self._batch(client, texts[:middle]) + self._batch(client, texts[middle:])
        if len(texts[0]) <= SMALLEST:
            return self._read(findings, 1)
        halves = cut(texts[0], len(texts[0]) // 2 + OVERLAP)
        found = [_shifted(self._batch(client, [half])[0], start) for start, half in halves]
        return [list(itertools.chain.from_iterable(found))]

    def _read(self, findings: list[dict[str, Any]], num_texts: int) -> list[list[Finding]]:
        """Zeros are left out of JSON made from protocol buffers, and 64-bit numbers are strings."""
        found: list[list[Finding]] = [[] for _ in range(num_texts)]
        for one in findings:
            location = one.get("location") or {}
            place = location.get("codepointRange") or {}
            content = (location.get("contentLocations") or [{}])[0].get("recordLocation") or {}
            row = (content.get("tableLocation") or {}).get("rowIndex", 0)
            type = self._types.get((one.get("infoType") or {}).get("name", ""))
            start, end = int(place.get("start", 0)), int(place.get("end", 0))
            if type and end > start:
                found[int(row)].append(Finding(type, start, end))
        return found

    def _post(self, client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        status = 0
        for attempt in range(ATTEMPTS):
            headers = {"Authorization": f"Bearer {self._token()}"}
            headers["Content-Type"] = "application/json"
            try:
                response = client.post(self._url, content=data, headers=headers)
            except httpx.TransportError:
                response = None
            if response is not None and response.status_code == httpx.codes.OK:
                return dict(response.json())
            status = response.status_code if response is not None else 0
            if status in (401, 403):
                raise ConfigError(
                    f"Cloud DLP refuses the credentials (HTTP {status})",
                    "check the project and its permissions",
                )
            if status and status not in RETRIED:
                raise EyasError(
                    f"Cloud DLP answers HTTP {status}",
                    "check personal.cloud_location and the project's quota",
                )
            time.sleep(_pause_s(response, attempt))
        raise EyasError(
            f"Cloud DLP gave no answer in {ATTEMPTS} attempts (last: HTTP {status or 'none'})",
            "run the same command again later: finished parts are kept",
        )


class BearerToken:
    """EYAS_DLP_TOKEN, else google-auth's default credentials, renewed when they expire."""

    def __init__(self) -> None:
        self._credentials: Any = None
        if not os.environ.get(TOKEN_VARIABLE):
            self._credentials = _default_credentials()

    def __call__(self) -> str:
        if self._credentials is None:
            return os.environ[TOKEN_VARIABLE]
        if not self._credentials.valid:
            self._credentials.refresh(
                importlib.import_module("google.auth.transport.requests").Request()
            )
        return str(self._credentials.token)


def _default_credentials() -> Any:
    hint = (
        f"set {TOKEN_VARIABLE} (gcloud auth print-access-token), or install google-auth and log in"
    )
    try:
        google_auth = importlib.import_module("google.auth")
    except ImportError as error:
        raise ConfigError("Cloud DLP needs credentials", hint) from error
    try:
        return google_auth.default(scopes=[SCOPE])[0]
    except google_auth.exceptions.DefaultCredentialsError as error:
        raise ConfigError("Cloud DLP finds no credentials on this machine", hint) from error


def cut(text: str, size: int) -> Iterator[tuple[int, str]]:
    """A text in pieces of `size` characters that share OVERLAP, each with its place."""
    for start in range(0, max(len(text) - OVERLAP, 1), size - OVERLAP):
        yield start, text[start : start + size]


def batches(texts: Sequence[str]) -> Iterator[list[int]]:
    """Numbers of the texts of each request, in order; empty texts are in none."""
    batch: list[int] = []
    free = MOST_BYTES - REST_BYTES
    for number, text in enumerate(texts):
        size = len(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")) + ROW_BYTES
        if size > free and batch:
            yield batch
            batch, free = [], MOST_BYTES - REST_BYTES
        if text:
            batch.append(number)
            free -= size
    if batch:
        yield batch


def _shifted(findings: Iterable[Finding], start: int) -> list[Finding]:
    return [Finding(one.type, one.start + start, one.end + start) for one in findings]


def _pause_s(response: httpx.Response | None, attempt: int) -> float:
    """What the service asks for in Retry-After, else doubling from half a second to 30."""
    wait = response.headers.get("retry-after", "") if response is not None else ""
    return float(wait) if wait.isdigit() else min(0.5 * 2**attempt, 30.0)
