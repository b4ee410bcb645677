from __future__ import annotations

import json
import logging
import sys

from app.logs import ConsoleFormatter, JsonFormatter, fields


def record(message: str, **values: object) -> logging.LogRecord:
    made = logging.LogRecord("app.x", logging.INFO, "f", 1, message, (), None)
    for name, value in fields(**values).items():
        setattr(made, name, value)
    return made


def test_console() -> None:
    line = ConsoleFormatter().format(record("hello", model="m", error=None))
    assert line.endswith(" info    hello  model=m")


def test_json() -> None:
    document = json.loads(JsonFormatter().format(record("hello", model="m", error=None, odd=object)))
    assert document["message"] == "hello"
    assert document["model"] == "m"
    assert "error" not in document
    assert document["time"].endswith("Z")


def test_exceptions_are_shown() -> None:
    failed = record("oh")
    try:
        raise KeyError("k")
    except KeyError:
        failed.exc_info = sys.exc_info()
    assert "KeyError" in ConsoleFormatter().format(failed)
    assert "KeyError" in json.loads(JsonFormatter().format(failed))["exception"]
