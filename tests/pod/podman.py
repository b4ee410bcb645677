"""The podman that scripts/podman.sh has set up, as a few calls."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.processes import MS

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".tools" / "podman"
PROGRAM = STATE / "bin" / "podman"
DEADLINE_SECONDS = 60_000 * MS


class PodmanError(Exception):
    """What it said."""


class Podman:
    """Each call is one command; its output, without the last line feed, is what it returns."""

    def __call__(self, *words: str, seconds: float = DEADLINE_SECONDS) -> str:
        done = subprocess.run([str(PROGRAM), *words], capture_output=True, text=True, timeout=seconds, check=False)
        if done.returncode:
            raise PodmanError(f"podman {' '.join(words)}: exit {done.returncode}\n{done.stderr}{done.stdout}")
        return done.stdout.rstrip("\n")

    def inspect(self, container: str) -> dict[str, Any]:
        (found,) = json.loads(self("container", "inspect", container))
        return dict(found)

    def state(self, container: str) -> dict[str, Any]:
        return dict(self.inspect(container)["State"])

    def logs(self, container: str) -> list[str]:
        """Whole lines of both streams, of all lives."""
        done = subprocess.run([str(PROGRAM), "logs", container], capture_output=True, text=True, timeout=60, check=True)
        return [*done.stdout.splitlines(), *done.stderr.splitlines()]

    def exec(self, container: str, *words: str, seconds: float = DEADLINE_SECONDS) -> subprocess.CompletedProcess[str]:
        """What ``kubectl exec`` does; the command may fail."""
        return subprocess.run(
            [str(PROGRAM), "exec", container, *words], capture_output=True, text=True, timeout=seconds, check=False
        )

    def names(self, kind: Sequence[str], **filters: str) -> list[str]:
        """Of what there is: ``names(["ps", "--all"])``."""
        words = [word for name, value in filters.items() for word in ("--filter", f"{name}={value}")]
        column = "{{.Names}}" if kind[0] == "ps" else "{{.Name}}"
        return self(*kind, *words, "--format", column).split()
