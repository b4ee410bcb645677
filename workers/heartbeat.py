"""[P] What an engine tells its keeper over a pipe, and when silence means that it is stuck.

One beat is a fixed-size record, so that a pipe write is atomic (pipe(7): up to PIPE_BUF) and a reader can take the
last of many. A beat proves that the engine's event loop runs; the step counter in it proves that its work goes on.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import Final

import msgspec

from workers.contract import Role

_FORM: Final = struct.Struct("<QBB")
_ROLES: Final = tuple(Role)

BEAT_BYTES: Final = _FORM.size
BEAT_PERIOD_SECONDS: Final = 0.25


class Beat(msgspec.Struct, frozen=True):
    """Engine steps so far, whether a step is due (requests run or wait), and the engine's role."""

    steps: int
    busy: bool
    role: Role


def encode_beat(beat: Beat) -> bytes:
    return _FORM.pack(beat.steps, beat.busy, _ROLES.index(beat.role))


class BeatDecoder:
    """Bytes of the pipe in, the last whole beat out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Beat | None:
        """The newest beat in ``data``, or ``None`` if it completes none.

        Raises:
            ValueError: not a beat: somebody else writes to the pipe.
        """
        data = self._rest + data
        whole = len(data) // BEAT_BYTES * BEAT_BYTES
        self._rest = data[whole:]
        if not whole:
            return None
        steps, busy, role = _FORM.unpack_from(data, whole - BEAT_BYTES)
        if busy > 1 or role >= len(_ROLES):
            raise ValueError(f"not a heartbeat: {data[whole - BEAT_BYTES : whole].hex()}")
        return Beat(steps, bool(busy), _ROLES[role])


class Stuck(Enum):
    """Why an engine is taken for stuck."""

    NO_BEAT = "its event loop gave no sign of life"
    NO_STEP = "it has requests and made no step"
    NO_END = "it was told to stop, fell silent, and did not end in its time"


class Watchdog:
    """Decides from beats and time whether the engine is stuck. Times are seconds of one monotonic clock.

    A keeper that was not run itself (a suspended machine, a stopped container) must not take that for the engine's
    silence: a gap between two of its own looks moves every deadline on by as much.
    """

    LONGEST_LOOK_SECONDS: Final = 1.0

    def __init__(self, *, now: float, beat_timeout: float, init_beat_timeout: float, step_timeout: float) -> None:
        self._beat_timeout = beat_timeout
        self._init_beat_timeout = init_beat_timeout
        self._step_timeout = step_timeout
        self._looked_at = self._beat_at = self._step_at = now
        self._last = Beat(0, False, Role.INIT)
        self._end_timeout: float | None = None

    @property
    def last(self) -> Beat:
        return self._last

    def beat(self, beat: Beat, *, now: float) -> None:
        """A beat came."""
        self._beat_at = now
        if beat.steps != self._last.steps or not (beat.busy and self._last.busy):
            self._step_at = now
        self._last = beat

    def told_to_stop(self, *, now: float, end_timeout: float) -> None:
        """From here on silence is no sign of a hang: an engine whose loop is over says nothing more, and what it still
        has to give back takes its time. It has ``end_timeout`` for that from its last beat, or from now."""
        self._beat_at = max(self._beat_at, now)
        self._end_timeout = end_timeout

    def look(self, *, now: float, stopped: bool = False) -> Stuck | None:
        """Is it stuck? To be called at least every ``LONGEST_LOOK_SECONDS``. ``stopped``: its process does not run at
        all (SIGSTOP), so that waiting for it gives it no time: one that was told to stop is cleaning nothing up."""
        unseen = now - self._looked_at - self.LONGEST_LOOK_SECONDS
        self._looked_at = now
        if unseen > 0:
            self._beat_at += unseen
            self._step_at += unseen
        initialising = self._last.role is Role.INIT
        beat_timeout = self._init_beat_timeout if initialising else self._beat_timeout
        end_timeout = self._end_timeout
        if end_timeout is not None:
            beat_timeout = self._beat_timeout if stopped else max(beat_timeout, end_timeout)
        if now - self._beat_at > beat_timeout:
            return Stuck.NO_BEAT if stopped or end_timeout is None else Stuck.NO_END
        if self._last.busy and now - self._step_at > self._step_timeout:
            return Stuck.NO_STEP
        return None
