"""How the suite is spread over processes by pytest-xdist."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from app import compiled

TESTS = Path(__file__).parent
ENGINES = ("tests/engine/vllm/", "tests/engine/")
"""Where real vLLM runs; the longest first."""
PODS = "tests/pod/"

# How long an example takes says how busy the machine is.
settings.register_profile("hotspare", deadline=None)
settings.load_profile("hotspare")

# Whatever a shell starts in the background ignores SIGINT, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# With HOTSPARE_TEST_COMPILED=1 the tests run what `make compile` made. Here, because conftests further down import it.
if os.environ.get("HOTSPARE_TEST_COMPILED") == "1" and not compiled.use():
    raise pytest.UsageError("the compiled modules are not there or do not fit the sources: make compile")


class _ByPlace(LoadScopeScheduling):
    """File by file; but what runs real vLLM stays in two processes: one for the engines that one warm parent forks, one
    for what brings its own. More at a time would be more than two cores, while everything else mostly waits. Tests of
    real pods share them, and so stay together, too."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((place for place in (*ENGINES, PODS) if file.startswith(place)), file)


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return _ByPlace(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones start first."""
    items.sort(key=lambda item: item.path.relative_to(TESTS).parts[0] not in ("engine", "pod"))
