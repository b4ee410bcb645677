"""As SGLang's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ReleaseMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass
class ResumeMemoryOccupationReqInput:
    tags: list[str] | None = None
