"""An answer whose engine is killed is gone on with by the one that is promoted: real processes, no gateway."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.openai.units import UnitSplitter
from tests.process.workers.slow_engine import OBEDIENT, hurry
from tests.support.processes import Process, running, until_in_line, until_role
from workers.contract import HEADER_REQUEST_ID, HEADER_STREAM, HEADER_WORKER_TOKEN, Role
from workers.ports import PortReservation
from workers.resume import RESUME_CONTENT_TYPE, ResumeHead, decode_framed, encode_resume

pytestmark = pytest.mark.process

HEADERS = {HEADER_REQUEST_ID: "r1", HEADER_STREAM: "1", HEADER_WORKER_TOKEN: "right"}
BODIES = {
    "/v1/chat/completions": b'{"messages":[{"role":"user","content":"tell me"}],"max_tokens":1000,"stream":true}',
    "/v1/responses": b'{"input":"tell me","max_output_tokens":1000,"stream":true}',
}


class Pair:
    """Two engines of a pod with a worker token, and no memory service."""

    def __init__(self, run_dir: Path, ports: list[int], stack: contextlib.ExitStack) -> None:
        self._run_dir, self._stack = run_dir, stack
        self._serving, self.admin = ports[0], {"a": ports[1], "b": ports[2]}

    def engine(self, name: str) -> Process:
        env = {
            "HOTSPARE_RUN_DIR": str(self._run_dir),
            "HOTSPARE_ENGINE": OBEDIENT,
            "HOTSPARE_GMS": "false",
            "HOTSPARE_SERVING_PORT": str(self._serving),
            "HOTSPARE_SIM_TOKEN_SECONDS": "0.02",
            "HOTSPARE_WORKER_TOKEN": "right",
        }
        arguments = ["engine", "--engine-id", name, "--admin-port", str(self.admin[name])]
        return self._stack.enter_context(
            running(f"engine-{name}", "workers", *arguments, log_dir=self._run_dir, env=env)
        )

    @contextlib.contextmanager
    def post(self, path: str, body: bytes, **headers: str) -> Iterator[httpx.Response]:
        sent = {"content-type": "application/json", **HEADERS, **headers}
        url = f"http://127.0.0.1:{self._serving}{path}"
        with httpx.stream("POST", url, content=body, headers=sent, timeout=20, trust_env=False) as answer:
            yield answer

    def until_killed(self, path: str, body: bytes, *, notes: int) -> tuple[UnitSplitter, bytes]:
        """Read an answer until it has so many notes, kill its engine, and read what still comes: the splitter that has
        the notes, and what was delivered. What is asked for later comes soon."""
        active = until_role(self.admin["a"], Role.ACTIVE)
        splitter, delivered, killed = UnitSplitter(), b"", False
        with self.post(path, body) as answer, contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
            for part in answer.iter_raw():
                delivered += splitter.feed(part)
                if not killed and splitter.log.rest.count(b"\n") >= notes:
                    os.kill(active["pid"], signal.SIGKILL)
                    killed = True
        hurry(self._run_dir / "pod-0", self.admin)
        return splitter, delivered


def resume_of(splitter: UnitSplitter, body: bytes) -> bytes:
    log = splitter.log
    head = ResumeHead(events=log.events, crc=log.crc.decode(), notes=len(log.rest))
    return encode_resume(head, log.rest, body)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(PortReservation("127.0.0.1")).port for _ in range(3)]
        made = Pair(tmp_path, ports, stack)
        made.engine("a")
        until_role(made.admin["a"], Role.ACTIVE)
        made.engine("b")
        until_in_line(made.admin["b"])
        yield made


def metric(port: int, line: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=20, trust_env=False).text
    return next((float(found.split()[-1]) for found in text.splitlines() if found.startswith(line)), 0.0)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_outlives_its_engine(pair: Pair, path: str) -> None:
    body = BODIES[path]
    splitter, delivered = pair.until_killed(path, body, notes=10)
    assert 0 < delivered.count(b"\n\n") < 1000
    until_role(pair.admin["b"], Role.ACTIVE)
    raw = resume_of(splitter, body)
    with pair.post(path, raw, **{"content-type": RESUME_CONTENT_TYPE, HEADER_WORKER_TOKEN: "wrong"}) as answer:
        assert answer.status_code == 401
    with pair.post(path, raw, **{"content-type": RESUME_CONTENT_TYPE}) as answer:
        assert answer.status_code == 200
        resumed = delivered + splitter.feed(b"".join(answer.iter_raw()))
    with pair.post(path, body) as answer:
        uncut = UnitSplitter().feed(b"".join(answer.iter_raw()))
    assert timeless(resumed) == timeless(uncut)
    assert len(times(resumed)) == 1
    assert metric(pair.admin["b"], 'hotspare_engine_resumes_total{outcome="taken"}') == 1
    assert metric(pair.admin["b"], "hotspare_engine_replayed_tokens_total") >= 9


def times(answer: bytes) -> set[bytes]:
    return {part.split(b",")[0] for key in (b'"created":', b'"created_at":') for part in answer.split(key)[1:]}


def timeless(answer: bytes) -> bytes:
    """Without its moment, and without what a cache had of its prompt: of one that is asked again, more."""
    for moment in times(answer):
        answer = answer.replace(moment, b"-")
    answer = re.sub(rb'"prompt_tokens_details":\{[^}]*\},', b"", answer)
    return re.sub(rb'"cached_tokens":\d+', b"-", answer)


def test_a_whole_answer_outlives_its_engine(pair: Pair) -> None:
    path = "/v1/chat/completions"
    body = BODIES[path].replace(b'"stream":true', b'"stream":false')
    splitter, _ = pair.until_killed(path, body, notes=3)
    assert splitter.log.rest
    until_role(pair.admin["b"], Role.ACTIVE)
    documents = []
    for raw, kind in ((resume_of(splitter, body), RESUME_CONTENT_TYPE), (body, "application/json")):
        with pair.post(path, raw, **{"content-type": kind}) as answer:
            assert answer.status_code == 200
            framed = b"".join(answer.iter_raw())
        documents.append(decode_framed(framed[framed.index(b"event: body\n") :])[2])
    assert timeless(documents[0]) == timeless(documents[1])
