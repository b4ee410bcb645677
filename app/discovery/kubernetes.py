"""Workers from the EndpointSlices of a Kubernetes Service: a list, then a watch, for ever.

Off the hot path, so a general HTTP client does. Token and CA certificate are read again for each connection, as
Kubernetes renews them in place.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import httpx

from app.discovery.endpoints import LABEL, BadAnswer, Expired, ServicePort, Slices, retry_delay
from app.discovery.findings import Failed
from app.discovery.sources import Hear
from app.plain_file import pem_text, read_small

logger = logging.getLogger(__name__)

WATCH_SECONDS = 30
"""The API server ends a watch after this long, and it is opened again. It bounds how long a connection that died
without a word stays unnoticed, and how old the token of a running watch gets."""
ANSWER_SECONDS = 15.0
SILENCE_SECONDS = WATCH_SECONDS + 10.0
HANDSHAKE_SECONDS = 1.0
"""What a TLS handshake under way is given to end, when nobody wants the connection any more."""
MAX_LIST_BYTES = 32 << 20
MAX_EVENT_BYTES = 4 << 20
MAX_CREDENTIAL_BYTES = 1 << 20
SHORT_LIFE_SECONDS = 5.0
"""A watch that ends sooner counts as a failure when it comes to waiting before the next one."""


class _Cut(Exception):
    """A watch that ran broke. Not worth a word if the next one opens."""


class KubernetesSource:
    """``api``: the API server's URL; ``credentials``: a folder with ``token`` and ``ca.crt``."""

    def __init__(self, service: ServicePort, *, api: str, credentials: Path) -> None:
        self.name = f"Service {service}"
        self._service = service
        self._api = api.rstrip("/")
        self._credentials = credentials
        self._failures = 0

    async def run(self, hear: Hear) -> None:
        while True:
            began = time.monotonic()
            try:
                await self._follow(hear)
            except (_Cut, Expired):
                if time.monotonic() - began >= SHORT_LIFE_SECONDS:
                    self._failures = 0
            except BadAnswer as error:
                hear(Failed(f"cannot be followed: the API server {error}"))
            except (httpx.HTTPError, TimeoutError) as error:
                hear(Failed(f"cannot be followed: no answer of {self._api}: {str(error) or type(error).__name__}"))
            except (OSError, UnicodeError) as error:
                hear(Failed(f"cannot be followed: {error}"))
            delay = retry_delay(self._failures, random.random())  # noqa: S311
            self._failures += 1
            await asyncio.sleep(delay)

    async def _follow(self, hear: Hear) -> None:
        """List and watch until something is wrong."""
        slices = Slices()
        async with self._client() as client:
            async with asyncio.timeout(ANSWER_SECONDS):
                slices.replace(await self._list(client))
            hear(slices.finding(self._service.port))
            while True:
                began = time.monotonic()
                async with aclosing(self._watch(client, slices.version)) as lines:
                    async for line in lines:
                        if slices.apply(line):
                            hear(slices.finding(self._service.port))
                if time.monotonic() - began < SHORT_LIFE_SECONDS:
                    raise _Cut
                self._failures = 0
                hear(slices.finding(self._service.port))

    def _client(self) -> httpx.AsyncClient:
        """Over plain http (``kubectl proxy``) there is nothing to check, and no token is shown."""
        verify: ssl.SSLContext | bool = False
        if self._api.startswith("https:"):
            verify = ssl.create_default_context(cadata=pem_text(self._read("ca.crt")))
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=5.0)
        # A connection that was kept may be closed just when it is used again: no news about the API server.
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.AsyncClient(verify=verify, trust_env=False, timeout=timeout, limits=limits)

    def _request(self, client: httpx.AsyncClient, **parameters: str) -> httpx.Request:
        headers = {"accept": "application/json", "accept-encoding": "identity", "user-agent": "hotspare-gateway"}
        if self._api.startswith("https:"):
            headers["authorization"] = f"Bearer {self._read('token').decode().strip()}"
        url = f"{self._api}/apis/discovery.k8s.io/v1/namespaces/{self._service.namespace}/endpointslices"
        selector = {"labelSelector": f"{LABEL}={self._service.service}"}
        return client.build_request("GET", url, params=selector | parameters, headers=headers)

    def _read(self, name: str) -> bytes:
        return read_small(self._credentials / name, MAX_CREDENTIAL_BYTES)

    async def _list(self, client: httpx.AsyncClient) -> bytes:
        answer = await _send(client, self._request(client))
        try:
            await _check(answer)
            document = bytearray()
            async for piece in answer.aiter_bytes():
                document += piece
                if len(document) > MAX_LIST_BYTES:
                    raise BadAnswer(f"gave a list of more than {MAX_LIST_BYTES} bytes")
            return bytes(document)
        finally:
            await answer.aclose()

    async def _watch(self, client: httpx.AsyncClient, version: str) -> AsyncGenerator[bytes, None]:
        """The lines of one watch, to its end."""
        request = self._request(
            client,
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=version,
            timeoutSeconds=str(WATCH_SECONDS),
        )
        request.extensions["timeout"] = httpx.Timeout(SILENCE_SECONDS, connect=5.0).as_dict()
        answer = await _send(client, request)
        try:
            await _check(answer)
            rest = b""
            try:
                async for piece in answer.aiter_bytes():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        if line.strip():
                            yield line
                    if len(rest) > MAX_EVENT_BYTES:
                        raise BadAnswer(f"sent an event of more than {MAX_EVENT_BYTES} bytes")
            except httpx.TransportError as error:
                raise _Cut from error
        finally:
            await answer.aclose()


async def _send(client: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
    """``client.send``, which when it is cancelled leaves a socket that shakes hands to the garbage collector: so it is
    given a moment to come to its end first."""
    sending = asyncio.ensure_future(client.send(request, stream=True))
    try:
        return await asyncio.shield(sending)
    except asyncio.CancelledError:
        try:
            await asyncio.wait((sending,), timeout=HANDSHAKE_SECONDS)
            if sending.done() and not sending.cancelled() and sending.exception() is None:
                await sending.result().aclose()
        finally:
            sending.cancel()
        raise


async def _check(answer: httpx.Response) -> None:
    """Raises:
    Expired: 410.
    BadAnswer: another status than 200.
    """
    if answer.status_code == httpx.codes.GONE:
        raise Expired
    if answer.status_code in (401, 403):
        raise BadAnswer(
            f"answered {answer.status_code}: the service account needs list and watch of endpointslices "
            "(discovery.k8s.io) in the Service's namespace"
        )
    if answer.status_code != httpx.codes.OK:
        raise BadAnswer(f"answered {answer.status_code}")
