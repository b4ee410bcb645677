"""The status document, and how people see it."""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path

import pytest

from app.cli.errors import CliError
from app.cli.fault import engine_with
from app.cli.observe import sum_private
from app.cli.reports import Absence, EngineAnswer, WorkerReport
from app.cli.status import (
    EngineStatus,
    GatewayStatus,
    GmsStatus,
    PodStatus,
    StatusDocument,
    answers,
    gms_status,
    look,
    pool_kind,
    routed_as,
)
from app.cli.status_table import duration, gateway_line, gms_part, gms_remarks, obstacles, pod_line, render, size
from gms import protocol
from tests.unit.cli.test_news import active, parked
from workers.contract import Role
from workers.pod_files import MemoryServiceRecord

MIB = 1024 * 1024

SMAPS = b"""\
55d0-55d9 r-xp 00000000 fd:01 123   /usr/bin/python3.11
Size:                 36 kB
Private_Clean:        12 kB
Private_Dirty:         4 kB
VmFlags: rd ex mr mw me
7f00-7f10 rw-s 00000000 00:01 77    /memfd:gms:kv (deleted)
Private_Clean:         0 kB
Private_Dirty:     16384 kB
7f10-7f20 rw-p 00000000 00:00 0
Private_Clean:         0 kB
Private_Dirty:       100 kB
Private_Hugetlb:       0 kB
"""


def pod(**changes: object) -> PodStatus:
    values: dict[str, object] = {
        "pod": "pod-0",
        "instance": "i",
        "pid": 10,
        "stale": False,
        "serving_port": 8100,
        "routed": WorkerReport(address="127.0.0.1:8100", state="UP", routable=True),
        "gms": GmsStatus(
            pid=11,
            answers=True,
            metrics_port=8109,
            total_bytes=24 * MIB,
            bytes_by_pool={"kv": 16 * MIB, "weights": 8 * MIB},
        ),
        "engines": {
            "a": EngineStatus(
                role="ACTIVE", role_seconds=61.5, pid=4194303, admin_port=8101, restarts=0, epoch=12, inflight=64,
                capacity=64, private_bytes=1024 * MIB, rss_bytes=2048 * MIB,
            ),
            "b": EngineStatus(role="gone", admin_port=8102, restarts=3),
        },
    }  # fmt: skip
    return PodStatus(**{**values, **changes})  # type: ignore[arg-type]


def test_the_memory_services_pages_are_nobodys_private_memory() -> None:
    assert sum_private(SMAPS) == (12 + 4 + 100) * 1024
    assert sum_private(b"") == 0


def test_a_weights_pool_is_called_by_its_kind() -> None:
    assert [pool_kind(name) for name in ("weights/ab12", "kv", "kv_index")] == ["weights", "kv", "kv_index"]


def test_the_gateways_entry_is_found_by_port() -> None:
    other = WorkerReport(address="127.0.0.1:18100", state="DOWN", routable=False)
    mine = WorkerReport(address="localhost:8100", state="UP", routable=True)
    assert routed_as(pod(), (other, mine)) is mine
    assert routed_as(pod(), (other,)) is None


def test_the_table_fits_into_80_columns_and_is_not_cut() -> None:
    from rich.console import Console

    out = io.StringIO()
    gateway = GatewayStatus(pid=9, host="127.0.0.1", port=8000, lifecycle="ready", inflight=1, waiting=0)
    document = StatusDocument(run_dir="/r", gateway=gateway, pods=[pod()])
    Console(file=out, width=80).print(render(document))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for word in ("pod-0", "ACTIVE", "1m 01s", "64/64", "1,024", "2,048", "4194303", "gone", "weights 8.0 MiB"):
        assert word in text


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"gms": None}, "pod-0 on port 8100; gateway says UP, routable; no memory service"),
        (
            {"gms": GmsStatus(pid=1, answers=False, metrics_port=0), "routed": None},
            "pod-0 on port 8100; memory service does not answer",
        ),
        (
            {"stale": True, "routed": None, "gms": None},
            "pod-0 on port 8100; its supervisor (pid 10) is gone: pod.json is stale; no memory service",
        ),
        (
            {"routed": WorkerReport(address="h:8100", state="SUSPECT", routable=False), "gms": None},
            "pod-0 on port 8100; gateway says SUSPECT, not routable; no memory service",
        ),
    ],
)
def test_a_pods_line(changes: dict[str, object], line: str) -> None:
    assert pod_line(pod(**changes)) == line


