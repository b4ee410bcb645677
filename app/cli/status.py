"""``hotspare status``: one look at everything in a run folder, as a document; ``status_table`` shows it to people.

The document is the stable form (``version``): fields are added, never renamed. Who is gone or silent is part of it.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from app.cli import absent
from app.cli.errors import CliError
from app.cli.observe import DEADLINE_SECONDS, ask_gateway, ask_pod, private_bytes
from app.cli.reports import Absence, EngineAnswer, GatewayReport, WorkerReport
from app.cli.run_dir import GatewayFile, is_running, read_gateway, read_pods
from workers.exit_codes import ExitCode
from workers.pod_files import MemoryServiceRecord, PodRecord
from workers.state import DrainState
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
    obstacle: str | None = None
    """Why its last promotion failed; None if none did since one succeeded."""
    self_test_problem: str | None = None
    """Why it is no spare though it is parked, a sentence; None: it is one, or not parked."""
    self_test_age_seconds: float | None = None
    draining: DrainState | None = None
    """How far it is, of one that waits for its requests or hands them over."""


class GmsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The memory service; bytes by kind of pool (``weights``, ``kv``, ...) and by the engines that hold leases.

    ``states`` are those of the pools by their full names. ``remarks`` are sentences about what is not as it should be
    or is waited for: somebody waits for a lease or for memory, a pool's content is refused, the journal cannot be
    written.
    """

    pid: int | None
    answers: bool
    metrics_port: int
    """0: it serves none."""
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
    """One pod. ``stale``: its supervisor is gone and left the file behind. ``pid`` None: it has none, as in a container
    of Kubernetes, where the kubelet is that."""

    pod: str
    instance: str
    pid: int | None
    stale: bool
    serving_port: int
    routed: WorkerReport | None
    """What the gateway thinks of it."""
    gms: GmsStatus | None
    engines: dict[str, EngineStatus]
    more_gms: list[GmsStatus] = []
    """Those of the engines' further ranks."""


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
        CliError: nothing has ever run there, or a file cannot be read.
    """
    pods, gateway = read_pods(run_dir), read_gateway(run_dir)
    if not pods and gateway is None:
        raise CliError(
            f"neither a pod nor a gateway runs in {run_dir}; start one with `hotspare up`, or name another folder with "
            "--run-dir",
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
    absent = {Absence.GONE, Absence.STARTING, Absence.SILENT}
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
        if view is Absence.GONE and is_running(file.pid, module="app"):
            view = Absence.STARTING
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
    more = pod.more_gms or {}
    others = (look_at_gms(msgspec.structs.replace(pod, gms=record), run_dir) for record in more.values())
    answers, gms, more_gms = await asyncio.gather(ask_pod(pod), look_at_gms(pod, run_dir), asyncio.gather(*others))
    engines = await asyncio.gather(*(_engine_status(pod, name, answer, run_dir) for name, answer in answers.items()))
    return PodStatus(
        pod=pod.pod,
        instance=pod.instance,
        pid=pod.pid,
        stale=pod.pid is not None and not is_running(pod.pid, module="workers"),
        serving_port=pod.serving_port,
        routed=None,
        gms=gms,
        more_gms=[found for found in more_gms if found is not None],
        engines=dict(zip(answers, engines, strict=True)),
    )


async def _engine_status(pod: PodRecord, name: str, answer: EngineAnswer, run_dir: Path) -> EngineStatus:
    entry = pod.engines[name]
    if isinstance(answer, Absence):
        found = absent.look(pod, name, run_dir)
        if answer is Absence.GONE and (found.pid or absent.is_child(found.keeper_pid, of=pod.pid)):
            answer = Absence.STARTING
        return EngineStatus(
            role=answer,
            pid=found.pid,
            keeper_pid=found.keeper_pid,
            admin_port=entry.admin_port,
            restarts=found.restarts,
            private_bytes=None if found.pid is None else await asyncio.to_thread(private_bytes, found.pid),
        )
    private = None if entry.apart else await asyncio.to_thread(private_bytes, answer.pid)
    test = answer.self_test
    return EngineStatus(
        role=answer.role,
        role_seconds=round(answer.role_seconds, 3),
        pid=answer.pid,
        keeper_pid=answer.keeper_pid if pod.pid is None else entry.pid if entry.pid != answer.pid else None,
        admin_port=entry.admin_port,
        restarts=answer.restarts,
        epoch=answer.epoch,
        inflight=answer.inflight,
        capacity=answer.capacity,
        private_bytes=private,
        rss_bytes=answer.rss_bytes,
        weights_role=answer.memory.weights_role if answer.memory else None,
        kv_mapped=answer.memory.kv_mapped if answer.memory else None,
        memory_service=answer.memory_service.summary if answer.memory_service else None,
        failure=answer.failure,
        draining=answer.draining,
        self_test_problem=test.problem if test is not None else None,
        self_test_age_seconds=test.age_seconds if test is not None else None,
        obstacle=answer.obstacle,
    )


async def look_at_gms(pod: PodRecord, run_dir: Path) -> GmsStatus | None:
    """What one pod's memory service says; None: the pod has none."""
    if pod.gms is None:
        return None
    path = run_dir / pod.pod / pod.gms.socket
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):  # the thread is left behind: nobody waits for it at exit
            status = await in_daemon_thread(lambda: _gms_status(path, pod.instance), name="gms-status")
    except (OSError, TimeoutError):
        status = None
    if status is None:
        return GmsStatus(pid=pod.gms.pid, answers=False, metrics_port=pod.gms.metrics_port, device=served_device(path))
    return gms_status(pod.gms, status)


def gms_status(record: MemoryServiceRecord, status: Status) -> GmsStatus:
    """The service's own report, with what people ask of it. Pure."""
    pools: dict[str, int] = {}
    for pool in status.pools:
        pools[pool_kind(pool.name)] = pools.get(pool_kind(pool.name), 0) + pool.bytes
    remarks = [sentence for pool in status.pools for sentence in pool.waits] + status.memory_waits
    remarks += [f"{pool.name} is given to nobody any more: {pool.corrupt}" for pool in status.pools if pool.corrupt]
    if status.journal:
        remarks.append(f"pages could not be taken back after a restart: {status.journal}")
    return GmsStatus(
        pid=record.pid,
        answers=True,
        metrics_port=record.metrics_port,
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


def served_device(socket: Path) -> str:
    """The host device that a service's socket is named after (``gms-cpu-1.sock``); cpu:0 for any other name. Pure."""
    found = re.fullmatch(r"gms-cpu-([0-9]{1,3})\.sock", socket.name)
    return f"cpu:{found[1]}" if found else "cpu:0"


def _gms_status(path: Path, instance: str) -> Status | None:
    from gms.client import GmsClient, GmsError

    try:
        client = GmsClient.connect(
            path,
            engine="status",
            instance=instance,
            device=served_device(path),
            client="status",
            timeout_seconds=DEADLINE_SECONDS,
        )
        with client:
            return client.status()
    except GmsError:
        return None
