"""[P] API keys: which are known, and which one a request shows.

A key is compared by a digest that is keyed with a secret of this process, with the digests of all keys and to the end:
how long that takes depends on how many keys there are and how long the text is that was sent, and on nothing secret. No
result is kept, so no answer is faster for having been given before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from hmac import compare_digest

from app.openai.errors import Header, missing_api_key, unknown_api_key

MAX_KEY_BYTES = 512
MAX_KEYS = 1000
OPEN_PATHS = frozenset((b"/live", b"/health"))
"""What needs no key: whoever probes has none."""
SUBPROTOCOL_PREFIX = b"openai-insecure-api-key."
"""How a browser, which cannot set a WebSocket's headers, shows its key: as an offer of a subprotocol."""


def parse_keys(text: str) -> tuple[str, ...]:
    """Keys separated by commas.

    Raises:
        ValueError: one is not a key; says which by its place, and not how it reads.
    """
    return _checked(enumerate((part.strip() for part in text.split(",")), 1), "key")


def parse_key_file(text: str) -> tuple[str, ...]:
    """One key a line; empty lines, and those that begin with ``#``, are skipped.

    Raises:
        ValueError: as ``parse_keys``.
    """
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return _checked(((number, line) for number, line in lines if not line.startswith("#")), "line")


def _checked(numbered: Iterable[tuple[int, str]], unit: str) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for number, key in numbered:
        if not key:
            continue
        if len(key) > MAX_KEY_BYTES or not key.isascii() or not key.isprintable() or " " in key or "," in key:
            raise ValueError(
                f"{unit} {number} is not a key: at most {MAX_KEY_BYTES} printable ASCII characters, "
                "without spaces and commas"
            )
        found[key] = None
    if len(found) > MAX_KEYS:
        raise ValueError(f"there are {len(found)} keys; at most {MAX_KEYS} are possible")
    return tuple(found)


class ApiKeys:
    """The keys that are let in. There may be none: then nobody is."""

    __slots__ = ("_digests", "_on_unknown", "_salt")

    def __init__(
        self, keys: Iterable[str], *, salt: bytes, on_unknown: Callable[[str], None] = lambda client: None
    ) -> None:
        """``salt``: 32 random bytes of this process. ``on_unknown`` is told of each request that shows a wrong key, by
        its client's address."""
        self._salt = salt
        self._on_unknown = on_unknown
        self._digests: tuple[bytes, ...] = ()
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._digests)

    def replace(self, keys: Iterable[str]) -> None:
        """From now on these, and no others."""
        self._digests = tuple(self._digest(key.encode()) for key in keys)

    def knows(self, key: bytes) -> bool:
        if len(key) > MAX_KEY_BYTES:
            return False
        digest, found = self._digest(key), False
        for known in self._digests:
            found |= compare_digest(known, digest)
        return found

    def check(self, headers: Iterable[Header], client: Callable[[], str]) -> None:
        """Let a request in whose ``Authorization: Bearer``, or ``x-api-key``, is a known key. ``client`` gives its
        client's address.

        Raises:
            GatewayError: 401.
        """
        self._check(shown_keys(headers), client)

    def check_websocket(self, headers: Iterable[Header], client: Callable[[], str]) -> None:
        """The same for a WebSocket's handshake, where an offered subprotocol may be the key, too.

        The subprotocol of the key must not be the one that is agreed upon: the answer would repeat the key.

        Raises:
            GatewayError: 401.
        """
        headers = list(headers)
        self._check([*shown_keys(headers), *subprotocol_keys(headers)], client)

    def _check(self, shown: list[bytes], client: Callable[[], str]) -> None:
        for key in shown:
            if self.knows(key):
                return
        if not shown:
            raise missing_api_key()
        self._on_unknown(client())
        raise unknown_api_key()

    def _digest(self, key: bytes) -> bytes:
        return blake2b(key, key=self._salt, digest_size=32).digest()


def shown_keys(headers: Iterable[Header]) -> list[bytes]:
    """What a request shows: at most one key of either form, whatever it repeats."""
    bearer = other = None
    for name, value in headers:
        if name == b"authorization" and bearer is None:
            scheme, _, given = value.partition(b" ")
            if scheme.lower() == b"bearer":
                bearer = given.strip()
        elif name == b"x-api-key" and other is None:
            other = value.strip()
    return [key for key in (bearer, other) if key]


def subprotocol_keys(headers: Iterable[Header]) -> list[bytes]:
    """The first key among the subprotocols that a WebSocket's client offers."""
    for name, value in headers:
        if name == b"sec-websocket-protocol":
            for offer in value.split(b","):
                offer = offer.strip()
                if offer.startswith(SUBPROTOCOL_PREFIX) and len(offer) > len(SUBPROTOCOL_PREFIX):
                    return [offer.removeprefix(SUBPROTOCOL_PREFIX)]
    return []
