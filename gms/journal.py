"""What a service that starts again must know, in files: the pools as they were, and who can hand their pages back.

The memory of a killed service lives on in the clients that have it mapped. To take it back, and nothing else, the next
service needs to know what stood where. For each pool there is a record, written whole and put in place by a rename, and
twice, since a file can be damaged by others than its writer; the newer sound one counts.

Whether anybody is left to hand pages back is asked of the kernel: with each lease the client gets a descriptor of a
locked file (flock belongs to the open file, which the service itself does not keep open). While one of a pool's lease
files is locked, a holder of its pages lives, whatever PID namespace it is in.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from gms.backends.base import Identity

FORMAT: Final = 1
_DIGEST_BYTES: Final = 16
MAX_RECORD: Final = 64 * 1024 * 1024
"""Bytes of a record's file: a manifest, and the digests and identities of all chunks there can be."""
MAX_GENERATION: Final = 1 << 61
"""Half of what the protocol has room for."""
_COPIES: Final = ("a", "b")
_COMMITTING: Final = "-c"


class AllocationRecord(Struct, frozen=True, kw_only=True):
    tag: str
    size_bytes: int
    chunk_bytes: int
    owner: str
    identities: list[Identity]
    digests: list[bytes]


class PoolRecord(Struct, frozen=True, kw_only=True):
    """`generation` 0: the pool had no pages, only epochs (`fence`, `lease_epoch`: see `gms.epoch_pool.EpochPool`).
    `highest_generation` is that of all pools when this was written.

    `committing`: its writer had asked for the commit of this generation; the pool has another record for the one that
    stood before. `corrupt`: why what was committed is given to nobody any more; `condemned`: all generations
    that were found wrong, and why. `processes`: how many stood behind the
    holder of a pool that has one. `algorithm`: what the digests are."""

    device_id: str
    pool: str
    generation: int
    highest_generation: int
    fence: int
    lease_epoch: int
    manifest: bytes
    allocations: list[AllocationRecord]
    committing: bool = False
    corrupt: str = ""
    condemned: dict[int, str] = {}
    processes: int = 0
    algorithm: str = ""
    format: int = FORMAT


class _Sealed(Struct, frozen=True, array_like=True):
    serial: int
    record: PoolRecord


class Journal:
    """A folder of records and lease files. Raises OSError from the constructor if the folder cannot be had, or is not
    this user's alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place = _make(folder)
        self._serial = 0
        self._saved: dict[str, PoolRecord] = {}  # by the stem of its files
        self._lingering: set[Path] = set()
        self.highest_generation = 0
        """The highest that a record or a living client's lease names: a higher one means nothing to anybody."""
        self.damage: dict[str, str] = {}
        """File name → what is wrong with it, of records that could not be read when the service started."""

    def load(self) -> list[PoolRecord]:
        """The records of sound files. What is damaged is told in `damage`; saving the record again mends its copies."""
        self._lingering = set(self._folder.glob("*.lease"))
        self._sweep()
        self.highest_generation = max((_generation(path) for path in self._lingering), default=0)
        found: dict[str, _Sealed] = {}
        copies: Counter[tuple[str, int]] = Counter()
        for path in sorted(self._folder.glob("*.[ab]")):
            try:
                sealed = _unseal(_read(path), path.stem)
            except (OSError, ValueError) as error:
                self.damage[path.name] = str(error)
                continue
            self._serial = max(self._serial, sealed.serial)
            self.highest_generation = max(self.highest_generation, sealed.record.highest_generation)
            copies[path.stem, sealed.serial] += 1
            if path.stem not in found or found[path.stem].serial < sealed.serial:
                found[path.stem] = sealed
        for path in self._folder.glob("*.new"):
            _remove(path)
        self._saved = {
            stem: sealed.record for stem, sealed in found.items() if copies[stem, sealed.serial] == len(_COPIES)
        }
        return [sealed.record for sealed in found.values()]

    @property
    def intact(self) -> bool:
        """Whether the folder is the one that was opened; somebody may have removed it."""
        try:
            found = self._folder.stat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._place

    def missing(self) -> list[str]:
        """Pools whose record was written and is not there any more: it is to be saved again."""
        gone = [stem for stem in self._saved if not all((self._folder / f"{stem}.{copy}").exists() for copy in _COPIES)]
        return [self._saved.pop(stem).pool for stem in gone]

    def make_anew(self) -> None:
        """Makes the folder again, empty; every record is to be saved again. Raises OSError."""
        self._place = _make(self._folder)
        self._saved.clear()
        self._lingering.clear()

    def save(self, record: PoolRecord) -> None:
        """Writes a pool's record if it differs from the last one. Raises OSError: the last one stands then, or this one
        if its first copy could still be written."""
        stem = _stem(record.pool, committing=record.committing)
        if self._saved.get(stem) == record:
            return
        self._saved.pop(stem, None)
        self._serial += 1
        raw = _seal(_Sealed(self._serial, record))
        for copy in _COPIES:
            new = self._folder / f"{stem}.{copy}.new"
            try:
                descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                with open(descriptor, "wb") as file:
                    file.write(raw)
                new.replace(self._folder / f"{stem}.{copy}")
            except OSError:
                _remove(new)
                raise
        self._saved[stem] = record

    def forget(self, pool: str, *, committing: bool = False) -> None:
        """There is nothing left of the pool that could be handed back; or no commit under way. Raises OSError."""
        stem = _stem(pool, committing=committing)
        self._saved.pop(stem, None)
        for copy in _COPIES:
            with suppress(FileNotFoundError):
                (self._folder / f"{stem}.{copy}").unlink()

    def open_lease(self, pool: str, generation: int) -> tuple[int, Path]:
        """A locked descriptor for the client, closed here once it is sent, and the file behind it. Raises OSError."""
        self._sweep()
        path = self._folder / f"{_stem(pool)}.{generation}.{secrets.token_hex(8)}.lease"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            _remove(path)
            raise
        return descriptor, path

    def takes_files(self) -> bool:
        """Whether one could be made now."""
        path = self._folder / f"{secrets.token_hex(8)}.new"
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except OSError:
            return False
        _remove(path)
        return True

    def close_lease(self, path: Path) -> None:
        """The service counts on this holder no more. The file stays while the client keeps it locked: it could still
        hand pages back to the next service."""
        if _locked(path):
            self._lingering.add(path)
        else:
            _remove(path)

    def alive(self, pool: str, generation: int) -> bool:
        """Whether a client lives that held this generation. Removes the files of those that do not."""
        return self._any_locked(f"{_stem(pool)}.{generation}.*.lease")

    def close(self) -> None:
        """Removes what is of no use to a next service, the folder included if nothing is. A pool's record is of use as
        long as a client lives that held any of its generations: it may have to be told that it was fenced."""
        for path in self._folder.glob("*.[ab]"):
            if not self._any_locked(f"{path.stem.removesuffix(_COMMITTING)}.*.lease"):
                _remove(path)
        self._any_locked("*.lease")
        with suppress(OSError):  # not empty
            self._folder.rmdir()

    def _any_locked(self, pattern: str) -> bool:
        """Whether one of these lease files is locked. Removes those that are not."""
        locked = 0
        for path in self._folder.glob(pattern):
            if _locked(path):
                locked += 1
            else:
                _remove(path)
        return locked > 0

    def _sweep(self) -> None:
        free = {path for path in self._lingering if not _locked(path)}
        for path in free:
            _remove(path)
        self._lingering -= free


