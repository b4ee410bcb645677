"""[P] Which lines of a child's log a person should see at once, and which sentence explains why it ended."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable
from enum import IntEnum
from typing import Final

HEAD_CHARS: Final = 120
"""A level stands near the start of a line: "pod-0/engine-a 12:00:00.123 WARNING ..."; later, it is prose."""
KEPT_LINES: Final = 3

_OWN_PACKAGES: Final = frozenset({"", "app", "workers", "gms", "__main__"})
_PACKAGE: Final = re.compile(r"([a-z_][a-z0-9_]*): ")
_CUT_OFF: Final = re.compile(r"drain time is over: ended (\d+) request")
"""The gateway's own words (``app.drain``)."""
_LEVEL: Final = re.compile(
    r"(?:^|[\s(\[])(WARNING|ERROR|CRITICAL)\b:?\s*"
    r"|\d\d:\d\d:\d\d\.\d{3} (warning|error|critical)\s+"  # the gateway writes them small
)


class Level(IntEnum):
    ORDINARY = 0
    WARNING = 1
    ERROR = 2


def level_of(line: str) -> Level:
    """How loud a line is, in any of the forms that our processes and vLLM write."""
    if line.startswith("{"):
        name = str(_fields(line).get("level", "")).upper()
    else:
        found = _LEVEL.search(line[:HEAD_CHARS])
        name = found[found.lastindex or 1].upper() if found else ""
    return {"WARNING": Level.WARNING, "ERROR": Level.ERROR, "CRITICAL": Level.ERROR}.get(name, Level.ORDINARY)


def is_loud(line: str) -> bool:
    """Whether a person should see it at once: every error, and the warnings of our own processes. What a library warns
    of at each start (vLLM: a dozen lines) is for those who read the log."""
    level = level_of(line)
    return level is Level.ERROR or (level is Level.WARNING and _package_of(line) in _OWN_PACKAGES)


def message_of(line: str) -> str:
    """The line without time, level and the like."""
    if line.startswith("{"):
        return str(_fields(line).get("message", line))
    found = _LEVEL.search(line[:HEAD_CHARS])
    return line[found.end() :].strip() if found else line.strip()


def cut_off_in(line: str) -> int:
    """How many requests the gateway says there that it ended because its drain time was over."""
    found = _CUT_OFF.search(line)
    return int(found.group(1)) if found else 0


def _package_of(line: str) -> str:
    """The package that wrote it, as ``workers.logs`` tells it: ``vllm: ...`` or the JSON logger. "" is ours."""
    if line.startswith("{"):
        return str(_fields(line).get("logger", "")).partition(".")[0]
    found = _PACKAGE.match(message_of(line))
    return found.group(1) if found else ""


def _fields(line: str) -> dict[str, object]:
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


class LastWords:
    """Remembers, of all lines of one child, what may explain its end."""

    def __init__(self) -> None:
        self._error = ""
        self._last: deque[str] = deque(maxlen=KEPT_LINES)

    def feed(self, lines: Iterable[str]) -> None:
        for line in lines:
            if level_of(line) is Level.ERROR:
                self._error = message_of(line)
            if line.strip():
                self._last.append(line.strip())

    @property
    def sentence(self) -> str:
        """The last error; without one, the last lines it wrote."""
        return self._error or " / ".join(self._last) or "it wrote nothing to its log"
