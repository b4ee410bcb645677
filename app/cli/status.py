"""``hotspare status``: one look at everything in a run folder, as a document; ``status_table`` shows it to people.

The document is the stable form (``version``): fields are added, never renamed. Who is gone or silent is part of it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from app.cli.errors import CliError
from app.cli.observe import DEADLINE_SECONDS, ask_gateway, ask_pod, private_bytes
from app.cli.reports import Absence, EngineAnswer, GatewayReport, WorkerReport
from app.cli.run_dir import GatewayFile, is_running, read_gateway, read_pods
from workers.exit_codes import ExitCode
from workers.pod_files import PodRecord
from workers.threads import in_daemon_thread

if TYPE_CHECKING:
    from gms.protocol import Status

VERSION: Final = 1


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. ``role`` is one of ``workers.role``'s, or ``gone``, or ``silent``; sizes are bytes."""

    role: str
    role_seconds: float | None = None
    pid: int | None = None
    keeper_pid: int | None = None
    admin_port: int
    restarts: int
    epoch: int | None = None
    inflight: int | None = None
    capacity: int | None = None
    private_bytes: int | None = None
    rss_bytes: int | None = None
    weights_role: str | None = None
    kv_mapped: bool | None = None
    memory_service: str | None = None
    """How it stands with the memory service: ``connected``, or in words since when not, or what is its own now."""
    failure: str | None = None


class GmsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The memory service; bytes by kind of pool (``weights``, ``kv``, ...) and by the engines that hold leases.

    ``states`` are those of the pools by their full names. ``remarks`` are sentences about what is not as it should be
    or is waited for: somebody waits for a lease or for memory, a pool's content is refused, the journal cannot be
    written.
    """

    pid: int | None
    answers: bool
    device: str | None = None
    total_bytes: int | None = None
    high_water_bytes: int | None = None
    memory_limit: int | None = None
    bytes_by_pool: dict[str, int] = {}
    bytes_by_owner: dict[str, int] = {}
    orphaned_bytes: int = 0
    states: dict[str, str] = {}
    remarks: list[str] = []


class PodStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One pod. ``stale``: its supervisor is gone and left the file behind."""

    pod: str
    instance: str
    pid: int
    stale: bool
    serving_port: int
    routed: WorkerReport | None
    """What the gateway thinks of it."""
    gms: GmsStatus | None
    engines: dict[str, EngineStatus]


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway; ``lifecycle`` is its own word, or one of ``Absence``."""

    pid: int
    host: str
    port: int
    lifecycle: str
    inflight: int | None = None
    waiting: int | None = None


class StatusDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Everything in one run folder."""

    version: int = VERSION
    run_dir: str
    gateway: GatewayStatus | None
    pods: list[PodStatus]


async def look(run_dir: Path, *, key: str | None = None) -> StatusDocument:
    """Ask everybody in ``run_dir`` at the same time; takes little more than a second at worst. ``key``: the API key to
    show to the gateway.

    Raises:
        CliError: no pod has ever run there, or a file cannot be read.
    """
    pods, gateway = read_pods(run_dir), read_gateway(run_dir)
    if not pods:
        raise CliError(
            f"no pod runs in {run_dir}; start one with `hotspare up`, or name another folder with --run-dir",
            code=ExitCode.ENGINE_DEAD,
        )
    view, seen = await asyncio.gather(
        _look_at_gateway(gateway, key), asyncio.gather(*(_look_at_pod(pod, run_dir) for pod in pods))
    )
    workers = view.workers if isinstance(view, GatewayReport) else ()
    return StatusDocument(
        run_dir=str(run_dir),
        gateway=_gateway_status(gateway, view),
        pods=[msgspec.structs.replace(pod, routed=routed_as(pod, workers)) for pod in seen],
    )


def answers(document: StatusDocument) -> bool:
    """Whether a gateway or any engine said something. Pure."""
    absent = {Absence.GONE, Absence.SILENT}
    roles = {engine.role for pod in document.pods for engine in pod.engines.values()}
    return (document.gateway is not None and document.gateway.lifecycle not in absent) or not roles <= absent


def routed_as(pod: PodStatus, workers: tuple[WorkerReport, ...]) -> WorkerReport | None:
    """The gateway's entry for a pod, found by its port: before the first answer the gateway knows no names. Pure."""
    return next((worker for worker in workers if worker.address.rpartition(":")[2] == str(pod.serving_port)), None)


