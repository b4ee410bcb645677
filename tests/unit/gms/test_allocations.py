from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gms.allocations import AllocationTable, Entry, NoRoomError
from gms.protocol import MAX_ALLOCATION, AllocationInfo, ErrorCode, GmsError

Table = AllocationTable[str]
CHUNK = 16


def made(tag: str = "pages", size: int = 60, *, pool: str = "kv", generation: int = 1, owner: str = "a") -> Entry[str]:
    return Entry(pool, generation, tag, size, CHUNK, owner)


def reserved(table: Table, tag: str = "pages", size: int = 60, **where: object) -> Entry[str]:
    entry = made(tag, size, **where)  # type: ignore[arg-type]
    table.reserve(entry)
    return entry


def refused(table: Table, entry: Entry[str]) -> GmsError:
    before = table.total_bytes
    with pytest.raises(GmsError) as caught:
        table.reserve(entry)
    assert table.total_bytes == before
    return caught.value


@pytest.mark.parametrize(
    ("size", "sizes"), [(1, [1]), (16, [16]), (17, [16, 1]), (32, [16, 16]), (60, [16, 16, 16, 12])]
)
def test_an_allocation_is_made_of_chunks_and_the_last_may_be_smaller(size: int, sizes: list[int]) -> None:
    entry = reserved(Table(), size=size)
    assert [entry.chunk_size(index) for index in range(entry.chunks)] == sizes
    assert entry.pages == [None] * len(sizes)


def test_reserved_counts_but_is_not_offered_until_every_chunk_is_there() -> None:
    table = Table(100)
    entry = made()
    assert not entry.filled
    table.reserve(entry)
    for index in range(entry.chunks):
        assert (entry.filled, table.info("kv", 1)) == (False, [])
        entry.pages[index] = "page"
    assert table.info("kv", 1) == [AllocationInfo("pages", 60, CHUNK)]
    assert table.total_bytes == 60


def test_a_cancelled_reservation_leaves_nothing() -> None:
    table = Table(100)
    entry = reserved(table)
    assert table.cancel(entry)
    assert not table.cancel(entry)
    assert (table.total_bytes, table.generations()) == (0, [])
    other = reserved(table, size=100)
    assert not table.holds(entry)
    assert not table.cancel(entry)
    assert table.holds(other)


def test_a_cancel_after_the_generation_went_does_not_count_twice() -> None:
    table = Table()
    entry = reserved(table)
    assert table.drop("kv", 1) == [entry]
    assert not table.cancel(entry)
    assert table.total_bytes == 0
    assert table.drop("kv", 1) == []


def test_what_does_not_fit_now_is_refused_with_names() -> None:
    table = Table(100)
    reserved(table)
    reserved(table, "w", 30, pool="weights/x", generation=2, owner="b")
    error = refused(table, made("index", 11, pool="kv_index", generation=3))
    assert (error.code, error.retryable) == (ErrorCode.OUT_OF_MEMORY, True)
    assert "60 by kv of a, 30 by weights/x of b" in str(error)
    reserved(table, "index", 10, pool="kv_index", generation=3)


def test_what_never_fits_is_not_worth_another_try() -> None:
    error = refused(Table(100), made(size=101))
    assert (error.code, error.retryable) == (ErrorCode.OUT_OF_MEMORY, False)
    assert "the memory limit is 100" in str(error)


@pytest.mark.parametrize(("lasting", "retryable"), [(0, True), (49, True), (50, True), (51, False), (60, False)])
def test_another_try_is_worth_it_if_it_fits_beside_what_lasts(lasting: int, retryable: bool) -> None:
    table = Table(100)
    reserved(table)
    entry = made("more", 50, generation=2)
    with pytest.raises(NoRoomError) as caught:
        table.reserve(entry, lasting=lambda: lasting)
    assert (caught.value.retryable, caught.value.missing_bytes) == (retryable, 10)
    assert ("will go by itself: try again" in str(caught.value)) is retryable
    assert "raise --memory-limit" in str(caught.value).replace("Raise", "raise")


def test_nobody_is_asked_what_lasts_while_there_is_room() -> None:
    for table in (Table(60), Table()):
        table.reserve(made(), lasting=lambda: pytest.fail("asked for nothing"))


