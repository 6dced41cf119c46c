"""The OpenAPI document: it names what is served, and requests made from it find no fault in the
server.
"""

from __future__ import annotations

import json
from collections import Counter

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

import eyas
from eyas.serve.limits import LimitsConfig
from eyas.serve.vertex import VertexConfig
from tests.serving import MODEL, World

PER_OPERATION = 25
WRONG_PER_OPERATION = 30


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    world = World.make(
        tmp_path_factory.mktemp("target"), eos_token_id=2, max_position_embeddings=64
    )
    with world.served(
        world.engine(max_length=64), LimitsConfig(max_queue=1024), vertex=VertexConfig()
    ) as client:
        yield client


@pytest.fixture(scope="module")
def document(client):
    return httpx.get(f"{client.url}/openapi.json").json()


def test_the_document_has_every_route_and_every_field(client, document):
    assert document["openapi"] == "3.1.0"
    for path, operations in document["paths"].items():
        for method in operations:
            reply = httpx.request(
                method,
                client.url + path.replace("{model}", MODEL),
                json={} if method == "post" else None,
            )
            assert reply.status_code == (400 if method == "post" else 200), path
            assert str(reply.status_code) in operations[method]["responses"]
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {
        "messages",
        "tools",
        "logprobs",
        "min_p",
        "guided_json",
        "stop_token_ids",
        "echo",
    } <= set(chat)
    assert chat["echo"] == {"enum": [False, None]}
    assert document["info"]["version"] == eyas.__version__
    assert '"minimum": -1' in json.dumps(chat["top_k"])
    assert "mix the prompt into it" in json.dumps(chat["seed"])
    for form, name in (("Chat", "logprobs"), ("Text", "logprobs"), ("Responses", "top_logprobs")):
        field = document["components"]["schemas"][f"{form}Request"]["properties"][name]
        assert "whatever the temperature" in json.dumps(field)


OPERATIONS = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/predict",
    "/v1/models/{model}",
    *("/v1/models", "/server_info", "/health", "/metrics", "/version"),
    *("/tokenize", "/detokenize"),
]
TAKING = [path for path in OPERATIONS if path.startswith(("/v1/c", "/v1/r", "/predict"))]
CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]


def asked(client, document, path, mode, examples):
    """Make requests from the document, check the answers against it; how many had which status."""
    loaded = schemathesis.openapi.from_dict(document)
    (operation,) = [one.ok() for one in loaded.get_all_operations() if one.ok().path == path]
    statuses = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        reply = case.call(base_url=client.url)
        case.validate_response(reply, checks=CHECKS)
        statuses[reply.status_code] += 1

    ask()
    return statuses


@pytest.mark.parametrize("path", OPERATIONS)
def test_no_request_finds_a_fault(client, document, path):
    assert asked(client, document, path, schemathesis.GenerationMode.POSITIVE, PER_OPERATION)


@pytest.mark.parametrize("path", TAKING)
def test_no_request_that_the_document_forbids_finds_one_either(client, document, path):
    """Refused, in the shape that the document gives errors."""
    statuses = asked(
        client, document, path, schemathesis.GenerationMode.NEGATIVE, WRONG_PER_OPERATION
    )
    assert statuses == {400: WRONG_PER_OPERATION}
