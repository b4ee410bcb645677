"""[P] The prefix index beside the KV pages: which block holds which prefix, in memory that outlives the engine.

An engine's KV pages outlive it (``gms``), but what they hold was known to its scheduler alone. So it is written down as
it becomes true, in an allocation of the same pool, and the next engine reads it when it is promoted.

    first page    header: what the index speaks of; its word 0 is the format, and 0 while the rest is no header
    second page   fault: text, if the engine died of a memory fault (``workers.fault_mark``); zero otherwise
    from there    one entry of eight words a block; its word 0 is its seal, and 0 while it is none

A process that is killed leaves the stores that came before that moment, in their order, and none that came after. Order
is therefore all that is needed: the seal is stored after everything that it vouches for, and taken away before anything
of that changes. All stores are whole, aligned words. So a cut between any two of them leaves an index that is right,
and at most lacks its youngest entry; ``tests/unit/workers/test_kv_index.py`` cuts at each.

When an entry may be sealed is its writer's to know: once the output of the step that computed its block is there, and
no longer than until the block is given to somebody else. A writer that is closed does nothing any more, so that
whoever takes the pages away closes it, and whoever still holds blocks then need not know.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple, Protocol
from zlib import crc32

import msgspec

from gms.legible import trace

WORD_BYTES: Final = 8
PAGE_BYTES: Final = 4096
FORMAT: Final = int.from_bytes(b"hskvidx1", "little")
"""The header's word 0: this form, in this version."""

FAULT_OFFSET: Final = PAGE_BYTES
"""Where the text of a fault begins, in bytes. What is longer than its page runs on into entries that are worth nothing
then."""
FAULT_BYTES: Final = PAGE_BYTES
_FAULT: Final = FAULT_OFFSET // WORD_BYTES
_ENTRIES: Final = _FAULT + FAULT_BYTES // WORD_BYTES
_ENTRY_WORDS: Final = 8

_EPOCH, _BLOCKS, _BLOCK_TOKENS, _CRC, _TOKEN, _FINGERPRINT = 1, 2, 3, 4, 5, 7
TOKEN_BYTES: Final = 16
FINGERPRINT_BYTES: Final = 32

_SEAL, _STAMP, _SIZES, _KEY = 0, 1, 2, 3
MAX_KEY_BYTES: Final = (_ENTRY_WORDS - _KEY) * WORD_BYTES
_SEALED: Final = 1 << 63
"""In a seal beside the checksum, so that no seal is 0."""

IN_USE: Final = 1 << 63
"""In a stamp: a request uses the block, so it is to be the last to go. Below it are times, the older the sooner."""


class Words(Protocol):
    """64-bit words of memory that is shared: a mapping cast to them."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...

    def __len__(self) -> int: ...


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's blocks are. Engines of equal shape may use each other's."""

    blocks: int
    block_tokens: int
    fingerprint: bytes
    """``FINGERPRINT_BYTES`` that stand for everything that decides what a block holds and how a prefix is named: model,
    layout, types, hash and its seed."""

    @property
    def size_bytes(self) -> int:
        return (_ENTRIES + self.blocks * _ENTRY_WORDS) * WORD_BYTES


class Entry(NamedTuple):
    """``block`` holds the last tokens of a prefix of ``tokens`` tokens, which the engine calls ``key``."""

    block: int
    key: bytes
    tokens: int
    stamp: int = 0


class Refusal(Enum):
    """Why an engine starts with an empty cache. The value is a metric's label."""

    OFF = "off"
    UNSUPPORTED = "unsupported"
    NEW_PAGES = "new_pages"
    NO_INDEX = "no_index"
    FORMAT = "format"
    DAMAGED = "damaged"
    CONFIGURATION = "configuration"
    OTHER_PAGES = "other_pages"
    FAULT = "fault"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES: Final = {
    Refusal.OFF: "it is switched off",
    Refusal.UNSUPPORTED: "this engine cannot carry its cache over",
    Refusal.NEW_PAGES: "the pages are new",
    Refusal.NO_INDEX: "the engine before kept no index of them",
    Refusal.FORMAT: "another version of this program wrote the index",
    Refusal.DAMAGED: "the index is damaged",
    Refusal.CONFIGURATION: "the engine before was configured in another way",
    Refusal.OTHER_PAGES: "the index speaks of other pages",
    Refusal.FAULT: "the engine before died of a memory fault",
}


