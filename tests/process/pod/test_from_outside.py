"""What somebody does to a pod from outside: it serves on, and has everything again."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.process.pod.sim_pods import SimPod, supervised
from tests.support.processes import state_of, until
from workers.pod_files import PodFolder, PodFolderError

pytestmark = pytest.mark.process


def test_a_pod_serves_on_when_its_folder_is_removed(pod: SimPod, tmp_path: Path) -> None:
    with supervised(pod, tmp_path, HOTSPARE_LIVENESS_PERIOD_SECONDS="0.2") as process:
        active, parked = pod.until_pair()
        key, gms = (pod.folder / "pod.key").read_text(), pod.gms_pid()
        shutil.rmtree(pod.folder.rename(tmp_path / "removed"))  # at once: things come back while it is emptied
        until(lambda: other_spare(pod, parked), saying="another spare is parked")
        again, _ = pod.until_pair()
        assert (again["pid"], again["epoch"]) == (active["pid"], active["epoch"])
        assert pod.complete()
        assert (pod.folder / "pod.key").read_text() == key
        until(lambda: (pod.folder / "pod.json").exists(), saying="pod.json is there again")
        process.until_said("is there again")
        with pytest.raises(PodFolderError, match="run by another supervisor"):
            PodFolder(pod.folder).open()
        assert "cannot start with this configuration" not in process.output()
        # The memory service is the same one, at its place again, and the next one finds a journal.
        until(lambda: not pod.memory().journal, saying="all that stands could be handed back")
        assert pod.gms_pid() == gms
        assert gms is not None
        os.kill(gms, signal.SIGKILL)
        until(lambda: pod.gms_pid() not in (gms, None) and whole(pod), saying="another has the pages again")
        # The new lock elects: the spare waits on it, and goes on after the epoch of the old one.
        os.kill(active["pid"], signal.SIGKILL)
        after = until(
            lambda: state if (state := pod.active()) and state["pid"] != active["pid"] else None,
            saying="the spare took over",
        )
        assert after["epoch"] == active["epoch"] + 1
        assert pod.complete()


def test_a_keeper_that_is_stopped_is_replaced_when_its_engine_dies(pod: SimPod, tmp_path: Path) -> None:
    with supervised(pod, tmp_path, HOTSPARE_LIVENESS_PERIOD_SECONDS="0.2") as process:
        _, parked = pod.until_pair()
        os.kill(pod.record()["engines"][parked["engine"]]["pid"], signal.SIGSTOP)
        os.kill(parked["pid"], signal.SIGKILL)
        until(lambda: other_spare(pod, parked), saying="another spare is parked")
        process.until_said("is stopped")
        assert pod.complete()


def whole(pod: SimPod) -> bool:
    """Whether both engines have all their pages in the memory service; none has a private copy."""
    links = [state["memory_service"] for port in pod.admin if (state := state_of(port))]
    return len(links) == 2 and all(link and link["connected"] and not link["private"] for link in links)


def other_spare(pod: SimPod, parked: dict[str, object]) -> int | None:
    """The admin port of a parked engine that is another one than ``parked``."""
    for port in pod.admin:
        state = state_of(port)
        if state and state["role"] == "STANDBY" and state["pid"] != parked["pid"]:
            return port
    return None
