"""Log lines on stderr: readable ones, or one JSON object a line for collectors."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

from gms.legible import legible


class ConsoleFormatter(logging.Formatter):
    """One line for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = legible(record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """The form of all processes: time (UTC, RFC 3339), level, logger, message, pid; then what a line has besides."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(level: str, style: Literal["console", "json"]) -> None:
    """Sets the root logger of this process up; called once, from `__main__`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else ConsoleFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
