"""The supervisor over small real processes: what it does when they die, hang, refuse to go, or when it is told to."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.process.pod.pods import NAMES, ROOT, STANDIN, SUPERVISE, StartPod
from tests.support.pipes import full_pipe
from tests.support.processes import MS, gone, until

pytestmark = pytest.mark.process


def test_all_start_and_pod_json_tells_of_them(start_pod: StartPod, live_ports: tuple[int, int]) -> None:
    pod = start_pod(HOTSPARE_INSTANCE="life-1")
    pids = {name: pod.until_up(name) for name in NAMES}
    record = pod.record()
    assert record == {
        "version": 1,
        "pod": "pod-0",
        "instance": "life-1",
        "pid": pod.pid,
        "host": "127.0.0.1",
        "serving_port": 8100,
        "gms": {"pid": pids["gms"], "socket": str(pod.folder / "gms-cpu-0.sock"), "metrics_port": 8109},
        "engines": {
            "a": {"pid": pids["engine-a"], "admin_port": live_ports[0], "restarts": 0},
            "b": {"pid": pids["engine-b"], "admin_port": live_ports[1], "restarts": 0},
        },
    }
    assert stat.S_IMODE(pod.folder.stat().st_mode) == 0o700
    assert all(os.getsid(pid) == pid for pid in pids.values())


def test_sigterm_stops_engines_before_the_memory_service_and_leaves_nothing(start_pod: StartPod, run_dir: Path) -> None:
    pod = start_pod()
    pids = [pod.until_up(name) for name in NAMES]
    pod.process.signal(signal.SIGTERM)
    assert pod.process.wait() == 0
    assert all(gone(pid) for pid in pids)
    when = {name: int(pod.until_said(rf"^pod-0/{name} term (\d+)$")[1]) for name in NAMES}
    assert when["gms"] > max(when["engine-a"], when["engine-b"])
    assert list(run_dir.iterdir()) == []


def test_ctrl_c_means_the_same(start_pod: StartPod) -> None:
    pod = start_pod()
    pod.until_up("engine-b")
    pod.process.signal(signal.SIGINT)
    assert pod.process.wait() == 0


def test_a_signal_during_start_up_is_not_lost(start_pod: StartPod) -> None:
    pod = start_pod()
    until((pod.folder / "pod.json").exists, saying="pod.json is there")
    pod.process.signal(signal.SIGTERM)
    assert pod.process.wait() == 0


@pytest.mark.parametrize("name", ["gms", "engine-a"])
def test_what_dies_is_started_again_first_at_once_then_with_a_wait(start_pod: StartPod, name: str) -> None:
    pod = start_pod(HOTSPARE_LIVENESS_PERIOD_SECONDS="600")  # a probe's socket would count as a descriptor
    others = {other: pod.until_up(other) for other in NAMES if other != name}
    os.kill(pod.until_up(name), signal.SIGKILL)
    pod.until_said(rf"{name} is gone \(killed by SIGKILL\) and is started again at once")
    second = pod.until_up(name, life=2)
    before = min(pod.fds() for _ in range(5))
    os.kill(second, signal.SIGKILL)
    pod.until_said(rf"{name} is gone \(killed by SIGKILL\) and is started again in 1 s")
    third = pod.until_up(name, life=3)
    until(lambda: pod.fds() == before, saying="as many descriptors as before")
    record = pod.record()
    if name == "engine-a":
        assert record["engines"]["a"]["pid"] == third
        assert record["engines"]["a"]["restarts"] == 2
    else:
        assert record["gms"]["pid"] == third
    assert all(len(pod.said(rf"^pod-0/{other} up {pid}$")) == 1 for other, pid in others.items())


def test_while_something_waits_to_be_started_pod_json_says_that_it_is_not_there(start_pod: StartPod) -> None:
    pod = start_pod(a=["--exit", "3"])
    pod.until_said("engine-a is gone .* in 2 s")

    def waits() -> bool:
        engine = pod.record()["engines"]["a"]
        return (engine["pid"], engine["restarts"]) == (None, 2)

    until(waits, saying="pod.json says so")
    pod.process.signal(signal.SIGTERM)
    assert pod.process.wait() == 0


def test_a_pod_json_that_could_not_be_written_is_once_it_can(start_pod: StartPod) -> None:
    """As with a full disk: here something else lies where the draft is to be."""
    pod = start_pod()
    old = pod.until_up("gms")
    pod.until_up("engine-b")
    in_the_way = pod.folder / f".pod.json.{pod.pid}"
    in_the_way.mkdir()
    os.kill(old, signal.SIGKILL)
    new = pod.until_up("gms", life=2)
    pod.until_said("pod.json cannot be written")
    assert pod.record()["gms"]["pid"] == old
    in_the_way.rmdir()
    until(lambda: pod.record()["gms"]["pid"] == new, saying="pod.json tells of the new one")
    pod.until_said("pod.json is written again")
    assert len(pod.said("pod.json cannot be written")) == 1


@pytest.mark.parametrize("form", ["console", "json"])
def test_on_a_terminal_nothing_is_obeyed_that_a_library_says(start_pod: StartPod, tmp_path: Path, form: str) -> None:
    ours, terminal = pty.openpty()
    reading = threading.Thread(target=_read_all, args=(ours, seen := bytearray()))
    script = [sys.executable, str(SUPERVISE)]
    says = "print('\\x1b]0;owned\\x07\\x1b[2J \\x9b31m\\tred', flush=True); import time; time.sleep(3600)"
    commands = {name: [sys.executable, "-c", says] for name in NAMES}
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HOTSPARE_RUN_DIR": str(tmp_path / "run"),
        "HOTSPARE_LOG_FORMAT": form,
    }
    env |= {"HOTSPARE_SHUTDOWN_TIMEOUT_SECONDS": "0", "HOTSPARE_GRACE_PERIOD_SECONDS": "0", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen([*script, json.dumps(commands)], env=env, stdin=subprocess.DEVNULL, stdout=terminal)
    try:
        os.close(terminal)
        reading.start()
        wanted = rb"owned\x07\x1b[2J \x9b31m" if form == "console" else b"u001b"
        until(lambda: seen.count(wanted) >= len(NAMES), saying="all three have said it")
        assert not {0x1B, 0x07, 0x9B} & set(seen)
        assert b"\xc2\x9b" not in seen
    finally:
        started = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()
            for one in started:  # a supervisor that has ended has ended them
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            reading.join(20)
            os.close(ours)
    assert process.returncode == 0
    assert not psutil.wait_procs(started, timeout=0)[1]


def _read_all(fd: int, seen: bytearray) -> None:
    with contextlib.suppress(OSError):  # EIO: nobody has the terminal any more
        while data := os.read(fd, 65536):
            seen += data


def test_what_an_engine_started_dies_with_it(start_pod: StartPod, tmp_path: Path) -> None:
    pod = start_pod(a=["--grandchild", "--lives", str(tmp_path / "lives")])
    engine = pod.until_up("engine-a")
    grandchild = int(pod.until_said(r"^pod-0/engine-a grandchild (\d+)$")[1])
    os.kill(engine, signal.SIGKILL)
    pod.until_up("engine-a", life=2)
    assert gone(grandchild)


def test_an_engine_that_hangs_is_killed_with_what_it_started(
    start_pod: StartPod, live_ports: tuple[int, int], tmp_path: Path
) -> None:
    a, b = live_ports
    pod = start_pod(
        a=["--live-port", str(a), "--grandchild", "--lives", str(tmp_path / "lives")],
        b=["--live-port", str(b)],
        HOTSPARE_LIVENESS_TIMEOUT_SECONDS=str(1_000 * MS),
    )
    engine, other = pod.until_up("engine-a"), pod.until_up("engine-b")
    grandchild = int(pod.until_said(r"^pod-0/engine-a grandchild (\d+)$")[1])
    pod.until_said("^pod-0/engine-a asked$", times=2)  # so the first question was answered
    os.kill(engine, signal.SIGSTOP)
    pod.until_said("engine-a is not alive: no answer from .*/live within 1 s")
    assert gone(grandchild)
    pod.until_up("engine-a", life=2)
    assert pod.record()["engines"]["b"]["pid"] == other


def test_a_probe_that_fails_itself_is_said_and_goes_on(start_pod: StartPod, live_ports: tuple[int, int]) -> None:
    a, b = live_ports
    pod = start_pod(
        a=["--live-port", str(a)],
        b=["--live-port", str(b)],
        HOTSPARE_LIVENESS_TIMEOUT_SECONDS=str(1_000 * MS),
        FAILING_LOOKS="5",
    )
    engine, other = pod.until_up("engine-a"), pod.until_up("engine-b")
    pod.until_said("the probe of engine-[ab] ended on an error that nothing expected, and begins anew", times=5)
    pod.until_said('KeyError: "a mistake of the supervisor\'s"')
    pod.until_said("the look after the pod's folder ended on an error that nothing expected, and begins anew")
    pod.until_said("^pod-0/engine-a asked$", times=2)
    os.kill(engine, signal.SIGSTOP)
    pod.until_said("engine-a is not alive: no answer from .*/live within 1 s")
    pod.until_up("engine-a", life=2)
    assert pod.record()["engines"]["b"]["pid"] == other


def test_the_next_engine_of_a_keeper_may_be_silent_while_it_starts(
    start_pod: StartPod, live_ports: tuple[int, int]
) -> None:
    bodies = ('{"status":"live","pid":11,"role":"ACTIVE"}', '{"status":"live","pid":12,"role":"INIT"}')
    pod = start_pod(
        a=["--live-port", str(live_ports[0]), *(part for body in bodies for part in ("--live-body", body))],
        HOTSPARE_LIVENESS_TIMEOUT_SECONDS=str(1_000 * MS),
    )
    pod.until_said("^pod-0/engine-a asked$", times=6)  # three times in vain, and once more
    assert not pod.said("engine-a is not alive")
    assert pod.record()["engines"]["a"]["restarts"] == 0


def test_an_engine_that_never_answers_is_killed_after_the_start_up_time(start_pod: StartPod) -> None:
    pod = start_pod(HOTSPARE_STARTUP_TIMEOUT_SECONDS=str(2_000 * MS))
    pod.until_up("engine-a")
    pod.until_said("engine-a is not alive: it was not alive within 2 s")
    pod.until_up("engine-a", life=2)


def test_an_engine_that_does_not_go_is_killed_in_the_end(start_pod: StartPod) -> None:
    times = {"GRACE_PERIOD": 0, "SHUTDOWN_TIMEOUT": 100 * MS, "ENGINE_SHUTDOWN": 100 * MS, "KILL_AFTER": 2_000 * MS}
    pod = start_pod(a=["--ignore-term"], **{f"HOTSPARE_{name}_SECONDS": str(value) for name, value in times.items()})
    pids = [pod.until_up(name) for name in NAMES]
    pod.process.signal(signal.SIGTERM)
    assert pod.process.wait() == 70
    assert pod.said("^pod-0/engine-a term ignored$")
    assert pod.said(r"engine-a has ended \(killed by SIGKILL\)")
    assert pod.said(r"gms has ended \(exit code 0\)")
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_stopped_hears_that_the_pod_ends(start_pod: StartPod, name: str) -> None:
    pod = start_pod()
    pids = {each: pod.until_up(each) for each in NAMES}
    os.kill(pids[name], signal.SIGSTOP)
    pod.process.signal(signal.SIGTERM)
    assert pod.process.wait() == 0
    assert pod.said(rf"^pod-0/{name} term \d+$")


def test_what_is_stopped_while_the_pod_ends_is_killed_within_seconds(start_pod: StartPod) -> None:
    """It has a quarter of an hour for a drain, and drains nothing."""
    pod = start_pod(a=["--stop-on-term"], HOTSPARE_LIVENESS_PERIOD_SECONDS="600")
    pids = [pod.until_up(name) for name in NAMES]
    pod.process.signal(signal.SIGTERM)
    assert pod.process.wait(seconds=15_000 * MS) == 70
    assert pod.said(r"engine-a is not alive: it is stopped \(SIGSTOP\), and is to end")
    assert pod.said(r"gms has ended \(exit code 0\)")
    assert all(gone(pid) for pid in pids)


def test_what_is_silent_while_the_pod_ends_has_the_time_of_its_shut_down(
    start_pod: StartPod, live_ports: tuple[int, int]
) -> None:
    pod = start_pod(
        a=["--live-port", str(live_ports[0]), "--silent-on-term"],
        HOTSPARE_LIVENESS_TIMEOUT_SECONDS=str(500 * MS),
        HOTSPARE_ENGINE_SHUTDOWN_SECONDS="3",  # and three answers that do not come take half of it
    )
    pod.until_said("^pod-0/engine-a asked$", times=2)
    pod.until_up("engine-b")
    told = time.monotonic()
    pod.process.signal(signal.SIGTERM)
    pod.until_said("engine-a term ignored")
    assert pod.process.wait(seconds=15_000 * MS) == 70
    assert time.monotonic() - told > 3
    assert pod.said("engine-a is not alive: no answer from")


def test_a_memory_service_that_does_not_go_is_killed_too(start_pod: StartPod) -> None:
    pod = start_pod(gms=["--ignore-term"])
    pod.until_up("gms")
    pod.process.signal(signal.SIGTERM)
    assert pod.process.wait() == 70
    assert pod.said(r"gms has ended \(killed by SIGKILL\)")


def test_a_second_signal_kills_at_once(start_pod: StartPod) -> None:
    pod = start_pod(a=["--ignore-term"])
    pids = [pod.until_up(name) for name in NAMES]
    pod.process.signal(signal.SIGTERM)
    pod.until_said("engine-a term ignored")
    pod.process.signal(signal.SIGTERM)
    assert pod.process.wait() == 70
    assert all(gone(pid) for pid in pids)


def test_nothing_outlives_a_supervisor_that_is_killed(start_pod: StartPod) -> None:
    pod = start_pod(a=["--ignore-term"])
    pids = [pod.until_up(name) for name in NAMES]
    os.kill(pod.pid, signal.SIGKILL)
    assert all(gone(pid) for pid in pids)


def test_a_pod_left_behind_by_a_killed_supervisor_can_be_run_again(start_pod: StartPod) -> None:
    pod = start_pod()
    pids = [pod.until_up(name) for name in NAMES]
    os.kill(pod.pid, signal.SIGKILL)
    assert all(gone(pid) for pid in pids)
    again = start_pod()
    again.until_up("engine-a")
    assert again.record()["pid"] == again.pid


def test_a_second_supervisor_is_refused(start_pod: StartPod) -> None:
    pod = start_pod()
    pod.until_up("engine-a")
    second = start_pod()
    assert second.process.wait() == 2
    assert second.said(rf"is run by another supervisor \(process {pod.pid}\)")
    assert pod.record()["pid"] == pod.pid
    pod.process.signal(signal.SIGTERM)
    assert pod.process.wait() == 0


def test_a_folder_that_cannot_be_made_is_a_sentence(start_pod: StartPod, run_dir: Path) -> None:
    run_dir.write_text("a file, not a folder")
    pod = start_pod()
    assert pod.process.wait() == 2
    assert pod.said(r"the pod's folder .* cannot be used \(File exists\); set HOTSPARE_RUN_DIR")
    assert not pod.said("Traceback")


def test_a_configuration_that_no_engine_can_start_with_ends_the_pod(start_pod: StartPod) -> None:
    bad = ["--say", "no such model", "--exit", "2"]
    pod = start_pod(a=bad, b=bad)
    assert pod.process.wait() == 2
    assert pod.said("the pod cannot start with this configuration; engine-[ab] says: no such model")


def test_a_memory_service_that_cannot_start_ends_the_pod(start_pod: StartPod) -> None:
    pod = start_pod(gms=["--say", "no such device", "--exit", "2"])
    assert pod.process.wait() == 2
    assert pod.said("the pod cannot start with this configuration; gms says: no such device")


def test_one_engine_that_cannot_start_does_not_end_the_pod(start_pod: StartPod, tmp_path: Path) -> None:
    pod = start_pod(a=["--exit", "2", "--exit-after", "1", "--lives", str(tmp_path / "lives")])
    pod.until_said(r"engine-a is gone \(exit code 2\) and is started again in 1 s")
    pod.until_up("engine-a")
    pod.until_up("engine-b")
    pod.process.signal(signal.SIGTERM)
    assert pod.process.wait() == 0


def test_json_logs_are_json_and_say_whose_they_are(start_pod: StartPod) -> None:
    pod = start_pod(a=["--say", '{"message":"structured"}'], b=["--say", "plain"], HOTSPARE_LOG_FORMAT="json")
    pod.until_said('"message":"plain"')
    pod.until_said('"message":"structured"')
    pod.process.signal(signal.SIGTERM)
    assert pod.process.wait() == 0
    lines = [json.loads(line) for line in pod.process.output().splitlines()]
    assert {"process": "pod-0/engine-a", "message": "structured"} in lines
    (plain,) = (line for line in lines if line["message"] == "plain")
    assert plain.keys() == {"process", "time", "level", "logger", "message", "pid"}
    assert plain["process"] == "pod-0/engine-b"


def test_output_that_nobody_reads_blocks_nobody(run_dir: Path, live_ports: tuple[int, int]) -> None:
    """The supervisor's stdout is a pipe that is full; it still starts again what dies, and still stops in order."""
    commands = {name: [sys.executable, str(STANDIN), "--chatty"] for name in NAMES}
    settings = {
        "PYTHONPATH": str(ROOT),
        "HOTSPARE_RUN_DIR": str(run_dir),
        "HOTSPARE_ADMIN_PORTS": ",".join(map(str, live_ports)),
    }
    reading_end, full = full_pipe()
    with subprocess.Popen(
        [sys.executable, str(SUPERVISE), json.dumps(commands)], env={**os.environ, **settings}, stdout=full
    ) as supervisor:
        try:
            engine = until(lambda: engine_record(run_dir), saying="engine a is started")
            os.kill(engine["pid"], signal.SIGKILL)
            until(lambda: (engine_record(run_dir) or {}).get("restarts") == 1, saying="engine a is started again")
            supervisor.send_signal(signal.SIGTERM)
            assert supervisor.wait(10) == 0
        finally:
            supervisor.kill()
            os.close(full)
            os.close(reading_end)


def engine_record(run_dir: Path) -> dict[str, int] | None:
    try:
        return dict(json.loads((run_dir / "pod-0" / "pod.json").read_bytes())["engines"]["a"])
    except FileNotFoundError:
        return None
