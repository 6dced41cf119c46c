"""Grammars: what the mask lets through is an answer of the schema or the regular expression."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.builtin import target_folder
from eyas.chat import encoded
from eyas.chat.files import read_tokenizer
from eyas.engine import grammar_process
from eyas.engine.grammar import Grammars
from eyas.engine.grammar_process import TOKEN_S, GrammarProcess
from eyas.engine.request import SamplingParams
from eyas.engine.sampling import Sampler
from eyas.errors import InputError
from tests.tiny import children_of

BUILTIN = target_folder()
REAL = Path(__file__).resolve().parents[2] / "shared/data/tokenizers"
FOLDERS = [BUILTIN, REAL / "qwen3", REAL / "granite-3.1"]
MAX_WALK = 600

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", None]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
REGEXES = [
    r"[0-9]{3}-[0-9]{4}|yes|no",
    r"(foo|bar){1,3}\.",
    r'a/b\n"c"\\[x-z]{2,3}',
    r"[a-zäöü ]{0,12}!",
    r"(é|🦅){1,4}",
    "",
]

# Minutes of intersections, and a stack without end.
PATTERNS = {
    "type": "string",
    "allOf": [{"pattern": f"(a|b)*a(a|b){{{count}}}"} for count in range(30)],
}
CHAIN = {
    "$ref": "#/$defs/d0",
    "$defs": {f"d{at}": {"items": {"$ref": f"#/$defs/d{at + 1}"}} for at in range(1400)}
    | {"d1400": {}},
}

# Each may be any other, or an array of one: as many ways to read an answer as there are paths.
LINKS = [{"$ref": f"#/$defs/d{at}"} for at in range(30)]
DEFINED = {
    f"d{at}": {"anyOf": [*LINKS[:at], *LINKS[at + 1 :], {"type": "array", "items": LINKS[at - 1]}]}
    for at in range(30)
}
MUTUAL = {"$ref": "#/$defs/d0", "$defs": DEFINED}


class Walker:
    """A folder's tokenizer, its grammars, and random walks through them."""

    def __init__(self, folder):
        if not folder.exists():
            pytest.skip(f"no {folder}")
        config = json.loads((folder / "config.json").read_text())
        self.V, self.end = config["vocab_size"], config["eos_token_id"]
        self.tokenizer = read_tokenizer(folder).backend
        self.grammars = Grammars(self.tokenizer, self.V, {self.end})

    def text(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def walk(self, rng, **options):
        """The text of tokens drawn uniformly from the masks, up to the end token."""
        matcher = self.grammars.compile(SamplingParams(**options)).matcher()
        ids = []
        for _ in range(MAX_WALK):
            mask_V = matcher.mask()
            assert mask_V.shape == (self.V,)
            token = int(rng.choice(np.flatnonzero(mask_V)))
            matcher.advance(token)
            assert matcher.failure is None
            if token == self.end:
                assert matcher.is_over
                return self.text(ids)
            ids.append(token)
        raise AssertionError(f"no end after {MAX_WALK} tokens: {self.text(ids)!r}")


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def walker(request):
    return Walker(request.param)


@pytest.fixture(scope="module")
def builtin():
    return Walker(BUILTIN)


def test_a_walk_follows_the_schema(walker):
    rng = np.random.default_rng(0)
    for _ in range(8 if walker.V < 10_000 else 3):  # a step over 150,000 tokens takes its time
        value = json.loads(walker.walk(rng, json_schema=json.dumps(SCHEMA)))
        assert {"name", "age", "ok"} <= set(value) <= set(SCHEMA["properties"])
        assert isinstance(value["name"], str)
        assert 1 <= len(value["name"]) <= 12
        assert type(value["age"]) is int
        assert 0 <= value["age"] <= 120
        assert type(value["ok"]) is bool
        assert set(value.get("tags", [])) <= {"a", "bb", None}
        assert len(value.get("tags", [])) <= 3


@pytest.mark.parametrize("regex", REGEXES)
def test_a_walk_matches_the_regex(walker, regex):
    rng = np.random.default_rng(1)
    texts = {walker.walk(rng, regex=regex) for _ in range(8 if walker.V < 10_000 else 4)}
    assert all(re.fullmatch(regex, text) for text in texts), texts


def test_the_usual_tokens_are_allowed(walker):
    """The tokenizer's own tokens of an answer, each in its place, then the end."""
    answer = '{"name": "Ann", "age": 20, "tags": ["a", null], "ok": true}'
    for options, text in (
        ({"json_schema": json.dumps(SCHEMA)}, answer),
        ({"regex": r"[A-Za-z ]+\."}, "A few plain words."),
    ):
        matcher = walker.grammars.compile(SamplingParams(**options)).matcher()
        for token in [*encoded(walker.tokenizer, text).ids, walker.end]:
            assert matcher.mask()[token]
            matcher.advance(token)
        assert matcher.is_over


def test_the_end_is_allowed_where_the_grammar_may_stop(builtin):
    matcher = builtin.grammars.compile(SamplingParams(regex="ab?")).matcher()
    a, b = map(builtin.tokenizer.token_to_id, "ab")
    assert not matcher.mask()[builtin.end]
    matcher.advance(a)
    assert matcher.mask()[[builtin.end, b]].all()
    matcher.advance(b)
    assert np.flatnonzero(matcher.mask()).tolist() == [builtin.end]
    assert not matcher.is_over
    matcher.advance(builtin.end)
    assert matcher.is_over
    assert np.flatnonzero(matcher.mask()).tolist() == [builtin.end]


def test_all_end_tokens_of_the_target_end_a_grammar(builtin):
    grammars = Grammars(builtin.tokenizer, builtin.V, {0, builtin.end, 10**6})
    matcher = grammars.compile(SamplingParams(regex="a")).matcher()
    matcher.advance(builtin.tokenizer.token_to_id("a"))
    assert np.flatnonzero(matcher.mask()).tolist() == [0, builtin.end]


def test_ids_beyond_the_tokenizer_are_never_allowed(builtin):
    grammars = Grammars(builtin.tokenizer, builtin.V + 64, {builtin.end})
    matcher = grammars.compile(SamplingParams(regex="(?s).*")).matcher()
    mask_V = matcher.mask()
    assert mask_V.shape == (builtin.V + 64,)
    assert not mask_V[builtin.V :].any()
    assert mask_V.sum() > builtin.V / 2


def test_special_tokens_are_no_text(builtin):
    mask_V = builtin.grammars.compile(SamplingParams(regex="(?s).*")).matcher().mask()
    added = builtin.tokenizer.get_added_tokens_decoder()
    special = [number for number, token in added.items() if token.special]
    assert set(np.flatnonzero(mask_V[special])) <= {special.index(builtin.end)}


def test_blanks_come_to_an_end(builtin):
    matcher = builtin.grammars.compile(SamplingParams(json_schema=json.dumps(SCHEMA))).matcher()
    brace, blank = map(builtin.tokenizer.token_to_id, "{Ġ")
    matcher.advance(brace)
    count = 0
    while matcher.mask()[blank]:
        matcher.advance(blank)
        count += 1
        assert count <= 20
    assert count == 20
    assert matcher.mask().any()


def test_matchers_do_not_share_their_place(builtin):
    one, other = (builtin.grammars.compile(SamplingParams(regex="ab")).matcher() for _ in range(2))
    before_V = other.mask()
    one.advance(builtin.tokenizer.token_to_id("a"))
    assert np.array_equal(other.mask(), before_V)
    assert not np.array_equal(one.mask(), before_V)


def test_a_grammar_is_compiled_once(builtin):
    grammars = Grammars(builtin.tokenizer, builtin.V, {builtin.end})
    a, b, again = (grammars.compile(SamplingParams(regex=regex)) for regex in ("a", "b", "a"))
    assert a is again
    assert a is not b
    assert grammars.compile(SamplingParams()) is None


REFUSED = [
    *({"regex": one} for one in ("(", r"(a)\1", "(?=a)b", "a" * 70000)),
    {"json_schema": "{"},
    {"json_schema": "[1]"},
    {"json_schema": '{"type": "strin"}'},
    {"json_schema": '{"uniqueItems": true}'},
    {"json_schema": '{"not": {}}'},
    {"json_schema": '{"pattern": "("}'},
    {"json_schema": '{"$ref": "https://example.org"}'},
]


@pytest.mark.parametrize("options", REFUSED, ids=lambda options: str(options)[:40])
def test_what_cannot_be_followed_is_refused(builtin, options):
    with pytest.raises(InputError, match=next(iter(options))) as caught:
        builtin.grammars.compile(SamplingParams(**options))
    assert "\n" not in caught.value.what
    assert caught.value.hint


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "((a{101}){100}){97}c"},
        {"json_schema": json.dumps(PATTERNS)},
        {"json_schema": json.dumps(CHAIN)},
    ],
    ids=["memory", "time", "stack"],
)
def test_expensive_grammars_are_refused_alone(builtin, options):
    """The process that compiles the last ends by SIGSEGV."""
    name = next(iter(options))
    with pytest.raises(InputError, match=f"the {name} needs more than") as caught:
        builtin.grammars.compile(SamplingParams(**options))
    assert caught.value.hint
    assert builtin.grammars.compile(SamplingParams(regex=f"after {name}"))


