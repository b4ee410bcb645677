"""What the supervisor of a pod starts: command lines and environments."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from workers.settings import SECRET, EngineSettings, PodSettings, WorkerSettings, load_settings

SERVICE = "gms"
ENGINE_PREFIX = "engine-"


def admin_ports(settings: PodSettings) -> dict[str, int]:
    """Process name of each engine → its admin port."""
    letters = "abcdefgh"[: settings.shadows + 1]
    return {f"{ENGINE_PREFIX}{letter}": port for letter, port in zip(letters, settings.admin_ports, strict=False)}


def services(settings: PodSettings) -> dict[str, str]:
    """Process name of each memory service → its device; the first one is that of the engines' rank 0."""
    if not settings.gms:
        return {}
    return {SERVICE if not rank else f"{SERVICE}-{rank}": device for rank, device in enumerate(settings.devices)}


def metrics_ports(settings: PodSettings) -> dict[str, int]:
    """Process name of each memory service → where it serves its metrics; 0: nowhere."""
    first, *more = services(settings) or (SERVICE,)
    ports = zip(more, (*settings.more_gms_metrics_ports, *(0 for _ in more)), strict=False)
    return {first: settings.gms_metrics_port, **dict(ports)}


def command_lines(settings: PodSettings) -> dict[str, list[str]]:
    """Process name → argv."""
    python = [sys.executable, "-m"]
    commands: dict[str, list[str]] = {}
    ports = metrics_ports(settings)
    for name, device in services(settings).items():
        service = [*python, "gms", "--socket", str(settings.gms_socket_of(device)), "--device", device]
        service += ["--metrics-port", str(ports[name])]
        if settings.gms_memory_limit_bytes:
            service += ["--memory-limit", str(settings.gms_memory_limit_bytes)]
        commands[name] = service
    for name, port in admin_ports(settings).items():
        letter = name.removeprefix(ENGINE_PREFIX)
        commands[name] = [*python, "workers", "engine", "--engine-id", letter, "--admin-port", str(port)]
    return commands


def engine_settings(settings: PodSettings, name: str) -> EngineSettings:
    """What the engine ``name`` will read from its command line and ``environment``.

    Raises:
        SettingsError: it will not start with that.
    """
    common = set(WorkerSettings.model_fields) - SECRET
    shared = settings.model_dump(include=common, exclude_none=True)
    engines = admin_ports(settings)
    others = tuple(port for other, port in engines.items() if other != name)
    own = {"engine_id": name.removeprefix(ENGINE_PREFIX), "admin_port": engines[name], "standby_admin_ports": others}
    return load_settings(EngineSettings, {**shared, **own})


def environment(settings: PodSettings, name: str, *, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the process ``name``.

    ``inherited`` is the supervisor's own, so that what is set for engines only (model, HOTSPARE_SIM_*) reaches them. On
    top comes what all processes of a pod must agree on, whether it was given as a flag or made up (``instance``).
    """
    # Secrets come from the environment, and go on in it: to the engines, which need them.
    common = set(WorkerSettings.model_fields) - SECRET
    shared = settings.model_dump(mode="json", include=common, exclude_none=True)
    if name in services(settings):
        secret = {f"HOTSPARE_{field.upper()}" for field in SECRET}
        inherited = {variable: value for variable, value in inherited.items() if variable.upper() not in secret}
    env = {**inherited, **{f"HOTSPARE_{field.upper()}": _as_variable(value) for field, value in shared.items()}}
    env["HOTSPARE_PARENT_PID"] = str(os.getpid())
    engines = admin_ports(settings)
    if name in engines:
        env["HOTSPARE_STANDBY_ADMIN_PORTS"] = ",".join(str(port) for other, port in engines.items() if other != name)
    return env


def _as_variable(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
