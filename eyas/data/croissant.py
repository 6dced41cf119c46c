"""The data card for machines: Croissant JSON-LD, with the vocabulary for responsible AI.

After the Croissant Format Specification 1.0 and its RAI extension 1.0 (MLCommons, 2024). Takes what
the card takes; knows no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.artifact import File
from eyas.data.card import WEAKNESSES, CardContents, remaining

NAME = "prompts"
LINES = "prompt-lines"
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileProperty": "cr:fileProperty",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
# Field of a prompt, its meaning, whether it is a list.
FIELDS = (
    ("id", "unique within the set", False),
    ("source", "the source that it comes from", False),
    ("licence", "SPDX expression of the source's licence", False),
    ("turns", "what the user says, turn by turn", True),
    ("system", "the system prompt, if there is one", False),
)


def croissant(contents: CardContents, parts: Mapping[str, File]) -> dict[str, Any]:
    """The description of prompts in these files, as JSON-LD."""
    ledger, record = contents.ledger, contents.record
    verdicts = ledger.get("licences", ())
    licences = sorted({one["licence"] for one in verdicts})
    stated = {
        "rai:dataUseCases": record.get("purpose"),
        "rai:dataReleaseMaintenancePlan": _joined(
            retention=record.get("retention"), erasure=record.get("erasure")
        ),
    }
    operator = record.get("operator")
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": [
            "http://mlcommons.org/croissant/1.0",
            "http://mlcommons.org/croissant/RAI/1.0",
        ],
        "name": NAME,
        "description": f"{ledger['rows_out']} prompts of {len(ledger['sources'])} sources, "
        f"selected and changed by eyas; {ledger['rows_in']} rows came in.",
        "version": "1.0.0",
        "identifier": contents.identity,
        "citeAs": f"prompts made by eyas, identity {contents.identity}",
        "datePublished": record["date"],
        "license": licences,
        "creator": {"@type": "sc:Organization", "name": operator or "not stated"},
        "isBasedOn": [
            {
                "@type": "sc:Dataset",
                "name": one["name"],
                "url": one["url"],
                "identifier": one["sha256"],
                "license": licence,
            }
            for one, licence in zip(
                contents.sources, [one["licence"] for one in verdicts], strict=True
            )
        ],
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": name,
                "name": name,
                "contentUrl": name,
                "contentSize": f"{file.bytes} B",
                "encodingFormat": "application/jsonlines",
                "sha256": file.sha256,
            }
            for name, file in sorted(parts.items())
        ],
        "recordSet": [
            {
                "@type": "cr:RecordSet",
                "@id": f"{NAME}/{name}",
                "name": f"{NAME}/{name}",
                "field": [_field(name, *about) for about in FIELDS],
            }
            for name in sorted(parts)
        ],
        "rai:dataCollection": "Prompts of published or own sets, as their publishers state them: "
        + "; ".join(f"{one['source']}, prompts by {one['prompts_by']}" for one in verdicts),
        "rai:dataPreprocessingProtocol": _steps(contents),
        "rai:personalSensitiveInformation": _personal(contents),
        "rai:dataLimitations": list(WEAKNESSES),
        **{name: text for name, text in stated.items() if text},
    }


def _field(file: str, name: str, description: str, repeated: bool) -> dict[str, Any]:
    field: dict[str, Any] = {
        "@type": "cr:Field",
        "@id": f"{NAME}/{file}/{name}",
        "name": f"{NAME}/{file}/{name}",
        "description": description,
        "dataType": "sc:Text",
        "source": {"fileObject": {"@id": file}, "extract": {"column": name}},
    }
    return {**field, "repeated": True} if repeated else field


def _steps(contents: CardContents) -> list[str]:
    """What became of rows, by reason."""
    dropped = contents.ledger["dropped"]
    return [f"dropped as {reason}: {count}" for reason, count in dropped.items()] + [
        f"searched for {', '.join(types)} in {name}" for name, types in contents.searched.items()
    ]


def _personal(contents: CardContents) -> list[str]:
    """What was found and replaced, what is expected to remain, what was not searched for names."""
    lines = []
    for row in remaining(contents):
        if row["expected"] is None:
            estimate = "recall not measured"
        else:
            low, high = row["between"]
            estimate = f"about {row['expected']:.1f} expected to remain ({low:.1f} to {high:.1f})"
        lines.append(f"{row['type']}: {row['found']} found, {estimate}")
    return lines


def _joined(**parts: str | None) -> str:
    return "; ".join(f"{name}: {text}" for name, text in parts.items() if text)