@pytest.mark.parametrize(
    "options",
    [
        {"regex": r"a[^\s\S]"},
        {"json_schema": '{"$ref": "#"}'},
        {"json_schema": '{"type": "integer", "minimum": 5, "maximum": 1}'},
        {"json_schema": '{"enum": []}'},
    ],
    ids=str,
)
def test_what_allows_no_answer_says_so(builtin, options):
    with pytest.raises(InputError, match=f"the {next(iter(options))} allows no answer at all"):
        builtin.grammars.compile(SamplingParams(**options))


def test_a_killed_process_starts_anew(builtin):
    builtin.grammars.compile(SamplingParams(regex="before"))
    process = builtin.grammars._process.process
    process.kill()
    process.wait()
    assert builtin.grammars.compile(SamplingParams(regex="afterwards"))


def test_a_target_without_an_end_token_is_refused(builtin):
    with pytest.raises(InputError, match="end token"):
        Grammars(builtin.tokenizer, builtin.V, ()).compile(SamplingParams(regex="a"))


def failure_of(matcher, *tokens):
    """What ends an answer, after so many of these tokens."""
    for token in tokens:
        while matcher.wait(300) and matcher.failure is None:
            assert matcher.mask()[token]
            matcher.advance(token)
    with pytest.raises(InputError) as failed:
        matcher.mask()
    assert failed.value.hint
    return failed.value.what


