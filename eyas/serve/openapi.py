"""The endpoints as an OpenAPI document, made from the classes that validate requests."""

from __future__ import annotations

from copy import deepcopy
from importlib.metadata import version
from typing import Any

from eyas.serve.fields import RequestBody
from eyas.serve.protocol import ChatRequest, GenerateRequest, TextRequest
from eyas.serve.vertex import PredictionRequest

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    },
}
_ANSWER = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {
            "type": "array",
            "items": {"type": "object", "required": ["index", "finish_reason"]},
        },
        "usage": _USAGE,
    },
}
_MODEL = {"type": "object", "required": ["id", "object", "created", "owned_by"]}
_MODELS = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {"data": {"type": "array", "items": _MODEL}},
}
_HEALTH = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}
_PROBLEMS = {
    "400": "the request is wrong or asks for what this server does not support",
    "401": "an API key is needed",
    "404": "no such model",
    "408": "the body came too slowly",
    "413": "the body is too large",
    "415": "the body is no JSON",
    "429": "too many requests; retry-after says when to come again",
    "500": "the engine failed",
    "503": "the server is loading its model or shutting down",
    "504": "the answer took too long",
}


_GENERATED = {"type": "object", "required": ["text", "output_ids", "meta_info"]}
_INFO = {"type": "object", "required": ["internal_states"]}
_PREDICTIONS = {
    "type": "object",
    "required": ["predictions"],
    "properties": {"predictions": {"type": "array"}},
}
_VERTEX_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["code", "message", "status"]}},
}


def document(model: str, predict_route: str | None = None) -> dict[str, Any]:
    """OpenAPI 3.1. model: the name that requests must give; predict_route: Vertex AI's, where it is
    served.
    """
    schemas: dict[str, Any] = {}
    paths = {
        "/v1/chat/completions": {
            "post": _completion("answers a chat", _form(ChatRequest, model, schemas))
        },
        "/v1/completions": {
            "post": _completion("continues texts", _form(TextRequest, model, schemas))
        },
        "/generate": {
            "post": _completion(
                "SGLang's own", _form(GenerateRequest, model, schemas), _either(_GENERATED)
            )
        },
        "/v1/models": {"get": _simple("the served model", _MODELS, "401", "429", "503")},
        "/v1/models/{model}": {
            "get": {
                **_simple("the same by name", _MODEL, "401", "404", "429", "503"),
                "parameters": [_parameter(model)],
            }
        },
        "/server_info": {
            "get": _simple("what SGLang's benchmark reads", _INFO, "401", "429", "503")
        },
        "/get_server_info": {
            "get": _simple("the same under its older name", _INFO, "401", "429", "503")
        },
        "/health": {"get": _simple("whether requests are taken", _HEALTH, "503")},
        "/metrics": {
            "get": {
                "summary": "for Prometheus",
                "responses": {"200": _content("text/plain", {"type": "string"})},
            }
        },
        "/openapi.json": {"get": _simple("this document", {"type": "object"})},
    }
    if predict_route is not None and predict_route not in paths:
        form = _form(PredictionRequest, model, schemas)
        paths[predict_route] = {
            "post": _completion("Vertex AI's predictions", form, _PREDICTIONS, _VERTEX_ERROR)
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "eyas", "version": version("eyas"), "description": f"serves {model}"},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _form(
    form: type[RequestBody | PredictionRequest], model: str, schemas: dict[str, Any]
) -> dict[str, Any]:
    """A reference to a body's schema, which is put into `schemas` with its parts.

    Every field may be null; a field that is not supported has the values that change nothing.
    """
    schema = deepcopy(
        form.model_json_schema(by_alias=True, ref_template="#/components/schemas/{model}")
    )
    schemas |= schema.pop("$defs", {})
    properties = schema["properties"]
    off = form.off if issubclass(form, RequestBody) else {}
    for name, values in off.items():
        properties[name] = {"enum": [*values, None]}
    for name in properties.keys() - set(schema.get("required", ())) - off.keys():
        properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
    if "model" in properties:
        properties["model"] = {"const": model}
    schemas[form.__name__] = schema
    return {"$ref": f"#/components/schemas/{form.__name__}"}


def _either(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, or a list of it."""
    return {"oneOf": [schema, {"type": "array", "items": schema}]}


def _completion(
    summary: str,
    form: dict[str, Any],
    answers: dict[str, Any] = _ANSWER,
    error: dict[str, Any] = _ERROR,
) -> dict[str, Any]:
    answer = _content("application/json", answers)
    # each event's data is the JSON of a chunk, the last one's [DONE]
    answer["content"]["text/event-stream"] = {"schema": {}}
    return {
        "summary": summary,
        "security": [{"key": []}, {}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": form}}},
        "responses": {"200": answer, **_problems(*_PROBLEMS, error=error)},
    }


def _simple(summary: str, schema: dict[str, Any], *problems: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {"200": _content("application/json", schema), **_problems(*problems)},
    }


def _problems(*statuses: str, error: dict[str, Any] = _ERROR) -> dict[str, Any]:
    return {
        status: {**_content("application/json", error), "description": _PROBLEMS[status]}
        for status in statuses
    }


def _content(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "", "content": {kind: {"schema": schema}}}


def _parameter(model: str) -> dict[str, Any]:
    return {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "example": model,
    }
