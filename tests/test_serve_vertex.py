"""Vertex AI's contract: environment, routes, predictions and the form of errors."""

import json
import re
import time
from pathlib import Path

import fsspec
import httpx
import pytest

from eyas.errors import ConfigError
from eyas.serve.limits import LimitsConfig
from eyas.serve.server import ServeConfig, load
from eyas.serve.translation import Translator
from eyas.serve.vertex import VertexConfig, from_environment, instances
from tests.serving import MESSAGES, MODEL, ask, complete, events, post, text_of
from tests.tiny import tiny_target
from tests.tiny_head import head_folder

ROUTES = VertexConfig(
    health_route="/v1/endpoints/7/deployedModels/8",
    predict_route="/v1/endpoints/7/deployedModels/8:predict",
)
CHAT = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}
TEXT = {"prompt": "I would like", "temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def client(world):
    with world.served(vertex=ROUTES) as client:
        yield client


def predict(client, body, **options):
    return post(client, body, ROUTES.predict_route, **options)


def test_predictions_are_what_the_endpoints_answer(client):
    reply = predict(client, {"instances": [CHAT, TEXT, {**TEXT, "prompt": "you", "n": 2}]})
    assert reply.status_code == 200
    chat, text, two = reply.json()["predictions"]
    expected = ask(client, max_tokens=12)
    assert chat["choices"][0]["message"]["content"] == text_of(expected)
    assert chat["usage"]["completion_tokens"] == 12
    assert chat["model"] == MODEL
    assert text["choices"][0]["text"] == complete(client, max_tokens=6).choices[0].text
    assert [choice["index"] for choice in two["choices"]] == [0, 1]


def test_parameters_are_defaults_of_instances(client):
    instances = [{"messages": MESSAGES}, {"messages": MESSAGES, "max_tokens": 3}]
    reply = predict(client, {"instances": instances, "parameters": {"max_tokens": 5}}).json()
    assert [one["usage"]["completion_tokens"] for one in reply["predictions"]] == [5, 3]
    assert predict(client, {"instances": [CHAT], "parameters": None}).status_code == 200


def test_openai_bodies_are_answered_alone(client):
    """As rawPredict and streamRawPredict send them, with a model or without."""
    chat, text = predict(client, CHAT).json(), predict(client, {**TEXT, "model": "any"}).json()
    expected = text_of(ask(client, max_tokens=12))
    assert (chat["object"], text["object"]) == ("chat.completion", "text_completion")
    assert chat["choices"][0]["message"]["content"] == expected
    assert text["choices"][0]["text"] == complete(client, max_tokens=6).choices[0].text
    streamed = predict(client, {**CHAT, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    pieces = [one["choices"][0]["delta"].get("content") or "" for one in events(streamed)]
    assert "".join(pieces) == expected
    wrong = predict(client, {**CHAT, "top_p": 7})
    (violation,) = wrong.json()["error"]["details"][0]["fieldViolations"]
    assert (wrong.status_code, violation["field"]) == (400, "top_p")


def test_whole_numbers_may_be_floats(client):
    instance = {"messages": MESSAGES, "max_tokens": 16.0, "n": 2.0, "seed": 3.0}
    body = {"instances": [instance], "parameters": {"top_k": 1.0, "temperature": 0.5}}
    (answer,) = predict(client, body).json()["predictions"]
    assert answer["usage"]["completion_tokens"] == 32
    body["parameters"]["guided_json"] = {"enum": [7.0, 1.5, {"const": 1e300}]}
    (one,) = instances(json.dumps(body).encode(), MODEL)
    assert json.dumps(one.guided_json) == json.dumps({"enum": [7, 1.5, {"const": int(1e300)}]})
    assert predict(client, {"instances": [{**CHAT, "max_tokens": 1.5}]}).status_code == 400


def test_times_count_from_the_arrival(world, monkeypatch):
    monkeypatch.setattr(
        Translator, "completion", lambda *given: time.sleep(0.3) or translated(*given)
    )
    with world.served(vertex=ROUTES) as client:
        predict(client, {"instances": [{**CHAT, "max_tokens": 1}]})
        page = httpx.get(f"{client.url}/metrics").text
    name = "eyas:time_to_first_token_seconds_sum"
    assert float(re.search(rf"^{name}\{{.*\}} (\S+)$", page, re.M)[1]) > 0.3


translated = Translator.completion


TITLE = {"guided_json": {"title": "x" * 70_000}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "instances"),
        ({"instances": []}, "instances"),
        ({"instances": ["text"]}, "instances.0"),
        ({"instances": [CHAT] * 129}, "instances"),
        ({"instances": [CHAT], "signature_name": "x"}, "signature_name"),
        ({"instances": [CHAT, {"temperature": 0}]}, "instances.1"),
        ({"instances": [{**CHAT, **TEXT}]}, "instances.0"),
        ({"instances": [CHAT, {**CHAT, "unheard_of": 1}]}, "instances.1.unheard_of"),
        ({"instances": [{**CHAT, "temperature": "hot"}]}, "instances.0.temperature"),
        ({"instances": [CHAT], "parameters": {"top_p": 7}}, "parameters.top_p"),
        ({"instances": [CHAT], "parameters": {"messages": MESSAGES}}, "parameters.messages"),
        ({"instances": [CHAT] * 128, "parameters": TITLE}, "parameters"),
        ({"instances": [{**CHAT, "stream": True}]}, "instances.0.stream"),
        ({"instances": [CHAT, {**CHAT, "max_tokens": 0}]}, "instances.1.max_tokens"),
        ({"instances": [{**CHAT, "use_beam_search": True}]}, "instances.0.use_beam_search"),
    ],
)
def test_errors_have_googles_form(client, body, field):
    reply = predict(client, body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert error["details"][0]["fieldViolations"][0]["field"] == field
    assert error["message"] == error["details"][0]["fieldViolations"][0]["description"]


@pytest.mark.parametrize(
    "body",
    [b"{", b"\xff", b"[1]", b"null", b"[" * 50_000, b'{"instances": [{"prompt": "\\ud800"}]}'],
)
def test_broken_bodies_are_refused(client, body):
    headers = {"content-type": "application/json"}
    reply = httpx.post(client.url + ROUTES.predict_route, content=body, headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["status"] == "INVALID_ARGUMENT"


def test_refusals_have_googles_names(world, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret")
    limits = LimitsConfig(api_keys=keys, max_queue=0, max_body_bytes=2000)
    with world.served(limits=limits, vertex=ROUTES) as client:
        assert predict(client, {"instances": [CHAT]}).json()["error"]["status"] == "UNAUTHENTICATED"
        key = {"authorization": "Bearer secret"}
        large = predict(client, {"instances": [{**TEXT, "prompt": "x" * 3000}]}, headers=key)
        assert (large.status_code, large.json()["error"]["status"]) == (413, "INVALID_ARGUMENT")
        many = predict(client, {"instances": [{**TEXT, "n": 5}]}, headers=key)
        assert many.status_code == 400
        assert predict(client, {"instances": [TEXT]}, headers=key).status_code == 200


def test_routes(client):
    assert httpx.post(client.url + ROUTES.predict_route, json={}).status_code == 400
    assert httpx.get(client.url + ROUTES.health_route).json()["status"] == "ok"
    assert httpx.get(client.url + "/health").status_code == 200
    page = httpx.get(client.url + "/metrics").text
    assert f'endpoint="{ROUTES.predict_route}"' in page
    assert httpx.get(client.url + "/openapi.json").json()["paths"][ROUTES.predict_route]["post"]


def test_the_predict_route_may_be_an_endpoint(world):
    routes = VertexConfig(predict_route="/v1/chat/completions")
    with world.served(vertex=routes) as client:
        assert ask(client, max_tokens=2).usage.completion_tokens == 2


# The environment


ENVIRONMENT = {
    "AIP_HTTP_PORT": "8080",
    "AIP_HEALTH_ROUTE": "/healthy",
    "AIP_PREDICT_ROUTE": "/guess",
    "AIP_STORAGE_URI": "gs://bucket/models/one/",
}


def test_the_environment():
    assert from_environment({}) == from_environment({"AIP_STORAGE_URI": "gs://x"}) == {}
    config = ServeConfig(**from_environment(ENVIRONMENT))
    assert (config.host, config.port, config.target) == ("0.0.0.0", 8080, None)
    assert config.vertex == VertexConfig(
        health_route="/healthy", predict_route="/guess", storage_uri="gs://bucket/models/one/"
    )
    assert config.served_model == "one"
    bare = from_environment({"AIP_HTTP_PORT": "1", "AIP_STORAGE_URI": ""})
    assert ServeConfig(target="t", **bare).vertex == VertexConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("HTTP_PORT", port) for port in ("eighty", "70000", "²")),
        ("HEALTH_ROUTE", "healthy"),
        *(("PREDICT_ROUTE", route) for route in ("/{x}", "/healthy")),
    ],
)
def test_a_wrong_environment_is_an_error(name, value):
    with pytest.raises(ConfigError):
        from_environment({**ENVIRONMENT, f"AIP_{name}": value})


def test_a_target_or_a_store_is_needed():
    with pytest.raises(ConfigError, match="no target"):
        ServeConfig(**from_environment({"AIP_HTTP_PORT": "8080"}))


def test_target_and_head_come_from_the_store(tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    target = tiny_target(tmp_path / "target")
    store = fsspec.filesystem("memory")
    store.put(f"{target}/", "/bucket/target/", recursive=True)
    environment = {"AIP_HTTP_PORT": "8080", "AIP_STORAGE_URI": "memory://bucket/"}
    config = ServeConfig(**from_environment(environment))
    folder, head = config.folders()
    assert head is None
    assert (Path(folder) / "config.json").read_bytes() == (target / "config.json").read_bytes()
    store.put(f"{head_folder(target, tmp_path / 'head')}/", "/bucket/head/", recursive=True)
    service = load(config)
    assert service.info.has_head
    assert service.info.model == "bucket"
