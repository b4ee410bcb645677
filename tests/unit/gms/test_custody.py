"""Custody over stand-in connections: what its thread does, and what its owner may do at the same time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from gms.client import Allocation, GmsClient, GmsError, Lease
from gms.custody import Custody
from gms.custody_phases import Phase
from gms.protocol import ErrorCode, Granted, LeaseMode

DEADLINE = 10.0


def gone() -> GmsError:
    return GmsError(ErrorCode.SERVICE_GONE, "nobody answers", retryable=True)


class FakeClient:
    """A connection whose other end the test holds. `adopting` decides what a hand-back comes to."""

    def __init__(self, adopting: Callable[[FakeClient], None] | None = None) -> None:
        self._ours, self.service = socket.socketpair()
        self._adopting = adopting
        self.adopted: list[dict[str, Any]] = []
        self.released: list[bool] = []
        self.after_release: Callable[[], None] = lambda: None
        self.closed = threading.Event()
        self.broken: Exception | None = None

    def fileno(self) -> int:
        if self.broken is not None:
            raise self.broken
        return self._ours.fileno()

    def die(self) -> None:
        """The service's end."""
        self.service.close()

    def close(self) -> None:
        self.closed.set()
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        self._ours.close()
        self.service.close()

    def adopt(self, pool: str, **what: Any) -> FakeLease:
        self.adopted.append({"pool": pool, **what})
        if self._adopting is not None:
            self._adopting(self)
        return FakeLease(self)

    @property
    def alive(self) -> bool:
        return self.service.fileno() >= 0


class FakeLease(Lease):
    def __init__(self, client: FakeClient) -> None:
        granted = Granted(mode=LeaseMode.RW, generation=3, fresh=False, manifest=b"", allocations=[])
        super().__init__(client, "kv", 7, granted, [], on_release=lambda _: None)  # type: ignore[arg-type]
        self.fake = client

    def release(self, *, quiesced: bool = False) -> None:
        if not self.fake.alive:
            raise gone()
        self.fake.released.append(quiesced)
        self.fake.after_release()


class Services:
    """What is dialled: each entry is a client, or an error that a try ends with; the last one stays."""

    def __init__(self) -> None:
        self.next: list[FakeClient | GmsError] = [gone()]
        self.tries = 0
        self.tried = threading.Semaphore(0)

    def __call__(self) -> GmsClient:
        self.tries += 1
        found = self.next.pop(0) if len(self.next) > 1 else self.next[0]
        self.tried.release()
        if isinstance(found, GmsError):
            raise found
        return found  # type: ignore[return-value]


@pytest.fixture
def dial() -> Services:
    return Services()


@pytest.fixture(autouse=True)
def no_thread_and_no_descriptor_is_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert "gms-custody" not in {thread.name for thread in threading.enumerate()}
    assert len(os.listdir("/proc/self/fd")) == before


Keep = Callable[..., tuple[Custody, FakeClient]]


@pytest.fixture
def keep(dial: Services) -> Iterator[Keep]:
    kept: list[Custody] = []

    def make(**more: Any) -> tuple[Custody, FakeClient]:
        client = FakeClient()
        fds = [os.memfd_create("page"), os.memfd_create("page")]
        pages = Allocation("kv", 8192, 4096, fds, created=True)
        custody = Custody(client, FakeLease(client), [pages], dial=dial, **more)  # type: ignore[arg-type]
        kept.append(custody)
        return custody, client

    yield make
    for custody in kept:
        custody.close()
    for client in dial.next:
        if isinstance(client, FakeClient):
            client.close()


def until(custody: Custody, phase: Phase) -> None:
    assert custody._await(lambda: custody._phase is phase, deadline_of(DEADLINE)), custody.state()


def deadline_of(seconds: float) -> float:
    return time.monotonic() + seconds


def test_pages_go_back_with_their_descriptors_and_the_lease_as_it_was(keep: Keep, dial: Services) -> None:
    custody, first = keep()
    second = FakeClient()
    dial.next = [gone(), gone(), second]
    sent: list[Sequence[Allocation]] = []
    second._adopting = lambda client: sent.append(client.adopted[-1]["allocations"])
    first.die()
    assert first.closed.wait(DEADLINE)  # the last thing of a hand-back
    state = custody.state()
    assert (state.phase, state.restored, state.pool, state.reason) == (Phase.HELD, 1, "kv", "")
    (told,) = second.adopted
    assert (told["pool"], told["generation"], told["mode"], told["epoch"]) == ("kv", 3, LeaseMode.RW, 7)
    assert [len(pages.chunks) for pages in sent[0]] == [2]
    assert dial.tries == 3
    custody.release(quiesced=True)
    assert second.released == [True]
    assert custody.state().phase is Phase.ENDED


def test_it_survives_many_services(keep: Keep, dial: Services) -> None:
    custody, current = keep()
    for number in range(1, 6):
        following = FakeClient()
        dial.next = [following]
        current.die()
        assert current.closed.wait(DEADLINE)
        assert custody.state().restored == number
        current = following
    assert custody.lease is not None


def test_a_service_that_dies_during_the_hand_back_is_followed_by_another(keep: Keep, dial: Services) -> None:
    def dies(client: FakeClient) -> None:
        client.die()
        raise gone()

    custody, first = keep()
    second, third = FakeClient(dies), FakeClient()
    dial.next = [second, third]
    first.die()
    assert first.closed.wait(DEADLINE)
    assert (len(second.adopted), len(third.adopted)) == (1, 1)
    assert second.closed.is_set()
    assert custody.state().restored == 1


