"""[P] Hosts to listen on, and hosts to ask."""

from __future__ import annotations

from typing import Final

_ANY: Final = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def reachable(host: str) -> str:
    """An address of this machine at which a server that was told to listen on ``host`` is found."""
    return _ANY.get(host, host)
