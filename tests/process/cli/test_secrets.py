"""``hotspare up`` with API keys: its own commands get in, others do not, and no secret lies about."""

from __future__ import annotations

import json
import signal
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.certificates import make_pair
from tests.support.machine import StartUp, hotspare
from tests.support.processes import until
from workers.contract import HEADER_WORKER_TOKEN, WATCH_PATH

pytestmark = pytest.mark.process

KEY, OTHER = "sk-first-0123456789", "sk-second-9876543210"
REQUEST = {"model": "sim", "prompt": "hi", "max_tokens": 2}


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().split("=", 1) for entry in entries if b"=" in entry)


def test_who_gets_in_where(start_up: StartUp) -> None:
    machine = start_up(HOTSPARE_API_KEYS=f"{KEY},{OTHER}")
    url = machine.until_complete()
    assert "Bearer ${HOTSPARE_API_KEYS%%,*}" in machine.up.output()
    pod = json.loads((machine.run_dir / "pod-0" / "pod.json").read_text())
    worker = f"http://127.0.0.1:{pod['serving_port']}"
    with httpx.Client(trust_env=False, timeout=10) as client:
        # The worker serves its gateway, and nobody else: no request, and no watch.
        for path, shown in (("/v1/completions", {}), ("/v1/completions", {HEADER_WORKER_TOKEN: KEY}), (WATCH_PATH, {})):
            method = "GET" if path == WATCH_PATH else "POST"
            answer = client.request(method, worker + path, json=REQUEST, headers=shown)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_worker_token"), path
        for port in (engine["admin_port"] for engine in pod["engines"].values()):
            assert client.get(f"http://127.0.0.1:{port}/live").status_code == 200  # for the kubelet
        # The gateway serves whoever has a key.
        assert client.get(f"{url}/health").status_code == 200
        models = client.get(f"{url}/v1/models", headers={"x-api-key": OTHER}).json()["data"]
        request = REQUEST | {"model": models[0]["id"]}
        assert client.post(f"{url}/v1/completions", json=request).json()["error"]["code"] == "invalid_api_key"
        bearer = {"authorization": f"Bearer {KEY}"}
        assert client.post(f"{url}/v1/completions", json=request, headers=bearer).status_code == 200

    # The commands.
    assert machine.status_command(HOTSPARE_API_KEY=OTHER)["gateway"]["lifecycle"] == "ready"
    assert machine.status_command(HOTSPARE_API_KEYS=KEY)["pods"][0]["routed"]["state"] == "UP"
    assert machine.status_command()["gateway"]["lifecycle"] == "unauthorized"
    assert machine.status_command(HOTSPARE_API_KEY="sk-wrong")["gateway"]["lifecycle"] == "wrong-key"
    table = hotspare("status", "--run-dir", str(machine.run_dir))
    assert "asks for an API key; set HOTSPARE_API_KEY" in table.stdout

    # Secrets: in the environment of who needs them, and nowhere else.
    gateway, supervisor = machine.pid_of("gateway"), machine.pid_of("pod-0")
    token = environment_of(gateway)["HOTSPARE_WORKER_TOKEN"]
    assert len(token) > 40
    keeper, memory = pod["engines"]["a"]["pid"], pod["gms"]["pid"]
    for pid in (supervisor, keeper, memory):
        assert "HOTSPARE_API_KEYS" not in environment_of(pid)
    assert environment_of(keeper)["HOTSPARE_WORKER_TOKEN"] == token
    assert "HOTSPARE_WORKER_TOKEN" not in environment_of(memory)
    for pid in machine.descendants():
        command = Path(f"/proc/{pid}/cmdline").read_text()
        assert not any(secret in command for secret in (KEY, OTHER, token))
    written = [machine.up.output(), table.stdout, *(log.read_text() for log in machine.run_dir.rglob("*.log"))]
    written += [path.read_text() for path in machine.run_dir.rglob("*.json")]
    assert not any(secret in text for secret in (KEY, OTHER, token) for text in written)
    assert stat.S_IMODE((machine.run_dir / "gateway.json").stat().st_mode) == 0o600


def test_over_tls(start_up: StartUp, tmp_path: Path) -> None:
    pair = make_pair(tmp_path / "tls")
    machine = start_up(
        *("--no-gms", "--shadows", "0"),
        HOTSPARE_TLS_CERTIFICATE=str(pair.certificate),
        HOTSPARE_TLS_KEY=str(pair.key),
    )
    url = machine.until_ready()
    assert url.startswith("https://127.0.0.1:")
    assert f"curl -N --cacert {pair.certificate} https://" in machine.up.output()
    verify = ssl.create_default_context(cafile=pair.certificate)
    assert httpx.get(f"{url}/health", verify=verify, trust_env=False).json()["status"] == "ready"
    assert machine.status_command()["gateway"]["lifecycle"] == "ready"
    pair.replace(make_pair(tmp_path / "other"))

    def shown() -> bool:
        answer = httpx.get(
            f"{url}/metrics", verify=ssl.create_default_context(cafile=pair.certificate), trust_env=False
        )
        return answer.status_code == 200

    until(lambda: not raises(shown), saying="the new certificate is shown")
    assert machine.status_command()["gateway"]["lifecycle"] == "ready"
    machine.up.popen.send_signal(signal.SIGTERM)
    assert machine.up.popen.wait(20) == 0


def raises(ask: Callable[[], bool]) -> bool:
    try:
        return not ask()
    except httpx.ConnectError:  # what it shows is not trusted
        return True


def test_a_key_that_the_gateway_does_not_know_ends_it_with_a_sentence(start_up: StartUp) -> None:
    machine = start_up("--no-gms", "--shadows", "0", HOTSPARE_API_KEYS=KEY, HOTSPARE_API_KEY="sk-another")
    machine.until_said("the gateway does not know the key that this command shows")
    assert machine.up.popen.wait(20) == 2
