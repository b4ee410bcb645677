"""Where a model's tensors lie in an allocation: the standard form of a manifest. Pure.

The service keeps manifests as bytes and asks nothing of them; one in this form makes its errors better, since a piece
of memory that has changed can then be called by the name of its tensor.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

ALIGNMENT: Final = 4096
"""A page: a tensor never shares one with its neighbour, so that what is read is what is resident."""


class Slot(Struct, frozen=True, kw_only=True):
    """One storage, `size_bytes` at `offset` in the allocation, and the tensor over it. `shape`, `stride` and
    `storage_offset` count elements of `dtype`, which is called as torch calls it ("bfloat16")."""

    offset: int
    size_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    dtype: str


class Manifest(Struct, frozen=True, kw_only=True, tag="tensors"):
    """What a reader needs to build a model without its checkpoint. `tag` names the allocation, `aliases` maps the name
    of a tied tensor to the name that it is stored under."""

    tag: str
    size_bytes: int
    parameters: dict[str, Slot]
    buffers: dict[str, Slot]
    aliases: dict[str, str]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, raw: bytes) -> Manifest:
        """Raises msgspec.DecodeError for bytes that are no such manifest."""
        return msgspec.msgpack.decode(raw, type=cls)

    def slots(self) -> dict[str, Slot]:
        return {**self.parameters, **self.buffers}


class SlotPlanner:
    """Gives each distinct storage a place."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def place(self, size_bytes: int) -> int:
        """The offset for `size_bytes` more."""
        offset = self.size_bytes
        self.size_bytes += -(-max(size_bytes, 1) // ALIGNMENT) * ALIGNMENT
        return offset
