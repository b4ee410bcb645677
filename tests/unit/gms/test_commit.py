"""A commit over stand-in connections: the service dies in the middle of it, and the next one is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from gms.client import Allocation, GmsClient, GmsError, Lease
from gms.commit import commit_surely
from gms.connection import Connection
from gms.protocol import ErrorCode, Granted, LeaseMode

POOL = "weights/w"
PAGES = [Allocation("w", 4096, 4096, [], created=True)]
RW, RO = LeaseMode.RW, LeaseMode.RO


def gone() -> GmsError:
    return GmsError(ErrorCode.SERVICE_GONE, "it went away", retryable=True)


def refused(code: ErrorCode = ErrorCode.MISMATCH, *, retryable: bool = False) -> GmsError:
    return GmsError(code, f"refused: {code}", retryable=retryable)


class Service:
    """One life of a service as one client sees it. `takes` says what comes of a hand-back in each mode, and `commits`
    of each commit: None is success."""

    def __init__(
        self, *, takes: dict[LeaseMode, GmsError | None] | None = None, commits: tuple[GmsError | None, ...] = ()
    ) -> None:
        self._takes = takes or {}
        self._commits = list(commits)
        self.asked: list[str] = []
        self.closed = False

    def lease(self, mode: LeaseMode = RW) -> Lease:
        granted = Granted(mode=mode, generation=3, fresh=False, manifest=b"", allocations=[])
        return FakeLease(self, granted)

    def adopt(self, pool: str, *, generation: int, mode: LeaseMode, epoch: int, allocations: object) -> Lease:
        assert (pool, generation, epoch, allocations) == (POOL, 3, 0, PAGES)
        self.asked.append(mode)
        if (error := self._takes[mode]) is not None:
            raise error
        return self.lease(mode)

    def commit(self) -> None:
        self.asked.append("commit")
        if (error := self._commits.pop(0)) is not None:
            raise error

    def close(self) -> None:
        self.closed = True


class FakeLease(Lease):
    def __init__(self, service: Service, granted: Granted) -> None:
        super().__init__(cast(Connection, None), POOL, 0, granted, [], on_release=lambda _: None)
        self.service = service

    def commit(self, manifest: bytes, *, digests: Any = None) -> None:
        assert self.mode is RW
        self.service.commit()
        self.mode, self.manifest = RO, manifest


def commit(first: Service, *following: Service | Exception, seconds: float = 10.0) -> tuple[Service, Lease]:
    found = list(following)

    def dial() -> GmsClient:
        """The last one stays."""
        service = found.pop(0) if len(found) > 1 else found[0]
        if isinstance(service, Exception):
            raise service
        return cast(GmsClient, service)

    client, lease = commit_surely(
        cast(GmsClient, first), first.lease(), PAGES, b"manifest", dial=dial, give_up_seconds=seconds
    )
    assert (lease.mode, lease.manifest) == (RO, b"manifest")
    return cast(Service, client), lease


def test_a_service_that_lives_is_asked_once() -> None:
    first = Service(commits=(None,))
    assert commit(first, refused())[0] is first
    assert (first.asked, first.closed) == (["commit"], False)


def test_a_commit_whose_answer_was_lost_is_not_repeated() -> None:
    first, second = Service(commits=(gone(),)), Service(takes={RO: None})
    assert commit(first, gone(), OSError(24, "too many files"), second)[0] is second
    assert (second.asked, second.closed, first.closed) == ([RO], False, True)


def test_a_commit_that_was_cut_off_is_repeated_by_its_writer() -> None:
    first, second = Service(commits=(gone(),)), Service(takes={RO: refused(), RW: None}, commits=(None,))
    client, lease = commit(first, second)
    assert client is second
    assert cast(FakeLease, lease).service is second
    assert (second.asked, second.closed, first.closed) == ([RO, RW, "commit"], False, True)


def test_many_services_may_die_in_a_commit() -> None:
    first = Service(commits=(gone(),))
    middle = [Service(takes={RO: refused(), RW: None}, commits=(gone(),)) for _ in range(3)]
    middle.append(Service(takes={RO: gone()}))
    middle.append(Service(takes={RO: refused(), RW: gone()}))
    last = Service(takes={RO: None})
    assert commit(first, *middle, last)[0] is last
    assert all(service.closed for service in (first, *middle))
    assert not last.closed


@pytest.mark.parametrize("code", [ErrorCode.INTERNAL, ErrorCode.BUSY, ErrorCode.OUT_OF_MEMORY])
@pytest.mark.parametrize("takes", [lambda error: {RO: error}, lambda error: {RO: refused(), RW: error}])
def test_what_passes_is_waited_for(
    code: ErrorCode, takes: Callable[[GmsError], dict[LeaseMode, GmsError | None]]
) -> None:
    short, last = Service(takes=takes(refused(code))), Service(takes={RO: None})
    assert commit(Service(commits=(gone(),)), short, last)[0] is last
    assert short.closed


def test_pages_that_nobody_knows_are_to_be_written_anew() -> None:
    first, second = Service(commits=(gone(),)), Service(takes={RO: refused(), RW: refused(ErrorCode.NOT_PERMITTED)})
    with pytest.raises(GmsError, match="write them anew") as caught:
        commit(first, second)
    assert "refused: mismatch" in str(caught.value)
    assert "refused: not_permitted" in str(caught.value)
    assert (second.closed, first.closed) == (True, False), "the first one is still its caller's"


@pytest.mark.parametrize("code", [ErrorCode.STILL_MAPPED, ErrorCode.NOT_ATTACHED, ErrorCode.CLOSED])
def test_what_a_commit_is_refused_for_is_raised(code: ErrorCode) -> None:
    first = Service(commits=(refused(code),))
    with pytest.raises(GmsError, match=f"refused: {code}"):
        commit(first, refused())
    assert not first.closed


def test_a_commit_that_is_refused_by_the_next_service_leaves_no_connection() -> None:
    first = Service(commits=(gone(),))
    second = Service(takes={RO: refused(), RW: None}, commits=(refused(ErrorCode.STILL_MAPPED, retryable=True),))
    with pytest.raises(GmsError, match="refused: still_mapped"):
        commit(first, second)
    assert (second.closed, first.closed) == (True, False)


@pytest.mark.parametrize("code", [ErrorCode.CORRUPT, ErrorCode.CLOSED, ErrorCode.VERSION_MISMATCH])
def test_what_does_not_change_by_waiting_ends_it(code: ErrorCode) -> None:
    with pytest.raises(GmsError, match=f"refused: {code}"):
        commit(Service(commits=(gone(),)), refused(code))


def test_a_service_is_waited_for_no_longer_than_told() -> None:
    with pytest.raises(GmsError, match="it went away"):
        commit(Service(commits=(gone(),)), gone(), seconds=0.05)
