from __future__ import annotations

import pytest

from app.fullness import FORGOTTEN_SECONDS, PAUSE_LIMIT_SECONDS, PAUSE_SECONDS, FullReplicas
from app.liveness import ReplicaKey

A, B = ReplicaKey("a", "life", 1), ReplicaKey("b", "life", 1)


def test_one_round_ends_with_its_first_refusal() -> None:
    full = FullReplicas()
    assert full.next_round(0.0) is None
    full.refused(A, 1.0)
    full.refused(A, 1.0 + PAUSE_SECONDS / 2)
    assert full.next_round(1.0) == 1.0 + PAUSE_SECONDS
    assert full.resting(1.0) == {A}
    assert full.rests(A, 1.0)
    assert not full.rests(B, 1.0)
    assert not full.rests(A, 1.0 + PAUSE_SECONDS)


def test_pauses_grow_until_a_request_is_taken() -> None:
    full, now, pauses = FullReplicas(), 0.0, []
    for _ in range(8):
        full.refused(A, now)
        until = full.next_round(now)
        assert until is not None
        pauses.append(until - now)
        now = until
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (pytest.approx(PAUSE_SECONDS), pytest.approx(PAUSE_LIMIT_SECONDS))
    full.took(A)
    full.took(B)
    full.refused(A, now)
    assert full.next_round(now) == pytest.approx(now + PAUSE_SECONDS * 1.5)


def test_who_is_gone_is_forgotten() -> None:
    full = FullReplicas()
    full.refused(A, 0.0)
    full.refused(B, FORGOTTEN_SECONDS + 1)
    assert set(full._rests) == {B}
