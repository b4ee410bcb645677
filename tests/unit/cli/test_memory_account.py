from __future__ import annotations

from pathlib import Path

from app.cli.memory import cells, sentences
from app.cli.memory_account import KEEPER, RANK, PodMemory, ProcessMemory, Sizes, pod_memory, sizes, standing_cost
from app.cli.status import served_device
from workers.contract import Role

MIB = 1024 * 1024

SMAPS = b"""\
55d0-55d9 r-xp 00000000 fd:01 123   /usr/bin/python3.11
Size:                 36 kB
Rss:                  32 kB
Pss:                  10 kB
Pss_Dirty:             1 kB
Private_Clean:         4 kB
Private_Dirty:         2 kB
VmFlags: rd ex mr mw me
7f00-7f10 r--s 00000000 00:01 77    /memfd:gms:weights (deleted)
Rss:                4096 kB
Pss:                2048 kB
Private_Clean:         0 kB
Private_Dirty:         0 kB
7f10-7f20 rw-s 00000000 00:01 78    /memfd:gms:kv (deleted)
Rss:                1024 kB
Pss:                1024 kB
Private_Dirty:      1024 kB
7f20-7f30 rw-s 00000000 00:01 79    /memfd:gms-scratch (deleted)
Rss:                   8 kB
Pss:                   8 kB
Private_Dirty:         8 kB
7f30-7f40 rw-p 00000000 00:00 0
Rss:                 100 kB
Pss:                 100 kB
Private_Dirty:       100 kB
"""


def test_the_services_pages_are_told_apart_by_what_they_are() -> None:
    found = sizes(SMAPS)
    assert found.service == {"weights": 4096 * 1024, "kv": 1024 * 1024}
    assert found.rss == (32 + 4096 + 1024 + 8 + 100) * 1024
    assert found.pss == (10 + 8 + 100) * 1024
    assert found.private == (6 + 8 + 100) * 1024


def sized(pss: int, **service: int) -> Sizes:
    return Sizes(rss=pss + sum(service.values()), pss=pss, private=pss // 2, service=service)


def account() -> PodMemory:
    return pod_memory(
        "pod-0",
        [
            ProcessMemory(name="engine-a", role=Role.ACTIVE, pid=1, sizes=sized(200 * MIB, weights=500 * MIB, kv=MIB)),
            ProcessMemory(name="engine-b", role=Role.STANDBY, pid=2, sizes=sized(150 * MIB, weights=500 * MIB)),
            ProcessMemory(name="engine-b", role=KEEPER, pid=3, sizes=sized(40 * MIB)),
            ProcessMemory(name="engine-a", role=KEEPER, pid=5, sizes=None),
            ProcessMemory(name="engine-b", role=RANK, pid=4, sizes=sized(10 * MIB)),
        ],
        {"weights": 500 * MIB, "kv": 64 * MIB},
    )


def test_what_is_shared_is_counted_once_and_the_sums_add_up() -> None:
    pod = account()
    assert pod.processes_bytes == 400 * MIB
    assert pod.total_bytes == (400 + 564) * MIB
    assert standing_cost(pod, role=Role.STANDBY) == {"engine-b": 200 * MIB}


def test_people_are_told_what_the_sums_are() -> None:
    assert sentences(account()) == [
        "  pod-0: the memory service's pages, once: 564 MiB (kv 64.0, weights 500); with the processes' own 400 MiB: "
        "964 MiB",
        "  pod-0: engine-b is parked and costs 200 MiB of its own, with its keeper",
    ]
    assert "not counted" in sentences(pod_memory("p", [], None))[0]
    assert sentences(pod_memory("p", [], {})) == [
        "  p: it has no memory service; its processes' own memory is all: 0.0 MiB"
    ]
    assert [cells(process) for process in account().processes] == [
        ["100", "200", "500", "1.0", "701", "1"],
        ["75.0", "150", "500", "0.0", "650", "2"],
        ["20.0", "40.0", "0.0", "0.0", "40.0", "3"],
        ["", "", "", "", "", "5"],
        ["5.0", "10.0", "0.0", "0.0", "10.0", "4"],
    ]


def test_a_service_is_asked_as_one_of_its_device() -> None:
    assert served_device(Path("/run/gms-cpu-1.sock")) == "cpu:1"
    assert served_device(Path("/run/gms.sock")) == "cpu:0"
