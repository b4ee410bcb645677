"""`python -m gms` as a process: how it starts, refuses to start, and ends."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from gms.client import GmsClient, GmsError, LeaseMode
from tests.support.processes import until
from workers.children import logged_error
from workers.ports import PortReservation

pytestmark = pytest.mark.process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_when_asked_and_takes_its_socket_along(serve: Any, socket_path: Path, number: signal.Signals) -> None:
    service = serve()
    with GmsClient.connect(socket_path, engine="a", instance="test") as client:
        client.attach("kv", LeaseMode.RW).allocate("pages", 1 << 20).close()
        service.signal(number)
        assert service.wait() == 0
        assert not socket_path.exists()
        assert "Traceback" not in service.rest()


def test_kill_9_is_a_clear_error_and_the_next_service_takes_the_path(serve: Any, socket_path: Path) -> None:
    service = serve()
    with GmsClient.connect(socket_path, engine="a", instance="test") as client:
        lease = client.attach("kv", LeaseMode.RW)
        service.kill()
        assert select.select([client.fileno()], [], [], 10)[0]
        for call in (client.status, client.status, lease.release):
            with pytest.raises(GmsError, match="connect and attach anew") as caught:
                call()
            assert (caught.value.code, caught.value.retryable) == ("service_gone", True)
    assert socket_path.exists()
    serve()
    with GmsClient.connect(socket_path, engine="a", instance="test") as client:
        assert client.attach("kv", LeaseMode.RW).fresh


def test_connect_waits_for_a_service_that_is_starting(serve: Any, actor: Any, socket_path: Path) -> None:
    early = actor('say("up"); say(connect().status().device)')
    early.expect("up")
    serve()
    assert early.line() == "cpu:0"


def test_connect_without_a_service_says_so(socket_path: Path) -> None:
    with pytest.raises(GmsError, match="start it, or check the path") as caught:
        GmsClient.connect(socket_path, engine="a", instance="test", timeout_seconds=0.02)
    assert caught.value.retryable


def test_a_port_in_use(spawn: Any, socket_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = spawn(["-m", "gms", "--socket", str(socket_path), "--metrics-port", str(port)], stream="stderr")
        assert process.wait() == 2
        assert process.rest() == (
            f"gms: Metrics cannot be served on 127.0.0.1:{port}: Address already in use; choose another port with "
            "--metrics-port (of a pod: --gms-metrics-port) or HOTSPARE_GMS_METRICS_PORT.\n"
        )
    assert not socket_path.exists()


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_pod_that_starts_it_gets_a_log_line(spawn: Any, socket_path: Path, form: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = ["--socket", str(socket_path), "--metrics-port", str(taken.getsockname()[1])]
        environment = {"HOTSPARE_PARENT_PID": str(os.getpid()), "HOTSPARE_LOG_FORMAT": form}
        process = spawn(["-m", "gms", *flags], environment, "stderr")
        assert process.wait() == 2
        said = logged_error(process.rest().rstrip().encode())
    assert said is not None
    assert "of a pod: --gms-metrics-port" in said


@pytest.mark.parametrize(
    ("flags", "environment", "sentence"),
    [
        (["--device", "cpu:x"], {}, "'cpu:x' is unknown"),
        (["--chunk-size", "5000"], {}, "chunks must be a multiple of 4096 bytes"),
        (["--device", "tpu"], {}, "'tpu' is unknown"),
        (["--memory-limit", "lots"], {}, "HOTSPARE_GMS_MEMORY_LIMIT or --memory-limit: "),
        (["--memory-limit", "0"], {}, "HOTSPARE_GMS_MEMORY_LIMIT or --memory-limit: "),
        (["--adopt-timeout-seconds", "-1"], {}, "HOTSPARE_GMS_ADOPT_TIMEOUT_SECONDS or --adopt-timeout-seconds: "),
        (["--metrics-port", "65536"], {}, "HOTSPARE_GMS_METRICS_PORT or --metrics-port: "),
        (["--socket", "x" * 108], {}, "more than 107 bytes"),
        (["--socket", "/proc/nowhere/gms.sock"], {}, "cannot be made"),
        ([], {"HOTSPARE_GMS_LOG_LEVEL": "LOUD"}, "HOTSPARE_GMS_LOG_LEVEL or HOTSPARE_LOG_LEVEL: "),
        ([], {"HOTSPARE_LOG_FORMAT": "xml"}, "HOTSPARE_LOG_FORMAT: "),
        ([], {"HOTSPARE_PARENT_PID": "1"}, "is gone, or is not the parent"),
    ],
    ids=str,
)
def test_bad_configuration_is_one_sentence(
    spawn: Any, socket_path: Path, flags: list[str], environment: dict[str, str], sentence: str
) -> None:
    process = spawn(["-m", "gms", "--socket", str(socket_path), *flags], environment, "stderr")
    assert process.wait() == 2
    said = process.rest()
    assert sentence in said
    assert said.startswith("gms: ")
    assert said.count("\n") == 1


def test_no_socket_given(spawn: Any, tmp_path: Path) -> None:
    """The pod's folder is where engines look for it."""
    process = spawn(["-m", "gms"], {"HOTSPARE_RUN_DIR": str(tmp_path / "run"), "HOTSPARE_POD": "p-1"}, "stderr")
    path = tmp_path / "run" / "p-1" / "gms-cpu-0.sock"
    until(path.exists, saying="the socket is there")
    assert [folder.stat().st_mode & 0o777 for folder in (path.parent, tmp_path / "run")] == [0o700, 0o700]
    process.process.terminate()
    assert process.wait() == 0


