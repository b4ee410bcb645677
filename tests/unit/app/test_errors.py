from __future__ import annotations

import json

import pytest

from app.openai import errors
from app.openai.errors import GatewayError
from app.openai.worker_answers import from_worker, has_envelope

RETRY = {b"retry-after": b"3", b"retry-after-ms": b"2010"}
"""After 2.01 s."""

CASES: list[tuple[GatewayError, int, str, dict[bytes, bytes]]] = [
    (errors.draining(), 503, "draining", {b"retry-after": b"1", b"connection": b"close"}),
    (errors.drain_overran(), 503, "draining", {b"retry-after": b"1", b"connection": b"close"}),
    (errors.no_worker(15, "m", retry_after=2.01), 503, "no_worker", RETRY),
    (errors.overloaded(4, retry_after=2.01), 429, "overloaded", RETRY),
    (errors.queue_full(4, "m", retry_after=2.01), 429, "overloaded", RETRY),
    (errors.workers_full(15, "m", retry_after=2.01), 429, "overloaded", RETRY),
    (errors.model_not_found("m"), 404, "model_not_found", {}),
    (errors.head_too_large(4), 431, "head_too_large", {b"connection": b"close"}),
    (
        errors.too_many_connections(4),
        503,
        "too_many_connections",
        {b"retry-after": b"1", b"connection": b"close"},
    ),
    (errors.head_too_slow(4), 408, "request_timeout", {b"connection": b"close"}),
    (errors.body_too_large(4), 413, "body_too_large", {}),
    (errors.body_too_slow(4), 408, "request_timeout", {b"connection": b"close"}),
    (errors.invalid_json("why"), 400, "invalid_json", {}),
    (errors.unsupported_media_type("x/y"), 415, "unsupported_media_type", {}),
    (errors.unsupported_encoding("br", ["a", "b"]), 415, "unsupported_content_encoding", {b"accept-encoding": b"a, b"}),
    (errors.invalid_encoding("gzip", "why"), 400, "invalid_content_encoding", {}),
    (errors.body_stalled(4, 5), 408, "request_timeout", {b"connection": b"close"}),
    (errors.worker_lost("why"), 502, "worker_lost", {}),
    (errors.worker_lost("why", lost=4), 502, "worker_lost", {}),
    (errors.not_taken_up(60, full=True), 503, "no_worker", {}),
    (errors.request_kills_worker(), 500, "request_kills_worker", {b"x-should-retry": b"false"}),
    (errors.request_kills_worker(delivered=True), 500, "request_kills_worker", {b"x-should-retry": b"false"}),
    (errors.request_kills_worker(repeated=True), 500, "request_kills_worker", {b"x-should-retry": b"false"}),
    (errors.bad_answer("why"), 502, "bad_answer", {}),
    (errors.unusable_answer("why"), 502, "bad_answer", {}),
    (errors.not_found("/x"), 404, "not_found", {}),
    (errors.method_not_allowed("PUT", "/x", ["GET"]), 405, "method_not_allowed", {b"allow": b"GET"}),
    (errors.malformed_request(), 400, "malformed_request", {b"connection": b"close"}),
    (errors.malformed_request("why"), 400, "malformed_request", {b"connection": b"close"}),
    (errors.unsupported_version("2.0"), 505, "unsupported_http_version", {b"connection": b"close"}),
    (errors.expectation_failed("x"), 417, "expectation_failed", {b"connection": b"close"}),
    (errors.unknown_transfer_encoding("gzip"), 501, "unsupported_transfer_encoding", {b"connection": b"close"}),
    (errors.internal(), 500, "internal_error", {}),
    (errors.task_not_served("m", "/v1/embeddings"), 404, "task_not_served", {}),
    (errors.from_status(422, "why"), 400, "bad_request", {}),
    (errors.from_status(429, "why"), 429, "rate_limit_exceeded", {}),
    (errors.from_status(401, "why"), 401, "unauthorized", {}),
    (errors.from_status(418, "why"), 418, "bad_request", {}),
    (errors.from_status(502, "why"), 502, "internal_error", {}),
]


@pytest.mark.parametrize(("error", "status", "code", "headers"), CASES, ids=[f"{c[2]}-{c[1]}" for c in CASES])
def test_each_error(error: GatewayError, status: int, code: str, headers: dict[bytes, bytes]) -> None:
    assert error.status == status
    assert dict(error.headers) == headers
    document = json.loads(error.body)
    assert list(document) == ["error"]
    assert list(document["error"]) == ["message", "type", "param", "code"]
    assert document["error"]["code"] == code
    assert document["error"]["message"]
    assert document["error"]["type"] in ("invalid_request_error", "server_error", "rate_limit_error")
    assert error.fault == ("client" if status < 500 else error.fault)
    assert has_envelope(error.body)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"error":{"message":"x"}}', True),
        (b'{"error":"x"}', True),
        (b'{"type":"error","error":{"type":"x"}}', True),
        (b'{"detail":"x"}', False),
        (b'{"error":null}', False),
        (b"[]", False),
        (b"Not Found", False),
        (b"", False),
        (b"\xff", False),
        (b"[" * 100_000, False),
    ],
)
def test_has_envelope(body: bytes, expected: bool) -> None:
    assert has_envelope(body) is expected


@pytest.mark.parametrize(
    ("status", "body", "model", "said"),
    [
        (404, b'{"detail":"Not Found"}', "m", "The model 'm' does not serve /v1/embeddings: it is for another task."),
        (404, b"", "", "The model here does not serve /v1/embeddings: it is for another task."),
        (400, b'{"detail":"no such thing"}', "m", "no such thing"),
        (422, b'{"detail":[{"loc":["body"]}]}', "m", '{"detail":[{"loc":["body"]}]}'),
        (500, b"<b>\xff", "m", "<b>\ufffd"),
        (502, b"", "m", "The worker answered 502 without a word."),
    ],
)
def test_what_a_worker_said_without_an_envelope(status: int, body: bytes, model: str, said: str) -> None:
    assert from_worker(status, body, model=model, path="/v1/embeddings").message == said
