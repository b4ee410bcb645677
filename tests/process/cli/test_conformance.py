"""``hotspare conformance``: the sim keeps all promises, and whoever breaks one is found out by the check for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.cli.conformance.lives import LIVES
from app.cli.conformance.outcomes import Report, Result

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[3]
PROCESSES = 4
MARK = f"left-by-{os.getpid()}"
"""In the environment of all that these runs start."""
ENVIRONMENT = {
    "HOTSPARE_BEAT_TIMEOUT_SECONDS": "6",
    "HOTSPARE_ENGINE_SHUTDOWN_SECONDS": "6",
    "HOTSPARE_SIM_STARTUP_SECONDS": "0.1",
    "HOTSPARE_SIM_TTFT_SECONDS": "0.002",
    "HOTSPARE_SIM_TOKEN_SECONDS": "0.002",
    "HOTSPARE_SIM_WEIGHTS_BYTES": "1048576",
    "HOTSPARE_SIM_KV_BYTES": "1048576",
}
BROKEN: Mapping[str, tuple[str, str, str]] = {
    # case: class, check that fails, what it says
    "initialize": ("NeverInitializes", "initialize", "RuntimeError: no start today"),
    "beats": ("BlocksTheLoop", "beats", "what takes long belongs in a thread"),
    "facts": ("NoModels", "facts", "models is ()"),
    "memory": ("ClaimsToShare", "memory", "weights_role is writer, and 1048576 of 1048576 bytes are outside"),
    "parked": ("WakesAtOnce", "parked", "KV pages are mapped while it is parked"),
    "self-test": ("FailsItsTest", "self-test", "EngineDeadError: could not wake"),
    "self-test-cancelled": ("WakesWhenCancelled", "self-test-cancelled", "after a self_test() that was cancelled"),
    "self-test-half-way": ("BreaksInTheMiddle", "self-test-cancelled", "left half way"),
    "wake": ("WakesToNothing", "wake", "no KV pages are mapped after wake()"),
    "death": ("DiesAwake", "wake", "its process ended in it (exit code 3)"),
    "hang": ("HangsAwake", "wake", "its event loop gave no sign"),
    "never": ("NeverReturns", "wake", "it took more than 8 s"),
    "custody": ("HidesCustody", "custody", "custody() does not say how they stand"),
    "answer": ("StandsStill", "answer", "steps stood at 7"),
    "stream": ("CutsStreams", "stream", "without data: [DONE], so that it counts as cut"),
    "no events": ("NoEvents", "stream", "has something that is no event"),
    "busy": ("NeverBusy", "busy", "busy is false while a request runs"),
    "client-leaves": ("KeepsGoing", "client-leaves", "a request whose client has left goes on"),
    "errors": ("PlainErrors", "errors", "a body that is no JSON is answered without"),
    "notes": ("WrongNotes", "notes", "its token notes do not fit its events"),
    "resume": ("BeginsAgain", "resume", "does not end in the same answer"),
    "framed": ("NoFrame", "framed", "comes in no frame"),
    "wake-twice": ("WakesTwice", "wake-twice", "was taken"),
    "quiesce": ("ForgetsWhenQuiesced", "quiesce", "did not go on to the same answer"),
    "park-with-requests": ("StepsAfterPark", "park-with-requests", ""),
    "park-twice": ("RefusesToParkAgain", "park-twice", "RuntimeError: it is parked already"),
    "rounds": ("LeaksWithEachWake", "rounds", "leave 4 times descriptor /dev/null"),
    "old-epoch": ("OwnEpochs", "old-epoch", "was taken"),
    "shutdown": ("SlowToEnd", "shutdown", "shutdown() did not return within 6 s"),
    "shutdown-twice": ("EndsOnce", "shutdown-twice", "RuntimeError: it was shut down already"),
    "health-after": ("AlwaysWell", "health-after", "an engine is well that was shut down"),
    "thread": ("LeavesThread", "left", "thread left-behind"),
    "child": ("LeavesChild", "left", "child process"),
    "daemon": ("LeavesDaemon", "left", "child process"),
    "shared memory": ("LeavesSharedMemory", "left", "file /dev/shm/hotspare-left-"),
    "folder": ("LeavesFolder", "left", "left-"),
    "lease": ("KeepsItsLease", "left", "a lease on its KV pages after shutdown()"),
    "shutdown-new": ("NeedsToBeInitialized", "shutdown-new", "RuntimeError: it was not initialised"),
    "left-new": ("LeavesFolder", "left-new", "left-"),
    "shutdown-initializing": ("NeedsToBeInitialized", "shutdown-initializing", "RuntimeError: it was not initialised"),
    "left-initializing": ("LeavesWhenInterrupted", "left-initializing", "starting-"),
    "initialize-again": ("NeverInitializes", "initialize-again", "RuntimeError: no start today"),
    "shutdown-requests": ("ForgetsItsRequests", "shutdown-requests", "the rest of a stream"),
    "left-requests": ("LeavesThread", "left-requests", "thread left-behind"),
}
OVER_A_SERVICE = {"ClaimsToShare", "HidesCustody", "OwnEpochs", "KeepsItsLease"}
NEEDED = {"left": "shutdown", "health-after": "shutdown", "shutdown-twice": "shutdown", "left-new": "shutdown-new"}
NEEDED |= {"left-initializing": "shutdown-initializing", "left-requests": "shutdown-requests"}
SETTLE_SECONDS = {"left-requests": 4.0}
"""Where a check that is to pass needs it. Elsewhere it is the check that fails that waits for so long, in vain."""
SHORT_SETTLE_SECONDS = 1.5
SHORT_BEAT = {"HOTSPARE_BEAT_TIMEOUT_SECONDS": "1"}
"""For engines of which only one is looked at for it, and that one stands still for longer."""


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOTSPARE_")}
    return {**kept, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **more}


@pytest.fixture(scope="module")
def tried() -> dict[str, list[Result]]:
    """What came of each order; many in one process, since importing takes longer than trying, and a few processes at a
    time, since trying is mostly waiting."""
    orders = [order(*BROKEN[case][:2]) for case in BROKEN]
    found: dict[str, list[Result]] = {}
    with contextlib.ExitStack() as stack:
        running = []
        for first in range(PROCESSES):
            command = [sys.executable, "-m", "tests.process.cli.conformance_of", *orders[first::PROCESSES]]
            process = stack.enter_context(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment(HOTSPARE_POD=MARK, **SHORT_BEAT),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
            stack.callback(process.kill)
            running.append(process)
        for process in running:
            output, errors = process.communicate(timeout=150)
            assert process.returncode == 0, errors.decode()
            for line in map(msgspec.json.decode, output.splitlines()):
                found[line["order"]] = msgspec.convert(line["results"], list[Result])
    for path in Path("/dev/shm").glob("hotspare-left-*"):
        path.unlink()
    return found


def order(cls: str, check: str) -> str:
    checks = [NEEDED[check], check] if check in NEEDED else [check]
    settle = SETTLE_SECONDS.get(check, SHORT_SETTLE_SECONDS)
    return f"{cls}:{','.join(checks)}:{'gms' if cls in OVER_A_SERVICE else ''}:{settle}"


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_promise_is_found_by_its_check(tried: dict[str, list[Result]], case: str) -> None:
    cls, check, saying = BROKEN[case]
    results = tried[order(cls, check)]
    (failed,) = [result for result in results if result.outcome == "fail"]
    assert failed.check == check
    assert saying in failed.reason


def test_every_check_is_shown_to_be_able_to_fail() -> None:
    without = {check.name for life in LIVES for check in life.checks} - {check for _, check, _ in BROKEN.values()}
    assert not without


def conformance(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.cli.main", "conformance", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment(**more), capture_output=True, text=True, timeout=120, check=False
    )


def outcomes(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    report = msgspec.json.decode(done.stdout, type=Report)
    return {result.check: str(result.outcome) for result in report.results}


def test_the_sim_keeps_its_promises_over_a_memory_service() -> None:
    done = conformance("--engine", "sim", "--json")
    found = outcomes(done)
    assert {name: outcome for name, outcome in found.items() if outcome != "pass"} == {}, done.stdout
    assert list(found) == [check.name for life in LIVES for check in life.checks]
    assert done.returncode == 0
    assert msgspec.json.decode(done.stdout)["memory_service"] is True


def test_the_sim_keeps_its_promises_without_one_and_a_table_says_so() -> None:
    done = conformance("--engine", "sim", HOTSPARE_GMS="false")  # as --no-gms, which others use
    assert done.returncode == 0, done.stdout
    *rows, last = done.stdout.splitlines()
    assert {row.partition(" ")[0] for row in rows} == {"pass", "skip"}
    assert [row.split()[1] for row in rows if row.startswith("skip")] == ["old-epoch"]
    assert last.startswith("sim (workers.engines.sim.engine:SimEngine), without a memory service: ")
    assert " 0 failed, 1 skipped" in last


def test_processes_that_an_engine_leaves_behind_end_with_the_run(tried: dict[str, list[Result]]) -> None:
    assert tried[order("LeavesDaemon", "left")]
    assert not [path for path in Path("/proc").glob("[0-9]*/environ") if _holds(path, MARK)]


def _holds(path: Path, mark: str) -> bool:
    try:
        return mark.encode() in path.read_bytes()
    except OSError:
        return False


def test_an_engine_that_hangs_while_it_is_initialised_is_named_and_not_waited_for_for_ever() -> None:
    done = conformance(
        "--no-gms", "--engine", "tests.support.broken_engines:NeverReady", "--initialize-seconds", "1.5", "--json"
    )
    assert done.returncode == 1
    assert "waiting for initialize (initialize() ends, with the engine parked), for " in done.stderr
    found = {result.check: result for result in msgspec.json.decode(done.stdout, type=Report).results}
    assert (found["initialize"].outcome, found["initialize"].reason) == ("fail", "it took more than 1.5 s")
    assert found["shutdown-new"].outcome == "pass"


def test_a_broken_engine_is_an_exit_code() -> None:
    done = conformance("--no-gms", HOTSPARE_ENGINE="tests.support.broken_engines:NoModels")
    assert done.returncode == 1
    assert "\nfail  facts " in done.stdout


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ("tgi", "there is no engine 'tgi' here"),
        ("no_such_module:Engine", "No module named 'no_such_module'"),
        ("pathlib:PurePath", "PurePath is no engine: it has no method"),
        ("tests.support.broken_engines:NotForThese", "there is no model here; set HOTSPARE_MODEL"),
    ],
)
def test_what_cannot_be_tried_is_refused_in_a_sentence(engine: str, sentence: str) -> None:
    done = conformance("--engine", engine)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_the_adapters_keep_their_promises_over_stand_ins(engine: str, tmp_path: Path) -> None:
    stand_ins = ROOT / "tests" / "support" / "other_engines"
    done = conformance("--engine", engine, "--no-gms", HOTSPARE_MODEL=str(tmp_path), PYTHONPATH=f"{ROOT}:{stand_ins}")
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = [row.split()[1] for row in done.stdout.splitlines() if row.startswith("skip")]
    assert skipped == ["self-test-cancelled", "notes", "resume", "framed", "quiesce", "old-epoch"]
    assert done.stdout.splitlines()[-1].endswith("was not run on hardware")
