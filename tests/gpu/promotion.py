"""A promotion as an engine's, with torch over the pages: `python -m tests.gpu.promotion ROLE ...`, a process a role.

The active one writes weights and KV pages and is killed while it works. The shadow has the weights from the service,
has captured its graph over scratch backing, and has parked: nothing stands behind its KV range. Once it has the lock it
maps the dead one's pages and replays the graph. What it then computes depends on all that the dead one wrote.

All values are small whole numbers, which every dtype here holds exactly and whose sum is the same in any order: results
are compared for equality, a GPU's with a CPU's. On a CPU there are no graphs, and the step is simply run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from gms import tensors
from gms.backends.base import Hasher
from gms.client import AllocationInfo, GmsClient, Lease, LeaseMode, digests_of
from gms.manifest import Manifest
from gms.mapping import Reservation, device_memory

WEIGHTS: Final = "weights/promotion"
TAG: Final = "tensors"
WIDTH: Final = 32
VOCAB: Final = 64
STEPS: Final = 20
SCRATCH_BYTES: Final = 2 << 20
STRIDE: Final = 7919
"""Rows of consecutive steps lie this far apart, to be spread over all chunks; a prime, so that none comes twice."""


class Model(torch.nn.Module):
    """A step of a language model, if a poor one, and a Parameter of each kind that is to be shared."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
        self.mix = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        for name, dtype in {"fp16": torch.float16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}.items():
            self.register_parameter(f"in_{name}", _parameter(torch.empty(5, 7, dtype=dtype)))
        self.turned = _parameter(torch.empty(7, 5).t())
        self.register_buffer("scale", torch.empty(VOCAB))
        self.offset = torch.empty(VOCAB)


def loaded(device: torch.device) -> Model:
    """The model with its values, the same in every process."""
    with torch.device(device):
        model = Model()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*model.parameters(), model.scale, model.offset):
        tensor.data.copy_(torch.randint(0, 3, tensor.shape, generator=generator, device="cpu").float().to(tensor.dtype))
    return model


class Decoder:
    """One step over a KV cache, rows of WIDTH float32: writes a row, reads all. Inputs and output are always the same
    tensors, as a graph wants them."""

    def __init__(self, model: Model, kv: torch.Tensor) -> None:
        self._model = model
        self._kv = kv
        self._token = torch.zeros(1, dtype=torch.int64, device=kv.device)
        self._position = torch.zeros(1, dtype=torch.int64, device=kv.device)
        self._out = torch.zeros(1, VOCAB, device=kv.device)
        self._replay: Callable[[], None] = self._step

    def capture(self) -> None:
        """Captures the step on a GPU; whatever stands behind the KV range is written to."""
        if self._kv.device.type == "cpu":
            self._step()
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries allocate what they need at their first calls, which no graph may contain
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        torch.cuda.synchronize()
        self._replay = graph.replay

    def run(self, number: int) -> list[float]:
        """The answer of step `number`; waits for it."""
        self._token.fill_(number % VOCAB)
        self._position.fill_(row_of(number, len(self._kv)))
        self._replay()
        return list(self._out[0].tolist())

    def _step(self) -> None:
        row = self._model.mix(self._model.embedding(self._token).to(torch.bfloat16)).float()
        self._kv.index_copy_(0, self._position, row)
        answer = self._model.head(self._kv.sum(0, keepdim=True)) * self._model.scale + self._model.offset
        self._out.copy_(answer)


def row_of(number: int, rows: int) -> int:
    return number * STRIDE % rows


def expected(steps: int) -> tuple[list[float], list[float]]:
    """The answer of the last of so many steps, and the row that it wrote, computed on the CPU."""
    kv = torch.zeros(1 << 10, WIDTH)
    decoder = Decoder(loaded(torch.device("cpu")), kv)
    for number in range(steps):
        answer = decoder.run(number)
    return answer, list(kv[row_of(steps - 1, len(kv))].tolist())


def same(model: Model, other: Model) -> bool:
    """Byte for byte, and tied where the other is."""
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    pairs = [*((mine[name], theirs[name]) for name in theirs), (model.scale, other.scale), (model.offset, other.offset)]
    tied = model.head.weight is model.embedding.weight
    return tied and mine.keys() == theirs.keys() and all(_raw(one).equal(_raw(two)) for one, two in pairs)


class Engine:
    """What both engines have: a connection, and their ranges."""

    def __init__(self, path: str, name: str, device: str, kv_bytes: int) -> None:
        self.memory = device_memory(device)
        self.device = torch.device("cpu" if device.startswith("cpu:") else device)
        self.client = GmsClient.connect(path, engine=name, instance="test", device=device)
        self.kv_bytes = kv_bytes
        self.kv = Reservation(kv_bytes, memory=self.memory)

    def decoder(self, model: Model) -> Decoder:
        """Captured over scratch, which is taken away again."""
        rows = tensors.arena(self.kv)[: self.kv_bytes].view(torch.float32).view(-1, WIDTH)
        decoder = Decoder(model, rows)
        self.kv.map_scratch(SCRATCH_BYTES)
        decoder.capture()
        self.kv.unmap()
        return decoder

    def map_kv(self, lease: Lease) -> bool:
        """Whether the pages are new."""
        with lease.allocate("kv", self.kv_bytes) as pages:
            self.kv.map(pages.chunks, writable=True)
            return pages.created


