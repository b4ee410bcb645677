"""The client's side of a GPU: constant addresses, whole chunks, and nothing left over when a step fails."""

from __future__ import annotations

import pytest

from tests.support.fakecuda import FakeGpus

from .conftest import Run

MEMORY = """
memory = device_memory("cuda:0")
backend = CudaBackend(0, chunk_bytes=G)
pages = [backend.create("w", size) for size in (2 * G, G, G)]
chunks = [Chunk(part.fd, part.size_bytes) for part in pages]
def destroy():
    for part in pages:
        backend.destroy(part)
"""


def code(body: str) -> str:
    return MEMORY + "\n".join(line[8:] for line in body.splitlines())


def test_the_address_stays_while_the_backing_changes(run: Run, gpus: FakeGpus) -> None:
    run(
        code("""
        range_ = Reservation(4 * G + 1, memory=memory)
        assert (range_.size_bytes, range_.address % G, range_.backing) == (5 * G, 0, Backing.NONE)
        address = range_.address
        range_.map(chunks, writable=True)
        assert (range_.backing, range_.mapped_bytes) == (Backing.PAGES_RW, 4 * G)
        assert range_.read(0, G) == b"\\xa5" * G
        range_.write(2 * G - 2, b"abcd")
        range_.write(3 * G - 2, b"efgh")
        range_.map_scratch(2 * G)
        assert (range_.backing, range_.mapped_bytes) == (Backing.SCRATCH, 5 * G)
        range_.unmap()
        range_.unmap()
        range_.map(chunks, writable=False)
        assert range_.read(2 * G - 2, 4) + range_.read(3 * G - 2, 4) == b"abcdefgh"
        assert raised(GmsError, range_.write, 0, b"x").code == "not_permitted"
        assert range_.address == address
        range_.close()
        range_.close()
        assert raised(GmsError, range_.unmap).code == "closed"
        with Reservation(5 * G, memory=memory, address=address) as again:
            assert again.address == address
            taken = raised(GmsError, Reservation, G, memory=memory, address=address)
            assert taken.code == "not_permitted" and "is taken" in str(taken)
        destroy()
        """)
    )
    calls = gpus.calls()
    assert calls.count("cuMemSetAccess") == 3  # one for each range that was mapped
    assert calls.count("cuMemMap") == calls.count("cuMemUnmap") == 3 + 3 + 3


def test_an_address_that_the_driver_does_not_give_is_given_back(run: Run) -> None:
    run(
        code("""
        with Reservation(G, memory=memory) as range_:
            address = range_.address - (1 << 40)
        assert "is taken" in str(raised(GmsError, Reservation, G, memory=memory, address=address))
        destroy()
        """),
        ignore_hint=1,
    )


FAILURES = [
    ("cuMemImportFromShareableHandle", 1, 999, "DeviceError"),
    ("cuMemImportFromShareableHandle", 2, 2, "GmsError"),
    ("cuMemImportFromShareableHandle", 2, 400, "ValueError"),
    ("cuMemImportFromShareableHandle", 3, 1, "ValueError"),
    ("cuMemMap", 1, 999, "DeviceError"),
    ("cuMemMap", 3, 999, "DeviceError"),
    ("cuMemMap", 2, 2, "GmsError"),
    ("cuMemSetAccess", 1, 999, "DeviceError"),
    ("cuMemSetAccess", 1, 2, "GmsError"),
]


@pytest.mark.parametrize(("function", "call", "number", "kind"), FAILURES)
def test_a_map_that_fails_leaves_nothing_mapped(run: Run, function: str, call: int, number: int, kind: str) -> None:
    run(
        code(f"""
        range_ = Reservation(4 * G, memory=memory)
        before = descriptors()
        error = raised({kind}, range_.map, chunks, writable=True)
        assert {kind} is not GmsError or (error.code == "out_of_memory" and error.retryable)
        assert (range_.backing, range_.mapped_bytes) == (Backing.NONE, 0)
        assert descriptors() == before
        range_.map(chunks, writable=True)
        range_.close()
        destroy()
        """),
        fail=f"{function}@{call}={number}",
    )


@pytest.mark.parametrize(
    ("function", "call", "number", "kind"),
    [
        ("cuMemCreate", 4, 2, "GmsError"),
        ("cuMemCreate", 5, 2, "GmsError"),
        ("cuMemMap", 2, 999, "DeviceError"),
        ("cuMemSetAccess", 1, 999, "DeviceError"),
    ],
)
def test_scratch_that_fails_leaves_nothing(run: Run, function: str, call: int, number: int, kind: str) -> None:
    """The first three handles are the pages'; then come the chunk and the rest."""
    run(
        code(f"""
        range_ = Reservation(5 * G, memory=memory)
        raised({kind}, range_.map_scratch, 2 * G)
        assert range_.backing is Backing.NONE
        range_.map_scratch(2 * G)
        range_.close()
        destroy()
        """),
        fail=f"{function}@{call}={number}",
    )


def test_a_handle_that_cannot_be_released_leaves_no_mapping(run: Run, gpus: FakeGpus) -> None:
    run(
        code("""
        with Reservation(4 * G, memory=memory) as range_:
            inject(cuMemRelease=999)
            raised(DeviceError, range_.map, chunks, writable=True)
            assert range_.backing is Backing.NONE
        inject()
        destroy()
        """),
        complaints=True,
    )
    assert gpus.complaints() == ["LEAK handles=1 mappings=0 reservations=0"]  # the driver's own word


