"""Logging of the worker's processes: one line a record, for people or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

from gms.legible import legible

_OWN_PACKAGES = frozenset({"app", "workers", "gms", "__main__"})


def utc(seconds: float) -> str:
    """A time of the wall clock in RFC 3339, in UTC, to the millisecond."""
    whole = int(seconds)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{int((seconds - whole) * 1000):03d}Z"


class _JsonFormatter(logging.Formatter):
    """The form of all processes: time (UTC, RFC 3339), level, logger, message, pid; then what a line has besides."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class _ConsoleFormatter(logging.Formatter):
    """One line for people; what another library says carries its name: ``vllm: …``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s %(source)s%(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        package = record.name.partition(".")[0]
        record.source = "" if package in _OWN_PACKAGES else f"{package}: "
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = legible(record.message)
        return super().formatMessage(record)


def configure_logging(*, form: Literal["console", "json"], level: str) -> None:
    """Send every record of this process to stdout. Called once, in the process's composition root."""
    handler = logging.StreamHandler(sys.stdout)
    if form == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(_ConsoleFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for package in _OWN_PACKAGES:  # by their own, since libraries have been seen to raise the root's
        logging.getLogger(package).setLevel(level.upper())
