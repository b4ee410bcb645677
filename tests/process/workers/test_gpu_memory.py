"""An engine's memory on a GPU, over a real service and the tests' driver: weights, KV pages and the index beside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fakecuda import FakeGpus, built_once

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

PRELUDE = """
import os, subprocess, sys, tempfile, time
from gms.custody_phases import Phase
from gms.mapping import Backing
from workers.kv_index import Entry, Refusal, Shape
from workers.kv_memory import KvMemory
from workers.memory import MemoryService
from workers.weights import WeightsMemory, pool_name

G = 2 << 20
folder = tempfile.mkdtemp(prefix="gms-")
path = os.path.join(folder, "gms.sock")

def start():
    env = {**os.environ, "FAKE_CUDA_NO_CONTEXT": "1", "FAKE_CUDA_LOG": os.environ["FAKE_CUDA_LOG"] + ".service"}
    command = [sys.executable, "-m", "gms", "--socket", path, "--device", "cuda:0", "--chunk-size", str(2 * G)]
    return subprocess.Popen(command, env=env)

def service(engine):
    return MemoryService(
        socket=path, device="cuda:0", engine=engine, instance="pod", timeout_seconds=20, connect_seconds=20
    )

def until(what):
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)

def calls(name):
    with open(os.environ["FAKE_CUDA_LOG"]) as log:
        return sum(line.rstrip().endswith(name) for line in log)

gms = start()
try:
    CODE
finally:
    gms.kill()
    gms.wait()
    import shutil
    shutil.rmtree(folder)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_once(tmp_path_factory)


@pytest.fixture
def gpus(library: Path) -> Iterator[FakeGpus]:
    with FakeGpus(library) as machine:
        yield machine


def run(gpus: FakeGpus, code: str) -> None:
    lines = code.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    done = gpus.python(PRELUDE.replace("CODE", "\n    ".join(line[indent:] for line in lines)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not gpus.complaints(), gpus.complaints()
    assert not gpus.complaints("calls.log.service")


def test_pages_and_index_outlive_their_engine_and_the_service(gpus: FakeGpus) -> None:
    """Pages are the GPU's and zeroed as long as nothing is in them; the index is the host's. Both are handed back to a
    service that was killed, and then handed on."""
    run(
        gpus,
        """
        shape = Shape(blocks=64, block_tokens=16, fingerprint=bytes(32))
        first = KvMemory(service("a"), size_bytes=5 * G)
        first.keep_index(shape)
        first.map_scratch()
        assert first.range.backing is Backing.SCRATCH and not any(first.range.read(0, 5 * G))
        first.range.write(0, b"scratch")
        first.unmap()
        assert first.check_parked() is None
        first.map(epoch=1)
        assert first.carried.refusal is Refusal.NEW_PAGES and not any(first.range.read(0, 5 * G))
        first.range.write(4 * G - 2, b"kept")
        first.index.publish(Entry(3, b"prefix", 16))
        gms.kill()
        gms.wait()
        (state,) = first.custody()
        gms = start()
        until(lambda: first.custody()[0].restored == 1 and first.custody()[0].phase is Phase.HELD)
        cleared = calls("cuMemsetD8")
        first.unmap()

        second = KvMemory(service("b"), size_bytes=5 * G)
        second.keep_index(shape)
        second.map(epoch=2)
        assert second.carried.refusal is None, second.carried
        (entry,) = second.carried.entries
        assert (entry.block, entry.key, entry.tokens) == (3, b"prefix", 16)
        assert second.range.read(4 * G - 2, 4) == b"kept"
        assert calls("cuMemsetD8") == cleared, "what is carried over is not zeroed"
        second.index.clear_all()
        second.unmap()

        first.map(epoch=3)
        assert not first.carried.entries
        assert not any(first.range.read(0, 5 * G)), "pages that hold nothing are zeroed"
        first.close()
        second.close()
        """,
    )


def test_weights_are_committed_with_their_digests_and_checked_by_readers(gpus: FakeGpus) -> None:
    run(
        gpus,
        """
        pool = pool_name("layout")
        writer = WeightsMemory(service("a"), pool)
        writer.attach()
        place = writer.map_for_writing(5 * G)
        content = os.urandom(5 * G)
        place.write(0, content)
        writer.commit(b"manifest")
        assert writer.role == "writer" and place.backing is Backing.PAGES_RO and place.read(0, 5 * G) == content
        reader = WeightsMemory(service("b"), pool)
        reader.attach()
        assert reader.role == "reader" and reader.map_for_reading().read(0, 5 * G) == content
        for weights in (writer, reader):
            assert weights.check(enough=lambda: False) is None
        assert reader._rotation.rounds == 1
        reader.close()
        writer.close()
        """,
    )