def test_an_unmap_that_fails_knows_what_is_left(run: Run, gpus: FakeGpus) -> None:
    """Nothing is taken back twice, and no address is given back under a mapping."""
    run(
        code("""
        range_ = Reservation(4 * G, memory=memory)
        range_.map(chunks, writable=True)
        raised(DeviceError, range_.close)
        assert (range_.backing, range_.mapped_bytes) == (Backing.PAGES_RW, 3 * G)
        raised(ValueError, range_.read, 3 * G, 1)
        range_.read(3 * G - 1, 1)
        range_.close()
        destroy()
        """),
        fail="cuMemUnmap@2=999",
    )
    assert [call for call in gpus.calls() if call.startswith("cuMemUnmap")] == [
        "cuMemUnmap",
        "cuMemUnmap (injected error)",
        "cuMemUnmap",
        "cuMemUnmap",
    ]


def test_scratch_reads_and_writes_everywhere_for_two_chunks_of_memory(run: Run) -> None:
    run(
        """
        memory = device_memory("cuda:0")
        with Reservation(101 * G, memory=memory) as range_:
            assert raised(GmsError, range_.map_scratch, 5 * G).code == "out_of_memory"
            range_.map_scratch(2 * G)
            for at in range(0, 101 * G, G):
                range_.write(at, b"%012d" % at)
                assert range_.read(at, 12) == b"%012d" % at
                range_.write(at + G - 1, b"x")
            assert range_.read(0, 12) == b"%012d" % (98 * G)  # the same memory again and again
            raised(GmsError, range_.map_scratch, 1 << 40)  # as one chunk, the range has no room
        """,
        mem=3 * (2 << 20),
    )


def test_a_digest_is_of_what_is_on_the_device(run: Run) -> None:
    run(
        code("""
        with Reservation(4 * G, memory=memory) as range_:
            raised(ValueError, range_.digest, 0, 1, sha256)
            range_.map(chunks, writable=True)
            data = os.urandom(4 * G)
            range_.write(0, data)
            for offset, length in ((0, 4 * G), (1, 5), (2 * G - 1, G + 2), (4 * G - 1, 1), (7, 0)):
                assert range_.digest(offset, length, sha256) == sha(data[offset : offset + length])
            found = []
            thread = threading.Thread(target=lambda: found.append(range_.digest(0, G, sha256)))
            thread.start()
            thread.join()
            assert found == [sha(data[:G])]  # a thread that has no context of its own
            assert raised(GmsError, range_.buffer).code == "wrong_device"
            assert memory.dlpack_device == (2, 0)
        destroy()
        """)
    )


def test_a_copy_keeps_a_second_context_from_being_made(run: Run, gpus: FakeGpus) -> None:
    run(
        code("""
        with Reservation(4 * G, memory=memory) as range_:
            range_.map(chunks, writable=True)
            for _ in range(3):
                range_.read(0, 1); range_.write(0, b"x"); range_.digest(0, 1, sha256)
        destroy()
        """)
    )
    assert gpus.calls().count("cuDevicePrimaryCtxRetain") == 1


def test_a_write_to_read_only_memory_kills_the_context(run: Run, gpus: FakeGpus) -> None:
    """Every later call fails, and says that this process is at its end."""
    run(
        code("""
        range_ = Reservation(4 * G, memory=memory)
        range_.map(chunks, writable=False)
        range_.read(0, 1)
        error = raised(CudaError, memory.write, range_.address, b"x")
        assert error.number == 700 and "context is dead" in str(error)
        assert raised(CudaError, range_.read, 0, 1).number == 700
        assert raised(CudaError, range_.unmap).number == 700
        assert range_.mapped_bytes == 4 * G
        """),
        complaints=True,
    )
    assert [line.split(" of ")[0] for line in gpus.complaints()] == ["FAULT write"]


def test_memory_outlives_the_process_that_made_it(run: Run) -> None:
    """SIGKILL of who made it, before and after it is mapped here."""
    run(
        """
        memory = device_memory("cuda:0")
        for kill_first in (True, False):
            maker = Maker()
            if kill_first:
                maker.kill()
            with Reservation(G, memory=memory) as range_:
                range_.map([Chunk(maker.fd, G)], writable=False)
                os.close(maker.fd)
                if not kill_first:
                    maker.kill()
                assert range_.read(0, 11) == b"still there"
        Driver().release(Driver().create(0, G))  # free again
        """,
        mem=2 << 20,
    )


def test_memory_of_another_gpu_is_not_mapped(run: Run, gpus: FakeGpus) -> None:
    """The same GPU has another number in a process with another order; its id is the same."""
    run(
        code("""
        other = device_memory("cuda:1")
        assert other.device_id != memory.device_id == backend.device_id
        with Reservation(4 * G, memory=other) as range_:
            raised(DeviceError, range_.map, chunks, writable=False)
            assert range_.backing is Backing.NONE
        destroy()
        """),
        devices=2,
        order="1,0",
        strict=0,
        complaints=True,
    )
    assert [line for line in gpus.complaints() if "LEAK" in line] == []
    assert any("that the memory is not on" in line for line in gpus.complaints())


def test_what_is_mapped_can_be_zeroed(run: Run, gpus: FakeGpus) -> None:
    """Scratch once for each of its chunks, and nothing beyond what is mapped."""
    run(
        code("""
        range_ = Reservation(5 * G, memory=memory)
        raised(ValueError, range_.clear)
        range_.map_scratch(2 * G)
        assert range_.read(0, G) == b"\\xa5" * G
        range_.clear()
        assert not any(range_.read(0, 5 * G))
        range_.map(chunks, writable=True)
        range_.clear()
        assert not any(range_.read(0, 4 * G))
        range_.map(chunks, writable=False)
        assert raised(GmsError, range_.clear).code == "not_permitted"
        range_.close()
        destroy()
        """)
    )
    assert gpus.calls().count("cuMemsetD8") == 2 + 3
