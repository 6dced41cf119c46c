"""A recogniser that is installed: a spaCy pipeline and a transformers model, both made here; and
the errors without one.
"""

import pytest
import spacy
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast

from eyas.errors import ConfigError
from eyas.privacy.detector import NER_LABELS, Detector
from eyas.privacy.policy import TYPES, PrivacyConfig, mask

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
    text = "zorblax lives in quuxville. ana@python.org"
    assert (
        mask(text, Detector(config_of(f"spacy:{pipeline}")).find(text))
        == "<PERSON> lives in <LOCATION>. <EMAIL_ADDRESS>"
    )
    without = mask(text, Detector(config_of(None)).find(text))
    assert "zorblax" in without


def test_a_transformers_model_finds_what_ours_does_not(model):
    text = "the zorblax lives in quuxville ."
    assert (
        mask(text, Detector(config_of(f"transformers:{model}")).find(text))
        == "the <PERSON> lives in <LOCATION> ."
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("spacy:en_core_web_absent", "no pipeline 'en_core_web_absent'"),
        ("transformers:/no/such/folder", "no model at /no/such/folder"),
        ("transformers:dslim/bert-base-NER", "eyas downloads none"),
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


def test_labels_are_of_our_types():
    assert set(NER_LABELS.values()) <= set(TYPES)
    assert all(label.isupper() for label in NER_LABELS)
