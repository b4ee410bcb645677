"""[P] Text that somebody else made, for a log that people read in a terminal.

What stands in shared memory, in a refusal or in a header may hold anything: sequences that a terminal obeys, or an end
of line and behind it what looks like a line of ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

MAX_TRACE_CHARACTERS: Final = 4096
_TRACE_LINE: Final = re.compile(r'  File "[^"]*", line (\d+|\?\?\?) in \S+|  <no Python frame>|  \.\.\.')


def legible(text: str) -> str:
    """The text with what a terminal would obey written out, and further lines indented, so that none of them looks as
    if it began a record."""
    if text.isprintable():
        return text
    return "\n    ".join(_printable(line) for line in text.split("\n"))


def not_text(environment: Mapping[str, str], flags: Mapping[str, object]) -> list[str]:
    """Sentences about settings (HOTSPARE_ variables, and ``flags`` by the settings' names) whose bytes are no UTF-8:
    Python hands those on as lone surrogates, which no log line and no JSON can hold. What was given is not repeated."""
    named = {name: value for name, value in environment.items() if name.upper().startswith("HOTSPARE_")}
    named |= {f"--{name.replace('_', '-')}": value for name, value in flags.items() if isinstance(value, str)}
    return [f"{ascii(name)[1:-1]}: its bytes are no UTF-8" for name, value in named.items() if not _is_text(value)]


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def on_terminal(text: str) -> str:
    """Output of others, on its way to a terminal: its lines, and of them what can be read; the rest is written out."""
    if text.isprintable():
        return text
    return "\n".join(_printable(line.expandtabs()) for line in text.split("\n"))


def trace(text: str) -> str:
    """What a dying process left behind: one line, and below it those of a Python trace. Further lines of another kind
    stay on the line before, their ends written out. Of ``MAX_TRACE_CHARACTERS``, before anything is written out."""
    first, *rest = text[:MAX_TRACE_CHARACTERS].rstrip("\n").split("\n")
    told = _printable(first)
    for line in filter(None, rest):
        told += f"\n{_printable(line)}" if _TRACE_LINE.fullmatch(line) else f"\\n{_printable(line)}"
    return told


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
