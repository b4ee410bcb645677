from __future__ import annotations

import pytest

from app.openai.units import UnitSplitter
from app.relay.kept import KeepLimits, Kept

UNIT = b": t e=1 n=1 c=1f g=0:5\ndata: x\n\n"


def test_body_and_notes_are_kept_while_they_are_of_use() -> None:
    kept = Kept(b"body", KeepLimits(), wanted=True)
    UnitSplitter(kept).feed(UNIT)
    kept.begun()
    assert kept.resumable
    assert (kept.body, bytes(kept.rest), kept.size_bytes) == (b"body", b"0:5\n", 8)


def test_a_body_that_is_too_large_goes_once_it_cannot_run_again() -> None:
    kept = Kept(b"body", KeepLimits(body_bytes=3), wanted=True)
    UnitSplitter(kept).feed(UNIT)
    assert kept.body
    kept.begun()
    assert (kept.unresumable, kept.size_bytes) == ("body", 0)


def test_without_notes_nothing_is_kept() -> None:
    kept = Kept(b"body", KeepLimits(), wanted=True)
    kept.begun()
    assert (kept.unresumable, kept.size_bytes) == ("no_notes", 0)


def test_where_no_notes_were_wanted_the_body_goes_without_a_word() -> None:
    kept = Kept(b"body", KeepLimits(), wanted=False)
    assert kept.body
    kept.begun()
    assert (kept.unresumable, kept.resumable, kept.size_bytes) == ("", False, 0)


@pytest.mark.parametrize("begun", [False, True])
def test_too_many_tokens(begun: bool) -> None:
    """The body of a request that has nothing delivered is kept: it can still run again from the start."""
    kept = Kept(b"body", KeepLimits(tokens=10), wanted=True)
    splitter = UnitSplitter(kept)
    splitter.feed(UNIT)
    if begun:
        kept.begun()
    for number in range(200):
        splitter.feed(b": t e=%d n=1 c=1f g=0:5,6,7,8\ndata: x\n\n" % (number + 2))
    assert kept.unresumable == "tokens"
    assert kept.body == (b"" if begun else b"body")
    assert not kept.rest


def test_what_is_done_needs_nothing() -> None:
    kept = Kept(b"body", KeepLimits(), wanted=True)
    kept.done()
    assert (kept.unresumable, kept.size_bytes) == ("", 0)
