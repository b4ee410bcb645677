from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from workers import worker_token
from workers.asgi import Message, Receive, Scope, Send
from workers.change import Change
from workers.contract import HEADER_WORKER_TOKEN, WorkerTokenError, parse_worker_tokens
from workers.pod_commands import environment
from workers.serving import ServingApp
from workers.settings import EngineSettings, PodSettings, SettingsError, load_settings
from workers.worker_token import WorkerTokens, worker_tokens

HEADER = HEADER_WORKER_TOKEN.encode()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("HOTSPARE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOTSPARE_RUN_DIR", "/tmp/r")
    monkeypatch.setattr(worker_token, "LOOK_SECONDS", 0.0)


def accepts(tokens: WorkerTokens, token: bytes) -> bool:
    return tokens.accepts([(b"host", b"w"), (HEADER, token)])


def test_the_tokens_of_a_file() -> None:
    assert parse_worker_tokens(b"# in use\none\n\n two \r\n") == ("one", "two")
    for raw, said in ((b"", "no token"), (b"#x\n", "no token"), (b"a\nmy secret\n", "line 2"), (b"\xff", "line 1")):
        with pytest.raises(WorkerTokenError, match=said) as caught:
            parse_worker_tokens(raw)
        assert "secret" not in str(caught.value)


def test_without_a_token_there_is_nothing_to_check() -> None:
    assert worker_tokens(EngineSettings()) is None


def test_the_token_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSPARE_WORKER_TOKEN", "right")
    tokens = worker_tokens(EngineSettings())
    assert tokens is not None
    assert accepts(tokens, b"right")
    assert not any(accepts(tokens, token) for token in (b"", b"righ", b"Right", b"right "))
    assert not tokens.accepts([])
    assert not tokens.accepts([(HEADER, b"wrong"), (HEADER, b"right")])  # the first counts


def test_a_file_that_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"

    def write(text: str) -> None:
        (tmp_path / "draft").write_text(text)
        os.replace(tmp_path / "draft", path)

    write("old\n")
    tokens = WorkerTokens(EngineSettings(worker_token_file=path))
    assert accepts(tokens, b"old")
    write("old\nnew\n")
    assert accepts(tokens, b"old")
    assert accepts(tokens, b"new")
    write("new\n")
    assert (accepts(tokens, b"old"), accepts(tokens, b"new")) == (False, True)
    with caplog.at_level(logging.ERROR):
        write("not a token\n")
        assert [accepts(tokens, b"new") for _ in range(3)] == [True] * 3
        path.unlink()
        assert [accepts(tokens, b"new") for _ in range(3)] == [True] * 3
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "line 1 is not a token" in said[0]
    assert "No such file" in said[1]


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none", "No such file"), (tmp_path, "directory")):
        with pytest.raises(WorkerTokenError, match=said):
            WorkerTokens(EngineSettings(worker_token_file=path))


def test_a_bad_token_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSPARE_WORKER_TOKEN", "my secret")
    with pytest.raises(SettingsError, match=r"^HOTSPARE_WORKER_TOKEN: line 1 is not a token") as caught:
        load_settings(EngineSettings, {})
    assert "secret" not in str(caught.value)


def test_a_pod_hands_the_token_to_its_engines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSPARE_WORKER_TOKEN", "right")
    settings = PodSettings()
    assert "right" not in repr(settings)
    given = {name: environment(settings, name, inherited=os.environ) for name in ("gms", "engine-a")}
    assert given["engine-a"]["HOTSPARE_WORKER_TOKEN"] == "right"
    assert "HOTSPARE_WORKER_TOKEN" not in given["gms"]


async def served(tokens: WorkerTokens, path: str, *headers: tuple[bytes, bytes]) -> tuple[list[Any], bool]:
    """What a serving port says, and whether the engine heard of it."""
    heard, sent = False, []

    async def engine(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal heard
        heard = True

    async def receive() -> Message:
        raise AssertionError("the body is not read")

    async def send(message: Message) -> None:
        sent.append(message)

    app = ServingApp(
        engine,
        watch_line=lambda _: (_ for _ in ()).throw(AssertionError("nobody watches")),
        change=Change(),
        capacity=0,
        heartbeat_seconds=1,
        is_dead=lambda: False,
        on_dead=lambda: None,
        tokens=tokens,
    )
    await app({"type": "http", "path": path, "method": "GET", "headers": list(headers)}, receive, send)
    return sent, heard


@pytest.mark.parametrize("path", ["/v1/completions", "/internal/watch", "/internal/x", "/health", "/"])
async def test_others_are_told_nothing(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    tokens = WorkerTokens(EngineSettings(worker_token="right"))
    for headers in ([], [(HEADER, b"wrong")]):
        sent, heard = await served(tokens, path, *headers)
        assert (sent[0]["status"], heard) == (401, False)
        assert (b"x-hotspare-reselect", b"1") in sent[0]["headers"]
        assert msgspec.json.decode(sent[1]["body"])["error"]["code"] == "invalid_worker_token"
    if path == "/v1/completions":
        sent, _ = await served(tokens, path, (HEADER, b"right"))
        assert sent[0]["status"] == 503  # past the door: this one has no capacity
