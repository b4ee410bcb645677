"""Who is told to leave, by whom, and how often."""

from __future__ import annotations

import pytest

from workers import shutdown
from workers.exit_codes import ExitCode
from workers.shutdown import Leave


class Ended(BaseException):
    """The process would be gone."""


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[ExitCode]:
    ended: list[ExitCode] = []

    def end(code: ExitCode) -> None:
        ended.append(code)
        raise Ended

    monkeypatch.setattr(shutdown, "end_process", end)
    return ended


async def test_the_second_signal_ends_it(codes: list[ExitCode]) -> None:
    leave = Leave(engine_id="a")
    leave._asked()
    assert (leave.told, codes) == (True, [])
    with pytest.raises(Ended):
        leave._asked()
    assert codes == [ExitCode.FORCED]


async def test_to_leave_for_a_reason_of_its_own_is_no_signal(codes: list[ExitCode]) -> None:
    leave = Leave(engine_id="a")
    leave.replace("its lock file was replaced")
    told_at = leave.told_at
    leave.replace("its lock file was replaced")
    leave._asked()
    assert (leave.told, leave.told_at, codes) == (True, told_at, [])
    with pytest.raises(Ended):
        leave._asked()
    assert codes == [ExitCode.FORCED]