def _make(folder: Path) -> tuple[int, int]:
    """The folder, made if it is missing; its device and inode. Raises OSError if it is not this user's alone."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(13, "it is not this user's alone (0700)", str(folder))
    return found.st_dev, found.st_ino


def _stem(pool: str, *, committing: bool = False) -> str:
    return hashlib.sha256(pool.encode()).hexdigest()[:24] + (_COMMITTING if committing else "")


def _seal(sealed: _Sealed) -> bytes:
    body = msgspec.msgpack.encode(sealed)
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body


def _unseal(raw: bytes, stem: str) -> _Sealed:
    """The content of the file called `stem`. Raises ValueError, which says what is wrong."""
    body = raw[_DIGEST_BYTES:]
    if raw[:_DIGEST_BYTES] != hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest():
        raise ValueError("its checksum does not match: it was truncated or changed")
    try:
        sealed = msgspec.msgpack.decode(body, type=_Sealed)
    except msgspec.DecodeError as error:
        raise ValueError(f"another release wrote it: {error}") from error
    if sealed.record.format != FORMAT:
        raise ValueError(f"it has format {sealed.record.format}, this release reads {FORMAT}")
    if _stem(sealed.record.pool, committing=sealed.record.committing) != stem:
        raise ValueError(f"it is the record of {sealed.record.pool}, under another pool's name")
    return sealed


def _read(path: Path) -> bytes:
    """A record's file. Raises ValueError if it can be none, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no file")
        if found.st_size > MAX_RECORD:
            raise ValueError(f"it has {found.st_size} bytes, no record has more than {MAX_RECORD}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _generation(lease: Path) -> int:
    """The generation that a lease file is of; 0 if it is none of ours."""
    parts = lease.name.split(".")
    number = int(parts[1]) if len(parts) > 1 and re.fullmatch(r"[0-9]{1,19}", parts[1]) else 0
    return number if number < MAX_GENERATION else 0


def _locked(path: Path) -> bool:
    """Whether somebody has a lease file locked. One that cannot be looked at counts: who gives a living client up would
    make a second copy."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove(path: Path) -> None:
    """If it is there and can be removed: a file too many does no harm, and a folder that cannot be written is told when
    a record is due."""
    with suppress(OSError):
        path.unlink()
