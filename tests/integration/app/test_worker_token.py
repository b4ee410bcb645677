"""The worker token: shown to workers, never to clients, and what happens where it is not the right one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.security import watched_files
from tests.integration.app.conftest import one_shell, run_gateway
from tests.integration.app.fake_worker import Call, FakeWorker, answers
from workers.contract import CODE_WORKER_TOKEN, HEADER_WORKER_TOKEN

pytestmark = [pytest.mark.integration, one_shell]

TOKEN = "wt-0123456789abcdef"
REFUSES = answers(
    401,
    {"error": {"message": "no", "type": "x", "param": None, "code": CODE_WORKER_TOKEN}},
    x_hotspare_reselect=1,
)


def guard(worker: FakeWorker, *accepted: str) -> list[str | None]:
    """Make a worker ask for a token; returns what its watches were shown."""
    shown: list[str | None] = []
    serve, watch = worker.default, worker._watch

    async def guarded_watch(call: Call) -> None:
        shown.append(call.headers.get(HEADER_WORKER_TOKEN))
        await (watch if shown[-1] in accepted else REFUSES)(call)

    async def guarded(call: Call) -> None:
        await (serve if call.headers.get(HEADER_WORKER_TOKEN) in accepted else REFUSES)(call)

    worker.watch_behaviour, worker.default = guarded_watch, guarded
    return shown


async def test_requests_and_watches_show_it(workers: Callable[..., Any]) -> None:
    [worker] = await workers("pod-0")
    watches = guard(worker, TOKEN)
    async with run_gateway(worker, worker_token=TOKEN) as gateway:
        # What a client sends under this name is dropped as all of x-hotspare-*.
        answer = await gateway.client.post(
            "/v1/chat/completions", json={"model": "tiny"}, headers={HEADER_WORKER_TOKEN: "mine"}
        )
        async with gateway.stream() as stream:
            assert (await stream.aread()).endswith(b"[DONE]\n\n")
        pages = [await gateway.client.get(path) for path in ("/status", "/metrics", "/health")]
    assert answer.status_code == 200
    assert watches[0] == TOKEN
    assert all(call.headers[HEADER_WORKER_TOKEN] == TOKEN for call in worker.calls)
    assert TOKEN not in str(answer.headers) + "".join(page.text for page in pages)


@pytest.mark.parametrize(("token", "said"), [("wrong-one", "does not accept"), (None, "this gateway has none")])
async def test_a_worker_that_refuses_it_is_named_once(
    workers: Callable[..., Any], caplog: pytest.LogCaptureFixture, token: str | None, said: str
) -> None:
    [worker] = await workers("pod-0")
    watches = guard(worker, TOKEN)
    settings = {} if token is None else {"worker_token": token}
    with caplog.at_level(logging.DEBUG):
        async with run_gateway(worker, wait_for_worker_seconds=0.05, **settings) as gateway:
            await gateway.until(lambda: len(watches) > 2)
            assert (await gateway.chat()).json()["error"]["code"] == "no_worker"
            [seen] = (await gateway.client.get("/status")).json()["workers"]
    assert said in seen["problem"]
    assert "HOTSPARE_WORKER_TOKEN_FILE" in seen["problem"]
    assert caplog.text.count("is not usable") == 1
    assert "wrong-one" not in caplog.text + str(seen)
    assert worker.calls == []


async def test_a_request_that_is_refused_goes_elsewhere(
    workers: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """One worker took a new token after its watch had been opened."""
    one, two = await workers("pod-0", "pod-1")
    one.default = REFUSES
    with caplog.at_level(logging.WARNING):
        async with run_gateway(one, two, worker_token=TOKEN) as gateway:
            for _ in range(4):
                answer = await gateway.chat()
                assert answer.json()["choices"][0]["message"]["content"] == "from pod-1"
            seen = (await gateway.client.get("/status")).json()["workers"]
    assert "does not accept" in seen[0]["problem"]
    assert seen[1]["problem"] is None
    assert caplog.text.count("is not usable") == 1
    assert one.calls


async def test_no_client_hears_of_it(workers: Callable[..., Any]) -> None:
    """A 401 would be taken for one about the client's own key."""
    [worker] = await workers("pod-0")
    worker.default = REFUSES
    async with run_gateway(worker, worker_token=TOKEN, wait_for_worker_seconds=0.3) as gateway:
        for stream in (False, True):
            answer = await gateway.chat(stream=stream)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")


async def test_the_token_is_exchanged_without_a_restart(
    workers: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_files, "LOOK_SECONDS", 0.01)
    [worker] = await workers("pod-0")
    guard(worker, "old-token", "new-token")
    path = tmp_path / "token"
    path.write_text("old-token\n")
    async with run_gateway(worker, worker_token_file=str(path)) as gateway:
        assert (await gateway.chat()).status_code == 200
        (tmp_path / "draft").write_text("new-token\nold-token\n")
        os.replace(tmp_path / "draft", path)
        token = gateway.gateway.access.worker_token
        await gateway.until(lambda: b"new-token" in token.last_lines)
        assert (await gateway.chat()).status_code == 200
    assert [call.headers[HEADER_WORKER_TOKEN] for call in worker.calls] == ["old-token", "new-token"]
