"""``gateway.json`` in the run folder: by this file commands find a gateway that runs on the same machine."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from app.plain_file import read_regular
from app.start_error import StartError


@contextlib.contextmanager
def announced(run_dir: Path | None, host: str, port: int, *, certificate: Path | None = None) -> Iterator[Path | None]:
    """Have ``gateway.json`` in the run folder while the gateway runs; it appears whole or not at all.

    Raises:
        StartError: the folder cannot be written.
    """
    if run_dir is None:
        yield None
        return
    path = run_dir / "gateway.json"
    partial = run_dir / f".gateway.json.{os.getpid()}"
    document: dict[str, object] = {"pid": os.getpid(), "host": host, "port": port}
    if certificate is not None:  # by which commands know us
        document["tls_certificate"] = os.path.abspath(certificate)
    try:
        try:
            run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(partial, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(json.dumps(document))
            partial.replace(path)
        except OSError as error:
            raise StartError(f"cannot write {path}: {error.strerror}; check --run-dir") from None
        yield path
    finally:  # a signal may end this between any two of the steps above
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        withdraw(path)


def withdraw(path: Path | None) -> None:
    """Remove ``gateway.json`` if it is still ours."""
    with contextlib.suppress(OSError, ValueError):
        if path is not None and json.loads(read_regular(path, 4096)).get("pid") == os.getpid():
            path.unlink()
