"""What the extras bring: installed recognisers of names (a spaCy pipeline and a transformers model,
made here), and Google Cloud DLP through its client, which talks to a small server here.
"""

import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from google.auth.credentials import AnonymousCredentials
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

from eyas.data.filters import PersonalData
from eyas.data.ledger import SourceRow
from eyas.data.prompts import PromptsConfig
from eyas.data.sources import SourceConfig
from eyas.errors import ConfigError, EyasError
from eyas.privacy import dlp
from eyas.privacy.detector import Detector, recogniser_versions
from eyas.privacy.findings import mask
from eyas.privacy.ner import GLINER_LABELS, NER_LABELS, model_version
from eyas.privacy.passages import passages
from eyas.privacy.pii import TYPES, PrivacyConfig

spacy = pytest.importorskip("spacy", reason="pip install eyas[ner]")
gliner_recognizer = pytest.importorskip(
    "presidio_analyzer.predefined_recognizers.ner.gliner_recognizer"
)
google_dlp = pytest.importorskip("google.cloud.dlp_v2", reason="pip install eyas[dlp]")
WORDS = ["[PAD]", "[UNK]", "zorblax", "quuxville", "lives", "in", ".", "the"]


def config_of(ner):
    return PrivacyConfig(policy="mask", actions={"location": "mask"}, ner=ner)


@pytest.fixture
def pipeline(tmp_path):
    """A spaCy pipeline of rules, which knows two made-up words."""
    made = spacy.blank("en")
    ruler = made.add_pipe("entity_ruler")
    patterns = [("PERSON", "zorblax"), ("GPE", "quuxville"), ("PRODUCT", "lives")]
    ruler.add_patterns([{"label": label, "pattern": [{"LOWER": word}]} for label, word in patterns])
    made.to_disk(tmp_path / "pipeline")
    return tmp_path / "pipeline"


