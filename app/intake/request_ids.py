"""Ids that the gateway makes."""

from __future__ import annotations

import itertools
import secrets


class RequestIds:
    """Unique across restarts and gateways."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(8).encode()
        self._numbers = itertools.count(1)

    def new(self) -> bytes:
        return b"%b-%x" % (self._prefix, next(self._numbers))