class KvIndex:
    """The index over ``words``, of an engine whose blocks have this ``shape``. One writer, in one thread."""

    def __init__(self, words: Words, shape: Shape) -> None:
        """Raises ValueError: the memory is too small, or the fingerprint has another length."""
        if len(shape.fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(shape.fingerprint)}")
        if len(words) * WORD_BYTES < shape.size_bytes:
            raise ValueError(f"an index of {shape.blocks} blocks takes {shape.size_bytes} bytes")
        self.shape: Final = shape
        self._words: Words | None = words

    # --- reading: before anything is written

    def refusal(self, *, token: bytes, epoch: int) -> Refusal | None:
        """Why the entries are not to be believed by an engine of ``epoch`` that was handed pages which are known as
        ``token`` (empty: nobody who kept an index has had them), or None."""
        words = self._open()
        if words[_FAULT]:
            return Refusal.FAULT
        if not token or not words[0]:
            return Refusal.NO_INDEX
        if words[0] != FORMAT:
            return Refusal.FORMAT
        if words[_CRC] != _header_crc(words):
            return Refusal.DAMAGED
        if _bytes(words, _TOKEN, TOKEN_BYTES) != token or words[_EPOCH] >= epoch:
            return Refusal.OTHER_PAGES
        same = (
            words[_BLOCKS] == self.shape.blocks
            and words[_BLOCK_TOKENS] == self.shape.block_tokens
            and _bytes(words, _FINGERPRINT, FINGERPRINT_BYTES) == self.shape.fingerprint
        )
        return None if same else Refusal.CONFIGURATION

    def entries(self) -> list[Entry] | None:
        """What the blocks hold, in the order in which they may be given up; None if any entry is not as it was sealed,
        for then no other can be believed either.

        Of blocks that were last used at the same time the deeper go first: without its beginning no prefix is found.
        """
        words = self._open()
        found: list[Entry] = []
        for block in range(self.shape.blocks):
            at = _ENTRIES + block * _ENTRY_WORDS
            if not (seal := words[at]):
                continue
            length = words[at + _SIZES] & 0xFF
            if seal != _seal(words, at, block) or not 0 < length <= MAX_KEY_BYTES:
                return None
            key = _bytes(words, at + _KEY, MAX_KEY_BYTES)[:length]
            found.append(Entry(block, key, words[at + _SIZES] >> 8, words[at + _STAMP]))
        found.sort(key=lambda entry: (entry.stamp, -entry.tokens, entry.block))
        return found

    @property
    def fault(self) -> str:
        """What the engine before wrote down as it died of a fault, fit for a log; empty if it did not."""
        words = self._open()
        text = b"".join(words[at].to_bytes(WORD_BYTES, "little") for at in range(_FAULT, _ENTRIES))
        return trace(text.partition(b"\0")[0].decode("utf-8", "replace"))

    # --- writing

    def begin(self, *, token: bytes, epoch: int) -> None:
        """Start empty, for pages that are known as ``token`` from now on. The header is taken away first and put back
        last."""
        words = self._open()
        words[0] = 0
        for block in range(self.shape.blocks):
            words[_ENTRIES + block * _ENTRY_WORDS] = 0
        for at in range(_FAULT, _ENTRIES):
            words[at] = 0
        words[_EPOCH] = epoch
        words[_BLOCKS] = self.shape.blocks
        words[_BLOCK_TOKENS] = self.shape.block_tokens
        _store(words, _TOKEN, token, TOKEN_BYTES)
        _store(words, _FINGERPRINT, self.shape.fingerprint, FINGERPRINT_BYTES)
        words[_CRC] = _header_crc(words)
        words[0] = FORMAT

    def go_on(self, *, epoch: int) -> None:
        """Write on where the engine before ended. The epoch stands outside of the checksum: one store."""
        self._open()[_EPOCH] = epoch

    def publish(self, entry: Entry) -> None:
        """The block holds this from now on: the output of the step that computed it is there."""
        if (words := self._words) is None:
            return
        at = _ENTRIES + entry.block * _ENTRY_WORDS
        words[at] = 0
        words[at + _STAMP] = entry.stamp
        words[at + _SIZES] = entry.tokens << 8 | len(entry.key)
        _store(words, at + _KEY, entry.key, MAX_KEY_BYTES)
        words[at] = _seal(words, at, entry.block)

    def stamp(self, block: int, stamp: int) -> None:
        """When the block was used, for ``entries``' order. Outside of the seal: one store."""
        if (words := self._words) is not None:
            words[_ENTRIES + block * _ENTRY_WORDS + _STAMP] = stamp

    def clear(self, block: int) -> None:
        """The block is about to be given away, and written to."""
        if (words := self._words) is not None:
            words[_ENTRIES + block * _ENTRY_WORDS] = 0

    def clear_all(self) -> None:
        for block in range(self.shape.blocks):
            self.clear(block)

    def mark_fault(self, text: str) -> None:
        """Nothing that the pages hold can be believed any more. The first word is stored last: it is what counts."""
        if (words := self._words) is None:
            return
        data = (text.encode() or b"?").replace(b"\0", b"?")[:FAULT_BYTES]
        for at in reversed(range(0, len(data), WORD_BYTES)):
            words[_FAULT + at // WORD_BYTES] = int.from_bytes(data[at : at + WORD_BYTES], "little")

    # --- its end

    @property
    def closed(self) -> bool:
        return self._words is None

    def close(self) -> None:
        """Nothing is read or written any more: the memory is about to go."""
        self._words = None

    def _open(self) -> Words:
        if self._words is None:
            raise ValueError("the index is closed")
        return self._words


def _store(words: Words, at: int, data: bytes, room: int) -> None:
    data = data.ljust(room, b"\0")
    for number in range(room // WORD_BYTES):
        words[at + number] = int.from_bytes(data[number * WORD_BYTES : (number + 1) * WORD_BYTES], "little")


def _bytes(words: Words, at: int, count: int) -> bytes:
    return b"".join(words[at + number].to_bytes(WORD_BYTES, "little") for number in range(count // WORD_BYTES))


def _header_crc(words: Words) -> int:
    """Over all but the epoch, which changes alone."""
    numbers = b"".join(words[at].to_bytes(WORD_BYTES, "little") for at in (_BLOCKS, _BLOCK_TOKENS))
    return crc32(numbers + _bytes(words, _TOKEN, TOKEN_BYTES) + _bytes(words, _FINGERPRINT, FINGERPRINT_BYTES))


def _seal(words: Words, at: int, block: int) -> int:
    """Over sizes and key, and over whose entry it is."""
    return _SEALED | crc32(_bytes(words, at + _SIZES, WORD_BYTES + MAX_KEY_BYTES), block)
