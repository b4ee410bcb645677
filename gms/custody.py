"""What makes a lease outlive its service: one engine's pages, kept so that they can be handed back.

A killed service takes no page away from an engine that has it mapped. But the pages would be that engine's alone: the
next service knows nothing, and the next engine would load a second copy. So whoever has a lease for long puts it into
custody, with the descriptors of its pages. A thread watches the connection's end, dials until a service answers, hands
the pages back and puts the new lease in the old one's place. The engine's mapping is not touched and it never waits.
The phases are in `gms.custody_phases`.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Final, Self

from gms import custody_phases
from gms.client import Allocation, GmsClient, GmsError, Lease
from gms.custody_phases import CustodyState, Phase
from gms.protocol import ErrorCode

log: Final = logging.getLogger("gms.custody")

FIRST_RETRY_SECONDS: Final = 0.01
LAST_RETRY_SECONDS: Final = 0.1
"""A service that is starting again is met at once: it waits for its pages, and others wait for it."""
LAST_REFUSED_SECONDS: Final = 2.0
"""A service that answers and cannot take them now is asked less and less often: each time it looks at all of them."""
GIVE_UP_SECONDS: Final = 600.0
"""Far beyond any supervisor's backoff: who gives up too early costs the pod a second copy."""


class Custody:
    """Owns a client with one lease, and the allocations of that lease, all of them, once the constructor has returned.

    `dial` makes another connection of the same kind and tries once; it raises GmsError, retryable as long as trying
    again makes sense. Methods may be called from any thread.
    """

    def __init__(
        self,
        client: GmsClient,
        lease: Lease,
        allocations: Sequence[Allocation],
        *,
        dial: Callable[[], GmsClient],
        give_up_seconds: float = GIVE_UP_SECONDS,
    ) -> None:
        self.pool: Final = lease.pool
        self._client = client
        self._lease = lease
        self._allocations = tuple(allocations)
        self._dial = dial
        self._give_up_seconds = give_up_seconds
        self._phase = Phase.HELD
        self._since = time.monotonic()
        self._restored = 0
        self._reason = ""
        self._ending = threading.Event()
        self._attempt: GmsClient | None = None
        self._changed = threading.Condition()
        self._using = threading.Lock()  # held while the lease is given back, so that it is not restored meanwhile
        self._closing = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="gms-custody", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._wake_fd)
            raise

    @property
    def lease(self) -> Lease:
        """The one that stands now, or stood last."""
        return self._lease

    @property
    def lost(self) -> str | None:
        """Why the pages must not be used any more, or None. Cheap enough to be asked before each answer."""
        return self._reason if self._phase is Phase.LOST else None

    @property
    def fault(self) -> str | None:
        """Why these pages are of no use to a spare engine, a sentence, or None. One that is waiting for its service to
        come back has no fault."""
        if self._phase in (Phase.PRIVATE, Phase.LOST):
            return f"{self.pool} is not the memory service's any more: {self._reason}"
        if self._phase is Phase.ENDED or not self._thread.is_alive():
            return f"nobody watches over {self.pool} any more"
        return None

    def state(self) -> CustodyState:
        with self._changed:
            return CustodyState(
                pool=self.pool,
                phase=self._phase,
                seconds=time.monotonic() - self._since,
                restored=self._restored,
                reason=self._reason,
            )

    def release(self, *, quiesced: bool = False, wait_seconds: float = 0.0) -> None:
        """Gives the lease back and ends the custody, in this order; see `Lease.release`. If the service is away, its
        return is waited for up to `wait_seconds`, so that pages are handed on and not lost. A lease that could not be
        given back is logged: then the service learns of its end from the connection's, or has forgotten it."""
        deadline = time.monotonic() + wait_seconds
        problem: GmsError | None = None
        try:
            while self._phase is Phase.HELD or self._await(lambda: self._phase is not Phase.ADRIFT, deadline):
                lease, problem = self._try_release(quiesced)
                if problem is None or problem.code != ErrorCode.SERVICE_GONE:
                    break
                if not self._await(partial(self._moved_on, lease), deadline):
                    break
            if problem is not None or self._phase is Phase.ADRIFT:
                why = problem or "the memory service is away"
                log.warning("%s: the lease could not be released: %s", self.pool, why)
        finally:
            self.close()

    def close(self) -> None:
        """Ends the custody, the connection and so the lease, and closes the descriptors. Mappings stay. Twice is
        fine."""
        with self._closing:
            if self._phase is Phase.ENDED:
                return
            with self._changed:
                self._ending.set()
                attempt = self._attempt
            os.eventfd_write(self._wake_fd, 1)
            if attempt is not None:
                attempt.close()
            self._thread.join()
            self._enter(Phase.ENDED)
            self._client.close()
            for allocation in self._allocations:
                allocation.close()
            os.close(self._wake_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _moved_on(self, lease: Lease) -> bool:
        return self._lease is not lease or self._phase is not Phase.HELD

    def _try_release(self, quiesced: bool) -> tuple[Lease, GmsError | None]:
        """The lease that was to be given back, and what came in between. What is not held needs no giving back."""
        with self._using:
            lease = self._lease
            if self._phase is Phase.HELD:
                try:
                    lease.release(quiesced=quiesced)
                except GmsError as error:
                    return lease, error
                self._ending.set()
            return lease, None

    # --- the thread

    def _run(self) -> None:
        try:
            while self._watch() and self._restore():
                pass
        except Exception as error:
            log.exception("%s: its custody ended on an error that nobody expected", self.pool)
            self._enter(Phase.PRIVATE, f"{type(error).__name__}: {error}")

    def _watch(self) -> bool:
        """Until the connection ends; False if this custody ends first."""
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        poller.register(self._client.fileno(), select.POLLRDHUP)
        poller.poll()
        with self._using:
            if self._ending.is_set():
                return False
            self._enter(Phase.ADRIFT)
        log.warning(
            "%s: the memory service is gone; this engine goes on with the pages it has and hands them back to the next",
            self.pool,
        )
        return True

    def _restore(self) -> bool:
        """Until the pages are a service's again; False if that is not to be."""
        delay = FIRST_RETRY_SECONDS
        told = ""
        deadline = self._since + self._give_up_seconds
        while not self._ending.is_set():
            try:
                self._hand_back()
                return True
            except (GmsError, OSError) as error:
                if self._ending.is_set():
                    break
                phase = custody_phases.after_failure(error, overdue=time.monotonic() >= deadline)
                if phase is not Phase.ADRIFT:
                    self._lease.close_lock()  # the service need not wait for pages that will not come
                    self._enter(phase, str(error))
                    self._tell(phase, error)
                    return False
                away = isinstance(error, GmsError) and error.code == ErrorCode.SERVICE_GONE
                if not away and str(error) != told:
                    told = str(error)
                    log.warning("%s: the pages could not be handed back yet, and will be: %s", self.pool, error)
            self._pause(delay)
            delay = min(2 * delay, LAST_RETRY_SECONDS if away else LAST_REFUSED_SECONDS)
        return False

    def _hand_back(self) -> None:
        """One try. Raises GmsError or OSError, and leaves everything as it was."""
        client = self._dial()
        try:
            with self._changed:
                self._attempt = client
                ending = self._ending.is_set()
            if ending:
                raise GmsError(ErrorCode.CLOSED, "This custody was ended by its owner.")
            old = self._lease
            lease = client.adopt(
                self.pool,
                generation=old.generation,
                mode=old.mode,
                epoch=old.epoch,
                allocations=self._allocations,
            )
        except BaseException:
            client.close()
            raise
        finally:
            with self._changed:
                self._attempt = None
        away = time.monotonic() - self._since
        with self._changed:
            gone, self._client, self._lease = self._client, client, lease
            self._restored += 1
            self._enter(Phase.HELD)
        gone.close()  # last, since its descriptor says that pages may still come
        log.info("%s: handed back to the memory service after %.2f s, generation %d", self.pool, away, lease.generation)

    def _tell(self, phase: Phase, error: Exception) -> None:
        if phase is Phase.LOST:
            log.error("%s: these pages must not be used any more, and this engine must stop: %s", self.pool, error)
            return
        log.error(
            "%s: no memory service took the pages back (%s); this engine keeps them as a private copy, which no other "
            "one can use: restart it when another one serves",
            self.pool,
            error,
        )

    def _pause(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        poller.poll(seconds * 1000)

    def _enter(self, phase: Phase, reason: str = "") -> None:
        with self._changed:
            self._phase = custody_phases.step(self._phase, phase)
            self._since, self._reason = time.monotonic(), reason
            self._changed.notify_all()

    def _await(self, fits: Callable[[], bool], deadline: float) -> bool:
        with self._changed:
            return self._changed.wait_for(fits, max(deadline - time.monotonic(), 0.0))
