"""The memory service's composition root."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from gms.server import Server, StartError
from gms.service import MemoryService

if TYPE_CHECKING:
    from gms.backends.host import HostBackend
    from gms.settings import GmsSettings


@asynccontextmanager
async def running(settings: GmsSettings) -> AsyncIterator[Server]:
    """A listening service, closed at the end. Raises StartError, whose text says what to change."""
    backend = _backend(settings.device)
    metrics = None
    if settings.metrics_port:
        from gms.metrics import Metrics  # 90 ms of imports that a service without metrics need not wait for

        metrics = Metrics()
    limit = None if settings.memory_limit is None else int(settings.memory_limit)
    service = MemoryService(backend, device=settings.device, limit_bytes=limit, observer=metrics)
    server = Server(service, settings.socket)
    exporter = None
    if metrics is not None:
        host, port = settings.metrics_host, settings.metrics_port
        try:
            exporter = metrics.serve(host, port, service.status, asyncio.get_running_loop())
        except OSError as error:
            raise StartError(f"Metrics cannot be served on {host}:{port}: {error.strerror or error}.") from error
    try:
        server.start()
        yield server
    finally:
        if exporter is not None:
            await asyncio.to_thread(exporter.shutdown)
            exporter.server_close()
        await server.close()


def _backend(device: str) -> HostBackend:
    if re.fullmatch(r"cpu:\d+", device):
        from gms.backends.host import HostBackend

        return HostBackend()
    raise StartError(f"The device {device!r} is unknown to this version; use cpu:0.")
