"""The endpoints as an OpenAPI document, made from the classes that validate requests."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from eyas.artifact import VERSION
from eyas.serve.fields import RequestBody
from eyas.serve.protocol import ChatRequest, TextRequest
from eyas.serve.responses import ResponsesRequest
from eyas.serve.vertex import PredictionRequest


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object; required fields without a schema may hold anything."""
    schema = {"type": "object", "required": list(required)}
    return {**schema, "properties": properties} if properties else schema


_TEXT, _COUNT, _MAYBE = {"type": "string"}, {"type": "integer"}, {"type": ["string", "null"]}
_ERROR = _object(
    "error",
    error=_object(
        *("message", "type", "param", "code"), message=_TEXT, type=_TEXT, param=_MAYBE, code=_MAYBE
    ),
)
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
_ANSWER = _object(
    *("id", "object", "created", "model", "choices", "usage"),
    id=_TEXT,
    object=_TEXT,
    created=_COUNT,
    model=_TEXT,
    choices={"type": "array", "items": _object("index", "finish_reason")},
    usage=_object(*_COUNTS, **dict.fromkeys(_COUNTS, _COUNT)),
)
_RESPONSE = _object(
    *("id", "object", "created_at", "model", "status", "output", "usage"),
    id=_TEXT,
    object=_TEXT,
    created_at=_COUNT,
    model=_TEXT,
    status={"enum": ["completed", "incomplete"]},
    output={"type": "array", "items": _object("id", "type", "status")},
    usage=_object(
        *("input_tokens", "output_tokens", "total_tokens"),
        input_tokens=_COUNT,
        output_tokens=_COUNT,
        total_tokens=_COUNT,
    ),
)
_MODEL = _object("id", "object", "created", "owned_by")
_MODELS = _object("object", "data", data={"type": "array", "items": _MODEL})
_HEALTH = _object("status", status=_TEXT)
_PREDICTIONS = _object("predictions", predictions={"type": "array"})
_VERTEX_ERROR = _object("error", error=_object("code", "message", "status"))
_PROBLEMS = {
    "400": "the request is wrong or asks for what this server does not support",
    "401": "an API key is needed",
    "403": "the header Host names no name of this server",
    "404": "no such model",
    "408": "the body came too slowly",
    "413": "the body is too large",
    "415": "the body is no JSON",
    "429": "too many requests; retry-after says when to come again",
    "500": "the engine failed",
    "503": "the server is loading its model or shutting down",
    "504": "the answer took too long",
}


def document(model: str, predict_route: str | None = None) -> dict[str, Any]:
    """OpenAPI 3.1. model: the name that requests must give; predict_route: Vertex AI's, where it is
    served.
    """
    schemas: dict[str, Any] = {}

    def completion(
        summary: str,
        form: type[RequestBody | PredictionRequest],
        answer: dict[str, Any] = _ANSWER,
        error: dict[str, Any] = _ERROR,
    ) -> dict[str, Any]:
        body = {"application/json": {"schema": _form(form, model, schemas)}}
        responses = _responses(answer, _PROBLEMS, error)
        # each event's data is the JSON of a chunk, the last one's [DONE]
        responses["200"]["content"]["text/event-stream"] = {"schema": {}}
        return {
            "post": {
                "summary": summary,
                "security": [{"key": []}, {}],
                "requestBody": {"required": True, "content": body},
                "responses": responses,
            }
        }

    def page(summary: str, schema: dict[str, Any], *problems: str) -> dict[str, Any]:
        return {"get": {"summary": summary, "responses": _responses(schema, ("403", *problems))}}

    by_name = page("the same by name", _MODEL, "401", "404", "429", "503")
    name = {"name": "model", "in": "path", "required": True, "schema": _TEXT, "example": model}
    info = _object("internal_states")
    metrics = {"200": {"description": "", "content": {"text/plain": {"schema": _TEXT}}}}
    paths = {
        "/v1/chat/completions": completion("answers a chat", ChatRequest),
        "/v1/completions": completion("continues texts", TextRequest),
        "/v1/responses": completion("answers a chat in items", ResponsesRequest, _RESPONSE),
        "/v1/models": page("the served model", _MODELS, "401", "429", "503"),
        "/v1/models/{model}": {"get": {**by_name["get"], "parameters": [name]}},
        "/server_info": page("what SGLang's benchmark reads", info, "401", "429", "503"),
        "/get_server_info": page("the same under its older name", info, "401", "429", "503"),
        "/health": page("whether requests are taken", _HEALTH, "503"),
        "/metrics": {"get": {"summary": "for Prometheus", "responses": metrics}},
        "/openapi.json": page("this document", {"type": "object"}),
    }
    if predict_route is not None and predict_route not in paths:
        paths[predict_route] = completion(
            "Vertex AI's predictions", PredictionRequest, _PREDICTIONS, _VERTEX_ERROR
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "eyas", "version": VERSION, "description": f"serves {model}"},
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

    Every field may be null; a field that is not supported has the values that change nothing, one
    that is ignored any.
    """
    schema = deepcopy(
        form.model_json_schema(by_alias=True, ref_template="#/components/schemas/{model}")
    )
    schemas |= schema.pop("$defs", {})
    properties = schema["properties"]
    off = form.unsupported() if issubclass(form, RequestBody) else {}
    for name, values in off.items():
        properties[name] = {"enum": [*values, None]}
    if issubclass(form, RequestBody):
        properties |= {name: {"description": "without effect"} for name in sorted(form.ignored)}
    for name in properties.keys() - set(schema.get("required", ())) - off.keys():
        properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
    if "model" in properties:
        properties["model"] = {"const": model}
    schemas[form.__name__] = schema
    return {"$ref": f"#/components/schemas/{form.__name__}"}


def _responses(
    answer: dict[str, Any], problems: Iterable[str], error: dict[str, Any] = _ERROR
) -> dict[str, Any]:
    bodies = {"200": ("", answer), **{status: (_PROBLEMS[status], error) for status in problems}}
    return {
        status: {"description": about, "content": {"application/json": {"schema": schema}}}
        for status, (about, schema) in bodies.items()
    }
