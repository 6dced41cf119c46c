"""The stage `prompts`: what goes in comes out or is dropped for a reason, and nothing private is
written anywhere.
"""

import base64
import gzip
import html
import itertools
import json
import os
import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.artifact import Artifact
from eyas.data import selection
from eyas.data.filters import too_long
from eyas.data.ledger import Drop
from eyas.data.prompts import PromptsConfig, make_prompts
from eyas.errors import ConfigError, CorruptError, EmptyInputError, InputError
from eyas.records import Prompt
from tests.source_rows import (
    SAID_BY_ASSISTANT,
    json_lines,
    openai,
    real_messages,
    row,
    shared,
    sharegpt,
    written,
)

LICENCES = ("MIT", "CC-BY-4.0", "CC0-1.0")
MAIL, CARD, PHONE = "ana.lee@example.com", "4242 4242 4242 4242", "(415) 555-0134"


def config(folder, *sets, **settings):
    """A config of one source per set of rows, each written to a file of its own."""
    sources = []
    folder.mkdir(exist_ok=True)
    for number, rows in enumerate(sets):
        path = written(folder / f"set{number}.jsonl", rows)
        sources.append({"path": path, "licence": LICENCES[number], "prompts_by": "human"})
    return PromptsConfig(sources=sources, **settings)


def run(folder, *sets, **settings):
    output = Artifact(str(folder / "prompts"))
    make_prompts(config(folder, *sets, **settings), output)
    return output


def prompts(output):
    return [Prompt.from_json(row) for row in output.read_rows("prompts")]


def test_every_row_is_accounted_for(tmp_path):
    first = [
        openai("Where is the dog?", "And the cat?", id="a"),
        sharegpt("where IS the dog?", " And  the cat? ", id="b"),
        openai(f"I am {MAIL}", id="c"),
        openai(f"Charge {CARD} and call {PHONE}", id="d"),
        openai("", id="e"),
        openai("x" * 101, id="f"),
        ["no row"],
    ]
    sing = {"instruction": "Sing.", "output": SAID_BY_ASSISTANT}
    second = [openai("Where is the dog?", "And the cat?"), sing]
    output = run(tmp_path, first, second, max_characters=100, personal={"policy": "mask"})
    kept = prompts(output)
    assert [(one.id, one.source, one.licence, one.turns) for one in kept[:2]] == [
        ("a", "set0", "MIT", ("Where is the dog?", "And the cat?")),
        ("c", "set0", "MIT", ("I am <EMAIL_ADDRESS>",)),
    ]
    assert (kept[2].source, kept[2].licence, kept[2].turns) == ("set1", "CC-BY-4.0", ("Sing.",))
    assert len(kept[2].id) == 16
    ledger = output.read_json("ledger.json")
    account = ledger["sources"]["set0"]
    assert (account["rows_in"], account["rows_out"], account["rows_masked"]) == (7, 2, 1)
    reasons = ("duplicate.exact", "empty", "malformed", "pii.credit_card", "too_long")
    assert account["dropped"] == dict.fromkeys(reasons, 1)
    assert account["masked"] == {"EMAIL_ADDRESS": 1}
    assert ledger["sources"]["set1"]["dropped"] == {"duplicate.exact": 1}
    assert (ledger["rows_in"], ledger["rows_out"], sum(ledger["dropped"].values())) == (9, 3, 6)
    dropped = {row["where"]: row for row in output.read_rows("dropped")}
    assert dropped["set0.jsonl:2"]["note"] == "the same as set0.jsonl:1 of set0"
    assert dropped["set0.jsonl:4"]["turns"] == ["Charge <CREDIT_CARD> and call <PHONE_NUMBER>"]
    found = dropped["set0.jsonl:4"]["found"][0]
    place = {"type": "CREDIT_CARD", "start": 7, "end": 26, "turn": 0}
    assert found == {**place, "hash": found["hash"]}
    assert len(found["hash"]) == 16
    assert dropped["set0.jsonl:6"]["note"] == "101 characters, allowed are 100"
    assert dropped["set0.jsonl:7"]["reason"] == "malformed"
    assert output.manifest().counts == {"rows": 9, "prompts": 3, "dropped": 6, "masked": 1}
    licences = {made.config["licence"] for made in output.manifest().inputs.values()}
    assert licences == {"MIT", "CC-BY-4.0"}


