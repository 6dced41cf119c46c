"""Installed recognisers of names and places beside ours: a spaCy pipeline, a transformers or a
GLiNER model, the last two through Presidio. Nothing is downloaded.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from eyas.errors import ConfigError
from eyas.privacy.findings import Finding

Search = Callable[[str, str], Iterable[Finding]]  # of a text, and the conversation that it is in
NER_SCORE = 0.5  # the least of a model
# Labels of the usual models (OntoNotes, CoNLL, WikiNER, OpenAI's Privacy Filter, sets made for
# personal data, spaCy's Polish and Swedish pipelines). What has a form is found by patterns.
TYPE_LABELS = {
    "PERSON": "PERSON PER NAME GIVENNAME SURNAME FIRSTNAME LASTNAME MIDDLENAME PRIVATE_PERSON "
    "PERSNAME PRS",
    "LOCATION": "LOCATION LOC GPE FAC CITY COUNTRY STATE PLACENAME GEOGNAME",
    "STREET_ADDRESS": "STREET_ADDRESS STREET ADDRESS PRIVATE_ADDRESS BUILDINGNUM ZIPCODE",
}
NER_LABELS = {label: type for type, labels in TYPE_LABELS.items() for label in labels.split()}
# What a GLiNER model is asked for, in the words that its PII models are trained on.
GLINER_LABELS = {
    "person": "PERSON",
    "name": "PERSON",
    "address": "STREET_ADDRESS",
    "street address": "STREET_ADDRESS",
    "city": "LOCATION",
    "location": "LOCATION",
}


@dataclass(frozen=True, slots=True)
class NameRecogniser:
    """Finds the types of names in texts of the languages that it knows; None: all."""

    name: str
    find: Search
    languages: frozenset[str] | None = None

    def knows(self, language: str) -> bool:
        return self.languages is None or language in self.languages


@functools.cache
def installed(name: str) -> NameRecogniser:
    """The recogniser that `spacy:NAME`, `transformers:FOLDER` or `gliner:FOLDER` names, loaded.

    Raises ConfigError when it, or a library that it needs, is not installed.
    """
    kind, _, model = name.partition(":")
    if kind not in LOADERS or not model:
        raise ConfigError(
            f"no recogniser is called {name!r}",
            "give spacy:NAME, transformers:FOLDER or gliner:FOLDER",
        )
    return NameRecogniser(name, *LOADERS[kind](model))


@functools.cache
def model_version(name: str) -> str:
    """What changes with the model of a recogniser: the SHA-256 of a folder's files, else the
    version of an installed pipeline. Raises ConfigError for what is not installed.
    """
    model = name.partition(":")[2]
    if Path(model).is_dir():
        digest = hashlib.sha256()
        for path in sorted(path for path in Path(model).rglob("*") if path.is_file()):
            digest.update(f"{path.relative_to(model)}\0".encode())
            with path.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()
    try:
        return metadata.version(model)
    except (metadata.PackageNotFoundError, ValueError):
        raise _absent(name) from None


def _absent(name: str) -> ConfigError:
    return ConfigError(
        f"no recogniser is installed at {name}",
        "install the pipeline (python -m spacy download ...) or give the model's folder; eyas "
        "downloads none",
    )


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"`ner` needs {name.partition('.')[0]}, which is not installed", "pip install eyas[ner]"
        ) from error


def _spacy(name: str) -> tuple[Search, frozenset[str] | None]:
    try:
        pipeline = _library("spacy").load(name)
    except OSError as error:
        raise _absent(f"spacy:{name}") from error

    def find(text: str, _: str) -> Iterator[Finding]:
        for entity in pipeline(text).ents:
            if type := NER_LABELS.get(entity.label_.upper()):
                yield Finding(type, entity.start_char, entity.end_char)

    return find, None if pipeline.lang == "xx" else frozenset({pipeline.lang})


def _presidio(
    kind: str, folder: str, config: str, settings: Mapping[str, Any]
) -> tuple[Search, None]:
    """A model through the recogniser of Presidio for its kind. config: the file that its folder
    has.
    """
    if not (Path(folder) / config).is_file():
        raise _absent(folder)
    recognizers = _library("presidio_analyzer.predefined_recognizers")
    try:
        recognizer = getattr(recognizers, kind)(model_name=folder, threshold=NER_SCORE, **settings)
        recognizer.load()
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"Presidio's {kind} cannot load {folder} ({type(error).__name__})",
            "see the model's config, and that its library is installed (pip install gliner)",
        ) from error

    def find(text: str, _: str) -> Iterator[Finding]:
        for one in recognizer.analyze(text, recognizer.supported_entities, None):
            yield Finding(one.entity_type, one.start, one.end)

    return find, None


def _transformers(folder: str) -> tuple[Search, None]:
    settings = {
        "label_mapping": NER_LABELS | {label.lower(): type for label, type in NER_LABELS.items()},
        "label_prefixes": [f"{part}-" for part in "BIESLU"],
        "device": "cpu",
    }
    return _presidio("HuggingFaceNerRecognizer", folder, "config.json", settings)


def _gliner(folder: str) -> tuple[Search, None]:
    settings = {
        "entity_mapping": GLINER_LABELS, "map_location": "cpu", "local_files_only": True
    }  # fmt: skip
    return _presidio("GLiNERRecognizer", folder, "gliner_config.json", settings)


LOADERS: dict[str, Callable[[str], tuple[Search, frozenset[str] | None]]] = {
    "spacy": _spacy,
    "transformers": _transformers,
    "gliner": _gliner,
}
