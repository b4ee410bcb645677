from __future__ import annotations

import pytest

from app.openai.errors import request_kills_worker, worker_lost
from app.relay.relayed import Report
from app.telemetry.lost_log import LINES_PER_SECOND, LostLog


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_has_a_line_and_a_flood_has_few(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = LostLog(clock)
    report = Report(error=worker_lost("x"), lost="limit", attempts=4)
    for number in range(30):
        log.lost("/v1/completions", b"r-%d" % number, report)
    assert len(caplog.messages) == LINES_PER_SECOND
    assert caplog.messages[0] == (
        "a request was lost when a worker broke under it: /v1/completions error=worker_lost lost=limit attempts=4 "
        "request_id=r-0"
    )
    clock.now += 1
    convicted = Report(error=request_kills_worker(), lost="poison", attempts=5)
    log.lost("/v1/completions", b"r-30", convicted)
    assert caplog.messages[-1] == (
        "a request kills workers, and is refused from now on: /v1/completions error=request_kills_worker lost=poison "
        "attempts=5 request_id=r-30; 25 more since the last such line"
    )
    log.lost("/v1/completions", b"r-31", convicted)
    assert "more since" not in caplog.messages[-1]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
