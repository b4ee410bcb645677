"""[P] Hosts to listen on, and hosts to ask."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final

_ANY: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def reachable(host: str) -> str:
    """An address of this machine at which a server that was told to listen on ``host`` is found."""
    return _ANY.get(host, host)


def authority(host: str, port: int) -> str:
    """Both as a URL and a Host header have them: an IPv6 address is in brackets there (RFC 3986, 3.2.2), and without
    its zone, which only this machine knows."""
    return f"[{host.partition('%')[0]}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on ``host``; names other than localhost do not count."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
