"""The token by which a worker knows its gateways.

A file may hold several tokens, one a line: gateways send the first, workers accept any. So one file for both can be
replaced while they run: the new token is added as the second line, then moved to the front, then the old one removed.

The file is looked at when a request comes, at most once a second: what has no requests needs no new token.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from hashlib import blake2b
from hmac import compare_digest
from secrets import token_bytes, token_hex
from typing import Final

from workers.contract import HEADER_WORKER_TOKEN, WorkerTokenError, parse_worker_tokens
from workers.settings import WorkerSettings

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
MAX_FILE_BYTES: Final = 1 << 16
_HEADER: Final = HEADER_WORKER_TOKEN.encode()

Signature = tuple[int, int, int, int] | None


class WorkerTokens:
    """The tokens that are accepted. One that is not right takes as long to refuse as any other."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Raises:
        WorkerTokenError: the file cannot be used.
        """
        self._salt = token_bytes(32)
        self._own = token_hex(32)
        self._path = settings.worker_token_file
        given = settings.worker_token
        self._given: tuple[str, ...] = () if given is None else (given.get_secret_value(),)
        self._signature = self._look()
        self._looked = time.monotonic()
        self._digests: tuple[bytes, ...] = ()
        self._read()

    def accepts(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request with these headers comes from a gateway of this worker."""
        self._refresh()
        shown = next((value for name, value in headers if name == _HEADER), b"")
        digest, found = self._digest(shown), False
        for known in self._digests:
            found |= compare_digest(known, digest)
        return found

    def shown(self) -> dict[str, str]:
        """The header by which this process proves to its own gate that it is one of those, too. It is made of a token
        that nobody else has."""
        return {HEADER_WORKER_TOKEN: self._own}

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        signature = self._look()
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._read()
            logger.info("%d worker tokens are accepted now", len(self._digests) - 1)
        except WorkerTokenError as error:
            logger.error("%s; the tokens that were read before stay in use", error)

    def _read(self) -> None:
        tokens = self._given
        if self._path is not None:
            try:
                with self._path.open("rb") as file:
                    tokens += parse_worker_tokens(file.read(MAX_FILE_BYTES))
            except OSError as error:
                raise WorkerTokenError(f"the file of worker tokens {self._path}: {error.strerror}") from error
            except WorkerTokenError as error:
                raise WorkerTokenError(f"the file of worker tokens {self._path}: {error}") from None
        self._digests = tuple(self._digest(token.encode()) for token in (*tokens, self._own))

    def _look(self) -> Signature:
        try:
            found = os.stat(self._path) if self._path is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def _digest(self, token: bytes) -> bytes:
        return blake2b(token, key=self._salt, digest_size=32).digest()


def worker_tokens(settings: WorkerSettings) -> WorkerTokens | None:
    """None where the settings name no token: whoever reaches the worker is answered.

    Raises:
        WorkerTokenError: the file cannot be used.
    """
    wanted = settings.worker_token is not None or settings.worker_token_file is not None
    return WorkerTokens(settings) if wanted else None
