"""What the sim refuses on its newer routes, and what it says for a few fixed questions."""

from __future__ import annotations

import base64
import struct
from typing import Any

import msgspec
import pytest

from workers.engines.sim import audio, messages, openai, pooling, responses, tokens
from workers.engines.sim.api import ApiError

LIMITS: dict[str, Any] = {"model": "sim", "max_model_len": 100}
GENERATING: dict[str, Any] = {"responses": responses.parse_responses, "messages": messages.parse_messages}
ANSWERING: dict[str, Any] = {
    "classify": pooling.classify,
    "count_tokens": messages.count_tokens,
    "detokenize": openai.detokenize,
    "embeddings": pooling.embeddings,
    "pooling": pooling.pooling,
    "rerank": pooling.rerank,
    "score": pooling.score,
}
HELLO = [{"role": "user", "content": "hello"}]


def ask(route: str, fields: dict[str, Any]) -> Any:
    body = msgspec.json.encode(fields)
    if route in GENERATING:
        return GENERATING[route](body, b"", **LIMITS)
    return msgspec.json.decode(ANSWERING[route](body, model="sim"))


@pytest.mark.parametrize(
    ("route", "fields", "status", "param"),
    [
        ("responses", {}, 400, "input"),
        ("responses", {"input": "x", "model": "gpt"}, 404, "model"),
        ("responses", {"input": "x", "max_output_tokens": 0}, 400, "max_output_tokens"),
        ("responses", {"input": "x", "max_output_tokens": 100}, 400, "input"),
        ("responses", {"input": [{"type": "item_reference", "id": "1"}]}, 400, "input"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input"),
        ("responses", {"input": "x", "background": True}, 400, "background"),
        ("responses", {"input": "x", "previous_response_id": "r"}, 400, "previous_response_id"),
        ("messages", {"messages": HELLO}, 400, "max_tokens"),
        ("messages", {"messages": [], "max_tokens": 5}, 400, "messages"),
        ("messages", {"messages": HELLO, "max_tokens": 100}, 400, "messages"),
        ("messages", {"messages": HELLO, "max_tokens": 5, "stop_sequences": [""]}, 400, "stop"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5},
            400,
            "messages",
        ),
        ("count_tokens", {}, 400, "messages"),
        ("detokenize", {"tokens": [tokens.VOCAB_SIZE]}, 400, "tokens[0]"),
        ("embeddings", {"input": []}, 400, "input"),
        ("embeddings", {"input": ""}, 400, "input"),
        ("embeddings", {"input": [[]]}, 400, "input"),
        ("embeddings", {"input": "x", "dimensions": 65}, 400, "dimensions"),
        ("embeddings", {"input": "x", "encoding_format": "hex"}, 400, "encoding_format"),
        ("pooling", {"model": "sim"}, 400, "input"),
        ("classify", {"input": "x", "model": "other"}, 404, "model"),
        ("rerank", {"query": "x"}, 400, "documents"),
        ("rerank", {"query": "x", "documents": []}, 400, "documents"),
        ("score", {"text_1": "x"}, 400, "documents"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, 400, "documents"),
    ],
)
def test_refused(route: str, fields: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        ask(route, fields)
    assert refused.value.status == status
    assert msgspec.json.decode(refused.value.body)["error"]["param"] == param


def test_forms_of_an_input_give_the_same_vector() -> None:
    ids = tokens.encode("the house")
    vectors = [ask("embeddings", {"input": given})["data"][0]["embedding"] for given in ("the house", ids, [ids])]
    assert vectors[0] == vectors[1] == vectors[2]
    assert sum(value * value for value in vectors[0]) == pytest.approx(1)
    packed = ask("embeddings", {"input": "the house", "encoding_format": "base64"})["data"][0]["embedding"]
    assert struct.unpack("<64f", base64.b64decode(packed)) == pytest.approx(vectors[0], abs=1e-6)
    assert len(ask("embeddings", {"input": ["a", "b"], "dimensions": 3})["data"][1]["embedding"]) == 3


def test_probabilities_of_classes_add_up() -> None:
    (found,) = ask("classify", {"input": "the house"})["data"]
    assert sum(found["probs"]) == pytest.approx(1)
    assert found["label"] == pooling.LABELS[found["probs"].index(max(found["probs"]))]


@pytest.mark.parametrize("route", ["responses", "messages"])
def test_a_turn_is_the_same_in_parts(route: str) -> None:
    kind, turns, more = ("input_text", "input", {}) if route == "responses" else ("text", "messages", {"max_tokens": 5})
    parts = [{"role": "user", "content": [{"type": kind, "text": "hel"}, {"type": kind, "text": "lo"}]}]
    assert ask(route, {turns: parts, **more}) == ask(route, {turns: HELLO, **more})


def upload(*parts: tuple[str, bytes]) -> Any:
    body = b"".join(
        b'--B\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
        % (name.encode(), b'; filename="a"' if name == "file" else b"", value)
        for name, value in parts
    )
    return audio.parse_audio(body + b"--B--\r\n", b"multipart/form-data; boundary=B", **LIMITS)


def test_a_file_decides_what_is_heard() -> None:
    one, same, other = (upload(("file", content)) for content in (b"RIFF" * 1000, b"RIFF" * 1000, b"RIFX" * 1000))
    assert one == same
    assert one.prompt != other.prompt
    assert upload(("model", b"sim"), ("stream", b"true"), ("file", b"x")).stream


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ((("model", b"sim"),), "file"),
        ((("file", b""),), "file"),
        ((("file", b"x"), ("response_format", b"srt")), "response_format"),
        ((("file", b"x"), ("model", b"whisper-1")), "model"),
    ],
)
def test_refused_uploads(parts: tuple[tuple[str, bytes], ...], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        upload(*parts)
    assert msgspec.json.decode(refused.value.body)["error"]["param"] == param


@pytest.mark.parametrize("content_type", [b"", b"application/json", b"multipart/form-data"])
def test_what_is_no_form(content_type: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        audio.parse_audio(b"--B--\r\n", content_type, **LIMITS)
    assert msgspec.json.decode(refused.value.body)["error"]["code"] == "invalid_form"
