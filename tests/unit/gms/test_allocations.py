from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gms import allocations
from gms.allocations import AllocationTable, Entry
from gms.protocol import ErrorCode, GmsError

Table = AllocationTable[str]


def test_reserved_counts_but_is_not_offered() -> None:
    table = Table(100)
    entry = table.reserve("kv", 1, "pages", 60, "engine a")
    assert table.total_bytes == 60
    assert table.info("kv", 1) == []
    entry.pages = "filled"
    assert [info.tag for info in table.info("kv", 1)] == ["pages"]


def test_a_cancelled_reservation_leaves_nothing() -> None:
    table = Table(100)
    entry = table.reserve("kv", 1, "pages", 60, "engine a")
    assert table.cancel(entry)
    assert not table.cancel(entry)
    assert (table.total_bytes, table.generations()) == (0, [])
    table.reserve("kv", 1, "pages", 100, "engine a")
    assert not table.holds(entry)


def test_a_cancel_after_the_generation_went_does_not_count_twice() -> None:
    table = Table()
    entry = table.reserve("kv", 1, "pages", 60, "engine a")
    assert table.drop("kv", 1) == [entry]
    assert not table.cancel(entry)
    assert table.total_bytes == 0


def test_what_does_not_fit_is_refused_with_names() -> None:
    table = Table(100)
    table.reserve("kv", 1, "pages", 60, "engine a")
    table.reserve("weights/x", 2, "w", 30, "engine b")
    with pytest.raises(GmsError) as caught:
        table.reserve("kv_index", 3, "index", 11, "engine b")
    assert caught.value.code == ErrorCode.OUT_OF_MEMORY
    assert "60 by kv of engine a, 30 by weights/x of engine b" in str(caught.value)
    table.reserve("kv_index", 3, "index", 10, "engine b")


@pytest.mark.parametrize(("size", "code"), [(60, ErrorCode.EXISTS), (61, ErrorCode.SIZE_MISMATCH)])
def test_a_tag_is_one_allocation(size: int, code: str) -> None:
    table = Table()
    table.reserve("kv", 1, "pages", 60, "engine a")
    with pytest.raises(GmsError) as caught:
        table.reserve("kv", 1, "pages", size, "engine a")
    assert caught.value.code == code
    table.reserve("kv", 2, "pages", size, "engine a")


def test_the_number_of_allocations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocations, "MAX_ALLOCATIONS", 2)
    table = Table()
    table.reserve("kv", 1, "a", 1, "engine a")
    table.reserve("kv", 2, "b", 1, "engine a")
    with pytest.raises(GmsError) as caught:
        table.reserve("kv", 1, "c", 1, "engine a")
    assert caught.value.code == ErrorCode.TOO_MANY
    table.drop("kv", 2)
    table.reserve("kv", 1, "c", 1, "engine a")


def test_a_hand_over_changes_who_is_charged() -> None:
    table = Table()
    table.reserve("kv", 1, "pages", 60, "engine a")
    table.hand_over("kv", 1, "engine b")
    assert table.bytes_by_owner() == {"engine b": 60}
    assert table.bytes_by_pool() == {"kv": 60}


def test_a_manifest_goes_with_its_generation() -> None:
    table = Table()
    table.put_manifest("weights/x", 1, b"m")
    assert table.manifest("weights/x", 1) == b"m"
    table.drop("weights/x", 1)
    assert table.manifest("weights/x", 1) == b""


@given(st.lists(st.tuples(st.sampled_from("rcd"), st.integers(1, 2), st.sampled_from("ab"), st.integers(1, 50))))
def test_the_books_balance(steps: list[tuple[str, int, str, int]]) -> None:
    table, alive = Table(100), dict[tuple[int, str], Entry[str]]()
    for what, generation, tag, size in steps:
        key = (generation, tag)
        if what == "d":
            dropped = table.drop("kv", generation)
            assert set(map(id, dropped)) == {id(e) for (g, _), e in alive.items() if g == generation}
            alive = {k: e for k, e in alive.items() if k[0] != generation}
        elif what == "c" and key in alive:
            assert table.cancel(alive.pop(key))
        elif what == "r" and key not in alive:
            fits = sum(entry.size_bytes for entry in alive.values()) + size <= 100
            if fits:
                alive[key] = table.reserve("kv", generation, tag, size, "engine a")
            else:
                with pytest.raises(GmsError):
                    table.reserve("kv", generation, tag, size, "engine a")
        assert table.total_bytes == sum(entry.size_bytes for entry in alive.values())
        assert table.bytes_by_pool().total() == table.total_bytes
