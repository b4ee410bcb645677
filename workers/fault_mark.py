"""A memory fault is written into the prefix index by the process that dies of it.

After a SIGSEGV or a SIGBUS nothing says what the engine wrote where before. The next engine must know, and it is
promoted the moment that this one is gone: whoever learns of the signal afterwards (the keeper) would come too late. So
the mark is made inside the signal handler, where hardly anything may be called: ``faulthandler`` writes its trace with
``write(2)``, and here into the index. Then it puts back the handler that was there before it (the system's default) and
raises the signal again, so that the process ends at once, and by that signal.
"""

from __future__ import annotations

import faulthandler
import os


class FaultMark:
    """One a process, as the signals' handlers are."""

    def __init__(self) -> None:
        self._fd = -1
        self._before = False

    def arm(self, fd: int, offset: int) -> None:
        """Let a fault write its trace into the file behind ``fd`` (which stays the caller's), from ``offset`` on.

        The file is opened anew: a descriptor that came from another process shares its position with that one.

        Raises:
            OSError: it cannot be.
        """
        self.disarm()
        own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.lseek(own, offset, os.SEEK_SET)
            self._before = faulthandler.is_enabled()
            faulthandler.enable(own, all_threads=False)
        except BaseException:
            os.close(own)
            raise
        self._fd = own

    def disarm(self) -> None:
        """As it was before. Harmless if it is not armed."""
        if self._fd < 0:
            return
        faulthandler.disable()
        if self._before:
            faulthandler.enable()
        fd, self._fd = self._fd, -1
        os.close(fd)
