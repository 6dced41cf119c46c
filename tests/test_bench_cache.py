"""Servers' prefix caches must not show in the figures: salts, warm-up, and notes."""

from __future__ import annotations

import httpx
import pytest

from eyas.artifact import VERSION, Artifact
from eyas.bench.bench import ArmConfig, BenchConfig, bench
from eyas.bench.report import notes
from tests.bench_servers import scripted
from tests.source_rows import written

ARMS = {"plain": ArmConfig(speculation=False), "eagle": ArmConfig(speculation=False)}


@pytest.fixture
def prompts(tmp_path):
    """Long enough for several pages, and different from the first word on."""
    said = [
        f"{n} people would like a table, " + f"{n} of them by the window, " * 3 for n in range(9)
    ]
    rows = [{"id": n, "turns": [one]} for n, one in enumerate(said)]
    return written(tmp_path / "prompts.jsonl", rows)


def asked(tmp_path, prompts, server, **config):
    """The bodies that a scripted server got, and the summary."""
    bodies = []
    config = {"num_prompts": 6, "concurrencies": (1, 2), "max_tokens": 4, "arms": ARMS, **config}
    with scripted(bodies=bodies, **server) as url:
        output = Artifact(str(tmp_path / "bench"))
        bench(BenchConfig(url=url, prompts=prompts, **config), output)
        asked_of = [row["prompt_id"] for row in output.read_jsonl("rows.jsonl")]
        return bodies, output.read_json("summary.json"), asked_of


@pytest.mark.parametrize("owner", ["eyas", "vllm"])
def test_every_arm_and_load_has_a_salt_of_its_own(tmp_path, prompts, owner):
    arms = {"plain": ArmConfig(fields={"seed": 1}), "eagle": ArmConfig(fields={"seed": 2})}
    bodies, summary, _ = asked(tmp_path, prompts, {"owner": owner}, num_prompts=8, arms=arms)
    of_seed = [[one["cache_salt"] for one in bodies if one["seed"] == seed] for seed in (1, 2)]
    # 2 to warm up and 8 to measure, twice: loads of one and two at a time
    for salts in of_seed:
        assert [salts.count(one) for one in dict.fromkeys(salts)] == [2, 8, 2, 8]
    assert not set(of_seed[0]) & set(of_seed[1])
    assert summary["salted_arms"] == ["plain", "eagle"]
    assert "cache_salt" not in " ".join(notes(summary))


def test_of_other_servers_it_is_said_that_prompts_may_be_cached(tmp_path, prompts):
    bodies, summary, _ = asked(tmp_path, prompts, {"owner": "sglang"})
    assert not any("cache_salt" in body for body in bodies)
    assert any("The server of plain, eagle is not known" in note for note in notes(summary))


def test_a_salt_of_the_users_own_stays_and_is_no_fresh_one(tmp_path, prompts):
    arms = {"a": ArmConfig(fields={"cache_salt": "mine"}), "b": ArmConfig()}
    bodies, summary, _ = asked(tmp_path, prompts, {"owner": "eyas"}, arms=arms)
    assert [body["cache_salt"] for body in bodies].count("mine") == len(bodies) / 2
    assert summary["salted_arms"] == ["b"]


def test_what_warms_up_is_not_measured_where_there_are_prompts_enough(tmp_path, prompts):
    config = {"concurrencies": (1,), "arms": {"one": ArmConfig()}}
    bodies, _, measured = asked(tmp_path, prompts, {}, **config)
    first, second, *others = [body["messages"][0]["content"].split()[0] for body in bodies]
    assert others == measured
    assert len({first, second, *others}) == 8


def test_our_server_reuses_nothing_that_another_arm_or_load_has_asked(world, tmp_path, prompts):
    def hits():
        lines = httpx.get(f"{client.url}/metrics").text.splitlines()
        own = [line for line in lines if line.startswith("eyas:prefix_cache_hits_total")]
        return [float(line.split()[-1]) for line in own]

    with world.served() as client:
        load = {"num_prompts": 7, "concurrencies": (1, 2), "max_tokens": 4}
        config = BenchConfig(url=client.url, prompts=prompts, arms=ARMS, **load)
        bench(config, Artifact(str(tmp_path / "bench")))
        assert hits() == [0.0]
        facts = Artifact(str(tmp_path / "bench")).read_json("summary.json")["servers"]["plain"]
        assert facts["version"] == VERSION
        assert (facts["has_head"], facts["precision"]) == (False, "float32")
        said = {"role": "user", "content": "The same, twice. " * 5}
        body = {"model": "tiny", "messages": [said], "max_tokens": 1}
        for _ in range(2):
            url = f"{client.url}/v1/chat/completions"
            httpx.post(url, json=body, timeout=300).raise_for_status()
        assert hits() > [0.0], "it does reuse what it knows"
