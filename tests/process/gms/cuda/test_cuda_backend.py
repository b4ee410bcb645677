"""The service's side of a GPU: in a process that may not make a context."""

from __future__ import annotations

import pytest

from tests.support.fakecuda import UUID, FakeGpus

from .conftest import Run


def test_a_chunk_lives_until_service_and_clients_let_go(run: Run, gpus: FakeGpus) -> None:
    run(
        """
        backend = CudaBackend(0, chunk_bytes=2 * G)
        before = descriptors()
        pages = backend.create("w", 4 * G)
        assert backend.identify(pages) == Identity(size_bytes=4 * G)
        backend.populate(pages, 0, 4 * G); backend.freeze(pages)
        shared = [backend.share(pages, writable=writable) for writable in (True, False)]
        assert not any(map(os.get_inheritable, [pages.fd, *shared]))
        backend.destroy(pages)
        os.close(shared[0])
        raised(OutOfMemoryError, backend.create, "w", 4 * G)
        os.close(shared[1])
        backend.destroy(backend.create("w", 4 * G))
        raised(NotImplementedError, backend.digest, pages, 0, 1, sha256)
        assert descriptors() == before
        """,
        mem=8 << 20,
        no_context=1,
    )
    assert not {"cuMemMap", "cuMemAddressReserve", "cuDevicePrimaryCtxRetain"} & set(gpus.calls())


def test_it_says_what_it_is(run: Run) -> None:
    done = run(
        """
        backend = CudaBackend(0)
        print(backend.device_id, backend.granularity, backend.chunk_bytes, backend.readable)
        for size in (0, -G, G + 4096, 1 << 20):
            assert "multiple of 2097152" in str(raised(ValueError, CudaBackend, 0, chunk_bytes=size))
        assert CudaBackend(0, chunk_bytes=G).chunk_bytes == CudaBackend(1, chunk_bytes=G).slice_bytes == G
        """,
        devices=2,
        order="1,0",
        no_context=1,
    )
    assert done.stdout.split() == [UUID.format(1), str(2 << 20), str(512 << 20), "False"]


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemExportToShareableHandle"])
@pytest.mark.parametrize("number", [2, 999])
def test_a_step_that_fails_leaves_nothing(run: Run, function: str, number: int) -> None:
    """Out of memory can be tried again; everything else is the end of the service."""
    run(
        f"""
        backend = CudaBackend(0, chunk_bytes=G)
        before = descriptors()
        inject({function}={number})
        raised(OutOfMemoryError if {number} == 2 else DeviceError, backend.create, "w", G)
        inject()
        assert descriptors() == before
        backend.destroy(backend.create("w", 4 * G))  # all of the memory is free
        """,
        mem=8 << 20,
        no_context=1,
    )


def test_a_handle_that_cannot_be_released_costs_no_descriptor(run: Run, gpus: FakeGpus) -> None:
    run(
        """
        backend = CudaBackend(0)
        pages = backend.create("w", G)
        inject(cuMemRelease=999)
        raised(DeviceError, backend.destroy, pages)
        raised(OSError, os.fstat, pages.fd)
        """,
        complaints=True,
    )
    assert gpus.complaints() == ["LEAK handles=1 mappings=0 reservations=0"]


def test_a_chunk_is_taken_back_and_shared_again(run: Run, gpus: FakeGpus) -> None:
    run(
        """
        backend = CudaBackend(0)
        before = descriptors()
        maker = Maker()
        maker.kill()
        pages = backend.adopt(maker.fd, Identity(size_bytes=G))
        os.close(maker.fd)  # the caller's own
        assert backend.identify(pages) == Identity(size_bytes=G)
        raised(OutOfMemoryError, backend.create, "w", G)
        os.close(backend.share(pages, writable=False))
        backend.destroy(pages)
        backend.destroy(backend.create("w", G))
        assert descriptors() == before
        """,
        mem=2 << 20,
        no_context=1,
    )


def test_what_is_no_memory_of_a_gpu_is_refused_without_damage(run: Run) -> None:
    run(
        """
        backend = CudaBackend(0)
        known = Identity(size_bytes=G)
        ends = os.pipe()
        file = os.memfd_create("w")
        os.ftruncate(file, G)
        before = descriptors()
        for fd in (*ends, file, os.open("/", os.O_RDONLY), os.open("/dev/null", os.O_RDWR), 1 << 20):
            error = raised(ForeignPagesError, backend.adopt, fd, known)
            assert "does not take it as memory of a GPU" in str(error), error
        pages = backend.create("w", G)
        for number in (1, 101, 304, 400):  # invalid value, invalid device, operating system, invalid handle
            inject(cuMemImportFromShareableHandle=number)
            raised(ForeignPagesError, backend.adopt, pages.fd, known)
        inject()
        backend.destroy(backend.adopt(pages.fd, known))
        backend.destroy(pages)
        assert len(descriptors()) == len(before) + 2
        """,
        no_context=1,
    )


def test_what_is_said_of_the_device_is_not_said_of_the_chunk(run: Run) -> None:
    """No room can be tried again, a failing device is the end of the service, and neither is the client's fault."""
    run(
        """
        backend = CudaBackend(0)
        known = Identity(size_bytes=G)
        pages = backend.create("w", G)
        before = descriptors()
        inject(cuMemImportFromShareableHandle=2)
        raised(OutOfMemoryError, backend.adopt, pages.fd, known)
        for number in (999, 719):
            inject(cuMemImportFromShareableHandle=number)
            assert raised(DeviceError, backend.adopt, pages.fd, known).number == number
        inject(cuMemRelease=400)  # what was opened could not be let go: that is no word on what it is
        raised(DeviceError, backend.adopt, pages.fd, known)
        inject()
        backend.destroy(pages)
        """,
        no_context=1,
        complaints=True,
    )


def test_a_process_without_descriptors_has_no_room_and_no_broken_device(run: Run, gpus: FakeGpus) -> None:
    """The driver says no more than that something failed. Its word that the operating system refused an export is
    believed even if a descriptor has come free since."""
    run(
        """
        import resource
        backend = CudaBackend(0)
        known = Identity(size_bytes=G)
        backend.destroy(backend.adopt(*[(pages := backend.create("w", G)).fd, known]))
        before = descriptors()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        for call in (lambda: backend.create("x", G), lambda: backend.adopt(pages.fd, known)):
            error = raised(OutOfMemoryError, call)
            assert "no descriptors left" in str(error), error
        raised(OSError, backend.share, pages, writable=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        inject(cuMemExportToShareableHandle=304)
        assert "no descriptors left" in str(raised(OutOfMemoryError, backend.create, "x", G))
        inject(cuMemCreate=304)
        raised(DeviceError, backend.create, "x", G)
        inject()
        dup = os.dup
        def full(fd):
            raise OSError(24, "Too many open files")
        os.dup = full
        assert "cannot be kept" in str(raised(OutOfMemoryError, backend.adopt, pages.fd, known))
        os.dup = dup
        assert descriptors() == before
        backend.destroy(backend.create("x", 3 * G))  # nothing of the others is left
        backend.destroy(pages)
        """,
        mem=8 << 20,
        no_context=1,
    )
