"""What the supervisor takes a memory service's answers for."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from gms.client import GmsClient, GmsError
from tests.support.processes import MS, running
from workers.pod import PodSupervisor
from workers.settings import PodSettings

pytestmark = pytest.mark.process


async def test_a_memory_service_that_takes_no_more_clients_is_alive_and_one_that_is_stopped_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PodSettings(engine="sim", run_dir=tmp_path)
    settings.pod_dir.mkdir(mode=0o700)
    path = settings.gms_socket
    pod = PodSupervisor(settings)
    with running("gms", "gms", "--socket", str(path), log_dir=tmp_path) as gms, ExitStack() as crowd:

        def connect(count: int) -> None:
            for _ in range(count):
                crowd.enter_context(GmsClient.connect(path, engine="c", instance="test"))

        monkeypatch.setattr("workers.pod.SERVICE_PROBE_SECONDS", 10_000 * MS)
        connect(1)
        assert (await pod._ask_service(settings.device))[1].ok
        with pytest.raises(GmsError) as full:
            connect(1000)
        assert full.value.code == "too_many"
        why, seen = await pod._ask_service(settings.device)
        assert seen.ok
        assert "clients are connected" in why
        monkeypatch.setattr("workers.pod.SERVICE_PROBE_SECONDS", 1_000 * MS)
        gms.signal(signal.SIGSTOP)
        assert not (await pod._ask_service(settings.device))[1].ok
