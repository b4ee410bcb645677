from __future__ import annotations

import pytest

from gms.holding import Phase, after_failure, step
from gms.protocol import ErrorCode, GmsError

STEPS = {
    (Phase.HELD, Phase.ADRIFT),
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


@pytest.mark.parametrize(
    ("error", "now", "overdue"),
    [
        (GmsError(ErrorCode.SERVICE_GONE, "", retryable=True), Phase.ADRIFT, Phase.PRIVATE),
        (GmsError(ErrorCode.TOO_MANY, "", retryable=True), Phase.ADRIFT, Phase.PRIVATE),
        (GmsError(ErrorCode.MISMATCH, ""), Phase.PRIVATE, Phase.PRIVATE),
        (GmsError(ErrorCode.VERSION_MISMATCH, ""), Phase.PRIVATE, Phase.PRIVATE),
        (GmsError(ErrorCode.FENCED, ""), Phase.LOST, Phase.LOST),
        (GmsError(ErrorCode.STALE_EPOCH, ""), Phase.LOST, Phase.LOST),
        (OSError(24, "too many open files"), Phase.ADRIFT, Phase.PRIVATE),
    ],
)
def test_what_a_failed_try_makes_of_it(error: Exception, now: Phase, overdue: Phase) -> None:
    assert after_failure(error, overdue=False) is now
    assert after_failure(error, overdue=True) is overdue
