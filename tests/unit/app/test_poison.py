"""Who kills engines: every cell of the machine, who runs alone, what is refused."""

from __future__ import annotations

import itertools

import pytest

from app.fleet.liveness import ReplicaKey
from app.relay.poison import MOST_REFUSED, REFUSED_SECONDS, Event, RefusedBodies, Standing, Suspects, after

KEY = b"k" * 32
IMPOSSIBLE = {(Standing.CLEAR, Event.DIED_ALONE), (Standing.COUNTED, Event.DIED_ALONE)} | {
    (Standing.CONVICTED, event) for event in Event
}
CELLS = {
    (Standing.CLEAR, Event.GAINED): Standing.CLEAR,
    (Standing.CLEAR, Event.DIED): Standing.COUNTED,
    (Standing.CLEAR, Event.LIVED): Standing.CLEAR,
    (Standing.COUNTED, Event.GAINED): Standing.CLEAR,
    (Standing.COUNTED, Event.DIED): Standing.SUSPECT,
    (Standing.COUNTED, Event.LIVED): Standing.COUNTED,
    (Standing.SUSPECT, Event.GAINED): Standing.CLEAR,
    (Standing.SUSPECT, Event.DIED): Standing.SUSPECT,
    (Standing.SUSPECT, Event.DIED_ALONE): Standing.ACCUSED,
    (Standing.SUSPECT, Event.LIVED): Standing.SUSPECT,
    (Standing.ACCUSED, Event.GAINED): Standing.CLEAR,
    (Standing.ACCUSED, Event.DIED): Standing.ACCUSED,
    (Standing.ACCUSED, Event.DIED_ALONE): Standing.ACCUSED_TWICE,
    (Standing.ACCUSED, Event.LIVED): Standing.ACCUSED,
    (Standing.ACCUSED_TWICE, Event.GAINED): Standing.CLEAR,
    (Standing.ACCUSED_TWICE, Event.DIED): Standing.ACCUSED_TWICE,
    (Standing.ACCUSED_TWICE, Event.DIED_ALONE): Standing.CONVICTED,
    (Standing.ACCUSED_TWICE, Event.LIVED): Standing.ACCUSED_TWICE,
}


@pytest.mark.parametrize(("standing", "event"), list(itertools.product(Standing, Event)))
def test_every_cell(standing: Standing, event: Event) -> None:
    if (standing, event) in IMPOSSIBLE:
        with pytest.raises(ValueError, match=r"cannot happen"):
            after(standing, event)
    else:
        assert after(standing, event) is CELLS[standing, event]


def test_two_deaths_make_a_suspect_and_three_more_alone_convict() -> None:
    standing = Standing.CLEAR
    for event in (Event.DIED, Event.LIVED, Event.DIED, Event.LIVED, *[Event.DIED_ALONE] * 3):
        assert standing is not Standing.CONVICTED
        standing = after(standing, event)
    assert standing is Standing.CONVICTED


def test_who_gains_anything_is_clear() -> None:
    standing = Standing.CLEAR
    for event in (Event.DIED, Event.DIED, Event.GAINED, Event.DIED):
        standing = after(standing, event)
    assert standing is Standing.COUNTED


def test_one_suspect_on_each_engine() -> None:
    suspects = Suspects()
    here, there = ReplicaKey("pod-0", "life", 1), ReplicaKey("pod-0", "life", 2)
    suspects.enter(here, 5)
    assert not suspects.admits(here)
    assert suspects.admits(there)
    suspects.enter(there, 7)
    suspects.leave(here, 7, 1.0)  # it was not there
    assert not suspects.admits(here)
    assert suspects.moved_at == 0.0
    suspects.leave(here, 5, 2.0)
    suspects.leave(here, 5, 3.0)
    assert suspects.admits(here)
    assert (len(suspects), suspects.moved_at) == (1, 2.0)


def test_a_body_is_refused_for_a_while() -> None:
    refused = RefusedBodies(KEY)
    assert not refused.marks
    refused.add("/v1/completions", b"kill", 100.0)
    assert refused.marks
    assert refused.has("/v1/completions", b"kill", 100.0 + REFUSED_SECONDS - 1)
    assert not refused.has("/v1/completions", b"lill", 101.0)
    assert not refused.has("/v1/completions", b"kills", 101.0)
    assert not refused.has("/v1/chat/completions", b"kill", 101.0)
    assert not refused.has("/v1/completions", b"kill", 100.0 + REFUSED_SECONDS)
    assert not refused.marks


def test_the_table_is_bounded_and_holds_no_text() -> None:
    refused = RefusedBodies(KEY)
    for number in range(MOST_REFUSED + 1):
        refused.add("/p", b"body %04d" % number, float(number))
        refused.add("/p", b"body 0001", float(number))  # the time counts from the last conviction
    now = float(MOST_REFUSED)
    assert not refused.has("/p", b"body 0000", 0.0)
    assert refused.has("/p", b"body 0001", now)
    assert refused.has("/p", b"body %04d" % MOST_REFUSED, now)
    assert len(refused.marks) <= MOST_REFUSED
    assert all(size == 9 and len(digest) == 16 for size, digest in refused.marks)
    assert RefusedBodies(b"other")._mark("/p", b"x") != refused._mark("/p", b"x")
