"""Record a stream that survives a kill, and draw it: docs/img/resume.svg.

    .venv/bin/python scripts/record_resume.py docs/img/resume.svg

A gateway and one pod with real vLLM on a small model are started. One streamed chat completion is asked for twice,
greedily: in peace, and with a SIGKILL of the engine that is answering, in the middle of its answer. The picture shows
the second one at the speed at which it came; it is only drawn if both gave the same text.
"""

from __future__ import annotations

import asyncio
import html
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import msgspec

from app.cli.bench.system import BenchError, System, running_system

PROMPT: Final = "Explain in a few sentences why the sky is blue."
MAX_TOKENS: Final = 96
KILL_AFTER: Final = 40
"""Events with text before the kill."""
READY_SECONDS: Final = 300.0
REST_SECONDS: Final = 4.0
"""How long the finished picture stands before it begins anew."""

COLUMNS: Final = 84
WIDTH: Final = 760
MARGIN: Final = 24
LINE: Final = 22
TEXT_TOP: Final = 92
FIRST, SECOND, ALARM, DIM, INK, PAPER = "#7aa2f7", "#9ece6a", "#f7768e", "#565f89", "#c0caf5", "#1a1b26"


@dataclass(slots=True)
class Recording:
    """Pieces of text with the seconds since the request at which they came; ``killed_at`` on the same clock."""

    pieces: list[tuple[float, str]] = field(default_factory=list)
    killed_at: float = 0.0
    ended_at: float = 0.0

    @property
    def text(self) -> str:
        return "".join(piece for _, piece in self.pieces)

    @property
    def cut(self) -> int:
        """How many pieces came before the kill."""
        return sum(1 for at, _ in self.pieces if at <= self.killed_at)

    @property
    def pause(self) -> float:
        """The longest time without a piece around the kill."""
        return self.pieces[self.cut][0] - self.pieces[self.cut - 1][0]


