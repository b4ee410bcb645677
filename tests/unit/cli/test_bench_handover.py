"""What ``hotspare bench handover`` makes of events and moments."""

from __future__ import annotations

import httpx

from app.cli.bench.handover import Load, Stream, pauses, summarise
from app.cli.bench.streaming import Streamed

STEADY = [0.1 * number for number in range(100)]


async def test_the_load_is_steady_once_each_of_its_streams_has_got_a_few_events() -> None:
    async with httpx.AsyncClient() as client:
        load = Load(client, "m", streams=2, tokens=4)
    ended = Stream(prompt=[1], got=Streamed(at=STEADY), ended=True)
    load.streams += [ended, Stream(prompt=[2], got=Streamed(at=STEADY))]
    assert not load.steady(0.0)  # the second one has not begun
    load.streams.append(Stream(prompt=[3], got=Streamed(at=STEADY[-4:])))
    assert not load.steady(0.0)
    load.streams[-1].got.at.append(10.0)
    assert load.steady(0.0)
    assert not load.steady(9.65)


def test_a_pause_belongs_to_the_hand_over_that_it_began_around() -> None:
    at = [moment for moment in STEADY if not (3.05 < moment < 3.55 or 6.05 < moment < 6.25)]
    first, second = pauses(at, [(3.02, 0.1), (6.02, 0.1)])
    assert (round(first, 6), round(second, 6)) == (0.6, 0.3)


def test_streams_that_were_not_there_have_none() -> None:
    assert pauses(STEADY, [(-1.0, 0.1), (20.0, 0.1)]) == []
    assert pauses([], [(1.0, 0.1)]) == []


def test_what_was_lost_is_counted_and_said() -> None:
    whole = Stream(prompt=[1], got=Streamed(at=STEADY), ended=True)
    lost = Stream(prompt=[2], got=Streamed(at=STEADY, problem="it ended"), ended=True)
    report = summarise("sim", [whole, lost], [(3.02, 0.25), (6.02, 0.75)], wrong=1)
    assert (report["handovers"], report["streams"], report["lost"], report["wrong"]) == (2, 2, 1, 1)
    assert report["drain_seconds"] == {"median": 0.5, "p99": 0.75, "max": 0.75}
    assert report["problems"] == ["it ended"]
    assert summarise("sim", [], [], wrong=0)["pause_seconds"] == {"median": None, "p99": None, "max": None}
