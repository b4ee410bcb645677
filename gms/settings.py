"""The memory service's settings, the only reader of its environment. A bad value is an error, never a default."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AliasChoices, BeforeValidator, ByteSize, Field, StringConstraints, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

DEFAULT_RUN_DIR = Path(".hotspare")
_SIZE: Final = re.compile(r"\s*(\d+\s*b?|\d+(\.\d+)?\s*[kmgtpe]i?b?)\s*", re.IGNORECASE | re.ASCII)


def _run_dir(value: object) -> object:
    """An empty variable is as good as none."""
    return DEFAULT_RUN_DIR if value == "" else value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _size(value: object) -> object:
    """pydantic reads what a text begins with, and drops the rest: "1,5GiB" would be one byte."""
    if isinstance(value, str) and not _SIZE.fullmatch(value):
        raise ValueError("a size is a number of bytes, or one with a unit: 536870912, 512MiB, 1.5GiB")
    return value


LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)]
"""Upper or lower case."""
Size = Annotated[ByteSize, BeforeValidator(_size), Field(gt=0)]
"""Bytes, or text such as "512MiB"."""


class GmsSettings(BaseSettings):
    """From HOTSPARE_GMS_<FIELD>; values given to the constructor (flags) win."""

    model_config = SettingsConfigDict(env_prefix="HOTSPARE_GMS_", populate_by_name=True, extra="forbid")

    socket: str = ""
    """Path of the Unix socket; its folder is made (0700) if missing. Unset: ``gms-DEVICE.sock`` in the pod's folder,
    where the pod's engines look for it."""
    device: str = "cpu:0"
    """Whose memory it is: ``cpu:N`` or ``cuda:N``."""
    memory_limit: Size | None = None
    """Most bytes that may be allocated at a time; "512MiB" is understood. Without it the machine is the limit."""
    chunk_size: Size | None = None
    """Largest piece of memory with a descriptor of its own; allocations are made of as many as they take. Unset: 512
    MiB on a GPU, where each costs driver calls, and no limit on the host."""
    adopt_timeout_seconds: Annotated[float, Field(ge=0, le=86400)] = 30.0
    """How long a service that starts again waits for its pages to be handed back by engines that live. Nothing is
    given out of those pools meanwhile, so that no second copy is made."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on which /metrics and /live are served; 0: nowhere."""
    metrics_host: str = "127.0.0.1"
    """Address on which they are served."""
    log_level: LogLevel = Field(
        default="info", validation_alias=AliasChoices("HOTSPARE_GMS_LOG_LEVEL", "HOTSPARE_LOG_LEVEL")
    )
    """Its own, or else that of all processes of the pod; upper or lower case."""
    log_format: Literal["console", "json"] = Field(default="console", validation_alias="HOTSPARE_LOG_FORMAT")
    """Lines for people, or one JSON object a line."""
    parent_pid: Annotated[int, Field(gt=0)] | None = Field(default=None, validation_alias="HOTSPARE_PARENT_PID")
    """The process that this one must not outlive."""
    run_dir: Annotated[Path, BeforeValidator(_run_dir)] = Field(
        default=DEFAULT_RUN_DIR, validation_alias="HOTSPARE_RUN_DIR"
    )
    """Folder of this machine's pods; for a socket that is not given."""
    pod: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")] = Field(
        default="pod-0", validation_alias="HOTSPARE_POD"
    )
    """The pod's name, and that of its folder in the run folder; for a socket that is not given."""

    @model_validator(mode="after")
    def _socket_in_the_pods_folder(self) -> Self:
        """The same path as ``workers.settings`` gives to engines; a test holds them against each other."""
        if not self.socket:
            name = f"gms-{self.device.replace(':', '-')}.sock"
            self.socket = os.path.join(os.path.abspath(self.run_dir), self.pod, name)
        return self
