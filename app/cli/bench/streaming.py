"""A stream whose events are timed, and what benchmarks of streams share: prompts and figures."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import httpx
import msgspec

ANSWER_TOKENS: Final = 48

_TOKENS: Final = range(40, 120)
"""Any will do that every engine has."""

Say = Callable[[str], None]


class Streamed(msgspec.Struct, kw_only=True):
    """An answer as it came: its text, and when each event did."""

    text: str = ""
    at: list[float] = msgspec.field(default_factory=list)
    problem: str = ""
    told: bool = False
    """The problem was said by an event."""


def prompt_of(seed: int, length: int) -> list[int]:
    """Token ids; the same for the same seed."""
    return random.Random(seed).choices(_TOKENS, k=length)  # noqa: S311


async def _nothing(count: int) -> None:
    return


async def stream(
    client: httpx.AsyncClient,
    model: str,
    prompt: list[int],
    tokens: int = ANSWER_TOKENS,
    reached: Any = _nothing,
    *,
    got: Streamed | None = None,
) -> Streamed:
    """``reached`` hears after each event how many there were; ``got``: where the answer is written down as it comes."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    got, ended = got or Streamed(), False
    with _told(got):
        async with client.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as response:
            if response.status_code != 200:
                got.problem = f"status {response.status_code}: {(await response.aread())[:300]!r}"
                return got
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                ended = line == "data: [DONE]"
                if ended:
                    break
                event = msgspec.json.decode(line[6:])
                if "error" in event:
                    got.problem, got.told = str(event["error"]), True
                    return got
                got.at.append(time.monotonic())
                got.text += "".join(choice["text"] for choice in event["choices"])
                await reached(len(got.at))
    if not ended and not got.problem:
        got.problem = f"it ended after {len(got.at)} events, without its end"
    return got


@contextmanager
def _told(got: Streamed) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        got.problem = f"{type(error).__name__}: {error}"


def spread(values: list[float], *figures: Literal["median", "p99", "max"]) -> dict[str, float | None]:
    """These figures of the values; None, of none."""
    if not values:
        return dict.fromkeys(figures)
    ordered = sorted(values)
    found = {
        "median": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "max": ordered[-1],
    }
    return {figure: round(found[figure], 6) for figure in figures}
