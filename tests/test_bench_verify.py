"""`eyas verify`: servers with planted faults, in the forms that servers speak, and our own."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest

from eyas.bench import verify as verify_module
from eyas.bench.verify import ServerAnswer, p_value, parting, read_answer
from eyas.cli.verify import CODES
from eyas.client import RequestFailure
from eyas.engine.scheduler import RunningSample
from tests.bench_servers import JsonHandler, web_server
from tests.source_rows import written
from tests.test_cli import assert_one_clear_error, run_eyas

VOCAB, PLACE = 24, 5
PROMPTS = [{"id": n, "turns": [f"I would like a table for {n}."]} for n in range(6)]
COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")


class Toy(JsonHandler):
    """A model of a few tokens, and how a server of it speculates; changed for each fault."""

    owner, strict, gives_ids, gives_logprobs, extra_prompt_tokens = "vllm", False, True, True, 0
    always_speculates = drafts = False
    counts = None  # a dict, of /metrics

    def do_GET(self):
        if self.path == "/v1/models":
            return self.send_json({"data": [{"id": "toy", "owned_by": self.owner}]})
        if self.path != "/metrics" or self.counts is None:
            return self.send_json({}, 404)
        lines = [f"vllm:spec_decode_num_{name}_total {n}" for name, n in self.counts.items()]
        return self.reply(200, "\n".join(["vllm:request_success_total 1", *lines, ""]).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        known = {"model", "messages", "max_tokens", "temperature", "seed", "logprobs"}
        if self.strict and asked.keys() - known - {"top_logprobs"}:
            return self.send_json({"error": {"message": "unknown", "code": "unknown"}}, 400)
        speculates = asked.get("speculation", self.always_speculates)
        prompt = list(asked["messages"][-1]["content"].encode())
        ids, rows = [], []
        rng = np.random.default_rng(asked.get("seed", 0) % 2**32 + self.shift(speculates))
        while len(ids) < asked["max_tokens"]:
            logprobs_V = self.logprobs(prompt, ids)
            drawn = logprobs_V / asked["temperature"] if asked["temperature"] else logprobs_V
            if asked["temperature"]:
                drawn = self.drawn(drawn, speculates) + rng.gumbel(size=VOCAB)
            elif speculates:
                drawn = self.greedy(logprobs_V, ids)
            ids.append(int(drawn.argmax()))
            rows.append((ids[-1], logprobs_V))
        return self.send_json(self.answer(asked, prompt, self.ended(ids, speculates), rows))

    def logprobs(self, prompt, ids):
        rng = np.random.default_rng(zlib.crc32(bytes([*prompt, *ids])))
        logits_V = 2 * rng.normal(size=VOCAB)
        if len(ids) == PLACE:  # here the best two are nearly as good
            best, second = logits_V.argsort()[[-1, -2]]
            logits_V[second] = logits_V[best] - 1e-3
        return logits_V - np.log(np.exp(logits_V).sum())

    def shift(self, speculates):
        return 0

    def drawn(self, logits_V, speculates):
        return logits_V

    def greedy(self, logprobs_V, ids):
        return logprobs_V

    def ended(self, ids, speculates):
        return ids

    def answer(self, asked, prompt, ids, rows):
        speculates = asked.get("speculation", self.always_speculates)
        choice = {"message": {"content": " ".join(map(str, ids))}}
        choice |= {"finish_reason": "length", "logprobs": None}
        usage = {"prompt_tokens": len(prompt) + self.extra_prompt_tokens}
        body = {"choices": [choice], "usage": usage}
        if self.owner == "eyas":
            body["usage"]["eyas"] = {"accept_hist": [1, 2] if speculates and self.drafts else []}
        if self.owner == "llamacpp":
            drafted = {"draft_n": 8, "draft_n_accepted": 3} if speculates and self.drafts else {}
            body["timings"] = {"predicted_n": len(ids), **drafted}
            if asked.get("verbose") and asked.get("return_tokens"):
                body["__verbose"] = {"tokens": ids}
        elif self.counts is not None and speculates and self.drafts:
            self.counts.update({name: self.counts.get(name, 0) + 4 for name in COUNTERS})
        if self.gives_ids and asked.get("return_token_ids"):
            choice["token_ids"] = ids
        if self.gives_logprobs and asked.get("logprobs"):
            is_probe = asked["max_tokens"] == 2
            assert is_probe or not (speculates and choice.get("token_ids")), "ids are enough"
            choice["logprobs"] = {"content": [self.row(asked, *row) for row in rows]}
        return body

    def row(self, asked, token, logprobs_V):
        def named(token):
            name = {"logprob": float(logprobs_V[token]), "bytes": list(b"%d " % token)}
            if asked.get("return_tokens_as_token_ids"):
                return {"token": f"token_id:{token}", **name}
            return {"token": f"{token} ", **name, **self.own_id(token)}

        best = logprobs_V.argsort()[::-1][: asked["top_logprobs"]].tolist()
        return {**named(token), "top_logprobs": [named(one) for one in best]}

    def own_id(self, token):
        return {"id": token} if self.owner == "llamacpp" else {}


class Wrong:
    """The third best token, at a place of some answers."""

    def greedy(self, logprobs_V, ids):
        if len(ids) == 3 and ids[0] % 2:
            return -abs(logprobs_V - np.sort(logprobs_V)[-3])
        return logprobs_V


class Tie:
    """The second best of two that are nearly as good."""

    def greedy(self, logprobs_V, ids):
        return -abs(logprobs_V - np.sort(logprobs_V)[-2]) if len(ids) == PLACE else logprobs_V


class Short:
    """A token is lost at the limit."""

    def ended(self, ids, speculates):
        return ids[:-1] if speculates else ids


class OtherDraws:
    """Drafts take numbers from the generator, as in vLLM."""

    def shift(self, speculates):
        return 7 if speculates else 0


class TooSure(OtherDraws):
    """Drafts are taken more often than the target would."""

    def drawn(self, logits_V, speculates):
        return 1.6 * logits_V if speculates else logits_V


class Noisy:
    """The plain side decides at random."""

    def logprobs(self, prompt, ids):
        logprobs_V = super().logprobs(prompt, ids)
        return np.roll(logprobs_V, np.random.default_rng().integers(VOCAB))


def verified(tmp_path, faults, *, plain=None, settings=(), fails=False, **changes):
    """The verdict on a toy with a switch, or on two; with fails the command's result."""
    kinds = {"owner": "eyas", "drafts": True, **changes}
    words = ("--prompts", written(tmp_path / "prompts.jsonl", PROMPTS), "-o", tmp_path / "out")
    for one in ("num_prompts=6", "max_tokens=8", "num_samples=20", *settings):
        words += ("--set", one)
    with (
        web_server(type("Speculating", (*faults, Toy), kinds)) as url,
        web_server(type("Plain", (Toy,), {**kinds, **(plain or {}), "drafts": False})) as other,
    ):
        words += () if plain is None else ("--plain", other)
        done = run_eyas("verify", url, *words)
    if fails:
        return done
    assert done.exit_code not in (1, 2), done.output
    last = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == CODES[last["verdict"]], done.output
    found = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert found["verdict"] == last["verdict"]
    report = (tmp_path / "out" / "report.md").read_text()
    assert report.startswith(f"# eyas verify: {last['verdict']}\n")
    return last["verdict"], last["why"], found


