"""What a pod tells its processes, and which of several variables wins."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.__main__ import main
from workers.pod_commands import SERVICE, command_lines, engine_settings, environment
from workers.settings import EngineSettings, PodSettings


def flags_of_the_service(settings: PodSettings) -> dict[str, str]:
    command = command_lines(settings)[SERVICE]
    at = command.index("gms") + 1
    return dict(zip(command[at::2], command[at + 1 :: 2], strict=True))


def test_the_pods_own_limit_wins_over_the_memory_services() -> None:
    inherited = {"HOTSPARE_GMS_MEMORY_LIMIT": "2GiB"}
    limited = PodSettings(gms_memory_limit_bytes=1 << 30)
    assert flags_of_the_service(limited)["--memory-limit"] == str(1 << 30)  # and flags win
    unset = PodSettings()
    assert "--memory-limit" not in flags_of_the_service(unset)
    for settings in (limited, unset):
        assert environment(settings, SERVICE, inherited=inherited)["HOTSPARE_GMS_MEMORY_LIMIT"] == "2GiB"


def test_a_metrics_port_of_0_is_handed_on() -> None:
    assert flags_of_the_service(PodSettings(gms_metrics_port=0))["--metrics-port"] == "0"
    assert flags_of_the_service(PodSettings(gms_metrics_port=9109))["--metrics-port"] == "9109"


def test_what_an_engine_would_refuse_the_pod_refuses_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOTSPARE_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("HOTSPARE_HEARTBEAT_SECONDS", "-1")  # the engines' alone
    assert main(["pod"]) == 2
    assert capsys.readouterr().err == (
        "hotspare pod: HOTSPARE_HEARTBEAT_SECONDS (given: '-1'): Input should be greater than 0\n"
    )
    assert not (tmp_path / "run").exists()


def test_the_engines_settings_are_what_the_pod_gives_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOTSPARE_CAPACITY", "7")
    pod = PodSettings(run_dir=tmp_path, instance="i", serving_port=9000, admin_ports=(9001, 9002))
    looked_at = engine_settings(pod, "engine-b")
    for variable, value in environment(pod, "engine-b", inherited=os.environ).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("HOTSPARE_PARENT_PID", raising=False)
    assert looked_at == EngineSettings(engine_id="b", admin_port=9002)
