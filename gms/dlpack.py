"""A torch tensor over raw memory, by DLPack: no compiled code, no pluggable allocator, nobody asks about the pointer.

The device is stated and not found out, so a tensor can be made over addresses that have no memory yet, such as a parked
KV cache.

The tensor must keep its memory's owner alive and let go of it at the end, from whatever thread drops the last
reference, with or without the interpreter's lock, possibly after the interpreter is gone. A callback written in Python
is not safe there. So torch's own code does it: a small tensor that holds the owner through the buffer protocol is
exported, the exported description is redirected to the memory that is meant, and imported again. When the result dies,
torch's deleter frees the description, the small tensor and with it the owner. Of the description the deleter uses only
`manager_ctx`, which is left as it is.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch
from torch.utils import dlpack

from gms.devices import DLPACK_CPU

_NAME: Final = b"dltensor"


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor without a version, whose first part is a DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Anchor(ctypes.c_ubyte * 1):  # type: ignore[misc]  # a ctypes array type is built by an expression
    """One byte that torch can hold a reference to; its attribute keeps the owner alive."""

    owner: object


_capsule_pointer: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def raw_bytes(address: int, size_bytes: int, *, device: tuple[int, int] = (DLPACK_CPU, 0), owner: object = None) -> Any:
    """A tensor of `size_bytes` uint8 at `address` on `device` (DLPack's kind and the ordinal in this process).

    Touches no byte of the memory, which need not be there yet. `owner` is kept until the last tensor over it, views and
    storages included, is gone; torch does not know whether the memory may be written to.
    """
    anchor = _Anchor()
    anchor.owner = owner
    capsule = dlpack.to_dlpack(torch.frombuffer(anchor, dtype=torch.uint8))
    described = _ManagedTensor.from_address(_capsule_pointer(capsule, _NAME))
    shape = (ctypes.c_int64 * 1)(size_bytes)  # torch copies it when it imports
    described.data = address
    described.device_type, described.device_id = device
    described.shape = shape
    described.byte_offset = 0
    return dlpack.from_dlpack(capsule)
