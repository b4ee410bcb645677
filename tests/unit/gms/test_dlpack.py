"""Tensors over memory that is not torch's: where they lie, and how long they keep its owner."""

from __future__ import annotations

import ctypes
import gc
import mmap
import resource
import subprocess
import sys
import textwrap
import threading
import weakref

import pytest
import torch
from torch.utils import dlpack

from gms.dlpack import raw_bytes
from gms.mapping import Backing, Reservation

DELETER_OFFSET = 56
"""Where a DLManagedTensor's deleter stands: after a DLTensor of 48 bytes and a pointer."""
TAKEN = b"used_dltensor"


class Owner:
    """Something whose end can be seen."""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """The code in a process of its own, since its end is what is looked at."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )


def test_it_is_that_memory_and_no_copy() -> None:
    memory = ctypes.create_string_buffer(64)
    tensor = raw_bytes(ctypes.addressof(memory), 64)
    assert (tensor.dtype, tensor.shape, tensor.device) == (torch.uint8, (64,), torch.device("cpu"))
    assert tensor.data_ptr() == ctypes.addressof(memory)
    tensor[8:16].view(torch.int64).fill_(-1)
    assert memory.raw == b"\0" * 8 + b"\xff" * 8 + b"\0" * 48


def test_nothing_of_it_is_touched_when_a_tensor_is_made() -> None:
    with Reservation(1 << 40) as range_:
        tensor = raw_bytes(range_.address, range_.size_bytes).view(torch.bfloat16).view(2, -1, 16, 64)
        assert range_.backing is Backing.NONE
        assert tensor.data_ptr() == range_.address
        assert tensor[1, 7].data_ptr() == range_.address + (1 << 39) + 7 * 2048


def test_memory_comes_and_goes_under_a_tensor() -> None:
    with Reservation(2 * mmap.PAGESIZE) as range_:
        tensor = raw_bytes(range_.address, range_.size_bytes)
        for value in (1, 2):
            range_.map_scratch(mmap.PAGESIZE)
            tensor[0] = value
            assert tensor[mmap.PAGESIZE] == value  # the same page again
            range_.unmap()


def test_a_touch_of_a_parked_range_is_a_fault() -> None:
    done = run("""
        from gms.dlpack import raw_bytes
        from gms.mapping import Reservation
        place = Reservation(4096)
        tensor = raw_bytes(place.address, 4096)
        print("made", flush=True)
        tensor[0].item()
        print("read")
    """)
    assert (done.returncode, done.stdout) == (-11, "made\n"), done.stderr


@pytest.mark.parametrize("size", [0, 1, 5])
def test_any_size(size: int) -> None:
    memory = ctypes.create_string_buffer(b"\1" * 8)
    assert raw_bytes(ctypes.addressof(memory), size).sum() == size


def test_the_owner_lives_until_the_last_view_is_gone() -> None:
    memory, owner = ctypes.create_string_buffer(64), Owner()
    alive = weakref.ref(owner)
    tensor = raw_bytes(ctypes.addressof(memory), 64, owner=owner)
    view = tensor[8:16].view(torch.float16)
    storage = view.untyped_storage()
    del owner, tensor
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is not None
    del storage
    gc.collect()
    assert alive() is None


def test_an_owner_that_refers_to_its_tensor_is_not_taken_too_early() -> None:
    """Its cycle goes through torch's memory, where the collector does not look: the owner stays, and never dangles."""
    memory, owner = ctypes.create_string_buffer(64), Owner()
    alive = weakref.ref(owner)
    owner.tensor = raw_bytes(ctypes.addressof(memory), 64, owner=owner)  # type: ignore[attr-defined]
    del owner
    gc.collect()
    kept = alive()
    assert kept is not None
    assert kept.tensor.sum() == 0  # type: ignore[attr-defined]
    del kept.tensor  # type: ignore[attr-defined]
    del kept
    gc.collect()
    assert alive() is None


