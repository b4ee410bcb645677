"""``hotspare up``, whole: a start, a failover, a stop, and every way to be killed."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.machine import Machine, StartUp, hotspare
from tests.support.processes import until

pytestmark = pytest.mark.process


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def chat(url: str) -> str:
    body = {"model": "sim", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20, trust_env=False)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@contextmanager
def request_in_flight(machine: Machine) -> Iterator[None]:
    """A client whose request is with the engine inside; it hangs up afterwards."""
    url = urlsplit(machine.until_ready())
    body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "?"}]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: {len(body)}"
    with socket.create_connection((url.hostname, url.port)) as client:
        client.sendall(f"{head}\r\ncontent-type: application/json\r\n\r\n{body}".encode())
        machine.until_status(lambda status: status["gateway"]["inflight"] == 1, saying="a request is in flight")
        yield


def test_what_the_processes_cost_adds_up(start_up: StartUp) -> None:
    machine = start_up("--engine", "sim")
    machine.until_complete()

    def counted() -> dict[str, Any] | None:
        shown = hotspare("status", "--memory", "--json", "--run-dir", str(machine.run_dir))
        assert shown.returncode == 0, shown.stderr
        (pod,) = json.loads(shown.stdout)["pods"]
        silent = pod["service_bytes"] is None or "silent" in (process["role"] for process in pod["processes"])
        return None if silent else dict(pod)

    pod = until(counted, saying="everybody answered")
    roles = sorted(process["role"] for process in pod["processes"])
    assert roles == ["ACTIVE", "STANDBY", "keeper", "keeper", "memory service", "supervisor"]
    own = {process["role"]: process["sizes"] for process in pod["processes"]}
    assert pod["processes_bytes"] == sum(process["sizes"]["pss"] for process in pod["processes"])
    assert pod["total_bytes"] == pod["processes_bytes"] + sum(pod["service_bytes"].values())
    assert pod["service_bytes"]["weights"] == 8 << 20  # once, for two engines
    assert "kv" in own["ACTIVE"]["service"]
    assert "kv" not in own["STANDBY"]["service"]
    until(
        lambda: re.search(
            "engine-[ab] is parked and costs", hotspare("status", "--memory", "--run-dir", str(machine.run_dir)).stdout
        ),
        saying="it says what the spare costs",
    )


def test_what_is_stopped_is_found_and_replaced(start_up: StartUp) -> None:
    machine = start_up("--engine", "sim")
    url = machine.until_complete()
    before = machine.settled()["pods"][0]
    (shadow,) = (name for name, engine in before["engines"].items() if engine["role"] == "STANDBY")
    assert machine.fault("stop-shadow").startswith("sent SIGSTOP to engine ")
    assert machine.fault("stop-gms").startswith("sent SIGSTOP to the memory service of pod-0")

    def replaced(status: dict[str, Any]) -> bool:
        pod = status["pods"][0]
        engine, service = pod["engines"][shadow], pod["gms"]
        return (
            engine["role"] == "STANDBY"
            and engine["pid"] != before["engines"][shadow]["pid"]
            and service["answers"]
            and service["pid"] != before["gms"]["pid"]
        )

    machine.until_status(replaced, saying="the shadow and the memory service are replaced")
    assert chat(url)


def test_who_is_silent_is_still_known_and_counted(start_up: StartUp) -> None:
    patience = {"HOTSPARE_BEAT_TIMEOUT_SECONDS": "60", "HOTSPARE_LIVENESS_FAILURES": "50"}  # nobody kills it meanwhile
    machine = start_up("--engine", "sim", **patience)
    machine.until_complete()
    before = machine.settled()["pods"][0]["engines"]
    (shadow,) = (name for name, engine in before.items() if engine["role"] == "STANDBY")
    machine.fault("stop-shadow")
    shown = hotspare("status", "--json", "--run-dir", str(machine.run_dir))
    silent = json.loads(shown.stdout)["pods"][0]["engines"][shadow]
    assert silent["role"] == "silent"
    assert {name: silent[name] for name in ("pid", "keeper_pid", "restarts")} == {
        name: before[shadow][name] for name in ("pid", "keeper_pid", "restarts")
    }
    (pod,) = json.loads(hotspare("status", "--memory", "--json", "--run-dir", str(machine.run_dir)).stdout)["pods"]
    (row,) = (process for process in pod["processes"] if process["pid"] == silent["pid"])
    assert row["role"] == "silent"
    assert row["sizes"]["rss"] > 0
    assert silent["keeper_pid"] in {process["pid"] for process in pod["processes"]}
    refused = hotspare("handover", "pod-0", "--run-dir", str(machine.run_dir))
    assert refused.returncode == 1, refused
    assert "serves on" in refused.stderr
    assert "try again when" in refused.stderr
    kill(silent["pid"])


def test_restarts_only_grow_also_when_a_keeper_is_replaced(start_up: StartUp) -> None:
    machine = start_up("--engine", "sim")
    machine.until_complete()
    seen: list[int] = []

    def again(pid: int) -> dict[str, Any]:
        def parked(status: dict[str, Any]) -> bool:
            engine = status["pods"][0]["engines"]["b"]
            seen.append(engine["restarts"])
            return engine["pid"] not in (None, pid) and engine["role"] in ("ACTIVE", "STANDBY")

        return dict(machine.until_status(parked, saying="b is back")["pods"][0]["engines"]["b"])

    first = machine.settled()["pods"][0]["engines"]["b"]
    kill(first["pid"])
    second = again(first["pid"])
    kill(second["keeper_pid"])
    third = again(second["pid"])
    assert [first["restarts"], second["restarts"], third["restarts"]] == [0, 1, 2]
    assert seen == sorted(seen)


def test_an_orderly_end_warns_of_nothing(start_up: StartUp) -> None:
    machine = start_up("--engine", "sim")
    machine.until_complete()
    machine.up.signal(signal.SIGINT)
    assert machine.up.wait() == 0
    log = (machine.run_dir / "logs" / "pod-0.log").read_text()
    assert [line for line in log.splitlines() if re.search("WARNING|ERROR", line)] == []


def roles(status: dict[str, Any], pod: int = 0) -> dict[str, str]:
    return {name: engine["role"] for name, engine in status["pods"][pod]["engines"].items()}


def test_a_life(start_up: StartUp) -> None:
    machine = start_up()
    url = machine.until_complete()
    said = chat(url)
    before = machine.status_command()
    assert sorted(roles(before).values()) == ["ACTIVE", "STANDBY"]
    assert before["pods"][0]["routed"]["routable"]
    machine.descendants()

    assert machine.fault("kill-active").startswith("sent SIGKILL to engine ")
    machine.until_said(r"pod-0: [ab] is active, epoch 2, [\d.]+ ms after it got the lock")
    machine.until_said(r"pod-0: [ab] is parked again, redundancy restored after [\d.]+ s")
    assert chat(url) == said
    after = machine.status_command()
    assert roles(after) == {name: {"ACTIVE": "STANDBY", "STANDBY": "ACTIVE"}[r] for name, r in roles(before).items()}
    machine.descendants()

    machine.up.signal(signal.SIGINT)
    assert machine.up.wait() == 0
    assert re.search(r"stopped after [\d.]+ s, nothing was cut off$", machine.up.output().splitlines()[-1])
    machine.assert_all_gone()
    assert machine.left() == []
    assert sorted(path.name for path in (machine.run_dir / "logs").iterdir()) == ["gateway.log", "pod-0.log"]


def test_the_printed_command_works(start_up: StartUp) -> None:
    machine = start_up("--no-gms", "--no-keeper", "--shadows", "0")
    machine.until_ready()
    command = machine.until_said(r"^  (curl .*)$")[1]
    done = subprocess.run(
        [*shlex.split(command), "--silent", "--noproxy", "*"], capture_output=True, text=True, timeout=20, check=True
    )
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["object"] == "chat.completion.chunk"
    pod = machine.status()["pods"][0]
    assert (pod["gms"], list(pod["engines"])) == (None, ["a"])


def test_two_pods(start_up: StartUp) -> None:
    machine = start_up("--pods", "2")
    machine.until_complete()
    status = machine.status()
    assert [pod["pod"] for pod in status["pods"]] == ["pod-0", "pod-1"]
    assert status["pods"][0]["instance"] != status["pods"][1]["instance"]
    machine.descendants()
    # One pod may go; with the last one everything ends.
    first, second = machine.pid_of("pod-0"), machine.pid_of("pod-1")
    kill(first)
    machine.until_said(r"pod-0 ended by itself \(killed by SIGKILL\).*the other pods go on")
    assert machine.status()["pods"][0]["stale"]
    kill(second)
    assert machine.up.wait() == 1
    machine.assert_all_gone()
    assert machine.left() == []


def test_sigterm_while_it_starts(start_up: StartUp) -> None:
    machine = start_up()
    until(lambda: (machine.run_dir / "logs" / "pod-0.log").exists(), saying="the pod is being started")
    machine.descendants()
    machine.up.signal(signal.SIGTERM)
    assert machine.up.wait() == 0
    machine.assert_all_gone()
    assert machine.left() == []


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_request_that_is_cut_off_is_told(start_up: StartUp, form: str) -> None:
    machine = start_up(
        *("--shadows", "0", "--no-gms", "--no-keeper"),
        HOTSPARE_SIM_TTFT_SECONDS="60",
        HOTSPARE_DRAIN_TIMEOUT_SECONDS="0.3",
        HOTSPARE_LOG_FORMAT=form,
    )
    machine.until_ready()
    with request_in_flight(machine):
        machine.up.signal(signal.SIGINT)
        assert machine.up.wait() == 0
    assert "stopping: the gateway drains for at most 0.3 s, " in machine.up.output()
    assert re.search(r"stopped after [\d.]+ s, 1 request was cut off$", machine.up.output().splitlines()[-1])
    assert machine.left() == []


def test_a_second_signal_ends_everything_at_once(start_up: StartUp) -> None:
    machine = start_up(HOTSPARE_SIM_TTFT_SECONDS="60", HOTSPARE_DRAIN_TIMEOUT_SECONDS="9")
    machine.until_complete()
    machine.descendants()
    with request_in_flight(machine):
        machine.up.signal(signal.SIGINT)
        machine.until_said("stopping: the gateway drains for at most 9 s, then the pods end")
        machine.until_said(r"waiting for gateway \(process \d+\) for \d+ s; another signal ends everything at once")
        machine.up.signal(signal.SIGINT)
        assert machine.up.wait() == 70
    assert "stopped by force" in machine.up.output().splitlines()[-1]
    machine.assert_all_gone()
    assert machine.left() == []


@pytest.mark.parametrize("victim", ["up", "gateway", "pod-0"])
def test_whoever_is_killed_leaves_no_orphan(start_up: StartUp, victim: str) -> None:
    machine = start_up()
    machine.until_complete()
    assert len(machine.descendants()) == 7  # gateway, pod, gms, two keepers, two engines
    kill(machine.up.pid if victim == "up" else machine.pid_of(victim))
    code = machine.up.wait()
    machine.assert_all_gone()
    if victim != "up":
        assert code == 1
        assert f"hotspare up: {victim} ended by itself (killed by SIGKILL)" in machine.up.output()
        assert machine.left() == []


def test_a_run_after_a_killed_one_is_like_any_other(start_up: StartUp) -> None:
    first = start_up()
    first.until_complete()
    first.descendants()
    kill(first.up.pid)
    first.up.wait()
    first.assert_all_gone()
    assert "pod-0/pod.json" in first.left()
    assert first.status()["pods"][0]["stale"]
    logs = first.run_dir / "logs"
    told = (logs / "gateway.log").read_text()
    (logs / "pod-7.log").write_text("of a run with more pods")
    (logs / "pod-7.log.1").write_text("of one before it")
    for arguments in (["status"], ["status", "--json"]):
        done = hotspare(*arguments, "--run-dir", str(first.run_dir))
        assert (done.returncode, "pod-0" in done.stdout) == (1, True)
        assert done.stderr.startswith(f"hotspare status: neither a gateway nor an engine of {first.run_dir} answers: ")

    second = start_up()
    second.until_complete()
    assert not second.status()["pods"][0]["stale"]
    names = ["gateway.log", "gateway.log.1", "pod-0.log", "pod-0.log.1"]
    assert sorted(path.name for path in logs.iterdir()) == names
    assert (logs / "gateway.log.1").read_text() == told
    second.up.signal(signal.SIGTERM)
    assert second.up.wait() == 0
    assert second.left() == []


def test_a_killed_memory_service_comes_back_and_leaves_no_orphan(start_up: StartUp) -> None:
    machine = start_up()
    machine.until_complete()
    machine.descendants()
    old = machine.status()["pods"][0]["gms"]["pid"]
    assert machine.fault("kill-gms") == f"sent SIGKILL to the memory service of pod-0, process {old}\n"

    def is_back(status: dict[str, Any]) -> bool:
        gms = status["pods"][0]["gms"]
        return bool(gms["answers"] and gms["pid"] != old)

    machine.until_status(is_back, saying="another memory service answers")
    machine.descendants()
    machine.up.signal(signal.SIGTERM)
    machine.up.wait()
    machine.assert_all_gone()
    assert machine.left() == []
