"""Puts the status on stdout: once, as JSON, or again and again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Final

import msgspec

from app.cli.door import client_key
from app.cli.errors import CliError
from app.cli.status import StatusDocument, answers, look
from workers.exit_codes import ExitCode

WATCH_SECONDS: Final = 1.0


def show_status(run_dir: Path, *, as_json: bool) -> None:
    """Once.

    Raises:
        CliError: nothing runs there; or, after the status has been shown, nothing in it answers.
    """
    document = asyncio.run(look(run_dir, key=client_key(os.environ)))
    _show(document, as_json=as_json)
    if not answers(document):
        raise CliError(
            f"neither a gateway nor an engine of {run_dir} answers: the files there were left behind, "
            "unless it is starting just now",
            code=ExitCode.ENGINE_DEAD,
        )


def _show(document: StatusDocument, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")
        sys.stdout.flush()
        return
    from rich.console import Console

    from app.cli.status_table import render

    console = Console(highlight=False)
    # Lines that go into a file or a pipe are not cut at a width that nobody has.
    console.print(render(document), soft_wrap=not console.is_terminal)


def watch_status(run_dir: Path) -> None:
    """Each second, until Ctrl-C.

    Raises:
        CliError: nothing runs there (any more).
    """
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(run_dir))


def show_memory(run_dir: Path, *, as_json: bool) -> None:
    """Once.

    Raises:
        CliError: no pod runs there.
    """
    from app.cli.memory import account, render

    document = asyncio.run(account(run_dir))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")
        sys.stdout.flush()
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(render(document), soft_wrap=not console.is_terminal)


async def _watch(run_dir: Path) -> None:
    from rich.console import Console
    from rich.live import Live

    from app.cli.status_table import render

    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            live.update(render(await look(run_dir, key=client_key(os.environ))), refresh=True)
            await asyncio.sleep(WATCH_SECONDS)
