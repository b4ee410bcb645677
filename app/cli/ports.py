"""The TCP ports of ``hotspare up``: given ones are tried before anything starts, free ones are held until it ends."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack

from app.address import Address
from app.cli.errors import CliError
from app.cli.plan import (
    LOOPBACK,
    MAX_PORT,
    PodPlan,
    UpOptions,
    fixed_pod,
    free_pod,
    last_port,
    ports_needed,
)
from workers.exit_codes import ExitCode
from workers.ports import PortReservation


def assign_ports(options: UpOptions, stack: ExitStack) -> tuple[int, list[PodPlan]]:
    """The gateway's port and every pod's. Reservations belong to ``stack``.

    Raises:
        CliError: a port is in use, or there is no such port or address.
    """
    port = options.port or _reserve(options.host, stack)
    if options.base_port:
        if last_port(options) > MAX_PORT:
            raise _bad(
                f"{options.pods} pods from port {options.base_port} on would need port {last_port(options)}, "
                f"and the last one is {MAX_PORT}; choose a lower --base-port"
            )
        pods = [fixed_pod(options, index) for index in range(options.pods)]
    else:
        pods = [
            free_pod(options, index, [_reserve(LOOPBACK, stack) for _ in range(ports_needed(options))])
            for index in range(options.pods)
        ]
    for pod in pods:
        if purpose := pod.ports().get(port):
            raise _bad(f"port {port} cannot be both {pod.name}'s ({purpose}) and the gateway's; choose another --port")
    if options.port:
        _try(options.host, options.port, "the gateway's port", "--port")
    if options.base_port:
        for pod in pods:
            for number, purpose in pod.ports().items():
                _try(LOOPBACK, number, f"{pod.name}'s {purpose}", "--base-port")
    return port, pods


def _reserve(host: str, stack: ExitStack) -> int:
    try:
        return stack.enter_context(PortReservation(host)).port
    except OSError as error:
        raise _bad(f"no port can be had on {host}: {error.strerror or error}; choose another --host") from error


def _try(host: str, port: int, purpose: str, flag: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _bad(
                f"port {port} on {host} ({purpose}) is in use; free it, or choose another with {flag}"
            ) from error
        raise _bad(
            f"{Address(host, port)} ({purpose}) cannot be used: {error.strerror or error}; see {flag} and --host"
        ) from error


def _bad(sentence: str) -> CliError:
    return CliError(sentence, code=ExitCode.BAD_CONFIGURATION)
