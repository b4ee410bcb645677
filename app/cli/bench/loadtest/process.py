"""Locust in a process of its own, and what it writes read along and judged."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

import app
from app.cli.bench.loadtest.asked import asked
from app.cli.bench.loadtest.figures import Figures
from app.cli.bench.loadtest.judging import Judge
from app.cli.bench.loadtest.records import Answered, Began, Ended, RecordReader
from app.cli.bench.loadtest.scenario import Scenario
from app.cli.bench.system import BenchError, ended
from app.cli.launch import module_command, safe_environment

LOOK_SECONDS: Final = 0.2
BEGIN_SECONDS: Final = 60.0
STOP_SECONDS: Final = 15.0
LAST_LINES: Final = 12
LOCUSTFILE: Final = Path(__file__).parent / "generator" / "locustfile.py"


def missing() -> str:
    """What is not installed, as a sentence; "" if all is there."""
    absent = [name for name in ("locust", "yaml") if find_spec(name) is None]
    if not absent:
        return ""
    return (
        f"this needs {' and '.join(absent)}, which nothing but the load tests uses: "
        "`make setup-test` in a checkout installs it, or `pip install 'hotspare[load]'`"
    )


class Generator:
    """Locust's process, and its records."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._began: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def began(self) -> float:
        """When it began, by ``time.monotonic()``.

        Raises:
            BenchError: it does not.
        """
        try:
            async with asyncio.timeout(BEGIN_SECONDS):
                return await self._began
        except TimeoutError:
            raise BenchError(f"the generator has not begun within {BEGIN_SECONDS:g} s:\n{self._last_words()}") from None

    async def follow(self, scenario: Scenario, judge: Judge, figures: Figures) -> Ended:
        """Judge what it writes, to its end.

        Raises:
            BenchError: it ended before the end.
        """
        reader = RecordReader(self._folder / "records")
        end: Ended | None = None
        while True:
            over = self._process.returncode is not None  # asked first: then what is read now is all that there is
            records = await asyncio.to_thread(reader.read)
            await asyncio.to_thread(
                _judge, [one for one in records if isinstance(one, Answered)], scenario, judge, figures
            )
            for record in records:
                if isinstance(record, Began) and not self._began.done():
                    self._began.set_result(record.at)
                if isinstance(record, Ended):
                    end = record
            if over and not records:
                break
            if not records:
                await asyncio.sleep(LOOK_SECONDS)
        if end is None:
            raise BenchError(
                f"the generator ended with {self._process.returncode} before the end:\n{self._last_words()}"
            )
        return end

    def _last_words(self) -> str:
        return "\n".join((self._folder / "locust.log").read_text(errors="replace").splitlines()[-LAST_LINES:])


@asynccontextmanager
async def generating(scenario: Scenario, folder: Path, *, host: str, model: str) -> AsyncIterator[Generator]:
    """Locust, until it ends by itself; on leaving it is told to, if it has not."""
    records = folder / "records"
    records.mkdir(mode=0o700)
    document = folder / "scenario.yaml"
    document.write_bytes(msgspec.json.encode(scenario))  # YAML can read it
    with (folder / "locust.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *module_command("locust", "--locustfile", str(LOCUSTFILE), "--headless", "--users", "1"),
            *("--only-summary", "--loglevel", "WARNING", "--exit-code-on-error", "0"),
            *("--host", host, "--model", model, "--scenario", str(document), "--records", str(records)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(os.environ),
            cwd=folder,
            start_new_session=True,
        )
    async with ended(process, stop_seconds=STOP_SECONDS):
        yield Generator(process, folder)


def _judge(answers: list[Answered], scenario: Scenario, judge: Judge, figures: Figures) -> None:
    for answer in answers:
        kind, question = asked(scenario, answer.number)
        figures.add(kind, *judge.judge(question, answer), answer)


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without settings of Locust's own: the scenario has them. Our packages are found wherever they lie."""
    child = {name: value for name, value in environment.items() if not name.startswith("LOCUST_")}
    root = str(Path(app.__file__).parents[1])
    child["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH", ""))))
    child["HOTSPARE_PARENT_PID"] = str(os.getpid())
    return safe_environment(child)
