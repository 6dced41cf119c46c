"""The general prompts and those for SQL: a shipped file is what its recipe writes, of every kind,
and cleaning keeps them.
"""

import gzip
import importlib.util
import json
import random
from collections import Counter
from pathlib import Path

import pytest
import yaml

from eyas import builtin
from eyas.artifact import Artifact
from eyas.data.prompts import PromptsConfig, make_prompts

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def loaded(name):
    """A recipe, which imports those beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recipe():
    return loaded("general_prompts")


@pytest.fixture(scope="module")
def sql():
    return loaded("sql_prompts")


def test_the_shipped_files_are_what_the_recipes_write(recipe, sql):
    shipped = {builtin.general_prompts(): recipe.general_rows, builtin.sql_prompts(): sql.sql_rows}
    for path, rows in shipped.items():
        packed = path.read_bytes()
        assert gzip.decompress(packed).decode().splitlines() == rows()
        assert len(packed) < 50_000
        assert packed[4:8] == b"\0\0\0\0"  # gzip's time stamp: the same bytes on any day


def test_there_are_as_many_of_each_kind(recipe):
    kinds = Counter(json.loads(row)["category"] for row in recipe.general_rows())
    assert len(kinds) == 9
    assert max(kinds.values()) - min(kinds.values()) <= 1


@pytest.mark.parametrize("name", ["general_prompts", "sql_prompts"])
def test_every_template_can_be_written(recipe, name):
    templates = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    slots = {name: recipe.listed(text) for name, text in templates["slots"].items()}
    kinds = [line for text in templates["kinds"].values() for line in recipe.lines(text)]
    for template in [*kinds, *templates["follow"]]:
        for seed in range(5):
            text = recipe.Writer(random.Random(seed), slots).write(template)
            assert text
            assert not set("[]{}|") & set(text), text


def test_cleaning_keeps_them(tmp_path):
    output = Artifact(str(tmp_path / "prompts"))
    source = {"path": str(builtin.general_prompts()), "licence": "CC0-1.0"}
    make_prompts(PromptsConfig(sources=[source]), output)
    ledger = output.manifest().facts["ledger"]
    assert ledger["rows_in"] == 300
    assert ledger["rows_out"] > 200, ledger["dropped"]


def test_cleaning_keeps_enough_for_the_demo_and_finds_what_was_put_in(tmp_path, sql):
    output = Artifact(str(tmp_path / "prompts"))
    source = {"path": str(builtin.sql_prompts()), "licence": "CC0-1.0"}
    make_prompts(PromptsConfig(sources=[source]), output)
    ledger = output.manifest().facts["ledger"]
    assert ledger["rows_out"] >= 300
    assert ledger["dropped"]["empty"] == sql.NUM_EMPTY
    assert ledger["dropped"]["malformed"] == sql.NUM_BROKEN
    assert ledger["dropped"]["duplicate.exact"] >= sql.NUM_DUPLICATES - 2
    assert {"EMAIL_ADDRESS", "PHONE_NUMBER"} <= set(ledger["masked"])
