"""Metrics that Prometheus can read and that add up, and a line of log for each request."""

import json
import logging
import time
from itertools import zip_longest

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from eyas.engine.engine import EngineConfig
from eyas.log import JsonFormatter
from eyas.serve.app import create_app
from eyas.serve.server import ServeConfig, load, running_app
from tests.serving import MESSAGES, MODEL, ask, connected, post
from tests.tiny_head import head_folder

HI = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def speculating(world, tmp_path):
    engine = world.drafting(tmp_path / "head", "fixed(2,2,4)")
    with world.served(engine, has_head=True) as client:
        yield client


def scraped(client):
    """Samples by name and labels; all have the model's."""
    page = httpx.get(f"{client.url}/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(page.text):
        assert family.name.startswith("eyas:")
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL
            found[sample.name, *sorted(labels.items())] = sample.value
    return found


def test_metrics_add_up(speculating):
    replies = [ask(speculating, max_tokens=most, n=n) for most, n in ((24, 1), (10, 2))]
    list(ask(speculating, max_tokens=12, stream=True))
    post(speculating, {"model": MODEL, "messages": []})
    refused = post(speculating, {"model": MODEL, "messages": MESSAGES, "guided_regex": "("})
    assert refused.status_code == 400
    found = scraped(speculating)
    assert found["eyas:generation_tokens_total",] == 24 + 20 + 12
    assert found["eyas:request_success_total", ("finished_reason", "length")] == 4
    path = ("endpoint", "/v1/chat/completions")
    assert found["eyas:http_requests_total", path, ("status", "200")] == 3
    assert found["eyas:http_requests_total", path, ("status", "400")] == 2
    for name in ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency"):
        assert found[f"eyas:{name}_seconds_count",] == 3
    first = found["eyas:time_to_first_token_seconds_sum",]
    assert 0 < first <= found["eyas:e2e_request_latency_seconds_sum",]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert found[f"eyas:{name}",] == 0
    assert found["eyas:kv_cache_pages",] == found["eyas:kv_cache_pages_available",] > 0
    # The refused prompt is no answered one; the stream's is that of both others.
    assert found["eyas:prompt_tokens_total",] == 3 * replies[0].usage.prompt_tokens
    assert found["eyas:request_prompt_tokens_sum",] == found["eyas:prompt_tokens_total",]
    assert found["eyas:prefix_cache_hits_total",] > 0
    assert 0 <= found["eyas:device_idle_share",] < 1


def test_metrics_of_speculation(speculating):
    replies = [ask(speculating, max_tokens=40, seed=seed, temperature=0.7) for seed in range(4)]
    found = scraped(speculating)
    hists = [reply.usage.eyas["accept_hist"] for reply in replies]
    hist = [sum(counts) for counts in zip_longest(*hists, [0, 0, 0], fillvalue=0)]
    assert found["eyas:spec_decode_num_drafts_total",] == sum(hist)
    assert found["eyas:spec_decode_num_accepted_tokens_total",] == hist[1] + 2 * hist[2]
    name = "eyas:spec_decode_num_accepted_tokens_per_pos_total"
    per_position = [found.get((name, ("position", str(at))), 0) for at in (0, 1)]
    assert per_position == [hist[1] + hist[2], hist[2]]
    accepted = (hist[1] + 2 * hist[2]) / sum(hist)
    assert found["eyas:spec_accept_length",] == pytest.approx(1 + accepted)
    assert found["eyas:rounds_total", ("kind", "tree")] >= sum(hist) - 4
    assert found["eyas:round_real_seconds_total", ("kind", "tree")] > 0
    assert found["eyas:round_tokens_total", ("kind", "tree")] > 0
    assert found["eyas:spec_decode_num_draft_tokens_total",] >= 3 * sum(hist) - 12


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_sglang_s_benchmark_reads_tau(speculating, path):
    ask(speculating, max_tokens=12)
    info = httpx.get(speculating.url + path).json()
    assert info["internal_states"][0]["avg_spec_accept_length"] >= 1
    assert info["served_model_name"] == MODEL


def test_one_line_of_log_per_request(speculating, caplog):
    caplog.set_level(logging.INFO, logger="eyas.serve")
    name = {"x-request-id": "from-the-client"}
    reply = post(speculating, {**HI, "max_tokens": 9}, headers=name)
    assert reply.headers["x-request-id"] == "from-the-client"
    name = {"x-request-id": "not one\u00e9".encode()}
    post(speculating, {"model": MODEL, "messages": []}, headers=name)
    good, bad = (
        json.loads(JsonFormatter().format(record))
        for record in caplog.records
        if record.getMessage() == "request"
    )
    assert (good["request_id"], good["status"]) == ("from-the-client", 200)
    assert good["num_output_tokens"] == 9
    assert (good["finish_reasons"], good["endpoint"]) == (["length"], "/v1/chat/completions")
    assert good["ttft_ms"] <= good["ms"]
    assert good["tau"] >= 1
    assert (bad["status"], bad["failure"]) == (400, "bad_request")
    assert bad["request_id"].isalnum()


@pytest.mark.parametrize("is_stream", [False, True])
def test_traceparent_is_in_log_and_answer(speculating, caplog, is_stream):
    caplog.set_level(logging.INFO, logger="eyas.serve")
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    body = {**HI, "max_tokens": 2, "stream": is_stream}
    for sent in (trace, "00-\u00e9".encode()):
        reply = post(speculating, body, headers={"traceparent": sent})
        assert reply.headers.get("traceparent") == (sent if sent == trace else None)

    def logged():
        return [one.data for one in caplog.records if one.getMessage() == "request"]

    latest = time.monotonic() + 300
    while len(logged()) < 2 and time.monotonic() < latest:
        time.sleep(0.01)  # a stream's line is written behind its last byte
    assert [one.get("traceparent") for one in logged()] == [trace, None]


def test_metrics_of_the_heads_card(world, tmp_path):
    """Of the drafts that it makes, from the first scrape on."""
    head = head_folder(world.folder, tmp_path / "export" / "sglang")
    figures = {"num_draft_steps": 2, "rounds": 900, "answers": 50, "acceptance_by_position": [0.5]}
    figures |= {"speculation": "fixed(2,2,4)", "tau_interval": [1.5, 1.7]}
    other = {**figures, "speculation": "fixed(6,3,12)", "tau": 3.0, "temperature": 0.0}
    trees = [other, *({**figures, "tau": 1.6 - t / 10, "temperature": t} for t in (0.0, 1.0))]
    (tmp_path / "export" / "eval.json").write_text(json.dumps({"trees": trees}))

    def served(speculation):
        own = {"target": str(world.folder), "head": str(head), "model": MODEL}
        return load(ServeConfig(**own, engine=EngineConfig(speculation=speculation)))

    with running_app(create_app(MODEL), served("fixed(2,2,4)")) as url, connected(url) as client:
        found = scraped(client)
    cold, warm = ("temperature", "0"), ("temperature", "1")
    assert (found["eyas:card_tau", cold], found["eyas:card_tau", warm]) == (1.6, 1.5)
    assert found["eyas:card_se", cold] == pytest.approx(0.2 / 3.92, rel=1e-3)
    assert (found["eyas:card_answers", cold], found["eyas:card_rounds", cold]) == (50, 900)
    assert not served("off").card  # no promise is made of it


def test_metrics_of_a_failed_engine(world):
    engine = world.engine()
    with world.served(engine) as client:
        ask(client, max_tokens=2)
        engine.step = None
        assert post(client, HI).status_code == 500
        found = scraped(client)
    assert found["eyas:generation_tokens_total",] == 2
    assert found["eyas:request_failure_total", ("reason", "engine_failure")] == 1