@pytest.fixture
def model(tmp_path):
    """A token classifier whose first layer alone decides: a word's embedding is its label."""
    folder = tmp_path / "model"
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(folder)
    labels = {0: "O", 1: "B-PER", 2: "B-LOC"}
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=0,
        num_attention_heads=1, intermediate_size=8,
        id2label=labels, label2id={label: number for number, label in labels.items()},
    )  # fmt: skip
    torch.manual_seed(0)
    network = BertForTokenClassification(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network.bert.embeddings.LayerNorm.weight.fill_(1)
        network.bert.embeddings.word_embeddings.weight[:, 0] = 1
        words = network.bert.embeddings.word_embeddings.weight
        for label, word in ((1, "zorblax"), (2, "quuxville")):
            words[WORDS.index(word), 0], words[WORDS.index(word), label] = 0, 1
        network.classifier.weight[:, :3] = torch.eye(3)
    network.save_pretrained(folder)
    return folder


def test_a_spacy_pipeline_finds_what_ours_does_not(pipeline):
    text = "This zorblax lives with his brother in quuxville. ana@python.org"
    assert (
        mask(text, Detector(config_of(f"spacy:{pipeline}")).find(text))
        == "This <PERSON> lives with his brother in <LOCATION>. <EMAIL_ADDRESS>"
    )
    without = mask(text, Detector(config_of(None)).find(text))
    assert "zorblax" in without


GERMAN = "Der zorblax wohnt seit heute nicht mehr in quuxville."


def test_a_pipeline_searches_its_own_language_and_a_given_one(pipeline):
    own = Detector(config_of(f"spacy:{pipeline}"))
    assert own.find(GERMAN) == []
    (unsearched,) = own.name_searches(passages([GERMAN])[0])
    assert (unsearched.language, unsearched.by, unsearched.reason) == ("de", "", "language")
    given = Detector(config_of({"de": f"spacy:{pipeline}"}))
    assert mask(GERMAN, given.find(GERMAN)).startswith("Der <PERSON> wohnt")
    (searched,) = given.name_searches(passages([GERMAN])[0])
    assert (searched.by, searched.reason) == (f"spacy:{pipeline}", "")
    code = f"Bitte erkläre mir das hier:\n```\nprint(zorblax)\n```\n{GERMAN}"
    assert "print(zorblax)" in mask(code, given.find(code)), "never in code"


@pytest.mark.parametrize(
    ("labels", "place"),
    [
        (("B-PER", "B-LOC"), "LOCATION"),
        (("S-private_person", "S-private_address"), "STREET_ADDRESS"),
        (("B-GIVENNAME", "B-STREET"), "STREET_ADDRESS"),
    ],
)
def test_a_transformers_model_finds_what_ours_does_not(model, labels, place):
    """With the labels of models made for personal data too: OpenAI's Privacy Filter marks whole
    entities with S and ends with E, in lower case.
    """
    config = json.loads((model / "config.json").read_text())
    config["id2label"] = {"0": "O", "1": labels[0], "2": labels[1]}
    config["label2id"] = {label: int(number) for number, label in config["id2label"].items()}
    (model / "config.json").write_text(json.dumps(config))
    text = "the zorblax lives in quuxville ."
    found = Detector(config_of(f"transformers:{model}")).find(text)
    assert mask(text, found) == f"the <PERSON> lives in <{place}> ."


class PlainGliner:
    """What the library's model does, by a list of words."""

    @classmethod
    def from_pretrained(cls, folder, **settings):
        assert settings["local_files_only"] is True, "nothing is downloaded"
        return cls()

    def predict_entities(self, text, labels, **settings):
        assert {"person", "address", "city"} <= set(labels)
        words = {"zorblax": "person", "quuxville": "city"}
        return [
            {"start": text.index(word), "end": text.index(word) + len(word), "label": label,
             "text": word, "score": 0.9}
            for word, label in words.items() if word in text
        ]  # fmt: skip


def test_a_gliner_model_is_asked_in_its_words(tmp_path, monkeypatch):
    monkeypatch.setattr(gliner_recognizer, "GLiNER", PlainGliner)
    (tmp_path / "gliner_config.json").write_text("{}")
    found = Detector(config_of({"de": f"gliner:{tmp_path}"})).find(GERMAN)
    assert mask(GERMAN, found) == "Der <PERSON> wohnt seit heute nicht mehr in <LOCATION>."


@pytest.mark.parametrize(
    ("ner", "says"),
    [
        ("spacy:en_core_web_absent", "no recogniser is installed at spacy:en_core_web_absent"),
        ("transformers:/no/such/folder", "no recogniser is installed at /no/such/folder"),
        ("transformers:dslim/bert-base-NER", "eyas downloads none"),
        ("gliner:/no/such/folder", "no recogniser is installed"),
        ("stanza:en", "no recogniser is called"),
        ("spacy:", "no recogniser is called"),
        ("transformers:FOLDER", "cannot load"),
        ({"german": "spacy:en_core_web_absent"}, "'german'"),
    ],
)
def test_an_absent_recogniser_is_an_error_and_not_fetched(ner, says, tmp_path, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    (tmp_path / "config.json").write_text("{}")
    if ner == "transformers:FOLDER":
        ner = f"transformers:{tmp_path}"
    with pytest.raises(ConfigError, match=says):
        Detector(config_of(ner))


@pytest.mark.parametrize(
    ("library", "config", "says"),
    [
        ("spacy", {"ner": "spacy:en_core_web_sm"}, r"eyas\[ner\]"),
        ("presidio_analyzer.predefined_recognizers", {"ner": "transformers:"}, r"eyas\[ner\]"),
        ("google.cloud.dlp_v2", {"cloud_project": "acme-1"}, r"eyas\[dlp\]"),
    ],
)
def test_an_absent_library_is_named(library, config, says, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "config.json").write_text("{}")
    if config.get("ner") == "transformers:":
        config = {"ner": f"transformers:{tmp_path}"}
    with pytest.raises(ConfigError, match=says):
        Detector(PrivacyConfig(**config))


def test_another_model_under_the_same_name_is_another_version(model):
    config = config_of({"de": f"transformers:{model}"})
    (before,) = recogniser_versions(config).values()
    model_version.cache_clear()
    assert recogniser_versions(config) == {f"transformers:{model}": before}
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "id2label": {"0": "O"}}))
    model_version.cache_clear()
    assert recogniser_versions(config) != {f"transformers:{model}": before}
    assert recogniser_versions(config_of("spacy:phonenumbers"))["spacy:phonenumbers"][0].isdigit()
    assert recogniser_versions(PrivacyConfig()) == {}
    prompts = PromptsConfig(sources=[SourceConfig(path="x.jsonl", personal=config)])
    assert prompts.settings(b"key")["recognisers"] == recogniser_versions(config)


def test_labels_are_of_our_types():
    assert {*NER_LABELS.values(), *GLINER_LABELS.values(), *dlp.INFO_TYPES.values()} <= set(TYPES)


# Google Cloud DLP

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

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def found(self, body):
        findings = [
            finding("EMAIL_ADDRESS", number, *match.span())
            for number, row in enumerate(json.loads(body)["item"]["table"]["rows"])
            for match in MAIL.finditer(row["values"][0]["stringValue"])
        ]
        is_cut = {"findingsTruncated": True} if len(findings) > self.most_findings else {}
        return {"result": {"findings": findings[: self.most_findings], **is_cut}}

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


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
    transport = google_dlp.services.dlp_service.transports.DlpServiceRestTransport(
        host=f"127.0.0.1:{service.server.server_port}",
        url_scheme="http",
        credentials=AnonymousCredentials(),
    )
    monkeypatch.setattr(dlp, "client", lambda: google_dlp.DlpServiceClient(transport=transport))
    monkeypatch.setattr(dlp, "PATIENCE_S", 3.0)
    yield service
    transport.close()
    service.close()


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