@pytest.mark.parametrize("code", [ErrorCode.FENCED, ErrorCode.STALE_EPOCH, ErrorCode.CORRUPT])
def test_what_must_not_be_used_any_more_is_lost(keep: Keep, dial: Services, code: ErrorCode) -> None:
    def refuse(_: FakeClient) -> None:
        raise GmsError(code, "epoch 8 has it")

    custody, first = keep()
    assert custody.lost is None
    dial.next = [FakeClient(refuse)]
    first.die()
    until(custody, Phase.LOST)
    assert custody.lost == "epoch 8 has it"
    custody.release(quiesced=True, wait_seconds=DEADLINE)  # nothing to wait for


def test_what_is_refused_is_private(keep: Keep, dial: Services, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_: FakeClient) -> None:
        raise GmsError(ErrorCode.MISMATCH, "the journal does not know it")

    custody, first = keep()
    dial.next = [FakeClient(refuse)]
    first.die()
    until(custody, Phase.PRIVATE)
    custody.close()
    assert custody.lost is None
    assert "the journal does not know it" in caplog.text
    assert "private copy" in caplog.text


def test_giving_up_is_bounded_and_said_once(keep: Keep, dial: Services, caplog: pytest.LogCaptureFixture) -> None:
    custody, first = keep(give_up_seconds=0.2)
    first.die()
    until(custody, Phase.PRIVATE)
    assert custody.state().reason == "nobody answers"
    assert dial.tries > 2
    custody.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]


def test_closing_ends_a_hand_back_that_hangs(keep: Keep, dial: Services) -> None:
    started = threading.Event()

    def hang(client: FakeClient) -> None:
        started.set()
        assert client.closed.wait(DEADLINE)
        raise GmsError(ErrorCode.CLOSED, "closed by its owner")

    custody, first = keep()
    dial.next = [FakeClient(hang)]
    first.die()
    assert started.wait(DEADLINE)
    custody.close()
    assert custody.state().phase is Phase.ENDED


def test_release_waits_for_a_service_that_is_on_its_way(keep: Keep, dial: Services) -> None:
    custody, first = keep()
    first.die()
    until(custody, Phase.ADRIFT)
    assert dial.tried.acquire(timeout=DEADLINE)
    releasing = threading.Thread(target=custody.release, kwargs={"quiesced": True, "wait_seconds": DEADLINE})
    releasing.start()
    second = FakeClient()
    dial.next = [second]
    releasing.join(DEADLINE)
    assert second.released == [True]


def test_release_that_meets_the_services_end_is_done_with_the_next_one(keep: Keep, dial: Services) -> None:
    """The thread has not noticed yet when the release fails."""
    custody, first = keep()
    second = FakeClient()
    dial.next = [second]
    with custody._using:  # the thread is kept from noticing
        first.die()
        releasing = threading.Thread(target=custody.release, kwargs={"quiesced": True, "wait_seconds": DEADLINE})
        releasing.start()
    releasing.join(DEADLINE)
    assert second.released == [True]
    assert custody.state().phase is Phase.ENDED


def test_release_does_not_wait_longer_than_told(keep: Keep, dial: Services, caplog: pytest.LogCaptureFixture) -> None:
    custody, first = keep()
    first.die()
    until(custody, Phase.ADRIFT)
    custody.release(quiesced=True)
    assert "could not be released: the memory service is away" in caplog.text


def test_what_was_released_is_not_handed_back(keep: Keep, dial: Services) -> None:
    """The service dies with its answer hardly out."""
    custody, first = keep()
    dial.next = [second := FakeClient()]
    first.after_release = first.die
    custody.release(quiesced=True)
    assert (second.adopted, first.released) == ([], [True])


def test_anything_unexpected_ends_custody_and_says_so(
    keep: Keep, dial: Services, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: FakeClient) -> None:
        raise ZeroDivisionError("a bug")

    custody, first = keep()
    dial.next = [FakeClient(fail)]
    first.die()
    until(custody, Phase.PRIVATE)
    assert "a bug" in custody.state().reason
    assert "ended on an error that nobody expected" in caplog.text


def test_a_watch_that_fails_is_said_and_shown(keep: Keep, dial: Services, caplog: pytest.LogCaptureFixture) -> None:
    """The lease still stands, but nobody would hand the pages back any more."""
    custody, first = keep()
    second = FakeClient()
    second.broken = ZeroDivisionError("a bug")
    dial.next = [second]
    first.die()
    until(custody, Phase.PRIVATE)
    assert (custody.state().restored, "a bug" in custody.state().reason) == (1, True)
    assert "ended on an error that nobody expected" in caplog.text
    custody.release(quiesced=True, wait_seconds=DEADLINE)
    assert custody.state().phase is Phase.ENDED


def test_what_a_living_service_cannot_do_now_is_asked_for_again_and_said_once(
    keep: Keep, dial: Services, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: FakeClient) -> None:
        raise GmsError(ErrorCode.INTERNAL, "the service made a mistake")

    custody, first = keep()
    failing = [FakeClient(fail) for _ in range(4)]
    dial.next = [*failing, FakeClient()]
    first.die()
    assert first.closed.wait(DEADLINE)
    assert custody.state().restored == 1
    assert all(client.closed.is_set() for client in failing)
    assert caplog.text.count("the service made a mistake") == 1


def test_a_custody_that_cannot_begin_leaves_everything_with_its_caller(
    dial: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more_threads(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    client = FakeClient()
    with Allocation("kv", 4096, 4096, [os.memfd_create("page")], created=True) as pages:
        with pytest.raises(RuntimeError, match="new thread"):
            Custody(client, FakeLease(client), [pages], dial=dial)  # type: ignore[arg-type]
        assert pages.chunks
        assert not client.closed.is_set()
    client.close()
