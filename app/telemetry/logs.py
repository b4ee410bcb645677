"""Log lines for people (console) or for machines (one JSON object a line), on standard error.

Structured values travel as ``extra=log_fields.fields(route="chat", ...)``. Prompts and answers are never logged.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from app.log_fields import console_word, legible
from app.telemetry.log_sink import LogSink


class ConsoleFormatter(logging.Formatter):
    """``12:00:00.123 info  message  key=value``, and which process said it if there are several."""

    def __init__(self, *, with_pid: bool = False) -> None:
        super().__init__()
        self._with_pid = with_pid

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower():<7} {legible(record.getMessage())}"
        values: dict[str, Any] = getattr(record, "fields", {})
        shown = " ".join(f"{key}={console_word(value)}" for key, value in values.items() if value is not None)
        if self._with_pid:
            shown = f"{shown} pid={record.process}".lstrip()
        if shown:
            line = f"{line}  {shown}"
        if record.exc_info:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, then the line's own values."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, object] = {
            "time": f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        values: dict[str, Any] = getattr(record, "fields", {})
        document.update({key: value for key, value in values.items() if value is not None})
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(document, enc_hook=str).decode()


class Seldom(logging.Filter):
    """Lets one line a minute of some package pass: it repeats itself, and what matters we say in our own words."""

    def __init__(self, package: str, seconds: float = 60.0) -> None:
        super().__init__(package)
        self._seconds = seconds
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not super().filter(record):
            return True
        if record.created < self._next:
            return False
        self._next = record.created + self._seconds
        return True


class SinkHandler(logging.Handler):
    """Hands lines to the sink, which never waits; ``flush`` does, a little, at the end of the process."""

    def __init__(self, sink: LogSink) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._sink.write(f"{self.format(record)}\n".encode("utf-8", "backslashreplace"))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self._sink.close()


def configure_logging(form: Literal["console", "json"], level: str, *, with_pid: bool = False) -> LogSink:
    """Set up the process's logging; called once, by ``__main__``. Returns the way out, for the access log.

    ``with_pid``: lines for people say which process they are of, as those for machines always do."""
    sink = LogSink()
    handler = SinkHandler(sink)
    handler.setFormatter(ConsoleFormatter(with_pid=with_pid) if form == "console" else JsonFormatter())
    handler.addFilter(Seldom("opentelemetry"))  # tells of each attempt to reach a collector
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # The server's own lines say what ours say; its warnings and errors stay.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request that discovery makes
    # Warns of each malformed form; its client is told, and the access line says so.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    return sink
