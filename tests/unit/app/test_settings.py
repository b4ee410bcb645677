from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from app.address import Address
from app.arguments import read_settings
from app.processes.announcement import Announcement, announced
from app.start_error import StartError
from tests.support.processes import until


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("HOTSPARE_", "DYN_", "KUBERNETES_")):
            monkeypatch.delenv(name)


def test_defaults() -> None:
    settings = read_settings([])
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert settings.workers == (Address("127.0.0.1", 8100),)
    assert settings.max_body_bytes == 32 * 1024 * 1024
    assert (settings.wait_for_worker_seconds, settings.drain_timeout_seconds) == (15, 5)


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSPARE_PORT", "1111")
    monkeypatch.setenv("HOTSPARE_WORKERS", "a:1,http://b:2")
    monkeypatch.setenv("HOTSPARE_DRAIN_TIMEOUT_SECONDS", "7")
    settings = read_settings(["--port", "2222", "--drain-timeout-seconds=9"])
    assert (settings.port, settings.drain_timeout_seconds) == (2222, 9)
    assert settings.workers == (Address("a", 1), Address("b", 2))


def test_a_log_level_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings(["--log-level", "Debug"]).log_level == "debug"
    monkeypatch.setenv("HOTSPARE_LOG_LEVEL", "WARNING")
    assert read_settings([]).log_level == "warning"


def test_api_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSPARE_API_KEYS", "a, b")
    assert [key.get_secret_value() for key in read_settings([]).api_keys] == ["a", "b"]
    settings = read_settings(["--api-key", "c", "--api-key=d"])
    assert [key.get_secret_value() for key in settings.api_keys] == ["c", "d"]
    assert "'c'" not in repr(settings)
    with pytest.raises(StartError, match=r"^api_keys: key 2 is not a key.*--api-key") as caught:
        read_settings(["--api-key", "c", "--api-key", "my secret"])
    assert "secret" not in str(caught.value)


def test_other_names_of_the_resume_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings([]).resume_limit == 3
    monkeypatch.setenv("DYN_MIGRATION_LIMIT", "5")
    assert read_settings([]).resume_limit == 5
    monkeypatch.setenv("HOTSPARE_RESUME_LIMIT", "6")
    assert read_settings([]).resume_limit == 6
    assert read_settings(["--migration-limit", "7"]).resume_limit == 7
    assert read_settings(["--resume-limit", "0"]).resume_limit == 0


def test_an_error_names_the_other_variable_that_may_have_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_MIGRATION_LIMIT", "x")
    with pytest.raises(
        StartError, match=r"^DYN_MIGRATION_LIMIT=x: .*HOTSPARE_RESUME_LIMIT; DYN_MIGRATION_LIMIT is read, too"
    ):
        read_settings([])