def test_rows_that_differ_in_personal_data_only_are_duplicates(tmp_path):
    rows = [openai("I am ana@example.com"), openai("I am bob@example.org")]
    output = run(tmp_path, rows, personal={"policy": "mask"})
    assert [one.turns for one in prompts(output)] == [("I am <EMAIL_ADDRESS>",)]


def test_invented_values_hide_no_near_duplicate(tmp_path):
    said = (
        "Please write me a polite letter that ends the contract with my gym before the next summer "
        "begins, with the reason that I move to another town, and ask them {} to {} and to {} "
        "at the latest by the end of the week, because I leave on Monday."
    )
    ones = [
        said.format(word, f"{name}@mail.python.org", f"{name}.b@mail.python.org")
        for word, name in (("to answer", "ana"), ("to reply", "bo"), ("for a note", "cy"))
    ]
    output = run(tmp_path, [openai(one) for one in ones])
    assert output.manifest().counts["prompts"] == 1
    assert output.read_json("ledger.json")["dropped"] == {"duplicate.near": 2}


def test_ids_are_the_source_s_own_where_they_are_free(tmp_path):
    rows = [openai("One", id="a"), openai("Two", id="a"), openai("Three"), openai("Four", id="b")]
    ids = [one.id for one in prompts(run(tmp_path, rows, [openai("Five", id="b")]))]
    assert (ids[0], ids[3]) == ("a", "b")
    assert len(set(ids)) == 5


def test_an_id_made_from_the_text_is_stable_and_gives_way(tmp_path):
    (alone,) = prompts(run(tmp_path, [openai("Three")]))
    others = prompts(run(tmp_path / "other", [openai("One"), openai("  three")]))
    assert others[1].id == alone.id
    rows = [openai("Seven", id=alone.id), openai("Three")]
    taken, given_way = prompts(run(tmp_path / "clash", rows))
    assert taken.id == alone.id
    assert given_way.id.startswith(alone.id)
    assert given_way.id != alone.id


def test_the_same_bytes_make_the_same_artifact_wherever_they_lie(tmp_path):
    rows = [openai(f"Question {number}", f"I am u{number}@example.com") for number in range(20)]
    outputs = [run(tmp_path / name, rows) for name in ("here", "there")]
    assert outputs[0].manifest().identity == outputs[1].manifest().identity
    files = [output.manifest().files for output in outputs]
    for one in files:  # which names the paths of the sources
        del one["card.html"]
    assert files[0] == files[1]


def test_max_prompts_ends_the_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "BLOCK_ROWS", 2)
    rows = [openai(f"Question {number}") for number in range(10)]
    output = run(tmp_path, [rows[0], *rows], max_prompts=3)
    assert [one.turns[0] for one in prompts(output)] == ["Question 0", "Question 1", "Question 2"]
    assert output.manifest().counts == {"rows": 4, "prompts": 3, "dropped": 1, "masked": 0}
    output = run(tmp_path / "amid", rows, max_prompts=3)
    assert [one.turns[0] for one in prompts(output)] == ["Question 0", "Question 1", "Question 2"]
    # what is left of the last block that was read
    assert output.manifest().facts["ledger"]["dropped"] == {"limit": 1}


def test_reading_goes_on_for_near_duplicates(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "BLOCK_ROWS", 2)
    said = " ".join(f"word{number}" for number in range(40))
    rows = [openai(one) for one in (*(f"{said} {n}" for n in range(5)), "One", "Two", "Three")]
    output = run(tmp_path, rows, max_prompts=3)
    assert [one.turns[0] for one in prompts(output)] == [f"{said} 0", "One", "Two"]
    assert output.manifest().facts["ledger"]["dropped"] == {"duplicate.near": 4, "limit": 1}


