"""Nobody need listen to ``up``."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from app.cli.screen import LiveScreen, PlainScreen, open_screen
from app.cli.stages import Board
from tests.support.pipes import full_pipe


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe2(os.O_CLOEXEC)
    yield ends
    for fd in ends:
        try:
            os.close(fd)
        except OSError:
            continue


def test_lines_arrive_by_the_end(pipe: tuple[int, int]) -> None:
    with open(pipe[1], "w", closefd=False) as stream:
        screen = open_screen(stream)
        assert isinstance(screen, PlainScreen)
        screen.say("one")
        screen.say("zwölf")
        screen.close()
    assert os.read(pipe[0], 100).decode() == "one\nzwölf\n"


def test_a_closed_pipe_is_no_error(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    with open(pipe[1], "w", closefd=False) as stream:
        screen = open_screen(stream)
        for _ in range(3):
            screen.say("nobody hears this")
        screen.close()


def test_a_full_pipe_makes_nobody_wait() -> None:
    reading_end, writing_end = full_pipe()
    try:
        with open(writing_end, "w", closefd=False) as stream:
            screen = open_screen(stream)
            for _ in range(20_000):
                screen.say("nobody reads this")
            screen.close()
    finally:
        os.close(reading_end)
        os.close(writing_end)


def test_without_a_stdout_it_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    screen = open_screen()
    screen.say("to nobody")
    screen.close()


def test_a_terminal_gets_the_steps_and_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    leader, follower = os.openpty()
    try:
        with open(follower, "w", closefd=False, encoding="utf-8") as stream:
            screen = open_screen(stream)
            assert isinstance(screen, LiveScreen)
            board = Board()
            board.begin("gateway", now=1.0)
            screen.show(board, now=1.5)
            screen.finish()
            screen.say("ready, and what follows can be copied")
            screen.close()
        said = ""
        while "ready, and what follows can be copied" not in said:  # a terminal gives what it has so far
            said += os.read(leader, 65536).decode(errors="replace")
        assert "gateway" in said
        assert "0.5 s" in said
    finally:
        os.close(leader)
        os.close(follower)
