"""The steps of a start."""

from __future__ import annotations

import io

import pytest

from app.cli.reports import Absence, EngineAnswer
from app.cli.screen import PlainScreen
from app.cli.stages import Board, Stage, is_done, stages_of
from tests.unit.cli.test_news import report
from workers.contract import Role


def answers(*roles: Role | Absence) -> dict[str, EngineAnswer]:
    return {
        name: role if isinstance(role, Absence) else report(name, role, pid=1, at=1, since=0)
        for name, role in zip("ab", roles, strict=False)
    }


@pytest.mark.parametrize(
    ("seen", "socket_is_there", "done"),
    [
        (answers(), False, 0),
        (answers(), True, 1),
        (answers(Absence.GONE, Absence.GONE), True, 1),
        (answers(Role.INIT, Absence.GONE), True, 2),
        (answers(Role.STANDBY, Role.INIT), True, 3),
        (answers(Role.INIT, Role.PROMOTING), True, 3),
        (answers(Role.STANDBY, Role.ACTIVE), True, 4),
    ],
)
def test_how_far_a_pod_is(seen: dict[str, EngineAnswer], socket_is_there: bool, done: int) -> None:
    stages = stages_of(gms=True)
    told = [is_done(stage, socket_is_there=socket_is_there, answers=seen) for stage in stages]
    assert told == [True] * done + [False] * (len(stages) - done)


def test_without_a_memory_service_there_is_one_step_less() -> None:
    assert stages_of(gms=False) == (Stage.ENGINES, Stage.WEIGHTS, Stage.ACTIVE)


def test_steps_follow_one_another_and_keep_their_times() -> None:
    board = Board()
    board.advance([("x", False), ("y", False)], now=1.0)
    assert [step.name for step in board.steps] == ["x"]
    board.advance([("x", True), ("y", False)], now=3.0)
    board.advance([("x", True), ("y", True)], now=4.5)
    board.advance([("x", True), ("y", True)], now=9.0)
    assert [(step.name, step.began, step.ended) for step in board.steps] == [("x", 1.0, 3.0), ("y", 3.0, 4.5)]


def test_plain_lines_tell_each_step_once() -> None:
    out, board = io.StringIO(), Board()
    screen = PlainScreen(out)
    board.begin("x", now=1.0)
    screen.show(board, now=1.5)
    board.end("x", now=1.25)
    screen.show(board, now=2.0)
    screen.show(board, now=3.0)
    assert out.getvalue() == "x: done in 0.25 s\n"
