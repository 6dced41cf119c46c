"""Vertex AI's contract for custom containers: its environment, {"instances", "parameters"}, errors.

An instance is the body of a chat (with `messages`) or of a text completion (with `prompt`);
parameters are fields for all instances that do not set them. A prediction is the endpoint's answer.
Such a body alone (rawPredict, streamRawPredict) is answered as at that endpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from eyas.errors import ConfigError
from eyas.serve.fields import Strict, parse_body
from eyas.serve.limits import ApiError, unsupported
from eyas.serve.protocol import ChatRequest, TextRequest

MAX_INSTANCES = 128
MAX_PARAMETERS_BYTES = 64 << 10  # each instance gets a copy
# google.rpc.Code by HTTP status, as Google's APIs name them.
_STATUSES = {
    **dict.fromkeys((400, 413, 415), "INVALID_ARGUMENT"),
    401: "UNAUTHENTICATED",
    **dict.fromkeys((408, 504), "DEADLINE_EXCEEDED"),
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}


class VertexConfig(BaseModel):
    """The routes that Vertex AI requests, and the URL of the model's files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    health_route: str = Field("/health", pattern="^/")
    predict_route: str = Field("/predict", pattern="^/")
    storage_uri: str | None = Field(None, min_length=1)


def from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Fields of a ServeConfig from the environment; none outside Vertex AI. Raises ConfigError.

    AIP_HTTP_PORT: the port, on all addresses. AIP_HEALTH_ROUTE, AIP_PREDICT_ROUTE: routes beside
    the server's own. AIP_STORAGE_URI: the folder of target/ and, for speculation, head/.
    """
    if "AIP_HTTP_PORT" not in environment:
        return {}
    port = environment["AIP_HTTP_PORT"]
    if not (port.isascii() and port.isdigit() and 0 <= int(port) < 65536):
        raise ConfigError(
            "AIP_HTTP_PORT is no port", "Vertex AI sets it; elsewhere give a number such as 8080"
        )
    routes = {
        name: route
        for name in ("health_route", "predict_route")
        if (route := environment.get(f"AIP_{name.upper()}"))
    }
    for name, route in routes.items():
        if not route.startswith("/") or set(route) & set("{}?#"):
            raise ConfigError(f"AIP_{name.upper()} is no path", "give one that begins with /")
    if len(set(routes.values())) < len(routes):
        raise ConfigError("AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE are the same", "give two")
    if environment.get("AIP_STORAGE_URI"):
        routes["storage_uri"] = environment["AIP_STORAGE_URI"]
    return {"host": "0.0.0.0", "port": int(port), "vertex": routes}


class _Outline(BaseModel):
    instances: Any = None
    messages: Any = None
    prompt: Any = None


class PredictionRequest(Strict):
    instances: Annotated[
        list[dict[str, Any]], Field(min_length=1, max_length=MAX_INSTANCES, fail_fast=True)
    ]
    parameters: dict[str, Any] | None = None


def openai_body(body: bytes, model: str) -> ChatRequest | TextRequest | None:
    """The body of a chat or a text completion, for the served model whatever it names. None for one
    with instances, or with neither. Raises ApiError.
    """
    outline = parse_body(_Outline, body).model_fields_set
    if "instances" in outline or not outline:
        return None
    return parse_body(_kind(outline), json.dumps({**json.loads(body), "model": model}).encode())


def instances(body: bytes, model: str) -> list[ChatRequest | TextRequest]:
    """The instances of a request, each as the body of its endpoint. Raises ApiError."""
    request = parse_body(PredictionRequest, body)
    shared = request.parameters or {}
    for name in ("instances", "messages", "prompt"):
        if name in shared:
            raise ApiError(400, f"parameters.{name}: belongs to an instance", f"parameters.{name}")
    if len(json.dumps(shared)) > MAX_PARAMETERS_BYTES:
        raise ApiError(
            400,
            f"parameters: over {MAX_PARAMETERS_BYTES} bytes, give them with the instances",
            "parameters",
        )
    found: list[ChatRequest | TextRequest] = []
    for number, given in enumerate(request.instances):
        where = f"instances.{number}"
        if ("messages" in given) == ("prompt" in given):
            raise ApiError(400, f"{where}: give messages, for a chat, or prompt, for a text", where)
        whole = json.dumps(_whole({"model": model, **shared, **given})).encode()
        try:
            one = parse_body(_kind(given), whole)
            if one.stream:
                raise unsupported("stream", "a prediction is not streamed; leave it out (or false)")
        except ApiError as error:
            raise located(error, number, given, shared) from None
        found.append(one)
    return found


def _kind(names: Collection[str]) -> type[ChatRequest | TextRequest]:
    return ChatRequest if "messages" in names else TextRequest


def _whole(value: Any) -> Any:
    # 16.0 as 16: protobuf's Struct, which may carry instances, has floats only
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def located(
    error: ApiError, number: int, given: Mapping[str, Any], shared: Mapping[str, Any]
) -> ApiError:
    """The error of one instance, with the place of its field in the whole body."""
    first = (error.param or "").partition(".")[0]
    place = "parameters" if first in shared and first not in given else f"instances.{number}"
    param = f"{place}.{error.param}" if error.param else place
    return ApiError(error.status, f"{place}: {error.message}", param, error.code, error.retry_after)


def error_body(error: ApiError) -> dict[str, Any]:
    """The error in the form of Google's APIs."""
    default = "INTERNAL" if error.status >= 500 else HTTPStatus(error.status).name
    status = _STATUSES.get(error.status, default)
    body: dict[str, Any] = {"code": error.status, "message": error.message, "status": status}
    if error.param is not None:
        violation = {"field": error.param, "description": error.message}
        body["details"] = [
            {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]}
        ]
    return {"error": body}
