from __future__ import annotations

import asyncio
import errno
import logging

import pytest

from app.telemetry import regularly
from app.telemetry.open_files import OpenFiles, open_another


def test_there_is_room_here() -> None:
    assert open_another() == 0


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.EMFILE, "HOTSPARE_MAX_CONNECTIONS"), (errno.ENFILE, "raise fs.file-max")],
)
async def test_a_shortage_is_told_once(
    number: int, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(regularly, "PERIOD_SECONDS", 0.001)
    looks = 0
    enough = asyncio.Event()

    def look() -> int:
        nonlocal looks
        looks += 1
        if looks == 5:
            enough.set()
        return number if looks % 2 else 0

    with caplog.at_level(logging.INFO):
        async with OpenFiles(look) as looking, asyncio.timeout(5):
            await enough.wait()
        assert looking._timer is None
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert said in record.getMessage()
