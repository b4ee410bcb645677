"""The ``openai`` package, synchronous and asynchronous, against gateway and pods as they are started by a user."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from openai.types import CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from tests.sdk.conftest import MODEL
from workers.engines.sim.tokens import expected_text, render_chat

pytestmark = [pytest.mark.sdk, pytest.mark.process, pytest.mark.timeout(60)]

HELLO: Any = [{"role": "user", "content": "hello"}]
SAID = expected_text(render_chat([("user", "hello")]), 8)


def test_chat(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8)
    assert ChatCompletion.model_validate(whole.model_dump()) == whole
    assert whole.choices[0].message.content == SAID
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8


def test_chat_streamed(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SAID
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="once", max_tokens=6)
    assert whole.choices[0].text == expected_text("once", 6)
    stream = client.completions.create(model=MODEL, prompt="once", max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected_text("once", 6)


def test_responses(client: OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="hello")
    assert Response.model_validate(whole.model_dump()) == whole
    assert whole.status == "completed"
    assert whole.output_text.startswith(SAID)
    assert whole.to_dict()["store"] is False
    cut = client.responses.create(model=MODEL, input=HELLO, max_output_tokens=8, store=True)
    assert (cut.status, cut.output_text) == ("incomplete", SAID)
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_responses_streamed(client: OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="hello", max_output_tokens=8, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == SAID
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == SAID
    with client.responses.stream(model=MODEL, input="hello") as helper:
        helper.until_done()
        assert helper.get_final_response().output_text.startswith(SAID)


def test_state_is_refused(client: OpenAI) -> None:
    for call in (
        lambda: client.responses.retrieve("resp_1"),
        lambda: client.responses.cancel("resp_1"),
        lambda: client.responses.delete("resp_1"),
        lambda: client.responses.input_items.list("resp_1"),
        lambda: client.responses.create(model=MODEL, input="x", background=True),
        lambda: client.responses.create(model=MODEL, input="x", previous_response_id="resp_1"),
    ):
        with pytest.raises(BadRequestError) as refused:
            call()
        assert refused.value.code == "unsupported_stateful"
    with pytest.raises(NotFoundError, match="inference only"):
        client.files.list()


def test_embeddings(client: OpenAI) -> None:
    """The package asks for base64 unless told otherwise, and decodes it."""
    packed = client.embeddings.create(model=MODEL, input=["the house", "a bird"])
    plain = client.embeddings.create(model=MODEL, input=["the house", "a bird"], encoding_format="float")
    assert CreateEmbeddingResponse.model_validate(plain.model_dump()) == plain
    assert [len(item.embedding) for item in plain.data] == [64, 64]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)


def test_audio(client: OpenAI) -> None:
    file = ("a.wav", io.BytesIO(b"RIFF" + bytes(range(256)) * 400), "audio/wav")
    heard = client.audio.transcriptions.create(model=MODEL, file=file)
    assert len(heard.text.split()) == 16
    file[1].seek(0)
    events = client.audio.transcriptions.create(model=MODEL, file=file, stream=True)
    said = "".join(event.to_dict()["choices"][0]["delta"]["content"] for event in events)  # type: ignore[index]
    assert said == heard.text
    file[1].seek(0)
    with pytest.warns(DeprecationWarning, match="deprecated"):  # the package deprecates the route
        translated = client.audio.translations.create(model=MODEL, file=file)
    assert translated.text == heard.text
    with pytest.raises(NotFoundError):
        client.audio.transcriptions.create(model="whisper-1", file=file)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(NotFoundError) as missing:
        client.models.retrieve("org/nobody")
    assert missing.value.code == "model_not_found"


def test_errors_of_workers_have_their_class(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=10**6)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=[], stream=True)
    assert wrong.value.param == "messages"
    with pytest.raises(NotFoundError) as missing:
        client.completions.create(model="nobody", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


async def test_many_at_once(async_client: AsyncOpenAI) -> None:
    async def stream(number: int) -> bool:
        chunks = await async_client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"number {number}"}], max_tokens=8, stream=True
        )
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        return said == expected_text(render_chat([("user", f"number {number}")]), 8)

    async def respond(number: int) -> bool:
        events = await async_client.responses.create(
            model=MODEL, input=f"number {number}", max_output_tokens=8, stream=True
        )
        said = "".join([event.delta async for event in events if event.type == "response.output_text.delta"])
        return said == expected_text(render_chat([("user", f"number {number}")]), 8)

    assert all(await asyncio.gather(*(call(number) for number in range(10) for call in (stream, respond))))


async def test_everything_once_without_blocking(async_client: AsyncOpenAI) -> None:
    whole, completion, response, embedding, models = await asyncio.gather(
        async_client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8),
        async_client.completions.create(model=MODEL, prompt="once", max_tokens=6),
        async_client.responses.create(model=MODEL, input="hello", max_output_tokens=8),
        async_client.embeddings.create(model=MODEL, input="hello"),
        async_client.models.list(),
    )
    assert whole.choices[0].message.content == SAID
    assert completion.choices[0].text == expected_text("once", 6)
    assert response.output_text == SAID
    assert len(embedding.data[0].embedding) == 64
    assert [model.id for model in models.data] == [MODEL]
