"""A pod's emptyDirs, as a kubelet makes them: folders, or file systems in memory, of the pod's group and open to it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.pod.manifests import Document, quantity
from tests.pod.podman import STATE

EMPTY_DIRS = STATE / "empty-dirs"


class Volumes:
    """Those of one pod, all in one folder."""

    def __init__(self, folder: Path, *, group: int) -> None:
        self._folder = folder
        self._group = group

    def path(self, name: str) -> Path:
        return self._folder / name

    def make(self, volume: Document) -> None:
        if "emptyDir" not in volume:
            raise ValueError(f"volume {volume['name']}: the tests' kubelet has emptyDirs only")
        path = self.path(volume["name"])
        path.mkdir(parents=True)
        if volume["emptyDir"].get("medium") == "Memory":
            size = quantity(volume["emptyDir"]["sizeLimit"])
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},nosuid,nodev", "tmpfs", str(path)], check=True)
        os.chown(path, 0, self._group)
        path.chmod(0o2777)

    def remove(self) -> None:
        """Those of a run that was killed, too."""
        for path in self._folder.glob("*"):
            if path.is_mount():
                subprocess.run(["umount", str(path)], check=True)
        if self._folder.exists():
            shutil.rmtree(self._folder)
