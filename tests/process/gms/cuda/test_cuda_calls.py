"""The driver's calls as this project makes them: what they say when they fail, and from where they may be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fakecuda import UUID, FakeGpus

from .conftest import PRELUDE, Run


def test_every_failure_names_the_call_and_what_to_do(run: Run) -> None:
    run(
        """
        d = Driver()
        context = d.retain_context(0)
        handle = d.create(0, G)
        fd = d.export(handle)
        address = d.reserve(G)
        d.map(address, G, handle)
        d.allow(0, address, G, writable=True)
        def current():
            with d.current(context):
                pass
        calls = {
            "cuDeviceGetCount": d.count,
            "cuDeviceGet": lambda: d.uuid(0),
            "cuDeviceGetUuid": lambda: d.uuid(0),
            "cuDeviceGetAttribute": lambda: d.attribute(0, 103),
            "cuMemGetAllocationGranularity": lambda: d.granularity(0),
            "cuMemCreate": lambda: d.create(0, G),
            "cuMemRelease": lambda: d.release(handle),
            "cuMemExportToShareableHandle": lambda: d.export(handle),
            "cuMemImportFromShareableHandle": lambda: d.open(fd),
            "cuMemAddressReserve": lambda: d.reserve(G),
            "cuMemAddressFree": lambda: d.free(address, G),
            "cuMemMap": lambda: d.map(address, G, handle),
            "cuMemUnmap": lambda: d.unmap(address, G),
            "cuMemSetAccess": lambda: d.allow(0, address, G, writable=True),
            "cuDevicePrimaryCtxRetain": lambda: d.retain_context(0),
            "cuDevicePrimaryCtxRelease": lambda: d.release_context(0),
            "cuCtxPushCurrent": current,
            "cuCtxSynchronize": d.synchronize,
            "cuMemcpyDtoH": lambda: d.read(bytearray(1), address, 1),
            "cuMemcpyHtoD": lambda: d.write(address, b"x"),
        }
        words = ("Create", "Export", "Import", "Reserve", "Map", "SetAccess", "Retain")
        makes = {name for name in calls if any(word in name for word in words)}
        for name, call in calls.items():
            inject(**{name: 2})
            if name in makes:
                assert "no room" in str(raised(OutOfMemoryError, call)), name
            else:
                assert raised(CudaError, call).number == 2, name
            for number, says in ((999, "UNKNOWN (999): end the process"), (801, "NOT_SUPPORTED (801): the device")):
                inject(**{name: number})
                error = raised(CudaError, call)
                assert isinstance(error, DeviceError) and error.number == number, name
                assert error.function.startswith(name) and str(error).startswith(name) and says in str(error), error
        os.environ["FAKE_CUDA_FAIL"] = ""
        d.unmap(address, G); d.free(address, G); d.release(handle); d.release_context(0)
        """
    )


@pytest.mark.parametrize(
    ("settings", "code", "says"),
    [
        ({"devices": 0}, "Driver()", "cuInit failed with CUDA_ERROR_NO_DEVICE .100.: no GPU is visible"),
        ({}, "device_memory('cuda:1')", "INVALID_DEVICE .101.: there is no GPU of this number"),
        ({}, "CudaBackend(1)", "INVALID_DEVICE .101.: there is no GPU of this number"),
        ({"attributes": "103=0"}, "CudaBackend(0)", "cuda:0 has no virtual memory that can be shared"),
        ({"attributes": "102=0"}, "device_memory('cuda:0')", "cuda:0 has no virtual memory that can be shared"),
    ],
)
def test_a_machine_without_the_gpu_is_told_so(run: Run, settings: dict[str, object], code: str, says: str) -> None:
    run(
        f"import re; error = raised(DeviceError, lambda: {code}); assert re.search({says!r}, str(error)), error",
        **settings,
    )


def test_a_machine_without_driver_or_bindings_is_told_so(gpus: FakeGpus, tmp_path: Path) -> None:
    """The host's memory works without either."""
    (tmp_path / "libcuda.so.1").write_bytes(b"")  # found before one that the machine may have
    host = "Reservation(1).close(); device_memory('cpu:0')\n"
    again = "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"  # with other libraries
    code = PRELUDE + host + "print(raised(DeviceError, device_memory, 'cuda:0'))"
    done = gpus.python(f"import os, sys\nos.environ['LD_LIBRARY_PATH'] = {str(tmp_path)!r}\n" + again, code)
    assert "libcuda.so.1 cannot be loaded" in done.stdout, done.stderr
    assert "install the NVIDIA driver" in done.stdout
    done = gpus.python("import sys; sys.modules['cuda'] = None\n" + code)
    assert "cuda-bindings cannot be imported" in done.stdout, done.stderr


def test_a_fork_of_a_process_that_uses_cuda_is_refused(run: Run) -> None:
    """By the object it inherited and by the driver itself; in words, and before anything is touched."""
    run(
        """
        d = Driver()
        address = d.reserve(G)
        memory = device_memory("cuda:0")
        def child():
            assert "in a fork of the process" in str(raised(DeviceError, d.create, 0, G))
            assert "in a fork of the process" in str(raised(DeviceError, Reservation, G, memory=memory))
            error = raised(CudaError, Driver)
            assert error.number == 3 and "fork first" in str(error)
        pid = os.fork()
        if pid == 0:
            try:
                child()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        d.free(address, G)
        """,
        strict=0,
        complaints=True,
    )


def test_calls_let_other_threads_run(run: Run) -> None:
    run(
        """
        d = Driver()
        began, at = threading.Event(), []
        def work():
            at.append(time.monotonic())
            began.set()
            d.release(d.create(0, G))
            at.append(time.monotonic())
        thread = threading.Thread(target=work)
        thread.start()
        began.wait()
        woken = time.monotonic()
        thread.join()
        assert at[1] - at[0] >= 2
        assert at[1] - woken > 0.2, at[1] - woken  # long before the call was over
        """,
        delay="cuMemCreate=2000",
    )


def test_devices_are_known_by_uuid(run: Run, gpus: FakeGpus) -> None:
    code = "d = Driver(); print(d.count(), *(d.uuid(i) for i in range(d.count())))"
    assert run(code, devices=3).stdout.split() == ["3", UUID.format(0), UUID.format(1), UUID.format(2)]
    assert run(code, devices=3, order="2,0,1").stdout.split() == ["3", UUID.format(2), UUID.format(0), UUID.format(1)]


@pytest.mark.parametrize("capable", [0, 1])
def test_memory_is_for_gpudirect_where_the_device_can(run: Run, gpus: FakeGpus, capable: int) -> None:
    run("d = Driver(); d.release(d.create(0, G))", attributes=f"110={capable}")
    assert gpus.calls().count("memory for GPUDirect RDMA") == capable


def test_exported_descriptors_are_not_inherited(run: Run) -> None:
    run(
        """
        d = Driver()
        handle = d.create(0, G)
        fd = d.export(handle)
        assert not os.get_inheritable(fd)
        os.close(fd)
        d.release(handle)
        """
    )


def test_the_threads_own_context_comes_back(run: Run) -> None:
    run(
        """
        d = Driver()
        one, two = d.retain_context(0), d.retain_context(1)
        now = lambda: int(d._call("cuCtxGetCurrent"))
        assert now() == 0
        with d.current(one):
            assert now() == int(one)
            with suppress(ZeroDivisionError), d.current(two):
                assert now() == int(two)
                1 / 0
            assert now() == int(one)
        assert now() == 0
        d.release_context(0); d.release_context(1)
        """,
        devices=2,
    )
