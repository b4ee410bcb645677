"""Structured values of log lines: ``logger.info("…", extra=fields(route="chat"))``. ``telemetry.logs`` shows them."""

from __future__ import annotations


def fields(**values: object) -> dict[str, dict[str, object]]:
    """Values of a log line, for ``extra=``."""
    return {"fields": values}


def console_word(value: object) -> str:
    """A value as the console shows it: switches as JSON has them, and nothing that a terminal would obey."""
    return str(value).lower() if isinstance(value, bool) else _printable(str(value))


def legible(message: str) -> str:
    """A message, parts of which a client or a worker may have made: what a terminal would obey is written out, and
    further lines are indented, so that none of them looks as if it began a record."""
    if message.isprintable():
        return message
    return "\n    ".join(_printable(line) for line in message.split("\n"))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