def test_nothing_left_is_an_error_that_says_why(tmp_path):
    with pytest.raises(CorruptError, match="not one of the 2 rows"):
        run(tmp_path, [7, 8])
    assert not {"_IDENTITY", "work"} & set(os.listdir(tmp_path / "prompts"))
    with pytest.raises(EmptyInputError, match=r"of 3 rows \(2 empty, 1 malformed\)") as raised:
        run(tmp_path, [openai(""), openai(), 7])
    assert raised.value.exit_code == 2
    output = Artifact(str(tmp_path / "prompts"))
    assert not output.is_done()
    assert len(list(output.read_rows("dropped"))) == 3
    assert not {"_IDENTITY", "work"} & set(os.listdir(tmp_path / "prompts"))
    other = run(tmp_path, [openai("Sing."), openai("")])
    assert [one.turns for one in prompts(other)] == [("Sing.",)], (
        "the folder is free for other work"
    )
    assert len(list(other.read_rows("dropped"))) == 1


def test_a_key_that_is_no_text_is_quoted_nowhere(tmp_path):
    key = base64.b64encode(random.Random(1).randbytes(1200)).decode()
    body = "\n".join(key[at : at + 64] for at in range(0, len(key), 64))
    output = run(tmp_path, [openai(f"{body}\n-----END RSA PRIVATE KEY-----"), openai("Sing.")])
    (line,) = output.read_rows("dropped")
    assert (line["reason"], line["turns"]) == ("quality.non_text", [])
    for path in (tmp_path / "prompts").rglob("*"):
        assert path.is_dir() or key[:24].encode() not in path.read_bytes(), path


def test_tools_and_placeholders_are_counted(tmp_path):
    tools = [{"type": "function", "function": {"name": "find"}}]
    rows = [openai("Find me a table.", tools=tools)], [openai("Who is NAME_1 to NAME_2?")]
    facts = run(tmp_path, *rows).manifest().facts
    assert facts["ledger"]["dropped"] == {"tools": 1}
    assert facts["ledger"]["placeholders"] == 1
    assert facts["placeholders"] == ["set1: 1 prompts hold placeholders such as NAME_1"]


def test_two_sources_of_one_name(tmp_path):
    source = {"path": str(tmp_path / "set.jsonl"), "licence": "MIT", "prompts_by": "human"}
    with pytest.raises(ConfigError, match="two sources are called 'set'"):
        PromptsConfig(sources=[source, source])
    assert len(PromptsConfig(sources=[source, {**source, "name": "other"}]).sources) == 2


def test_evaluation_sets_keep_their_items_out_whatever_their_dress(tmp_path):
    item = "Write a short poem about a lighthouse keeper who has lost the key to the lamp room"
    path = written(tmp_path / "bench.jsonl", [openai(item)])
    rows = [openai(item), openai(f"Please:  {item.upper()}!!"), openai("Write a poem about rain.")]
    output = run(tmp_path, rows, evaluation=[{"path": path}])
    assert [one.turns for one in prompts(output)] == [("Write a poem about rain.",)]
    assert output.manifest().facts["ledger"]["dropped"] == {"contamination.bench": 2}
    other = "Something else that is long enough to be an item of its own"
    written(tmp_path / "bench.jsonl", [openai(other)])
    with pytest.raises(InputError, match="holds other work"):
        run(tmp_path, rows, evaluation=[{"path": path}])


def test_a_language_that_is_not_to_be_kept(tmp_path):
    german = "Kannst du mir bitte erklären, wie ich einen Tisch für zwei Personen reserviere?"
    rows = [openai(german), openai("Could you please tell me how to book a table?")]
    output = run(tmp_path, rows, languages=["en"])
    assert output.manifest().facts["ledger"]["dropped"] == {"language": 1}
    assert output.read_json("ledger.json")["languages"] == {"en": 1}


def rows_about(things, count, start=0):
    return [
        openai(f"Question {number}: what of {things[number % len(things)]}?")
        for number in range(start, start + count)
    ]


