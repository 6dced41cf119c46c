"""The endpoints as an OpenAPI document, made from the classes that validate requests."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from eyas.artifact import VERSION
from eyas.serve.fields import RequestBody
from eyas.serve.protocol import (
    ChatRequest,
    DetokenizeRequest,
    HeadRequest,
    TextRequest,
    TokenizeRequest,
)
from eyas.serve.responses import ResponsesRequest
from eyas.serve.vertex import PredictionRequest

Schema = dict[str, Any]
Form = type[RequestBody | PredictionRequest]


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_ANY: Schema = {}
_TEXT, _COUNT, _MAYBE = {"type": "string"}, {"type": "integer"}, {"type": ["string", "null"]}
_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE, code=_MAYBE))
_ANSWER = _object(
    id=_TEXT,
    object=_TEXT,
    created=_COUNT,
    model=_TEXT,
    choices=_list(_object(index=_COUNT, finish_reason=_ANY)),
    usage=_object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT),
)
_RESPONSE = _object(
    id=_TEXT,
    object=_TEXT,
    created_at=_COUNT,
    model=_TEXT,
    status={"enum": ["completed", "incomplete"]},
    output=_list(_object(id=_TEXT, type=_TEXT, status=_TEXT)),
    usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
)
_TOKENS = _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT))
_HEAD = _object(head=_TEXT, before=_MAYBE)
_MODEL = _object(id=_TEXT, object=_TEXT, created=_COUNT, owned_by=_TEXT)
_MODELS = _object(object=_TEXT, data=_list(_MODEL))
_SERVER_INFO = _object(internal_states=_list(_object(avg_spec_accept_length=_ANY)))
_PREDICTIONS = _object(predictions=_list(_ANY))
_VERTEX_ERROR = _object(error=_object(code=_COUNT, message=_TEXT, status=_TEXT))
_PROBLEMS = ("400", "401", "403", "404", "408", "413", "415", "429", "500", "503", "504")


def document(model: str, predict_route: str | None = None) -> Schema:
    """OpenAPI 3.1. model: the name in requests; predict_route: Vertex AI's, where it is served."""
    schemas: Schema = {}

    def completion(summary: str, form: Form, answer: Schema, error: Schema = _ERROR) -> Schema:
        responses = _responses(answer, _PROBLEMS, error)
        if "stream" in form.model_fields:
            # each event's data is the JSON of a chunk, the last one's [DONE]
            responses["200"]["content"]["text/event-stream"] = {"schema": _ANY}
        body = {"application/json": {"schema": _form(form, model, schemas)}}
        return {
            "post": {
                "summary": summary,
                "security": [{"key": []}, {}],
                "requestBody": {"required": True, "content": body},
                "responses": responses,
            }
        }

    def page(summary: str, schema: Schema, *problems: str, **more: Any) -> Schema:
        responses = _responses(schema, ("403", *problems))
        return {"get": {"summary": summary, "responses": responses, **more}}

    name = {"name": "model", "in": "path", "required": True, "schema": _TEXT, "example": model}
    metrics = {"200": {"description": "", "content": {"text/plain": {"schema": _TEXT}}}}
    usual = "401", "429", "503"
    paths = {
        "/v1/chat/completions": completion("answers a chat", ChatRequest, _ANSWER),
        "/v1/completions": completion("continues texts", TextRequest, _ANSWER),
        "/v1/responses": completion("answers a chat in items", ResponsesRequest, _RESPONSE),
        "/v1/models": page("the served model", _MODELS, *usual),
        "/v1/models/{model}": page("by name", _MODEL, "404", *usual, parameters=[name]),
        "/server_info": page("what SGLang's benchmark reads", _SERVER_INFO, *usual),
        "/get_server_info": page("the same under its older name", _SERVER_INFO, *usual),
        "/tokenize": completion("text or messages as tokens", TokenizeRequest, _TOKENS),
        "/detokenize": completion("tokens as text", DetokenizeRequest, _object(prompt=_TEXT)),
        "/v1/head": completion("drafts with another head", HeadRequest, _HEAD),
        "/version": page("of eyas", _object(version=_TEXT)),
        "/ping": page("the same as /health", _object(status=_TEXT), "503"),
        "/health": page("whether requests are taken", _object(status=_TEXT), "503"),
        "/metrics": {"get": {"summary": "for Prometheus", "responses": metrics}},
        "/openapi.json": page("this document", {"type": "object"}),
    }
    if predict_route is not None and predict_route not in paths:
        paths[predict_route] = completion(
            "Vertex AI's predictions", PredictionRequest, _PREDICTIONS, _VERTEX_ERROR
        )
    keys = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "eyas", "version": VERSION, "description": f"serves {model}"},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
    }


def _form(form: Form, model: str, schemas: Schema) -> Schema:
    """A reference to a body's schema, which is put into `schemas` with its parts. Every field may
    be null; an unsupported one has the values that change nothing, an ignored one any.
    """
    schema = form.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= schema.pop("$defs", {})
    properties, off = schema["properties"], set[str]()
    if issubclass(form, RequestBody):
        for name, values in form.unsupported().items():
            properties[name] = {"enum": [*values, None]}
            off.add(name)
        properties |= {name: {"description": "without effect"} for name in sorted(form.ignored)}
    for name in properties.keys() - set(schema.get("required", ())) - off:
        properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
    if "model" in properties:
        properties["model"] = {"const": model}
    schemas[form.__name__] = schema
    return {"$ref": f"#/components/schemas/{form.__name__}"}


def _responses(answer: Schema, problems: Iterable[str], error: Schema = _ERROR) -> Schema:
    return {
        status: {
            "description": HTTPStatus(int(status)).phrase,
            "content": {"application/json": {"schema": schema}},
        }
        for status, schema in {"200": answer, **dict.fromkeys(problems, error)}.items()
    }
