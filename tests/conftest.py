"""How the suite is spread over processes by pytest-xdist."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from app import compiled

TESTS = Path(__file__).parent

# With HOTSPARE_TEST_COMPILED=1 the tests run what `make compile` made. Here, because conftests further down import it.
if os.environ.get("HOTSPARE_TEST_COMPILED") == "1" and not compiled.use():
    raise pytest.UsageError("the compiled modules are not there or do not fit the sources: make compile")


class _ByPlace(LoadScopeScheduling):
    """File by file; but what runs real vLLM stays in one process, so that one warm parent serves it all."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "engine" if file.startswith("tests/engine/") else file


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return _ByPlace(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones start first."""
    items.sort(key=lambda item: item.path.relative_to(TESTS).parts[0] != "engine")
