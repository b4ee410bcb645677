"""Every state x every event of both kinds of pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gms.arbiter import Arbiter
from gms.leases import Action
from tests.unit.gms.pool_states import (
    ANY,
    KV,
    RO,
    RW,
    WEIGHTS,
    N,
    W,
    aborted,
    adopting,
    adopting_awaited,
    ask,
    committed,
    condemned,
    condemned_read,
    condemned_restored,
    empty,
    kv_adopting,
    kv_adopting_awaited,
    kv_awaited,
    kv_fenced,
    kv_held,
    kv_kept,
    kv_orphaned,
    kv_unproved,
    kv_unproved_awaited,
    leave,
    read,
    returning,
    returning_read,
    rewriting,
    short,
    state,
    writing,
)

Event = Callable[[Arbiter], list[Action] | bool | None]


def events_of_both(pool: str) -> dict[str, Event]:
    return {
        "commit": lambda a: a.commit(W, pool),
        "killed": lambda a: leave(a, W, proof=True),
        "hung up": lambda a: leave(a, W, proof=False),
        "released": lambda a: a.release(W, pool, proof=True),
        "late": lambda a: a.expire(10.0),
        "inherited": lambda a: a.inherit(pool, frozenset({W}), N),
        "may W return": lambda a: a.pools[pool].may_return(W),
        "may N return": lambda a: a.pools[pool].may_return(N),
        "adopted": lambda a: a.adopted(pool, N),
        "rejoined": lambda a: a.rejoin(N, pool),
        "written on": lambda a: a.write_on(N, pool),
        "settled": lambda a: [x for p, g in a.awaited() if p == pool for x in a.settle(p, g)],
        "condemned": lambda a: a.condemn(pool, "changed"),
        "evicted": lambda a: a.evict(),
    }


WEIGHT_EVENTS: dict[str, Event] = {
    "rw": lambda a: a.attach(ask(N, WEIGHTS, RW)),
    "ro": lambda a: a.attach(ask(N, WEIGHTS, RO)),
    "any": lambda a: a.attach(ask(N, WEIGHTS, ANY)),
    "again": lambda a: a.attach(ask(W, WEIGHTS, RW)),
    **events_of_both(WEIGHTS),
}
KV_EVENTS: dict[str, Event] = {
    "older": lambda a: a.attach(ask(N, KV, epoch=4)),
    "same": lambda a: a.attach(ask(N, KV, epoch=5)),
    "newer": lambda a: a.attach(ask(N, KV, epoch=7)),
    "reader": lambda a: a.attach(ask(N, KV, RO, epoch=7)),
    "either": lambda a: a.attach(ask(N, KV, ANY, epoch=7)),
    "again": lambda a: a.attach(ask(W, KV, epoch=8)),
    **events_of_both(KV),
}


def outcome(arbiter: Arbiter, event: Event, pool: str) -> str:
    """What an event leads to, and the state after it."""
    try:
        result = event(arbiter)
    except (ValueError, KeyError):
        words = "raises"
    else:
        match result:
            case bool():
                words = "yes" if result else "no"
            case None:
                words = ""
            case _:
                words = ", ".join(short(result))
    return f"{words} -> {state(arbiter, pool)}" if words else f"-> {state(arbiter, pool)}"


Table = dict[str, tuple[Callable[[], Arbiter], dict[str, str]]]
"""State -> how to get there, and for each outcome the events that lead to it."""
WEIGHT_TABLE: Table = {
    "EMPTY": (
        empty,
        {
            "3 gets rw 1 -> WRITING": "rw, any",
            "-> EMPTY": "ro, killed, hung up, released, late, inherited, settled, condemned, evicted",
            "1 gets rw 1 -> WRITING": "again",
            "raises -> EMPTY": "written on, commit, may W return, may N return, adopted, rejoined",
        },
    ),
    "WRITING": (
        writing,
        {
            "-> WRITING": "rw, ro, any, late, inherited, settled, condemned, evicted",
            "1 refused already_attached -> WRITING": "again",
            "-> READ": "commit",
            "drop 1 -> EMPTY": "killed, released",
            "-> EMPTY": "hung up",
            "no -> WRITING": "may W return, may N return",
            "raises -> WRITING": "written on, adopted, rejoined",
        },
    ),
    "aborted": (
        aborted,
        {
            "3 gets rw 2 -> WRITING": "rw, any",
            "-> EMPTY": "ro, hung up, late, inherited, settled, condemned, evicted",
            "1 gets rw 2 -> WRITING": "again",
            "raises -> EMPTY": "written on, commit, adopted, rejoined",
            "drop 1 -> EMPTY": "killed, released",
            "no -> EMPTY": "may W return, may N return",
        },
    ),
    "READ": (
        read,
        {
            "3 gets rw 2 -> WRITING": "rw",
            "3 gets ro 1 -> READ": "ro, any",
            "1 refused already_attached -> READ": "again",
            "raises -> READ": "written on, commit, adopted",
            "-> COMMITTED": "killed, hung up, released",
            "-> READ": "late, inherited, rejoined, settled, evicted",
            "yes -> READ": "may W return, may N return",
            "-> EMPTY": "condemned",
        },
    ),
    "COMMITTED": (
        committed,
        {
            "3 gets rw 2 -> WRITING": "rw",
            "3 gets ro 1 -> READ": "ro, any",
            "1 gets rw 2 -> WRITING": "again",
            "raises -> COMMITTED": "written on, commit, adopted",
            "-> COMMITTED": "killed, hung up, released, late, inherited, settled",
            "yes -> COMMITTED": "may W return, may N return",
            "-> READ": "rejoined",
            "drop 1 -> EMPTY": "condemned, evicted",
        },
    ),
    "WRITING over READ": (
        rewriting,
        {
            "-> WRITING": "rw, late, inherited, rejoined, settled, condemned, evicted",
            "3 gets ro 1 -> WRITING": "ro, any",
            "1 refused already_attached -> WRITING": "again",
            "-> READ": "commit, hung up",
            "drop 2 -> READ": "killed, released",
            "yes -> WRITING": "may W return, may N return",
            "raises -> WRITING": "written on, adopted",
        },
    ),
    "ADOPTING": (
        adopting,
        {
            "-> ADOPTING": "rw, ro, any, again, killed, hung up, released, late, inherited, evicted",
            "raises -> ADOPTING": "written on, commit, rejoined",
            "yes -> ADOPTING": "may W return, may N return",
            "-> COMMITTED": "adopted",
            "drop 7 -> EMPTY": "settled, condemned",
        },
    ),
    "ADOPTING, awaited": (
        adopting_awaited,
        {
            "-> ADOPTING": "rw, ro, any, again, killed, hung up, released, inherited, evicted",
            "raises -> ADOPTING": "written on, commit, rejoined",
            "2 refused timeout -> ADOPTING": "late",
            "yes -> ADOPTING": "may W return, may N return",
            "2 gets ro 7 -> READ": "adopted",
            "drop 7, 2 gets rw 10 -> WRITING": "settled, condemned",
        },
    ),
    "RETURNING": (
        returning,
        {
            "-> ADOPTING": "rw, ro, any, again, killed, hung up, released, late, inherited, condemned, evicted",
            "raises -> ADOPTING": "commit, adopted, rejoined",
            "no -> ADOPTING": "may W return, may N return",
            "-> WRITING": "written on",
            "drop 7 -> EMPTY": "settled",
        },
    ),
    "RETURNING over READ": (
        returning_read,
        {
            "-> READ": "rw, again, killed, hung up, released, late, inherited, rejoined, evicted",
            "3 gets ro 5 -> READ": "ro, any",
            "raises -> READ": "commit, adopted",
            "yes -> READ": "may W return, may N return",
            "-> WRITING": "written on",
            "drop 7 -> READ": "settled",
            "-> ADOPTING": "condemned",
        },
    ),
    "condemned, restored": (
        condemned_restored,
        {
            "3 gets rw 10 -> WRITING": "rw, any",
            "3 refused corrupt -> EMPTY": "ro",
            "1 gets rw 10 -> WRITING": "again",
            "raises -> EMPTY": "written on, commit, adopted, rejoined",
            "-> EMPTY": "killed, hung up, released, late, inherited, settled, condemned, evicted",
            "no -> EMPTY": "may W return, may N return",
        },
    ),
    "condemned": (
        condemned,
        {
            "3 gets rw 2 -> WRITING": "rw, any",
            "3 refused corrupt -> EMPTY": "ro",
            "1 gets rw 2 -> WRITING": "again",
            "raises -> EMPTY": "written on, commit, adopted, rejoined",
            "-> EMPTY": "killed, hung up, released, late, inherited, settled, condemned, evicted",
            "no -> EMPTY": "may W return, may N return",
        },
    ),
    "condemned, read": (
        condemned_read,
        {
            "3 gets rw 2 -> WRITING": "rw, any",
            "3 refused corrupt -> EMPTY": "ro",
            "1 refused already_attached -> EMPTY": "again",
            "raises -> EMPTY": "written on, commit, adopted, rejoined",
            "drop 1 -> EMPTY": "killed, hung up, released",
            "-> EMPTY": "late, inherited, settled, condemned, evicted",
            "no -> EMPTY": "may W return, may N return",
        },
    ),
}
KV_TABLE: Table = {
    "EMPTY": (
        empty,
        {
            "3 gets rw 1 -> WRITING": "older, same, newer",
            "3 refused not_permitted -> EMPTY": "reader, either",
            "1 gets rw 1 -> WRITING": "again",
            "raises -> EMPTY": "written on, commit, may W return, may N return, adopted, rejoined",
            "-> EMPTY": "killed, hung up, released, late, inherited, settled, condemned, evicted",
        },
    ),
    "held": (
        kv_held,
        {
            "3 refused stale_epoch -> WRITING": "older, same",
            "-> WRITING": "newer, hung up, late, inherited, settled, condemned, evicted",
            "3 refused not_permitted -> WRITING": "reader, either",
            "1 refused already_attached -> WRITING": "again",
            "raises -> WRITING": "written on, commit, adopted, rejoined",
            "-> COMMITTED": "killed, released",
            "no -> WRITING": "may W return, may N return",
        },
    ),
    "kept": (
        kv_kept,
        {
            "3 refused stale_epoch -> COMMITTED": "older",
            "3 gets rw 1 -> WRITING": "same, newer",
            "3 refused not_permitted -> COMMITTED": "reader, either",
            "1 gets rw 1 -> WRITING": "again",
            "raises -> COMMITTED": "written on, commit, adopted, rejoined",
            "-> COMMITTED": "killed, hung up, released, late, inherited, settled, condemned, evicted",
            "no -> COMMITTED": "may W return, may N return",
        },
    ),
    "unproved": (
        kv_unproved,
        {
            "3 refused stale_epoch -> WRITING": "older, same",
            "-> WRITING": "newer, hung up, late, inherited, settled, condemned, evicted",
            "3 refused not_permitted -> WRITING": "reader, either",
            "1 gets rw 1 -> WRITING": "again",
            "raises -> WRITING": "written on, commit, adopted, rejoined",
            "-> COMMITTED": "killed, released",
            "yes -> WRITING": "may W return",
            "no -> WRITING": "may N return",
        },
    ),
    "awaited": (
        kv_awaited,
        {
            "3 refused stale_epoch -> WRITING": "older, same",
            "2 refused stale_epoch -> WRITING": "newer",
            "3 refused not_permitted -> WRITING": "reader, either",
            "1 refused already_attached -> WRITING": "again",
            "raises -> WRITING": "written on, commit, adopted, rejoined",
            "2 gets rw 1 -> WRITING": "killed, released",
            "-> WRITING": "hung up, inherited, settled, condemned, evicted",
            "2 gets rw 2 -> WRITING": "late",
            "no -> WRITING": "may W return, may N return",
        },
    ),
    "unproved, awaited": (
        kv_unproved_awaited,
        {
            "3 refused stale_epoch -> WRITING": "older, same",
            "2 refused stale_epoch -> WRITING": "newer",
            "3 refused not_permitted -> WRITING": "reader, either",
            "2 refused stale_epoch, 1 gets rw 1 -> WRITING": "again",
            "raises -> WRITING": "written on, commit, adopted, rejoined",
            "2 gets rw 1 -> WRITING": "killed, released",
            "-> WRITING": "hung up, inherited, settled, condemned, evicted",
            "2 gets rw 2 -> WRITING": "late",
            "yes -> WRITING": "may W return",
            "no -> WRITING": "may N return",
        },
    ),
    "orphaned": (
        kv_orphaned,
        {
            "3 refused stale_epoch -> WRITING": "older, same",
            "-> WRITING": "newer, again, hung up, late, inherited, settled, condemned, evicted",
            "3 refused not_permitted -> WRITING": "reader, either",
            "raises -> WRITING": "written on, commit, adopted, rejoined",
            "drop 1 -> WRITING": "killed, released",
            "no -> WRITING": "may W return, may N return",
        },
    ),
    "ADOPTING": (
        kv_adopting,
        {
            "3 refused stale_epoch -> ADOPTING": "older, same",
            "-> ADOPTING": "newer, again, killed, hung up, released, late, inherited, condemned, evicted",
            "3 refused not_permitted -> ADOPTING": "reader, either",
            "raises -> ADOPTING": "written on, commit, rejoined",
            "yes -> ADOPTING": "may W return, may N return",
            "-> WRITING": "adopted",
            "drop 7 -> EMPTY": "settled",
        },
    ),
    "ADOPTING, awaited": (
        kv_adopting_awaited,
        {
            "3 refused stale_epoch -> ADOPTING": "older, same",
            "2 refused stale_epoch -> ADOPTING": "newer, again",
            "3 refused not_permitted -> ADOPTING": "reader, either",
            "raises -> ADOPTING": "written on, commit, rejoined",
            "-> ADOPTING": "killed, hung up, released, inherited, condemned, evicted",
            "drop 7, 2 gets rw 10 -> WRITING": "late, settled",
            "yes -> ADOPTING": "may W return, may N return",
            "-> WRITING": "adopted",
        },
    ),
    "fenced": (
        kv_fenced,
        {
            "3 refused stale_epoch -> EMPTY": "older",
            "3 gets rw 10 -> WRITING": "same, newer",
            "3 refused not_permitted -> EMPTY": "reader, either",
            "1 gets rw 10 -> WRITING": "again",
            "raises -> EMPTY": "written on, commit, adopted, rejoined",
            "-> EMPTY": "killed, hung up, released, late, inherited, settled, condemned, evicted",
            "no -> EMPTY": "may W return, may N return",
        },
    ),
}


def cells(table: Table, events: dict[str, Event]) -> list[object]:
    found: list[object] = []
    for name, (build, row) in table.items():
        for expected, leading in row.items():
            for event in leading.split(", "):
                found.append(pytest.param(build, events[event], expected, id=f"{name}-{event}"))
    return found


@pytest.mark.parametrize(("build", "event", "expected"), cells(WEIGHT_TABLE, WEIGHT_EVENTS))
def test_weights(build: Callable[[], Arbiter], event: Event, expected: str) -> None:
    assert outcome(build(), event, WEIGHTS) == expected


@pytest.mark.parametrize(("build", "event", "expected"), cells(KV_TABLE, KV_EVENTS))
def test_kv(build: Callable[[], Arbiter], event: Event, expected: str) -> None:
    assert outcome(build(), event, KV) == expected


def test_the_tables_have_every_cell_once() -> None:
    for table, events in ((WEIGHT_TABLE, WEIGHT_EVENTS), (KV_TABLE, KV_EVENTS)):
        for _, row in table.values():
            assert sorted(", ".join(row.values()).split(", ")) == sorted(events)
