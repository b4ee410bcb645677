"""What a client asks for, and how long it waits for it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gms import protocol
from gms.client import SLOWEST_BYTES_PER_SECOND, GmsClient
from gms.connection import Connection
from gms.protocol import AllocationInfo, Attach, Done, ErrorCode, GetManifest, GmsError, LeaseMode, Release, Verify

POOL = "weights/w"
SECONDS = 7
"""How long the slowest machine takes for what is committed."""
COMMITTED = [AllocationInfo("w", SECONDS * SLOWEST_BYTES_PER_SECOND, 4096)]


class FakeConnection:
    """Answers in the order given; what is an error is raised."""

    path = "/s"

    def __init__(self, *answers: protocol.Message | GmsError) -> None:
        self._answers = list(answers)
        self.requests: list[protocol.Message] = []
        self.waits: list[float] = []

    def call(self, request: protocol.Message, reply_type: type[Any], *, wait_seconds: float = 0.0, **_: Any) -> Any:
        self.requests.append(request)
        self.waits.append(wait_seconds)
        answer = self._answers.pop(0)
        if isinstance(answer, GmsError):
            raise answer
        assert isinstance(answer, reply_type)
        return answer

    @property
    def asked(self) -> list[type[protocol.Message]]:
        return [type(request) for request in self.requests]


def client_of(connection: FakeConnection) -> GmsClient:
    return GmsClient(cast(Connection, connection))


def manifest(allocations: list[AllocationInfo]) -> protocol.ManifestReply:
    return protocol.ManifestReply(generation=1, manifest=b"", allocations=allocations)


def granted(mode: LeaseMode = LeaseMode.RO) -> protocol.Granted:
    return protocol.Granted(mode=mode, generation=1, fresh=False, manifest=b"", allocations=COMMITTED)


def test_what_is_committed_is_verified_before_it_is_granted_and_waited_for_by_its_size() -> None:
    connection = FakeConnection(manifest(COMMITTED), granted())
    client_of(connection).attach(POOL, LeaseMode.RO, timeout_seconds=2, verify=True)
    assert connection.asked == [GetManifest, Attach]
    assert cast(Attach, connection.requests[1]).verify
    assert connection.waits[1] == 2 + SECONDS


def test_what_another_client_commits_first_is_verified_when_its_size_is_known() -> None:
    connection = FakeConnection(manifest([]), granted(), protocol.Verified(generation=1, size_bytes=1))
    client_of(connection).attach(POOL, LeaseMode.RW_OR_RO, timeout_seconds=2, verify=True)
    assert connection.asked == [GetManifest, Attach, Verify]
    assert not cast(Attach, connection.requests[1]).verify
    assert connection.waits[1:] == [2, SECONDS]


def test_its_writer_has_nothing_to_verify() -> None:
    connection = FakeConnection(manifest([]), granted(LeaseMode.RW))
    client_of(connection).attach(POOL, LeaseMode.RW_OR_RO, verify=True)
    assert connection.asked == [GetManifest, Attach]


@pytest.mark.parametrize("release", [Done(), GmsError(ErrorCode.SERVICE_GONE, "it went away", retryable=True)])
def test_a_lease_on_what_is_corrupt_is_given_back(release: Done | GmsError) -> None:
    corrupt = GmsError(ErrorCode.CORRUPT, "the content of 'w' is not what was committed")
    connection = FakeConnection(manifest([]), granted(), corrupt, release)
    with pytest.raises(GmsError, match="is not what was committed"):
        client_of(connection).attach(POOL, LeaseMode.RO, verify=True)
    assert connection.asked == [GetManifest, Attach, Verify, Release]


def test_a_commit_is_waited_for_by_its_size() -> None:
    connection = FakeConnection(granted(LeaseMode.RW), granted())
    lease = client_of(connection).attach(POOL, LeaseMode.RW, timeout_seconds=2)
    lease.commit(b"manifest")
    assert connection.waits == [2, SECONDS]
    assert (lease.mode, lease.manifest) == (LeaseMode.RO, b"manifest")
