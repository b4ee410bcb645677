"""Log lines on stderr: readable ones, or one JSON object a line for collectors."""

from __future__ import annotations

import json
import logging
import sys
from typing import Literal


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(level: str, style: Literal["console", "json"]) -> None:
    """Sets the root logger of this process up; called once, from `__main__`."""
    handler = logging.StreamHandler(sys.stderr)
    console = logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if style == "json" else console)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
