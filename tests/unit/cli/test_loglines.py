"""Which lines of a log are loud, and which one explains an end."""

from __future__ import annotations

import pytest

from app.cli.loglines import LastWords, Level, is_loud, level_of, message_of


@pytest.mark.parametrize(
    ("line", "level", "message"),
    [
        ("12:00:00.123 INFO    engine a is ready", Level.ORDINARY, "12:00:00.123 INFO    engine a is ready"),
        ("12:00:00.123 WARNING it is late", Level.WARNING, "it is late"),
        ("pod-0/engine-a 12:00:00.123 ERROR   it broke: ERROR 7", Level.ERROR, "it broke: ERROR 7"),
        ("(EngineCore pid=7) WARNING 11-30 05:16:01 [x.py:3] slow", Level.WARNING, "11-30 05:16:01 [x.py:3] slow"),
        ("12:00:00.123 error   no port", Level.ERROR, "no port"),
        ('{"level":"error","message":"it broke"}', Level.ERROR, "it broke"),
        ('{"process":"pod-0/gms","level":"warning","message":"late"}', Level.WARNING, "late"),
        ('{"not json', Level.ORDINARY, '{"not json'),
        ("a sentence that ends in ERRORS", Level.ORDINARY, "a sentence that ends in ERRORS"),
        ("an error in prose is no level", Level.ORDINARY, "an error in prose is no level"),
        ("x" * 200 + " ERROR late", Level.ORDINARY, "x" * 200 + " ERROR late"),
        ("", Level.ORDINARY, ""),
    ],
)
def test_levels(line: str, level: Level, message: str) -> None:
    assert level_of(line) is level
    assert message_of(line) == message


@pytest.mark.parametrize(
    ("line", "loud"),
    [
        ("pod-0/engine-a 12:00:00.123 WARNING engine a: the engine is gone (killed by SIGKILL)", True),
        ("pod-0/gms 12:00:00.123 WARNING gms: others may enter the folder", True),
        ("pod-0/engine-a 12:00:00.123 WARNING vllm: Triton is not installed", False),
        ("pod-0/engine-a 12:00:00.123 ERROR   vllm: it broke", True),
        ('{"level":"warning","logger":"workers.keeper","message":"gone"}', True),
        ('{"level":"warning","logger":"vllm.config","message":"vague"}', False),
        ("12:00:00.123 INFO    engine a is ready", False),
    ],
)
def test_libraries_are_loud_only_when_something_breaks(line: str, loud: bool) -> None:
    assert is_loud(line) is loud


def test_the_last_error_explains_an_end() -> None:
    words = LastWords()
    words.feed(["12:00:00.123 ERROR first", "12:00:00.124 ERROR second", "bye"])
    assert words.sentence == "second"


def test_without_an_error_the_last_lines_do() -> None:
    words = LastWords()
    words.feed(["one", "two", "", "hotspare pod: HOTSPARE_X is wrong", "three"])
    assert words.sentence == "two / hotspare pod: HOTSPARE_X is wrong / three"


def test_silence_is_said_to_be_one() -> None:
    assert LastWords().sentence == "it wrote nothing to its log"
