"""Sets of the hub, from a server on this machine that answers as the hub does, and from the cache
where none answers.
"""

import gzip
import hashlib
import http.server
import io
import json
import threading
import urllib.parse

import pytest
from huggingface_hub import constants

from eyas.data import hub
from eyas.data.hub import HubPath, Listing, chosen_files, configurations, hub_path, matching
from eyas.data.sources import SourceConfig, describe, read_source, source_files
from eyas.errors import InputError, MissingInputError

PAGE = 2  # entries of a listing in one answer


class Hub(http.server.ThreadingHTTPServer):
    """Sets by id: {revision: (commit, {name: bytes})}. Remembers what was asked."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.sets, self.gated, self.asked, self.fails = {}, set(), [], False

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, id, revision, contents):
        commit = hashlib.sha1(repr((id, revision, sorted(contents.items()))).encode()).hexdigest()
        revisions = self.sets.setdefault(id, {})
        revisions[revision] = revisions[commit] = (commit, dict(contents))  # tests change theirs
        return commit


class Answers(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        self.server.asked.append(f"{self.command} {url.path}")
        if self.server.fails:
            return self.answer(500, b"")
        parts = [urllib.parse.unquote(part) for part in url.path.split("/")[1:]]
        if parts[:2] == ["api", "datasets"]:
            return self.facts(
                "/".join(parts[2:4]), parts[4], parts[5], urllib.parse.parse_qs(url.query)
            )
        return self.file("/".join(parts[1:3]), parts[4], "/".join(parts[5:]))

    def found(self, id, revision):
        """The commit and files, or None once it is said that there is none."""
        if id in self.server.gated:
            return self.answer(
                403,
                b"",
                {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to it is restricted."},
            )
        if id not in self.server.sets:
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in self.server.sets[id]:
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        return self.server.sets[id][revision]

    def facts(self, id, what, revision, query):
        found = self.found(id, revision)
        if found is None:
            return None
        commit, contents = found
        if what == "revision":
            return self.answer(200, json.dumps({"id": id, "sha": commit, "siblings": []}).encode())
        assert what == "tree"
        assert query["recursive"] in (["True"], ["true"])
        start = int(query.get("cursor", ["0"])[0])
        entries = [{"type": "directory", "path": "data", "oid": "0" * 40}]
        entries += [
            {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
            for name, data in contents.items()
        ]
        path = self.path.split("?")[0]
        more = f'<{self.server.url}{path}?recursive=True&cursor={start + PAGE}>; rel="next"'
        headers = {"Link": more} if start + PAGE < len(entries) else {}
        return self.answer(200, json.dumps(entries[start : start + PAGE]).encode(), headers)

    def file(self, id, revision, name):
        found = self.found(id, revision)
        if found is None:
            return None
        commit, contents = found
        if name not in contents:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = contents[name]
        return self.answer(
            200, data, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        )

    def answer(self, status, data, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub, and an empty cache."""
    server = Hub()
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hub._listing.cache_clear()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
    hub._listing.cache_clear()


@pytest.fixture(params=["nobody listens", "the hub is ill", "offline by choice"])
def goes_away(request, server, monkeypatch):
    """Call it, and the hub does not answer any more; no process has asked it yet."""

    def go_away():
        if request.param == "nobody listens":
            monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        elif request.param == "the hub is ill":
            server.fails = True
        else:
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        hub._listing.cache_clear()

    return go_away


def lines(*prompts):
    return "".join(
        json.dumps({"prompt": prompt, "answer": "SAID-BY-ASSISTANT"}) + "\n" for prompt in prompts
    ).encode()


README = b"""---
license: mit
configs:
- config_name: easy
  data_files:
  - split: train
    path: data/easy-*
  - {split: test, path: [data/other.jsonl]}
- config_name: hard
  default: true
  data_files: "data/hard/*.jsonl.gz"
---
# A set
"""
CONTENTS = {
    "README.md": README,
    ".gitattributes": b"*",
    "data/easy-00000-of-00002.jsonl": lines("One"),
    "data/easy-00001-of-00002.jsonl": lines("Two"),
    "data/other.jsonl": lines("Three"),
    "data/hard/a.jsonl.gz": gzip.compress(lines("Four")),
}


def read(path, **stated):
    rows = list(read_source(SourceConfig(path=path, **stated)))
    assert "SAID-BY-ASSISTANT" not in repr(rows)
    return [row.turns[0] for row in rows]


