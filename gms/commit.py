"""A commit that outlives the service: if it dies meanwhile, the next one is asked what has become of the pages.

A service notes what is about to be committed before it freezes the pages. So the next one has one of three answers: the
commit was done and only its reply is lost, then the pages go back as a reader's; it was begun, then they go back as the
writer's, who commits again; it never began, then nobody knows these pages, and their writer must begin anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from gms import custody_phases
from gms.client import Allocation, GmsClient, GmsError, Lease, LeaseMode
from gms.custody import FIRST_RETRY_SECONDS, GIVE_UP_SECONDS, LAST_RETRY_SECONDS
from gms.custody_phases import Phase
from gms.protocol import Digests, ErrorCode

log: Final = logging.getLogger("gms.commit")


def commit_surely(
    client: GmsClient,
    lease: Lease,
    allocations: Sequence[Allocation],
    manifest: bytes,
    *,
    digests: Digests | None = None,
    dial: Callable[[], GmsClient],
    give_up_seconds: float = GIVE_UP_SECONDS,
) -> tuple[GmsClient, Lease]:
    """`Lease.commit`, over as many services as it takes; returns the connection and the read lease that stand then.

    `allocations` are all that the lease has, and stay the caller's. `dial` makes another connection and tries once, as
    in `Custody`; each time that a service is gone, the next is waited for up to `give_up_seconds`. If the connection
    returned is another, `client` is closed; on an error it is the caller's still, and the only one.

    Raises GmsError: what `Lease.commit` refuses; service_gone if nobody came, mismatch if nobody knows these pages.
    """
    holder = client
    try:
        while True:
            try:
                lease.commit(manifest, digests=digests)
                break
            except GmsError as error:
                if error.code != ErrorCode.SERVICE_GONE:
                    raise
                log.warning("%s: the memory service is gone in the middle of a commit; asking the next", lease.pool)
            found, lease = _hand_back(lease, allocations, dial=dial, give_up_seconds=give_up_seconds)
            if holder is not client:
                holder.close()
            holder = found
            log.info("%s: generation %d is handed back, %s", lease.pool, lease.generation, lease.mode)
            if lease.mode is LeaseMode.RO:
                lease.manifest = manifest
                break
    except BaseException:
        if holder is not client:
            holder.close()
        raise
    if holder is not client:
        client.close()  # last, since its descriptor says that pages may still come
    return holder, lease


def _hand_back(
    lease: Lease, allocations: Sequence[Allocation], *, dial: Callable[[], GmsClient], give_up_seconds: float
) -> tuple[GmsClient, Lease]:
    """Until a service has taken the pages, as committed or as written. Raises GmsError if it is not to be."""
    deadline = time.monotonic() + give_up_seconds
    delay = FIRST_RETRY_SECONDS
    while True:
        try:
            client = dial()
            try:
                return client, _as_it_stands(client, lease, allocations)
            except BaseException:
                client.close()
                raise
        except (GmsError, OSError) as error:
            overdue = time.monotonic() >= deadline
            if custody_phases.after_failure(error, overdue=overdue) is not Phase.ADRIFT:
                raise
        time.sleep(delay)
        delay = min(2 * delay, LAST_RETRY_SECONDS)


def _as_it_stands(client: GmsClient, lease: Lease, allocations: Sequence[Allocation]) -> Lease:
    """The lease that a service has for these pages: a reader's first, since a commit that was done is not repeated."""

    def adopt(mode: LeaseMode) -> Lease:
        return client.adopt(
            lease.pool, generation=lease.generation, mode=mode, epoch=lease.epoch, allocations=allocations
        )

    try:
        return adopt(LeaseMode.RO)
    except GmsError as error:
        if custody_phases.after_failure(error, overdue=False) is not Phase.PRIVATE:
            raise
        as_reader = error
    try:
        return adopt(LeaseMode.RW)
    except GmsError as as_writer:
        if custody_phases.after_failure(as_writer, overdue=False) is not Phase.PRIVATE:
            raise
        raise GmsError(
            ErrorCode.MISMATCH,
            f"The memory service died before it had begun to commit {lease.pool}, and the next one takes these pages "
            f"neither as committed ({as_reader}) nor as written ({as_writer}); write them anew.",
        ) from as_writer
