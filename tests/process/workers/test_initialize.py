"""An engine whose initialisation hangs while its loop beats is ended, and followed by another."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.process.workers.crews import crew
from tests.support.processes import until, until_role

pytestmark = pytest.mark.process

HANGS = {"HOTSPARE_INITIALIZE_TIMEOUT_SECONDS": "0.4", "HOTSPARE_GMS": "false"}


@pytest.mark.parametrize("how", ["NeverReady", "NeverGivesUp"])
def test_it_is_ended_and_another_is_forked(tmp_path: Path, how: str) -> None:
    with crew(tmp_path, "a") as alone:
        engine = alone.engine("a", **HANGS, HOTSPARE_ENGINE=f"tests.support.broken_engines:{how}")
        said = "it was not initialised within 0.4 s (HOTSPARE_INITIALIZE_TIMEOUT_SECONDS)"
        until(lambda: engine.output().count(said) >= 2, saying="two engines were ended")
        assert "the engine is gone (exit code 1); forking the next one" in engine.output()


def test_one_that_does_not_hear_that_it_is_to_stop_ends_in_its_time(tmp_path: Path) -> None:
    with crew(tmp_path, "a") as alone:
        more = {
            "HOTSPARE_ENGINE": "tests.support.broken_engines:NeverGivesUp",
            "HOTSPARE_ENGINE_SHUTDOWN_SECONDS": "0.3",
        }
        engine = alone.engine("a", HOTSPARE_GMS="false", **more)
        until_role(alone.admin["a"], "INIT")
        engine.signal(signal.SIGTERM)
        assert engine.wait(seconds=10) == 1


def test_without_a_keeper_the_process_says_so_by_its_exit_code(tmp_path: Path) -> None:
    with crew(tmp_path, "a") as alone:
        more = {"HOTSPARE_ENGINE": "tests.support.broken_engines:NeverReady", "HOTSPARE_KEEPER": "false"}
        assert alone.engine("a", **HANGS, **more).wait(seconds=20) == 1
