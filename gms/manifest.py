"""Where a model's tensors lie in an allocation: the standard form of a manifest. Pure.

The service keeps manifests as bytes and asks nothing of them; one in this form makes its errors better, since a piece
of memory that has changed can then be called by the name of its tensor.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

FORM: Final = 2
"""Counts the forms that a manifest has had. Who names a pool by what must fit counts this in."""
ALIGNMENT: Final = 4096
"""A page: a tensor never shares one with its neighbour, so that what is read is what is resident."""


class Slot(Struct, frozen=True, kw_only=True, array_like=True):
    """One storage, `size_bytes` at `offset` in the allocation, and the tensor over it; tensors over the same storage
    have the same place. `shape`, `stride` and `storage_offset` count elements of `dtype`, which is called as torch
    calls it ("bfloat16"). `device` is the kind of device that the tensor is used on ("cpu", "cuda").

    Encoded without the names of its fields: a model has thousands of these.
    """

    offset: int
    size_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    dtype: str
    device: str = "cpu"


class Manifest(Struct, frozen=True, kw_only=True, tag="tensors"):
    """What a reader needs to build a model without its checkpoint. `tag` names the allocation, `attributes` are tensors
    that a module has without having registered them, `aliases` maps the further names of one and the same tensor to
    the name that it is stored under."""

    tag: str
    size_bytes: int
    parameters: dict[str, Slot]
    buffers: dict[str, Slot]
    aliases: dict[str, str]
    attributes: dict[str, Slot] = {}

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Raises msgspec.DecodeError for bytes that are no such manifest."""
        return msgspec.msgpack.decode(raw, type=cls)

    def slots(self) -> dict[str, Slot]:
        """Everything that is stored, by name."""
        return {**self.parameters, **self.buffers, **self.attributes}


class SlotPlanner:
    """Gives each distinct storage a place."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def place(self, size_bytes: int) -> int:
        """The offset for `size_bytes` more."""
        offset = self.size_bytes
        self.size_bytes += -(-max(size_bytes, 1) // ALIGNMENT) * ALIGNMENT
        return offset
