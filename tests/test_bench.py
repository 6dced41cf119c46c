"""The benchmark: prompt files, streams, figures, and whole runs against servers."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import time
from collections import Counter

import httpx
import pytest

from eyas.artifact import Artifact, Manifest
from eyas.bench.bench import ArmConfig, BenchConfig, _read, bench, bench_identity
from eyas.bench.stream import Reply, events, read_reply
from eyas.bench.summary import comparison, result, summarise
from eyas.bench.workload import Task, read_tasks
from eyas.builtin import BUILTIN
from eyas.chat import Chat
from eyas.client import Client, StreamRecord
from eyas.engine.engine import Engine, EngineConfig
from eyas.errors import (
    ConfigError,
    CorruptError,
    EmptyInputError,
    EyasError,
    InputError,
    MismatchError,
    MissingInputError,
)
from eyas.hub import resolve_head, resolve_target
from eyas.serve.app import ModelService, create_app
from eyas.serve.server import running_app
from eyas.serve.translation import ModelInfo
from tests.bench_rows import row
from tests.bench_servers import Scripted, scripted, web_server
from tests.source_rows import shared, written

# Workload


def test_prompts_in_three_shapes_become_first_turns(tmp_path):
    said, answer = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    system = {"role": "system", "content": "x"}
    rows = [
        {"id": "p", "source": "s", "licence": "l", "turns": ["one", "two"], "system": "be kind"},
        {"id": "m", "messages": [system, said, said, answer, said]},
        {"id": "o", "messages": [answer, said, answer]},
        {"question_id": 81, "category": "writing", "turns": ["compose", "rewrite"]},
        {"messages": [said]},
    ]
    read = read_tasks(written(tmp_path / "p.jsonl", rows), count=9, seed=0)
    tasks = {task.prompt_id: task for task in read}
    kind, one = {"role": "system", "content": "be kind"}, {"role": "user", "content": "one"}
    assert tasks["p"].messages == (kind, one)
    assert tasks["m"].messages == (system, said, said)
    assert tasks["o"].messages == (said,)
    compose = {"role": "user", "content": "compose"}
    assert tasks["81"] == Task("81", "writing", (compose,), has_later_turns=True)
    assert {name for name, task in tasks.items() if task.has_later_turns} == {*("p", "m", "81")}
    assert tasks["5"].messages == (said,)


def test_prompts_are_drawn_by_seed(tmp_path):
    rows = [{"id": f"{number}", "turns": ["hi"]} for number in range(50)]
    url = written(tmp_path / "p.jsonl", rows)
    drawn = read_tasks(url, 10, seed=1)
    assert drawn == read_tasks(url, 10, seed=1)
    assert drawn != read_tasks(url, 10, seed=2)
    assert len({task.prompt_id for task in drawn}) == 10


def test_a_byte_order_mark_and_half_a_character_are_no_fault_of_a_prompt_file(tmp_path):
    row = json.dumps({"id": "\ud83d", "turns": ["so \ud83d"]})
    (tmp_path / "p.jsonl").write_bytes(f"\ufeff{row}\n".encode())
    (task,) = read_tasks(str(tmp_path / "p.jsonl"), 1, 0)
    assert task == Task("\ufffd", "", ({"role": "user", "content": "so \ufffd"},))


PACKED = gzip.compress(b'{"turns": ["a"]}' * 100)
DAMAGED = PACKED[:10] + b"\xff" + PACKED[11:]  # right behind the header, a block of no known kind
UNREADABLE = {
    EmptyInputError: [b"", b"\n\n"],
    CorruptError: [
        *(b"{", b"\xff\xfe", PACKED[:-20], DAMAGED),
        *(b"[" * 100_000, b'{"turns": [' + b"9" * 5000 + b"]}"),
    ],
    InputError: [
        *(b"3", b'{"text": "hi"}', b'{"messages": [{"role": "assistant", "content": "a"}]}'),
        b'{"messages": [{"from": "human", "value": "a"}]}',
        b'{"messages": [{"role": "user", "content": [{"image": 1}]}]}',
        b'{"id": 1, "turns": ["a"]}\n{"id": 1, "turns": ["b"]}',
        *(b'{"turns": "Hello there"}', b'{"turns": [null]}', b'{"turns": {"a": "b"}}'),
    ],
    MissingInputError: [None],
}


@pytest.mark.parametrize("error", UNREADABLE)
def test_prompts_that_cannot_be_used_are_refused(tmp_path, error):
    with pytest.raises(InputError, match=r"is a folder\n  -> give a file"):
        read_tasks(str(tmp_path), 1, 0)
    for content in UNREADABLE[error]:
        path = tmp_path / ("p.jsonl.gz" if content and content[:1] == b"\x1f" else "p.jsonl")
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(error) as refused:
            read_tasks(str(path), 1, 0)
        assert refused.value.hint


@pytest.mark.parametrize(
    ("name", "count"), [("prompts/spec_bench.jsonl", 480), ("sgd_dev.jsonl.gz", 2098)]
)
def test_real_prompt_files_are_read_whole(name, count):
    tasks = read_tasks(str(shared(name)), 10_000, 0)
    assert len(tasks) == count
    assert all(task.messages[-1]["role"] == "user" for task in tasks)


# Client


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(text=None, finish_reason=None):
    said = {} if text is None else {"content": text}
    return event(choices=[{"index": 0, "delta": said, "finish_reason": finish_reason}])


COUNTED = {"prompt_tokens": 3, "completion_tokens": 5, "eyas": {"accept_hist": [1, 1]}}
USAGE = event(choices=[], usage=COUNTED)


def test_events_are_timed_by_the_piece_that_completes_them():
    whole = delta("a") + b": comment\n\n" + delta("b").replace(b"\n", b"\r\n") + b"data: [DONE]\n\n"
    for cut in range(len(whole) + 1):
        found = list(events([(1.0, whole[:cut]), (2.0, whole[cut:])]))
        assert [one["choices"][0]["delta"]["content"] for _, one in found] == ["a", "b"]
        ends = [whole.index(b"\n", whole.index(mark)) for mark in (b'"a"', b'"b"')]
        assert [at for at, _ in found] == [1.0 if cut > end else 2.0 for end in ends]


def test_first_token_is_the_first_text_and_the_end_is_the_last_choice():
    said = [(1.0, delta("")), (4.0, delta("Hel")), (6.0, delta("lo")), (9.0, delta(None, "stop"))]
    pieces = [*said, (11.0, USAGE + b"data: [DONE]\n\n")]
    reply = read_reply(StreamRecord(0.0, pieces))
    assert reply == Reply(4.0, 9.0, [2.0], 3, 5, "stop", "Hello", [1, 1], tells_rounds=True)
    # without a text its end
    assert read_reply(StreamRecord(0.0, [(7.0, delta(None, "stop") + USAGE)])).ttft_ms == 7.0


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (delta("a"), "ended before"),
        (delta("a") + event(error={"message": "out of luck"}), "out of luck"),
        (delta("a") + event(object="error", message="out of memory"), "out of memory"),
        (delta("a") + event(error="out of words"), "out of words"),
        (b"data: {\n\n", "not a stream"),
        (b"data: 3\n\n", "not a stream"),
        (b"<html>", "ended before"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "RecursionError"),
        (b'data: {"error": "\\ud83d"}\n\n', "\ufffd"),
        *(
            (delta("a", "stop") + event(choices=[], usage=COUNTED | odd), "a count is")
            for odd in (
                {"completion_tokens": None},
                {"prompt_tokens": "3"},
                {"eyas": {"accept_hist": [1, None]}},
            )
        ),
    ],
)
def test_a_broken_stream_is_an_error_and_no_figure(piece, words):
    reply = read_reply(StreamRecord(0.0, [(1.0, piece)]))
    assert words in reply.error
    assert reply == Reply(error=reply.error)


def test_half_a_character_does_not_end_a_benchmark():
    """Halves that meet are one: a server may cut a pair in two."""
    said = delta("\ud83d") + delta("\ude00, \ud83d") + delta(None, "\ud83d") + USAGE
    reply = read_reply(StreamRecord(0.0, [(1.0, said)]))
    assert (reply.text, reply.finish_reason, reply.error) == ("\U0001f600, \ufffd", "\ufffd", "")


# Summary


GREEDY = ["plain", "eagle"], True


def test_speedup_is_the_ratio_of_the_median_tpots():
    plain = [row("plain", id, tpot_ms=ms) for id, ms in (("a", 10), ("b", 20), ("c", 60))]
    eagle = [row("eagle", id, tpot_ms=ms) for id, ms in (("c", 15), ("a", 5), ("b", 8))]
    compared = comparison(plain, eagle, is_greedy=True)
    assert compared["speedup"] == 20 / 8
    assert compared["identical"] == compared["num_pairs"] == 3


def test_only_prompts_that_both_arms_answered_are_compared():
    failed, short = {"error": "lost"}, {"tokens": 1}
    plain = [row("plain", "abcd"[at], **one) for at, one in enumerate(({}, failed, short, {}))]
    others = ({"tpot_ms": 5}, {"tpot_ms": 1}, short, failed)
    eagle = [row("eagle", "abcd"[at], **one) for at, one in enumerate(others)]
    compared = comparison(plain, eagle, is_greedy=True)
    assert compared["num_pairs"] == 2
    assert compared["speedup"] == 2


@pytest.mark.parametrize("change", [{"text": "other"}, {"tokens": 12}])
def test_identical_asks_for_the_same_text_and_count(change):
    pairs = [row("plain", "a")], [row("eagle", "a", **change)]
    assert comparison(*pairs, is_greedy=True)["identical"] == 0
    assert comparison(*pairs, is_greedy=False)["identical"] is None


def test_throughput_counts_each_block_from_its_first_request_to_its_last_answer():
    times = ((0.0, 0), (0.1, 0), (9.0, 1))  # 0.0 .. 0.2 and 0.1 .. 0.3; 9.0 .. 9.2
    rows = [row("plain", str(at), tokens=11, started_s=at, block=block) for at, block in times]
    assert result(rows)["throughput_tps"] == pytest.approx(33 / 0.5)


def test_result_counts_failures():
    rows = [row("eagle", "a", hist=[1, 2]), row("eagle", "b", hist=[0, 0, 1])]
    counted = result([*rows, row("eagle", "c", error="HTTP 500: no")])
    assert (counted["num_requests"], counted["num_failed"]) == (3, 1)
    assert counted["errors"] == {"HTTP 500: no": 1}
    assert counted["accept_hist"] == [1, 2, 1]
    assert counted["tau"] == 2


def rows_of(arm, tpots_ms, **fields):
    return [row(arm, str(at), tpot_ms=tpot_ms, **fields) for at, tpot_ms in enumerate(tpots_ms)]


def pairs_of(count, tpot_ms, hist):
    return rows_of("plain", [10] * count), rows_of("eagle", [tpot_ms] * count, hist=hist)


@pytest.mark.parametrize("count", [1, 6, 40])
def test_a_speedup_above_tau_is_not_claimed(count):
    plain, eagle = pairs_of(count, tpot_ms=10 / 2.001, hist=[0, 5])
    (compared,) = summarise([*plain, *eagle], *GREEDY)["comparisons"]
    assert (compared["speedup"], compared["speedup_interval"]) == (None, None)
    assert compared["withheld"].startswith("2.00")
    assert "tau is 2.00" in compared["withheld"]
    same = [*plain, *pairs_of(count, tpot_ms=5, hist=[0, 5])[1]]
    assert summarise(same, *GREEDY)["comparisons"][0]["speedup"] == 2


def test_an_arm_that_decoded_plain_but_for_a_few_rounds_has_no_tau_to_be_above():
    """9 plain steps and a round of tau 1: a speed-up of 1.01 is what noise makes of 1."""
    plain, eagle = pairs_of(10, 9.9, [1])
    compared = comparison(plain, eagle, is_greedy=True)
    assert (compared["tau"], compared["tokens_per_forward"]) == (None, 1)
    # 5 of 10 tokens
    compared = comparison(*pairs_of(10, 7, [0, 1, 1]), is_greedy=True)
    assert (compared["tau"], compared["tokens_per_forward"]) == (2.5, 10 / 7)


def test_without_a_tau_a_speedup_is_one_and_noise():
    def compared(*tpots_ms):
        eagle = rows_of("eagle", tpots_ms, hist=[1])
        return comparison(rows_of("plain", [10] * 10), eagle, is_greedy=True)

    busy = compared(*[10 / 1.9] * 10)
    assert (busy["speedup"], busy["withheld"][:4]) == (None, "1.90")
    noisy = compared(*[10] * 4, *[8] * 6)
    assert (noisy["speedup"], noisy["tau"]) == (None, None)
    assert "over 10 prompts is impossible, hardly any token was drafted" in noisy["withheld"]
    assert compared(*[9.5] * 10)["withheld"] is None


def test_another_engine_may_be_faster_than_tau():
    plain, eagle = pairs_of(9, tpot_ms=4, hist=[0, 5])
    assert comparison(plain, eagle, True)["speedup"] is None
    assert comparison(plain, eagle, True, same_engine=False)["speedup"] == 2.5


def test_an_answer_that_came_at_once_has_no_time_per_token():
    at_once = row("eagle", "a", tpot_ms=0)
    assert at_once.tpot_ms is None
    assert comparison([row("plain", "a")], [at_once], is_greedy=True)["speedup"] is None


# Whole runs


@pytest.fixture(scope="module")
def url():
    """The packaged target and head: a random head has a tau of 1, below noise."""
    target = resolve_target(BUILTIN)
    config = EngineConfig(max_batch=4, max_length=256, speculation="fixed(4,1,5)")
    engine = Engine.load(target, resolve_head(BUILTIN), config=config)
    info = ModelInfo("eyas", "float32", True, engine.max_length)
    service = ModelService.of(engine, Chat(target), info)
    with running_app(create_app("eyas"), service) as url:
        yield url


@pytest.fixture
def prompts(tmp_path):
    said = [f"I would like a table for {number}." for number in range(10)]
    rows = [{"id": f"p{number}", "turns": [one]} for number, one in enumerate(said)]
    return written(tmp_path / "prompts.jsonl", rows)


def run_of(tmp_path, progress=None, **config):
    output = Artifact(str(tmp_path / "bench"))
    bench(BenchConfig(**config), output, *([progress] if progress else []))
    return output


def test_a_run_measures_every_prompt_in_every_arm_and_finds_them_identical(url, prompts, tmp_path):
    steps, load = [], {"num_prompts": 10, "concurrencies": (1, 3), "max_tokens": 48}
    progress = lambda done, total=None, note="": steps.append((done, total))  # noqa: E731
    output = run_of(tmp_path, progress, url=url, prompts=prompts, **load)
    rows, summary = list(output.read_jsonl("rows.jsonl")), output.read_json("summary.json")
    assert Counter((row["arm"], row["concurrency"]) for row in rows) == {
        (arm, concurrency): 10 for arm in ("plain", "eagle") for concurrency in (1, 3)
    }
    assert not [row["error"] for row in rows if row["error"]]
    assert steps[-1] == (40, 40)
    assert output.manifest().counts == {"requests": 40, "failed": 0, "prompts": 10}
    for compared in summary["comparisons"]:
        assert compared["identical"] == compared["num_pairs"] == 10
        # on a busy machine a ratio may be above tau
        assert "impossible" in (compared["withheld"] or "impossible")
    for counted in summary["results"]:
        key = (counted["arm"], counted["concurrency"])
        own = [row for row in rows if (row["arm"], row["concurrency"]) == key]
        assert counted["num_output_tokens"] == sum(row["num_output_tokens"] for row in own)
        if counted["arm"] == "plain":
            assert counted["tau"] is None
        else:  # every token but the first of each answer came from a round
            hist = enumerate(counted["accept_hist"])
            emitted = sum((accepted + 1) * count for accepted, count in hist)
            assert emitted == counted["num_output_tokens"] - 10
            assert counted["tau"] >= 1


# Where the speed does not matter, neither arm drafts: a few tokens on a busy machine may come
# faster than tau allows.
TWO_PLAIN = {"plain": ArmConfig(speculation=False), "eagle": ArmConfig(speculation=False)}


def test_arms_take_turns_block_by_block(url, prompts, tmp_path):
    output = run_of(tmp_path, url=url, prompts=prompts, arms=TWO_PLAIN, max_tokens=2)
    order = [(row["block"], row["arm"]) for row in output.read_jsonl("rows.jsonl")]
    blocks = list(dict.fromkeys(order))
    turns = [("plain", "eagle"), ("eagle", "plain")]
    assert blocks == [(number, arm) for number in range(5) for arm in turns[number % 2]]
    # 10 prompts in up to eight blocks
    assert Counter(order) == dict.fromkeys(blocks, 2)


def test_a_run_that_is_done_is_not_done_again(url, prompts, tmp_path):
    config = BenchConfig(url=url, prompts=prompts, arms=TWO_PLAIN, num_prompts=2, max_tokens=2)
    first = bench(config, Artifact(str(tmp_path / "bench")))
    again = bench(config, Artifact(str(tmp_path / "bench")), lambda *_: pytest.fail("it ran again"))
    assert again == first
    with pytest.raises(InputError, match="other work"):
        bench(config.model_copy(update={"max_tokens": 9}), Artifact(str(tmp_path / "bench")))


def test_identity_is_what_is_served_or_else_where(prompts):
    here, there = (BenchConfig(prompts=prompts, url=url) for url in ("http://here", "http://there"))
    served = {"head": Manifest(stage="train", identity="1", config={}, counts={}, files={})}
    assert bench_identity(here, {}) != bench_identity(there, {})
    assert bench_identity(here, served) == bench_identity(there, served) != bench_identity(here, {})


def test_arms_may_have_servers_of_their_own_and_leave_our_field_out(prompts, tmp_path):
    bodies = [], []
    config = {"prompts": prompts, "num_prompts": 4, "max_tokens": 5, "temperature": 0.5}
    with scripted(bodies=bodies[0]) as one, scripted(bodies=bodies[1]) as other:
        arms = {"one": ArmConfig(), "other": ArmConfig(url=f"{other}/v1")}
        output = run_of(tmp_path, url=one, arms=arms, **config)
    (compared,) = output.read_json("summary.json")["comparisons"]
    assert compared["identical"] is None
    assert [len(asked) for asked in bodies] == [2 + 4, 2 + 4]
    assert not any("speculation" in body for asked in bodies for body in asked)


def test_without_the_field_a_server_with_a_head_drafts(url, prompts, tmp_path):
    config = {"prompts": prompts, "num_prompts": 4, "max_tokens": 32}
    output = run_of(tmp_path, url=url, arms={"one": ArmConfig()}, **config)
    assert output.read_json("summary.json")["results"][0]["tau"] >= 1


def test_requests_that_all_fail_are_kept_and_reported(url, prompts, tmp_path):
    with pytest.raises(EyasError, match="HTTP 400: max_tokens"):
        run_of(tmp_path, url=url, prompts=prompts, num_prompts=3, max_tokens=2**40)
    rows = (tmp_path / "bench" / "rows.jsonl").read_text().splitlines()
    assert all("HTTP 400" in json.loads(row)["error"] for row in rows)


def test_another_kind_of_server_is_named_as_such(prompts, tmp_path):
    page = {"do_GET": lambda handler: handler.reply(200, b"<html>")}
    with scripted(**page) as url, pytest.raises(EyasError, match="does not list a model"):
        run_of(tmp_path, url=url, prompts=prompts)


# Other servers


def compared(tmp_path, prompts, baseline, server, **config):
    """The summary of two scripted servers against each other."""
    with scripted(**baseline) as one, scripted(**server) as other:
        arms = {"baseline": ArmConfig(url=one), "server": ArmConfig(url=other)}
        config |= {"arms": arms, "prompts": prompts, "num_prompts": 6, "max_tokens": 8}
        return run_of(tmp_path, **config).read_json("summary.json")


def test_two_servers_that_tell_nothing_of_rounds_are_compared_and_it_is_said(tmp_path, prompts):
    summary = compared(tmp_path, prompts, {"gap_s": 0.004}, {})
    (found,) = summary["comparisons"]
    assert (found["num_pairs"], found["identical"], found["tau"]) == (6, 6, None)
    assert [one["what"] for one in summary["differences"]] == ["precision"]
    assert "not told by other" in summary["differences"][0]["text"]


def test_different_precisions_are_refused_before_anything_is_asked(tmp_path, prompts):
    servers = (
        {"info": {"dtype": "float16"}, "owner": "sglang"},
        {"owner": "eyas", "card": {"eyas": {"dtype": "bfloat16"}}},
    )
    with pytest.raises(MismatchError, match="float16 against bfloat16"):
        compared(tmp_path, prompts, *servers)
    assert not (tmp_path / "bench").exists()
    summary = compared(tmp_path, prompts, *servers, compare_anyway=True)
    assert summary["compared_anyway"]
    assert [one["what"] for one in summary["differences"] if one["refused"]] == ["precision"]


def test_another_chat_template_is_refused_after_the_first_answers(tmp_path, prompts):
    with pytest.raises(MismatchError, match="prompts are not of the same length"):
        compared(tmp_path, prompts, {}, {"extra_prompt_tokens": 3})
    assert not (tmp_path / "bench" / "rows.jsonl").exists()


def test_without_usage_times_are_measured_and_nothing_is_said_of_tokens(tmp_path, prompts):
    silent = {"tells_usage": False}
    summary = compared(tmp_path, prompts, silent, silent)
    for found in summary["results"]:
        assert found["counted_by"] == ["none"]
        assert (found["tpot_ms"], found["throughput_tps"], found["tau"]) == (None, None, None)
        assert found["e2e_ms"]["median"] > found["ttft_ms"]["median"] > 0
        assert found["itl_ms"]["median"] > 0
    assert summary["comparisons"][0]["speedup"] is None


def test_a_reading_of_counters_that_fails_costs_its_turn_and_no_more(tmp_path, prompts):
    counts = Counter(drafts=1000, accepted_tokens=0, draft_tokens=4000)  # of its history
    readings = []

    class Counting(Scripted):
        def do_GET(self):
            if self.path != "/metrics":
                return super().do_GET()
            readings.append(dict(counts))
            names = [f"vllm:spec_decode_num_{name}_total {n}" for name, n in counts.items()]
            failed = len(readings) in (3, 6)  # one before a turn, one behind another
            return self.reply(502 if failed else 200, "\n".join([*names, ""]).encode())

        def do_POST(self):
            counts.update(drafts=10, accepted_tokens=5, draft_tokens=40)
            return super().do_POST()

    with web_server(Counting) as url:
        config = {"arms": {"one": ArmConfig()}, "prompts": prompts, "num_prompts": 10}
        output = run_of(tmp_path, url=url, **config)
    (found,) = output.read_json("summary.json")["results"]
    assert (found["tau"], found["tau_from"]) == (1.5, "metrics")
    turns = list(zip(readings[::2], readings[1::2], strict=True))
    read = [after["drafts"] - before["drafts"] for before, after in turns]
    assert found["speculation"]["num_rounds"] == sum(read) - read[1] - read[2] > 0


def test_an_open_loop_sends_when_the_time_has_come(tmp_path, prompts, monkeypatch):
    monkeypatch.setattr(
        "eyas.bench.bench.arrival_times_s",
        lambda rate, count, seed: [number / rate for number in range(count)],
    )
    sent = []  # of each block: when it began and when each request was sent
    bench_module = sys.modules[BenchConfig.__module__]
    ask_all, stream = bench_module._ask_all, Client.stream

    async def timed(*block):
        if len(block) == 4:  # with times: not while warming up
            sent.append([time.perf_counter()])
        return await ask_all(*block)

    async def noted(client, body):
        if sent:
            sent[-1].append(time.perf_counter())
        return await stream(client, body)

    monkeypatch.setattr(bench_module, "_ask_all", timed)
    monkeypatch.setattr(Client, "stream", noted)
    with scripted(gap_s=0.05) as url:
        config = {"arms": {"one": ArmConfig()}, "concurrencies": (), "rates": (50,)}
        output = run_of(tmp_path, url=url, prompts=prompts, num_prompts=10, **config)
        rows, summary = list(output.read_jsonl("rows.jsonl")), output.read_json("summary.json")
    for block in range(4):
        started = [row["started_s"] for row in rows if row["block"] == block]
        first = next(row for row in rows if row["block"] == block)
        # an answer takes ten times as long as the gap: no request waits for one
        begin, *times = sent[block]
        assert len(times) == len(started)
        for place, at in enumerate(times):
            assert at - begin >= 0.02 * place - 0.001
        assert len(started) == 1 or started[-1] < started[0] + first["e2e_ms"] / 1000
    assert [one["rate"] for one in summary["results"]] == [50]


def test_a_connection_that_was_closed_while_idle_costs_no_request(tmp_path, prompts):
    with scripted(handle=lambda server: server.handle_one_request()) as url:
        config = {"prompts": prompts, "num_prompts": 6, "max_tokens": 3}
        output = run_of(tmp_path, url=url, arms={"one": ArmConfig()}, **config)
        assert not [row["error"] for row in output.read_jsonl("rows.jsonl") if row["error"]]


@pytest.mark.parametrize("kind", [httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError])
def test_however_the_kernel_tells_of_a_stale_connection_the_request_is_sent_again(kind):
    async def done():
        yield b"data: [DONE]\n\n"

    async def asked(failures):
        def answer(request):
            if failures:
                raise failures.pop()
            return httpx.Response(200, content=done())

        async with Client("http://server", timeout_s=5.0) as client:
            client._http._transport = httpx.MockTransport(answer)
            return await client.stream({})

    assert not asyncio.run(asked([kind("")])).error
    # once: then it is the server's failure
    assert asyncio.run(asked([kind(""), kind("")])).error == f"{kind.__name__}: "


def streamed(pieces, timeout_s=0.3):
    async def asked():
        async with Client("http://server", timeout_s) as client:
            answer = lambda _: httpx.Response(200, content=pieces())  # noqa: E731
            client._http._transport = httpx.MockTransport(answer)
            return await client.stream({})

    return asyncio.run(asked())


def test_comments_alone_keep_no_answer_alive():
    async def pings():
        while True:
            await asyncio.sleep(0.005)
            yield b": ping\n\n"

    async def slow():
        for _ in range(12):
            async for ping in pings():
                yield ping
                break
            await asyncio.sleep(0.04)
            yield delta("a")
        yield delta(None, "stop")

    assert streamed(pings).error == "nothing but comments for 0.3 s"
    answer = read_reply(streamed(slow))
    assert (answer.text, answer.error) == ("a" * 12, "")
    assert answer.e2e_ms > 300  # longer than the timeout, which is between two pieces


def test_a_stream_without_an_end_is_cut(monkeypatch):
    async def endless():
        while True:
            yield delta("a" * 1000)

    monkeypatch.setattr("eyas.client.MAX_BODY", 1 << 20)
    assert streamed(endless, 60.0).error == "more than 1 MiB"


def test_more_at_a_time_than_there_are_prompts_is_refused(prompts, tmp_path):
    with pytest.raises(ConfigError, match="10 prompts for 11 at a time"):
        run_of(tmp_path, prompts=prompts, concurrencies=(1, 11))


def test_the_packaged_prompts_are_there_when_none_are_given():
    tasks = _read(BenchConfig(num_prompts=50))
    assert len(tasks) == 50 + 2  # to warm up with
    assert all(task.messages[-1]["role"] == "user" for task in tasks)
