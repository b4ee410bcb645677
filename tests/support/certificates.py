"""Certificates for tests, made by the ``openssl`` command."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Pair(NamedTuple):
    certificate: Path
    key: Path

    def replace(self, other: Pair) -> None:
        """As a person does: one file after the other, each in one step."""
        for mine, theirs in zip(self, other, strict=True):
            draft = mine.with_suffix(".new")
            shutil.copyfile(theirs, draft)
            os.replace(draft, mine)


def openssl(*arguments: str) -> str:
    """Runs it; a machine without it skips the test."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command here, which makes the certificates")
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_pair(folder: Path, *, days: int = 7, name: str = "localhost") -> Pair:
    """A self-signed one for ``name`` and 127.0.0.1."""
    folder.mkdir(parents=True, exist_ok=True)
    pair = Pair(folder / "tls.crt", folder / "tls.key")
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", str(days), "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1"),
        *("-keyout", str(pair.key), "-out", str(pair.certificate)),
    )
    return pair
