"""The packaged prompts: a shipped file is what its recipe writes, every template can be written,
and cleaning keeps the prompts and finds all that was put in.
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

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def loaded(name):
    """A recipe, which imports those beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


demo, general, sql = map(loaded, ("demo_prompts", "general_prompts", "sql_prompts"))
SHIPPED = {
    "demo": (builtin.demo_prompts(), demo.demo_rows, 300_000),
    "general": (builtin.general_prompts(), general.general_rows, 50_000),
    "sql": (builtin.sql_prompts(), sql.sql_rows, 50_000),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_file_is_what_the_recipe_writes(name):
    path, rows, most = SHIPPED[name]
    packed = path.read_bytes()
    assert gzip.decompress(packed).decode().splitlines() == rows()
    assert len(packed) < most
    assert packed[4:8] == b"\0\0\0\0"  # gzip's time stamp: the same bytes on any day


def below(value):
    """The templates of a part of a file."""
    if isinstance(value, dict):
        return [line for part in value.values() for line in below(part)]
    return value if isinstance(value, list) else demo.lines(value)


PARTS = ("closings", "links", "coffee", "maths", "planted", "kinds", "follow")


@pytest.mark.parametrize("name", SHIPPED)
def test_every_template_can_be_written(name):
    content = yaml.safe_load((RECIPES / f"{name}_prompts.yaml").read_text(encoding="utf-8"))
    slots = {slot: demo.listed(text) for slot, text in content["slots"].items()}
    slots |= {slot: ["x"] for slot in ("email", "phone", "card", "iban")}
    templates = [line for part in PARTS for line in below(content.get(part, []))]
    if name == "demo":
        slots |= {"command": ["tar"], "task": ["pack", "unpack"]}
        templates += below(content["tasks"]) + below(content["commands"]["asks"])
        templates += below(content["commands"]["more"])
    for template in templates:
        for seed in range(5):
            text = demo.Writer(random.Random(seed), slots).write(template)
            assert text
            assert not set("[]{}|") & set(text), text
            assert "  " not in text


def test_there_are_as_many_general_prompts_of_each_kind():
    kinds = Counter(json.loads(row)["category"] for row in general.general_rows())
    assert len(kinds) == 9
    assert max(kinds.values()) - min(kinds.values()) <= 1


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory):
    """The prompts artifact of each file."""
    made = {}
    for name, (path, _, _) in SHIPPED.items():
        made[name] = Artifact(str(tmp_path_factory.mktemp(name) / "prompts"))
        source = {"path": str(path), "licence": "CC0-1.0"}
        make_prompts(PromptsConfig(sources=[source]), made[name])
    return made


def test_cleaning_finds_what_was_put_in(cleaned, monkeypatch):
    planted = Counter()

    class Counting(demo.Author):
        def with_personal_data(self, turns, kind):
            changed = super().with_personal_data(turns, kind)
            planted["rows"] += 1
            assert any(find_all_types(changed)), changed
            return changed

    monkeypatch.setattr(demo, "Author", Counting)
    demo.demo_rows(num_good=1000, seed=1)
    assert 0.03 < planted["rows"] / 1000 < 0.07
    for name, recipe, least, few in (("demo", demo, 2850, 8), ("sql", sql, 300, 2)):
        ledger = cleaned[name].manifest().facts["ledger"]
        dropped = ledger["dropped"]
        assert ledger["rows_out"] >= least
        # a broken row may be a copy of a duplicate, one with personal data counted under that
        copies = dropped["duplicate.exact"]
        assert recipe.NUM_DUPLICATES - few <= copies <= recipe.NUM_DUPLICATES
        assert dropped["empty"] == recipe.NUM_EMPTY
        assert dropped["malformed"] == recipe.NUM_BROKEN
        assert {"EMAIL_ADDRESS", "PHONE_NUMBER"} <= set(ledger["masked"])
    ledger = cleaned["demo"].manifest().facts["ledger"]
    counts = ledger["dropped"].items()
    assert sum(count for reason, count in counts if reason.startswith("pii.")) > 10
    assert ledger["rows_masked"] > 80
    ledger = cleaned["general"].manifest().facts["ledger"]
    assert ledger["rows_in"] == 300
    assert ledger["rows_out"] > 200, ledger["dropped"]


def test_the_demo_s_set_is_varied(cleaned):
    rows = list(cleaned["demo"].read_rows("prompts"))
    lengths = Counter(len(row["turns"]) for row in rows)
    assert set(lengths) == {1, 2, 3, 4}
    assert min(lengths.values()) > 200
    assert len({row["turns"][0] for row in rows}) > 0.9 * len(rows)
    words = Counter(word for row in rows for turn in row["turns"] for word in turn.lower().split())
    assert len(words) > 2000


def test_the_demo_s_rows_are_ordinary_json_but_for_the_broken_ones():
    rows = gzip.decompress(builtin.demo_prompts().read_bytes()).decode().splitlines()
    assert sum('"conversations"' in row for row in rows) > 500
    assert sum('"messages"' in row for row in rows) > 1500
    broken = 0
    for row in rows:
        try:
            broken += not isinstance(json.loads(row), dict)
        except ValueError:
            broken += 1
    assert 0 < broken <= demo.NUM_BROKEN


def test_reckoning():
    assert demo.reckoned("a*b+c-2", {"a": 3, "b": 4, "c": 5}) == 15
