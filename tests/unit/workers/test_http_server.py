"""What is assumed of uvicorn is so, and would be missed before an engine starts."""

from __future__ import annotations

from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl

from workers import factory, http_server
from workers.engine import EngineConfigError
from workers.settings import EngineSettings


class OtherCycle:
    """Of another shape: what is sent is sent by a function."""

    def __init__(self, transport: object) -> None:
        self.transport = transport
        self.complete = False
        self.send: Any = print


def test_the_installed_one_fits() -> None:
    assert http_server.misfit() is None


def test_one_that_does_not_is_named_before_an_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httptools_impl, "RequestResponseCycle", OtherCycle)
    said = (
        f"uvicorn {uvicorn.__version__} does not fit: it has no OtherCycle.response_complete, RequestResponseCycle.send"
    )
    assert http_server.misfit() == said
    with pytest.raises(EngineConfigError, match="does not fit"):
        factory.preload(EngineSettings(engine="sim"))
