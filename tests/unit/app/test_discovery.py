"""What sources say, and what is made of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from app.address import Address
from app.discovery import sources
from app.discovery.findings import MAX_ADDRESSES, Failed, Finding, Found, Outcome, Picture, one_family
from app.discovery.hostfile import MAX_FILE_BYTES, read_addresses
from app.discovery.sources import DnsSource, FileSource, Source

A, B = Address("a", 1), Address("b", 2)


def test_the_first_list() -> None:
    picture = Picture()
    assert picture.hear(Found((A, B, A)), 1) == Outcome((A, B), False)
    assert (picture.addresses, picture.answered, picture.problem, picture.succeeded_at) == ((A, B), True, None, 1)


def test_the_same_list_again_is_no_news_but_fresh() -> None:
    picture = Picture()
    picture.hear(Found((A,)), 1)
    assert picture.hear(Found((A,)), 2) == Outcome(None, False)
    assert picture.succeeded_at == 2


def test_the_last_list_stays_while_the_source_fails_and_each_condition_is_told_once() -> None:
    picture = Picture()
    picture.hear(Found((A,)), 1)
    told = [picture.hear(Failed(reason), 2).changed for reason in ("x", "x", "y", "y")]
    assert told == [True, False, True, False]
    assert (picture.addresses, picture.problem, picture.succeeded_at) == ((A,), "y", 1)
    assert picture.hear(Found((A,)), 3) == Outcome(None, True)
    assert picture.problem is None


def test_nothing_at_all_is_an_answer_only_at_first_or_if_it_is_certain() -> None:
    picture = Picture()
    assert picture.hear(Found(()), 1) == Outcome((), False)
    picture.hear(Found((A,)), 2)
    assert picture.hear(Found(()), 3) == Outcome(None, True)
    assert picture.problem == "names no worker any more"
    assert picture.hear(Found((), certain=True), 4) == Outcome((), True)


def test_a_source_that_fails_at_first_has_not_answered() -> None:
    picture = Picture()
    assert picture.hear(Failed("x"), 1) == Outcome(None, True)
    assert not picture.answered
    assert picture.hear(Found((A,)), 2) == Outcome((A,), True)


def test_a_list_without_end_is_a_mistake() -> None:
    picture = Picture()
    many = tuple(Address("a", port) for port in range(1, MAX_ADDRESSES + 2))
    assert picture.hear(Found(many), 1) == Outcome(None, True)
    assert "names 1001 workers" in (picture.problem or "")


@pytest.mark.parametrize(
    ("hosts", "chosen"),
    [
        ([], []),
        (["10.0.0.2", "10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2"]),
        (["::1", "127.0.0.1"], ["127.0.0.1"]),
        (["fd00::2", "fd00::1"], ["fd00::1", "fd00::2"]),
    ],
)
def test_one_family_in_a_steady_order(hosts: list[str], chosen: list[str]) -> None:
    assert one_family(hosts) == chosen


@pytest.mark.parametrize(
    ("content", "finding"),
    [
        (b"a:1\nhttp://b:2\n", Found((A, B))),
        (b"\xef\xbb\xbf# workers\r\n\r\n  a:1  # the first\r\nb:2", Found((A, B))),
        (b"", Found(())),
        (b"# none\n", Found(())),
        (b"[::1]:5\n", Found((Address("::1", 5),))),
        (b' ["a:1", "b:2"]\n', Found((A, B), certain=True)),
        (b"[]", Found((), certain=True)),
        (b"a:1\nb\n", Failed("has a bad line 2: worker address 'b' should be host:port or http://host:port")),
        (b'["a:1"', Failed("is no JSON list: Expecting ',' delimiter: line 1 column 7 (char 6)")),
        (b"[1]", Failed("has a bad line 1: worker address '[1]' should be host:port or http://host:port")),
        (b'["a:1", 2]', Failed("holds 2; a JSON list of workers holds strings, host:port")),
        (b'["a"]', Failed("has a bad entry: worker address 'a' should be host:port or http://host:port")),
        (b"\xff\xfe", Failed("is not text (UTF-8)")),
        (b"#" * (MAX_FILE_BYTES + 1), Failed("is larger than 1048576 bytes")),
    ],
)
def test_files(content: bytes, finding: Finding) -> None:
    found = read_addresses(content)
    if isinstance(finding, Failed):
        assert isinstance(found, Failed)
        assert found.reason.startswith(finding.reason)
    else:
        assert found == finding


def test_half_a_json_list_is_never_a_shorter_one() -> None:
    whole = b'["10.0.0.1:8100", "10.0.0.2:8100"]'
    for length in range(1, len(whole)):
        assert isinstance(read_addresses(whole[:length]), Failed)


class Heard:
    """Collects findings, and lets a test wait for one."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._more = asyncio.Event()

    def __call__(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._more.set()

    async def until(self, condition: Callable[[Finding], bool]) -> Finding:
        async with asyncio.timeout(5):
            while not (self.findings and condition(self.findings[-1])):
                self._more.clear()
                await self._more.wait()
        return self.findings[-1]

    async def next(self) -> Finding:
        count = len(self.findings)
        return await self.until(lambda _: len(self.findings) > count)


@asynccontextmanager
async def running(source: Source) -> AsyncIterator[Heard]:
    heard = Heard()
    task = asyncio.create_task(source.run(heard))
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_file_is_followed_through_what_happens_to_files(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    other = tmp_path / "other"
    path.write_text("a:1")
    async with running(FileSource(path, look_seconds=0.005)) as heard:
        await heard.until(lambda f: f == Found((A,)))
        other.write_text("b:2")
        other.replace(path)
        await heard.until(lambda f: f == Found((B,)))
        path.write_text("")
        await heard.until(lambda f: f == Found(()))
        path.unlink()
        await heard.until(lambda f: f == Failed("cannot be read: No such file or directory"))
        path.mkdir()
        await heard.until(lambda f: f == Failed("cannot be read: it is not a regular file"))
        path.rmdir()
        os.mkfifo(path)
        await heard.until(lambda f: f == Failed("cannot be read: it is not a regular file"))
        path.unlink()
        other.write_text("a:1")
        path.symlink_to(other)
        await heard.until(lambda f: f == Found((A,)))


async def test_what_a_file_shows_once_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([b"a:1", b"a:1", b"b:", b"b:2", b"b:2"])
    monkeypatch.setattr(sources, "_read", lambda path: next(looks, b"b:2"))
    async with running(FileSource(tmp_path, look_seconds=0.001)) as heard:
        await heard.until(lambda f: f == Found((B,)))
    assert heard.findings[:5] == [Found((A,))] * 4 + [Found((B,))]


async def test_a_name_is_resolved_again_and_again() -> None:
    answers: list[Sequence[str] | OSError] = [
        ["10.0.0.2", "10.0.0.1"],
        OSError(-2, "Name or service not known"),
        ["10.0.0.3", "fd00::3"],
    ]
    asked: list[tuple[str, int]] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append((host, port))
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    async with running(DnsSource(Address("pods", 81), interval_seconds=0.001, resolve=resolve)) as heard:
        await heard.until(lambda f: f == Found((Address("10.0.0.3", 81),)))
    assert heard.findings[:2] == [
        Found((Address("10.0.0.1", 81), Address("10.0.0.2", 81))),
        Failed("cannot be resolved: Name or service not known"),
    ]
    assert set(asked) == {("pods", 81)}


async def test_a_question_that_hangs_is_not_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LOOK_TIMEOUT_SECONDS", 0.01)
    asked = 0
    answer: asyncio.Future[Sequence[str]] = asyncio.get_running_loop().create_future()

    async def resolve(host: str, port: int) -> Sequence[str]:
        nonlocal asked
        asked += 1
        return await answer

    async with running(DnsSource(Address("pods", 81), interval_seconds=0.001, resolve=resolve)) as heard:
        assert await heard.next() == Failed("gave no answer within 0.01 s")
        assert await heard.next() == Failed("gave no answer within 0.01 s")
        assert asked == 1
        answer.set_result(["10.0.0.1"])
        await heard.until(lambda f: f == Found((Address("10.0.0.1", 81),)))


async def test_localhost() -> None:
    async with running(DnsSource(Address("localhost", 81), interval_seconds=5)) as heard:
        finding = await heard.next()
    assert finding in (Found((Address("127.0.0.1", 81),)), Found((Address("::1", 81),)))
