"""The demo's prompts: the shipped file is what the recipe writes, and cleaning finds all that was
put in.
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
from eyas.data.filters import find_all_types
from eyas.data.prompts import PromptsConfig, make_prompts

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "demo_prompts.py"


def loaded():
    spec = importlib.util.spec_from_file_location("demo_prompts", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recipe = loaded()
TEMPLATES = yaml.safe_load(recipe.TEMPLATES.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def shipped():
    return gzip.decompress(builtin.demo_prompts().read_bytes()).decode().splitlines()


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory):
    output = Artifact(str(tmp_path_factory.mktemp("demo") / "prompts"))
    make_prompts(
        PromptsConfig(sources=[{"path": str(builtin.demo_prompts()), "licence": "CC0-1.0"}]), output
    )
    return output


def test_the_shipped_file_is_what_the_recipe_writes(shipped):
    assert shipped == recipe.demo_rows()
    packed = builtin.demo_prompts().read_bytes()
    assert len(packed) < 300_000
    assert packed[4:8] == b"\0\0\0\0"  # gzip's time stamp: the same bytes on any day


def test_cleaning_finds_what_was_put_in(cleaned, monkeypatch):
    planted = Counter()

    class Counting(recipe.Author):
        def with_personal_data(self, turns, kind):
            changed = super().with_personal_data(turns, kind)
            planted["rows"] += 1
            assert any(find_all_types(turn) for turn in changed), changed
            return changed

    monkeypatch.setattr(recipe, "Author", Counting)
    recipe.demo_rows(num_good=1000, seed=1)
    assert 0.03 < planted["rows"] / 1000 < 0.07
    ledger = cleaned.manifest().facts["ledger"]
    assert ledger["rows_out"] > 2850
    # One or two broken rows are copies of duplicates; those with personal data may be counted under
    # that.
    assert (
        recipe.NUM_DUPLICATES - 8 <= ledger["dropped"]["duplicate.exact"] <= recipe.NUM_DUPLICATES
    )
    assert ledger["dropped"]["empty"] == recipe.NUM_EMPTY
    assert ledger["dropped"]["malformed"] == recipe.NUM_BROKEN
    assert (
        sum(count for reason, count in ledger["dropped"].items() if reason.startswith("pii.")) > 10
    )
    assert ledger["rows_masked"] > 80
    assert {"EMAIL_ADDRESS", "PHONE_NUMBER"} <= set(ledger["masked"])


def test_the_set_is_varied(cleaned, shipped):
    rows = list(cleaned.read_rows("prompts"))
    lengths = Counter(len(row["turns"]) for row in rows)
    assert set(lengths) == {1, 2, 3, 4}
    assert min(lengths.values()) > 200
    assert len({row["turns"][0] for row in rows}) > 0.9 * len(rows)
    words = Counter(word for row in rows for turn in row["turns"] for word in turn.lower().split())
    assert len(words) > 2000
    assert sum('"conversations"' in row for row in shipped) > 500
    assert sum('"messages"' in row for row in shipped) > 1500


def every_template():
    def below(value):
        return (
            [line for part in value.values() for line in below(part)]
            if isinstance(value, dict)
            else recipe.lines(value)
        )

    parts = {
        name: TEMPLATES[name]
        for name in ("closings", "links", "tasks", "coffee", "maths", "planted")
    }
    return (
        below(parts)
        + recipe.lines(TEMPLATES["commands"]["asks"])
        + recipe.lines(TEMPLATES["commands"]["more"])
    )


def test_every_template_can_be_written():
    slots = {name: recipe.listed(text) for name, text in TEMPLATES["slots"].items()}
    private = {name: ["x"] for name in ("email", "phone", "card", "iban")}
    for template in every_template():
        for seed in range(5):
            writer = recipe.Writer(
                random.Random(seed),
                {**slots, **private, "command": ["tar"], "task": ["pack", "unpack"]},
            )
            text = writer.write(template)
            assert text
            assert not set("[]{}|") & set(text), text
            assert "  " not in text


def test_reckoning():
    assert recipe.reckoned("a*b+c-2", {"a": 3, "b": 4, "c": 5}) == 15


def test_rows_are_ordinary_json_but_for_the_broken_ones(shipped):
    broken = 0
    for row in shipped:
        try:
            broken += not isinstance(json.loads(row), dict)
        except ValueError:
            broken += 1
    assert 0 < broken <= recipe.NUM_BROKEN
