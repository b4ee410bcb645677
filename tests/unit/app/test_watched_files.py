from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from app.security import watched_files
from app.security.watched_files import WatchedFiles, read_text
from app.start_error import StartError


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "LOOK_SECONDS", 0.002)


class Follower:
    """Follows a file as the gateway does; each change ends up in a queue."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = WatchedFiles(path)
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()

    def reload(self) -> str:
        try:
            text = read_text(self.path, "api_keys_file")
        except StartError:
            self.loop.call_soon_threadsafe(self.heard.put_nowait, "failed")
            raise
        self.loop.call_soon_threadsafe(self.heard.put_nowait, text)
        return "read again"

    async def __aenter__(self) -> Follower:
        self.task = asyncio.create_task(self.files.follow(self.reload))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def next(self) -> str:
        async with asyncio.timeout(5):
            return await self.heard.get()


async def test_each_kind_of_change_is_seen_once(tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    for folder, text in ((first, "1"), (second, "2")):
        folder.mkdir()
        (folder / "keys").write_text(text)
    data = tmp_path / "data"
    data.symlink_to(first)
    path = tmp_path / "keys"
    path.symlink_to(data / "keys")
    async with Follower(path) as follower:
        # As Kubernetes does it: the link two folders up is exchanged.
        (tmp_path / "new").symlink_to(second)
        os.replace(tmp_path / "new", data)
        assert await follower.next() == "2"
        (second / "draft").write_text("3 replaced")
        os.replace(second / "draft", second / "keys")
        assert await follower.next() == "3 replaced"
        await asyncio.sleep(0.05)  # time for ten more looks, none of which may see anything
        assert follower.heard.empty()


async def test_a_change_between_making_and_following_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a")
    follower = Follower(path)
    path.write_text("ab")
    async with follower:
        assert await follower.next() == "ab"


async def test_a_file_that_goes_is_said_once_and_its_return_is_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("a")
    with caplog.at_level(logging.INFO, "app.security.watched_files"):
        async with Follower(path) as follower:
            path.unlink()
            assert await follower.next() == "failed"
            path.write_text("back")
            assert await follower.next() == "back"
            async with asyncio.timeout(5):
                while len(caplog.records) < 2:  # noqa: ASYNC110  # a line follows what was read
                    await asyncio.sleep(0.001)
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith(f"{path} cannot be read: No such file")
    assert first.endswith("what was read before stays in use")
    assert second == "read again"


async def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a")
    async with Follower(path) as follower:
        os.mkfifo(tmp_path / "pipe")
        os.replace(tmp_path / "pipe", path)
        assert await follower.next() == "failed"
        (tmp_path / "new").write_text("b")
        os.replace(tmp_path / "new", path)
        assert await follower.next() == "b"


async def test_after_an_error_of_another_kind_it_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("a")
    files = WatchedFiles(path)
    tries = 0
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def reload() -> str:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise RuntimeError("no room for another thread")
        loop.call_soon_threadsafe(done.set)
        return "read again"

    path.write_text("ab")
    following = asyncio.create_task(files.follow(reload))
    async with asyncio.timeout(5):
        await done.wait()
        while len(caplog.records) < 1:  # noqa: ASYNC110  # a line follows what was read
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)  # time for more looks, none of which may see anything
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert tries == 4
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "RuntimeError: no room for another thread); what was read before stays in use" in said.getMessage()
    assert said.exc_info is not None


def test_what_cannot_be_read_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for prepare, said in (
        (lambda: None, "No such file"),
        (lambda: path.write_bytes(b"\xff"), "not UTF-8"),
        (lambda: (path.unlink(), os.mkfifo(path)), "not a regular file"),  # nobody writes to it
        (lambda: (path.unlink(), path.write_bytes(b"x" * (watched_files.MAX_BYTES + 1))), "larger than"),
    ):
        prepare()
        with pytest.raises(StartError, match=f"{said}.*HOTSPARE_API_KEYS_FILE"):
            read_text(path, "api_keys_file")