def test_a_match_takes_what_resembles_the_traffic_and_says_how_well(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "BLOCK_ROWS", 30)
    food, trains = ["bread and soup", "rice with beans"], ["a train to Rome", "the night train"]
    traffic = written(tmp_path / "traffic.jsonl", rows_about(food, 60, 500))
    settings = {"match": {"traffic": traffic, "num_prompts": 40}, "near_duplicates": None}
    pool = rows_about(food, 60) + rows_about(trains, 120, 100)
    output = run(tmp_path, pool, **settings, seed=1)
    kept = prompts(output)
    assert len(kept) == 40
    assert sum("train" not in one.turns[0] for one in kept) > 35
    assert output.manifest().facts["ledger"]["dropped"] == {"match": 140}
    fitted = output.read_json("match.json")
    assert fitted["js"]["after"] < fitted["js"]["before"]
    assert fitted["num_prompts"]["before"] == 180
    assert fitted["num_prompts"]["after"] == 40
    assert prompts(run(tmp_path / "again", pool, **settings, seed=2)) != kept


def test_a_match_reads_a_server_s_log(tmp_path):
    things = ["bread and soup", "rice with beans"]
    bodies = [{"model": "m", **row, "user": "u"} for row in rows_about(things, 60, 500)]
    line = "(APIServer pid=7) DEBUG 11-22 10:00:01 [x.py:76] Request c-{} JSON body: {}"
    texts = [line.format(number, json.dumps(body)) for number, body in enumerate(bodies)]
    (tmp_path / "server.log").write_text("\n".join(["ready", *texts]))
    as_rows = written(tmp_path / "traffic.jsonl", bodies)
    reports = []
    for number, traffic in enumerate([str(tmp_path / "server.log"), as_rows]):
        match = {"traffic": traffic, "num_prompts": 20}
        pool = rows_about(things, 60) + rows_about(["a train"], 60, 100)
        output = run(tmp_path / str(number), pool, match=match, near_duplicates=None)
        reports.append(output.read_json("match.json"))
    assert reports[0] == reports[1]
    assert reports[0]["num_prompts"]["traffic"] + reports[0]["num_prompts"]["traffic_fitted"] == 60


def test_a_source_s_limit_draws_from_all_its_prompts(tmp_path):
    sets = rows_about(["bread"], 40), rows_about(["a train"], 30, 100)
    drawn = []
    for seed in (0, 0, 1):
        (tmp_path / str(len(drawn))).mkdir()
        made = config(tmp_path, *sets, near_duplicates=None, seed=seed)
        first = made.sources[0].model_copy(update={"max_prompts": 10})
        made = made.model_copy(update={"sources": [first, made.sources[1]]})
        output = Artifact(str(tmp_path / str(len(drawn)) / "out"))
        make_prompts(made, output)
        drawn.append([one.turns for one in prompts(output)])
        assert Counter(one.source for one in prompts(output)) == {"set0": 10, "set1": 30}
        assert output.manifest().facts["ledger"]["dropped"] == {"limit": 30}
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][:10] != [tuple(one.turns) for one in prompts(output)][:10]


def test_a_licence_that_is_not_stated_is_the_registry_s(tmp_path):
    path = written(tmp_path / "set0.jsonl", [openai("How many are left?")])
    source = {"path": path, "name": "openai/gsm8k"}
    output = Artifact(str(tmp_path / "out"))
    make_prompts(PromptsConfig(sources=[source]), output)
    assert [one.licence for one in prompts(output)] == ["MIT"]


def test_length_counts_the_system_prompt_too():
    one = row("abc", "de", system="fg")
    assert too_long(7)(one) is one
    assert isinstance(too_long(6)(one), Drop)


