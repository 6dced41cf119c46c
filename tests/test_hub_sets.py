"""Sets of the Hugging Face hub: read by `datasets` from a hub on this machine, in a process of its
own, since the clients read their settings at import.
"""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import urllib.parse

import pytest

from eyas.data import hub_sets
from eyas.data.sources import SourceConfig, read_source
from eyas.errors import InputError
from tests.source_rows import SAID_BY_ASSISTANT, json_lines, served
from tests.stages import ROOT

pytest.importorskip("datasets", reason="the extra `hub` is not installed")

COMMIT = "a" * 40


def lines(*prompts):
    rows = ({"prompt": prompt, "answer": SAID_BY_ASSISTANT} for prompt in prompts)
    return json_lines(rows).encode()


README = b"""---
configs:
- config_name: easy
  data_files:
  - {split: train, path: data/easy-*}
  - {split: test, path: data/other.jsonl}
- config_name: hard
  default: true
  data_files: data/hard.jsonl
---
"""
FILES = {
    "README.md": README,
    "data/easy-0.jsonl": lines("One"),
    "data/easy-1.jsonl": lines("Two"),
    "data/other.jsonl": lines("Three"),
    "data/hard.jsonl": lines("Four"),
}


class Answers(http.server.BaseHTTPRequestHandler):
    """A hub with one set, owner/set."""

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/")
        if "owner/set" not in path:
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if path == f"api/datasets/owner/set/revision/{COMMIT}":
            return self.answer(200, json.dumps({"id": "owner/set", "sha": COMMIT}).encode())
        if path.startswith("api/datasets/owner/set/tree"):
            under = path.partition(COMMIT)[2].strip("/")
            found = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in FILES.items()
                if name.rpartition("/")[0] == under
            ]
            folders = [] if under else [{"type": "directory", "path": "data", "oid": "0" * 40}]
            return self.answer(200, json.dumps([*found, *folders]).encode())
        _, _, name = path.partition("/resolve/")[2].partition("/")
        data = FILES.get(name)
        if data is None:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        tag = f'"{hashlib.sha1(data).hexdigest()}"'
        return self.answer(200, data, {"X-Repo-Commit": COMMIT, "ETag": tag})

    def answer(self, status, data, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


READ = """
import json, sys
from eyas.data.sources import SourceConfig, describe, looks, read_source
from eyas.errors import EyasError
for stated in json.loads(sys.argv[1]):
    source = SourceConfig(path=stated.pop("path", "owner/set"), **stated)
    try:
        rows = [(row.where, *row.turns) for row in read_source(source)]
        made = describe(source)
        columns = sorted(key for look in looks(source) for key in look.columns)
        print(json.dumps([rows, source.label, made.facts, made.identity, columns]))
    except EyasError as error:
        print(json.dumps([type(error).__name__, error.what, error.hint]))
"""


def read_apart(folder, endpoint, *sources, offline="0"):
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(folder)}
    environment |= {"HF_HUB_OFFLINE": offline, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", READ, json.dumps(sources)]
    told = {"capture_output": True, "text": True, "check": True}
    done = subprocess.run(command, cwd=folder, env=environment, **told)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    easy, test = {"subset": "easy"}, {"subset": "easy", "split": "test"}
    wrong = [{"path": "owner/none"}, {"subset": "none"}, {"split": "none"}]
    with served(Answers) as endpoint:
        online = read_apart(folder, endpoint, {}, easy, test, *wrong)
    return online, read_apart(folder, "http://127.0.0.1:9", easy, test, offline="1")


def test_a_set_is_read_by_subset_and_split(found):
    (hard, easy, test, *_), _ = found
    assert [rows for rows, *_ in (hard, easy, test)] == [
        [["train:1", "Four"]],
        [["train:1", "One"], ["train:2", "Two"]],
        [["test:1", "Three"]],
    ]
    assert easy[1] == "owner/set"
    assert easy[2] == {"read_as": {"subset": "easy"}, "commit": COMMIT}
    assert len({identity for *_, identity, _ in (hard, easy, test)}) == 3
    assert easy[4] == ["answer", "prompt"]
    assert SAID_BY_ASSISTANT not in json.dumps(found)


def test_without_a_network_the_cache_has_it(found):
    (_, easy, test, *_), offline = found
    assert offline == [easy, test]


def test_what_the_hub_does_not_have_is_said(found):
    (*_, no_set, no_subset, no_split), _ = found
    told = {"owner/none": no_set, "easy": no_subset, "train": no_split}
    for says, (kind, what, hint) in told.items():
        assert kind == "MissingInputError"
        assert says in what
        assert "`subset` and `split`" in hint


def test_without_the_package_it_says_what_to_install(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(hub_sets.importlib, "import_module", absent)
    with pytest.raises(InputError, match="need the package datasets") as raised:
        list(read_source(SourceConfig(path="owner/absent")))
    assert "eyas[hub]" in raised.value.hint


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("owner/set", ("owner/set", None)),
        ("owner/set@refs/pr/7", ("owner/set", "refs/pr/7")),
        *((path, None) for path in ("data/set.jsonl", "data/set.csv.gz", "a/b/c", "set")),
        *((path, None) for path in ("data/*", "/data/set", "s3://bucket/set", "hf://datasets/a/b")),
    ],
)
def test_which_paths_name_a_set(path, named):
    assert hub_sets.hub_set(path) == named
