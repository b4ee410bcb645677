from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from app.processes.families import Family, Sample
from app.processes.siblings import Place, Siblings


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(dir="/tmp", prefix="hs-") as made:  # socket names are short
        yield Path(made)


class Process:
    """One of two: what is asked of it."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.looks = 0
        self.threads: list[threading.Thread] = []
        self.counters = folder / f"{number}.counters"
        self.siblings = Siblings(
            Place(number, 2, folder), look=self.look, families=self.families, status=lambda: b"status of %d" % number
        )

    def look(self) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.looks += 1

    def families(self) -> tuple[Family, ...]:
        self.threads.append(threading.current_thread())
        return (Family("asked", "Times.", "counter", (Sample("asked_total", (), 1.0 + self.number),)),)


async def test_metrics_are_collected_in_a_thread_and_written_down(folder: Path) -> None:
    one, two = Process(0, folder), Process(1, folder)
    async with one.siblings, two.siblings:
        told = await one.siblings.metrics()
        assert {index: (said.families[0].samples[0].value, said.answered) for index, said in told.items()} == {
            0: (1.0, True),
            1: (2.0, True),
        }
        for process in (one, two):
            assert process.looks == 1
            assert threading.main_thread() not in process.threads
            assert process.counters.exists()
    told = await two.siblings.metrics()
    assert {index: (said.families[0].samples[0].value, said.answered) for index, said in told.items()} == {
        0: (1.0, False),  # what it told last
        1: (2.0, True),
    }


async def test_a_status_costs_no_metrics(folder: Path) -> None:
    one, two = Process(0, folder), Process(1, folder)
    async with one.siblings:
        async with two.siblings:
            assert await one.siblings.statuses() == {0: b"status of 0", 1: b"status of 1"}
            assert (one.looks, two.looks, one.threads, two.threads) == (0, 0, [], [])
            assert not one.counters.exists()
            assert not two.counters.exists()
        assert await one.siblings.statuses() == {0: b"status of 0"}  # one that does not answer is left out
