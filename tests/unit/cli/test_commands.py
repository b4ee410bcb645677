"""What all commands under Typer have in common."""

from __future__ import annotations

import typing
from collections.abc import Iterator

import typer

from app.cli.commands import build


def commands(app: typer.Typer) -> Iterator[tuple[str, typing.Any]]:
    for command in app.registered_commands:
        yield str(command.name), command.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance)


def test_no_command_returns_an_exit_code_that_nobody_would_see() -> None:
    found = dict(commands(build(pretty=False, with_bench=True)))
    assert {"status", "handover", "recovery"} <= found.keys()
    for name, command in found.items():
        assert typing.get_type_hints(command)["return"] is type(None), name
