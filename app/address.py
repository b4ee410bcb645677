"""Addresses of workers. Pure."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit


class Address(NamedTuple):
    """Where a worker serves: the pod's serving port, whoever holds it at the moment."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read ``host:port`` or ``http://host:port``.

    Raises:
        ValueError: with a sentence that names the text and what it should look like.
    """
    given = text.strip()
    wanted = f"worker address {given!r} should be host:port or http://host:port"
    if given.startswith("https://"):
        raise ValueError(f"{wanted}; workers are reached over plain http inside the cluster")
    try:
        parts = urlsplit(given if "://" in given else f"http://{given}")
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{wanted}: {error}") from None
    if parts.scheme != "http" or not parts.hostname or parts.username is not None:
        raise ValueError(wanted)
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(f"{wanted}, without a path")
    if not port:
        raise ValueError(f"{wanted}: the port is missing")
    if any(char.isspace() or not char.isprintable() for char in parts.hostname):
        raise ValueError(wanted)
    return Address(parts.hostname, port)


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Read a comma separated list; repeated addresses count once.

    Raises:
        ValueError: an address is malformed, or there is none.
    """
    found = dict.fromkeys(parse_address(item) for item in text.split(",") if item.strip())
    if not found:
        raise ValueError("the list of workers is empty; give at least one host:port")
    return tuple(found)
