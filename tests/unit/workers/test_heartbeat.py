"""Beats whole, torn and many at once; and what silence means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.contract import Role
from workers.heartbeat import BEAT_BYTES, Beat, BeatDecoder, Stuck, Watchdog, encode_beat

beats = st.builds(Beat, st.integers(0, 2**64 - 1), st.booleans(), st.sampled_from(Role))


@given(st.lists(beats, min_size=1, max_size=8), st.data())
def test_any_split_of_the_pipe_gives_the_last_whole_beat(sent: list[Beat], data: st.DataObject) -> None:
    stream = b"".join(map(encode_beat, sent))
    decoder, latest, at = BeatDecoder(), None, 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        latest = decoder.feed(stream[at : at + size]) or latest
        at += size
    assert latest == sent[-1]


def test_byte_by_byte_and_trailing_bytes() -> None:
    decoder = BeatDecoder()
    raw = encode_beat(Beat(7, True, Role.ACTIVE))
    assert [decoder.feed(bytes([byte])) for byte in raw[:-1]] == [None] * (BEAT_BYTES - 1)
    assert decoder.feed(raw[-1:] + raw[:3]) == Beat(7, True, Role.ACTIVE)
    assert decoder.feed(raw[3:]) == Beat(7, True, Role.ACTIVE)


def test_something_else_on_the_pipe_is_refused() -> None:
    with pytest.raises(ValueError, match="not a heartbeat"):
        BeatDecoder().feed(b"\xff" * BEAT_BYTES)


def watchdog() -> Watchdog:
    return Watchdog(now=0.0, beat_timeout=3.0, init_beat_timeout=60.0, step_timeout=120.0)


def look_on(dog: Watchdog, start: float, end: float) -> tuple[float, Stuck] | None:
    """Look every half second from ``start`` to ``end``; when and why it found the engine stuck."""
    now = start
    while now <= end:
        if stuck := dog.look(now=now):
            return now, stuck
        now += 0.5
    return None


def test_silence_is_stuck_after_the_timeout() -> None:
    dog = watchdog()
    dog.beat(Beat(0, False, Role.ACTIVE), now=0.0)
    assert look_on(dog, 0.0, 10.0) == (3.5, Stuck.NO_BEAT)


def test_before_it_is_initialised_an_engine_may_be_silent_for_longer() -> None:
    assert look_on(watchdog(), 0.0, 60.0) is None
    assert look_on(watchdog(), 0.0, 70.0) == (60.5, Stuck.NO_BEAT)


def test_one_that_was_told_to_stop_has_its_time_only_while_its_process_runs() -> None:
    for role in (Role.INIT, Role.STANDBY, Role.ACTIVE):
        dog = watchdog()
        dog.beat(Beat(0, False, role), now=0.0)
        dog.told_to_stop(now=0.0, end_timeout=80.0)
        assert look_on(dog, 0.0, 20.0) is None
        assert dog.look(now=20.5, stopped=True) is Stuck.NO_BEAT
        assert look_on(dog, 21.0, 90.0) == (80.5, Stuck.NO_END)


def test_beats_keep_an_idle_engine_alive_for_ever() -> None:
    dog = watchdog()
    for second in range(500):
        dog.beat(Beat(4, False, Role.ACTIVE), now=float(second))
        assert dog.look(now=float(second)) is None


def test_a_busy_engine_without_steps_is_stuck_though_it_beats() -> None:
    dog = watchdog()
    found = None
    for second in range(200):
        dog.beat(Beat(4, True, Role.ACTIVE), now=float(second))
        found = found or ((second, dog.look(now=float(second))) if dog.look(now=float(second)) else None)
    assert found == (121, Stuck.NO_STEP)


def test_a_step_restarts_the_step_timeout_and_so_does_idleness() -> None:
    dog = watchdog()
    for second in range(400):
        dog.beat(Beat(second // 100, True, Role.ACTIVE), now=float(second))
        assert dog.look(now=float(second)) is None
    for second in range(400, 500):
        dog.beat(Beat(3, second % 50 != 0, Role.ACTIVE), now=float(second))
        assert dog.look(now=float(second)) is None


def test_a_keeper_that_was_not_run_itself_does_not_blame_the_engine() -> None:
    dog = watchdog()
    dog.beat(Beat(0, True, Role.ACTIVE), now=0.0)
    assert dog.look(now=0.5) is None
    assert dog.look(now=3600.0) is None
    assert look_on(dog, 3600.0, 3610.0) == (3602.0, Stuck.NO_BEAT)


def test_one_that_was_told_to_stop_has_its_time_from_its_last_beat() -> None:
    dog = watchdog()
    dog.beat(Beat(0, True, Role.ACTIVE), now=0.0)
    assert dog.look(now=0.5) is None
    dog.told_to_stop(now=1.0, end_timeout=5.0)
    assert look_on(dog, 1.0, 4.0) is None  # which would have been a hang
    dog.beat(Beat(1, False, Role.DRAINING), now=4.0)
    assert look_on(dog, 4.5, 20.0) == (9.5, Stuck.NO_END)


def test_a_shorter_time_to_stop_takes_none_of_the_patience_away() -> None:
    dog = watchdog()
    dog.told_to_stop(now=0.0, end_timeout=1.0)
    assert look_on(dog, 0.0, 60.0) is None
    dog.beat(Beat(0, False, Role.ACTIVE), now=60.0)
    assert look_on(dog, 60.5, 70.0) == (63.5, Stuck.NO_END)
