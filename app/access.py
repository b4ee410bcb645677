"""Who may do what, as the settings say: read at the start, and again when a file of theirs changes.

Nothing of this module ever puts a secret into a message.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from app.fleet.worker_token import WorkerToken
from app.security.credentials import ApiKeys, parse_key_file
from app.security.refused_keys import RefusedKeys
from app.security.tls import ServerTls
from app.security.watched_files import WatchedFiles, read_text
from app.settings import GatewaySettings
from app.start_error import StartError
from workers.contract import WorkerTokenError, parse_worker_tokens

logger = logging.getLogger(__name__)


class Access:
    """What is checked at the gateway's doors. Use :meth:`followed` while the gateway runs.

    ``keys`` is ``None`` where everybody is let in; ``worker_token`` is what this gateway shows to workers. ``tls`` is
    ``None`` where it speaks plain HTTP.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises:
        StartError: a file cannot be used.
        """
        self._files: list[tuple[WatchedFiles, Callable[[], str]]] = []
        self._given = tuple(key.get_secret_value() for key in settings.api_keys)
        self._keys_file = settings.api_keys_file
        self._refused = RefusedKeys()
        self.keys = self._api_keys()
        self.worker_token = self._worker_token(settings)
        self.tls = self._tls(settings)

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Files are read again when they change, while inside."""
        tasks = [asyncio.create_task(files.follow(reload)) for files, reload in self._files]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _api_keys(self) -> ApiKeys | None:
        if self._keys_file is None:
            return self._known(self._given) if self._given else None
        watched = WatchedFiles(self._keys_file)
        keys = self._known(self._given + self._filed())
        if not len(keys):
            raise StartError(
                f"{self._keys_file} holds no key, so nobody could use this gateway; "
                "write one a line, or unset api_keys_file (HOTSPARE_API_KEYS_FILE)"
            )

        def reload() -> str:
            filed = self._filed()
            keys.replace(self._given + filed)
            if not filed:  # taken at its word, but seldom meant
                kept = "only those of api_keys are let in" if self._given else "every request is refused with 401"
                logger.warning("%s holds no key any more: %s", self._keys_file, kept)
            return f"{len(keys)} API {'key is' if len(keys) == 1 else 'keys are'} known now"

        self._files.append((watched, reload))
        return keys

    def _known(self, keys: tuple[str, ...]) -> ApiKeys:
        return ApiKeys(keys, salt=secrets.token_bytes(32), on_unknown=self._tell_unknown)

    def _tell_unknown(self, client: str) -> None:
        if number := self._refused.refused(now=time.monotonic()):
            many = "" if number == 1 else "s"
            last = "the last one " if number > 1 else ""
            logger.info("%d request%s with a wrong API key refused, %sfrom %s", number, many, last, client or "nowhere")

    def _filed(self) -> tuple[str, ...]:
        if self._keys_file is None:
            return ()
        text = read_text(self._keys_file, "api_keys_file")
        try:
            return parse_key_file(text)
        except ValueError as error:
            raise StartError(f"{self._keys_file}: {error}") from None

    def _tls(self, settings: GatewaySettings) -> ServerTls | None:
        certificate, key = settings.tls_certificate, settings.tls_key
        if certificate is None or key is None:  # the settings see to it that it is both or neither
            return None
        watched = WatchedFiles(certificate, key)
        tls = ServerTls(certificate, key)
        self._files.append((watched, tls.reload))
        return tls

    def _worker_token(self, settings: GatewaySettings) -> WorkerToken:
        """The variable's, or else the first one of the file."""
        path = settings.worker_token_file
        if settings.worker_token is not None:
            return WorkerToken(settings.worker_token.get_secret_value())
        if path is None:
            return WorkerToken()

        def first() -> str:
            try:
                return parse_worker_tokens(read_text(path, "worker_token_file").encode())[0]
            except WorkerTokenError as error:
                raise StartError(f"{path}: {error}") from None

        watched = WatchedFiles(path)
        token = WorkerToken(first())

        def reload() -> str:
            token.replace(first())
            return "the worker token was read again"

        self._files.append((watched, reload))
        return token