TWO = {"owner": "vllm", "always_speculates": True, "plain": {"always_speculates": False}}
STRICT = {**TWO, "owner": "other", "strict": True}  # OpenAI's form, and nothing more
LLAMA = {**TWO, "owner": "llamacpp"}


@pytest.mark.parametrize("form", [{}, TWO, STRICT, LLAMA], ids=["ours", "vLLM", "strict", "llama"])
@pytest.mark.parametrize(
    ("fault", "verdict", "kinds"),
    [
        ((), "EXACT", set()),
        ((Wrong,), "DIFFERENT", {"wrong"}),
        ((Tie,), "TIES ONLY", {"tie"}),
        ((Short,), "DIFFERENT", {"wrong"}),
    ],
    ids=["right", "wrong", "tie", "short"],
)
def test_faults_are_found_in_whatever_form_a_server_answers(tmp_path, form, fault, verdict, kinds):
    found = verified(tmp_path, fault, **form)
    assert found[0] == verdict
    partings = found[2]["greedy"]["partings"]
    assert {one["kind"] for one in partings} == kinds
    if verdict == "TIES ONLY":
        assert {one["place"] for one in partings} == {PLACE}
        assert all(0 < one["gap"] < 0.01 for one in partings)
    if fault == (Wrong,):
        assert 0 < len(partings) < len(PROMPTS)
        assert {one["place"] for one in partings} == {3}
        assert all(one["gap"] > 0.25 for one in partings)


