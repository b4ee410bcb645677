"""``hotspare handover``: have the engines of a pod change places, without a request lost.

What happens is the engines' own (``workers.handover``); here one of them is asked, with the key that lies in the pod's
folder, and looked at while it waits for requests that cannot be taken along.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from app.cli.drain_words import waiting_to_hand_over
from app.cli.errors import CliError
from app.cli.fault import engine_with
from app.cli.observe import ask_engine, ask_pod
from app.cli.run_dir import find_pod
from workers.contract import Role
from workers.exit_codes import ExitCode
from workers.handover import START_PATH, Asked
from workers.hosts import reachable
from workers.http_get import GetFailed, http_post
from workers.pod_files import PodRecord
from workers.pod_key import HEADER_POD_KEY, PodKeyError, read_pod_key
from workers.state import EngineState

STEPS_SECONDS: Final = 3600.0
"""More than the steps of a hand-over may take, whatever the pod's settings. An engine that dies meanwhile ends the
connection."""
LOOK_SECONDS: Final = 0.5
PROGRESS_SECONDS: Final = 10.0
"""Between two lines that say what is waited for, if that is the same."""

Say = Callable[[str], None]


class _Answer(msgspec.Struct, frozen=True):
    """What an engine answers: the end of its hand-over, or why there was none."""

    stage: str = ""
    reason: str = ""
    to: str = ""
    epoch: int = 0
    seconds: float = 0.0
    bound: int = 0
    error: dict[str, str | None] = {}


def hand_over(pod_name: str | None, run_dir: Path, asked: Asked, *, progress: Say) -> str:
    """Do it; returns what was done. Without a name: the only pod there. ``progress`` gets a sentence of what is waited
    for meanwhile.

    Raises:
        CliError: there is no such pod, or its active engine serves on; the message says why.
    """
    pod = find_pod(pod_name, run_dir)
    return asyncio.run(ask_to_hand_over(pod, pod_key(pod, run_dir), asked, progress=progress))


def pod_key(pod: PodRecord, run_dir: Path) -> str:
    """What its engines want to be shown.

    Raises:
        CliError: it cannot be read.
    """
    try:
        return read_pod_key(run_dir / pod.pod)
    except PodKeyError as error:
        raise cannot(str(error)) from error


async def ask_to_hand_over(pod: PodRecord, key: str, asked: Asked, *, progress: Say) -> str:
    """As ``hand_over``."""
    active = engine_with(Role.ACTIVE, await ask_pod(pod))
    if active is None:
        raise cannot(f"no engine of {pod.pod} is {Role.ACTIVE} now; nothing was done")
    port = pod.engines[active.engine].admin_port
    headers = {HEADER_POD_KEY: key}
    try:
        async with _watched(pod, active.engine, progress):
            status, body = await http_post(
                reachable(pod.host),
                port,
                START_PATH,
                msgspec.json.encode(asked),
                timeout_seconds=asked.wait_seconds + STEPS_SECONDS,
                headers=headers,
            )
        answer = msgspec.json.decode(body, type=_Answer)
    except asyncio.CancelledError:
        progress(
            f"{pod.pod}: interrupted. If engine {active.engine} still waits for requests, it calls the hand-over off "
            "and serves on; otherwise the hand-over goes on. `hotspare status` shows who serves"
        )
        raise
    except (GetFailed, msgspec.DecodeError) as error:
        raise cannot(
            f"engine {active.engine} of {pod.pod} did not say how it went ({error}); `hotspare status` shows who serves"
        ) from error
    if status == 200:
        milliseconds = answer.seconds * 1000
        return (
            f"{pod.pod}: engine {answer.to} serves under epoch {answer.epoch}, {milliseconds:.0f} ms after engine "
            f"{active.engine} was asked; engine {active.engine} starts again as a spare"
        )
    why = answer.reason or answer.error.get("message") or f"it answered {status}"
    making = ""
    if len(pod.engines) > 1 and engine_with(Role.STANDBY, await ask_pod(pod)) is None:
        making = "; its spare is being made anew, which takes seconds: try again when `hotspare status` shows STANDBY"
    if answer.bound:
        making = (
            f" (waited for {asked.wait_seconds:g} s); longer with --wait SECONDS, and with --cut they are cut then. "
            "Nothing was cut"
        )
    raise cannot(f"engine {active.engine} of {pod.pod} serves on: {why}{making}")


@asynccontextmanager
async def _watched(pod: PodRecord, engine: str, progress: Say) -> AsyncIterator[None]:
    """Meanwhile ``progress`` is told what the engine waits for: at first, when that changes, and now and then."""

    async def watch() -> None:
        told: tuple[str, ...] = ()
        told_at = 0.0
        while True:
            state = await ask_engine(pod, engine)
            draining = state.draining if isinstance(state, EngineState) else None
            if draining is not None and draining.bound:
                ids, now = tuple(name.partition(" ")[0] for name in draining.bound), time.monotonic()
                if ids != told or now - told_at >= PROGRESS_SECONDS:
                    told, told_at = ids, now
                    progress(f"{pod.pod}: engine {engine} {waiting_to_hand_over(draining)}")
            await asyncio.sleep(LOOK_SECONDS)

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        if not watching.cancelled() and (error := watching.exception()) is not None:
            progress(f"{pod.pod}: what engine {engine} waited for could not be told: {type(error).__name__}: {error}")


def cannot(sentence: str) -> CliError:
    """For whoever raises it."""
    return CliError(sentence, code=ExitCode.ENGINE_DEAD)
