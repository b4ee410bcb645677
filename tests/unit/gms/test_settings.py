"""The memory service's settings."""

from __future__ import annotations

import os

import pytest
from pydantic import ValidationError

from gms.__main__ import main
from gms.settings import GmsSettings
from workers.settings import EngineSettings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("HOTSPARE_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({}, "info"),
        ({"HOTSPARE_LOG_LEVEL": "debug"}, "debug"),
        ({"HOTSPARE_LOG_LEVEL": "WARNING"}, "warning"),
        ({"HOTSPARE_GMS_LOG_LEVEL": "Error", "HOTSPARE_LOG_LEVEL": "debug"}, "error"),
    ],
)
def test_the_log_level_is_its_own_or_the_pods(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], level: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert GmsSettings(socket="/s").log_level == level


def test_a_bad_log_level_is_refused_with_both_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOTSPARE_LOG_LEVEL", "loud")
    monkeypatch.setattr("sys.argv", ["gms", "--socket", "/s"])
    assert main() == 2
    assert capsys.readouterr().err.startswith("gms: HOTSPARE_GMS_LOG_LEVEL or HOTSPARE_LOG_LEVEL: Input should be ")


def test_the_program_may_say_it_by_the_fields_name() -> None:
    assert GmsSettings(socket="/s", log_level="debug").log_level == "debug"


def test_without_a_socket_it_is_the_one_that_engines_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GmsSettings().socket == str(EngineSettings().gms_socket)
    monkeypatch.setenv("HOTSPARE_RUN_DIR", "/r")
    monkeypatch.setenv("HOTSPARE_POD", "p-1")
    assert GmsSettings(device="cuda:1").socket == "/r/p-1/gms-cuda-1.sock"
    assert GmsSettings(device="cuda:1").socket == str(EngineSettings(device="cuda:1").gms_socket)


def test_a_pod_is_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSPARE_POD", "../p")
    with pytest.raises(ValidationError):
        GmsSettings()
