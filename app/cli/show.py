"""Puts the status on stdout: once, as JSON, or again and again."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Final

import msgspec

from app.cli.status import look
from workers.exit_codes import ExitCode

WATCH_SECONDS: Final = 1.0


def show_status(run_dir: Path, *, as_json: bool) -> int:
    """Once.

    Raises:
        CliError: no pod runs there.
    """
    document = asyncio.run(look(run_dir))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")
        return ExitCode.DRAINED
    from rich.console import Console

    from app.cli.status_table import render

    console = Console(highlight=False)
    # Lines that go into a file or a pipe are not cut at a width that nobody has.
    console.print(render(document), soft_wrap=not console.is_terminal)
    return ExitCode.DRAINED


def watch_status(run_dir: Path) -> int:
    """Each second, until Ctrl-C.

    Raises:
        CliError: no pod runs there (any more).
    """
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(run_dir))
    return ExitCode.DRAINED


async def _watch(run_dir: Path) -> None:
    from rich.console import Console
    from rich.live import Live

    from app.cli.status_table import render

    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            live.update(render(await look(run_dir)), refresh=True)
            await asyncio.sleep(WATCH_SECONDS)
