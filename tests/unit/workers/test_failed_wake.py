from __future__ import annotations

import pytest

from gms.protocol import ErrorCode, GmsError
from workers.failed_wake import HINTS, TRIES, Cause, FailedWakes, Next, WakeFailed, cause_of, is_hopeless

OF_SETTINGS = {
    ErrorCode.OUT_OF_MEMORY,
    ErrorCode.SIZE_MISMATCH,
    ErrorCode.VERSION_MISMATCH,
    ErrorCode.WRONG_DEVICE,
}


@pytest.mark.parametrize("code", ErrorCode)
def test_only_what_settings_must_change_is_hopeless(code: ErrorCode) -> None:
    assert is_hopeless(GmsError(code, "")) is (code in OF_SETTINGS)
    assert not is_hopeless(GmsError(code, "", retryable=True))


def test_each_failure_in_a_row_waits_longer_and_the_last_one_gives_up() -> None:
    failures = FailedWakes(first_delay_seconds=3.0)
    error = WakeFailed(Cause.PORT, "127.0.0.1:1 is in use")
    assert [failures.failed(error) for _ in range(TRIES)] == [
        Next(False, 3.0),
        Next(False, 6.0),
        Next(False, 10.0),
        Next(False, 10.0),
        Next(True, 0.0),
    ]
    assert (failures.in_a_row, failures.obstacle) == (TRIES, "port: 127.0.0.1:1 is in use")


def test_a_success_begins_the_count_anew() -> None:
    failures = FailedWakes(first_delay_seconds=1.0)
    failures.failed(WakeFailed(Cause.MEMORY, "no room"))
    failures.succeeded()
    assert (failures.in_a_row, failures.obstacle) == (0, None)
    assert failures.failed(WakeFailed(Cause.MEMORY, "no room")) == Next(False, 1.0)


def test_every_cause_has_a_hint() -> None:
    assert set(HINTS) == set(Cause)


@pytest.mark.parametrize("code", ErrorCode)
def test_no_answer_is_told_from_no(code: ErrorCode) -> None:
    silent = {ErrorCode.SERVICE_GONE, ErrorCode.CLOSED, ErrorCode.TIMEOUT, ErrorCode.INTERNAL}
    assert (cause_of(GmsError(code, "")) is Cause.SERVICE) is (code in silent)