@pytest.mark.parametrize(("size", "code"), [(60, ErrorCode.EXISTS), (61, ErrorCode.SIZE_MISMATCH)])
def test_a_tag_is_one_allocation(size: int, code: str) -> None:
    table = Table()
    reserved(table)
    assert refused(table, made(size=size)).code == code
    reserved(table, size=size, generation=2)


def test_the_number_of_chunks_is_bounded() -> None:
    table = Table(max_chunks=6)
    reserved(table, "a", 5 * CHUNK)
    reserved(table, "b", 1, generation=2)
    error = refused(table, made("c", 1))
    assert error.code == ErrorCode.TOO_MANY
    assert "(the most is 6, since this service may not open more files); " in str(error)
    assert "allow it more (ulimit -n), or raise --chunk-size" in str(error)
    table.drop("kv", 2)
    reserved(table, "c", 1)


def test_the_largest_request_costs_no_memory_before_it_is_refused() -> None:
    entry = Entry[str]("kv", 1, "pages", MAX_ALLOCATION, 4096, "a")
    error = refused(Table(), entry)
    assert error.code == ErrorCode.TOO_MANY
    assert "(the most is 8192); allocate fewer and larger ones, or raise --chunk-size (" in str(error)
    assert entry.pages == []


def test_what_stood_before_a_restart_is_counted_whatever_the_limit() -> None:
    table = Table(50)
    entry = made()
    table.restore(entry)
    assert (table.total_bytes, table.high_water_bytes) == (60, 60)
    assert not entry.filled
    assert refused(table, made("more", 1)).retryable
    table.drop("kv", 1)
    reserved(table, "more", 50)


def test_a_hand_over_changes_who_is_charged() -> None:
    table = Table()
    reserved(table)
    reserved(table, "other", 5, generation=2)
    table.hand_over("kv", 1, "b")
    assert table.bytes_by_owner() == {"b": 60, "a": 5}
    assert (table.bytes_in("kv"), table.bytes_of("kv", 1), table.bytes_of("kv", 2)) == (65, 60, 5)


def test_high_water_marks_stay_where_they_were() -> None:
    table = Table()
    reserved(table)
    reserved(table, "w", 30, pool="weights/x", generation=2)
    table.drop("kv", 1)
    reserved(table, "w2", 10, pool="weights/x", generation=2)
    assert (table.total_bytes, table.high_water_bytes) == (40, 90)
    assert (table.bytes_in("kv"), table.high_water_in("kv")) == (0, 60)
    assert (table.bytes_in("weights/x"), table.high_water_in("weights/x")) == (40, 40)


def test_the_names_of_weights_that_are_gone_do_not_pile_up() -> None:
    table = Table()
    for number in range(100):
        reserved(table, pool=f"weights/{number}", generation=number)
        table.drop(f"weights/{number}", number)
    assert not table._by_pool
    assert not table._high_by_pool
    assert table.high_water_in("weights/1") == 0


def test_a_manifest_goes_with_its_generation() -> None:
    table = Table()
    table.put_manifest("weights/x", 1, b"m")
    assert table.manifest("weights/x", 1) == b"m"
    table.drop("weights/x", 1)
    assert table.manifest("weights/x", 1) == b""


@given(st.lists(st.tuples(st.sampled_from("rcd"), st.integers(1, 2), st.sampled_from("ab"), st.integers(1, 50))))
def test_the_books_balance(steps: list[tuple[str, int, str, int]]) -> None:
    table, alive, highest = Table(100), dict[tuple[int, str], Entry[str]](), 0
    for what, generation, tag, size in steps:
        key = (generation, tag)
        if what == "d":
            dropped = table.drop("kv", generation)
            assert set(map(id, dropped)) == {id(e) for (g, _), e in alive.items() if g == generation}
            alive = {k: e for k, e in alive.items() if k[0] != generation}
        elif what == "c" and key in alive:
            assert table.cancel(alive.pop(key))
        elif what == "r" and key not in alive:
            entry = made(tag, size, generation=generation)
            if sum(entry.size_bytes for entry in alive.values()) + size <= 100:
                table.reserve(entry)
                alive[key] = entry
            else:
                assert refused(table, entry).code == ErrorCode.OUT_OF_MEMORY
        total = sum(entry.size_bytes for entry in alive.values())
        highest = max(highest, total)
        assert table.total_bytes == table.bytes_in("kv") == table.bytes_by_owner().total() == total
        assert table.high_water_bytes == table.high_water_in("kv") == highest
        assert table._chunks == sum(entry.chunks for entry in alive.values())