async def record(system: System, *, kill: bool) -> Recording:
    """One streamed chat completion.

    Raises:
        BenchError: it did not end as it should.
    """
    body = {
        "model": (await system.engine("ACTIVE"))["models"][0],
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    recording = Recording()
    began = time.monotonic()
    async with (
        httpx.AsyncClient(timeout=60, trust_env=False) as client,
        client.stream("POST", f"{system.gateway_url}/v1/chat/completions", json=body, headers=system.headers) as answer,
    ):
        async for line in answer.aiter_lines():
            at = time.monotonic() - began
            if line == "data: [DONE]":
                recording.ended_at = at
                return recording
            if not line.startswith("data: "):
                continue
            event = msgspec.json.decode(line.removeprefix("data: "))
            if "error" in event:
                raise BenchError(f"the stream ended with {event['error']}")
            if piece := event["choices"][0]["delta"].get("content"):
                recording.pieces.append((at, piece))
                if kill and len(recording.pieces) == KILL_AFTER:
                    os.kill((await system.engine("ACTIVE"))["pid"], signal.SIGKILL)
                    recording.killed_at = time.monotonic() - began
    raise BenchError("the stream ended without its end marker")


def wrapped(recording: Recording) -> list[list[tuple[float, str, bool]]]:
    """Lines of (when, text, whether the second engine made it), broken at spaces."""
    lines: list[list[tuple[float, str, bool]]] = [[]]
    column = 0
    for number, (at, piece) in enumerate(recording.pieces):
        for part in piece.replace("\n\n", "\n").splitlines(keepends=True):
            text = part.rstrip("\n")
            if column + len(text) > COLUMNS and text.startswith(" "):
                lines.append([])
                column, text = 0, text.lstrip(" ")
            lines[-1].append((at, text, number >= recording.cut))
            column += len(text)
            if part.endswith("\n"):
                lines.append([])
                column = 0
    return lines


class Drawing:
    """The picture: everything is visible without animation, and appears in its time with it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._rules: list[str] = []
        self.parts: list[str] = []

    def appears(self, at: float) -> str:
        """The class of what appears at this second."""
        share = 100 * at / self._seconds
        name = f"t{len(self._rules)}"
        self._rules.append(
            f"@keyframes {name}{{0%,{share:.3f}%{{fill-opacity:0}}{share + 0.001:.3f}%,100%{{fill-opacity:1}}}}"
            f".{name}{{animation:{name} {self._seconds:.2f}s linear infinite}}"
        )
        return name

    def text(self, x: float, y: float, text: str, colour: str, *, at: float | None = None) -> None:
        kind = f' class="{self.appears(at)}"' if at is not None else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y}" fill="{colour}"{kind}>{html.escape(text)}</text>')

    def line(self, x: float, y: float, pieces: list[tuple[str, str, float]]) -> None:
        """One line of (text, colour, when); each piece stands where the one before ends."""
        spans = [
            f'<tspan fill="{colour}" class="{self.appears(at)}">{html.escape(text)}</tspan>'
            for text, colour, at in pieces
        ]
        self.parts.append(f'<text x="{x:.1f}" y="{y}" xml:space="preserve">{"".join(spans)}</text>')

    def bar(self, x: float, y: float, width: float, colour: str, *, at: float | None = None) -> None:
        kind = f' class="{self.appears(at)}"' if at is not None else ""
        self.parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="8" rx="2" fill="{colour}"{kind}/>')

    def svg(self, height: int, title: str) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{html.escape(title)}"><title>{html.escape(title)}</title>'
            f"<style>text{{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre}}"
            f"@media (prefers-reduced-motion:no-preference){{{''.join(self._rules)}}}</style>"
            f'<rect width="{WIDTH}" height="{height}" rx="10" fill="{PAPER}"/>{"".join(self.parts)}</svg>\n'
        )


def draw(recording: Recording) -> str:
    """The recording as an animated picture."""
    lines = wrapped(recording)
    drawing = Drawing(recording.ended_at + REST_SECONDS)
    drawing.text(MARGIN, 38, "$ curl -N http://localhost:8000/v1/chat/completions -d '{…, \"stream\": true}'", DIM)
    drawing.text(MARGIN, 62, PROMPT, INK)
    y = TEXT_TOP
    for line in lines:
        drawing.line(MARGIN, y, [(text, SECOND if second else FIRST, at) for at, text, second in line])
        y += LINE
    resumed = recording.pieces[recording.cut][0]
    scale = (WIDTH - 2 * MARGIN - 90) / recording.ended_at
    left = MARGIN + 90
    y += 14
    for name, begin, end, colour in (
        ("engine a", 0.0, recording.killed_at, FIRST),
        ("engine b", resumed, recording.ended_at, SECOND),
    ):
        drawing.text(MARGIN, y + 9, name, colour)
        drawing.bar(left, y, recording.ended_at * scale, "#24283b")
        for at, _ in recording.pieces:
            if begin <= at <= end:
                drawing.bar(left + at * scale - 1, y, 2.5, colour, at=at)
        y += 24
    drawing.bar(left + recording.killed_at * scale - 2, y - 48, 4, ALARM, at=recording.killed_at)
    said = f"SIGKILL of the engine that answers; the spare goes on {recording.pause * 1000:.0f} ms after the last token"
    drawing.text(MARGIN, y + 12, said, ALARM, at=recording.killed_at)
    same = "the same text as without the kill"
    drawing.text(MARGIN, y + 34, same, DIM, at=recording.ended_at)
    title = f"A streamed answer whose engine is killed goes on after {recording.pause * 1000:.0f} ms, unchanged"
    return drawing.svg(y + 52, title)


async def take() -> Recording:
    """Start everything, and record.

    Raises:
        BenchError: the kill changed the text.
    """
    with tempfile.TemporaryDirectory(prefix="hotspare-record-") as folder:
        async with running_system(
            Path(folder) / "run", flags=["--engine", "vllm"], env={}, timeout_seconds=READY_SECONDS
        ) as system:
            await system.until(
                lambda: system.engine("STANDBY"), saying="a spare is parked", timeout_seconds=READY_SECONDS
            )
            await record(system, kill=False)  # the first answer pays for what is made once
            peaceful = await record(system, kill=False)
            killed = await record(system, kill=True)
    if killed.text != peaceful.text:
        raise BenchError(f"the text differs:\n{peaceful.text!r}\n{killed.text!r}")
    return killed


def main(target: Path) -> None:
    recording = asyncio.run(take())
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(draw(recording))
    pause = f"a pause of {recording.pause * 1000:.0f} ms"
    print(f"{len(recording.pieces)} pieces of text, {recording.cut} before the kill, {pause}: {target}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]))
    except BenchError as error:
        sys.exit(f"record_resume: {error}")