def test_a_narrower_tie_convicts(tmp_path):
    verdict, why, _ = verified(tmp_path, (Tie,), settings=["tie_width=0.0001"])
    assert (verdict, why[:6]) == ("DIFFERENT", "6 of 6")


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({}, [18, 12]),
        ({**TWO, "counts": {}}, [24, 24]),
        (LLAMA, [48, 18]),
        (STRICT, None),
    ],
    ids=["usage", "metrics", "timings", "unknown"],
)
def test_what_was_drafted_is_known_where_the_server_tells(tmp_path, form, told):
    verdict, why, found = verified(tmp_path, (), **form)
    assert (verdict, found["drafts"]) == ("EXACT", told)
    assert ("whether any token was drafted is not known" in why) == (told is None)


def test_counters_that_were_not_read_are_not_known_and_no_drafts_of_before(tmp_path):
    class Unread:
        """The first reading fails."""

        def do_GET(self):
            if self.path == "/metrics" and not read:
                read.append(self.path)
                return self.send_json({}, 502)
            return super().do_GET()

    read = []
    history = dict.fromkeys(COUNTERS, 1000)
    verdict, why, found = verified(tmp_path, (Unread,), **TWO, counts=history, drafts=False)
    assert (verdict, found["drafts"]) == ("EXACT", None)
    assert "whether any token was drafted is not known" in why


@pytest.mark.parametrize(
    "form", [{}, {**TWO, "counts": {}}, LLAMA], ids=["usage", "metrics", "timings"]
)
def test_nothing_drafted_is_inconclusive_whatever_the_answers(tmp_path, form):
    verdict, why, found = verified(tmp_path, (Wrong,), **form, drafts=False)
    assert (verdict, why) == ("INCONCLUSIVE", "nothing was drafted, so there is nothing to judge")
    assert found["seeded"] is None


def test_a_plain_side_that_drafts_or_is_noise_is_no_reference(tmp_path):
    class DraftsAlways:
        def answer(self, asked, *rest):
            return super().answer(asked | {"speculation": True, "logprobs": False}, *rest)

    assert verified(tmp_path, (DraftsAlways,))[1] == "the plain side drafted too"
    verdict, why, _ = verified(tmp_path, (Noisy,))
    assert verdict == "INCONCLUSIVE"
    assert "does not repeat" in why


def test_without_logprobs_a_difference_cannot_be_judged(tmp_path):
    mute = {**TWO, "gives_logprobs": False}
    assert verified(tmp_path, (), **mute)[0] == "EXACT"
    verdict, why, _ = verified(tmp_path, (Wrong,), **mute)
    assert (verdict, "no logprobs" in why) == ("INCONCLUSIVE", True)


def test_other_draws_are_no_fault_and_another_distribution_is(tmp_path):
    many = {**TWO, "settings": ["num_samples=40"]}
    verdict, _, found = verified(tmp_path, (OtherDraws,), **many)
    assert verdict == "EXACT"
    assert found["seeded"]["partings"]
    assert found["p_value"] > 0.01
    verdict, why, found = verified(tmp_path, (TooSure,), **many)
    assert (verdict, found["greedy"]["partings"]) == ("DIFFERENT", [])
    assert "distributed otherwise" in why


def answer_of(token="a", logprob=-0.5, **more):
    row = {"token": token, "logprob": logprob, "top_logprobs": []}
    choice = {"message": {"content": token}, "logprobs": {"content": [row]}, **more}
    return json.dumps({"choices": [choice]}).encode()


def test_odd_answers_are_no_chat_completions():
    assert read_answer(answer_of()).tops == ({"a": -0.5},)
    half = read_answer(answer_of("\ud83d"))
    assert half.tokens == ("\\ud83d",)  # can be written, and is like no other half
    assert read_answer(answer_of(token="token_id:7", token_ids=[8])).tops == ()
    for odd in (
        answer_of(logprob=None),
        answer_of(logprobs=None, token_ids=[1, [2]]),
        answer_of().replace(b"{", b'{"timings": {"draft_n": null}, ', 1),
        b"[" * 100_000,
    ):
        with pytest.raises(RequestFailure, match="no chat completion"):
            read_answer(odd)


def said(*tokens, ending="length"):
    return ServerAnswer(tokens, (), ("", ending), 1, None)


