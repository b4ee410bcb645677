"""The probes of a container's spec: asked over HTTP, as a kubelet does from outside of the pod, and counted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

import httpx

from tests.pod.manifests import Document, port_of


@dataclass
class Probe:
    """One probe, during one life of its container. Times are seconds."""

    kind: str
    scheme: str
    port: int
    path: str
    period: float
    timeout: float
    threshold: int
    """So many failures in a row are one."""
    grace: float | None
    """SIGTERM to SIGKILL, if it fails; None: the pod's."""
    failures: int = 0
    next_at: float = 0.0

    @classmethod
    def of(cls, container: Document, kind: str) -> Self | None:
        """The container's probe of this kind: startup, liveness, readiness."""
        spec = container.get(f"{kind}Probe")
        if spec is None:
            return None
        grace = spec.get("terminationGracePeriodSeconds")
        return cls(
            kind=kind,
            scheme=spec["httpGet"].get("scheme", "HTTP").lower(),
            port=port_of(container, spec["httpGet"]["port"]),
            path=spec["httpGet"]["path"],
            period=float(spec.get("periodSeconds", 10)),
            timeout=float(spec.get("timeoutSeconds", 1)),
            threshold=int(spec.get("failureThreshold", 3)),
            grace=None if grace is None else float(grace),
        )

    @property
    def due(self) -> bool:
        return time.monotonic() >= self.next_at

    @property
    def failed(self) -> bool:
        return self.failures >= self.threshold

    def ask(self, address: str) -> bool:
        """Whether it succeeds now."""
        self.next_at = time.monotonic() + self.period
        url = f"{self.scheme}://{address}:{self.port}{self.path}"
        try:
            ok = 200 <= httpx.get(url, timeout=self.timeout, verify=False, trust_env=False).status_code < 400
        except httpx.TransportError:
            ok = False
        self.failures = 0 if ok else self.failures + 1
        return ok
