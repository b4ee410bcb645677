from __future__ import annotations

from app.clients.connections import SURPLUS, Connections, Room


def test_the_limit_and_what_is_beyond() -> None:
    refused: list[None] = []
    connections = Connections(limit=2, on_refused=lambda: refused.append(None))
    rooms = [connections.enter() for _ in range(2 + SURPLUS + 2)]
    assert rooms == [Room.FREE] * 2 + [Room.SURPLUS] * SURPLUS + [Room.NONE] * 2
    assert (connections.open, len(refused)) == (len(rooms), 2)
    for _ in range(SURPLUS + 3):
        connections.leave()
    assert connections.enter() is Room.FREE
