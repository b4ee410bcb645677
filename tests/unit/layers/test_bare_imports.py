"""The memory service's core runs where little is installed: settings, metrics, the hash and torch are handed in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SERVICE = ("gms.service", "gms.server", "gms.socket_path", "gms.journal", "gms.backends.cuda", "gms.backends.beside")
CLIENT = ("gms.client", "gms.custody", "gms.mapping", "gms.cuda_mapping", "gms.manifest", "gms.integrity")
PROGRAM = """
import sys
ALLOWED = sys.stdlib_module_names | {"gms", "msgspec"}
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"{name} is not installed on a bare machine", name=name)
sys.meta_path.insert(0, Bare())
for name in sys.argv[1:]:
    __import__(name)
"""


@pytest.mark.parametrize("modules", [SERVICE, CLIENT], ids=["service", "client"])
def test_the_core_needs_the_standard_library_and_msgspec(modules: tuple[str, ...]) -> None:
    """The CUDA bindings are imported once a GPU is asked for."""
    assert (done := run(*modules)).returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["gms.factory", "gms.settings", "gms.metrics", "gms.dlpack"])
def test_what_needs_more_would_be_noticed(module: str) -> None:
    assert "is not installed on a bare machine" in run(module).stderr


def run(*modules: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *modules]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