GOOD = [
    openai("Where is the dog?", "And the cat?", id="a"),
    sharegpt("Book a table for two", id="b"),
    openai(f"My mail is {MAIL} .", id="c"),
    sharegpt("Pay", f"with {CARD} please", id="d"),
    openai(f"call {PHONE} today", "thanks", id="a"),
    {"instruction": "Sing.", "input": "A song", "answer": SAID_BY_ASSISTANT},
    {"turns": ["Hi", "Ho"], "id": 3, "reference": SAID_BY_ASSISTANT},
    openai(" "),
]


LONG = json.dumps(openai("long " * 2_000_000)).encode()  # 10 MB
NESTED = b"[" * 100_000
JUNK = [b"null", b"[null]", b'{"messages": null}', b"\x00" * 9, b"7", NESTED]
JUNK.append(b'{"messages": [null, {"role": null, "content": 3}]}')


@st.composite
def damaged_lines(draw):
    lines = []
    for good in draw(st.lists(st.sampled_from(GOOD), max_size=12)):
        line = json.dumps(good).encode()
        place = draw(st.integers(1, len(line) - 1))
        damaged = [
            line[:place],
            line[:place] + b"\xff" + line[place:],
            line.decode().encode("utf-16"),
            line.replace(b"the", b"th\xe9"),
            line[:place] + b"\x00" + line[place:],
            draw(st.sampled_from(JUNK)),
            b"[" + line + b"]",
            line.replace(b'"messages"', b'"talk"'),
            b"  \n" + line,
            draw(st.binary(max_size=9)).replace(b"\n", b"") + b"#\n" + line,
        ]
        damaged = draw(st.sampled_from([line] * 6 + damaged))
        lines += damaged.split(b"\n")
    if draw(st.integers(0, 15)) == 0:
        lines.append(LONG)
    # A good row first: a file whose first bytes begin no JSON lines would be read as something
    # else.
    return [json.dumps(openai("First")).encode(), *lines]


