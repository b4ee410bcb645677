"""The memory service's settings."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from gms.__main__ import main
from gms.settings import GmsSettings
from workers.settings import EngineSettings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("HOTSPARE_"):
            monkeypatch.delenv(name)
    yield
    gc.enable()  # which `main` turns off while it starts


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
    assert GmsSettings(device="cpu:1").socket == str(EngineSettings(device="cpu:1").gms_socket)


def test_a_pod_is_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSPARE_POD", "../p")
    with pytest.raises(ValidationError):
        GmsSettings()


@pytest.mark.parametrize(
    ("field", "value", "read"),
    [
        ("memory_limit", "512MiB", 512 << 20),
        ("memory_limit", "4096", 4096),
        ("memory_limit", "1.5 gib", 1536 << 20),
        ("chunk_size", "1GiB", 1 << 30),
        ("adopt_timeout_seconds", "0", 0.0),
        ("adopt_timeout_seconds", "2.5", 2.5),
        ("metrics_port", "9400", 9400),
    ],
)
def test_sizes_and_times_are_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, field: str, value: str, read: float
) -> None:
    monkeypatch.setenv(f"HOTSPARE_GMS_{field.upper()}", value)
    assert getattr(GmsSettings(), field) == read


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_limit", "0"),
        ("memory_limit", "-1"),
        ("memory_limit", "plenty"),
        ("memory_limit", "1,5GiB"),
        ("memory_limit", "1.5"),
        ("memory_limit", "1GiB;2GiB"),
        ("memory_limit", "2 GiB - 1"),
        ("chunk_size", "512MiB please"),
        ("chunk_size", "0"),
        ("adopt_timeout_seconds", "-1"),
        ("adopt_timeout_seconds", "86401"),
        ("adopt_timeout_seconds", "soon"),
        ("metrics_port", "65536"),
    ],
)
def test_a_bad_value_is_refused_with_the_names_it_could_have_come_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], field: str, value: str
) -> None:
    monkeypatch.setenv(f"HOTSPARE_GMS_{field.upper()}", value)
    monkeypatch.setattr("sys.argv", ["gms", "--socket", "/s"])
    assert main() == 2
    named = f"gms: HOTSPARE_GMS_{field.upper()} or --{field.replace('_', '-')}: "
    assert capsys.readouterr().err.startswith(named)


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSPARE_GMS_ADOPT_TIMEOUT_SECONDS", "7")
    assert GmsSettings().adopt_timeout_seconds == 7
    assert GmsSettings(adopt_timeout_seconds=3).adopt_timeout_seconds == 3


def test_an_empty_run_folder_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSPARE_RUN_DIR", "")
    assert GmsSettings().socket == os.path.abspath(".hotspare/pod-0/gms-cpu-0.sock")
