"""The page of all settings, and the help of the processes, which come from the same source."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from app.cli.help import help_text
from app.cli.meanings import Process, range_of, settings_of, sim_settings
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


def test_the_chart_knows_the_names(script: ModuleType) -> None:
    assert script.OF_CHART.read_text() == script.of_chart(), "stale: run .venv/bin/python scripts/settings_doc.py"
    of = json.loads(script.of_chart())
    assert script.NOT_IN_A_POD <= KNOWN
    assert set(of["gateway"]) | set(of["worker"]) <= KNOWN - script.NOT_IN_A_POD
    assert {"HOTSPARE_RESUME_LIMIT", "HOTSPARE_API_KEY"} <= set(of["gateway"]) - set(of["worker"])
    assert {"HOTSPARE_DRAIN_MODE", "HOTSPARE_SIM_SEED", "HOTSPARE_GMS_CHUNK_SIZE"} <= set(of["worker"])


def test_every_variable_is_on_the_page(script: ModuleType) -> None:
    named = set(re.findall(r"`(HOTSPARE_\w+)`", script.page()))
    assert named <= KNOWN
    # The memory service knows what it shares with others by a name of its own, too: for programs, not for people.
    assert KNOWN - named == {f"HOTSPARE_GMS_{name}" for name in ("LOG_FORMAT", "PARENT_PID", "POD", "RUN_DIR")}
    assert "`DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS`" in script.page()


def test_pod_and_engine_share_their_rows(script: ModuleType) -> None:
    page = script.page()
    assert page.count("| `HOTSPARE_SERVING_PORT` |") == 1
    assert page.count("| `HOTSPARE_ADMIN_PORTS` |") == page.count("| `HOTSPARE_ADMIN_PORT` |") == 1
    both = settings_of(Process.POD).keys() & settings_of(Process.ENGINE).keys()
    once = page.partition("## `hotspare pod` and")[2].partition("## `hotspare pod` alone")[0]
    assert {f"HOTSPARE_{name.upper()}" for name in both} == set(re.findall(r"^\| `(\w+)`", once, re.MULTILINE))


@pytest.mark.parametrize(
    ("process", "name", "values"),
    [
        (Process.GATEWAY, "port", "0 to 65535"),
        (Process.GATEWAY, "drain_timeout_seconds", "0 to 86400"),  # bounds beside an alias
        (Process.GATEWAY, "connect_timeout_seconds", "above 0 to 86400"),
        (Process.GATEWAY, "parent_pid", "1 or more"),  # of an optional number
        (Process.GATEWAY, "log_format", "console, json"),
        (Process.GATEWAY, "access_log", "true, false"),
        (Process.GATEWAY, "host", ""),
        (Process.POD, "admin_ports", "1 to 65535"),  # of each in a list
        (Process.GMS, "memory_limit", "above 0"),
    ],
)
def test_values_are_what_the_types_say(process: Process, name: str, values: str) -> None:
    assert settings_of(process)[name].values == values


def test_ranges() -> None:
    assert range_of() == ""
    assert range_of(ge=0.75) == "0.75 or more"
    assert range_of(gt=0, lt=1) == "above 0 to below 1"
    assert range_of(le=1 << 40) == "at most 1099511627776"
    assert range_of(lt=5) == "below 5"


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
