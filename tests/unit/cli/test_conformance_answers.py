"""What counts as the same answer: its text, its last event, and its end; not how tokens are spread over events."""

from __future__ import annotations

import json

import pytest

from app.cli.conformance.answering import completion


def stream(*texts: str, finish: str = "length", done: bool = True) -> bytes:
    reasons = [None] * (len(texts) - 1) + [finish]
    events = [
        {"id": "c-1", "choices": [{"index": 0, "text": text, "finish_reason": reason}]}
        for text, reason in zip(texts, reasons, strict=True)
    ]
    said = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return (said + "data: [DONE]\n\n" * done).encode()


def test_tokens_that_share_an_event_are_the_same_answer() -> None:
    assert completion(stream("a", "b", "c")) == completion(stream("a", "bc")) == completion(stream("abc"))


@pytest.mark.parametrize(
    "other",
    [
        stream("a", "b"),
        stream("b", "a", "c"),
        stream("a", "b", "c", finish="stop"),
        stream("a", "b", "c", done=False),
        b"",
    ],
)
def test_others_are_not(other: bytes) -> None:
    assert completion(other) != completion(stream("a", "b", "c"))
