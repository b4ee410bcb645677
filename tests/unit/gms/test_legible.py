from __future__ import annotations

import logging

import pytest

from app.telemetry.logs import ConsoleFormatter as GatewayFormatter
from gms.legible import MAX_TRACE_CHARACTERS, legible, on_terminal, trace
from gms.logs import ConsoleFormatter as MemoryServiceFormatter
from workers.logs import _ConsoleFormatter as WorkerFormatter

MADE_UP = "no\x1b[2J\x9b2J\n12:00:00.000 ERROR   all is well\r\u2028\u202eend"


@pytest.mark.parametrize("formatter", [GatewayFormatter(), MemoryServiceFormatter(), WorkerFormatter()])
def test_what_others_say_is_no_line_of_ours_and_nothing_that_a_terminal_obeys(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("workers", logging.ERROR, "", 1, "it says: %s", (MADE_UP,), None)
    record.fields = {"reason": MADE_UP}
    first, *rest = formatter.format(record).split("\n")
    assert first.endswith("it says: no\\x1b[2J\\x9b2J")
    assert all(line.startswith("    12:00:00.000 ERROR   all is well\\r\\u2028\\u202eend") for line in rest)
    assert len(rest) == 1
    assert all(line.isprintable() for line in (first, *rest))


def test_a_plain_text_is_what_it_was() -> None:
    assert legible("rank 1: „grün“ — 3 µs") == "rank 1: „grün“ — 3 µs"


def test_of_a_trace_real_lines_stay_and_others_do_not() -> None:
    text = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n"
        '  File "/a/b.py", line 12 in step\n12:00:00.000 INFO    made up\n  <no Python frame>\n\x1b[31m\n'
    )
    assert trace(text).split("\n") == [
        r"Fatal Python error: Segmentation fault\nCurrent thread 0x00007f (most recent call first):",
        r'  File "/a/b.py", line 12 in step\n12:00:00.000 INFO    made up',
        r"  <no Python frame>\n\x1b[31m",
    ]
    assert trace("") == ""
    assert len(trace("x" * 10 * MAX_TRACE_CHARACTERS)) == MAX_TRACE_CHARACTERS


def test_of_what_goes_to_a_terminal_lines_and_columns_stay() -> None:
    text = "warning:\tgrün\n  at\x1b]0;x\x07 \x9b2J\r"
    assert on_terminal(text) == "warning:        grün\n  at\\x1b]0;x\\x07 \\x9b2J\\r"
    assert on_terminal("plain — text") == "plain — text"
