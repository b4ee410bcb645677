"""Engines that listen on IPv6: they find each other, and change places."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from tests.process.workers.crews import crew
from tests.support.processes import get_json, until, waiters
from workers.handover import START_PATH
from workers.pod_key import HEADER_POD_KEY, read_pod_key

pytestmark = pytest.mark.process


def test_a_pair_that_listens_everywhere(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with crew(tmp_path, "ab") as pair:
        pair.gms()
        pair.env |= {"HOTSPARE_HOST": "::"}

        def state(name: str) -> dict[str, object]:
            return get_json(f"http://[::1]:{pair.admin[name]}/state") or {}

        pair.engine("a", "--standby-admin-ports", str(pair.admin["b"]))
        until(lambda: state("a").get("role") == "ACTIVE", saying="a is active")
        pair.engine("b", "--standby-admin-ports", str(pair.admin["a"]))
        until(lambda: state("b").get("role") == "STANDBY", saying="b is parked")
        until(lambda: state("b").get("pid") in waiters(), saying="b stands in line")
        until(lambda: state("a").get("standby") == "STANDBY", saying="a knows its spare")
        shown = {HEADER_POD_KEY: read_pod_key(pair.pod_dir)}
        url = f"http://[::1]:{pair.admin['a']}{START_PATH}"
        answer = httpx.post(url, json={}, headers=shown, timeout=40, trust_env=False)
        assert (answer.status_code, answer.json()["to"]) == (200, "b"), answer.text
        body = {"prompt": "hello", "max_tokens": 4}
        served = httpx.post(f"http://[::1]:{pair.serving}/v1/completions", json=body, timeout=20, trust_env=False)
        assert served.status_code == 200