@pytest.mark.parametrize(
    ("path", "stated", "prompts"),
    [
        ("owner/set", {}, ["Four"]),
        ("owner/set", {"subset": "hard"}, ["Four"]),
        ("owner/set", {"subset": "easy"}, ["One", "Two"]),
        ("owner/set@main", {"subset": "easy", "split": "test"}, ["Three"]),
        ("hf://datasets/owner/set", {"subset": "easy", "split": "train"}, ["One", "Two"]),
        ("hf://datasets/owner/set/data/other.jsonl", {}, ["Three"]),
        ("hf://datasets/owner/set@main/data/*.jsonl", {}, ["One", "Two", "Three"]),
        ("hf://datasets/owner/set/**/*.gz", {}, ["Four"]),
        ("hf://datasets/owner/set/data", {}, ["One", "Two", "Four", "Three"]),
        ("owner/set@refs/convert/parquet", {}, ["Five"]),
        ("hf://datasets/owner/set@refs/convert/parquet/train", {}, ["Five"]),
    ],
)
def test_a_set_of_the_hub(server, path, stated, prompts):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    stream = io.BytesIO()
    parquet.write_table(
        pyarrow.table({"prompt": ["Five"], "answer": ["SAID-BY-ASSISTANT"]}), stream
    )
    server.add("owner/set", "main", CONTENTS)
    server.add(
        "owner/set",
        "refs/convert/parquet",
        {"train/0000.parquet": stream.getvalue(), "test/0000.parquet": b""},
    )
    assert read(path, **stated) == prompts
    source = SourceConfig(path=path, **stated)
    assert source.label == "owner/set"
    assert len(source_files(source)) == len(describe(source).files) == len(prompts)


def test_the_commit_is_recorded_and_does_not_change_in_a_run(server):
    commit = server.add("owner/set", "main", CONTENTS)
    made = describe(SourceConfig(path="owner/set", subset="easy"))
    assert made.facts == {"commit": commit, "read_as": {"subset": "easy"}}
    assert list(made.files) == ["easy-00000-of-00002.jsonl", "easy-00001-of-00002.jsonl"]
    server.add("owner/set", "main", {"train.jsonl": lines("Another")})
    server.asked.clear()
    assert read("owner/set", subset="easy") == ["One", "Two"]
    assert server.asked == []  # fetched once
    hub._listing.cache_clear()
    assert read("owner/set") == ["Another"]


def test_where_rows_come_from(server):
    server.add("owner/set", "main", CONTENTS)
    rows = list(read_source(SourceConfig(path="owner/set", subset="easy")))
    assert [(row.where, row.source) for row in rows] == [
        ("easy-00000-of-00002.jsonl:1", "owner/set"),
        ("easy-00001-of-00002.jsonl:1", "owner/set"),
    ]


def test_without_a_network_the_cache_has_to_do(server, goes_away):
    commit = server.add("owner/set", "main", CONTENTS)
    online = describe(SourceConfig(path="owner/set", subset="easy"))
    goes_away()
    assert read("owner/set", subset="easy") == ["One", "Two"]
    assert read(f"owner/set@{commit}", subset="easy") == ["One", "Two"]
    assert describe(SourceConfig(path="owner/set", subset="easy")) == online
    with pytest.raises(MissingInputError, match="none of the files of its split test"):
        read("owner/set", subset="easy", split="test")
    with pytest.raises(MissingInputError, match="no such set on the hub"):
        read("owner/other")


def test_a_part_of_a_set_is_not_taken_for_all_of_it(server, goes_away):
    server.add("owner/set", "main", CONTENTS)
    assert read("hf://datasets/owner/set/data/easy-00000-of-00002.jsonl") == ["One"]
    goes_away()
    with pytest.raises(InputError, match="only a part of owner/set"):
        read("hf://datasets/owner/set/data")
    with pytest.raises(InputError, match="only a part of owner/set"):
        read("hf://datasets/owner/set/data/easy-00000-of-00002.jsonl")


@pytest.mark.parametrize(
    ("path", "stated", "says"),
    [
        ("owner/none", {}, "no such set on the hub"),
        ("owner/set@v2", {}, "no such set on the hub"),
        ("owner/gated", {}, "is a gated set"),
        ("owner/set", {"subset": "none"}, "no subset none"),
        ("owner/set", {"split": "none"}, "no split none"),
        ("owner/set", {"subset": "easy", "split": "none"}, "no split none"),
        ("owner/plain", {"subset": "any"}, "states no subsets"),
        ("owner/plain", {"split": "test"}, "no split test"),
        ("owner/empty", {}, "no data file"),
        ("hf://datasets/owner/set/none.jsonl", {}, "no file none"),
        (
            "hf://datasets/owner/set/data",
            {"split": "test"},
            "a path, and a subset or split besides",
        ),
        ("hf://spaces/owner", {}, "names no set of the hub"),
    ],
)
def test_what_the_hub_does_not_have(server, path, stated, says):
    server.add("owner/set", "main", CONTENTS)
    server.add("owner/plain", "main", {"rows.jsonl": lines("One")})
    server.add("owner/empty", "main", {"README.md": b"# Nothing", "set.py": b""})
    server.gated.add("owner/gated")
    with pytest.raises(InputError, match=says) as raised:
        read(path, **stated)
    assert raised.value.hint