@st.composite
def damaged_files(draw):
    """A file, how many rows it held, and whether it is a gzip that was cut."""
    lines = draw(damaged_lines())
    data = b"\n".join(lines) + draw(st.sampled_from([b"", b"\n", b"\n\n"]))
    count = sum(bool(line.strip()) for line in lines)
    if not draw(st.booleans()):
        return data, count, False
    packed = gzip.compress(data, mtime=0)
    if draw(st.booleans()):
        return packed, count, False
    return packed[: draw(st.integers(len(packed) // 2, len(packed) - 1))], count, True


@settings(deadline=None, max_examples=20)
@given(st.lists(damaged_files(), min_size=1, max_size=2))
def test_rows_in_are_rows_out_and_drops_whatever_the_damage(files):
    with tempfile.TemporaryDirectory() as folder:
        sources = []
        for number, (data, _, _) in enumerate(files):
            path = Path(folder) / f"set{number}.jsonl"
            path.write_bytes(data)
            sources.append({"path": str(path), "licence": "MIT", "prompts_by": "human"})
        output = Artifact(f"{folder}/out")
        try:
            manifest = make_prompts(PromptsConfig(sources=sources), output)
        except CorruptError:
            # before its first row: not one can be read
            assert any(is_cut for _, _, is_cut in files)
            return
        except InputError as error:
            if "looks like Windows-1252" not in error.what:
                raise
            return  # all that is not ASCII is of this one encoding: see test_formats
        kept, dropped = prompts(output), list(output.read_rows("dropped"))
        written = b"".join(output.read(name) for name in manifest.files)
    ledger = manifest.facts["ledger"]
    for number, (_, count, is_cut) in enumerate(files):
        account = ledger["sources"][f"set{number}"]
        gone = Counter(row["reason"] for row in dropped if row["source"] == f"set{number}")
        assert account["dropped"] == gone
        assert account["rows_out"] == sum(one.source == f"set{number}" for one in kept)
        assert account["rows_in"] == account["rows_out"] + gone.total()
        # Where a gzip's checksum alone is cut, its rows are all there and what misses is one more
        # drop.
        assert account["rows_in"] <= count + 1 if is_cut else account["rows_in"] == count
    assert ledger["rows_in"] == len(kept) + len(dropped)
    assert len({one.id for one in kept}) == len(kept)
    assert all(turn.strip() for one in kept for turn in one.turns)
    for value in (SAID_BY_ASSISTANT, MAIL, CARD, PHONE):
        assert value.encode() not in written


REAL_SETS = {
    "gsm8k_train.jsonl.gz": {"name": "gsm8k"},
    "tldr.jsonl.gz": {"name": "tldr-pages"},
    "sgd_dev.jsonl.gz": {"name": "schema-guided-dialogue"},
    "prompts/spec_bench.jsonl": {
        "name": "spec-bench",
        "overrule": {"evaluation-only": "a test reads it"},
    },
}


def damaged_sets(folder):
    sums = [openai(f"What is {n} plus {n * n}?") for n in range(3000)]
    packed = gzip.compress(json_lines(sums).encode())
    rows = [json.dumps(openai(f"Which way to house {n * n} is it?")).encode() for n in range(100)]
    sets = {
        "cut.jsonl.gz": packed[: len(packed) * 2 // 3],
        "short.jsonl": b"\n".join(rows)[:-9],
        "bad.jsonl": b"\n".join([*rows[:96], *[b'{"messages": '] * 4, b""]),
        "fair.jsonl": b"\n".join([*rows[:98], *[b'{"messages": '] * 2, b""]),
    }
    for name, data in sets.items():
        (folder / name).write_bytes(data)
    return [{"path": str(folder / name), "licence": "MIT", "prompts_by": "human"} for name in sets]


def test_a_cut_file_and_many_malformed_rows_are_warnings_or_an_error(tmp_path):
    output = Artifact(str(tmp_path / "prompts"))
    given = PromptsConfig(sources=damaged_sets(tmp_path), near_duplicates=None)
    manifest = make_prompts(given, output)
    cut, short, bad = manifest.facts["warnings"]
    assert cut.startswith("cut: cut or damaged in 1 place; how many rows were lost there is not")
    assert bad == "bad: 4 of 100 rows (4.0%) could not be read"
    ledger = output.read_json("ledger.json")
    assert short == cut.replace("cut: ", "short: ", 1)
    assert ledger["warnings"] == [cut, short, bad]
    assert ledger["sources"]["cut"]["dropped"]["cut"] == 1
    assert html.escape(cut) in output.read("card.html").decode()
    strict = given.model_copy(update={"damaged": "error"})
    with pytest.raises(CorruptError, match=r"cut: cut or damaged .*; short: .*; bad: 4 of 100"):
        make_prompts(strict, output)  # finished under `warn`: an error all the same
    anew = Artifact(str(tmp_path / "anew"))
    with pytest.raises(CorruptError, match="bad: 4 of 100"):
        make_prompts(strict, anew)
    assert not anew.is_done()
    assert not {"_IDENTITY", "work"} & set(os.listdir(tmp_path / "anew"))
    for source in given.sources[:3]:
        (tmp_path / source.path).unlink()
        (tmp_path / source.path).write_bytes(gzip.compress(json_lines([openai("Sing.")]).encode()))
    assert make_prompts(strict, anew).identity != manifest.identity, "the folder was free"


@pytest.mark.parametrize("name", REAL_SETS)
def test_real_sets(tmp_path, name):
    output = Artifact(str(tmp_path / "prompts"))
    source = {"path": str(shared(name)), **REAL_SETS[name]}
    manifest = make_prompts(PromptsConfig(sources=[source], max_prompts=100), output)
    kept = prompts(output)
    assert len(kept) == 100
    reasons = {"duplicate.exact", "duplicate.near", "limit"}
    assert set(manifest.facts["ledger"]["dropped"]) <= reasons
    stem, _, packed = name.partition(".jsonl")
    every = itertools.chain(*real_messages(stem, 100)) if packed else ()
    said = [one["content"] for one in every if one["role"] == "assistant"]
    text = output.read("prompts-00000.jsonl").decode()
    answers = [json.dumps(one, ensure_ascii=False)[1:-1] for one in said if len(one) > 60]
    assert not [one for one in answers if one in text]