def test_a_failed_grammar_names_itself(builtin):
    matcher = builtin.grammars.compile(SamplingParams(regex="ab")).matcher()
    # not allowed: the library gives up
    matcher.advance(builtin.tokenizer.token_to_id("z"))
    assert failure_of(matcher).startswith("the regex ab cannot be followed any further: ")


def test_a_failed_grammar_ends_one_answer(builtin):
    params = SamplingParams(regex="x*((a{101}){100}){97}c")
    x, a = map(builtin.tokenizer.token_to_id, "xa")
    for _ in range(2):
        matcher = builtin.grammars.compile(params).matcher()
        assert matcher.mask()[[x, a]].all()
        matcher.advance(x)
        assert failure_of(matcher, a).startswith("the regex x*((a{101}){100}){97}c ")


def test_expensive_masks_end_their_own_answer(builtin):
    """In the process of this grammar, whose end no other one feels."""
    params = SamplingParams(json_schema=json.dumps(MUTUAL))
    other = builtin.grammars.compile(SamplingParams(regex="ab")).matcher()
    matcher = builtin.grammars.compile(params).matcher()
    bracket = builtin.tokenizer.token_to_id("[")
    failure = failure_of(matcher, bracket)
    assert failure.startswith('the json_schema {"$ref": "#/$defs/d0", ')
    assert f"{1e3 * TOKEN_S:.0f} ms a token" in failure
    other.advance(builtin.tokenizer.token_to_id("a"))
    assert np.flatnonzero(other.mask()).tolist() == [builtin.tokenizer.token_to_id("b")]
    again = builtin.grammars.compile(params)
    assert (again.failure, again is matcher._grammar) == (None, False)


def test_the_wait_for_a_mask_is_bounded(builtin):
    grammars = Grammars(builtin.tokenizer, builtin.V, {builtin.end})
    matcher = grammars.compile(SamplingParams(regex="ab")).matcher()
    (process,) = children_of(grammars._process.process.pid)
    os.kill(process, signal.SIGSTOP)
    try:
        matcher.advance(builtin.tokenizer.token_to_id("a"))
        assert not matcher.wait(0.01)
        assert matcher.is_late
    finally:
        os.kill(process, signal.SIGCONT)
    assert matcher.mask()[builtin.tokenizer.token_to_id("b")]
    assert not matcher.is_late