def pool_kind(name: str) -> str:
    """``weights`` for ``weights/<layout key>``. Pure."""
    return name.partition("/")[0]


async def _look_at_gateway(gateway: GatewayFile | None, key: str | None) -> GatewayReport | Absence | None:
    return None if gateway is None else await ask_gateway(gateway, key=key)


def _gateway_status(file: GatewayFile | None, view: GatewayReport | Absence | None) -> GatewayStatus | None:
    if file is None or view is None:
        return None
    if isinstance(view, Absence):
        return GatewayStatus(pid=file.pid, host=file.host, port=file.port, lifecycle=view)
    return GatewayStatus(
        pid=file.pid,
        host=file.host,
        port=file.port,
        lifecycle=view.lifecycle,
        inflight=view.inflight,
        waiting=view.waiting,
    )


async def _look_at_pod(pod: PodRecord, run_dir: Path) -> PodStatus:
    answers, gms = await asyncio.gather(ask_pod(pod), _look_at_gms(pod, run_dir))
    engines = await asyncio.gather(*(_engine_status(pod, name, answer) for name, answer in answers.items()))
    return PodStatus(
        pod=pod.pod,
        instance=pod.instance,
        pid=pod.pid,
        stale=not is_running(pod.pid, module="workers"),
        serving_port=pod.serving_port,
        routed=None,
        gms=gms,
        engines=dict(zip(answers, engines, strict=True)),
    )


async def _engine_status(pod: PodRecord, name: str, answer: EngineAnswer) -> EngineStatus:
    entry = pod.engines[name]
    if isinstance(answer, Absence):
        return EngineStatus(role=answer, keeper_pid=entry.pid, admin_port=entry.admin_port, restarts=entry.restarts)
    private = await asyncio.to_thread(private_bytes, answer.pid)
    return EngineStatus(
        role=answer.role,
        role_seconds=round(answer.role_seconds, 3),
        pid=answer.pid,
        keeper_pid=entry.pid if entry.pid != answer.pid else None,
        admin_port=entry.admin_port,
        restarts=entry.restarts + answer.restarts,
        epoch=answer.epoch,
        inflight=answer.inflight,
        capacity=answer.capacity,
        private_bytes=private,
        rss_bytes=answer.rss_bytes,
        weights_role=answer.memory.weights_role if answer.memory else None,
        kv_mapped=answer.memory.kv_mapped if answer.memory else None,
        memory_service=answer.memory_service.summary if answer.memory_service else None,
        failure=answer.failure,
    )


async def _look_at_gms(pod: PodRecord, run_dir: Path) -> GmsStatus | None:
    if pod.gms is None:
        return None
    path = run_dir / pod.pod / pod.gms.socket
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):  # the thread is left behind: nobody waits for it at exit
            status = await in_daemon_thread(lambda: _gms_status(path, pod.instance), name="gms-status")
    except (OSError, TimeoutError):
        return GmsStatus(pid=pod.gms.pid, answers=False)
    if status is None:
        return GmsStatus(pid=pod.gms.pid, answers=False)
    return gms_status(pod.gms.pid, status)


def gms_status(pid: int | None, status: Status) -> GmsStatus:
    """The service's own report, with what people ask of it. Pure."""
    pools: dict[str, int] = {}
    for pool in status.pools:
        pools[pool_kind(pool.name)] = pools.get(pool_kind(pool.name), 0) + pool.bytes
    remarks = [sentence for pool in status.pools for sentence in pool.waits] + status.memory_waits
    remarks += [f"{pool.name} is given to nobody any more: {pool.corrupt}" for pool in status.pools if pool.corrupt]
    if status.journal:
        remarks.append(f"pages could not be taken back after a restart: {status.journal}")
    return GmsStatus(
        pid=pid,
        answers=True,
        device=status.device,
        total_bytes=status.total_bytes,
        high_water_bytes=status.high_water_bytes,
        memory_limit=status.memory_limit,
        bytes_by_pool=pools,
        bytes_by_owner=status.bytes_by_owner,
        orphaned_bytes=sum(pool.orphaned_bytes for pool in status.pools),
        states={pool.name: pool.state for pool in status.pools},
        remarks=remarks,
    )


def _gms_status(path: Path, instance: str) -> Status | None:
    from gms.client import GmsClient, GmsError

    try:
        client = GmsClient.connect(
            path, engine="status", instance=instance, client="status", timeout_seconds=DEADLINE_SECONDS
        )
        with client:
            return client.status()
    except GmsError:
        return None
