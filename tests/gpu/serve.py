"""The memory service on a bare machine: composed without settings, metrics and a hash library, which are handed in.

`python -m tests.gpu.serve --socket PATH --device cuda:0` until SIGTERM; the flags are those of `hotspare gms`, sizes in
bytes. Exit codes: 0 ended as asked, 1 the device failed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from gms.backends.base import DeviceError, Hasher, MemoryBackend
from gms.journal import Journal
from gms.server import Server
from gms.service import MemoryService
from gms.socket_path import SocketPath


def hasher() -> Hasher:
    return hashlib.blake2b(digest_size=16)


def backend(device: str, chunk_bytes: int | None) -> MemoryBackend[Any]:
    kind, _, number = device.partition(":")
    more = {} if chunk_bytes is None else {"chunk_bytes": chunk_bytes}
    if kind == "cpu":
        from gms.backends.host import HostBackend

        return HostBackend(device, **more)
    from gms.backends.beside import BesideHost
    from gms.backends.cuda import CudaBackend

    return BesideHost(CudaBackend(int(number), **more))


async def serve(arguments: argparse.Namespace) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[DeviceError | None] = loop.create_future()

    def end(error: DeviceError | None) -> None:
        if not ended.done():
            ended.set_result(error)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, None)
    memory = backend(arguments.device, arguments.chunk_size)
    with SocketPath(arguments.socket) as path:
        service: MemoryService[Any] = MemoryService(
            memory,
            device=arguments.device,
            algorithm=hasher,
            journal=Journal(Path(f"{arguments.socket}.state")),
            limit_bytes=arguments.memory_limit,
            adopt_seconds=arguments.adopt_timeout_seconds,
            fail=lambda error: loop.call_soon_threadsafe(end, error),
        )
        server = Server(service)
        try:
            server.start(path.listen())
            failure = await ended
        finally:
            await server.close()
            service.close()
    if failure is not None:
        logging.critical("the memory service ends: %s", failure)
    return int(failure is not None)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--memory-limit", type=int)
    parser.add_argument("--chunk-size", type=int)
    parser.add_argument("--adopt-timeout-seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return asyncio.run(serve(arguments))


if __name__ == "__main__":
    sys.exit(main())
