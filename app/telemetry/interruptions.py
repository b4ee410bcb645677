"""Metrics of what happens to requests whose workers break under them: the relay's ``RelayEvents``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

_STALL_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0)


class Interruptions:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._resumes = Counter(
            "hotspare_resumes",
            "Times a worker was asked to go on with another one's answer, by why, and by what came of it.",
            ["route", "reason", "outcome"],
            registry=registry,
        )
        self._tokens = Counter(
            "hotspare_resume_tokens", "Tokens that were replayed by workers that went on.", registry=registry
        )
        self._stalls = Histogram(
            "hotspare_client_stall_seconds",
            "From the last event before a break to the first one after it, of resumed streams.",
            buckets=_STALL_SECONDS,
            registry=registry,
        )
        self._refusals = Counter(
            "hotspare_resume_refusals", "Workers that would not go on, by their answer.", ["cause"], registry=registry
        )
        self._unresumable = Counter(
            "hotspare_unresumable_requests", "Answers that could not have been resumed.", ["reason"], registry=registry
        )
        self._lost = Counter(
            "hotspare_lost_requests",
            "Requests that ended with an error because a worker broke.",
            ["route", "reason"],
            registry=registry,
        )

    def resumed(self, *, route: str, reason: str, outcome: str) -> None:
        self._resumes.labels(route, reason, outcome).inc()

    def replayed(self, tokens: int) -> None:
        self._tokens.inc(tokens)

    def stalled(self, seconds: float) -> None:
        self._stalls.observe(seconds)

    def resume_refused(self, cause: str) -> None:
        self._refusals.labels(cause).inc()

    def unresumable(self, reason: str) -> None:
        self._unresumable.labels(reason).inc()

    def lost(self, *, route: str, reason: str) -> None:
        self._lost.labels(route, reason).inc()
