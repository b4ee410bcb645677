from __future__ import annotations

import pytest

from app.openai.refused import refusal
from app.openai.surface import RELAY_ROUTES


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses/resp_1",
        "/v1/responses/resp_1/cancel",
        "/v1/responses/resp_1/input_items",
        "/v1/chat/completions/chatcmpl-1",
        "/v1/chat/completions/chatcmpl-1/messages",
        "/v1/conversations",
        "/v1/conversations/conv_1/items",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ],
)
def test_state_is_refused(path: str) -> None:
    error = refusal(path)
    assert error is not None
    assert (error.status, error.code) == (400, "unsupported_stateful")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/files", "not files."),
        ("/v1/files/file-1/content", "not files."),
        ("/v1/fine_tuning/jobs", "not fine_tuning."),
        ("/v1/audio/speech", "no worker serves audio/speech."),
        ("/v1/images/generations", "no worker serves images."),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/models", "did you mean /v1/models?"),
        ("/realtime", "did you mean /v1/realtime?"),
        ("/v1/v1/embeddings", "did you mean /v1/embeddings?"),
        ("/v1/threads/t/runs", "not threads."),
        ("/", "/docs describes it."),
        ("/v1/chat/completions/", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/chats/completions", "did you mean /v1/chat/completions?"),
        ("/v1/Embedding/", "did you mean /v1/embeddings?"),
        ("/v1/model", "did you mean /v1/models?"),
    ],
)
def test_what_is_not_offered_is_named(path: str, said: str) -> None:
    error = refusal(path)
    assert error is not None
    assert (error.status, error.code) == (404, "not_found")
    assert said in error.message


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/", "/v1/filesystem", "/files", "/v1/chat/completions/batch", "/sleep", "/v1/v1/x"]
)
def test_of_the_rest_there_is_nothing_to_say(path: str) -> None:
    assert refusal(path) is None


def test_nothing_that_is_relayed_is_refused() -> None:
    assert [path for path in RELAY_ROUTES if refusal(path)] == []
