"""A writer that is killed inside a kernel, and its heir: `python -m tests.gpu.kernel SOCKET ROLE SIZE`.

The kernel writes for ever: count after count into each word of the pages. Killing its process is the only way to end
it, which is what a stuck engine comes to. From the moment that the service grants the pages to the next epoch nothing
may change in them any more.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import time
from typing import Final

from gms.backends.base import Hasher
from gms.client import GmsClient, LeaseMode
from gms.mapping import Reservation, device_memory
from tests.gpu.driver import MIB, Probe

TAG: Final = "pages"
NOT_READY: Final = 600
WATCH_SECONDS: Final = 2.0
SCRIBBLE: Final = b"""
.version 6.0
.target sm_50
.address_size 64

.visible .entry scribble(.param .u64 pages, .param .u64 words)
{
    .reg .pred %more, %ever;
    .reg .b32 %count, %block, %width, %thread, %blocks;
    .reg .b64 %start, %words, %index, %first, %step, %at;

    ld.param.u64 %start, [pages];
    ld.param.u64 %words, [words];
    cvta.to.global.u64 %start, %start;
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %thread, %tid.x;
    mov.u32 %blocks, %nctaid.x;
    mad.lo.u32 %thread, %block, %width, %thread;
    cvt.u64.u32 %first, %thread;
    mul.wide.u32 %step, %blocks, %width;
    mov.u32 %count, 0;
round:
    add.u32 %count, %count, 1;
    mov.u64 %index, %first;
    setp.ge.u64 %more, %index, %words;
    @%more bra next;
word:
    shl.b64 %at, %index, 2;
    add.u64 %at, %start, %at;
    st.volatile.global.u32 [%at], %count;
    add.u64 %index, %index, %step;
    setp.lt.u64 %more, %index, %words;
    @%more bra word;
next:
    setp.ne.u32 %ever, %count, 0;
    @%ever bra round;
    ret;
}
\x00"""
"""Four billion rounds: years."""


class Kernels(Probe):
    def scribble(self, address: int, size_bytes: int) -> None:
        """Starts the kernel and returns."""
        module = self._call("cuModuleLoadData", SCRIBBLE)
        function = self._call("cuModuleGetFunction", module, b"scribble")
        values = (ctypes.c_uint64(address), ctypes.c_uint64(size_bytes // 4))
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        grid, block = (64, 1, 1), (256, 1, 1)
        self._call("cuLaunchKernel", function, *grid, *block, 0, 0, ctypes.addressof(pointers), 0)

    def busy(self) -> bool:
        """Whether the default stream has work that is not done."""
        code, *_ = self._cuda.cuStreamQuery(0)
        return int(code) == NOT_READY


def connect(path: str, engine: str) -> GmsClient:
    return GmsClient.connect(path, engine=engine, instance="test", device="cuda:0")


def writer(path: str, size_bytes: int) -> None:
    """Says "writing" once the kernel runs over the pages, and waits to be killed."""
    with connect(path, "writer") as client:
        lease = client.attach("kv", LeaseMode.RW, epoch=1)
        pages = lease.allocate(TAG, size_bytes)
        place = Reservation(pages.size_bytes, memory=device_memory("cuda:0"))
        place.map(pages.chunks, writable=True)
        kernels = Kernels()
        kernels.use(kernels.retain_context(0))
        kernels.scribble(place.address, place.size_bytes)
        time.sleep(0.2)  # many rounds: a kernel that ends by itself would have ended
        print("writing" if kernels.busy() else "the kernel has ended", flush=True)
        sys.stdin.read()


def hand_writer(path: str, size_bytes: int) -> None:
    """The same without a kernel, for a driver that runs none: fills the pages, again and again."""
    with connect(path, "writer") as client:
        lease = client.attach("kv", LeaseMode.RW, epoch=1)
        pages = lease.allocate(TAG, size_bytes)
        place = Reservation(pages.size_bytes, memory=device_memory("cuda:0"))
        place.map(pages.chunks, writable=True)
        probe = Probe()
        probe.use(probe.retain_context(0))
        count = 0
        while True:
            count += 1
            probe.fill(place.address, count % 255 + 1, place.size_bytes)
            if count == 3:
                os.write(1, b"writing\n")


def heir(path: str, size_bytes: int) -> None:
    """Has its context ready, as an engine that is parked; says "parked", waits for a line, and asks for the pages as
    the next epoch. Then it looks at them, at once and again and again, and says in JSON what it saw."""
    memory = device_memory("cuda:0")
    with connect(path, "heir") as client, Reservation(size_bytes, memory=memory) as place:
        place.map_scratch(2 * MIB)
        place.digest(0, min(size_bytes, 64 * MIB), _hash)
        place.unmap()
        print("parked", flush=True)
        sys.stdin.readline()
        lease = client.attach("kv", LeaseMode.RW, epoch=2)
        granted = time.monotonic()
        with lease.allocate(TAG, size_bytes) as pages:
            place.map(pages.chunks, writable=True)
            created = pages.created
        mapped = time.monotonic()
        seen = [place.digest(0, size_bytes, _hash)]
        looked = time.monotonic()
        while time.monotonic() < looked + WATCH_SECONDS:
            seen.append(place.digest(0, size_bytes, _hash))
        words = memoryview(place.read(0, size_bytes)).cast("I")
        found = {
            "granted": granted,
            "mapped": mapped,
            "looked": looked,
            "fresh": lease.fresh,
            "created": created,
            "looks": len(seen),
            "states": len(set(seen)),
            "least": min(words),
            "most": max(words),
        }
        place.unmap()
        lease.release(quiesced=True)
    print(json.dumps(found), flush=True)


def _hash() -> Hasher:
    return hashlib.blake2b(digest_size=16)


ROLES = {"writer": writer, "hand_writer": hand_writer, "heir": heir}

if __name__ == "__main__":
    ROLES[sys.argv[2]](sys.argv[1], int(sys.argv[3]))