def test_other_threads_may_drop_the_last_tensor() -> None:
    memory = ctypes.create_string_buffer(64)
    owners = [Owner() for _ in range(64)]
    ends = [weakref.ref(owner) for owner in owners]
    tensors = [raw_bytes(ctypes.addressof(memory), 64, owner=owner) for owner in owners]
    del owners
    threads = [threading.Thread(target=tensors.pop) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    del threads
    gc.collect()
    assert [end() for end in ends] == [None] * 64


def test_torchs_own_code_drops_it_without_the_interpreters_lock() -> None:
    """The deleter of an export is called as a C library would: ctypes.CDLL gives the lock away before."""
    memory, owner = ctypes.create_string_buffer(64), Owner()
    alive = weakref.ref(owner)
    address, deleter = _exported(raw_bytes(ctypes.addressof(memory), 64, owner=owner))
    del owner
    gc.collect()
    assert alive() is not None
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter)(address)
    gc.collect()
    assert alive() is None


def test_a_tensor_may_outlive_the_interpreter() -> None:
    """The C library runs the deleter at exit, when there is no interpreter any more whose objects could be released."""
    done = run("""
        import ctypes, sys
        from gms.dlpack import raw_bytes
        from tests.unit.gms.test_dlpack import Owner, _exported
        memory = ctypes.create_string_buffer(64)
        address, deleter = _exported(raw_bytes(ctypes.addressof(memory), 64, owner=Owner()))
        libc, last = ctypes.CDLL(None), ctypes.create_string_buffer(b"came to its end")
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(last))
        for function, argument in ((libc.puts, ctypes.addressof(last)), (deleter, address)):  # the last goes first
            function = ctypes.cast(function, ctypes.c_void_p)
            assert libc.__cxa_atexit(function, ctypes.c_void_p(argument), None) == 0
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "came to its end\n", "")


def test_tensors_that_are_left_do_not_trouble_the_end_of_the_interpreter() -> None:
    done = run("""
        import ctypes, gc, sys, threading
        from gms.dlpack import raw_bytes
        gc.disable()
        class Owner:
            def __del__(self):
                assert self.memory is not None
        def make():
            owner = Owner()
            owner.memory = ctypes.create_string_buffer(64)
            return raw_bytes(ctypes.addressof(owner.memory), 64, owner=owner)
        globally = make()
        sys.kept_elsewhere = make()
        cycle = [make()]
        cycle.append(cycle)
        del cycle
        waiting = threading.Event()
        def in_a_daemon():
            kept = make()
            waiting.set()
            threading.Event().wait()
        threading.Thread(target=in_a_daemon, daemon=True).start()
        waiting.wait()
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_leaks() -> None:
    memory = ctypes.create_string_buffer(64)

    def peak_after(times: int) -> int:
        for _ in range(times):
            raw_bytes(ctypes.addressof(memory), 64, owner=bytearray(1024))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = peak_after(2000)
    objects = len(gc.get_objects())
    after = peak_after(50_000)
    assert after - before < 4096  # KiB, of some 60 MiB if the owners stayed, and of 10 MiB if the descriptions did
    assert len(gc.get_objects()) - objects < 100


def test_a_device_that_is_not_here_is_refused_and_its_owner_released() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    owner = Owner()
    alive = weakref.ref(owner)
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        raw_bytes(1 << 40, 64, device=(2, 0), owner=owner)
    del owner
    gc.collect()
    assert alive() is None


def _exported(tensor: torch.Tensor) -> tuple[int, int]:
    """What a C library gets that takes a tensor over by DLPack: its description, and the function that ends it."""
    capsule = dlpack.to_dlpack(tensor)
    rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    address = pointer(capsule, b"dltensor")
    rename(capsule, TAKEN)
    deleter = ctypes.c_void_p.from_address(address + DELETER_OFFSET).value
    assert deleter is not None
    return address, deleter
