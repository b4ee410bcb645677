"""One writer, many readers, and what a SIGKILL in between does."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gms.client import GmsClient, GmsError, LeaseMode
from gms.mapping import Reservation

pytestmark = pytest.mark.process

POOL = "weights/0a1b"
WRITE_ONE = """
client = connect()
lease = client.attach("weights/0a1b", LeaseMode.RW_OR_RO)
say(lease.mode)
with lease.allocate("w", 65536) as pages:
    reservation = mapped(pages)
    reservation.buffer()[:5] = b"hello"
    say("written")
    hear()
    reservation.unmap()
    lease.commit(b"manifest")
    say("committed")
    hear()
"""


def test_the_first_writes_and_the_next_reads_what_it_wrote(client: GmsClient, actor: Any) -> None:
    writer = actor(WRITE_ONE)
    assert writer.line() == "rw"
    writer.expect("written")
    reader = actor("""
        lease = connect("b").attach("weights/0a1b", LeaseMode.RW_OR_RO)
        say(lease.mode, lease.manifest.decode(), lease.generation, lease.fresh, *lease.allocations)
        pages = lease.export("w")
        say(bytes(mapped(pages, writable=False).buffer()[:5]).decode())
    """)
    writer.tell()
    assert reader.line() == "ro manifest 1 False AllocationInfo(tag='w', size_bytes=65536)"
    assert reader.line() == "hello"


def test_committed_pages_survive_their_writer(client: GmsClient, actor: Any) -> None:
    writer = actor(WRITE_ONE)
    writer.expect("written")
    writer.tell()
    writer.expect("committed")
    writer.kill()
    lease = client.attach(POOL, LeaseMode.RO, timeout_seconds=0)
    with lease.export("w") as pages, Reservation(pages.size_bytes) as range_:
        range_.map(pages.fd, writable=False)
        assert bytes(range_.buffer()[:5]) == b"hello"


def test_a_writer_killed_before_its_commit_leaves_nothing_and_the_next_writes(client: GmsClient, actor: Any) -> None:
    writer = actor(WRITE_ONE)
    writer.expect("written")
    heir = actor("""
        client = connect("b")
        say("asks")
        lease = client.attach("weights/0a1b", LeaseMode.RW_OR_RO)
        say(lease.mode, lease.fresh, len(lease.allocations))
        hear()
    """)
    heir.expect("asks")
    writer.kill()
    assert heir.line() == "rw True 0"
    assert client.status().total_bytes == 0


def test_readers_cannot_write_by_any_way(client: GmsClient, actor: Any) -> None:
    writer = client.attach(POOL, LeaseMode.RW)
    with writer.allocate("w", 4096) as rw, Reservation(4096) as range_:
        range_.map(rw.fd, writable=True)
        range_.buffer()[0] = 1
        range_.unmap()
        writer.commit(b"")
        assert writer.mode is LeaseMode.RO

        with writer.export("w") as ro:
            for fd in (ro.fd, rw.fd):  # the former writer's descriptor too
                with pytest.raises(PermissionError):
                    mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
                with pytest.raises(OSError, match=r"Operation not permitted|Bad file descriptor"):
                    os.write(fd, b"x")
            reopened = os.open(f"/proc/self/fd/{ro.fd}", os.O_RDWR)
            try:
                with pytest.raises(PermissionError):
                    mmap.mmap(reopened, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
                with pytest.raises(PermissionError):
                    os.pwrite(reopened, b"x", 0)
                with pytest.raises(PermissionError):
                    os.ftruncate(reopened, 0)
            finally:
                os.close(reopened)
            range_.map(ro.fd, writable=False)
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.mprotect(ctypes.c_void_p(range_.address), ctypes.c_size_t(4096), 3) == -1
            assert ctypes.get_errno() == errno.EACCES
            assert range_.buffer()[0] == 1


@pytest.mark.parametrize("writable", [True, False])
def test_a_commit_with_a_mapping_left_is_refused_and_can_be_repeated(client: GmsClient, writable: bool) -> None:
    """A read-only mapping of a writable descriptor counts: mprotect would make it writable."""
    lease = client.attach(POOL, LeaseMode.RW)
    with lease.allocate("w", 4096) as pages, Reservation(4096) as range_:
        range_.map(pages.fd, writable=writable)
        with pytest.raises(GmsError, match="'w' still has a writable mapping") as caught:
            lease.commit(b"m")
        assert caught.value.code == "still_mapped"
        assert caught.value.retryable
        assert lease.mode is LeaseMode.RW
        range_.unmap()
        lease.commit(b"m")
    assert lease.mode is LeaseMode.RO


def test_a_new_generation_is_staged_beside_its_readers(client: GmsClient, socket_path: Path) -> None:
    with GmsClient.connect(socket_path, engine="b", instance="test") as other:
        first = client.attach(POOL, LeaseMode.RW)
        first.allocate("w", 4096).close()
        first.commit(b"one")
        second = other.attach(POOL, LeaseMode.RW, timeout_seconds=0)
        second.allocate("w", 8192).close()
        first.export("w").close()
        second.commit(b"two")
        with first.export("w") as old, second.export("w") as new:
            assert (old.size_bytes, new.size_bytes) == (4096, 8192)
        first.release()
        assert client.attach(POOL, LeaseMode.RW_OR_RO).manifest == b"two"
        assert client.status().total_bytes == 8192


def test_waiting_ends_with_its_timeout(client: GmsClient) -> None:
    with pytest.raises(GmsError, match="nobody has committed") as caught:
        client.attach(POOL, LeaseMode.RO, timeout_seconds=0.01)
    assert (caught.value.code, caught.value.retryable) == ("timeout", True)


def test_a_killed_waiter_leaves_the_queue(client: GmsClient, actor: Any, eventually: Callable[..., None]) -> None:
    lease = client.attach(POOL, LeaseMode.RW)
    waiter = actor('say("up"); connect("b").attach("weights/0a1b", LeaseMode.RW)')
    waiter.expect("up")
    eventually(lambda: client.status().pools[0].waiting == 1, "the other waits")
    waiter.kill()
    eventually(lambda: client.status().pools[0].waiting == 0, "its place is free")
    lease.release(quiesced=True)
    assert client.status().clients == 1


def test_a_stopped_writer_is_waited_for_and_then_killed(client: GmsClient, actor: Any) -> None:
    writer = actor(WRITE_ONE)
    writer.expect("written")
    writer.signal(signal.SIGSTOP)
    with pytest.raises(GmsError, match="still writing"):
        client.attach(POOL, LeaseMode.RW_OR_RO, timeout_seconds=0.01)
    writer.kill()
    assert client.attach(POOL, LeaseMode.RW_OR_RO).mode is LeaseMode.RW


def test_what_a_lease_does_not_allow(client: GmsClient) -> None:
    lease = client.attach(POOL, LeaseMode.RW)
    lease.allocate("w", 4096).close()
    for call, code in [
        (lambda: lease.allocate("w", 4096), "exists"),
        (lambda: lease.allocate("w", 8192), "size_mismatch"),
        (lambda: lease.allocate("t" * 129, 8192), "invalid"),
        (lambda: lease.allocate("x", 0), "invalid"),
        (lambda: lease.export("other"), "not_found"),
        (lambda: lease.commit(bytes(3 << 20)), "invalid"),
        (lambda: lease.commit(bytes(5 << 20)), "bad_message"),
        (lambda: client.attach(POOL, LeaseMode.RO), "already_attached"),
        (lambda: client.attach("nonsense", LeaseMode.RO), "invalid"),
    ]:
        with pytest.raises(GmsError) as caught:
            call()
        assert caught.value.code == code
    lease.commit(b"")
    for call, code in [
        (lambda: lease.allocate("x", 4096), "not_permitted"),
        (lambda: lease.commit(b""), "not_permitted"),
    ]:
        with pytest.raises(GmsError) as caught:
            call()
        assert caught.value.code == code
    lease.release()
    with pytest.raises(GmsError) as caught:
        lease.export("w")
    assert caught.value.code == "not_attached"
