"""Runs PodSupervisor over the command lines in its first argument (JSON). Settings come from the environment.

``FAILING_LOOKS``: so many of its looks at an engine, and the first one at its folder, end on an error of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from workers.logs import configure_logging
from workers.pod import PodSupervisor
from workers.probes import Sighting
from workers.settings import PodSettings


class Failing(PodSupervisor):
    looks = folders = 0

    async def _ask_if_alive(self, host: str, port: int) -> tuple[str, Sighting]:
        self.looks += 1
        if self.looks <= int(os.environ.get("FAILING_LOOKS", "0")):
            raise KeyError("a mistake of the supervisor's")
        return await super()._ask_if_alive(host, port)

    async def _look_after_folder(self) -> None:
        self.folders += 1
        if self.folders == 1 and "FAILING_LOOKS" in os.environ:
            raise KeyError("another one")
        await super()._look_after_folder()


if __name__ == "__main__":
    settings = PodSettings()
    configure_logging(form=settings.log_format, level=settings.log_level)
    sys.exit(asyncio.run(Failing(settings, commands=json.loads(sys.argv[1])).run()))
