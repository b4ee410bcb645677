"""The memory service's composition root."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import xxhash

from gms.allocations import MAX_CHUNKS
from gms.backends.base import DeviceError, Hasher, MemoryBackend
from gms.journal import Journal
from gms.protocol import MAX_FDS, GmsError
from gms.server import MAX_CLIENTS, Server
from gms.service import MemoryService
from gms.socket_path import SocketPath, StartError

if TYPE_CHECKING:
    from gms.metrics import Closeable, Metrics
    from gms.settings import GmsSettings


log: Final = logging.getLogger("gms")

LOOK_SECONDS: Final = 0.5
"""Between two looks at whether the socket is still there."""
OTHER_FILES: Final = 4 * MAX_CLIENTS + 4 * MAX_FDS
"""Kept for what is no chunk, or half of all files if there are few: a connection and the pidfds of an engine and some
ranks for each client, and descriptors under way."""


@asynccontextmanager
async def running(settings: GmsSettings) -> AsyncIterator[asyncio.Future[DeviceError]]:
    """A listening service, closed at the end; what it gives is done when the device fails, and the service must end
    then. Raises StartError, whose text says what to change."""
    loop = asyncio.get_running_loop()
    failure: asyncio.Future[DeviceError] = loop.create_future()

    def first(error: DeviceError) -> None:
        if not failure.done():
            failure.set_result(error)

    def fail(error: DeviceError) -> None:
        loop.call_soon_threadsafe(first, error)

    async with AsyncExitStack() as stack:
        backend = _backend(settings)
        path = stack.enter_context(SocketPath(settings.socket))
        metrics = None
        if settings.metrics_port:
            from gms.metrics import Metrics  # 90 ms of imports that a service without metrics need not wait for

            metrics = Metrics()
        try:
            service = MemoryService(
                backend,
                device=settings.device,
                algorithm=hasher,
                algorithm_name="xxh3_128",
                journal=_journal(settings.socket),
                limit_bytes=None if settings.memory_limit is None else int(settings.memory_limit),
                max_chunks=_max_chunks(backend.descriptors_per_chunk),
                adopt_seconds=settings.adopt_timeout_seconds,
                observer=metrics,
                fail=fail,
            )
        except GmsError as error:
            raise StartError(str(error)) from error
        stack.callback(service.close)
        server = Server(service)
        stack.push_async_callback(server.close)
        if metrics is not None:
            exporter = _export(metrics, service, settings)
            stack.callback(exporter.server_close)
            stack.push_async_callback(asyncio.to_thread, exporter.shutdown)
        server.start(path.listen())
        keeping = asyncio.create_task(_keep_listening(path, server), name="socket")
        stack.push_async_callback(asyncio.wait, (keeping,))
        stack.callback(keeping.cancel)
        yield failure


async def _keep_listening(path: SocketPath, server: Server) -> None:
    """Whoever removes a running pod's folder takes the socket away. Clients that are connected notice nothing; those to
    come find another one once the folder is back."""
    told = ""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            listener = path.restore()
        except StartError as error:
            if str(error) != told:
                told = str(error)
                log.error("the socket was removed, and nobody can connect: %s", error)
            continue
        except Exception as error:  # nobody waits for this task, and no client that is connected needs it
            if repr(error) != told:
                told = repr(error)
                log.exception("the socket's place cannot be looked after, and is tried again")
            continue
        told = ""
        if listener is not None:
            server.start(listener)
            log.warning("the socket %s was removed while the service runs, and is there again", path.path)


def _export(metrics: Metrics, service: MemoryService[Any], settings: GmsSettings) -> Closeable:
    host, port = settings.metrics_host, settings.metrics_port
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return metrics.serve(host, port, service.status, asyncio.get_running_loop())
    except (OSError, UnicodeError) as error:
        unknown = isinstance(error, UnicodeError | socket.gaierror)
        if unknown or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            hint = "name an address of this machine with HOTSPARE_GMS_METRICS_HOST"
        else:
            hint = "choose another port with --metrics-port (of a pod: --gms-metrics-port) or HOTSPARE_GMS_METRICS_PORT"
        why = getattr(error, "strerror", None) or error
        raise StartError(f"Metrics cannot be served on {place}: {why}; {hint}.") from error


def hasher() -> Hasher:
    """XXH3, 128 bits: fast, and made to tell apart what was changed by accident. It proves nothing against malice."""
    return xxhash.xxh3_128()


def _journal(socket: str) -> Journal:
    folder = Path(f"{socket}.state")
    try:
        return Journal(folder)
    except OSError as error:
        raise StartError(f"The folder {folder} cannot be used: {error.strerror or error}.") from error


def _max_chunks(descriptors_per_chunk: int) -> int:
    """So many that clients can still connect, and send and be sent descriptors."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CHUNKS
    return min((files - min(OTHER_FILES, files // 2)) // descriptors_per_chunk, MAX_CHUNKS)


def _backend(settings: GmsSettings) -> MemoryBackend[Any]:
    chunk = None if settings.chunk_size is None else int(settings.chunk_size)
    found = re.fullmatch(r"(cpu|cuda):([0-9]{1,4})", settings.device)
    if found is None:
        raise StartError(
            f"The device {settings.device!r} is unknown to this version; use cpu:0, cpu:1, ... or cuda:0, cuda:1, ..."
        )
    try:
        if found[1] == "cpu":
            from gms.backends.host import HostBackend

            return HostBackend(settings.device) if chunk is None else HostBackend(settings.device, chunk_bytes=chunk)
        from gms.backends.beside import BesideHost
        from gms.backends.cuda import CudaBackend

        gpu = CudaBackend(int(found[2])) if chunk is None else CudaBackend(int(found[2]), chunk_bytes=chunk)
        return BesideHost(gpu)
    except (DeviceError, GmsError, ValueError) as error:
        raise StartError(f"The device {settings.device} cannot be used: {error}") from error
