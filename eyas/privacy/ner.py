"""A recogniser of names and places that is installed on this machine: a spaCy pipeline or a
transformers model.

Knows how both are loaded and what their labels mean here. Downloads nothing: a model that is absent
is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import spacy
from presidio_analyzer import EntityRecognizer
from presidio_analyzer.predefined_recognizers import HuggingFaceNerRecognizer

from eyas.errors import ConfigError
from eyas.privacy.recognizer import Place, Recognizer

# Labels of the usual models (OntoNotes, CoNLL, WikiNER, and sets made for personal data). Others
# are not looked for.
LABELS = {
    "PERSON": "PERSON",
    "PER": "PERSON",
    "NAME": "PERSON",
    "GIVENNAME": "PERSON",
    "SURNAME": "PERSON",
    "LOCATION": "LOCATION",
    "LOC": "LOCATION",
    "GPE": "LOCATION",
    "FAC": "LOCATION",
    "CITY": "LOCATION",
    "COUNTRY": "LOCATION",
    "STREET_ADDRESS": "STREET_ADDRESS",
    "STREET": "STREET_ADDRESS",
    "ADDRESS": "STREET_ADDRESS",
}


class SpacyEntities:
    """A spaCy pipeline as a search."""

    def __init__(self, name: str) -> None:
        try:
            self._pipeline = spacy.load(name)
        except OSError as error:
            hint = (
                "install it first (python -m spacy download ...) or give its folder; nothing "
                "is "
                "downloaded by itself"
            )
            raise ConfigError(f"spaCy has no pipeline {name!r} here", hint) from error

    def __call__(self, text: str) -> Iterator[Place]:
        for entity in self._pipeline(text).ents:
            if type := LABELS.get(entity.label_.upper()):
                yield type, entity.start_char, entity.end_char


def ner_recognizer(name: str, score: float) -> EntityRecognizer:
    """The recogniser that `spacy:NAME` or `transformers:FOLDER` names, loaded. score: transformers'
    least.

    Raises ConfigError when it is not installed.
    """
    kind, _, model = name.partition(":")
    if kind == "spacy" and model:
        return Recognizer(SpacyEntities(model), *sorted(set(LABELS.values())))
    if kind == "transformers" and model:
        return _transformers(model, score)
    raise ConfigError(f"no recogniser is called {name!r}", "give spacy:NAME or transformers:FOLDER")


def _transformers(folder: str, score: float) -> EntityRecognizer:
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"no model at {folder}",
            "give the folder of a token-classification model; nothing is downloaded",
        )
    try:
        recognizer = HuggingFaceNerRecognizer(
            model_name=folder, label_mapping=LABELS, threshold=score, device="cpu"
        )
        recognizer.load()
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"transformers cannot load {folder} for names",
            f"{type(error).__name__}: see its config.json",
        ) from error
    return recognizer
