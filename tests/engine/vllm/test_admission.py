"""vLLM's own limits of admission: what they turn away goes to another worker, and nothing was started here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.vllm.harness import Driver, EngineProcess
from tests.engine.vllm.resuming import Client
from workers.contract import HEADER_RESELECT
from workers.resume import RESUME_CONTENT_TYPE, ResumeHead, encode_resume

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def engine(driver: Driver) -> Iterator[EngineProcess]:
    """It has one request at a time."""
    made = driver.fork("admission", gms=False, engine_args=("--max-num-queued-reqs=1",))
    try:
        made.wake(1)
        yield made
    finally:
        made.kill()


def _chat(**more: Any) -> dict[str, Any]:
    return {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}


def _completion(prompts: list[str], **more: Any) -> dict[str, Any]:
    return {"model": "smollm2", "prompt": prompts, "max_tokens": 4, **more}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        (CHAT, _chat(n=2), False),
        (CHAT, _chat(n=2), True),
        (COMPLETIONS, _completion(["a"], n=2), True),
        (COMPLETIONS, _completion(["a", "b"]), True),
    ],
    ids=["chat, direct", "chat", "completion", "two prompts"],
)
def test_too_many_are_turned_away(
    engine: EngineProcess, path: str, body: dict[str, Any], asked: bool, stream: bool
) -> None:
    """The second of two prompts is refused when vLLM has begun a stream; but its head is held for a gateway."""
    client = Client(path, {**body, "stream": stream}, root="r")
    answer = engine.client.post(
        path, content=client.body, headers={**(client.headers() if asked else {}), "content-type": "application/json"}
    )
    assert (answer.status_code, answer.headers.get(HEADER_RESELECT)) == (503, "1"), answer.text
    assert answer.json()["error"]["message"]


def test_a_resume_is_turned_away_and_not_refused(engine: EngineProcess) -> None:
    client = Client(CHAT, _chat(n=2, stream=True), root="r")
    notes = b"g=0:318\n"
    raw = encode_resume(ResumeHead(events=1, crc="1", notes=len(notes)), notes, client.body)
    answer = engine.client.post(CHAT, content=raw, headers={**client.headers(), "content-type": RESUME_CONTENT_TYPE})
    assert (answer.status_code, answer.headers.get(HEADER_RESELECT)) == (503, "1"), answer.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_others_are_answered(engine: EngineProcess, stream: bool) -> None:
    answer = engine.client.post(CHAT, json=_chat(stream=stream))
    assert answer.status_code == 200
    assert HEADER_RESELECT not in answer.headers
    invalid = engine.client.post(CHAT, json=_chat(stream=stream, temperature=-1))
    assert (invalid.status_code, invalid.headers.get(HEADER_RESELECT)) == (400, None)
