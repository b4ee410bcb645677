from __future__ import annotations

import pytest

from app.openai.answers import Form, NoAnswer, check_beginning, check_coding, form_of
from app.openai.surface import RELAY_ROUTES

CHAT, EMBEDDINGS, AUDIO = "/v1/chat/completions", "/v1/embeddings", "/v1/audio/transcriptions"
EVENTS, JSON = b"text/event-stream", b"application/json"

GOOD: list[tuple[str, bool, int, bytes, Form]] = [
    (CHAT, True, 200, EVENTS, Form.EVENTS),
    (CHAT, True, 200, EVENTS + b"; charset=utf-8", Form.EVENTS),
    (CHAT, True, 200, EVENTS + b"\t;x", Form.EVENTS),
    (CHAT, True, 200, b" Text/Event-Stream ;x", Form.EVENTS),
    (CHAT, False, 200, EVENTS, Form.EVENTS),
    (CHAT, False, 200, JSON, Form.JSON),
    (CHAT, False, 200, JSON + b"; charset=utf-8", Form.JSON),
    (CHAT, False, 200, b"Application/JSON", Form.JSON),
    (CHAT, False, 200, b"", Form.JSON),
    (EMBEDDINGS, False, 200, JSON, Form.JSON),
    (EMBEDDINGS, False, 200, b"application/octet-stream", Form.OTHER),
    ("/pooling", False, 200, b"application/octet-stream", Form.OTHER),
    (AUDIO, False, 200, JSON, Form.JSON),
    (AUDIO, False, 200, b"text/plain; charset=utf-8", Form.OTHER),
    (AUDIO, False, 200, b"text/vtt", Form.OTHER),
    (AUDIO, False, 200, b"application/x-subrip", Form.OTHER),
    (AUDIO, False, 200, b"audio/mpeg", Form.OTHER),
    ("/v1/audio/translations", True, 200, EVENTS, Form.EVENTS),
    *((CHAT, True, status, b"text/html", Form.ERROR) for status in (400, 401, 404, 408, 422, 429, 500, 503, 599)),
    (CHAT, False, 400, JSON, Form.ERROR),
    (CHAT, True, 400, EVENTS, Form.ERROR),
]

BAD: list[tuple[str, bool, int, bytes, str]] = [
    (CHAT, True, 200, JSON, "it answered with 'application/json' where a stream was asked for"),
    (CHAT, True, 200, b"", "it answered with no content type where a stream was asked for"),
    (CHAT, True, 200, EVENTS + b"X", "it answered with 'text/event-streamx' where a stream was asked for"),
    (CHAT, False, 200, JSON + b"-seq", f"it answered with 'application/json-seq', which {CHAT} does not"),
    (CHAT, True, 200, b"text/html", "it answered with 'text/html' where a stream was asked for"),
    (AUDIO, True, 200, b"text/plain", "it answered with 'text/plain' where a stream was asked for"),
    (CHAT, False, 200, b"text/html; x", f"it answered with 'text/html', which {CHAT} does not"),
    (
        CHAT,
        False,
        200,
        b"application/octet-stream",
        f"it answered with 'application/octet-stream', which {CHAT} does not",
    ),
    (AUDIO, False, 200, b"text/html", f"it answered with 'text/html', which {AUDIO} does not"),
    ("/tokenize", False, 200, EVENTS, "it answered with 'text/event-stream', which /tokenize does not"),
    *(
        (CHAT, stream, status, kind, f"it answered {status}")
        for stream, kind in ((True, EVENTS), (False, JSON))
        for status in (0, 100, 199, 201, 202, 204, 205, 206, 299, 300, 302, 304, 399, 407, 600, 999)
    ),
]


@pytest.mark.parametrize(("path", "streaming", "status", "content_type", "form"), GOOD)
def test_what_is_an_answer(path: str, streaming: bool, status: int, content_type: bytes, form: Form) -> None:
    assert form_of(status, content_type, RELAY_ROUTES[path], streaming=streaming) is form


@pytest.mark.parametrize(("path", "streaming", "status", "content_type", "said"), BAD)
def test_what_is_none(path: str, streaming: bool, status: int, content_type: bytes, said: str) -> None:
    with pytest.raises(NoAnswer) as found:
        form_of(status, content_type, RELAY_ROUTES[path], streaming=streaming)
    assert str(found.value) == said


@pytest.mark.parametrize("coding", [None, b"", b"identity", b" Identity "])
def test_an_answer_without_a_coding(coding: bytes | None) -> None:
    check_coding(coding)


@pytest.mark.parametrize("coding", [b"gzip", b"br", b"identity, gzip", b"\xff" * 60_000])
def test_an_answer_in_a_coding_is_none(coding: bytes) -> None:
    with pytest.raises(NoAnswer) as found:
        check_coding(coding)
    assert len(str(found.value)) < 200


def test_a_workers_words_are_cut_short() -> None:
    with pytest.raises(NoAnswer) as found:
        form_of(200, b"x/\xff\n" + b"y" * 60_000, RELAY_ROUTES[CHAT], streaming=False)
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 200


@pytest.mark.parametrize("body", [b"{", b"{}", b"[]", b' \r\n\t{"a":1}', b"[1"])
def test_a_document_begins_like_one(body: bytes) -> None:
    check_beginning(Form.JSON, body)


@pytest.mark.parametrize(
    "body", [b"", b" \n ", b"null", b'"text"', b"<html>", b"\xef\xbb\xbf{}", b"\x1f\x8b\x08", b"\x0b{"]
)
def test_what_begins_otherwise_is_none(body: bytes) -> None:
    with pytest.raises(NoAnswer, match="without a body" if not body else "is not JSON"):
        check_beginning(Form.JSON, body)
    check_beginning(Form.OTHER, body)
    check_beginning(Form.ERROR, body)
