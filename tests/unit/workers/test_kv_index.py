"""The prefix index: what is read back, what is refused, and that no cut between two stores makes it lie."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.kv_index import (
    FAULT_BYTES,
    FAULT_OFFSET,
    IN_USE,
    MAX_KEY_BYTES,
    WORD_BYTES,
    Entry,
    KvIndex,
    Refusal,
    Shape,
)

BLOCKS = 5
TOKEN = b"these very pages"
SHAPE = Shape(blocks=BLOCKS, block_tokens=16, fingerprint=bytes(range(32)))


class Cut(Exception):
    """The process was killed."""


class Memory:
    """Words that outlive their writer, who may make ``stores`` stores and is killed at the next."""

    def __init__(self) -> None:
        self.words = [0] * (SHAPE.size_bytes // WORD_BYTES)
        self.stores: int | None = None
        self.made = 0

    def __getitem__(self, index: int) -> int:
        return self.words[index]

    def __setitem__(self, index: int, value: int) -> None:
        if self.stores is not None and self.made >= self.stores:
            raise Cut
        struct.pack("<Q", value)  # what a word cannot hold is an error here as it is there
        self.made += 1
        self.words[index] = value

    def __len__(self) -> int:
        return len(self.words)


def begun(memory: Memory, *, epoch: int = 1, shape: Shape = SHAPE) -> KvIndex:
    index = KvIndex(memory, shape)
    index.begin(token=TOKEN, epoch=epoch)
    return index


def read(memory: Memory, *, token: bytes = TOKEN, epoch: int = 2, shape: Shape = SHAPE) -> list[Entry] | Refusal:
    """As the next engine does."""
    index = KvIndex(memory, shape)
    refusal = index.refusal(token=token, epoch=epoch)
    if refusal is not None:
        return refusal
    entries = index.entries()
    return Refusal.DAMAGED if entries is None else entries


def test_what_was_published_is_read_back() -> None:
    memory = Memory()
    index = begun(memory)
    entries = [Entry(1, b"a" * 36, 16, 7), Entry(4, b"k" * MAX_KEY_BYTES, 1 << 30, 8), Entry(0, b"b\0", 32, IN_USE)]
    for entry in entries:
        index.publish(entry)
    assert read(memory) == entries


def test_the_next_engine_goes_on_with_it() -> None:
    memory = Memory()
    begun(memory).publish(Entry(1, b"a", 16))
    second = KvIndex(memory, SHAPE)
    second.go_on(epoch=2)
    second.publish(Entry(2, b"b", 32))
    assert read(memory, epoch=2) is Refusal.OTHER_PAGES, "an epoch is an engine's alone"
    assert read(memory, epoch=3) == [Entry(2, b"b", 32), Entry(1, b"a", 16)]


def test_the_oldest_goes_first_and_of_one_age_the_deepest() -> None:
    memory = Memory()
    index = begun(memory)
    for block, tokens, stamp in ((0, 16, 5), (1, 32, 5), (2, 16, 9), (3, 16, IN_USE | 1), (4, 48, 5)):
        index.publish(Entry(block, b"k%d" % block, tokens, stamp))
    index.stamp(2, 4)
    found = read(memory)
    assert isinstance(found, list)
    assert [entry.block for entry in found] == [2, 4, 1, 0, 3]


@pytest.mark.parametrize(
    "changed",
    [
        {"blocks": BLOCKS - 1},
        {"block_tokens": 32},
        {"fingerprint": bytes(32)},
    ],
)
def test_another_configuration_is_refused(changed: dict[str, object]) -> None:
    memory = Memory()
    begun(memory).publish(Entry(1, b"a", 16))
    shape = Shape(**{"blocks": BLOCKS, "block_tokens": 16, "fingerprint": SHAPE.fingerprint, **changed})  # type: ignore[arg-type]
    assert read(memory, shape=shape) is Refusal.CONFIGURATION


def test_other_pages_are_refused() -> None:
    memory = Memory()
    begun(memory)
    assert read(memory, token=b"those other page") is Refusal.OTHER_PAGES
    assert read(memory, token=b"") is Refusal.NO_INDEX, "somebody had the pages who kept none"
    assert read(memory, epoch=1) is Refusal.OTHER_PAGES


def test_nothing_is_no_index() -> None:
    assert read(Memory()) is Refusal.NO_INDEX


def test_another_form_is_refused() -> None:
    memory = Memory()
    begun(memory)
    memory.words[0] += 1
    assert read(memory) is Refusal.FORMAT


@pytest.mark.parametrize("text", ["CUDA error: an illegal memory access was encountered", "", "x" * 2 * FAULT_BYTES])
def test_a_fault_is_refused_whatever_else_stands_there(text: str) -> None:
    memory = Memory()
    index = begun(memory)
    index.publish(Entry(1, b"a", 16))
    index.mark_fault(text)
    assert read(memory) is Refusal.FAULT
    assert KvIndex(memory, SHAPE).fault == (text or "?")[:FAULT_BYTES]
    begun(memory, epoch=2)
    assert read(memory, epoch=3) == []


def test_a_handlers_text_is_a_fault_also_where_it_is_longer_than_its_page() -> None:
    memory = Memory()
    begun(memory).publish(Entry(1, b"a", 16))
    data = b"Fatal Python error: Segmentation fault\n".ljust(FAULT_BYTES + 100, b".")
    at = FAULT_OFFSET // WORD_BYTES
    for number in range(len(data) // WORD_BYTES):
        memory.words[at + number] = int.from_bytes(data[number * WORD_BYTES :][:WORD_BYTES], "little")
    assert read(memory) is Refusal.FAULT
    assert KvIndex(memory, SHAPE).fault.startswith("Fatal Python error")


def test_any_changed_word_of_header_or_entry_is_found() -> None:
    memory = Memory()
    index = begun(memory)
    index.publish(Entry(1, b"a" * 36, 16, 3))
    whole = list(memory.words)
    epoch, first = 1, 1024 + 8
    for at in (*range(10), *range(first, first + 8)):
        if at in (epoch, first + 1):
            continue  # stored alone, and no more than an order
        memory.words = list(whole)
        memory.words[at] ^= 1 << 17
        if (at < 10 and (at <= 4 or whole[at])) or at >= first:
            assert isinstance(read(memory), Refusal), f"word {at}"


def test_an_entry_at_another_blocks_place_is_found() -> None:
    memory = Memory()
    begun(memory).publish(Entry(1, b"a", 16))
    memory.words[1024 + 16 : 1024 + 24] = memory.words[1024 + 8 : 1024 + 16]
    assert read(memory) is Refusal.DAMAGED


def test_closed_it_writes_nothing_and_cannot_be_read() -> None:
    memory = Memory()
    index = begun(memory)
    index.publish(Entry(1, b"a", 16))
    index.close()
    index.clear(1)
    index.clear_all()
    index.publish(Entry(2, b"b", 16))
    index.stamp(1, 9)
    index.mark_fault("late")
    assert index.closed
    with pytest.raises(ValueError, match="closed"):
        index.entries()
    assert read(memory) == [Entry(1, b"a", 16)]


def test_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="takes"):
        KvIndex([0] * 10, SHAPE)
    with pytest.raises(ValueError, match="fingerprint"):
        KvIndex(Memory(), Shape(blocks=1, block_tokens=1, fingerprint=b"short"))


# --- cuts: a model of what the pages hold, and a writer that is killed after every possible number of stores


Step = tuple[str, int, int]
"""(what, block, content)."""


def play(index: KvIndex, steps: list[Step], pages: dict[int, int]) -> None:
    """What an engine does, in its order. ``pages`` are what the blocks really hold; 0 is half-written."""
    for what, block, content in steps:
        if what == "compute":
            index.clear(block)
            pages[block] = 0  # the step is under way: from here on anything may stand there
            pages[block] = content
            index.publish(Entry(block, b"content %d" % content, content, content))
        elif what == "hand out":
            index.clear(block)
            pages[block] = 0
        elif what == "touch":
            index.stamp(block, IN_USE | content)
        else:
            index.clear_all()
            pages.clear()


def truth(memory: Memory, pages: dict[int, int]) -> None:
    """Whatever the next engine believes stands in the pages."""
    found = read(memory)
    assert isinstance(found, list)
    for entry in found:
        assert entry.key == b"content %d" % pages[entry.block]
        assert entry.tokens == pages[entry.block]


def cuts(act: Callable[[Memory], None]) -> Iterator[Memory]:
    """The memory after every number of stores that ``act`` makes, up to all of them."""
    whole = Memory()
    act(whole)
    for stores in range(whole.made + 1):
        memory = Memory()
        memory.stores = stores
        with suppress(Cut):
            act(memory)
        memory.stores = None
        yield memory


steps = st.lists(
    st.tuples(
        st.sampled_from(["compute", "compute", "compute", "hand out", "touch", "reset"]),
        st.integers(0, BLOCKS - 1),
        st.integers(1, 1 << 40),
    ),
    max_size=6,
)


@given(steps)
def test_no_cut_makes_it_lie(steps: list[Step]) -> None:
    pages: dict[int, int] = {}
    after = Memory()

    def act(memory: Memory) -> None:
        pages.clear()
        memory.words = list(after.words)
        play(KvIndex(memory, SHAPE), steps, pages)

    begun(after)
    for memory in cuts(act):
        truth(memory, pages)


def test_the_model_can_fail() -> None:
    """An engine that publishes before it computes is found out, and one that hands out before it clears."""

    def too_early(index: KvIndex, pages: dict[int, int]) -> None:
        pages[1] = 0
        index.publish(Entry(1, b"content 7", 7))
        index.stamp(1, 1)
        pages[1] = 7

    def too_late(index: KvIndex, pages: dict[int, int]) -> None:
        pages[1] = 7
        index.publish(Entry(1, b"content 7", 7))
        pages[1] = 0
        index.clear(1)

    def check(wrong: Callable[[KvIndex, dict[int, int]], None]) -> None:
        pages: dict[int, int] = {}

        def act(memory: Memory) -> None:
            pages.clear()
            begun(memory)
            wrong(KvIndex(memory, SHAPE), pages)

        for memory in cuts(act):
            if not isinstance(read(memory), Refusal):
                truth(memory, pages)

    for wrong in (too_early, too_late):
        with pytest.raises(AssertionError):
            check(wrong)


def test_no_cut_of_a_start_makes_old_entries_new() -> None:
    """The memory has an index of other pages, or a fault in it, when an engine starts empty."""
    old = Memory()
    index = begun(old)
    for block in range(BLOCKS):
        index.publish(Entry(block, b"old", 16))
    index.mark_fault("SIGSEGV")
    new = b"pages since then"

    def act(memory: Memory) -> None:
        memory.words = list(old.words)
        KvIndex(memory, SHAPE).begin(token=new, epoch=2)

    for memory in cuts(act):
        for token in (TOKEN, new):
            assert read(memory, token=token, epoch=3) in (
                [],
                Refusal.FAULT,
                Refusal.NO_INDEX,
                Refusal.OTHER_PAGES,
                Refusal.DAMAGED,
            )
    assert read(memory, token=new, epoch=3) == []