def test_what_somebody_waits_for_in_memory_is_said_below_the_pods_line() -> None:
    memory = protocol.Status(
        device="cpu:0",
        device_id="cpu:0",
        pools=[
            pool("weights/ab", "ADOPTING", 8),
            pool("weights/cd", "READ", 8, corrupt="the content of tensor 'x' is not what was committed"),
            pool("kv", "WRITING", 16, orphaned_bytes=4 * MIB, waits=["engine b waits for kv"]),
        ],
        total_bytes=32 * MIB,
        high_water_bytes=40 * MIB,
        memory_limit=64 * MIB,
        bytes_by_owner={"engine a": 32 * MIB},
        memory_waits=["engine c waits for 9 bytes"],
        clients=2,
        journal="No space left on device",
    )
    seen = gms_status(MemoryServiceRecord(pid=11, socket="/r/gms.sock", metrics_port=8109), memory)
    assert (seen.pid, seen.metrics_port) == (11, 8109)
    assert seen.bytes_by_pool == {"weights": 16 * MIB, "kv": 16 * MIB}
    assert gms_part(seen) == (
        "memory service 32.0 MiB of 64.0 MiB (kv 16.0 MiB, weights 16.0 MiB, "
        "of them 4.0 MiB wait for their holder's death, at most 40.0 MiB so far)"
    )
    assert gms_remarks(pod(gms=seen)) == [
        "  pod-0: weights/ab is being handed back after a restart of the memory service",
        "  pod-0: engine b waits for kv",
        "  pod-0: engine c waits for 9 bytes",
        "  pod-0: weights/cd is given to nobody any more: the content of tensor 'x' is not what was committed",
        "  pod-0: pages could not be taken back after a restart: No space left on device",
    ]
    assert gms_remarks(pod(gms=None)) == []


def test_an_engine_that_could_not_be_promoted_is_named_with_what_is_in_the_way() -> None:
    stuck = EngineStatus(role="STANDBY", admin_port=1, restarts=0, obstacle="port: 127.0.0.1:1 is in use")
    fine = EngineStatus(role="ACTIVE", admin_port=2, restarts=0)
    assert obstacles(pod(engines={"a": stuck, "b": fine})) == [
        "  pod-0: engine a could not be promoted; port: 127.0.0.1:1 is in use"
    ]


def test_how_engines_stand_with_the_memory_service_is_told_if_it_is_not_as_it_should_be() -> None:
    def engine(memory_service: str | None) -> EngineStatus:
        return EngineStatus(role="ACTIVE", admin_port=1, restarts=0, memory_service=memory_service)

    engines = {
        "a": engine("connected"),
        "b": engine(None),
        "c": engine("gone for 2.5 s"),
        "d": engine("private copy of kv: the journal does not know it."),
    }
    assert gms_remarks(pod(engines=engines)) == [
        "  pod-0: engine c and the memory service: gone for 2.5 s",
        "  pod-0: engine d and the memory service: private copy of kv: the journal does not know it.",
    ]


def pool(name: str, state: str, mib: int, **more: object) -> protocol.PoolStatus:
    values: dict[str, object] = {
        "name": name, "state": state, "generation": 1, "epoch": 0, "bytes": mib * MIB, "high_water_bytes": mib * MIB,
        "orphaned_bytes": 0, "waiting": 0, "waits": [], "leases": [], "allocations": [],
    }  # fmt: skip
    return protocol.PoolStatus(**{**values, **more})  # type: ignore[arg-type]


def test_a_gateways_line() -> None:
    assert gateway_line(None).startswith("gateway: none in this folder; ")
    silent = GatewayStatus(pid=9, host="h", port=1, lifecycle="silent")
    assert gateway_line(silent) == "gateway h:1: silent (pid 9)"
    closed = GatewayStatus(pid=9, host="h", port=1, lifecycle="unauthorized")
    assert gateway_line(closed) == "gateway h:1: asks for an API key; set HOTSPARE_API_KEY (pid 9)"
    wrong = GatewayStatus(pid=9, host="h", port=1, lifecycle="wrong-key")
    assert "does not know the API key that this command shows" in gateway_line(wrong)


def test_numbers_for_people() -> None:
    assert [size(None), size(0), size(1536 * 1024)] == ["", "0.0 MiB", "1.5 MiB"]
    assert [duration(at) for at in (None, 0.04, 59.94, 61, 3700)] == ["", "0.0 s", "59.9 s", "1m 01s", "1h 01m"]


def test_a_fault_finds_its_engine_by_role_and_prefers_the_newest_epoch() -> None:
    answers: dict[str, EngineAnswer] = {
        "a": active("a", pid=1, at=3, granted=1, epoch=4),
        "b": active("b", pid=2, at=3, granted=2, epoch=5),
        "c": parked("c", pid=3, at=3, since=1),
        "d": Absence.GONE,
    }
    found = engine_with(Role.ACTIVE, answers)
    assert found is not None
    assert found.engine == "b"
    assert engine_with(Role.DRAINING, answers) is None


@pytest.mark.parametrize(
    ("lifecycle", "role", "expected"),
    [("ready", "gone", True), ("gone", "INIT", True), (None, "ACTIVE", True), ("silent", "gone", False),
     (None, "silent", False)],
)  # fmt: skip
def test_whether_anything_answers(lifecycle: str | None, role: str, expected: bool) -> None:
    gateway = GatewayStatus(pid=9, host="h", port=1, lifecycle=lifecycle) if lifecycle else None
    engines = {"a": EngineStatus(role=role, admin_port=1, restarts=0)}
    assert answers(StatusDocument(run_dir="/r", gateway=gateway, pods=[pod(engines=engines)])) is expected


async def test_a_gateway_without_pods_is_shown(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="neither a pod nor a gateway runs in"):
        await look(tmp_path)
    with socket.socket() as bound:  # not listening
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        (tmp_path / "gateway.json").write_text(json.dumps({"pid": 1, "host": "127.0.0.1", "port": port}))
        document = await look(tmp_path)
    assert document.pods == []
    assert document.gateway == GatewayStatus(pid=1, host="127.0.0.1", port=port, lifecycle=Absence.GONE)
    assert not answers(document)
