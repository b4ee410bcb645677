"""[P] Which web pages may call the gateway from a browser: the answers to the Fetch standard's questions.

Off unless origins are named. Credentials in the sense of that standard (cookies, a browser's own passwords) are never
allowed: keys travel in a header that the page itself sets, so ``*`` is as safe as the keys are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from app.http_headers import find
from app.openai.errors import Header

EXPOSED: Final = b"openai-processing-ms, retry-after, retry-after-ms, x-request-id, x-should-retry"
"""Of an answer's headers, those that a page may read beside the few that it always may."""
_ANY: Final = "*"


class Cors:
    """``headers`` may be ``*``: whatever a page asks for."""

    def __init__(
        self, *, origins: Sequence[str], methods: Sequence[str], headers: Sequence[str], max_age_seconds: int
    ) -> None:
        self._any = _ANY in origins
        self._origins = frozenset(origin.rstrip("/").lower().encode("ascii") for origin in origins)
        self._methods = ", ".join(methods).encode("ascii")
        self._headers = None if _ANY in headers else ", ".join(headers).encode("ascii")
        self._max_age = b"%d" % max_age_seconds

    def answer(self, request: Sequence[Header]) -> list[Header]:
        """What any answer to this request says."""
        origin = find(request, b"origin")
        if self._any:
            allowed = [] if origin is None else [(b"access-control-allow-origin", b"*")]
        else:  # answers differ by origin, so that caches must be told of it in any case
            allowed = [(b"vary", b"Origin")]
            if origin in self._origins:
                allowed.append((b"access-control-allow-origin", origin))
        if allowed and allowed[-1][0] != b"vary":
            allowed.append((b"access-control-expose-headers", EXPOSED))
        return allowed

    def lines(self, request: Sequence[Header]) -> bytes:
        """The same, as lines of a head."""
        return b"".join(b"%b: %b\r\n" % header for header in self.answer(request))

    def preflight(self, request: Sequence[Header]) -> list[Header]:
        """What the answer to a preflight says beyond that; nothing if it is none, or its page may not."""
        asked = find(request, b"access-control-request-method")
        if asked is None or (not self._any and find(request, b"origin") not in self._origins):
            return []
        said = [(b"access-control-allow-methods", self._methods), (b"access-control-max-age", self._max_age)]
        wanted = find(request, b"access-control-request-headers")
        headers = self._headers if self._headers is not None else wanted  # "*" would not stand for authorization
        if headers:
            said.append((b"access-control-allow-headers", headers))
        return said
