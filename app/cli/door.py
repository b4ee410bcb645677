"""How the commands get in at the gateway's door: the key that they show, and the certificate that they expect."""

from __future__ import annotations

import os
import shlex
import ssl
from collections.abc import Mapping
from pathlib import Path

from app.plain_file import pem_text, read_small
from app.security.credentials import parse_key_file, parse_keys
from app.security.watched_files import MAX_BYTES, read_text
from app.start_error import StartError

API_KEY = "HOTSPARE_API_KEY"
"""The key of whoever runs a command. Without it, the first of the gateway's own, if this environment knows them."""


def client_key(environment: Mapping[str, str]) -> str | None:
    """The key to show, or None. What is wrong with the gateway's own settings is the gateway's to say."""
    try:
        own = parse_keys(environment.get(API_KEY, ""))
        keys = own or parse_keys(environment.get("HOTSPARE_API_KEYS", ""))
        if not keys and (file := environment.get("HOTSPARE_API_KEYS_FILE")):
            keys = parse_key_file(read_text(Path(file), "api_keys_file"))
    except (ValueError, StartError):
        return None
    return keys[0] if keys else None


def key_in_a_shell(environment: Mapping[str, str]) -> str:
    """What stands for that key in a command that a POSIX shell with the same variables runs; "" if there is none. The
    key itself is written nowhere."""
    if client_key(environment) is None:
        return ""
    if environment.get(API_KEY):
        return f"${API_KEY}"
    if environment.get("HOTSPARE_API_KEYS"):
        return "${HOTSPARE_API_KEYS%%,*}"
    return f"$(grep -m1 '^[^#]' {shlex.quote(os.path.abspath(environment['HOTSPARE_API_KEYS_FILE']))})"


def key_headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def trust_only(certificate: Path) -> ssl.SSLContext:
    """For a gateway on this machine, whatever name its certificate is for: it must have the key of that certificate.

    Raises:
        OSError: the certificate cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=pem_text(read_small(certificate, MAX_BYTES)))
    return context
