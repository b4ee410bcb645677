"""Two engines of one name in one pod: the second is refused, and one that follows a dead one is not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.workers.crews import Crew, crew
from tests.support.processes import MS, gone, until
from workers.engine_lock import EngineLock, EngineLockError
from workers.ports import PortReservation

pytestmark = pytest.mark.process


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Crew]:
    with crew(tmp_path, "a") as made:
        yield made


@pytest.mark.parametrize("kept", ["true", "false"])
def test_a_second_engine_of_the_same_name_is_refused(one: Crew, kept: str) -> None:
    one.engine("a", HOTSPARE_GMS="false", HOTSPARE_KEEPER=kept)
    serving = one.until_active()
    with PortReservation() as port, PortReservation() as admin:
        second = one.engine(
            "a", "--serving-port", str(port.port), "--admin-port", str(admin.port), HOTSPARE_GMS="false"
        )
        assert second.wait() == 2
    first = serving["keeper_pid"] or serving["pid"]
    said = [line for line in second.output().splitlines() if "another engine a runs in the pod's folder" in line]
    assert len(said) == 1
    assert f"(process {first})" in said[0]
    assert one.until_active()["pid"] == serving["pid"]


def test_one_that_follows_a_killed_keeper_has_its_name(one: Crew) -> None:
    first = one.engine("a", HOTSPARE_GMS="false")
    before = one.until_active()
    os.kill(first.pid, signal.SIGKILL)
    assert gone(before["pid"])
    one.engine("a", HOTSPARE_GMS="false")
    after = until(
        lambda: state if (state := one.state("a")) and state["pid"] != before["pid"] else None,
        saying="there is another",
    )
    assert after["keeper_pid"] != before["keeper_pid"]


def test_a_fork_that_outlives_the_holder_does_not_hold_it(tmp_path: Path) -> None:
    holder = EngineLock(tmp_path, "a")
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    os.close(ours)
    try:
        with pytest.raises(EngineLockError, match=rf"another engine a runs .*\(process {os.getpid()}\)"):
            EngineLock(tmp_path, "a", wait_seconds=10 * MS)
        holder.close()
        EngineLock(tmp_path, "a", wait_seconds=5).close()
    finally:
        os.close(theirs)
        os.waitpid(child, 0)


def test_a_file_that_was_removed_is_no_lock(tmp_path: Path) -> None:
    holder = EngineLock(tmp_path, "a")
    holder.path.unlink()
    EngineLock(tmp_path, "a", wait_seconds=0).close()
    holder.close()
    holder.close()


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineLockError, match="cannot be used: No such file or directory; the run folder"):
        EngineLock(tmp_path / "missing", "a")