def test_the_test_of_distributions_keeps_its_level(monkeypatch):
    rng = np.random.default_rng(0)
    prompts = [rng.dirichlet(np.ones(12)) for _ in range(3)]

    def drawn(mixed=0.0):
        """60 answers to each prompt; behind the first token, the likeliest comes more often."""
        shares = [(1 - mixed) * one + mixed * np.eye(12)[one.argmax()] for one in prompts]
        return [said(0, *rng.choice(12, size=4, p=one)) for one in shares for _ in range(60)]

    with monkeypatch.context() as patched:
        patched.setattr(verify_module, "NUM_SHUFFLES", 999)
        equal = [p_value(drawn(), drawn(), 60, seed) for seed in range(20)]
    assert sum(one < 0.1 for one in equal) <= 7  # 2 expected, 8 by chance once in 2,000
    assert min(equal) > 0.001
    assert p_value(drawn(), drawn(0.3), 60, 0) <= 0.001
    others = [said(1, *one.tokens[1:]) for one in drawn()]
    assert p_value(drawn(), others, 60, 0) > 0.001  # the first token is nobody's draft


def test_an_end_that_is_held_back_cannot_be_judged_but_one_at_the_limit_can():
    kinds = [
        parting("p", one, two, 0.1).kind
        for one, two in [
            (said(1, 2, ending="stop"), said(1, 2, 3)),
            (said(1, 2, 3), said(1, 2, ending="stop")),
            (said(1, 2, 3), said(1, 2)),
            (said(1, 2), said(1, 2, 3)),
            (said(1, 2), said(1, 2, ending="stop")),
        ]
    ]
    assert kinds == ["unknown", "unknown", "wrong", "wrong", "wrong"]


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"owner": "vllm"}, 2, "--plain URL"),
        ({**TWO, "plain": {"extra_prompt_tokens": 1}}, 2, "serve the same model by both"),
        ({**TWO, "gives_ids": False, "gives_logprobs": False}, 1, "token ids, or both logprobs"),
    ],
)
def test_what_cannot_be_compared_is_one_clear_error(tmp_path, changes, code, words):
    failed = verified(tmp_path, (), fails=True, **changes)
    assert_one_clear_error(failed, words, code=code)


def test_no_folder_and_no_server_are_known_before_the_work(tmp_path):
    (tmp_path / "out").write_text("")
    assert_one_clear_error(verified(tmp_path, (), fails=True, do_POST=None), "is a file")
    assert_one_clear_error(run_eyas("verify", "http://127.0.0.1:9"), "no server at")


# Our own server


def of_ours(world, tmp_path, speculation):
    with world.served(world.drafting(tmp_path / "head", speculation), has_head=True) as client:
        done = run_eyas(
            *("verify", client.url, "-o", tmp_path / "out"),
            *("--prompts", written(tmp_path / "prompts.jsonl", PROMPTS)),
            *("--set", "num_prompts=6", "--set", "max_tokens=24", "--set", "concurrency=3"),
            *("--set", "num_samples=20"),
        )
    return json.loads(done.stdout.splitlines()[-1]), done


def test_our_own_speculation_is_exact_greedy_and_with_seeds(world, tmp_path):
    last, done = of_ours(world, tmp_path, "fixed(3,2,6)")
    assert (last["verdict"], done.exit_code) == ("EXACT", 0)
    found = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert found["drafts"][0] > 0
    assert found["plain_drafts"] == [0, 0]
    assert found["seeded"]["num_answers"] == 6
    assert found["seeded"]["partings"] == []
    assert found["greedy"]["num_compared"] == found["greedy"]["num_tokens"] == 6 * 24
    assert found["width"] == verify_module.WIDTHS["float32"]


def test_our_own_server_without_drafts_is_inconclusive(world, tmp_path):
    last, done = of_ours(world, tmp_path, "off")
    assert (last["verdict"], done.exit_code) == ("INCONCLUSIVE", 4)


def test_a_fault_planted_into_our_engine_is_found(world, tmp_path, monkeypatch):
    right = RunningSample.take

    def wrong(self, tokens, end_tokens):
        if self.request.speculation and self.num_emitted > 8:
            tokens = [(tokens[0] + 1) % 50, *tokens[1:]]
        return right(self, tokens, end_tokens)

    monkeypatch.setattr(RunningSample, "take", wrong)
    last, done = of_ours(world, tmp_path, "fixed(3,2,6)")
    assert (last["verdict"], done.exit_code) == ("DIFFERENT", 3)
