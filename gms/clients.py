"""Who is connected. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Client:
    """Who is behind a connection, as it introduced itself. `pid` as seen from here, None if in another namespace;
    `processes` are those whose end it stands for, its own and its ranks', each the same for all connections; empty
    where the kernel cannot tell."""

    id: int
    kind: str
    engine: str
    instance: str
    pid: int | None
    processes: frozenset[tuple[str, int]] = frozenset()
    pidfds: int = 1
    """How many processes it named in its hello."""

    @property
    def label(self) -> str:
        return f"{self.kind} {self.engine}" + (f" (pid {self.pid})" if self.pid else "")
