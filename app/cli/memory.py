"""``hotspare status --memory``: what each process of each pod costs, and what they share."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from app.cli import absent
from app.cli.errors import CliError
from app.cli.memory_account import (
    KEEPER,
    RANK,
    SERVICE,
    MemoryDocument,
    PodMemory,
    ProcessMemory,
    Sizes,
    pod_memory,
    sizes,
    standing_cost,
)
from app.cli.observe import ask_pod
from app.cli.run_dir import is_running, read_pods
from app.cli.status import look_at_gms
from app.cli.status_table import mebibytes
from workers.contract import Role
from workers.exit_codes import ExitCode
from workers.pod_files import PodRecord
from workers.state import EngineState

if TYPE_CHECKING:
    from rich.console import Group


async def account(run_dir: Path) -> MemoryDocument:
    """Read every process of every pod in ``run_dir``.

    Raises:
        CliError: no pod runs there.
    """
    pods = read_pods(run_dir)
    if not pods:
        raise CliError(f"no pod runs in {run_dir}; name another folder with --run-dir", code=ExitCode.ENGINE_DEAD)
    return MemoryDocument(run_dir=str(run_dir), pods=list(await asyncio.gather(*(_pod(pod, run_dir) for pod in pods))))


async def _pod(pod: PodRecord, run_dir: Path) -> PodMemory:
    records = {"gms": pod.gms, **(pod.more_gms or {})}
    asked = (look_at_gms(msgspec.structs.replace(pod, gms=record), run_dir) for record in records.values())
    answers, services = await asyncio.gather(ask_pod(pod), asyncio.gather(*asked))
    named: list[tuple[str, str, int | None]] = []
    if is_running(pod.pid, module="workers"):
        named.append(("pod", "supervisor", pod.pid))
    pools: Counter[str] = Counter()
    for name, service in zip(records, services, strict=True):
        if service is not None:
            named.append((name, SERVICE, service.pid))
            pools.update(service.bytes_by_pool)
    complete = all(service is None or service.answers for service in services)
    apart = {f"engine-{name}" for name, engine in pod.engines.items() if engine.apart}
    for name, answer in answers.items():
        keeper: int | None
        engine: int | None
        if isinstance(answer, EngineState):
            keeper, engine, role = answer.keeper_pid, answer.pid, str(answer.role)
        else:
            (engine, keeper, _), role = absent.look(pod, name, run_dir), str(answer)
        named.append((f"engine-{name}", KEEPER, keeper))
        named.append((f"engine-{name}", role, engine))
        ranks = _children(engine) if engine is not None and not pod.engines[name].apart else []
        named += [(f"engine-{name}", RANK, pid) for pid in ranks]
    processes = [
        ProcessMemory(
            name=name, role=role, pid=pid, sizes=None if name in apart else await asyncio.to_thread(read, pid)
        )
        for name, role, pid in named
        if pid is not None
    ]
    return pod_memory(pod.pod, processes, pools if complete else None)


def _children(pid: int) -> list[int]:
    """The processes that one has started, whichever thread did: an engine's further ranks."""
    try:
        texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return sorted(int(child) for text in texts for child in text.split())


def read(pid: int) -> Sizes | None:
    """One process now; None: it is gone, or not ours to see."""
    try:
        return sizes(Path(f"/proc/{pid}/smaps").read_bytes())
    except OSError:
        return None


def render(document: MemoryDocument) -> Group:
    """For people; MiB."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Table | Text] = []
    for pod in document.pods:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, show_footer=True)
        table.add_column(pod.pod, footer="together", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("private", justify="right")
        table.add_column("own", footer=mebibytes(pod.processes_bytes), justify="right")
        for heading in ("weights\nmapped", "kv\nmapped", "rss", "pid"):
            table.add_column(heading, justify="right")
        for process in pod.processes:
            table.add_row(process.name, process.role, *cells(process))
        parts += [table, *(Text(line) for line in sentences(pod))]
    return Group(*parts)


def cells(process: ProcessMemory) -> list[str]:
    """A process's row after its role. Pure."""
    found = process.sizes
    if found is None:
        return ["", "", "", "", "", str(process.pid)]
    weights = found.service.get("weights", 0)
    kv = sum(found.service.values()) - weights
    return [*(mebibytes(size) for size in (found.private, found.pss, weights, kv, found.rss)), str(process.pid)]


def sentences(pod: PodMemory) -> list[str]:
    """What the table's sums are, and what waiting costs. Pure."""
    if pod.service_bytes is None:
        lines = ["its memory service does not answer: the service's pages are not counted"]
    elif not pod.service_bytes and all(process.role != SERVICE for process in pod.processes):
        lines = [f"it has no memory service; its processes' own memory is all: {mebibytes(pod.total_bytes)} MiB"]
    else:
        pools = ", ".join(f"{kind} {mebibytes(size)}" for kind, size in sorted(pod.service_bytes.items()) if size)
        service = sum(pod.service_bytes.values())
        lines = [
            f"the memory service's pages, once: {mebibytes(service)} MiB ({pools or 'none'}); with the processes' own "
            f"{mebibytes(pod.processes_bytes)} MiB: {mebibytes(pod.total_bytes)} MiB"
        ]
    lines += [
        f"{name} is parked and costs {mebibytes(size)} MiB of its own, with its keeper"
        for name, size in standing_cost(pod, role=Role.STANDBY).items()
    ]
    return [f"  {pod.pod}: {line}" for line in lines]