def test_a_file_that_cannot_be_fetched(server):
    server.add("owner/set", "main", CONTENTS)
    asked = HubPath("owner/set", path="data/other.jsonl")
    hub._listing(asked.id, asked.revision, server.url)
    server.sets["owner/set"]["main"][1].pop("data/other.jsonl")
    with pytest.raises(InputError, match="cannot be fetched"):
        hub.files(asked)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("owner/set", HubPath("owner/set")),
        ("owner/set@v1.0", HubPath("owner/set", "v1.0")),
        ("owner/set@refs/pr/7", HubPath("owner/set", "refs/pr/7")),
        ("hf://datasets/owner/set@v1/a/b.jsonl", HubPath("owner/set", "v1", "a/b.jsonl")),
        (
            "hf://datasets/owner/set@refs/convert/parquet/default/train",
            HubPath("owner/set", "refs/convert/parquet", "default/train"),
        ),
        ("data/set.jsonl", None),
        ("data/set.parquet", None),
        ("data/set.csv.gz", None),
        ("a/b/c", None),
        ("set", None),
        ("data/*", None),
        ("/data/set", None),
        ("s3://bucket/set", None),
    ],
)
def test_what_is_asked_of_the_hub(path, asked):
    assert hub_path(path) == asked


@pytest.mark.parametrize(
    ("names", "split", "chosen"),
    [
        (["a.jsonl", "b/c.jsonl"], None, ["a.jsonl", "b/c.jsonl"]),
        (["train.csv", "test.csv", "other.csv"], None, ["train.csv"]),
        (
            ["data/train-0.parquet", "data/train-1.parquet", "data/validation-0.parquet"],
            None,
            ["data/train-0.parquet", "data/train-1.parquet"],
        ),
        (["train/a.json", "dev/a.json"], "validation", ["dev/a.json"]),
        (["my_training.json", "restraint.json", "my_eval.json"], None, ["my_training.json"]),
        (["my_eval.json", "latest.json"], "test", ["my_eval.json"]),
        (
            ["train.parquet", "train-2.parquet", "train.csv"],
            None,
            ["train-2.parquet", "train.parquet"],
        ),
        (["dataset_infos.json", ".x/train.json", "README.md", "a.txt"], None, ["a.txt"]),
    ],
)
def test_splits_by_the_words_in_names(names, split, chosen):
    assert chosen_files(Listing("o/s", "c", tuple(names)), {}, None, split) == chosen


@pytest.mark.parametrize(
    ("head", "stated"),
    [
        (
            "configs:\n- config_name: a\n  data_files: a.json\n- config_name: b\n  data_dir: b",
            {"a": {"train": ["a.json"]}, "b": {"": ["b"]}},
        ),
        (
            "configs:\n- data_dir: d\n  data_files: [x/*, y.json]",
            {"default": {"train": ["d/x/*", "d/y.json"]}},
        ),
        (
            "configs:\n- config_name: a\n- 7\n- {config_name: b, data_files: [{split: s, path: "
            "[7]}]}",
            {},
        ),
        ("configs: 7", {}),
        ("[7]", {}),
        ("a: [", {}),
    ],
)
def test_what_a_readme_states(head, stated):
    assert configurations(f"---\n{head}\n---\n# Set") == stated
    assert configurations(f"# Set\n{head}") == {}


def test_several_subsets_and_no_default():
    stated = configurations(
        "---\nconfigs:\n- {config_name: a, data_files: a.json}\n- {config_name: b, data_dir: "
        "b}\n---"
    )
    listing = Listing("o/s", "c", ("a.json", "b/train.json", "b/test.json"))
    with pytest.raises(MissingInputError, match="several subsets") as raised:
        chosen_files(listing, stated, None, None)
    assert "a, b" in raised.value.hint
    assert chosen_files(listing, stated, "a", None) == ["a.json"]
    assert chosen_files(listing, stated, "b", None) == ["b/train.json"]


def test_patterns_match_as_the_hub_s_do():
    names = ["a.json", "b/a.json", "b/c/a.json", "b/c/notes.md"]
    assert matching(names, ["*.json"]) == ["a.json"]
    assert matching(names, ["**/*.json"]) == ["a.json", "b/a.json", "b/c/a.json"]
    assert matching(names, ["b/*"]) == ["b/a.json"]
    assert matching(names, ["b"]) == ["b/a.json", "b/c/a.json"]
    assert matching(names, ["b/c/notes.md"]) == ["b/c/notes.md"]
