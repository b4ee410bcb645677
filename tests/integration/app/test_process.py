"""``python -m app`` as a process: what it prints, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedOK

from tests.integration.app.fake_worker import (
    MODEL,
    STREAM_HEAD,
    Behaviour,
    FakeWorker,
    answers,
    chunk,
    event,
    sends_and_cuts,
    streams_then_waits,
)

STARTED_SECONDS = 20.0

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def shell() -> None:
    """Not a matter of the shell."""


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts gateways; kills what is left of them."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HOTSPARE_", "DYN_"))}
        process = subprocess.Popen(
            [sys.executable, "-m", "app", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=inherited | environment,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """The line that contains the text. Ends with the process, or with the test's own time limit."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return line
    raise AssertionError(f"{text!r} was never said:\n{''.join(lines)}")


def listening(process: subprocess.Popen[str]) -> str:
    return read_until(process, "listening on ").split("listening on ")[1].split()[0]


def test_a_life(start: Start, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start("--port", "0", "--workers", "127.0.0.1:1", "--run-dir", str(run_dir))
    url = listening(process)
    announced = json.loads((run_dir / "gateway.json").read_text())
    assert announced == {"pid": process.pid, "host": "127.0.0.1", "port": int(url.rsplit(":", 1)[1])}
    assert httpx.get(f"{url}/live", trust_env=False).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("share", range(6))
def test_a_signal_while_it_is_imported(start: Start, tmp_path: Path, number: signal.Signals, share: int) -> None:
    """At any moment of the start; the first is that in which it holds signals, long before its settings are known."""
    process = start("--port", "0", "--workers", "127.0.0.1:1", "--run-dir", str(tmp_path))
    until_held(process.pid)
    time.sleep(0.08 * share)
    process.send_signal(number)
    assert process.wait(STARTED_SECONDS) == 0
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    assert list(tmp_path.iterdir()) == []


def until_held(pid: int) -> None:
    """The process holds SIGTERM and SIGINT, or hears them already."""
    both = 1 << (signal.SIGTERM - 1) | 1 << (signal.SIGINT - 1)
    deadline = time.monotonic() + STARTED_SECONDS
    while True:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        blocked, caught = int(lines["SigBlk"], 16), int(lines["SigCgt"], 16)
        if blocked & both == both or caught & both == both:
            return
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_signal_before_it_serves(start: Start, tmp_path: Path, number: signal.Signals, processes: str) -> None:
    process = start("--port", "0", "--workers", "127.0.0.1:1", "--run-dir", str(tmp_path), "--processes", processes)
    deadline = time.monotonic() + STARTED_SECONDS
    while not (tmp_path / "gateway.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(number)
    assert process.wait(10) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_limit_of_open_files_that_is_too_low(start: Start) -> None:
    """Whoever does not fit is told so, and those who do are served."""
    shell = f'ulimit -n 64; exec "{sys.executable}" -m app "$@"'
    with subprocess.Popen(
        ["bash", "-c", shell, "app", "--port", "0", "--workers", "127.0.0.1:1", "--wait-for-worker-seconds", "0.01"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            said = read_until(process, "the limit of open files")
            room = int(said.partition("has room for ")[2].split()[0])
            url = listening(process)
            host, port = url.removeprefix("http://").split(":")
            answers = []
            with contextlib.ExitStack() as stack:
                clients = [
                    stack.enter_context(socket.create_connection((host, int(port)), 10)) for _ in range(room + 3)
                ]
                for client in clients:
                    client.sendall(b"POST /tokenize HTTP/1.1\r\nhost: g\r\ncontent-length: 2\r\n\r\n{}")
                    answers.append(client.recv(10_000))
            assert all(b"no_worker" in answer for answer in answers[:room])
            assert all(b"too_many_connections" in answer for answer in answers[room:])
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()


def test_json_logs_have_no_prompt(start: Start) -> None:
    process = start(
        "--port", "0", "--workers", "127.0.0.1:1", HOTSPARE_LOG_FORMAT="json", HOTSPARE_WAIT_FOR_WORKER_SECONDS="0.05"
    )
    url = json.loads(read_until(process, "listening on "))["message"].split()[-1]
    body = {"model": "m", "messages": [{"role": "user", "content": "my secret"}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"x-request-id": "r-1"}, trust_env=False)
    assert answer.status_code == 503
    line = read_until(process, "r-1")
    document = json.loads(line)
    assert (document["message"], document["error"]) == ("/v1/chat/completions 503", "no_worker")
    assert (document["fault"], document["retryable"]) == ("upstream", True)
    assert "secret" not in line


def test_the_access_log_can_be_switched_off(start: Start) -> None:
    process = start(
        "--port", "0", "--workers", "127.0.0.1:1", "--no-access-log", HOTSPARE_WAIT_FOR_WORKER_SECONDS="0.05"
    )
    url = listening(process)
    assert httpx.post(f"{url}/tokenize", content=b"{}", trust_env=False).status_code == 503
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=10)[1]
    assert "drained in" in rest
    assert "/tokenize" not in rest


def test_nobody_reads_the_log(start: Start) -> None:
    """The pipe is full long before the end of this; requests are answered all the same, and the drain ends."""
    process = start("--port", "0", "--workers", "127.0.0.1:1", HOTSPARE_WAIT_FOR_WORKER_SECONDS="0.001")
    url = listening(process)
    assert process.stderr is not None
    fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
    with httpx.Client(trust_env=False) as client:
        for _ in range(100):  # of about 150 bytes each
            assert client.post(f"{url}/tokenize", content=b"{}").status_code == 503
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


@pytest.mark.parametrize("form", ["console", "json"])
async def test_nobodys_words_are_logged_at_any_level(start: Start, form: str) -> None:
    """Also where a request goes wrong: what a client said, and what a worker says about it."""
    words = "my-very-own-words"
    chat = {"model": "tiny", "messages": [{"role": "user", "content": words}]}
    whole = json.dumps(chat).encode()
    repeated = {"message": words, "type": "x", "param": None, "code": "x"}
    async with FakeWorker() as worker:
        process = start(
            *("--port", "0", "--workers", worker.address, "--max-body-bytes", "4096", "--resume-limit", "1"),
            HOTSPARE_LOG_LEVEL="debug",
            HOTSPARE_LOG_FORMAT=form,
        )
        line = await asyncio.to_thread(read_until, process, "listening on ")
        url = line.split("listening on ")[1].split('"')[0].split()[0]
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=10) as client:

            async def post(body: bytes, *behaviours: Behaviour) -> int:
                worker.will(*behaviours)
                answer = await client.post("/v1/chat/completions", content=body)
                return answer.status_code

            assert await post(whole) == 200
            for body, status in (
                (whole[:-1], 400),
                (whole.replace(b'"tiny"', b"tiny"), 400),
                (json.dumps(words).encode(), 400),
                (words.encode() + b"\xff", 400),
                (json.dumps({"model": words}).encode(), 404),
                (whole + b" " * 5000, 413),
            ):
                assert await post(body) == status, body
            assert await post(whole, answers(400, {"error": repeated})) == 400
            assert await post(whole, answers(500, {"detail": words})) == 500
            assert await post(whole, *[sends_and_cuts(words.encode() + b"\r\n\r\n")] * 2) == 502
            broken = sends_and_cuts(STREAM_HEAD + chunk(event(words)) + b"no chunk")
            assert await post(json.dumps(chat | {"stream": True}).encode(), broken, broken) == 502
            assert (await client.get(f"/v1/models/{words}")).status_code == 404
        process.send_signal(signal.SIGTERM)
        _, rest = await asyncio.to_thread(process.communicate)
    assert rest.count("/v1/chat/completions") == 11 + 2  # a line for each, and warnings of two that were lost
    assert words not in rest


def test_a_second_signal_ends_it_at_once(start: Start, tmp_path: Path) -> None:
    process = start(
        "--port", "0", "--workers", "127.0.0.1:1", "--run-dir", str(tmp_path), "--wait-for-worker-seconds", "60"
    )
    url = listening(process)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /tokenize HTTP/1.1\r\nhost: g\r\ncontent-length: 2\r\n\r\n{}")
        deadline = time.monotonic() + 5
        while httpx.get(f"{url}/status", trust_env=False).json()["inflight"] != 1:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        read_until(process, "draining")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 70  # and not 0, after the drain
    assert not (tmp_path / "gateway.json").exists()


async def test_a_slow_reader_gets_its_last_byte_after_sigterm(start: Start) -> None:
    document = {"text": "x" * 3_900_000}
    async with FakeWorker() as worker:
        worker.will(answers(document=document))
        process = start("--port", "0", "--workers", worker.address, "--drain-timeout-seconds", "20")
        host, port = (await asyncio.to_thread(listening, process)).removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(b'POST /tokenize HTTP/1.1\r\nhost: g\r\ncontent-length: 16\r\n\r\n{"model":"tiny"}')
            head = await asyncio.to_thread(client.recv, 100)
            assert head.startswith(b"HTTP/1.1 200")
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(2.5)  # longer than the server waits for connections once nothing is in flight
            rest = await asyncio.to_thread(receive_all, client)
        assert json.loads((head + rest).partition(b"\r\n\r\n")[2]) == document
        assert await asyncio.to_thread(process.wait, 10) == 0


async def test_a_realtime_session_after_sigterm(start: Start) -> None:
    """The server's own shutdown would have closed it at once, with 1012."""
    async with FakeWorker() as worker:
        worker.will(streams_then_waits(event("a")))
        process = start("--port", "0", "--workers", worker.address, "--drain-timeout-seconds", "20")
        address = (await asyncio.to_thread(listening, process)).removeprefix("http://")
        async with connect(f"ws://{address}/v1/realtime?model={MODEL}", proxy=None) as session, asyncio.timeout(15):
            item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
            await session.send(json.dumps({"type": "conversation.item.create", "item": item}))
            await session.send('{"type":"response.create"}')
            call = await worker.call()
            process.send_signal(signal.SIGTERM)
            while json.loads(await session.recv()).get("error", {}).get("code") != "draining":
                pass
            call.go.set()
            while (done := json.loads(await session.recv()))["type"] != "response.done":
                pass
            assert done["response"]["status"] == "completed"
            with pytest.raises(ConnectionClosedOK) as closed:
                await session.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001
        assert await asyncio.to_thread(process.wait, 10) == 0


def receive_all(client: socket.socket) -> bytes:
    client.settimeout(20)
    return b"".join(iter(lambda: client.recv(1 << 20), b""))


WRONG = {
    "unrecognized arguments: --nonsense": ["--nonsense"],
    "port=x": ["--port", "x"],
    "worker address 'x'": ["--workers", "x"],
    "name another with --host or HOTSPARE_HOST": ["--host", "host.invalid", "--port", "0"],
    "cannot write": ["--port", "0", "--run-dir", "/dev/null/x"],
    "parent process 1": ["--port", "0", "--parent-pid", "1"],
}


def test_what_is_wrong_is_one_sentence() -> None:
    """Each in a process of its own, forked from one that has the imports behind it: they take most of the time."""
    script = (
        "import json, os, sys\n"
        "from app.start import main\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    if (child := os.fork()) == 0:\n"
        "        sys.exit(main(arguments))\n"
        "    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "    print('ended with', code, file=sys.stderr, flush=True)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, json.dumps(list(WRONG.values()))],
        env={k: v for k, v in os.environ.items() if not k.startswith(("HOTSPARE_", "DYN_"))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=STARTED_SECONDS,
        check=True,
    )
    lines = ran.stderr.splitlines()
    assert lines[1::2] == ["ended with 2"] * len(WRONG), ran.stderr
    for said, line in zip(WRONG, lines[::2], strict=True):
        assert said in line


def test_a_port_in_use(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start("--port", str(port))
        _, errors = process.communicate(timeout=STARTED_SECONDS)
    assert process.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in errors
    assert errors.count("\n") == 1


def test_a_parent_that_was_gone_before_it_could_be_watched() -> None:
    """The kernel tells of deaths that come after we asked it to, and of no earlier one."""
    late = (
        "import os, sys, time\n"
        "from app.start import main\n"
        "parent = int(sys.argv[1])\n"
        "while os.getppid() == parent:\n"
        "    time.sleep(0.001)\n"
        "sys.exit(main(['--port', '0', '--workers', '127.0.0.1:1', '--parent-pid', str(parent)]))\n"
    )
    read, write = os.pipe()
    script = (
        "import os, subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', {late!r}, str(os.getpid())],\n"
        f"                     stdout=subprocess.DEVNULL, stderr={write})\n"
        "print(os.getpid(), p.pid)\n"
    )
    with os.fdopen(read) as errors:
        ran = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, pass_fds=[write], check=True)
        os.close(write)
        parent, gateway = map(int, ran.stdout.split())
        said = errors.readline()
        expected = f"hotspare gateway: the parent process {parent} has ended already\n"
        if said != expected:
            os.kill(gateway, signal.SIGKILL)  # it serves, and nobody else would end it
        assert said == expected
        assert errors.read() == ""


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed, so that only the kernel can tell the gateway."""
    script = (
        "import os, subprocess, sys, time\n"
        f"p = subprocess.Popen([{sys.executable!r}, '-m', 'app', '--port', '0', '--workers', '127.0.0.1:1',"
        " '--parent-pid', str(os.getpid())], stderr=subprocess.PIPE, text=True)\n"
        "line = next(l for l in p.stderr if 'listening' in l)\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        gateway = int(parent.stdout.readline())
        pidfd = os.pidfd_open(gateway)
        try:
            parent.kill()
            readable, _, _ = select.select([pidfd], [], [], 5)
            assert readable
        finally:
            os.close(pidfd)


def test_a_process_that_can_open_no_more_files_says_so_once(start: Start) -> None:
    """Nobody else would: the loop closes new connections unheard."""
    process = start("--port", "0", "--workers", "127.0.0.1:1")
    url = listening(process)
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, hard))
    line = read_until(process, "no more files can be opened")
    assert " error " in line
    assert "has reached its limit of 3: raise it (ulimit -n" in line
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (hard, hard))
    assert httpx.get(f"{url}/live", trust_env=False).status_code == 200
    process.terminate()
    assert process.stderr is not None
    rest = process.stderr.read()
    assert "no more files" not in rest
    assert "Traceback" not in rest
    assert process.wait(STARTED_SECONDS) == 0