def active(path: str, device: str, lock: str, kv_bytes: int) -> None:
    """Says "serving" and what it answered last, and works on until it is killed."""
    held = os.open(lock, os.O_RDWR | os.O_CLOEXEC)  # before any call of the driver
    fcntl.flock(held, fcntl.LOCK_EX)
    engine = Engine(path, "active", device, kv_bytes)
    model = loaded(engine.device)
    _publish(engine, model)
    decoder = engine.decoder(model)
    lease = engine.client.attach("kv", LeaseMode.RW, epoch=1)
    engine.map_kv(lease)
    tensors.arena(engine.kv).zero_()
    for number in range(STEPS):
        answer = decoder.run(number)
    _say({"serving": answer == expected(STEPS)[0]})
    while True:
        decoder.run(STEPS - 1)  # writes what is there already: whenever the kill comes, the pages hold the same


def _publish(engine: Engine, model: Model) -> None:
    """The weights are committed, and the model's own Parameters lie over them."""
    lease = engine.client.attach(WEIGHTS, LeaseMode.RW)
    manifest, stored = tensors.plan(model, tag=TAG)
    pages = lease.allocate(TAG, manifest.size_bytes)
    place = Reservation(pages.size_bytes, memory=engine.memory)
    place.map(pages.chunks, writable=True)
    tensors.pack(manifest, stored, tensors.arena(place))
    raw = manifest.encode()
    digests = None
    if engine.device.type != "cpu":
        info = AllocationInfo(pages.tag, pages.size_bytes, pages.chunk_bytes)
        digests = {TAG: digests_of(place, info, raw, _hash)}
    place.unmap()
    lease.commit(raw, digests=digests)
    place.map(pages.chunks, writable=False)


def shadow(path: str, device: str, lock: str, kv_bytes: int) -> None:
    """Says "parked", waits for the lock, and says what became of its promotion; at the end of its input it gives the
    pages back."""
    held = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    engine = Engine(path, "shadow", device, kv_bytes)
    lease = engine.client.attach(WEIGHTS, LeaseMode.RO)
    with lease.export(TAG) as pages, torch.device("meta"):
        place = Reservation(pages.size_bytes, memory=engine.memory)
        place.map(pages.chunks, writable=False)
        model = Model()
    tensors.install(model, Manifest.decode(lease.manifest), tensors.arena(place))
    decoder = engine.decoder(model)
    found: dict[str, Any] = {"weights": same(model, loaded(torch.device("cpu")))}
    found["shared"] = all(place.address <= p.data_ptr() < place.address + place.size_bytes for p in model.parameters())
    _say("parked")
    fcntl.flock(held, fcntl.LOCK_EX)
    found["lock"] = time.monotonic()
    lease = engine.client.attach("kv", LeaseMode.RW, epoch=2)
    found["granted"] = time.monotonic()
    found["created"] = engine.map_kv(lease)
    found["mapped"] = time.monotonic()
    answer = decoder.run(STEPS)
    found["answered"] = time.monotonic()
    found["answer"] = answer == expected(STEPS + 1)[0]
    _say(found)
    sys.stdin.read()
    engine.kv.unmap()
    lease.release(quiesced=True)


def auditor(path: str, device: str, lock: str, kv_bytes: int) -> None:
    """Says whether the row that the shadow wrote is in the service's pages."""
    engine = Engine(path, "auditor", device, kv_bytes)
    engine.map_kv(engine.client.attach("kv", LeaseMode.RW, epoch=3))
    row_bytes = WIDTH * 4
    raw = engine.kv.read(row_of(STEPS, kv_bytes // row_bytes) * row_bytes, row_bytes)
    _say(list(struct.unpack(f"{WIDTH}f", raw)) == expected(STEPS + 1)[1])


def able(device: str) -> None:
    """Says what torch is here, and why it cannot do this."""
    usable = device.startswith("cpu:") or torch.cuda.is_available()
    _say({"torch": torch.__version__, "reason": "" if usable else f"torch {torch.__version__} sees no GPU"})


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)


def _hash() -> Hasher:
    return hashlib.blake2b(digest_size=16)


def _say(what: object) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


ROLES = {"active": active, "shadow": shadow, "auditor": auditor}

if __name__ == "__main__":
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("highest")  # TF32 would not hold the sums
    if sys.argv[1] == "able":
        able(sys.argv[2])
    else:
        ROLES[sys.argv[1]](sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