def test_the_alias_of_the_drain_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", "11")
    assert read_settings([]).drain_timeout_seconds == 11
    monkeypatch.setenv("HOTSPARE_DRAIN_TIMEOUT_SECONDS", "12")
    assert read_settings([]).drain_timeout_seconds == 12


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--unknown"], "unrecognized arguments: --unknown"),
        (["--por", "1"], "unrecognized"),
        (["--port"], "expected one argument"),
        (["--port", "x"], "port=x"),
        (["--port", "70000"], "HOTSPARE_PORT"),
        (["--workers", ""], "empty"),
        (["--workers", "a"], "port is missing"),
        (["--wait-for-worker-seconds", "0"], "wait_for_worker_seconds=0"),
        (["--wait-for-worker-seconds", "nan"], "wait_for_worker_seconds"),
        (["--drain-timeout-seconds", "-1"], "drain_timeout_seconds=-1"),
        (["--log-format", "xml"], "log_format=xml"),
        (["--workers-kubernetes", "pods:http"], "workers_kubernetes=pods:http: should be namespace/service:port"),
        (["--workers-kubernetes", "ns/pods:http"], "^workers_kubernetes needs an API server: run in a pod, or set"),
        (["--kubernetes-api", "ftp://x"], "kubernetes_api=ftp://x"),
        (["--workers-dns", "pods"], "workers_dns=pods: .*port is missing"),
        (["--api-key", ""], "^api_keys: there is no key in it"),
        (["--api-key=,"], "^api_keys: there is no key in it"),
        (["--api-keys-file", ""], "^--api-keys-file: the path is empty"),
        (["--tls-certificate=", "--tls-key="], "^--tls-certificate and --tls-key: the path is empty"),
        (["--cors-allow-origins", "chat.example.com"], "'chat.example.com' is no origin, such as https://"),
        (["--cors-allow-origins", "https://a.example/chat"], "is no origin"),
        (["--cors-allow-origins", "*,https://*.example"], "is no origin"),
        (["--keepalive-seconds", "1"], "unrecognized"),
        (["--workers", "a:1", "--workers-file", "f"], "^workers and workers_file are set; .* unset all but one"),
    ],
)
def test_a_bad_value_is_a_sentence(arguments: list[str], reason: str) -> None:
    with pytest.raises(StartError, match=reason) as caught:
        read_settings(arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", ["", ",", " , "])
def test_keys_that_hold_none_do_not_open_the_door(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSPARE_API_KEYS", given)
    with pytest.raises(StartError, match=r"^api_keys: there is no key in it, .* unset it .*HOTSPARE_API_KEYS"):
        read_settings([])


def test_an_empty_variable_is_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("api_keys_file", "worker_token_file", "tls_certificate", "tls_key", "run_dir")
    sources = ("workers_file", "workers_dns", "workers_kubernetes")
    for name in (*names, *sources):
        monkeypatch.setenv(f"HOTSPARE_{name.upper()}", "")
    settings = read_settings([])
    assert [getattr(settings, name) for name in (*names, *sources)] == [None] * 8


def test_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("https://a.example", "http://localhost:3000", "https://[::1]:8443/", "app-x://chat")
    assert read_settings(["--cors-allow-origins", ",".join(given)]).cors_allow_origins == given
    assert read_settings(["--cors-allow-origins", "*"]).cors_allow_origins == ("*",)


def test_the_api_server_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    settings = read_settings(["--workers-kubernetes", "ns/pods:http"])
    assert settings.kubernetes_api == "https://[fd00::1]:443"
    assert read_settings(["--kubernetes-api", "http://127.0.0.1:8001"]).kubernetes_api == "http://127.0.0.1:8001"


def test_a_source_in_the_environment_and_another_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSPARE_WORKERS_FILE", "f")
    assert read_settings([]).workers_file == Path("f")
    with pytest.raises(StartError, match="workers_file and workers_dns are set"):
        read_settings(["--workers-dns", "pods:8100"])


def test_announcement(tmp_path: Path) -> None:
    run_dir = tmp_path / "new" / "run"
    path = run_dir / "gateway.json"
    with announced(run_dir, "127.0.0.1", 1234):
        assert path.read_text() == f'{{"pid": {os.getpid()}, "host": "127.0.0.1", "port": 1234}}'
        assert [item.name for item in run_dir.iterdir()] == ["gateway.json"]
    assert list(run_dir.iterdir()) == []


def test_somebody_elses_announcement_stays(tmp_path: Path) -> None:
    path = tmp_path / "gateway.json"
    path.write_text('{"pid": 1}')
    Announcement(tmp_path, {}).withdraw()
    assert path.exists()
    Announcement(None, {}).withdraw()


def test_an_announcement_that_is_removed_is_there_again_until_it_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.processes.announcement.LOOK_SECONDS", 0.005)
    run_dir = tmp_path / "run"
    with announced(run_dir, "127.0.0.1", 1234) as announcement:
        shutil.rmtree(run_dir)
        until((run_dir / "gateway.json").exists, saying="it is there again")
        announcement.withdraw()
        assert not (run_dir / "gateway.json").exists()
    assert list(run_dir.iterdir()) == []


def test_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="cannot write"), announced(tmp_path / "file", "h", 1):
        pass


def test_a_collector_is_named_in_the_standard_way_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings([]).otlp_endpoint is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    assert read_settings([]).otlp_endpoint is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert read_settings([]).otlp_endpoint == "http://collector:4318"
    monkeypatch.setenv("HOTSPARE_OTLP_ENDPOINT", "https://mine")
    assert read_settings([]).otlp_endpoint == "https://mine"
    with pytest.raises(StartError, match="begins with http"):
        read_settings(["--otlp-endpoint", "collector:4317"])


def test_a_long_value_is_not_repeated_whole() -> None:
    with pytest.raises(StartError) as refused:
        read_settings(["--port", "9" * 5000 + "\n1"])
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)
