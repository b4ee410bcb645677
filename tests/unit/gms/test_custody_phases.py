from __future__ import annotations

import pytest

from gms.custody_phases import Phase, after_failure, step
from gms.protocol import ErrorCode, GmsError

STEPS = {
    (Phase.HELD, Phase.ADRIFT),
    (Phase.HELD, Phase.PRIVATE),
    (Phase.HELD, Phase.ENDED),
    (Phase.ADRIFT, Phase.HELD),
    (Phase.ADRIFT, Phase.LOST),
    (Phase.ADRIFT, Phase.PRIVATE),
    (Phase.ADRIFT, Phase.ENDED),
    (Phase.LOST, Phase.ENDED),
    (Phase.PRIVATE, Phase.ENDED),
}


@pytest.mark.parametrize("start", Phase)
@pytest.mark.parametrize("to", Phase)
def test_every_step_that_there_is_and_none_that_there_is_not(start: Phase, to: Phase) -> None:
    if (start, to) in STEPS:
        assert step(start, to) is to
    else:
        with pytest.raises(ValueError, match=f"{start} cannot become {to}"):
            step(start, to)


LOST = {ErrorCode.FENCED, ErrorCode.STALE_EPOCH, ErrorCode.CORRUPT}
FOR_GOOD = {
    ErrorCode.ALREADY_ATTACHED,
    ErrorCode.CLOSED,
    ErrorCode.EXISTS,
    ErrorCode.INVALID,
    ErrorCode.MISMATCH,
    ErrorCode.NOT_FOUND,
    ErrorCode.NOT_PERMITTED,
    ErrorCode.SIZE_MISMATCH,
    ErrorCode.VERSION_MISMATCH,
    ErrorCode.WRONG_DEVICE,
}


@pytest.mark.parametrize("retryable", [True, False])
@pytest.mark.parametrize("code", ErrorCode)
def test_what_each_refusal_makes_of_it(code: ErrorCode, retryable: bool) -> None:
    error = GmsError(code, "", retryable=retryable)
    if code in LOST:
        wanted = (Phase.LOST, Phase.LOST)
    elif code in FOR_GOOD:
        wanted = (Phase.PRIVATE, Phase.PRIVATE)
    else:
        wanted = (Phase.ADRIFT, Phase.PRIVATE)
    assert (after_failure(error, overdue=False), after_failure(error, overdue=True)) == wanted


def test_what_this_process_itself_is_short_of_passes() -> None:
    short = OSError(24, "too many open files")
    assert after_failure(short, overdue=False) is Phase.ADRIFT
    assert after_failure(short, overdue=True) is Phase.PRIVATE
