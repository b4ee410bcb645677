from __future__ import annotations

import msgspec
import pytest

from workers.leaks import LOOKS, MORE_THREADS, WAIT_FOR_SPARE_SECONDS, LeakWatch
from workers.usage import Usage, read_usage

FINE = Usage(private_bytes=100 << 20, threads=10, descriptors=50, max_descriptors=1000)
LIMIT = 200 << 20


def watch() -> LeakWatch:
    made = LeakWatch(limit_bytes=LIMIT)
    assert made.excess(FINE) is None
    return made


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"private_bytes": LIMIT + 1},
            "200 MiB of private memory, and its limit (HOTSPARE_PRIVATE_MEMORY_LIMIT_BYTES)",
        ),
        ({"descriptors": 901}, "901 open descriptors of at most 1000"),
        ({"threads": 11 + MORE_THREADS}, "267 threads, and had 10"),
    ],
)
def test_what_is_too_much_is_said(change: dict[str, int], said: str) -> None:
    problem = watch().excess(msgspec.structs.replace(FINE, **change))
    assert problem is not None
    assert said in problem


def test_without_limits_nothing_is() -> None:
    unlimited = msgspec.structs.replace(FINE, private_bytes=1 << 50, descriptors=1 << 20, max_descriptors=None)
    assert LeakWatch(limit_bytes=0).excess(unlimited) is None


def test_with_a_spare_it_takes_a_few_looks() -> None:
    leaking, made = msgspec.structs.replace(FINE, private_bytes=LIMIT + 1), watch()
    said = [made.observe(leaking, spare=True, now=at) for at in range(LOOKS - 1)]
    assert said == [None] * (LOOKS - 1)
    assert made.observe(FINE, spare=True, now=LOOKS) is None
    said = [made.observe(leaking, spare=True, now=10 + at) for at in range(LOOKS)]
    assert [problem is not None for problem in said] == [False] * (LOOKS - 1) + [True]


def test_without_one_it_is_waited_for_and_not_for_ever() -> None:
    leaking, made = msgspec.structs.replace(FINE, private_bytes=LIMIT + 1), watch()
    assert not any(made.observe(leaking, spare=False, now=at) for at in range(int(WAIT_FOR_SPARE_SECONDS)))
    assert made.observe(leaking, spare=False, now=WAIT_FOR_SPARE_SECONDS + 1)


def test_this_process_holds_something() -> None:
    usage = read_usage()
    assert usage.private_bytes > 1 << 20
    assert usage.threads >= 1
    assert usage.descriptors >= 3
