"""How much load the load tests' generator makes on one core, and what other clients would make (docs/load-tests.md).

A server of its own, which answers at once, stands on another core. First Locust's two clients and ours send one request
after the other from sixteen greenlets, as fast as they can; then the generator itself, as ``hotspare bench load``
starts it, sends at rising rates until it is late. Needs two cores with nothing else to do.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

EVENT: Final = b'data: {"id":"chatcmpl-1","created":1,"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
DONE: Final = b"data: [DONE]\n\n"
WHOLE: Final = (
    b'{"id":"chatcmpl-1","created":1,"choices":[{"message":{"content":"word"}}],"usage":{"completion_tokens":1}}'
)
CLIENTS: Final = ("HttpUser", "FastHttpUser", "ours")
GREENLETS: Final = 16
SECONDS: Final = 5.0
TOKENS: Final = 100
LATE_SECONDS: Final = 0.05


class Server(asyncio.Protocol):
    """Answers as many events as ``max_tokens`` says, each in a write of its own, if the request streams."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if not found or len(rest) < length:
            return
        self._data = rest[length:]
        if b'"stream":true' not in rest.replace(b" ", b""):
            about = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(WHOLE)
            self._transport.write(b"HTTP/1.1 200 OK\r\n" + about + WHOLE)
            return
        about = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(b"HTTP/1.1 200 OK\r\n" + about)
        self._events(int(rest.replace(b" ", b"").partition(b'"max_tokens":')[2].split(b",")[0].rstrip(b"}")))

    def _events(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if not left:
            self._transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(DONE), DONE))
            return
        self._transport.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
        asyncio.get_running_loop().call_soon(self._events, left - 1)


async def serve() -> None:
    """Until whoever started it hangs up."""
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


def drive(client: str, url: str, streams: bool) -> None:
    """Closed loop; prints what a request costs of this process's own time, and how many a whole core would make."""
    import gevent
    import locust  # noqa: F401 - it patches what must be patched, first of all

    body = {"model": "m", "messages": [], "stream": streams, "max_tokens": TOKENS}
    ask = _client(client, url, body)
    ask()
    counted = 0

    def loop() -> None:
        nonlocal counted
        while True:
            assert ask() == (TOKENS + 1 if streams else 0)
            counted += 1

    greenlets = [gevent.spawn(loop) for _ in range(GREENLETS)]
    began, processor = time.monotonic(), time.process_time()
    gevent.sleep(SECONDS)
    seconds = time.monotonic() - began
    used = time.process_time() - processor
    gevent.killall(greenlets)
    events = f", {counted * (TOKENS + 1) / used:.0f} events/s" if streams else ""
    print(
        f"{used / counted * 1e6:.0f} us a request, so {counted / used:.0f} requests/s{events} of a core; "
        f"it had {used / seconds:.0%} of one and made {counted / seconds:.0f} requests/s"
    )


def _client(client: str, url: str, body: dict[str, object]) -> Callable[[], int]:
    """A function that sends one request, reads its answer event by event, and returns how many there were."""
    import msgspec

    path, streams = "/v1/chat/completions", bool(body["stream"])
    if client == "ours":
        from app.cli.bench.chaos.plan import Manner, Question
        from app.cli.bench.loadtest.generator.client import Client, base_of
        from app.cli.bench.loadtest.hearing import Hearing

        ours = Client(base_of(url), {})
        manner = Manner.STREAM if streams else Manner.WHOLE
        question = Question(path=path, manner=manner, prompts=("",), tokens=TOKENS)

        def ask() -> int:
            hearing = Hearing(time.monotonic())
            response = ours.ask(question, msgspec.json.encode(body), hearing, seconds=60)
            assert not response.broken, response.broken
            return response.body.count(b"\n\n")

        return ask
    from locust.env import Environment

    environment = Environment()
    if client == "FastHttpUser":
        from locust import FastHttpUser

        class Fast(FastHttpUser):
            host = url

        fast = Fast(environment).client

        def ask_fast() -> int:
            if not streams:
                return fast.post(path, json=body).content.count(b"\n\n")
            return sum(line.startswith("data: ") for line in fast.iter_lines(path, method="POST", json=body))

        return ask_fast
    from locust import HttpUser

    class Plain(HttpUser):
        host = url

    plain = Plain(environment).client

    def ask_plain() -> int:
        with plain.post(path, json=body, stream=True, catch_response=True) as answer:
            if not streams:
                return answer.content.count(b"\n\n")
            return sum(1 for line in answer.iter_lines(chunk_size=None) if line.startswith(b"data: "))

    return ask_plain


async def rising(url: str, kind: str, rates: list[int], tokens: int) -> None:
    """Open loop: the generator as it is, at one rate after the other, until it is late."""
    from app.cli.bench.chaos.answers import Fate
    from app.cli.bench.chaos.plan import Question
    from app.cli.bench.loadtest.figures import Figures
    from app.cli.bench.loadtest.process import generating
    from app.cli.bench.loadtest.records import Answered
    from app.cli.bench.loadtest.scenario import parse

    class Content:
        """Looks at nothing: that is another process's work, and would take the server's core."""

        how = "nothing"

        def judge(self, question: Question, answer: Answered) -> tuple[Fate, str]:
            return (Fate.GOOD, "") if answer.status == 200 and not answer.broken else (Fate.LOST, answer.broken)

    for rate in rates:
        scenario = parse(
            {"phases": [{"seconds": SECONDS, "rate": rate}], "mix": {kind: 1}, "answer_tokens": tokens}, name="it"
        )
        figures = Figures(scenario)
        with tempfile.TemporaryDirectory() as folder:
            async with generating(scenario, Path(folder), host=url, model="m") as generator:
                end = await generator.follow(scenario, Content(), figures)
        report = figures.report(end, [], about={})
        late = report["generator"]["late_seconds"]
        events = rate * (tokens + 1) if kind == "chat-stream" else 0
        cost = end.processor_seconds / end.sent
        print(
            f"{kind}, {rate} requests/s, {events:.0f} events/s: late p50 {late['p50'] * 1000:.1f} ms, "
            f"p99 {late['p99'] * 1000:.1f} ms, {cost * 1e6:.0f} us a request, "
            f"lost {report['lost']}",
            flush=True,
        )
        if late["p99"] > LATE_SECONDS:
            return


def main() -> None:
    this = [sys.executable, __file__]
    server = subprocess.Popen([*this, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(server.pid, {cores[-1]})
        for client in CLIENTS:
            for streams in ("whole", "streams"):
                done = subprocess.run(
                    [*this, "drive", client, url, streams], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
                )
                print(f"{client}, {streams}: {done.stdout.strip()}", flush=True)
        asyncio.run(rising(url, "chat", [100, 200, 400, 600, 800, 1000, 1500, 2000, 3000], 1))
        asyncio.run(rising(url, "chat-stream", [20, 50, 100, 150, 200, 300, 400, 600], TOKENS))
    finally:
        server.stdin.close()
        server.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        import uvloop

        uvloop.run(serve())
    elif sys.argv[1:2] == ["drive"]:
        drive(sys.argv[2], sys.argv[3], sys.argv[4] == "streams")
    else:
        main()