def test_a_grammars_process_ends_with_its_last_answer(builtin):
    grammars = Grammars(builtin.tokenizer, builtin.V, {builtin.end})
    matcher = grammars.compile(SamplingParams(regex="ab")).matcher()
    for number in range(8):
        grammars.compile(SamplingParams(regex=f"a{number}"))
    matcher.advance(builtin.tokenizer.token_to_id("a"))
    assert matcher.mask()[builtin.tokenizer.token_to_id("b")], "it is no longer kept, but held"
    del matcher
    most_s = time.monotonic() + 300
    while len(children_of(grammars._process.process.pid)) > 4 and time.monotonic() < most_s:
        time.sleep(0.01)
    assert len(children_of(grammars._process.process.pid)) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sampler_follows_the_grammar(builtin, temperature):
    params = SamplingParams(
        temperature=temperature, seed=3, json_schema=json.dumps(SCHEMA), max_tokens=MAX_WALK
    )
    matcher = builtin.grammars.compile(params).matcher()
    sampler = Sampler(params, (1,), builtin.V, frozenset({builtin.end}), matcher)
    generator = torch.Generator().manual_seed(0)
    tokens = []
    while builtin.end not in tokens and len(tokens) < MAX_WALK:
        tokens.append(sampler.draw(torch.randn(builtin.V, generator=generator).numpy()))
    assert SCHEMA["properties"].keys() >= json.loads(builtin.text(tokens[:-1])).keys()
    assert sampler.draw(torch.randn(builtin.V, generator=generator).numpy()) == builtin.end
    assert sampler.failure is None


def test_grammars_compile_at_the_same_time_and_once(builtin, monkeypatch):
    begun, may_end, made = threading.Event(), threading.Event(), []
    begin = GrammarProcess.begin

    def slow(process, kind, source):
        made.append(source)
        if source == "slow":
            begun.set()
            assert may_end.wait(300)
        return begin(process, kind, source)

    monkeypatch.setattr(GrammarProcess, "begin", slow)
    with ThreadPoolExecutor(2) as pool:
        slow_ones = [
            pool.submit(builtin.grammars.compile, SamplingParams(regex="slow")) for _ in range(2)
        ]
        assert begun.wait(300)
        assert builtin.grammars.compile(SamplingParams(regex="quick")).matcher().mask().any()
        assert not any(one.done() for one in slow_ones)
        may_end.set()
        assert slow_ones[0].result() is slow_ones[1].result()
    assert sorted(made) == ["quick", "slow"]


def test_a_stopped_process_is_given_up(builtin, monkeypatch):
    first = builtin.grammars._process
    builtin.grammars.compile(SamplingParams(regex="a"))
    fork = GrammarProcess._fork

    def stopped(process, end):
        before = set(children_of(first.process.pid))
        fork(process, end)
        while not (new := set(children_of(first.process.pid)) - before):
            time.sleep(0.001)
        os.kill(new.pop(), signal.SIGSTOP)

    monkeypatch.setattr(GrammarProcess, "_fork", stopped)
    monkeypatch.setattr(grammar_process, "_WAIT_S", 0.5)
    with pytest.raises(InputError, match="needs more than"):
        builtin.grammars.compile(SamplingParams(regex="stopped"))


SLEEPS = """
import sys, time
from multiprocessing.connection import Connection
from eyas.engine import grammar_process as process
process.CLOCK_S, process.compiled = 0.2, lambda *_: time.sleep(60)
process.follow(Connection(int(sys.argv[1])), None)
"""


def test_a_grammar_ends_itself_by_the_clock():
    """Where a process gets hardly any CPU: here it sleeps."""
    ours, theirs = Pipe()
    ours.send_bytes(json.dumps({"kind": "regex", "source": "a"}).encode())
    words = [sys.executable, "-c", SLEEPS, str(theirs.fileno())]
    done = subprocess.run(words, pass_fds=[theirs.fileno()], timeout=300)
    assert done.returncode == -signal.SIGALRM
