"""A client of the memory service in a process of its own: does what it is told, call by call.

`python -m tests.process.gms.agent SOCKET DEVICE ENGINE` reads JSON lines [call, {arguments}] and answers each with one:
[result] or {code, message, retryable}. Bytes are latin-1 text. Memory is touched through the device's own copies, so
that the same calls work on a GPU. At the end of its input it gives everything back.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from gms.backends.base import Hasher
from gms.client import Allocation, GmsClient, GmsError, Lease, LeaseMode, digests_of
from gms.custody import Custody
from gms.mapping import Backing, Reservation, device_memory
from gms.protocol import Digests


def algorithm() -> Hasher:
    """What clients hash with where the service cannot: theirs to choose."""
    return hashlib.blake2b(digest_size=16)


class Agent:
    """`pool` and `tag` name what was attached and allocated or exported before.

    What it holds of a pool it can `keep` beyond the service's death, as an engine does: the connection is the custody's
    from then on, and for another pool one has to `connect` again."""

    def __init__(self, socket_path: str, device: str, engine: str) -> None:
        self._path = socket_path
        self._engine = engine
        self._memory = device_memory(device)
        self._hashes = not device.startswith("cpu:")
        self._client: GmsClient | None = None
        self._leases: dict[str, Lease] = {}
        self._pages: dict[tuple[str, str], Allocation] = {}
        self._places: dict[tuple[str, str], Reservation] = {}
        self._custody: dict[str, Custody] = {}

    def connect(self, pids: Sequence[int] = (), timeout_seconds: float = 10.0) -> int:
        """With the pidfds of these processes; returns the own pid."""
        pidfds = [os.pidfd_open(pid) for pid in pids]
        try:
            self._client = GmsClient.connect(
                self._path,
                engine=self._engine,
                instance="test",
                device=self._memory.device,
                device_id=self._memory.device_id,
                pidfds=pidfds,
                timeout_seconds=timeout_seconds,
            )
        finally:
            for fd in pidfds:
                os.close(fd)
        return os.getpid()

    def disconnect(self) -> None:
        """Mappings stay."""
        if self._client is not None:
            self._client.close()

    def attach(self, pool: str, mode: str, **more: Any) -> dict[str, Any]:
        assert self._client is not None
        lease = self._leases[pool] = self._client.attach(pool, LeaseMode(mode), **more)
        return {
            "mode": lease.mode,
            "generation": lease.generation,
            "fresh": lease.fresh,
            "manifest": lease.manifest.decode("latin-1"),
            "tags": [info.tag for info in lease.allocations],
        }

    def allocate(self, pool: str, tag: str, size_bytes: int, timeout_seconds: float = 0.0) -> dict[str, Any]:
        return self._keep(pool, self._leases[pool].allocate(tag, size_bytes, timeout_seconds=timeout_seconds))

    def export(self, pool: str, tag: str) -> dict[str, Any]:
        return self._keep(pool, self._leases[pool].export(tag))

    def map(self, pool: str, tag: str, *, writable: bool) -> int:
        """The address, which stays the same."""
        pages = self._pages[pool, tag]
        if (pool, tag) not in self._places:
            self._places[pool, tag] = Reservation(pages.size_bytes, memory=self._memory)
        self._places[pool, tag].map(pages.chunks, writable=writable)
        return self._places[pool, tag].address

    def unmap(self, pool: str, tag: str) -> None:
        self._places[pool, tag].unmap()

    def write(self, pool: str, tag: str, offset: int, text: str) -> None:
        self._places[pool, tag].write(offset, text.encode("latin-1"))

    def read(self, pool: str, tag: str, offset: int, length: int) -> str:
        return self._places[pool, tag].read(offset, length).decode("latin-1")

    def commit(self, pool: str, manifest: str = "", *, keep: bool = False) -> dict[str, Any]:
        """Hashes what is mapped, where that is the writer's to do, and unmaps it first unless it is to `keep` it."""
        lease, raw = self._leases[pool], manifest.encode("latin-1")
        digests = self._digests(lease, raw)
        if not keep:
            for tag in self._mapped(lease):
                self._places[pool, tag].unmap()
        lease.commit(raw, digests=digests)
        return {"mode": lease.mode, "generation": lease.generation}

    def verify(self, pool: str, *, bare: bool = False) -> int:
        """Hashes what is mapped, where that is a reader's to do; not if `bare`."""
        lease = self._leases[pool]
        return lease.verify(digests=None if bare else self._digests(lease, lease.manifest))

    def put_manifest(self, pool: str, manifest: str) -> None:
        self._leases[pool].put_manifest(manifest.encode("latin-1"))

    def release(self, pool: str, *, quiesced: bool = False) -> None:
        """Quiesced: unmaps first."""
        lease = self._leases.pop(pool)
        if quiesced:
            for tag in self._mapped(lease):
                self._places[pool, tag].unmap()
        lease.release(quiesced=quiesced)

    def keep(self, pool: str) -> None:
        """Into custody, with all that was allocated or exported of it."""
        assert self._client is not None
        pages = [allocation for (name, _), allocation in self._pages.items() if name == pool]
        dial = partial(
            GmsClient.connect,
            self._path,
            engine=self._engine,
            instance="test",
            device=self._memory.device,
            device_id=self._memory.device_id,
            timeout_seconds=5.0,
            retry_seconds=0.0,
        )
        self._custody[pool] = Custody(self._client, self._leases.pop(pool), pages, dial=dial)
        self._client = None

    def custody(self, pool: str) -> dict[str, Any]:
        state = self._custody[pool].state()
        return {"phase": state.phase, "restored": state.restored, "reason": state.reason}

    def verify_kept(self, pool: str) -> int:
        """As `verify`, over the lease that stands now."""
        lease = self._custody[pool].lease
        return lease.verify(digests=self._digests(lease, lease.manifest))

    def break_connection(self, pool: str) -> None:
        """That of a custody, at the socket: neither side has asked for it."""
        with socket.socket(fileno=os.dup(self._custody[pool]._client.fileno())) as broken:
            broken.shutdown(socket.SHUT_RDWR)

    def let_go(self, pool: str, wait_seconds: float) -> None:
        """Ends a custody as an engine does that hands over: quiesced, and if the service is away it is waited for."""
        custody = self._custody.pop(pool)
        for tag in self._mapped(custody.lease):
            self._places[pool, tag].unmap()
        custody.release(quiesced=True, wait_seconds=wait_seconds)

    def close(self) -> None:
        """Gives everything back."""
        for custody in self._custody.values():
            custody.close()
        self.disconnect()
        for place in self._places.values():
            place.close()
        for pages in self._pages.values():
            pages.close()

    def _keep(self, pool: str, pages: Allocation) -> dict[str, Any]:
        if (old := self._pages.pop((pool, pages.tag), None)) is not None:
            old.close()
        if (place := self._places.get((pool, pages.tag))) is not None and place.size_bytes != pages.size_bytes:
            self._places.pop((pool, pages.tag)).close()
        self._pages[pool, pages.tag] = pages
        return {"size_bytes": pages.size_bytes, "chunks": len(pages.chunks), "created": pages.created}

    def _mapped(self, lease: Lease) -> list[str]:
        places = {info.tag: self._places.get((lease.pool, info.tag)) for info in lease.allocations}
        return [tag for tag, place in places.items() if place is not None and place.backing is not Backing.NONE]

    def _digests(self, lease: Lease, manifest: bytes) -> Digests | None:
        if not self._hashes:
            return None
        known = {info.tag: info for info in lease.allocations}
        return {
            tag: digests_of(self._places[lease.pool, tag], known[tag], manifest, algorithm)
            for tag in self._mapped(lease)
        }


def main() -> None:
    agent = Agent(*sys.argv[1:4])
    try:
        for line in sys.stdin:
            name, arguments = json.loads(line)
            try:
                answer: object = [getattr(agent, name)(**arguments)]
            except GmsError as error:
                answer = {"code": error.code, "message": str(error), "retryable": error.retryable}
            os.write(1, json.dumps(answer).encode() + b"\n")
    finally:
        agent.close()


if __name__ == "__main__":
    main()
