from __future__ import annotations

from typing import Any

import msgspec
import pytest

from workers.engines.sim import openai, tokens
from workers.engines.sim.api import ApiError, Job
from workers.engines.sim.openai import AnswerForm, parse_chat, parse_completion

LIMITS: dict[str, Any] = {"model": "sim", "max_model_len": 100}
HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> Job:
    return parse_completion(msgspec.json.encode({"prompt": "hello", **fields}), b"", **LIMITS)


def chat(**fields: Any) -> Job:
    return parse_chat(msgspec.json.encode({"messages": HELLO, **fields}), b"", **LIMITS)


def test_defaults() -> None:
    job = completion()
    assert job == Job(
        chat=False,
        prompt=tokens.encode("hello"),
        max_tokens=64,
        stops=(),
        stream=False,
        include_usage=False,
        limited=False,
    )
    assert chat().prompt == tokens.encode("<|user|>\nhello\n<|assistant|>\n")


def test_the_default_length_fits_the_context() -> None:
    assert completion(prompt=[65] * 90).max_tokens == 10


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_completion_tokens": 6, "max_tokens": 7}, 6),
        ({"max_tokens": None}, 64),
    ],
)
def test_limits_of_a_chat(fields: dict[str, Any], expected: int) -> None:
    assert chat(**fields).max_tokens == expected


def test_sampling_parameters_change_nothing() -> None:
    assert completion(temperature=1.7, top_p=0.3, seed=4, n=1, ignore_eos=True, logit_bias={"1": 2}) == completion()


def test_content_in_parts_is_the_text_of_the_parts() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert chat(messages=[{"role": "user", "content": parts}]) == chat()


@pytest.mark.parametrize("prompt", ["hello", ["hello"], tokens.encode("hello"), [tokens.encode("hello")]])
def test_forms_of_a_prompt(prompt: Any) -> None:
    assert completion(prompt=prompt) == completion()


def test_stops_and_usage() -> None:
    assert completion(stop="a").stops == ("a",)
    assert completion(stop=["a", "b"]).stops == ("a", "b")
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage
    assert not completion(stream_options={"include_usage": True}).include_usage


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"n": 2}, 400, "n", None),
        ({"n": 0}, 400, "n", None),
        ({"model": "gpt"}, 404, "model", "model_not_found"),
        ({"max_tokens": 0}, 400, "max_tokens", None),
        ({"max_tokens": "5"}, 400, "max_tokens", None),
        ({"max_tokens": 96}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 101}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": ""}, 400, "prompt", None),
        ({"prompt": []}, 400, "prompt", None),
        ({"prompt": [[]]}, 400, "prompt", None),
        ({"prompt": ["a", "b"]}, 400, "prompt", None),
        ({"prompt": [1, "b"]}, 400, "prompt", None),
        ({"prompt": [-1]}, 400, "prompt", None),
        ({"prompt": [tokens.VOCAB_SIZE]}, 400, "prompt", None),
        ({"prompt": None}, 400, "prompt", None),
        ({"stop": ""}, 400, "stop", None),
        ({"stop": ["a"] * 5}, 400, "stop", None),
        ({"stream_options": {"include_usage": 3}}, 400, "stream_options.include_usage", None),
    ],
)
def test_refused_completions(fields: dict[str, Any], status: int, param: str, code: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        completion(**fields)
    assert refused.value.status == status
    error = msgspec.json.decode(refused.value.body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages":[]}', "messages"),
        (b"{}", "messages"),
        (b'{"messages":[{"content":"x"}]}', "messages[0].role"),
        (b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}', "messages"),
        (b"[]", None),
    ],
)
def test_refused_chats(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        parse_chat(body, b"", **LIMITS)
    assert refused.value.status == 400
    assert msgspec.json.decode(refused.value.body)["error"]["param"] == param


@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b'{"prompt":"\xff"}'])
def test_what_is_not_json_is_said_to_be(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse_completion(body, b"", **LIMITS)
    assert refused.value.status == 400
    assert msgspec.json.decode(refused.value.body)["error"]["code"] == "invalid_json"


def test_tokenize() -> None:
    answer = msgspec.json.decode(openai.tokenize(b'{"prompt":"the house"}', **LIMITS))
    assert answer == {"count": 2, "max_model_len": 100, "tokens": tokens.encode("the house")}
    answer = msgspec.json.decode(openai.tokenize(msgspec.json.encode({"messages": HELLO}), **LIMITS))
    assert answer["tokens"] == chat().prompt
    with pytest.raises(ApiError, match="prompt or messages"):
        openai.tokenize(b"{}", **LIMITS)


def events(raw: bytes) -> list[Any]:
    assert raw.endswith(b"\n\n")
    return [msgspec.json.decode(event.removeprefix(b"data: ")) for event in raw.split(b"\n\n")[:-1]]


@pytest.mark.parametrize("text", ["word", 'quo"te', "new\nline", " 東京", "\\", "\0"])
def test_events_hold_the_text_exactly(text: str) -> None:
    for job in (completion(stream=True), chat(stream=True)):
        form = AnswerForm(job, request_id="r1", model="sim", created=7)
        (event,) = events(form.text(text))
        assert (event["created"], event["model"]) == (7, "sim")
        (choice,) = event["choices"]
        assert (choice["delta"]["content"] if job.chat else choice["text"]) == text
        assert choice["finish_reason"] is None


def test_the_id_comes_from_the_request_id() -> None:
    assert events(AnswerForm(chat(), request_id="r1", model="m", created=1).text("x"))[0]["id"] == "chatcmpl-r1"
    assert events(AnswerForm(completion(), request_id="r1", model="m", created=1).text("x"))[0]["id"] == "cmpl-r1"
