"""Files that others put there, read without ever waiting for whoever writes them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """The content, or as much of it as shows that it is over the limit: one byte more.

    Raises:
        OSError: it cannot be read, or is no regular file. ``strerror`` is for people.
    """
    # Without O_NONBLOCK the open of a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit_bytes + 1)
    finally:
        os.close(descriptor)


def read_small(path: Path, limit_bytes: int) -> bytes:
    """The whole content.

    Raises:
        OSError: as ``read_regular``, or it is larger.
    """
    data = read_regular(path, limit_bytes)
    if len(data) > limit_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {limit_bytes} bytes", str(path))
    return data


def pem_text(data: bytes) -> str:
    """Certificates as the ``ssl`` module takes them when it is not to read files itself: without what stands between
    them in other characters, which people put there."""
    return data.decode("ascii", "ignore")
