"""``hotspare handover`` with requests under way that no other engine could go on with: they did not come through a
gateway."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.process.pod.sim_pods import SimPod, supervised
from tests.support.processes import until

pytestmark = pytest.mark.process


class Reader:
    """Reads a stream beside the test until it is told to leave, or the stream ends."""

    def __init__(self, pod: SimPod) -> None:
        self.events = 0
        self.cut = False
        self._leave = threading.Event()
        self.thread = threading.Thread(target=self._read, args=(f"http://127.0.0.1:{pod.serving}/v1/completions",))

    def _read(self, url: str) -> None:
        body = {"prompt": "a story without an end", "max_tokens": 100_000, "stream": True}
        try:
            with httpx.stream("POST", url, json=body, timeout=20, trust_env=False) as answer:
                for _ in answer.iter_lines():
                    self.events += 1
                    if self._leave.is_set():
                        return
        except (httpx.RemoteProtocolError, httpx.ReadError):
            self.cut = True

    def until_further(self) -> None:
        before = self.events
        until(lambda: self.events > before, saying="the stream goes on")

    def leave(self) -> None:
        self._leave.set()
        self.thread.join(20)


@contextmanager
def reading(pod: SimPod) -> Iterator[Reader]:
    reader = Reader(pod)
    reader.thread.start()
    try:
        reader.until_further()
        yield reader
    finally:
        reader.leave()


def hotspare(pod: SimPod, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "app.cli.main", *arguments, "--run-dir", str(pod.folder.parent)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HOTSPARE_")}
    return subprocess.Popen(command, env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=50)
    return process.returncode, out, err


WAITS = "waits for 1 request that no other engine could resume (1 completions), then it hands over; "


@pytest.mark.timeout(100)
def test_what_cannot_go_on_elsewhere_is_named_waited_for_and_cut_only_if_asked(pod: SimPod, tmp_path: Path) -> None:
    with supervised(pod, tmp_path, HOTSPARE_SIM_TOKEN_SECONDS="0.01") as process:
        active, _ = pod.until_pair()
        with reading(pod) as reader:
            code, out, err = said(hotspare(pod, "handover", "pod-0", "--wait", "1"))
            assert (code, out) == (1, "")
            assert f"pod-0: engine {active['engine']} {WAITS}it is called off in " in err
            assert "without an id (/v1/completions, " in err
            assert "did not end in time" in err
            assert "(waited for 1 s); longer with --wait SECONDS, and with --cut they are cut then" in err
            reader.until_further()
            assert not reader.cut
            assert (pod.active() or {})["epoch"] == active["epoch"]

            interrupted = hotspare(pod, "handover", "pod-0", "--wait", "60")
            until(lambda: (pod.active() or {}).get("draining"), saying="it waits")
            interrupted.send_signal(signal.SIGINT)
            code, out, err = said(interrupted)
            assert (code != 0, out) == (True, "")
            assert "interrupted. If engine" in err
            assert "Traceback" not in err
            until(lambda: (pod.active() or {"draining": 1})["draining"] is None, saying="it is called off")
            process.until_said("whoever asked for it has gone")

            waiting = hotspare(pod, "handover", "pod-0", "--wait", "60")
            until(lambda: (pod.active() or {}).get("draining"), saying="it waits")
            shown = said(hotspare(pod, "status"))[1]
            assert WAITS in " ".join(shown.split())
            reader.leave()
            code, out, err = said(waiting)
            assert code == 0, err
            assert "serves under epoch 2" in out
        pod.until_pair()
        with reading(pod) as reader:
            code, out, err = said(hotspare(pod, "handover", "pod-0", "--wait", "0", "--cut"))
            assert code == 0, err
            reader.thread.join(20)
            assert reader.cut
        process.until_said("did not end in time and is cut by the hand-over: without an id (/v1/completions")
        assert pod.until_pair()[0]["epoch"] == 3
