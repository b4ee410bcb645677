"""The OpenAPI document against the table of routes, and its examples against its schemas."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest

from app.openai.document import openapi_document
from app.openai.schemas import DESCRIPTIONS
from app.openai.surface import RELAY_ROUTES

DOCUMENT = openapi_document(RELAY_ROUTES.values(), version="1", authenticated=False)


def test_every_relayed_route_is_described_and_nothing_else() -> None:
    posts = {path for path, methods in DOCUMENT["paths"].items() if "post" in methods}
    assert posts == set(RELAY_ROUTES)
    assert set(DESCRIPTIONS) == {route.name for route in RELAY_ROUTES.values()}
    ids = [methods["post"]["operationId"] for methods in DOCUMENT["paths"].values() if "post" in methods]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_examples_fit_their_schemas(name: str) -> None:
    said = DESCRIPTIONS[name]
    jsonschema_rs.validate(said.request, dict(said.example))
    for missing in said.request.get("required", ()):
        with pytest.raises(jsonschema_rs.ValidationError):
            jsonschema_rs.validate(said.request, {k: v for k, v in said.example.items() if k != missing})


def test_objects_are_open() -> None:
    def look(schema: Any) -> None:
        if isinstance(schema, dict):
            if schema.get("type") == "object":
                assert schema["additionalProperties"] is True
            for inner in schema.values():
                look(inner)
        elif isinstance(schema, list):
            for inner in schema:
                look(inner)

    for said in DESCRIPTIONS.values():
        look(said.request)
        look(said.answer)


def test_every_operation_says_what_errors_look_like() -> None:
    for path, methods in DOCUMENT["paths"].items():
        for operation in methods.values():
            for status in ("4XX", "5XX"):
                content = operation["responses"][status]["content"]["application/json"]
                assert content["schema"] == {"$ref": "#/components/schemas/Error"}, path


def test_streams_are_named_where_there_are_some() -> None:
    for path, route in RELAY_ROUTES.items():
        content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]
        assert ("text/event-stream" in content) is route.streams


def test_keys_are_asked_for_where_there_are_keys() -> None:
    locked = openapi_document(RELAY_ROUTES.values(), version="1", authenticated=True)
    assert locked["security"] == [{"key": []}]
    assert locked["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert locked["paths"]["/health"]["get"]["security"] == locked["paths"]["/live"]["get"]["security"] == []
    assert "security" not in DOCUMENT
