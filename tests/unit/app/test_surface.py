from __future__ import annotations

import pytest

from app.openai.surface import RELAY_ROUTES
from workers.resume import RESUMABLE_PATHS

CHAT, RESPONSES, MESSAGES = (RELAY_ROUTES[path] for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"))


@pytest.mark.parametrize(
    ("route", "events", "expected"),
    [
        (CHAT, b"data: [DONE]\n\n", True),
        (CHAT, b"data:[DONE]\r\n\r\n", True),
        (CHAT, b'data: {"x":1}\n\ndata: [DONE]\n\n', True),
        (CHAT, b'data: {"content":"data: [DONE]"}\n\n', False),
        (CHAT, b": [DONE]\n\n", False),
        (CHAT, b'data: {"x":1}\n\n', False),
        (RESPONSES, b'event: response.completed\ndata: {"type":"response.completed"}\n\n', True),
        (RESPONSES, b'event: response.incomplete\ndata: {"type":"response.incomplete"}\n\n', True),
        (RESPONSES, b'event: response.failed\ndata: {"type":"response.failed"}\n\n', True),
        (RESPONSES, b'data: {"type":"response.completed","response":{}}\n\n', True),
        (RESPONSES, b'event: response.output_text.delta\ndata: {"delta":"response.completed"}\n\n', False),
        (RESPONSES, b'data: {"type":"x","delta":"response.completed"}\n\n', False),
        (RESPONSES, b"data: response.completed\n\n", False),
        (RESPONSES, b"data: [DONE]\n\n", False),
        (MESSAGES, b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
        (MESSAGES, b'event: content_block_delta\ndata: {"text":"message_stop"}\n\n', False),
        (RELAY_ROUTES["/v1/embeddings"], b"data: [DONE]\n\n", False),
    ],
)
def test_end_markers(route: object, events: bytes, expected: bool) -> None:
    assert route.ends_in(events) is expected  # type: ignore[attr-defined]


def test_the_relayed_routes() -> None:
    assert set(RELAY_ROUTES) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/v1/score",
        "/score",
        "/classify",
        "/pooling",
        "/tokenize",
        "/detokenize",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    }


def test_what_streams_has_an_end() -> None:
    for route in RELAY_ROUTES.values():
        assert route.streams is bool(route.end_data or route.end_types), route.path


def test_what_workers_write_notes_for_is_known_to_both() -> None:
    assert {route.path for route in RELAY_ROUTES.values() if route.resumable} == RESUMABLE_PATHS
