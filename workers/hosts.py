"""[P] Hosts to listen on, and hosts to ask."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final

_ANY: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def reachable(host: str) -> str:
    """An address of this machine at which a server that was told to listen on ``host`` is found."""
    return _ANY.get(host, host)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on ``host``; names other than localhost do not count."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
