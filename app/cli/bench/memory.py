"""What the memory service costs, each figure against what bounds it, in one run on one machine.

The service is a process of its own, as in a pod. Arms that are compared take turns, so that what else the machine does
hits both; the figures are medians, and ratios are taken of those.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from app.cli.bench.ending import sigterm_unwinds
from app.cli.bench.system import BenchError
from app.cli.launch import module_command, safe_environment
from gms import protocol
from gms.client import Allocation, GmsClient, Lease, LeaseMode
from gms.custody import Custody
from gms.mapping import Reservation
from gms.protocol import GmsError

if TYPE_CHECKING:
    from gms.manifest import Manifest

FILL_BYTES: Final = 16 * 1024 * 1024
WEIGHTS_POOL: Final = "weights/bench"
TAG: Final = "weights"
TENSORS: Final = 400
KV_SHARE: Final = 16
"""The large KV allocation is so many times the small one."""
START_SECONDS: Final = 30.0
ATTACHES: Final = 15
STATUS_REQUESTS: Final = 1000
MAPS: Final = 200
HASHES: Final = 5


def measure(*, weights_bytes: int, kv_bytes: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Every figure of ``hotspare bench gms``: seconds, ratios, and GB/s (of 10^9 bytes). The sizes are multiples of 16
    MiB; the KV pages are ``kv_bytes`` and a sixteenth of that, side by side.

    Raises:
        BenchError: the service did not start, or there is no room for what is measured.
    """
    try:
        import gms.tensors  # noqa: F401  # before anything is timed
    except ImportError as error:
        raise BenchError("this benchmark measures tensors, too, and torch is missing; run `make setup`") from error
    sigterm_unwinds()
    with tempfile.TemporaryDirectory(prefix="hotspare-bench-") as folder, _Service(Path(folder)) as service:
        try:
            say("writing the weights")
            writer = service.connect("writer")
            lease, pages, manifest = _commit_weights(writer, weights_bytes)
            report: dict[str, Any] = {"weights_bytes": weights_bytes, "tensors": TENSORS, "kv_bytes": kv_bytes}
            say("attaching readers")
            report |= _attach(service, pages, manifest)
            say("hashing")
            report |= _hash(pages)
            say("asking for the status")
            report |= _status(service, Path(folder))
            say("mapping KV pages")
            report |= _kv_map(service, kv_bytes)
            say("killing the service")
            report |= _adopt(service, writer, lease, pages)
        except GmsError as error:
            raise BenchError(str(error)) from error
    return report


