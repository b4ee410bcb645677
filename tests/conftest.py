"""How the suite is spread over processes (pytest-xdist, ``--dist loadgroup``)."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real vLLM stays in one process, whose warm parent it shares, and starts first; the rest goes file by file."""
    for item in items:
        place = item.path.relative_to(TESTS)
        item.add_marker(pytest.mark.xdist_group("engine" if place.parts[0] == "engine" else str(place)))
    items.sort(key=lambda item: item.path.relative_to(TESTS).parts[0] != "engine")
