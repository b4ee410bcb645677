"""The status document for people: one row an engine, the pod's own facts above them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from app.address import Address
from app.cli.drain_words import waiting_to_hand_over
from app.cli.reports import Absence
from app.cli.status import EngineStatus, GatewayStatus, GmsStatus, PodStatus, StatusDocument
from gms.legible import on_terminal

if TYPE_CHECKING:
    from rich.console import Group

MIB: Final = 1024 * 1024
_GATEWAY_WORDS: Final[dict[str, str]] = {
    Absence.UNAUTHORIZED: "asks for an API key; set HOTSPARE_API_KEY",
    Absence.WRONG_KEY: "does not know the API key that this command shows; set HOTSPARE_API_KEY to one of its keys",
    Absence.UNTRUSTED: "does not have the certificate in the file that gateway.json names",
}
_ROLE_STYLES: Final = {
    "ACTIVE": "bold green",
    "STANDBY": "cyan",
    "gone": "red",
    "starting": "yellow",
    "silent": "red",
    "FAILED": "red",
}


def render(document: StatusDocument) -> Group:
    """The document as something that rich can print."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)  # fits into 80 columns
    for heading in ("pod", "engine", "role"):
        table.add_column(heading, no_wrap=True)
    for heading in ("for", "epoch", "in\nflight", "restarts", "private\nMiB", "rss\nMiB", "pid"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pod in document.pods:
        for at, (name, engine) in enumerate(pod.engines.items()):
            role = Text(engine.role, style=_ROLE_STYLES.get(engine.role, "yellow"))
            table.add_row("" if at else pod.pod, name, role, *engine_cells(engine))
    lines = [Text(gateway_line(document.gateway)), *(Text(pod_line(pod)) for pod in document.pods)]
    # These quote others: clients' request ids, errors of libraries.
    lines += [Text(on_terminal(line), style="yellow") for pod in document.pods for line in gms_remarks(pod)]
    lines += [Text(on_terminal(line), style="yellow") for pod in document.pods for line in drains(pod)]
    lines += [Text(on_terminal(line), style="bold red") for pod in document.pods for line in obstacles(pod)]
    return Group(*lines, table)


def engine_cells(engine: EngineStatus) -> list[str]:
    """Everything of an engine's row after its role. Pure."""
    requests = "" if engine.inflight is None else f"{engine.inflight}/{engine.capacity}"
    return [
        duration(engine.role_seconds),
        "" if engine.epoch is None else str(engine.epoch),
        requests,
        str(engine.restarts),
        mebibytes(engine.private_bytes),
        mebibytes(engine.rss_bytes),
        "" if engine.pid is None else str(engine.pid),
    ]


def gateway_line(gateway: GatewayStatus | None) -> str:
    """One line about the gateway. Pure."""
    if gateway is None:
        return "gateway: none in this folder; one that was started by itself is here if it has the same --run-dir"
    said = _GATEWAY_WORDS.get(gateway.lifecycle, gateway.lifecycle)
    line = f"gateway {Address(gateway.host, gateway.port)}: {said}"
    if gateway.inflight is not None:
        line += f", {gateway.inflight} in flight, {gateway.waiting} waiting for a worker"
    return f"{line} (pid {gateway.pid})"


def pod_line(pod: PodStatus) -> str:
    """One line about a pod: whether it runs, how it is routed, and its memory service. Pure."""
    parts = [f"{pod.pod} on port {pod.serving_port}"]
    if pod.stale:
        parts.append(f"its supervisor (pid {pod.pid}) is gone: pod.json is stale")
    if pod.routed is not None:
        parts.append(f"gateway says {pod.routed.state}, {'' if pod.routed.routable else 'not '}routable")
        if pod.routed.problem:
            parts.append(pod.routed.problem)
    parts.append(gms_part(pod.gms))
    parts += [f"{other.device}: {gms_part(other)}" for other in pod.more_gms]
    return "; ".join(parts)


def gms_part(gms: GmsStatus | None) -> str:
    """What a pod's memory service holds. Pure."""
    if gms is None:
        return "no memory service"
    if not gms.answers:
        return "memory service does not answer"
    parts = [f"{kind} {size(count)}" for kind, count in sorted(gms.bytes_by_pool.items()) if count]
    if gms.orphaned_bytes:
        parts.append(f"of them {size(gms.orphaned_bytes)} wait for their holder's death")
    if gms.high_water_bytes and gms.high_water_bytes != gms.total_bytes:
        parts.append(f"at most {size(gms.high_water_bytes)} so far")
    limit = "" if gms.memory_limit is None else f" of {size(gms.memory_limit)}"
    return f"memory service {size(gms.total_bytes)}{limit}" + (f" ({', '.join(parts)})" if parts else "")


def gms_remarks(pod: PodStatus) -> list[str]:
    """A line for each thing about its memory that somebody waits for, or should look at. Pure."""
    gms = pod.gms
    if gms is None:
        return []
    lines = []
    for one in (gms, *pod.more_gms):
        where = f" of {one.device}" if pod.more_gms else ""
        adopting = [name for name, state in one.states.items() if state == "ADOPTING"]
        lines += [f"{name}{where} is being handed back after a restart of the memory service" for name in adopting]
    lines += [
        f"engine {name} and the memory service: {engine.memory_service}"
        for name, engine in pod.engines.items()
        if engine.memory_service not in (None, "connected")
    ]
    return [
        f"  {pod.pod}: {line}" for line in (*lines, *(remark for one in (gms, *pod.more_gms) for remark in one.remarks))
    ]


def drains(pod: PodStatus) -> list[str]:
    """A line for each engine that is on its way out. Pure."""
    lines = []
    for name, engine in pod.engines.items():
        if (draining := engine.draining) is None:
            continue
        remaining = ", ".join(f"{count} {route}" for route, count in draining.remaining.items()) or "nothing"
        left = "" if draining.left_seconds is None else f", cut in {duration(draining.left_seconds)}"
        if draining.bound:
            lines.append(f"  {pod.pod}: engine {name} {waiting_to_hand_over(draining)}")
            continue
        lines.append(f"  {pod.pod}: engine {name} leaves ({draining.phase}): {remaining} in flight{left}")
    return lines


def obstacles(pod: PodStatus) -> list[str]:
    """A line for each engine that was elected and could not serve, or is parked and could not take over. Pure."""
    lines = [
        f"engine {name} could not be promoted; {engine.obstacle}"
        for name, engine in pod.engines.items()
        if engine.obstacle is not None
    ]
    lines += [
        f"engine {name} is parked, but no spare: {engine.self_test_problem}"
        for name, engine in pod.engines.items()
        if engine.self_test_problem is not None
    ]
    return [f"  {pod.pod}: {line}" for line in lines]


def size(count: int | None) -> str:
    """Bytes for people. Pure."""
    return "" if count is None else f"{mebibytes(count)} MiB"


def mebibytes(count: int | None) -> str:
    """Bytes as MiB, for a column that says so. Pure."""
    if count is None:
        return ""
    return f"{count / MIB:,.1f}" if count < 100 * MIB else f"{count / MIB:,.0f}"


def duration(seconds: float | None) -> str:
    """Seconds for people, in a few characters. Pure."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"
