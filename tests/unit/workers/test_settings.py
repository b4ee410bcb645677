"""The worker's settings: what is refused, and by which name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.heartbeat import BEAT_PERIOD_SECONDS
from workers.route_groups import RouteGroup
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


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("HOTSPARE_DEVICE", "gpu", "a device is cpu:N or cuda:N"),
        ("HOTSPARE_POD", "_x", "a pod's name is small letters"),
        ("HOTSPARE_ENGINE_ID", "A1", "an engine's id is one small letter"),
    ],
)
def test_nobody_has_to_read_a_pattern(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=rf"^{variable} \(given: '{value}'\): {words}"):
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
    shortest = {"beat_timeout_seconds": 3 * BEAT_PERIOD_SECONDS, name: 3 * BEAT_PERIOD_SECONDS}
    assert getattr(load_settings(EngineSettings, shortest), name) == 0.75


def test_what_is_killed_has_had_time_to_drain_and_to_stop() -> None:
    times = {"shutdown_timeout_seconds": 6, "engine_shutdown_seconds": 8}
    load_settings(PodSettings, {**times, "kill_after_seconds": 14.1})
    assert load_settings(PodSettings, times).engine_stop_seconds == 24
    said = r"shutdown_timeout_seconds \(6\) and engine_shutdown_seconds \(8\) together"
    with pytest.raises(SettingsError, match=said):
        load_settings(PodSettings, {**times, "kill_after_seconds": 14})


def test_the_grace_period_is_a_part_of_the_shutdown_timeout() -> None:
    times = {"grace_period_seconds": 6, "shutdown_timeout_seconds": 6}
    load_settings(EngineSettings, times)
    with pytest.raises(SettingsError, match=r"grace_period_seconds \(7\) is a part of shutdown_timeout_seconds \(6\)"):
        load_settings(EngineSettings, {**times, "grace_period_seconds": 7})


def test_a_hand_over_is_a_part_of_the_shutdown_timeout() -> None:
    load_settings(EngineSettings, {"grace_period_seconds": 1, "shutdown_timeout_seconds": 2})  # 5 by default
    times = {"grace_period_seconds": 1, "shutdown_timeout_seconds": 6, "handover_timeout_seconds": 7}
    with pytest.raises(
        SettingsError, match=r"handover_timeout_seconds \(7\) is a part of shutdown_timeout_seconds \(6\)"
    ):
        load_settings(EngineSettings, times)
    load_settings(EngineSettings, {**times, "drain_mode": "wait"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"init_beat_timeout_seconds": 1, "beat_timeout_seconds": 60},
            r"^init_beat_timeout_seconds \(1\) cannot be shorter than beat_timeout_seconds \(60\)",
        ),
        (
            {"health_check_seconds": 600, "token_timeout_seconds": 1},
            r"^health_check_seconds \(600\) cannot be longer than token_timeout_seconds \(1\)",
        ),
        (
            {"standby_admin_ports": "8102,8101"},
            r"^standby_admin_ports are .* 8101 is this one's admin_port; leave it out",
        ),
        ({"standby_admin_ports": "8100"}, "8100 is this one's serving_port"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings(EngineSettings, given)


def test_names_of_others_for_the_times_of_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "3")
    monkeypatch.setenv("DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", "30")
    read = load_settings(EngineSettings, {})
    assert (read.grace_period_seconds, read.shutdown_timeout_seconds) == (3, 30)
    monkeypatch.setenv("HOTSPARE_GRACE_PERIOD_SECONDS", "4")
    monkeypatch.setenv("HOTSPARE_SHUTDOWN_TIMEOUT_SECONDS", "40")
    read = load_settings(EngineSettings, {"shutdown_timeout_seconds": 50})
    assert (read.grace_period_seconds, read.shutdown_timeout_seconds) == (4, 50)


def test_routes_that_a_shutdown_does_not_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(EngineSettings, {}).graceful_shutdown_except == ()
    monkeypatch.setenv("HOTSPARE_GRACEFUL_SHUTDOWN_EXCEPT", "chat, audio")
    assert load_settings(EngineSettings, {}).graceful_shutdown_except == (RouteGroup.CHAT, RouteGroup.AUDIO)
    monkeypatch.setenv("HOTSPARE_GRACEFUL_SHUTDOWN_EXCEPT", "chats")
    with pytest.raises(SettingsError, match="GRACEFUL_SHUTDOWN_EXCEPT"):
        load_settings(EngineSettings, {})


def test_log_levels_are_taken_in_any_case() -> None:
    assert load_settings(EngineSettings, {"log_level": "WARNING"}).log_level == "warning"


@pytest.mark.parametrize("settings", [EngineSettings, PodSettings])
@pytest.mark.parametrize("device", ["cuda:0", "cuda:12"])
def test_a_gpu_is_refused_where_the_engine_cannot_use_it(settings: type[WorkerSettings], device: str) -> None:
    given = rf"^HOTSPARE_DEVICE \(given: '{device}'\): "
    with pytest.raises(SettingsError, match=rf"{given}the vLLM installed here \(vllm\S* \S+\) is no build for GPUs"):
        load_settings(settings, {"device": device})
    with pytest.raises(SettingsError, match=rf"{given}the sim engine computes on the CPU"):
        load_settings(settings, {"device": device, "engine": "sim"})
    assert load_settings(settings, {"device": device, "engine": "some.other:Engine"}).device == device


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


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"serving_port": 8101},
            "serving_port and admin_ports are both 8101; choose another one for --serving-port (HOTSPARE_SERVING_PORT) "
            "or --admin-ports (HOTSPARE_ADMIN_PORTS)",
        ),
        (
            {"admin_ports": "8201,8201"},
            "admin_ports has 8201 twice; each engine needs one of its own (--admin-ports (HOTSPARE_ADMIN_PORTS))",
        ),
        (
            {"gms_metrics_port": 8102},
            "admin_ports and gms_metrics_port are both 8102; choose another one for --admin-ports "
            "(HOTSPARE_ADMIN_PORTS) or --gms-metrics-port (HOTSPARE_GMS_METRICS_PORT)",
        ),
        (
            {"gms_metrics_port": 8100},
            "serving_port and gms_metrics_port are both 8100; choose another one for --serving-port "
            "(HOTSPARE_SERVING_PORT) or --gms-metrics-port (HOTSPARE_GMS_METRICS_PORT)",
        ),
        (
            {"tensor_parallel_size": 3, "more_gms_metrics_ports": "9001,9001", "engine": "sim"},
            "more_gms_metrics_ports has 9001 twice; each memory service needs one of its own "
            "(--more-gms-metrics-ports (HOTSPARE_MORE_GMS_METRICS_PORTS))",
        ),
    ],
)
def test_two_listeners_of_a_pod_have_two_ports(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(PodSettings, flags)
    assert str(refused.value) == sentence


def test_ports_that_nobody_listens_on_may_be_equal() -> None:
    load_settings(PodSettings, {"gms": False, "gms_metrics_port": 8101})
    load_settings(PodSettings, {"more_gms_metrics_ports": "8109"})  # one rank: not used
    load_settings(PodSettings, {"gms_metrics_port": 0})
    load_settings(PodSettings, {"shadows": 0, "admin_ports": "8101,8101"})


def test_an_engine_has_two_ports() -> None:
    with pytest.raises(SettingsError, match="serving_port and admin_port are both 8100"):
        load_settings(EngineSettings, {"admin_port": 8100})


def test_what_is_wrong_in_a_variable_of_another_name_is_said_of_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "abc")
    with pytest.raises(SettingsError, match=r"^DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS \(given: 'abc'\)"):
        load_settings(EngineSettings, {})
    with pytest.raises(SettingsError, match=r"^HOTSPARE_GRACE_PERIOD_SECONDS \(given: 'x'\)"):
        load_settings(EngineSettings, {"grace_period_seconds": "x"})


def test_a_long_value_is_not_repeated_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSPARE_POD", "x" * 5000 + "\n")
    with pytest.raises(SettingsError) as refused:
        load_settings(EngineSettings, flags={})
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", ["1.6", "3.5", "60"])
def test_a_heartbeat_that_no_gateway_would_wait_for_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOTSPARE_HEARTBEAT_SECONDS", value)
    with pytest.raises(SettingsError, match=r"^HOTSPARE_HEARTBEAT_SECONDS .* less than or equal to 1.5"):
        load_settings(EngineSettings, {})


@pytest.mark.parametrize("name", ["WAKE_TIMEOUT_SECONDS", "PROMOTION_CHECK_SECONDS", "INITIALIZE_TIMEOUT_SECONDS"])
def test_a_time_in_which_nothing_can_be_done_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    variable = f"HOTSPARE_{name}"
    monkeypatch.setenv(variable, "0.0001")
    with pytest.raises(SettingsError, match=rf"^{variable} .* greater than or equal to 0.1"):
        load_settings(EngineSettings, {})


def test_a_flag_that_is_no_text_is_refused_and_not_repeated() -> None:
    with pytest.raises(SettingsError, match=r"^--served-model-name: its bytes are no UTF-8$"):
        load_settings(EngineSettings, {"served_model_name": "mod\udcff"})
