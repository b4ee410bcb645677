"""TLS towards clients: one certificate and its key, which may be replaced while the gateway runs.

Handshakes begin in a context that never changes, since listeners hold on to theirs, and go on in the newest one: it is
chosen when the client's first message has come. A pair is tried in a context of its own first, so that one that does
not fit never touches a handshake.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

from app.security.certificates import not_after
from app.security.watched_files import read_text
from app.start_error import StartError

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2: forward secret and authenticated ones. TLS 1.3 has no others."""


class ServerTls:
    """``context`` is for listeners; ``expires_at`` is Unix time."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises:
        StartError: the pair cannot be used.
        """
        self.certificate = certificate
        self._key = key
        self._current, self.expires_at = self._load()
        self.context = self._current
        self.context.sni_callback = self._choose

    def reload(self) -> str:
        """Read the files again. New handshakes use the new pair; connections that stand keep theirs.

        Raises:
            StartError: the new pair cannot be used; nothing changed.
        """
        self._current, self.expires_at = self._load()
        return f"the TLS certificate was read again and is {self.validity}"

    @property
    def validity(self) -> str:
        return f"valid until {datetime.fromtimestamp(self.expires_at, UTC):%Y-%m-%d %H:%M:%S} UTC"

    def _choose(self, handshake: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        handshake.context = self._current

    def _load(self) -> tuple[ssl.SSLContext, float]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(CIPHERS)
        context.set_alpn_protocols(["http/1.1"])
        context.options |= ssl.OP_NO_RENEGOTIATION
        if "ENCRYPTED" in read_text(self._key, "tls_key"):  # OpenSSL would ask for a passphrase on the terminal
            raise StartError(f"the key {self._key} is encrypted; use one that is not")
        expires = self._expiry()
        try:
            # It opens them by their names; that they are regular files, which nobody waits for, is known by now.
            context.load_cert_chain(self.certificate, self._key, password=lambda: "")
        except OSError as error:
            pair = f"the TLS pair {self.certificate} and {self._key}"
            raise StartError(f"{pair} cannot be used: {_why(error)}") from None
        return context, expires

    def _expiry(self) -> float:
        text = read_text(self.certificate, "tls_certificate")
        begin, end = text.find("-----BEGIN CERTIFICATE-----"), text.find("-----END CERTIFICATE-----")
        try:
            return not_after(ssl.PEM_cert_to_DER_cert(text[begin : end + len("-----END CERTIFICATE-----")]))
        except ValueError as error:
            raise StartError(f"{self.certificate} holds no certificate in PEM form: {error}") from None


def _why(error: OSError) -> str:
    reason = str(getattr(error, "reason", "") or error.strerror or error)
    if "KEY_VALUES_MISMATCH" in reason:
        return "the key does not belong to the certificate"
    return reason
