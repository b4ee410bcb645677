from __future__ import annotations

import re

from workers import metrics
from workers.state import ServiceLink

LINK = re.compile(r"^(hotspare_engine_(?:memory_service_\w+|private_pools)) (\S+)$", re.MULTILINE)


def said(link: ServiceLink | None) -> dict[str, str]:
    text = metrics.render(epoch=3, steps=5, inflight=1, spare=False, memory_service=link).decode()
    assert "hotspare_engine_epoch 3.0" in text
    return dict(LINK.findall(text))


def test_an_engine_without_a_memory_service_says_nothing_of_one() -> None:
    """0 is what an engine says whose service is gone."""
    gone = ServiceLink(connected=False, adrift_seconds=1.0, restored=2, private=("kv",), problem="why")
    assert said(None) == {}
    assert said(gone) == {
        "hotspare_engine_memory_service_connected": "0.0",
        "hotspare_engine_memory_service_restores": "2.0",
        "hotspare_engine_private_pools": "1.0",
    }
    back = ServiceLink(connected=True, adrift_seconds=None, restored=3, private=(), problem="")
    assert said(back)["hotspare_engine_memory_service_connected"] == "1.0"
    assert said(None) == {}
