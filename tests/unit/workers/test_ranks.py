"""Which engines can have further ranks, and what a pod starts for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.engine import EngineConfigError
from workers.engines.vllm import exchange
from workers.engines.vllm.ranks import make_rank
from workers.factory import fork_ranks, memory_services
from workers.failover_lock import FlockFailoverLock
from workers.pod_commands import command_lines, metrics_ports, services
from workers.pod_plan import Phase, PodPlan, Start, Terminate
from workers.settings import EngineSettings, PodSettings


def test_an_engine_that_runs_in_one_process_says_so(tmp_path: Path) -> None:
    settings = EngineSettings(engine="sglang", tensor_parallel_size=2, run_dir=tmp_path)
    with (
        FlockFailoverLock(tmp_path / "active.lock") as lock,
        pytest.raises(EngineConfigError, match="set HOTSPARE_TENSOR_PARALLEL_SIZE to 1"),
    ):
        fork_ranks(settings, [], lock=lock, close=())


def test_vllm_has_ranks_on_cpus_only(tmp_path: Path) -> None:
    settings = EngineSettings(engine="vllm", tensor_parallel_size=2, run_dir=tmp_path)
    assert make_rank(settings, [])
    with pytest.raises(EngineConfigError, match="for CPUs in this version"):
        make_rank(settings.model_copy(update={"device": "cuda:0"}), [])


def test_names_in_shared_memory_are_an_engines_own(tmp_path: Path) -> None:
    begin = exchange.prefix(tmp_path / "engine-a")
    assert begin != exchange.prefix(tmp_path / "engine-b")
    ours, others = (exchange.SHARED_MEMORY / f"{exchange.prefix(tmp_path / name)}1-tp" for name in ("engine-a", "b"))
    try:
        for path in (ours, others):
            path.write_bytes(b"")
        exchange.forget(begin)
        assert not ours.exists()
        assert others.exists()
        exchange.forget(begin)
    finally:
        for path in (ours, others):
            path.unlink(missing_ok=True)


def test_one_rank_is_no_further_process(tmp_path: Path) -> None:
    settings = EngineSettings(engine="vllm", run_dir=tmp_path)
    with FlockFailoverLock(tmp_path / "active.lock") as lock:
        assert fork_ranks(settings, [], lock=lock, close=()) is None


def test_every_rank_has_a_device_and_a_memory_service(tmp_path: Path) -> None:
    made = memory_services(EngineSettings(engine="sim", tensor_parallel_size=2, device="cpu:3", run_dir=tmp_path))
    assert [service.device for service in made] == ["cpu:3", "cpu:4"]
    assert [Path(service.socket).name for service in made] == ["gms-cpu-3.sock", "gms-cpu-4.sock"]
    pod = PodSettings(engine="sim", tensor_parallel_size=2, run_dir=tmp_path)
    assert services(pod) == {"gms": "cpu:0", "gms-1": "cpu:1"}
    second = command_lines(pod)["gms-1"]
    assert second[second.index("--socket") + 1].endswith("gms-cpu-1.sock")
    assert second[second.index("--metrics-port") + 1] == "0"
    pod = PodSettings(engine="sim", tensor_parallel_size=3, run_dir=tmp_path, more_gms_metrics_ports=(9001,))
    assert metrics_ports(pod) == {"gms": 8109, "gms-1": 9001, "gms-2": 0}
    second = command_lines(pod)["gms-1"]
    assert second[second.index("--metrics-port") + 1] == "9001"
    assert metrics_ports(PodSettings(run_dir=tmp_path)) == {"gms": 8109}


def test_all_memory_services_end_after_the_engines() -> None:
    plan = PodPlan(
        service="gms", engines=("engine-a",), grace_seconds=1, service_grace_seconds=1, more_services=("gms-1",)
    )
    assert plan.begin() == [Start("gms"), Start("gms-1"), Start("engine-a")]
    for name in plan.names:
        plan.started(name, now=0.0)
    assert Terminate("engine-a") in plan.stop()
    assert [action for action in plan.exited("engine-a", 0, now=1.0) if isinstance(action, Terminate)] == [
        Terminate("gms"),
        Terminate("gms-1"),
    ]
    plan.exited("gms", 0, now=1.0)
    assert plan.phase is Phase.STOPPING_SERVICE
    plan.exited("gms-1", 0, now=1.0)
    assert plan.finished
