"""The memory service's settings, the only reader of its environment. A bad value is an error, never a default."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, BeforeValidator, ByteSize, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)]
"""In any case."""


class GmsSettings(BaseSettings):
    """From HOTSPARE_GMS_<FIELD>; values given to the constructor (flags) win."""

    model_config = SettingsConfigDict(env_prefix="HOTSPARE_GMS_", populate_by_name=True, extra="forbid")

    socket: Annotated[str, Field(min_length=1)]
    """Path of the Unix socket; its folder is made (0700) if missing."""
    device: str = "cpu:0"
    memory_limit: Annotated[ByteSize, Field(gt=0)] | None = None
    """Bytes that may be allocated at a time; "512MiB" is understood. Without it the machine is the limit."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: no metrics are served."""
    metrics_host: str = "127.0.0.1"
    log_level: LogLevel = Field(
        default="info", validation_alias=AliasChoices("HOTSPARE_GMS_LOG_LEVEL", "HOTSPARE_LOG_LEVEL")
    )
    """Its own, or else that of all processes of the pod."""
    log_format: Literal["console", "json"] = Field(default="console", validation_alias="HOTSPARE_LOG_FORMAT")
    parent_pid: Annotated[int, Field(gt=0)] | None = Field(default=None, validation_alias="HOTSPARE_PARENT_PID")
    """The process that this one must not outlive."""
