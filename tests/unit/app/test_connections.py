from __future__ import annotations

import sys

import pytest

from app.clients.connections import SURPLUS, Connections, Room, room_within


def test_the_limit_and_what_is_beyond() -> None:
    refused: list[None] = []
    connections = Connections(limit=2, on_refused=lambda: refused.append(None))
    rooms = [connections.enter() for _ in range(2 + SURPLUS + 2)]
    assert rooms == [Room.FREE] * 2 + [Room.SURPLUS] * SURPLUS + [Room.NONE] * 2
    assert (connections.open, len(refused)) == (len(rooms), 2)
    for _ in range(SURPLUS + 3):
        connections.leave()
    assert connections.enter() is Room.FREE


@pytest.mark.parametrize("files", [3, 33, 34, 64, 256, 1024, 4096, 65536, 1 << 20, sys.maxsize])
def test_what_fits_into_the_files_that_may_be_open(files: int) -> None:
    limit, surplus = room_within(files, 16384)
    assert 1 <= limit <= 16384
    assert 1 <= surplus <= SURPLUS
    if files >= 64:
        assert 2 * limit + surplus + 32 <= files
    if files >= 65536:
        assert (limit, surplus) == (16384, SURPLUS)


def test_few_are_wanted() -> None:
    assert room_within(1024, 100) == (100, 124)
