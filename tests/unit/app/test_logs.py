from __future__ import annotations

import json
import logging
import sys

from app.log_fields import fields
from app.telemetry.logs import ConsoleFormatter, JsonFormatter, Seldom


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


def test_a_package_that_talks_much_is_heard_once_a_minute() -> None:
    seldom = Seldom("talker")

    def heard(name: str, at: float) -> bool:
        line = logging.LogRecord(name, logging.WARNING, "f", 1, "again", (), None)
        line.created = at
        return seldom.filter(line)

    assert [heard("talker.deep", at) for at in (100.0, 101.0, 159.0, 160.0, 161.0)] == [True, False, False, True, False]
    assert [heard(name, 162.0) for name in ("app.x", "app.x", "talkers", "talkers")] == [True] * 4


def test_exceptions_are_shown() -> None:
    failed = record("oh")
    try:
        raise KeyError("k")
    except KeyError:
        failed.exc_info = sys.exc_info()
    assert "KeyError" in ConsoleFormatter().format(failed)
    assert "KeyError" in json.loads(JsonFormatter().format(failed))["exception"]


def test_which_process_of_several() -> None:
    said = record("hello", model="m")
    assert ConsoleFormatter(with_pid=True).format(said).endswith(f"hello  model=m pid={said.process}")
    assert ConsoleFormatter(with_pid=True).format(record("hello")).endswith(f"hello  pid={said.process}")
