"""The access log: one line for each relayed request, formatted by hand, since it is paid for by every request.

Fields, in this order: ``model`` (if a worker serves it), ``ms`` until the last byte, ``first_ms`` until the first one,
``worker`` and its ``epoch``, ``events`` of a stream, ``bytes`` of the body; if workers broke, ``retries``, ``resumes``,
``attempts``, the worker and epoch of each, and ``lost``, why that was its end; ``repeated`` (the same request has
killed workers); ``error`` with ``fault`` and ``retryable``, ``disconnected``, ``client`` (the address, where the
request was refused for its key), ``request_id``.
What does not apply is left out. Nothing of a prompt or an answer is in it, nor anything else that a client wrote but
the request id, whose characters are harmless (``headers``).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from app.log_fields import console_word
from app.openai.surface import RelayRoute
from app.relay.relayed import Report

LOGGER: Final = "app.access_log"
"""Of these lines and no others."""
_REMEMBERED_NAMES: Final = 1024


class AccessLog:
    """Writes lines to ``write``; ``clock`` gives Unix seconds."""

    def __init__(
        self,
        write: Callable[[bytes], None],
        form: Literal["console", "json"],
        clock: Callable[[], float] = time.time,
        *,
        with_pid: bool = False,
    ) -> None:
        """``with_pid``: lines for people have it, too."""
        self._write = write
        self._clock = clock
        self._json = form == "json"
        self._names: dict[str, str] = {}
        self._second = 0
        self._time = ""
        self._end = f" pid={os.getpid()}\n" if with_pid else "\n"
        self._after_time = f'Z","level":"info","logger":"{LOGGER}","pid":{os.getpid()},"message":"'

    def log(
        self,
        route: RelayRoute,
        *,
        model: str,
        status: int,
        seconds: float,
        first_seconds: float | None,
        request_id: bytes,
        report: Report,
    ) -> None:
        """``model`` is empty where no worker serves what the client named."""
        now = self._clock()
        second = int(now)
        if second != self._second:
            self._second, self._time = second, self._format_second(second)
        milliseconds = int((now - second) * 1000)
        values = self._json_line if self._json else self._console_line
        line = values(route, model, status, seconds, first_seconds, report)
        if report.error is not None or report.retries or report.tries or report.disconnected:
            line += self._trouble(report)
        if self._json:
            line = (
                f'{{"time":"{self._time}.{milliseconds:03d}{self._after_time}{route.path} {status}"{line}'
                f',"request_id":"{request_id.decode()}"}}\n'
            )
        else:
            clock = f"{self._time}.{milliseconds:03d}"
            line = f"{clock} info    {route.path} {status} {line} request_id={request_id.decode()}{self._end}"
        self._write(line.encode())

    def _format_second(self, second: int) -> str:
        if self._json:
            return f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}"
        return f"{datetime.fromtimestamp(second):%H:%M:%S}"

    def _json_line(
        self, route: RelayRoute, model: str, status: int, seconds: float, first: float | None, report: Report
    ) -> str:
        named = f',"model":{self._name(model)}' if model else ""
        worker = f',"worker":{self._name(report.worker)},"epoch":{report.epoch}' if report.worker else ""
        begun = f',"first_ms":{first * 1000:.1f}' if first is not None else ""
        events = f',"events":{report.events}' if report.streamed else ""
        return (
            f',"route":"{route.name}","status":{status}{named},"ms":{seconds * 1000:.1f}{begun}{worker}{events}'
            f',"bytes":{report.bytes}'
        )

    def _console_line(
        self, route: RelayRoute, model: str, status: int, seconds: float, first: float | None, report: Report
    ) -> str:
        named = f" model={self._name(model)}" if model else ""
        worker = f" worker={self._name(report.worker)} epoch={report.epoch}" if report.worker else ""
        begun = f" first_ms={first * 1000:.1f}" if first is not None else ""
        events = f" events={report.events}" if report.streamed else ""
        return f"{named} ms={seconds * 1000:.1f}{begun}{worker}{events} bytes={report.bytes}"

    def _trouble(self, report: Report) -> str:
        values: dict[str, Any] = {}
        if report.retries:
            values["retries"] = report.retries
        if report.resumes:
            values["resumes"] = report.resumes
        if report.tries and report.attempts > 1:
            names = [f"{it.worker}#{it.epoch}" for it in report.tries]
            if report.attempts > len(names):
                names.append(f"{report.worker}#{report.epoch}")
            values["attempts"] = ",".join(names)
        if report.lost:
            values["lost"] = report.lost
        if report.repeated:
            values["repeated"] = True
        if report.error is not None:
            values |= {
                "error": report.error.code,
                "fault": report.error.fault,
                "retryable": report.error.retryable,
            }
        if report.disconnected:
            values["disconnected"] = True
        if report.client:
            values["client"] = report.client
        if self._json:
            return "".join(f',"{name}":{msgspec.json.encode(value).decode()}' for name, value in values.items())
        return "".join(
            f" {name}={self._name(value) if name == 'attempts' else console_word(value)}"
            for name, value in values.items()
        )

    def _name(self, name: str) -> str:
        """A name that a worker gave, in a form that cannot end the line or a field."""
        found = self._names.get(name)
        if found is None:
            quoted = json.dumps(name)  # which leaves nothing but printable ASCII
            found = name if not self._json and name.isprintable() and " " not in name else quoted
            if len(self._names) >= _REMEMBERED_NAMES:
                self._names.clear()
            self._names[name] = found
        return found