def test_the_environment_configures_and_flags_win(serve: Any, socket_path: Path) -> None:
    environment = {"HOTSPARE_GMS_MEMORY_LIMIT": "1GiB", "HOTSPARE_GMS_DEVICE": "cpu:1", "HOTSPARE_LOG_FORMAT": "json"}
    service = serve("--memory-limit", "512MiB", environment=environment)
    with GmsClient.connect(socket_path, engine="a", instance="test", device="cpu:1") as client:
        assert client.status().memory_limit == 512 << 20
    service.signal(signal.SIGTERM)
    lines = [json.loads(line) for line in service.rest().splitlines()]
    assert lines[-1]["message"] == "memory service for cpu:1 ends"


def test_it_does_not_outlive_its_parent(spawn: Any, socket_path: Path, actor: Any) -> None:
    code = (
        "import os, subprocess, sys\n"
        "os.environ['HOTSPARE_PARENT_PID'] = str(os.getpid())\n"
        "service = subprocess.Popen([sys.executable, '-m', 'gms', '--socket', sys.argv[1]])\n"
        "print(service.pid, flush=True)\nsys.stdin.read()"
    )
    parent = spawn(["-c", code, str(socket_path)])
    pidfd = os.pidfd_open(int(parent.line()))
    try:
        with GmsClient.connect(socket_path, engine="a", instance="test") as client:
            parent.kill()
            assert select.select([client.fileno()], [], [], 10)[0]
        assert select.select([pidfd], [], [], 10)[0]
    finally:
        os.close(pidfd)


def test_metrics(serve: Any, socket_path: Path) -> None:
    with PortReservation() as free:
        serve("--metrics-port", str(free.port), "--memory-limit", "64MiB")
    with GmsClient.connect(socket_path, engine="a", instance="test") as client:
        client.attach("kv", LeaseMode.RW).allocate("pages", 1 << 20).close()
        with pytest.raises(GmsError):
            client.attach("weights/0a1b", LeaseMode.RO, timeout_seconds=0)
        with urllib.request.urlopen(f"http://127.0.0.1:{free.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    assert "_created" not in text
    for line in [
        'hotspare_gms_pool_bytes{pool="kv"} 1.048576e+06',
        'hotspare_gms_leases{mode="rw",pool="kv"} 1.0',
        'hotspare_gms_attach_seconds_count{mode="rw",pool="kv"} 1.0',
        'hotspare_gms_refused_total{code="timeout"} 1.0',
        "hotspare_gms_memory_limit_bytes 6.7108864e+07",
        "hotspare_gms_clients 1.0",
    ]:
        assert line in text.replace('{pool="kv",mode="rw"}', '{mode="rw",pool="kv"}')


def test_the_core_needs_nothing_but_msgspec(spawn: Any) -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "import gms.server, gms.client, gms.mapping, gms.backends.host\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(roots - set(sys.stdlib_module_names)), flush=True)"
    )
    process = spawn(["-c", code])
    assert process.line() == "['gms', 'msgspec', 'typing_extensions']"  # the last one is msgspec's own
