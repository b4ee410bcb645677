"""Runs PodSupervisor over the command lines in its first argument (JSON). Settings come from the environment."""

from __future__ import annotations

import asyncio
import json
import sys

from workers.logs import configure_logging
from workers.pod import PodSupervisor
from workers.settings import PodSettings

if __name__ == "__main__":
    settings = PodSettings()
    configure_logging(form=settings.log_format, level=settings.log_level)
    sys.exit(asyncio.run(PodSupervisor(settings, commands=json.loads(sys.argv[1])).run()))
