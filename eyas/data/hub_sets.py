"""Sets of the Hugging Face hub by id, `owner/name[@revision]`, subset and split, which the package
`datasets` reads. A single file is read as of any store: hf://datasets/owner/name/path.

HF_TOKEN opens gated sets, HF_ENDPOINT names another hub; offline the cache of `datasets` is read.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from eyas.data.formats import ending
from eyas.errors import InputError, MissingInputError, extra
from eyas.hub import HUB_ID, faults

SET = re.compile(rf"({HUB_ID.pattern})(?:@(.+))?")
TRAIN = "train"


def hub_set(path: str) -> tuple[str, str | None] | None:
    """The id and revision of the set that a path names; None for a file or folder."""
    found = SET.fullmatch(path)
    if found is None or ending(path) or Path(path).exists():
        return None
    return found[1], found[2]


def set_commit(path: str, subset: str | None) -> str:
    """The commit at which a set is read. Raises as `set_rows`."""
    return str(_builder(path, subset).hash)


def set_rows(
    path: str, subset: str | None, split: str | None, keys: frozenset[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a set with their numbers, from 1; keys: the columns to read, None for all.

    Raises MissingInputError (no such set, subset or split), InputError (no package `datasets`).
    """
    builder = _builder(path, subset)
    with _faults(path):
        builder.download_and_prepare()
        rows = builder.as_dataset(split=split or TRAIN)
    if keys is not None:
        rows = rows.select_columns([name for name in rows.column_names if name in keys])
    yield from enumerate(rows, start=1)


@functools.cache
def _builder(path: str, subset: str | None) -> Any:
    id, revision = hub_set(path) or (path, None)
    with _faults(path):
        return _datasets(path).load_dataset_builder(id, subset, revision=revision)


def _datasets(path: str) -> ModuleType:
    try:
        return importlib.import_module("datasets")  # seconds that no other source needs
    except ImportError as error:
        raise InputError(
            f"no file or folder {path} here, and sets of the hub need the package datasets, which "
            "is not installed",
            f"check the path, or {extra('hub')}",
        ) from error


@contextmanager
def _faults(path: str) -> Iterator[None]:
    try:
        yield
    except (_datasets(path).exceptions.DatasetsError, *faults()) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise MissingInputError(
            f"no file or folder {path} here, and no set of the hub can be read: {reason}",
            "check the id, `subset` and `split`; HF_TOKEN opens gated and private sets",
        ) from error
