from __future__ import annotations

import logging
from pathlib import Path

import pytest

from app.factory import create_app
from app.processes.siblings import Place
from app.settings import GatewaySettings

SAID = "the limit of open files"


@pytest.mark.parametrize(
    ("chosen", "number", "levels"),
    [(None, None, ["INFO"]), (16384, None, ["WARNING"]), (16384, 0, ["WARNING"]), (16384, 1, []), (100, None, [])],
)
async def test_too_little_room_for_clients_is_said_once(
    chosen: int | None, number: int | None, levels: list[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    settings = GatewaySettings(**({} if chosen is None else {"max_connections": chosen}))
    place = None if number is None else Place(number, 2, tmp_path)
    with caplog.at_level(logging.INFO):
        create_app(settings, place=place, files=20_000)
    assert [record.levelname for record in caplog.records if record.getMessage().startswith(SAID)] == levels
