"""The OpenAPI document has what is served, and requests made from it find no fault."""

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
    folder = tmp_path_factory.mktemp("target")
    world = World.make(folder, eos_token_id=2, max_position_embeddings=64)
    engine, limits = world.engine(max_length=64), LimitsConfig(max_queue=1024)
    with world.served(engine, limits, vertex=VertexConfig()) as client:
        yield client
        httpx.get(f"{client.url}/metrics")  # else the end waits for the next scrape


@pytest.fixture(scope="module")
def document(client):
    return httpx.get(f"{client.url}/openapi.json").json()


def test_the_document_has_routes_and_fields(client, document):
    assert document["openapi"] == "3.1.0"
    for path, operations in document["paths"].items():
        for method in operations:
            body, url = {} if method == "post" else None, client.url + path
            reply = httpx.request(method, url.replace("{model}", MODEL), json=body)
            assert reply.status_code == (400 if method == "post" else 200), path
            assert str(reply.status_code) in operations[method]["responses"]
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    names = "messages tools logprobs min_p guided_json stop_token_ids cache_salt"
    assert {*names.split()} <= set(chat)
    assert chat["echo"] == {"enum": [False, None]}
    assert document["info"]["version"] == eyas.__version__
    assert '"minimum": -1' in json.dumps(chat["top_k"])
    assert "mix the prompt into it" in json.dumps(chat["seed"])
    for form, name in (("Chat", "logprobs"), ("Text", "logprobs"), ("Responses", "top_logprobs")):
        field = document["components"]["schemas"][f"{form}Request"]["properties"][name]
        assert "whatever the temperature" in json.dumps(field)


TAKING = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/predict"]
OPERATIONS = [*TAKING, "/v1/models/{model}", "/v1/models", "/server_info", "/health", "/metrics"]
OPERATIONS += ["/version", "/tokenize", "/detokenize"]
CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]


def asked(client, document, path, mode, examples):
    """How many requests made from the document had which status; answers are as it says."""
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
def test_allowed_requests_find_no_fault(client, document, path):
    assert asked(client, document, path, schemathesis.GenerationMode.POSITIVE, PER_OPERATION)


@pytest.mark.parametrize("path", TAKING)
def test_forbidden_requests_are_refused(client, document, path):
    mode = schemathesis.GenerationMode.NEGATIVE
    assert asked(client, document, path, mode, WRONG_PER_OPERATION) == {400: WRONG_PER_OPERATION}
