"""The gateways: how each is found, which version it is, and how it is started in front of the mock workers.

All on one core, round robin over the same workers, limits out of the way. Hotspare with everything that a user would
run with; the others as their documentation starts them, without access log.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from app import compiled
from app.cli.bench.gateway.children import Child, clean_environment
from app.cli.bench.gateway.figures import DIRECT, OURS
from app.cli.bench.system import BenchError
from app.cli.launch import module_command, safe_environment
from workers.ports import PortReservation

READY_SECONDS: Final = 90.0
POLL_SECONDS: Final = 0.05
MAX_REQUESTS: Final = 20_000
PROBE: Final = b'{"model":"%s","messages":[{"role":"user","content":"ready?"}],"max_tokens":1}'


class NotInstalledError(Exception):
    """A peer is not there; the message says what installs it."""


class Surroundings(NamedTuple):
    """What a gateway is started with."""

    launcher: Path
    folder: Path
    workers: tuple[int, ...]
    core: frozenset[int]
    key: str
    """What every gateway's clients show, and ours asks for."""
    model: str = "mock-model"
    """What the workers serve."""


class Running(NamedTuple):
    """A gateway that answers. Without a child it is a worker itself."""

    name: str
    port: int
    child: Child | None
    key: str


class Gateway(NamedTuple):
    """One kind: its name, its version, and the command that starts it on a port in a folder. A guarded one must refuse
    requests without the key."""

    name: str
    version: str
    command: Callable[[Surroundings, int], Sequence[str]]
    guarded: bool = False


def find(name: str, peers: Path) -> Gateway:
    """The gateway of this name.

    Raises:
        NotInstalledError: it is a peer that is not there.
    """
    return _FINDERS[name](peers)


def _hotspare(_: Path) -> Gateway:
    def command(around: Surroundings, port: int) -> Sequence[str]:
        keys = _secret(around.folder / "api-keys", around.key)
        token = _secret(around.folder / "worker-token", secrets.token_urlsafe())
        return module_command(
            "app",
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--workers", ",".join(f"127.0.0.1:{worker}" for worker in around.workers)),
            *("--api-keys-file", str(keys), "--worker-token-file", str(token)),
            *("--max-inflight", str(MAX_REQUESTS), "--log-format", "json"),
        )

    how = "compiled" if compiled.fit() else "interpreted"
    return Gateway(OURS, f"{metadata.version('hotspare')} ({how})", command, guarded=True)


def _secret(path: Path, value: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(value)
    return path


_NGINX: Final = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log error;
{user}
events {{ worker_connections {connections}; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  keepalive_requests 100000000;
  upstream workers {{ {servers} keepalive 4096; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
"""


def _nginx(_: Path) -> Gateway:
    program = shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))
    if program is None:
        raise NotInstalledError("not installed (Debian, Ubuntu: apt-get install nginx-light)")
    said = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stderr

    def command(around: Surroundings, port: int) -> Sequence[str]:
        configuration = around.folder / "nginx.conf"
        configuration.write_text(
            _NGINX.format(
                folder=around.folder,
                port=port,
                connections=2 * MAX_REQUESTS,
                servers=" ".join(f"server 127.0.0.1:{worker};" for worker in around.workers),
                # Its temporary folders are ours alone.
                user="user root root;" if os.geteuid() == 0 else "",
            )
        )
        return [program, "-c", str(configuration), "-e", str(around.folder / "nginx-error.log")]

    return Gateway("nginx", said.strip().rpartition("/")[2], command)


def _router(name: str, program: Sequence[str], level: str) -> Callable[[Path], Gateway]:
    def finder(peers: Path) -> Gateway:
        binaries = (peers / name / "bin").resolve()
        if not (binaries / "python").exists():
            raise NotInstalledError(f"not installed in {peers} (make bench-peers)")
        found = sorted((peers / name).glob(f"lib/python*/site-packages/{name.replace('-', '_')}-*.dist-info"))
        if not found:
            raise NotInstalledError(f"{peers / name} does not have it (make bench-peers)")

        def command(around: Surroundings, port: int) -> Sequence[str]:
            return [
                *(str(binaries / program[0]), *program[1:]),
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--worker-urls", *(f"http://127.0.0.1:{worker}" for worker in around.workers)),
                *("--policy", "round_robin", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
                *("--log-level", level, "--max-concurrent-requests", str(MAX_REQUESTS)),
            ]

        return Gateway(name, found[-1].name.removesuffix(".dist-info").rpartition("-")[2], command)

    return finder


_FINDERS: Final[Mapping[str, Callable[[Path], Gateway]]] = {
    OURS: _hotspare,
    "nginx": _nginx,
    "vllm-router": _router("vllm-router", ("vllm-router",), "warning"),
    "sglang-router": _router("sglang-router", ("python", "-m", "sglang_router.launch_router"), "warn"),
}
PEERS: Final = tuple(name for name in _FINDERS if name != OURS)


def direct(around: Surroundings) -> Running:
    """The base line."""
    return Running(DIRECT, around.workers[0], None, around.key)


@contextlib.contextmanager
def started(gateway: Gateway, around: Surroundings) -> Iterator[Running]:
    """The gateway, once it has answered a request; ended on leaving.

    Raises:
        BenchError: it does not start, or does not answer in time.
    """
    log = around.folder / f"{gateway.name}.log"
    environment = safe_environment(clean_environment(os.environ))
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(PortReservation()).port
        command = gateway.command(around, port)
        child = stack.enter_context(Child(around.launcher, command, cores=around.core, log=log, env=environment))
        deadline = time.monotonic() + READY_SECONDS
        while not _answers(port, around.key, around.model):
            if child.code is not None:
                raise BenchError(f"{gateway.name} ended with {child.code} at its start:\n{child.log_tail()}")
            if time.monotonic() > deadline:
                raise BenchError(f"{gateway.name} did not answer within {READY_SECONDS:g} s:\n{child.log_tail()}")
            time.sleep(POLL_SECONDS)
        if gateway.guarded and _answers(port, "", around.model):
            raise BenchError(f"{gateway.name} answers without the key, so it does not run as it is to be measured")
        yield Running(gateway.name, port, child, around.key)


def free_port() -> int:
    """A port that was free just now, for what a peer listens on beside the port that is asked."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int, key: str, model: str) -> bool:
    try:
        answer = ask(port, "/v1/chat/completions", PROBE % model.encode(), key)
    except (OSError, ValueError):
        return False
    return isinstance(answer, dict) and "choices" in answer


_opener: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(port: int, path: str, body: bytes | None = None, key: str = "") -> object:
    """A JSON document of a server on this machine; with a body, posted."""
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=body, headers=headers)
    with _opener.open(request, timeout=10) as response:
        return json.loads(response.read())
