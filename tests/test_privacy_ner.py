"""A recogniser that is installed: a spaCy pipeline and a transformers model, both made here; and
the errors without one.
"""

import json

import pytest
import spacy
import torch
from presidio_analyzer.predefined_recognizers.ner import gliner_recognizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

from eyas.errors import ConfigError
from eyas.privacy.detector import GLINER_LABELS, NER_LABELS, Detector
from eyas.privacy.findings import mask
from eyas.privacy.passages import passages
from eyas.privacy.pii import TYPES, PrivacyConfig

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


def test_a_recogniser_for_no_language_is_an_error(pipeline):
    with pytest.raises(ConfigError, match="'german'"):
        Detector(config_of({"german": f"spacy:{pipeline}"}))


def test_a_transformers_model_finds_what_ours_does_not(model):
    text = "the zorblax lives in quuxville ."
    assert (
        mask(text, Detector(config_of(f"transformers:{model}")).find(text))
        == "the <PERSON> lives in <LOCATION> ."
    )


@pytest.mark.parametrize(
    "labels", [("S-private_person", "S-private_address"), ("B-GIVENNAME", "B-STREET")]
)
def test_labels_of_models_made_for_personal_data(model, labels):
    """OpenAI's Privacy Filter marks whole entities with S and ends with E, in lower case."""
    config = json.loads((model / "config.json").read_text())
    config["id2label"] = {"0": "O", "1": labels[0], "2": labels[1]}
    config["label2id"] = {label: int(number) for number, label in config["id2label"].items()}
    (model / "config.json").write_text(json.dumps(config))
    text = "the zorblax lives in quuxville ."
    found = Detector(config_of(f"transformers:{model}")).find(text)
    assert mask(text, found) == "the <PERSON> lives in <STREET_ADDRESS> ."


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
    ("name", "says"),
    [
        ("spacy:en_core_web_absent", "no pipeline 'en_core_web_absent'"),
        ("transformers:/no/such/folder", "no model at /no/such/folder"),
        ("transformers:dslim/bert-base-NER", "eyas downloads none"),
        ("gliner:/no/such/folder", "no model at /no/such/folder"),
        ("stanza:en", "no recogniser is called"),
        ("spacy:", "no recogniser is called"),
    ],
)
def test_an_absent_recogniser_is_an_error_and_not_fetched(name, says, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    with pytest.raises(ConfigError, match=says):
        Detector(config_of(name))


def test_a_folder_without_a_model_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot load"):
        Detector(config_of(f"transformers:{tmp_path}"))


def test_an_absent_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gliner_recognizer, "GLiNER", None)
    (tmp_path / "gliner_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="pip install gliner"):
        Detector(config_of(f"gliner:{tmp_path}"))


def test_labels_are_of_our_types():
    assert {*NER_LABELS.values(), *GLINER_LABELS.values()} <= set(TYPES)
    assert all(label.isupper() for label in NER_LABELS)
