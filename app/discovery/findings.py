"""[P] What a source of addresses says, and what the gateway makes of it.

The last list that was believed stays in use while a source fails: a name server, a file or an API server that is out
of order says nothing about workers. Nothing to be found counts as such a failure unless the source can mean it: a file
cut short and a name without records look like an empty fleet, and would take all workers away at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.address import Address

MAX_ADDRESSES = 1000
"""Each address costs a connection and a dial every 25 to 250 ms: a longer list is a mistake."""


@dataclass(frozen=True, slots=True)
class Found:
    """``certain``: an empty list means that there is no worker, and not that the source had nothing to say."""

    addresses: tuple[Address, ...]
    certain: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """``reason``: a clause that goes after the source's name."""

    reason: str


Finding = Found | Failed


@dataclass(frozen=True, slots=True)
class Outcome:
    addresses: tuple[Address, ...] | None
    """The new list; ``None``: as before."""
    changed: bool
    """Whether the source began to fail, fails otherwise than before, or works again: worth a log line."""


class Picture:
    """The list that is believed, and how its source is. Times are ``time.time()`` seconds."""

    def __init__(self) -> None:
        self.addresses: tuple[Address, ...] = ()
        self.answered = False
        """Whether there was a list at all."""
        self.problem: str | None = None
        """Why the source fails now."""
        self.succeeded_at = 0.0

    def hear(self, finding: Finding, at: float) -> Outcome:
        finding = self._judge(finding)
        before = self.problem
        if isinstance(finding, Failed):
            self.problem = finding.reason
            return Outcome(None, before != self.problem)
        new = not self.answered or finding.addresses != self.addresses
        self.addresses, self.answered, self.problem, self.succeeded_at = finding.addresses, True, None, at
        return Outcome(finding.addresses if new else None, before is not None)

    def _judge(self, finding: Finding) -> Finding:
        if isinstance(finding, Failed):
            return finding
        addresses = tuple(dict.fromkeys(finding.addresses))
        if len(addresses) > MAX_ADDRESSES:
            return Failed(f"names {len(addresses)} workers; at most {MAX_ADDRESSES} can be watched")
        if not addresses and self.addresses and not finding.certain:
            return Failed("names no worker any more")
        return Found(addresses, finding.certain)


def one_family(hosts: Sequence[str]) -> list[str]:
    """IPv4 addresses if there are any, else those of IPv6, in an order that is always the same.

    A pod with both would be counted, watched and chosen twice.
    """
    four = {host for host in hosts if ":" not in host}
    return sorted(four or set(hosts))
