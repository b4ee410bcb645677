"""What cannot work is refused with one sentence, and nothing runs or lies around afterwards."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machine import UP, StartUp, hotspare

pytestmark = pytest.mark.process


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def refused(run_dir: Path, *flags: str, cwd: Path | None = None, **env: str) -> str:
    """The sentence with which ``up`` refuses; checks the rest."""
    done = hotspare(*UP, "--run-dir", str(run_dir), *flags, env=env, **({"cwd": cwd} if cwd else {}))
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert not run_dir.exists()
    return done.stderr.removeprefix("hotspare up: ").rstrip()


def test_a_port_in_use(tmp_path: Path, taken_port: int) -> None:
    assert refused(tmp_path / "run", "--port", str(taken_port)) == (
        f"port {taken_port} on 127.0.0.1 (the gateway's port) is in use; free it, or choose another with --port"
    )
    sentence = refused(tmp_path / "run", "--base-port", str(taken_port))
    assert sentence == (
        f"port {taken_port} on 127.0.0.1 (pod-0's serving port) is in use; free it, or choose another with --base-port"
    )


def test_ports_that_cannot_be(tmp_path: Path) -> None:
    assert "would need port 65549, and the last one is 65535" in refused(
        tmp_path / "run", "--base-port", "65500", "--pods", "5"
    )
    assert "cannot be both pod-0's (engine a) and the gateway's" in refused(
        tmp_path / "run", "--port", "18001", "--base-port", "18000"
    )
    assert refused(tmp_path / "run", "--host", "203.0.113.1").startswith("no port can be had on 203.0.113.1: ")


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    missing, empty, file = tmp_path / "missing", tmp_path / "empty", tmp_path / "file"
    empty.mkdir()
    file.write_text("")
    end = "; name another with --model or HOTSPARE_MODEL, or neither for the embedded SmolLM2"
    run, vllm = tmp_path / "run", ("--engine", "vllm")
    assert refused(run, *vllm, HOTSPARE_MODEL=str(missing)) == f"the model folder {missing} does not exist{end}"
    assert refused(run, *vllm, "--model", str(file)) == f"the model folder {file} is a file{end}"
    assert refused(run, *vllm, "--model", str(empty)) == (
        f"the folder {empty} holds no config.json, so it is no model in Hugging Face layout{end}"
    )


def test_an_unknown_option_and_an_unknown_variable(tmp_path: Path) -> None:
    assert refused(tmp_path / "run", "--podz", "2") == "unknown option --podz; did you mean --pods?"
    assert refused(tmp_path / "run", HOTSPARE_MAX_INFLIHGT="2").endswith(
        "did you mean HOTSPARE_MAX_INFLIGHT? all names are in docs/settings.md"
    )


@pytest.mark.parametrize("command", ["gateway", "pod", "engine", "gms", "status"])
def test_every_command_refuses_an_unknown_variable(command: str) -> None:
    done = hotspare(command, env={"HOTSPARE_LOG_FROMAT": "json"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"hotspare {command}: the environment variable HOTSPARE_LOG_FROMAT is unknown to hotspare: "
        "did you mean HOTSPARE_LOG_FORMAT? all names are in docs/settings.md\n"
    )


def test_help_is_given_whatever_the_environment() -> None:
    assert hotspare("--help", env={"HOTSPARE_LOG_FROMAT": "json"}).returncode == 0


def test_a_process_started_by_its_module_is_lenient() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app", "--help"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "HOTSPARE_LOG_FROMAT": "json"},
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 0


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be used: Not a directory" in refused(tmp_path / "file" / "run")


def test_a_refused_run_leaves_the_logs_of_the_one_before(tmp_path: Path, taken_port: int) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "gateway.log").write_text("what happened")
    for flags, env in ((["--port", str(taken_port)], {}), ([], {"HOTSPARE_MAX_INFLIGHT": "0"})):
        done = hotspare(*UP, "--run-dir", str(tmp_path / "run"), *flags, env=env)
        assert done.returncode == 2
        assert {path.name: path.read_text() for path in logs.iterdir()} == {"gateway.log": "what happened"}


def test_a_run_folder_that_is_taken(start_up: StartUp) -> None:
    machine = start_up()
    machine.until_ready()
    done = hotspare(*UP, "--run-dir", str(machine.run_dir))
    assert done.returncode == 2
    assert done.stderr == (
        f"hotspare up: another `hotspare up` (pid {machine.up.pid}) runs in {machine.run_dir}; "
        "stop it, or choose another folder with --run-dir\n"
    )
    assert machine.settled()["gateway"]["lifecycle"] == "ready"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HOTSPARE_MAX_INFLIGHT", "0"),  # the gateway's
        ("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", "soon"),
        ("HOTSPARE_KILL_AFTER_SECONDS", "1"),  # the pod's
        ("HOTSPARE_CAPACITY", "0"),  # the engines'
        ("HOTSPARE_HANDOVER_TIMEOUT_SECONDS", "0"),
        ("HOTSPARE_GRACEFUL_SHUTDOWN_EXCEPT", "chat,nonsense"),
        ("DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", "-1"),
        ("HOTSPARE_SIM_TTFT_SECONDS", "never"),
    ],
)
def test_what_a_process_would_refuse_is_refused_before_any_starts(tmp_path: Path, variable: str, value: str) -> None:
    sentence = refused(tmp_path / "run", **{variable: value}).lower()
    assert variable.lower() in sentence or variable.removeprefix("HOTSPARE_").lower() in sentence
    if variable.startswith("DYN_"):
        assert sentence.startswith(variable.lower())


def test_what_each_process_is_told_on_its_own_is_refused_for_nobody(start_up: StartUp) -> None:
    machine = start_up(HOTSPARE_WORKERS_FILE="/nowhere", HOTSPARE_ADMIN_PORTS="1,1", HOTSPARE_LOG_LEVEL="info")
    machine.until_ready()


def test_status_and_fault_where_nothing_runs(tmp_path: Path) -> None:
    for arguments in (["status"], ["status", "--json"], ["status", "--watch"]):
        done = hotspare(*arguments, "--run-dir", str(tmp_path))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"hotspare status: neither a pod nor a gateway runs in {tmp_path}; ")
    done = hotspare("fault", "kill-active", "pod-7", "--run-dir", str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"hotspare fault: there is no pod 'pod-7' in {tmp_path} (pods there: none)\n"
    assert list(tmp_path.iterdir()) == []


def test_a_fault_that_nobody_can_suffer(start_up: StartUp) -> None:
    machine = start_up("--shadows", "0", "--no-gms")
    machine.until_ready()
    done = hotspare("fault", "kill-shadow", "pod-0", "--run-dir", str(machine.run_dir))
    assert (done.returncode, done.stderr) == (
        1,
        "hotspare fault: no engine of pod-0 is STANDBY now (a is ACTIVE); nothing was done\n",
    )
    done = hotspare("fault", "kill-gms", "pod-0", "--run-dir", str(machine.run_dir))
    assert (done.returncode, done.stderr) == (
        1,
        "hotspare fault: pod-0 runs without a memory service; nothing was done\n",
    )
    done = hotspare("fault", "kill-active", "pod-1", "--run-dir", str(machine.run_dir))
    assert "(pods there: pod-0)" in done.stderr


def test_a_folder_with_an_app_of_its_own(tmp_path: Path) -> None:
    """``python -m app`` from a folder that holds somebody else's ``app`` package must run ours."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("raise SystemExit('not this one')")
    script = "import sys; sys.path.remove(''); from app.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, "gateway", "--port", "x"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == 2
    assert "hotspare gateway: " in done.stderr
    assert "not this one" not in done.stderr
