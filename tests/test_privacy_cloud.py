"""Google Cloud DLP as the detector: the requests, what becomes of the answers, limits, truncation,
refusals, and retries.

The server answers as the service is documented to (REST v2, content:inspect): 64-bit numbers are
strings, zeros are left out, rows come in any order.
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from eyas.privacy.cloud import INFO_TYPES, MOST_BYTES, OVERLAP, CloudDlp, batches, cut

from eyas.data.filters import PersonalData
from eyas.data.ledger import Drop, SourceRow
from eyas.errors import ConfigError, EyasError
from eyas.privacy import cloud
from eyas.privacy.detector import Detector
from eyas.privacy.findings import Finding, mask
from eyas.privacy.pii import TYPES, PrivacyConfig

# An answer as the service gives it to {"table": {"headers": [{"name": "text"}], "rows": [two
# rows]}}; values are not requested.
RECORDED = """{"result": {"findings": [
  {"infoType": {"name": "PERSON_NAME",
    "sensitivityScore": {"score": "SENSITIVITY_MODERATE"}}, "likelihood": "LIKELY",
   "location": {
    "byteRange": {"start": "15", "end": "23"}, "codepointRange": {"start": "11", "end": "19"},
    "contentLocations": [{"recordLocation":
     {"fieldId": {"name": "text"}, "tableLocation": {"rowIndex": "1"}}}]},
   "createTime": "2026-11-20T10:00:00.000Z", "findingId": "2026-11-20T10:00:00.000000Z1"},
  {"infoType": {"name": "EMAIL_ADDRESS",
    "sensitivityScore": {"score": "SENSITIVITY_MODERATE"}}, "likelihood": "VERY_LIKELY",
   "location": {"byteRange": {"end": "14"}, "codepointRange": {"end": "14"},
    "contentLocations": [{"recordLocation":
     {"fieldId": {"name": "text"}, "tableLocation": {}}}]},
   "createTime": "2026-11-20T10:00:00.000Z", "findingId": "2026-11-20T10:00:00.000000Z2"},
  {"infoType": {"name": "SHOE_SIZE"}, "likelihood": "POSSIBLE",
   "location": {"codepointRange": {"start": "20", "end": "22"},
    "contentLocations": [{"recordLocation": {"tableLocation": {"rowIndex": "1"}}}]}}
]}}"""
TEXTS = ["ana@python.org wrote", "Grüße von 🙂Ada Berg, 42"]
MAIL = re.compile(r"\w+@[\w.]+")


class Service:
    """A small server: answers in turn from `answers`, then by finding mail; keeps what it was
    asked.
    """

    def __init__(self):
        self.answers, self.requests, self.most_findings = [], [], 3000
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                service.requests.append((self.path, dict(self.headers), body))
                status, headers, answer = (
                    service.answers.pop(0) if service.answers else (200, {}, service.found(body))
                )
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def found(self, body):
        findings = []
        for number, row in enumerate(json.loads(body)["item"]["table"]["rows"]):
            for match in MAIL.finditer(row["values"][0]["stringValue"]):
                place = {
                    name: str(at)
                    for name, at in (("start", match.start()), ("end", match.end()))
                    if at
                }
                table = {"rowIndex": str(number)} if number else {}
                location = {
                    "codepointRange": place,
                    "contentLocations": [{"recordLocation": {"tableLocation": table}}],
                }
                findings.append({"infoType": {"name": "EMAIL_ADDRESS"}, "location": location})
        truncated = {"findingsTruncated": True} if len(findings) > self.most_findings else {}
        return json.dumps(
            {"result": {"findings": findings[: self.most_findings], **truncated}}
        ).encode()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setenv("EYAS_DLP_TOKEN", "a-token")
    monkeypatch.setattr(cloud.time, "sleep", lambda seconds: slept.append(seconds))
    slept = []
    service = Service()
    monkeypatch.setattr(cloud, "URL", service.url)
    service.slept = slept
    yield service
    service.close()


def config_of(**settings):
    return PrivacyConfig(policy="mask", cloud_project="acme-1", **settings)


def test_a_recorded_answer(service):
    service.answers = [(200, {}, RECORDED.encode())]
    found = Detector(config_of(), b"key").find_all(TEXTS)
    assert [mask(text, findings) for text, findings in zip(TEXTS, found, strict=True)] == [
        "<EMAIL_ADDRESS> wrote",
        "Grüße von 🙂<PERSON>, 42",
    ]
    assert all(len(one.hash) == 16 for findings in found for one in findings)


def test_the_request(service):
    Detector(config_of(cloud_location="europe-west3", actions={"phone_number": "keep"})).find_all(
        TEXTS
    )
    (path, headers, body), *more = service.requests
    assert not more
    assert path == "/v2/projects/acme-1/locations/europe-west3/content:inspect"
    assert headers["Authorization"] == "Bearer a-token"
    request = json.loads(body)
    assert [row["values"][0]["stringValue"] for row in request["item"]["table"]["rows"]] == TEXTS
    inspect = request["inspectConfig"]
    assert inspect["includeQuote"] is False
    assert inspect["limits"] == {"maxFindingsPerRequest": 3000}
    names = {one["name"] for one in inspect["infoTypes"]}
    assert {
        "EMAIL_ADDRESS",
        "PERSON_NAME",
        "US_SOCIAL_SECURITY_NUMBER",
        "ITALY_FISCAL_CODE",
    } <= names
    assert not names & {"PHONE_NUMBER", "LOCATION", "URL"}, "kept, so not searched for"


def test_what_the_service_does_not_know_is_found_here(service):
    findings = Detector(config_of()).find(
        "1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa of ana@python.org, 8.8.8.8"
    )
    assert [one.type for one in findings] == ["CRYPTO", "EMAIL_ADDRESS"], (
        "its own types are the service's to find"
    )
    assert set(INFO_TYPES.values()) <= set(TYPES)


def test_many_texts_are_few_requests(service):
    texts = [f"{number} {'word ' * 200}u{number}@python.org" for number in range(900)]
    found = CloudDlp(config_of())(texts)
    assert [len(one) for one in found] == [1] * 900
    assert [text[one[0].start : one[0].end] for text, one in zip(texts, found, strict=True)] == [
        f"u{number}@python.org" for number in range(900)
    ]
    assert len(service.requests) == 2
    assert all(len(body) <= MOST_BYTES for _, _, body in service.requests)


def test_a_long_text_is_cut_and_found_whole(service):
    text = ("é" * 99 + " ") * 1200 + "ana@python.org " + "x" * 3_000
    found = CloudDlp(config_of())([text, "", "b@python.org"])
    assert [{text[one.start : one.end] for one in found[0]}, found[1], len(found[2])] == [
        {"ana@python.org"},
        [],
        1,
    ]
    assert all(len(body) <= MOST_BYTES for _, _, body in service.requests)
    assert sorted(cut("abc" * 200, 300 + OVERLAP))[0] == (0, ("abc" * 200)[: 300 + OVERLAP])


def test_a_cut_answer_is_requested_again_in_halves(service):
    service.most_findings = 10
    texts = [
        " ".join(f"u{number}@python.org" for number in range(count)) for count in (3, 9, 0, 7, 1)
    ]
    assert [len(one) for one in CloudDlp(config_of())(texts)] == [3, 9, 0, 7, 1]
    assert len(service.requests) > 3
    dense = " ".join(f"user{number:06d}@python.org" for number in range(300))
    service.most_findings = 200
    found = {(one.start, one.end) for one in CloudDlp(config_of())([dense])[0]}
    assert {(match.start(), match.end()) for match in MAIL.finditer(dense)} <= found


def test_batches_hold_every_text_once():
    texts = ["a" * length for length in (10, 0, 499_000, 300_000, 250_000, 5)]
    found = list(batches(texts))
    assert sorted(number for batch in found for number in batch) == [0, 2, 3, 4, 5], (
        "an empty text needs no question"
    )
    assert list(batches([])) == []


def test_busy_is_waited_for(service):
    service.answers = [
        (429, {"Retry-After": "7"}, b"{}"),
        (503, {}, b"{}"),
        (200, {}, RECORDED.encode()),
    ]
    assert CloudDlp(config_of())(TEXTS)[0] == [Finding("EMAIL_ADDRESS", 0, 14)]
    assert service.slept == [7.0, 1.0]


REFUSALS = [(403, ConfigError, "credentials"), (400, EyasError, "400"), (429, EyasError, "later")]


@pytest.mark.parametrize(("status", "kind", "says"), REFUSALS)
def test_refusals_say_what_to_do_and_quote_nothing(service, status, kind, says):
    service.answers = [(status, {}, b'{"error": {"message": "ana@python.org is bad"}}')] * 20
    with pytest.raises(kind, match=says) as caught:
        CloudDlp(config_of())(TEXTS)
    assert "ana@" not in str(caught.value)
    assert "Ada" not in str(caught.value)


def test_a_service_that_is_away(monkeypatch):
    monkeypatch.setenv("EYAS_DLP_TOKEN", "a-token")
    monkeypatch.setattr(cloud.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(cloud, "URL", "http://127.0.0.1:9")
    with pytest.raises(EyasError, match="no answer"):
        CloudDlp(config_of())(["text"])


def test_without_credentials(monkeypatch):
    monkeypatch.delenv("EYAS_DLP_TOKEN", raising=False)
    monkeypatch.setattr(cloud.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="EYAS_DLP_TOKEN"):
        Detector(config_of())


def missing(name):
    raise ImportError(name)


def test_default_credentials_are_renewed(monkeypatch, service):
    """google-auth's interface: default() gives credentials that are valid once refreshed."""

    class Credentials:
        valid, token, num_refreshed = False, None, 0

        def refresh(self, request):
            self.num_refreshed += 1
            self.valid, self.token = True, "renewed"

    class Auth:
        made = Credentials()
        default = staticmethod(lambda scopes: (Auth.made, "acme-1"))
        Request = staticmethod(lambda: None)

    monkeypatch.delenv("EYAS_DLP_TOKEN", raising=False)
    monkeypatch.setattr(cloud.importlib, "import_module", lambda name: Auth)
    search = CloudDlp(config_of())
    search(TEXTS)
    search(TEXTS)
    assert Auth.made.num_refreshed == 1
    assert service.requests[-1][1]["Authorization"] == "Bearer renewed"


def test_rows_go_into_one_request(service):
    rows = [
        SourceRow("set", "MIT", f"set.jsonl:{number}", None, (f"I am u{number}@python.org", "Hi"))
        for number in range(50)
    ]
    results = PersonalData(config_of(), b"key").many(rows)
    assert {row.turns for row in results} == {("I am <EMAIL_ADDRESS>", "Hi")}
    assert len(service.requests) == 1
    dropped = PersonalData(config_of(actions={"email_address": "drop"}), b"key")(rows[0])
    assert isinstance(dropped, Drop)
    assert dropped.reason == "pii.email_address"