class _Service:
    """A memory service, started again on demand; killed at the end, with everything that it holds."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "gms.sock"
        self._log = folder / "gms.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Service:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        environment = {**safe_environment(os.environ), "HOTSPARE_PARENT_PID": str(os.getpid())}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                module_command("gms", "--socket", str(self.socket)), stderr=log, env=environment
            )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def connect(self, engine: str) -> GmsClient:
        try:
            return GmsClient.connect(self.socket, engine=engine, instance="bench", timeout_seconds=START_SECONDS)
        except GmsError as error:
            raise BenchError(f"{error} Its log:\n{self._log.read_text(errors='replace')}") from error


def _commit_weights(client: GmsClient, size_bytes: int) -> tuple[Lease, Allocation, Manifest]:
    from gms.manifest import Manifest, Slot, SlotPlanner

    planner = SlotPlanner()
    each = size_bytes // TENSORS // 4096 * 4096
    rows = each // 2 // 64
    slots = {
        f"model.layers.{number}.weight": Slot(
            offset=planner.place(each),
            size_bytes=each,
            shape=(rows, 64),
            stride=(64, 1),
            storage_offset=0,
            dtype="bfloat16",
        )
        for number in range(TENSORS)
    }
    manifest = Manifest(tag=TAG, size_bytes=size_bytes, parameters=slots, buffers={}, aliases={})
    lease = client.attach(WEIGHTS_POOL, LeaseMode.RW)
    pages = lease.allocate(TAG, size_bytes)
    with Reservation(size_bytes) as place:
        place.map(pages.chunks, writable=True)
        for offset in range(0, size_bytes, FILL_BYTES):
            ctypes.memset(place.address + offset, offset // FILL_BYTES % 255 + 1, FILL_BYTES)
    lease.commit(manifest.encode())
    return lease, pages, manifest


def _attach(service: _Service, pages: Allocation, manifest: Manifest) -> dict[str, Any]:
    """From nothing to 400 tensors: by a new client, and by a bare mmap of the same descriptor and torch alone."""
    import torch

    from gms import tensors

    def attach() -> None:
        with service.connect("reader") as client:
            lease = client.attach(WEIGHTS_POOL, LeaseMode.RO)
            with lease.export(TAG) as shared:
                place = Reservation(shared.size_bytes)
                place.map(shared.chunks, writable=False)
            views = tensors.Views(tensors.arena(place))
            made = [views.of(slot) for slot in manifest.decode(lease.manifest).parameters.values()]
            del made, views
            place.close()

    def bare() -> None:
        pages_read_only = mmap.mmap(pages.chunks[0].fd, pages.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        made = [
            torch.frombuffer(pages_read_only, dtype=torch.bfloat16, count=slot.size_bytes // 2, offset=slot.offset)[
                : slot.shape[0] * slot.shape[1]
            ].view(slot.shape)
            for slot in manifest.parameters.values()
        ]
        del made
        pages_read_only.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch, of a buffer that is not writable: so it is meant
        attached, mapped = _in_turn(attach, bare, times=ATTACHES)
    return {"attach_seconds": attached, "bare_map_seconds": mapped, "attach_ratio": attached / mapped}


def _status(service: _Service, folder: Path) -> dict[str, Any]:
    with service.connect("status") as client:
        asked, size = len(protocol.encode(protocol.GetStatus())), len(_encoded_status(client))
        with _echo(folder / "echo.sock", asked, size) as echo:
            payload = bytes(asked)
            received = bytearray(size)

            def bare() -> None:
                echo.sendall(payload)
                echo.recv_into(received, size, socket.MSG_WAITALL)

            answered, echoed = _in_turn(client.status, bare, times=STATUS_REQUESTS)
    return {"status_seconds": answered, "echo_seconds": echoed, "status_ratio": answered / echoed}


def _encoded_status(client: GmsClient) -> bytes:
    return protocol.encode(protocol.StatusReply(status=client.status()))


@contextmanager
def _echo(path: Path, asked: int, size: int) -> Iterator[socket.socket]:
    command = [sys.executable, "-m", "app.cli.bench.echo", str(path), str(asked), str(size)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=safe_environment(os.environ))
    try:
        if process.stdout is None or process.stdout.readline() != b"ready\n":
            raise BenchError("the echo service did not start")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(START_SECONDS)
            connection.connect(str(path))
            yield connection
    finally:
        process.kill()
        process.communicate()


def _kv_map(service: _Service, size_bytes: int) -> dict[str, Any]:
    """Mapping and unmapping populated pages, without a touch: what a promotion and a parking pay for."""
    sizes = {"large": size_bytes, "small": size_bytes // KV_SHARE}
    with service.connect("engine") as client:
        lease = client.attach("kv", LeaseMode.RW, epoch=1)
        kept = {name: lease.allocate(name, size) for name, size in sizes.items()}
        places = {name: Reservation(size) for name, size in sizes.items()}

        def cycle(name: str) -> Callable[[], None]:
            def once() -> None:
                places[name].map(kept[name].chunks, writable=True)
                places[name].unmap()

            return once

        large, small = _in_turn(cycle("large"), cycle("small"), times=MAPS)
        for place in places.values():
            place.close()
        for pages in kept.values():
            pages.close()
        lease.release(quiesced=True)
    return {"kv_map_large_seconds": large, "kv_map_small_seconds": small, "kv_map_ratio": large / small}


def _hash(pages: Allocation) -> dict[str, Any]:
    """The checksum against a plain copy of the same, mapped and resident, bytes."""
    from gms.factory import hasher

    size = pages.size_bytes
    target = bytearray(size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    with Reservation(size) as place:
        place.map(pages.chunks, writable=False)
        source = memoryview(place.buffer()).cast("B")
        hashed, copied = _in_turn(
            lambda: hasher().update(source),
            lambda: ctypes.memmove(address, place.address, size),
            times=HASHES,
        )
        source.release()
    return {
        "checksum_gb_per_second": size / hashed / 1e9,
        "copy_gb_per_second": size / copied / 1e9,
        "checksum_ratio": copied / hashed,
    }


def _adopt(service: _Service, client: GmsClient, lease: Lease, pages: Allocation) -> dict[str, Any]:
    """From the SIGKILL of the service to its successor's having the pages again, hashed and compared. The start of the
    process is part of it, and told apart."""

    def dial() -> GmsClient:
        return GmsClient.connect(service.socket, engine="writer", instance="bench", timeout_seconds=0.0)

    with Custody(client, lease, [pages], dial=dial):
        killed = time.monotonic()
        service.kill()
        service.start()
        with service.connect("status") as watcher:
            listening = time.monotonic()
            handed_back = _await_hand_back(watcher, listening + START_SECONDS)
            (pool,) = [pool for pool in watcher.status().pools if pool.name == WEIGHTS_POOL]
            if pool.state != "READ":
                raise BenchError(f"the pool is {pool.state} after the hand-back")
    return {"adopt_seconds": handed_back - killed, "service_start_seconds": listening - killed}


def _await_hand_back(watcher: GmsClient, deadline: float) -> float:
    """When the service said that it has the weights again."""
    seen = 0
    while (left := deadline - time.monotonic()) > 0:
        reply = watcher.events(seen, timeout_seconds=left)
        now = time.monotonic()
        for event in reply.events:
            if event.pool == WEIGHTS_POOL and event.kind == "handed_back":
                return now
            if event.pool == WEIGHTS_POOL and event.kind in ("given_up", "not_taken", "corrupt"):
                raise BenchError(event.detail)
        seen = reply.last
    raise BenchError(f"the weights were not handed back within {START_SECONDS:g} s")


def _in_turn(first: Callable[[], object], second: Callable[[], object], *, times: int) -> tuple[float, float]:
    """The median seconds of each, called alternately, after one call of each that does not count."""
    first()
    second()
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(times):
        for call, seconds in zip((first, second), taken, strict=True):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
    return statistics.median(taken[0]), statistics.median(taken[1])
