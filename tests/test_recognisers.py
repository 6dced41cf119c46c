"""Google Cloud DLP through its client, which talks to a small server here."""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler

import pytest
from google.auth.credentials import AnonymousCredentials

from eyas.data.filters import PersonalData
from eyas.data.ledger import SourceRow
from eyas.errors import ConfigError, EyasError
from eyas.privacy import dlp
from eyas.privacy.detector import Detector
from eyas.privacy.findings import mask
from eyas.privacy.pii import TYPES, PrivacyConfig
from tests.source_rows import served

google_dlp = pytest.importorskip("google.cloud.dlp_v2", reason="pip install eyas[dlp]")


def test_an_absent_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.cloud.dlp_v2", None)
    with pytest.raises(ConfigError, match=r"eyas\[dlp\]"):
        Detector(PrivacyConfig(cloud_project="acme-1"))


def test_labels_are_of_our_types():
    assert {*dlp.INFO_TYPES.values()} <= set(TYPES)


TEXTS = ["ana@python.org wrote", "Grüße von 🙂Ada Berg, 42"]
MAIL = re.compile(r"\w+@[\w.]+")


class Service:
    """A small server: answers in turn from `answers`, then by finding mail; keeps the requests.

    As the service is documented to (REST v2, content:inspect), 64-bit numbers are strings and zeros
    are left out.
    """

    def __init__(self):
        self.answers, self.requests, self.most_findings = [], [], 3000
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                service.requests.append((self.path, json.loads(body)))
                status, answer = (
                    service.answers.pop(0) if service.answers else (200, service.found(body))
                )
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        self.handler = Handler

    def found(self, body):
        findings = [
            finding("EMAIL_ADDRESS", number, *match.span())
            for number, row in enumerate(json.loads(body)["item"]["table"]["rows"])
            for match in MAIL.finditer(row["values"][0]["stringValue"])
        ]
        is_cut = {"findingsTruncated": True} if len(findings) > self.most_findings else {}
        return {"result": {"findings": findings[: self.most_findings], **is_cut}}


def finding(info, row, start, end):
    places = {"start": str(start)} if start else {}
    table = {"rowIndex": str(row)} if row else {}
    return {
        "infoType": {"name": info, "sensitivityScore": {"score": "SENSITIVITY_MODERATE"}},
        "likelihood": "LIKELY",
        "location": {
            "byteRange": {"end": str(end + 4)},
            "codepointRange": {**places, "end": str(end)},
            "contentLocations": [{"recordLocation": {"tableLocation": table}}],
        },
    }


@pytest.fixture
def service(monkeypatch):
    service = Service()
    with served(service.handler) as url:
        transport = google_dlp.services.dlp_service.transports.DlpServiceRestTransport(
            host=url.removeprefix("http://"), url_scheme="http", credentials=AnonymousCredentials()
        )
        made = google_dlp.DlpServiceClient(transport=transport)
        monkeypatch.setattr(dlp, "client", lambda: made)
        monkeypatch.setattr(dlp, "PATIENCE_S", 3.0)
        yield service
        transport.close()


def cloud_config(**settings):
    return PrivacyConfig(policy="mask", cloud_project="acme-1", **settings)


def test_the_request_and_its_answer(service):
    answer = [
        finding("PERSON_NAME", 1, 11, 19),
        finding("EMAIL_ADDRESS", 0, 0, 14),
        finding("SHOE_SIZE", 1, 20, 22),
    ]
    service.answers = [(200, {"result": {"findings": answer}})]
    config = cloud_config(cloud_location="europe-west3", actions={"phone_number": "keep"})
    found = Detector(config, b"key").find_all(TEXTS)
    assert [mask(text, findings) for text, findings in zip(TEXTS, found, strict=True)] == [
        "<EMAIL_ADDRESS> wrote",
        "Grüße von 🙂<PERSON>, 42",
    ]
    assert all(len(one.hash) == 16 for findings in found for one in findings)
    ((path, request),) = service.requests
    assert path.startswith("/v2/projects/acme-1/locations/europe-west3/content:inspect")
    assert [row["values"][0]["stringValue"] for row in request["item"]["table"]["rows"]] == TEXTS
    inspect = request["inspectConfig"]
    assert not inspect.get("includeQuote")
    assert inspect["limits"] == {"maxFindingsPerRequest": 3000}
    assert inspect["minLikelihood"] in ("POSSIBLE", 3)
    names = {one["name"] for one in inspect["infoTypes"]}
    assert {"EMAIL_ADDRESS", "PERSON_NAME", "US_SOCIAL_SECURITY_NUMBER"} <= names
    assert not names & {"PHONE_NUMBER", "LOCATION", "URL"}, "kept, so not searched for"


def test_what_the_service_does_not_know_is_found_here(service):
    findings = Detector(cloud_config()).find(
        "1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa of ana@python.org, 93.184.215.14"
    )
    assert [one.type for one in findings] == ["CRYPTO", "EMAIL_ADDRESS"], (
        "its own types are the service's to find"
    )


def test_many_and_long_texts_are_found_in_few_requests(service):
    texts = [f"{number} {'word ' * 200}u{number}@python.org" for number in range(900)]
    texts += ["", ("é" * 99 + " ") * 4000 + "ana@python.org " + "x" * 3_000]
    found = dlp.CloudDlp(cloud_config())(texts)
    for number, text in enumerate(texts[:900]):
        assert {text[one.start : one.end] for one in found[number]} == {f"u{number}@python.org"}
    assert found[900] == []
    assert {texts[901][one.start : one.end] for one in found[901]} == {"ana@python.org"}
    assert len(service.requests) <= 16
    sizes = [len(json.dumps(one, ensure_ascii=False).encode()) for _, one in service.requests]
    assert max(sizes) <= 500_000
    rows = [SourceRow("set", "MIT", "", None, (f"I am u{n}@python.org", "Hi")) for n in range(50)]
    service.requests.clear()
    results = PersonalData(cloud_config(), b"key").many(rows)
    assert {row.turns for row in results} == {("I am <EMAIL_ADDRESS>", "Hi")}
    assert len(service.requests) == 1


def test_a_cut_answer_is_requested_again_in_halves(service):
    service.most_findings = 10
    search = dlp.CloudDlp(cloud_config())
    texts = [
        " ".join(f"u{number}@python.org" for number in range(count)) for count in (3, 9, 0, 7, 1)
    ]
    assert [len(one) for one in search(texts)] == [3, 9, 0, 7, 1]
    dense = " ".join(f"user{number:06d}@python.org" for number in range(300))
    service.most_findings = 200
    found = {(one.start, one.end) for one in search([dense])[0]}
    assert {match.span() for match in MAIL.finditer(dense)} <= found


@pytest.mark.parametrize(
    ("statuses", "kind", "says"),
    [
        ([403], ConfigError, "credentials"),
        ([400], EyasError, "refuses the request"),
        ([429] * 99, EyasError, "no answer"),
        ([429, 503], None, ""),
    ],
)
def test_refusals_say_what_to_do_and_quote_nothing(service, statuses, kind, says):
    text = "ana@python.org is bad"
    service.answers = [(one, {"error": {"code": one, "message": text}}) for one in statuses]
    search = dlp.CloudDlp(cloud_config())
    if kind is None:
        assert len(search([text])[0]) == 1, "busy is waited for"
        return
    with pytest.raises(kind, match=says) as caught:
        search([text])
    assert "ana@" not in str(caught.value)


def test_without_credentials(monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(ConfigError, match="credentials"):
        Detector(cloud_config())
