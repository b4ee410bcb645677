"""Numbers that outlive an engine: one file in the pod's folder, mapped by an engine, its keeper and the engines after.

A number is a double at a fixed place, written by one store into memory that is the kernel's: a SIGKILL between two
bytecodes loses nothing that was written before it, and costs no flush. Names are added, never moved: first the slot,
then the count of slots, so that a reader sees whole ones only.

An engine and its keeper do not write at the same time: the keeper does once its engine is dead. The file is of one
pod's life (``instance``): the next one begins at 0. If there can be no file, the numbers live as long as this process
and its forks, which are the engines of a keeper.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_MAGIC: Final = b"hotspare ledger1"
_HEAD: Final = struct.Struct("<16s32sQ")
"""Magic, digest of the instance, slots in use."""
_USED: Final = struct.Struct("Q")
_USED_AT: Final = 48
_FIRST: Final = 64
_SLOT: Final = 192
_LENGTH: Final = struct.Struct("<H")
_VALUE: Final = struct.Struct("d")
"""Of the machine's own form: one store, which a SIGKILL cannot tear."""
_VALUE_AT: Final = 184
SLOTS: Final = 1024
"""Several times of what all metrics and their labels come to."""
MOST_KEY_BYTES: Final = _VALUE_AT - _LENGTH.size
SIZE: Final = _FIRST + SLOTS * _SLOT
LIVES: Final = "lives"
"""Key of how many engines have begun under this name in this pod's life, whichever keeper forked them."""
PID: Final = "pid"
"""Key of the process of the last one that has begun."""


class Ledger:
    """Sums by name; a ``workers.kept.Store``."""

    def __init__(self, memory: mmap.mmap, instance: str) -> None:
        """``memory``: of ``SIZE`` bytes, those of a ledger or of anything else. Of another instance, or none: begins
        anew."""
        self._memory = memory
        self._lock = threading.Lock()
        self._places: dict[str, int] = {}
        self._known = 0
        self._beyond: dict[str, float] = {}
        """Sums without a slot: a mistake of ours, and not the engine's end."""
        digest = hashlib.blake2b(instance.encode(), digest_size=32).digest()
        magic, owner, used = _HEAD.unpack_from(memory)
        if (magic, owner) != (_MAGIC, digest) or used > SLOTS or not self._read():
            self._places, self._known = {}, 0
            memory[:] = bytes(SIZE)
            _HEAD.pack_into(memory, 0, _MAGIC, digest, 0)

    @classmethod
    def open(cls, path: Path, *, instance: str) -> Ledger:
        """The one at ``path``, made if there is none; in memory of its own, with a warning, if there can be none."""
        try:
            memory = _mapped(path)
        except OSError as error:
            logger.warning("metrics begin anew with each process of this engine: no %s: %s", path, error.strerror)
            memory = mmap.mmap(-1, SIZE)
        return cls(memory, instance)

    def add(self, key: str, amount: float) -> None:
        with self._lock:
            place = self._place(key)
            if place is None:
                self._beyond[key] = self._beyond.get(key, 0.0) + amount
            else:
                (before,) = _VALUE.unpack_from(self._memory, place)
                _VALUE.pack_into(self._memory, place, before + amount)

    def put(self, key: str, value: float) -> None:
        with self._lock:
            place = self._place(key)
            if place is None:
                self._beyond[key] = value
            else:
                _VALUE.pack_into(self._memory, place, value)

    def values(self) -> Mapping[str, float]:
        with self._lock:
            self._read()
            found = {key: _VALUE.unpack_from(self._memory, place)[0] for key, place in self._places.items()}
            return found | self._beyond

    def close(self) -> None:
        """Unmap; the numbers stay in the file."""
        self._memory.close()

    def _place(self, key: str) -> int | None:
        """Where the number is, from now on at the latest. None: there is no room for it."""
        if (place := self._places.get(key)) is not None:
            return place
        self._read()  # the keeper may have added it, or an engine that it forked
        if (place := self._places.get(key)) is not None:
            return place
        raw = key.encode()
        if self._known == SLOTS or len(raw) > MOST_KEY_BYTES:
            if key not in self._beyond:
                logger.warning("no room for %r in the file of this engine's metrics: it begins anew with each", key)
            return None
        start = _FIRST + self._known * _SLOT
        self._memory[start : start + _SLOT] = bytes(_SLOT)
        _LENGTH.pack_into(self._memory, start, len(raw))
        self._memory[start + _LENGTH.size : start + _LENGTH.size + len(raw)] = raw
        self._known += 1
        _USED.pack_into(self._memory, _USED_AT, self._known)
        self._places[key] = start + _VALUE_AT
        return start + _VALUE_AT

    def _read(self) -> bool:
        """Take over slots that were added since the last look; False: they are none of ours."""
        (used,) = _USED.unpack_from(self._memory, _USED_AT)
        for number in range(self._known, used):
            start = _FIRST + number * _SLOT
            (length,) = _LENGTH.unpack_from(self._memory, start)
            try:
                key = self._memory[start + _LENGTH.size : start + _LENGTH.size + min(length, MOST_KEY_BYTES)].decode()
            except UnicodeDecodeError:
                return False
            self._places[key] = start + _VALUE_AT
            self._known = number + 1
        return True


def read(path: Path, *, instance: str) -> Mapping[str, float]:
    """What stands in the file of a pod's life now; nothing is changed there. Empty: there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return {}
    try:
        if os.fstat(fd).st_size != SIZE:
            return {}
        with mmap.mmap(fd, SIZE, access=mmap.ACCESS_COPY) as memory:
            return Ledger(memory, instance).values()
    finally:
        os.close(fd)


def _mapped(path: Path) -> mmap.mmap:
    """The file, as long as it must be, and on the disk in full: a store into a hole that a full disk cannot fill would
    be a SIGBUS."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(fd).st_size != SIZE:
            os.ftruncate(fd, 0)
        os.posix_fallocate(fd, 0, SIZE)
        return mmap.mmap(fd, SIZE)
    finally:
        os.close(fd)
