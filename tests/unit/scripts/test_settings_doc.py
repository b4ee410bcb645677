"""The page of all settings, and the help of the processes, which come from the same source."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from app.cli.help import help_text
from app.cli.meanings import Process, settings_of, sim_settings
from app.cli.variables import KNOWN

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("settings_doc", ROOT / "scripts" / "settings_doc.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    assert script.PAGE.read_text() == script.page(), "stale: run .venv/bin/python scripts/settings_doc.py"


def test_every_variable_is_on_the_page(script: ModuleType) -> None:
    named = set(re.findall(r"`(HOTSPARE_\w+)`", script.page()))
    assert named <= KNOWN
    # The memory service knows what it shares with others by a name of its own, too: for programs, not for people.
    assert KNOWN - named == {f"HOTSPARE_GMS_{name}" for name in ("LOG_FORMAT", "PARENT_PID", "POD", "RUN_DIR")}
    assert "`DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS`" in script.page()


def test_every_setting_has_a_meaning_and_a_variable() -> None:
    settings = {f"{process}: {name}": it for process in Process for name, it in settings_of(process).items()}
    settings |= {f"sim: {name}": it for name, it in sim_settings().items()}
    assert [name for name, setting in settings.items() if not setting.meaning or not setting.variables] == []


@pytest.mark.parametrize("process", Process)
def test_help_explains_every_flag(process: Process) -> None:
    text = " ".join(help_text(process).split())
    assert text.startswith(f"usage: hotspare {process} [-h] ")
    flags = [setting for setting in settings_of(process).values() if setting.flag]
    assert flags
    for setting in flags:
        assert setting.meaning.replace("``", "") in text
        assert f"[{', '.join(setting.variables)}]" in text
        assert not setting.default or f"(default: {setting.default})" in text
    assert "overrides HOTSPARE_" not in text
