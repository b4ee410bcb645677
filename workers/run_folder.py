"""The pod's folder as the engine that serves keeps it: what it needs there is made again if somebody removes it.

The engine that serves has its files open, and does not leave for that, since whoever follows would find the same. It
makes key and lock again, the new lock held before the old one goes, and parked engines start again beside the new file.
"""

from __future__ import annotations

import logging

from workers.failover_lock import FailoverLockError, FlockFailoverLock
from workers.pod_key import PodKeyError, restore_pod_key

logger = logging.getLogger(__name__)


class RunFolder:
    """What one engine looks at in the pod's folder, at intervals."""

    def __init__(self, lock: FlockFailoverLock, key: str, *, shared: bool) -> None:
        """``key``: the pod's. ``shared``: other processes hold the lock's open file too (``workers.ranks``); they could
        not have the new one's."""
        self._lock = lock
        self._key = key
        self._shared = shared
        self._told = ""

    def problem_active(self) -> str | None:
        """For the engine that serves: why it must be replaced, a sentence, or None."""
        lock = self._lock
        if self._shared or not lock.missing():
            return lock.problem()
        try:
            restore_pod_key(lock.path.parent, self._key)
            problem = lock.keep()
        except (FailoverLockError, PodKeyError) as error:
            if self._told != str(error):
                self._told = str(error)
                logger.error("%s; this engine serves on, and none can follow it until that is possible", error)
            return None
        self._told = ""
        return problem

    def problem_parked(self) -> str | None:
        """For one that waits: why it must start again. A file that is only missing is the other engine's to make."""
        if not self._shared and self._lock.missing():
            return None
        return self._lock.problem()
