"""The general prompts: the shipped file is what the recipe writes, of every kind, and cleaning
keeps them.
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


@pytest.fixture(scope="module")
def recipe():
    """The recipe, which imports the one beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        path = RECIPES / "general_prompts.py"
        spec = importlib.util.spec_from_file_location("general_prompts", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def test_the_shipped_file_is_what_the_recipe_writes(recipe):
    packed = builtin.general_prompts().read_bytes()
    assert gzip.decompress(packed).decode().splitlines() == recipe.general_rows()
    assert len(packed) < 50_000
    assert packed[4:8] == b"\0\0\0\0"  # gzip's time stamp: the same bytes on any day


def test_there_are_as_many_of_each_kind(recipe):
    kinds = Counter(json.loads(row)["category"] for row in recipe.general_rows())
    assert len(kinds) == 9
    assert max(kinds.values()) - min(kinds.values()) <= 1


def test_every_template_can_be_written(recipe):
    templates = yaml.safe_load(recipe.TEMPLATES.read_text(encoding="utf-8"))
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
