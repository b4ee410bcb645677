"""Packed matrices over shared pages: the cases, in a process of their own, as vLLM changes the one that imports it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("packed_cases.py")
pytestmark = pytest.mark.engine


def test_packed_matrices() -> None:
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "-W", "ignore", str(CASES)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "7 passed" in ran.stdout
