"""A signal before anybody serves: it may come between any two steps of the start."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from app.processes.announcement import announced
from app.processes.stop_signals import STOPS, heard, held, leave_if_stopped


@pytest.mark.parametrize("number", STOPS)
def test_what_is_held_interrupts_nothing_and_is_not_lost(number: signal.Signals) -> None:
    came: list[int] = []
    before = signal.signal(number, lambda number, frame: came.append(number))
    try:
        with held():
            leave_if_stopped()
            signal.raise_signal(number)
            assert came == []
            with pytest.raises(SystemExit) as ended:
                leave_if_stopped()
            assert ended.value.code == 0
            with heard():
                assert came == [number]
            leave_if_stopped()
            signal.raise_signal(number)
            assert came == [number]
        assert came == [number, number]
    finally:
        signal.signal(number, before)


def test_nothing_is_held_afterwards() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with held(), heard(), held():
        pass
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("step", ["mkdir", "replace"])
def test_no_announcement_is_left_by_an_interrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    real = getattr(Path, step)

    def interrupted(*given: object, **named: object) -> None:
        real(*given, **named)
        raise SystemExit

    run_dir = tmp_path / "run"
    monkeypatch.setattr(Path, step, interrupted)
    with pytest.raises(SystemExit), announced(run_dir, "127.0.0.1", 1):
        pytest.fail("it was not interrupted")
    assert list(run_dir.iterdir()) == []
