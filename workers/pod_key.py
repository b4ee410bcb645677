"""The key by which processes of one pod know each other on their admin ports, where something is done and not only
read.

It lies in the pod's folder, which is its user's alone: who can read that can kill the pod's processes anyway. Whoever
needs it first makes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hmac import compare_digest
from pathlib import Path
from secrets import token_hex, token_urlsafe
from typing import Final

HEADER_POD_KEY: Final = "x-hotspare-pod-key"
KEY_FILE: Final = "pod.key"
MAX_KEY_BYTES: Final = 256

_HEADER: Final = HEADER_POD_KEY.encode()


class PodKeyError(Exception):
    """There is no key that could be used; the message says why."""


def read_pod_key(pod_dir: Path) -> str:
    """The pod's key.

    Raises:
        PodKeyError: there is none, or it cannot be read.
    """
    path = pod_dir / KEY_FILE
    try:
        with path.open("rb") as file:
            key = file.read(MAX_KEY_BYTES).strip()
    except OSError as error:
        raise PodKeyError(f"the pod's key {path} cannot be read: {error.strerror}") from error
    if not key or not key.isascii():
        raise PodKeyError(f"the pod's key {path} holds no key; stop the pod and remove the file")
    return key.decode()


def pod_key(pod_dir: Path) -> str:
    """The pod's key, made if there is none.

    Raises:
        PodKeyError: it can be neither read nor made.
    """
    if not (path := pod_dir / KEY_FILE).exists():
        _make(path, token_urlsafe(32))
    return read_pod_key(pod_dir)


def restore_pod_key(pod_dir: Path, key: str) -> None:
    """Write the key back that the pod's processes have, if somebody has removed the file.

    Raises:
        PodKeyError: it cannot be made.
    """
    path = pod_dir / KEY_FILE
    if not path.exists():
        try:
            pod_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise PodKeyError(f"the pod's folder {pod_dir} cannot be made: {error.strerror}") from error
        _make(path, key)


def _make(path: Path, key: str) -> None:
    draft = path.with_name(f".{path.name}.{token_hex(8)}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(key + "\n")
        try:
            os.link(draft, path)  # whole, or another process's
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    except OSError as error:
        raise PodKeyError(f"the pod's key {path} cannot be made: {error.strerror}") from error


def shows(headers: Iterable[tuple[bytes, bytes]], key: str) -> bool:
    """Whether a request with these headers shows the key."""
    shown = next((value for name, value in headers if name == _HEADER), b"")
    return compare_digest(shown, key.encode())
