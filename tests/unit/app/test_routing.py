from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from app.fleet.routing import RoundRobinRouter


def pick(router: RoundRobinRouter, names: str, exclude: str = "", group: str = "") -> str | None:
    return router.select(list(names), lambda name: name not in exclude, group=group)


def test_in_turn() -> None:
    router = RoundRobinRouter()
    assert [pick(router, "abc") for _ in range(7)] == list("abcabca")


def test_excluded_ones_are_passed_over() -> None:
    router = RoundRobinRouter()
    assert [pick(router, "abc", "b") for _ in range(4)] == list("acac")


def test_none_left() -> None:
    router = RoundRobinRouter()
    assert pick(router, "") is None
    assert pick(router, "ab", "ab") is None


def test_groups_have_their_own_turn() -> None:
    """Two models asked for alternately: each must see both workers."""
    router = RoundRobinRouter()
    picks = [(group, pick(router, "ab", group=group)) for _ in range(2) for group in ("m", "n")]
    assert picks == [("m", "a"), ("n", "a"), ("m", "b"), ("n", "b")]


def test_a_shrinking_list() -> None:
    router = RoundRobinRouter()
    for _ in range(3):
        pick(router, "abcd")
    assert pick(router, "ab") in ("a", "b")


@given(count=st.integers(1, 20), rounds=st.integers(1, 10))
def test_fair(count: int, rounds: int) -> None:
    router = RoundRobinRouter()
    names = list(range(count))
    picks = Counter(router.select(names, lambda _: True) for _ in range(count * rounds))
    assert set(picks.values()) == {rounds}


@given(
    names=st.lists(st.integers(), unique=True, max_size=12), excluded=st.sets(st.integers()), turns=st.integers(0, 30)
)
def test_never_an_excluded_one_and_none_only_if_all_are(names: list[int], excluded: set[int], turns: int) -> None:
    router = RoundRobinRouter()
    for _ in range(turns):
        router.select(names, lambda _: True)
    picked = router.select(names, lambda name: name not in excluded)
    left = set(names) - excluded
    assert (picked in left) if left else picked is None
