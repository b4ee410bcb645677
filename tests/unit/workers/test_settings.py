"""The worker's settings: what is refused, and by which name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.heartbeat import BEAT_PERIOD_SECONDS
from workers.settings import EngineSettings, PodSettings, SettingsError, SimSettings, WorkerSettings, load_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("HOTSPARE_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("HOTSPARE_CAPACITY", "0"),
        ("HOTSPARE_SIM_TTFT_SECONDS", "-1"),
        ("HOTSPARE_STANDBY_ADMIN_PORTS", "8101,x"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_that_it_was_given_under(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=rf"^{variable} \(given: "):
        load_settings(EngineSettings, {})


def test_a_nested_value_given_by_the_program_has_its_own_variables_name() -> None:
    with pytest.raises(SettingsError, match=r"^HOTSPARE_SIM_SEED \(given: 'x'\)"):
        load_settings(EngineSettings, {"sim": {"seed": "x"}})
    with pytest.raises(SettingsError, match=r"^HOTSPARE_SIM_SEED \(given: 'x'\)"):
        load_settings(SimSettings, {"seed": "x"})


@pytest.mark.parametrize("name", ["beat_timeout_seconds", "init_beat_timeout_seconds"])
def test_a_beat_timeout_leaves_room_for_a_late_beat(name: str) -> None:
    with pytest.raises(SettingsError, match=f"^HOTSPARE_{name.upper()} "):
        load_settings(EngineSettings, {name: 2.9 * BEAT_PERIOD_SECONDS})
    assert getattr(load_settings(EngineSettings, {name: 3 * BEAT_PERIOD_SECONDS}), name) == 0.75


def test_the_grace_period_covers_drain_and_shutdown_together() -> None:
    load_settings(PodSettings, {"drain_timeout_seconds": 6, "engine_shutdown_seconds": 8, "grace_period_seconds": 14.1})
    with pytest.raises(SettingsError, match=r"drain_timeout_seconds \(6\) and engine_shutdown_seconds \(8\) together"):
        load_settings(
            PodSettings, {"drain_timeout_seconds": 6, "engine_shutdown_seconds": 8, "grace_period_seconds": 14}
        )


def test_log_levels_are_taken_in_any_case() -> None:
    assert load_settings(EngineSettings, {"log_level": "WARNING"}).log_level == "warning"


@pytest.mark.parametrize("settings", [EngineSettings, PodSettings])
@pytest.mark.parametrize("device", ["cuda:0", "cuda:12"])
def test_a_gpu_is_refused_as_long_as_engines_cannot_use_it(settings: type[WorkerSettings], device: str) -> None:
    with pytest.raises(SettingsError, match=rf"^HOTSPARE_DEVICE \(given: '{device}'\): engines run on the CPU in this"):
        load_settings(settings, {"device": device})


@pytest.mark.parametrize("device", ["cpu", "cpu:", "cpu:1234", "cpu:\N{ARABIC-INDIC DIGIT ONE}", "cpu:0\n", "gpu:0"])
def test_what_is_no_device_is_refused(device: str) -> None:
    with pytest.raises(SettingsError, match=r"^HOTSPARE_DEVICE "):
        load_settings(EngineSettings, {"device": device})
    assert load_settings(EngineSettings, {"device": "cpu:1"}).device == "cpu:1"


def test_an_empty_variable_is_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "WORKER_TOKEN_FILE", "RUN_DIR"):
        monkeypatch.setenv(f"HOTSPARE_{name}", "")
    settings = load_settings(EngineSettings, {})
    assert (settings.model, settings.worker_token_file) == (None, None)
    assert settings.run_dir == Path(os.path.abspath(".hotspare"))
