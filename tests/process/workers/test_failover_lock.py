"""The lock between real processes: who holds it, when it is free again, and what a fork must not keep."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.failover_lock import FailoverLockError, FlockFailoverLock

pytestmark = pytest.mark.process

HOLDER = """
import asyncio, sys
from pathlib import Path
from workers.failover_lock import FlockFailoverLock

async def main():
    lock = FlockFailoverLock(Path(sys.argv[1]))
    print("opened", lock.fd, flush=True)
    await lock.acquire()
    print("epoch", lock.advance_epoch(), flush=True)
    sys.stdin.readline()
    if sys.argv[2:] == ["fork"]:
        import os
        child = os.fork()
        if child == 0:
            sys.stdin.readline()
            os._exit(0)
        print("child", child, flush=True)
        sys.stdin.readline()

asyncio.run(main())
"""


class Holder:
    """A process that takes the lock, says so, and holds it until told or killed."""

    def __init__(self, path: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> list[str]:
        assert self.process.stdout
        return self.process.stdout.readline().split()

    def go_on(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    holder = Holder(tmp_path / "active.lock")
    yield holder
    holder.end()


async def test_a_killed_holder_hands_on_lock_and_epoch(tmp_path: Path, holder: Holder) -> None:
    assert holder.line()[0] == "opened"
    assert holder.line() == ["epoch", "1"]
    with FlockFailoverLock(tmp_path / "active.lock") as lock:
        waiting = asyncio.ensure_future(lock.acquire())
        await asyncio.sleep(0)
        assert not waiting.done()
        holder.process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(5):
            await waiting
        assert lock.held
        assert lock.granted_at is not None
        assert lock.advance_epoch() == 2
        assert lock.read_epoch() == 2


async def test_waiting_takes_no_cpu_and_can_be_cancelled(tmp_path: Path, holder: Holder) -> None:
    holder.line()
    holder.line()
    lock = FlockFailoverLock(tmp_path / "active.lock")
    waiting = asyncio.ensure_future(lock.acquire())
    await asyncio.sleep(0)  # acquire() runs up to its wait; the thread has been started then
    assert any(thread.name == "failover-lock" for thread in threading.enumerate())
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert lock.fd == -1
    assert not lock.held
    # The cancelled waiter is first in the kernel's queue. Its grant must go back at once, or this one waits for ever.
    with FlockFailoverLock(tmp_path / "active.lock") as second:
        next_one = asyncio.ensure_future(second.acquire())
        holder.process.send_signal(signal.SIGKILL)
        async with asyncio.timeout(5):
            await next_one


async def test_a_fork_does_not_keep_the_lock(tmp_path: Path) -> None:
    holder = Holder(tmp_path / "active.lock", "fork")
    try:
        holder.line()
        holder.line()
        holder.go_on()
        child = int(holder.line()[1])
        with FlockFailoverLock(tmp_path / "active.lock") as lock:
            waiting = asyncio.ensure_future(lock.acquire())
            holder.process.kill()
            async with asyncio.timeout(5):
                await waiting
            os.kill(child, 0)  # it lives, and has no part in the lock
            os.kill(child, signal.SIGKILL)
    finally:
        holder.end()


async def test_release_lets_the_next_one_in_and_the_first_may_wait_again(tmp_path: Path) -> None:
    with FlockFailoverLock(tmp_path / "active.lock") as first, FlockFailoverLock(tmp_path / "active.lock") as second:
        await first.acquire()
        waiting = asyncio.ensure_future(second.acquire())
        first.release()
        async with asyncio.timeout(5):
            await waiting
        again = asyncio.ensure_future(first.acquire())
        second.release()
        async with asyncio.timeout(5):
            await again
        assert first.held


async def test_a_replaced_file_elects_nobody(tmp_path: Path, holder: Holder) -> None:
    path = tmp_path / "active.lock"
    holder.line()
    holder.line()
    lock = FlockFailoverLock(path)
    waiting = asyncio.ensure_future(lock.acquire())
    await asyncio.sleep(0)
    path.unlink()
    path.touch()
    holder.process.kill()
    with pytest.raises(FailoverLockError, match="was replaced"):
        async with asyncio.timeout(5):
            await waiting
    assert lock.fd == -1


async def test_only_the_holder_may_write_the_epoch(tmp_path: Path) -> None:
    with FlockFailoverLock(tmp_path / "active.lock") as lock, pytest.raises(RuntimeError, match="only the holder"):
        lock.advance_epoch()


@pytest.mark.parametrize("content", [b"7", b"x" * 21, b"00000000000000000007", b"0000000000000000000-7\n"])
async def test_a_file_that_holds_something_else_is_said_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "active.lock").write_bytes(content)
    with FlockFailoverLock(tmp_path / "active.lock") as lock:
        await lock.acquire()
        with pytest.raises(FailoverLockError, match="does not hold an epoch"):
            lock.advance_epoch()


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FailoverLockError, match=r"HOTSPARE_RUN_DIR.*must exist and be writable"):
        FlockFailoverLock(tmp_path / "nowhere" / "active.lock")


async def test_a_lock_file_that_was_removed_is_made_again_held(tmp_path: Path) -> None:
    path = tmp_path / "pod" / "active.lock"
    path.parent.mkdir()
    with FlockFailoverLock(path) as lock, FlockFailoverLock(path) as waiting:
        await lock.acquire()
        lock.advance_epoch()
        number = lock.fd
        waits = asyncio.ensure_future(waiting.acquire())
        await asyncio.sleep(0)
        path.unlink()
        path.parent.rmdir()
        assert lock.missing()
        assert lock.keep() is None
        assert lock.fd == number
        assert [entry.name for entry in path.parent.iterdir()] == ["active.lock"]
        with pytest.raises(FailoverLockError, match="was replaced while this engine waited"):
            await asyncio.wait_for(waits, 5)
        with FlockFailoverLock(path) as third:
            assert third.holder_pid() == os.getpid()
            then = asyncio.ensure_future(third.acquire())
            lock.close()
            await asyncio.wait_for(then, 5)
            assert third.advance_epoch() == 2


async def test_somebody_elses_lock_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "active.lock"
    with FlockFailoverLock(path) as lock:
        await lock.acquire()
        path.unlink()
        path.write_text("")
        assert "was replaced" in str(lock.keep())
        assert path.read_text() == ""


async def test_a_lock_file_that_cannot_be_made_again_is_still_held(tmp_path: Path) -> None:
    path = tmp_path / "pod" / "active.lock"
    path.parent.mkdir()
    with FlockFailoverLock(path) as lock:
        await lock.acquire()
        path.unlink()
        path.parent.rmdir()
        path.parent.write_text("a file where the folder was")
        with pytest.raises(FailoverLockError, match="cannot be made again"):
            lock.keep()
        assert lock.held
