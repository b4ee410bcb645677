"""[P] The OpenAPI document: relayed routes are no routes of the web framework, so it is made from the table of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from app.openai.schemas import COUNT, DESCRIPTIONS, TEXT, Schema, array, record
from app.openai.surface import RelayRoute

TITLE = "Hotspare gateway"
SECURITY_SCHEME = "key"
"""The name of the scheme by which requests show their key."""
_ERROR: Schema = record(
    "error",
    error={
        "type": "object",
        "required": ["message"],
        "properties": {
            "message": {"type": "string", "minLength": 1},
            "type": TEXT,
            "param": {"type": ["string", "null"]},
            "code": {"type": ["string", "integer", "null"]},
        },
        "additionalProperties": True,
    },
)
_MODEL: Schema = record(
    "id object", id=TEXT, object={"const": "model"}, created={"type": "integer"}, owned_by=TEXT, max_model_len=COUNT
)
_STATUS: Schema = record("status", status=TEXT)
_EVENTS: dict[str, Any] = {
    "text/event-stream": {
        "schema": record("data", event=TEXT, data=TEXT) | {"description": "With stream: true; one event of many."}
    }
}
_DESCRIPTION = """\
An OpenAI-compatible gateway over worker pods that keep a hot spare. Generating and measuring routes are relayed to a
worker that serves the request's model, byte for byte: fields that are not listed here pass, too. Every error, of the
gateway or of a worker, is an object `error` with message, type, param and code."""
_CODES = {
    "4XX": "The request cannot be answered as it is: error.message says what to change. 429: try again later.",
    "5XX": "No worker could answer: trying again can help unless error.code says otherwise.",
}


def openapi_document(routes: Iterable[RelayRoute], *, version: str, authenticated: bool) -> dict[str, Any]:
    """The whole document. ``authenticated``: whether requests need an API key."""
    paths: dict[str, Any] = {route.path: {"post": _relayed(route)} for route in routes}
    paths |= {
        "/v1/models": {"get": _read("Models", "Models that can be reached now", _list_of_models())},
        "/v1/models/{model}": {
            "get": _read("Models", "One model", _MODEL)
            | {"parameters": [{"name": "model", "in": "path", "required": True, "schema": TEXT, "example": "smollm2"}]}
        },
        "/health": {"get": _probe("Whether new requests are taken")},
        "/live": {"get": _probe("Whether the process works")},
        "/status": {"get": _read("Operation", "Workers as the gateway sees them", record("lifecycle"))},
        "/metrics": {"get": _metrics()},
    }
    schemes = {SECURITY_SCHEME: {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": version, "description": _DESCRIPTION},
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR}} | ({"securitySchemes": schemes} if authenticated else {}),
    } | ({"security": [{SECURITY_SCHEME: []}]} if authenticated else {})


def _relayed(route: RelayRoute) -> dict[str, Any]:
    said = DESCRIPTIONS[route.name]
    content = {"application/json": {"schema": said.answer}} | (_EVENTS if route.streams else {})
    return {
        "operationId": route.path.strip("/").replace("/", "_"),
        "tags": [said.tag],
        "summary": said.summary,
        "requestBody": {
            "required": True,
            "content": {said.media_type: {"schema": said.request, "example": dict(said.example)}},
        },
        "responses": {"200": {"description": "The answer", "content": content}, **_errors()},
    }


def _read(tag: str, summary: str, schema: Schema) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    return {
        "tags": [tag],
        "summary": summary,
        "responses": {"200": {"description": "The answer", "content": content}, **_errors()},
    }


def _probe(summary: str) -> dict[str, Any]:
    content = {"application/json": {"schema": _STATUS}}
    found = _read("Operation", summary, _STATUS)
    found["responses"]["503"] = {"description": "No; the body says why", "content": content}
    return found | {"security": []}


def _metrics() -> dict[str, Any]:
    content = {"text/plain": {"schema": TEXT}}
    return {
        "tags": ["Operation"],
        "summary": "Metrics, for Prometheus",
        "responses": {"200": {"description": "The exposition", "content": content}, **_errors()},
    }


def _list_of_models() -> Schema:
    return record("object data", object={"const": "list"}, data=array(_MODEL))


def _errors() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": said, "content": content} for status, said in _CODES.items()}
