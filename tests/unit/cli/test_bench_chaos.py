"""What ``hotspare bench chaos`` plans, how it judges answers, and what it makes of silences."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest

from app.cli.bench.chaos.answers import Fate, Got, SimAnswers
from app.cli.bench.chaos.figures import Outcome, Pause, percentile, report, stalls
from app.cli.bench.chaos.learned import LearnedAnswers
from app.cli.bench.chaos.plan import KINDS, MANNERS, ROUTES, Manner, Question, kills, questions
from app.openai.errors import worker_lost
from app.openai.sse import KEEPALIVE, error_event
from tests.support.asgi import ask
from workers.engines.sim import SimEngine
from workers.settings import EngineSettings, SimSettings

KNOWN = SimAnswers(model="sim", seed=7, weights_bytes=65536)


def question(path: str = "/v1/completions", manner: Manner = Manner.STREAM, **more: Any) -> Question:
    return Question(path=path, manner=manner, prompts=("tell me",), tokens=9, **more)


def test_a_seed_plans_the_same_again_and_another_one_does_not() -> None:
    first, again, other = (kills(seed=seed, seconds=120, every=1, pods=2) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 119
    assert {kill.fault for kill in first} == set(KINDS)
    assert all(kill.at < 120 and sorted(kill.pods) == ["pod-0", "pod-1"] for kill in first)
    asked = [list(itertools.islice(questions(seed=1, client=client), 300)) for client in (0, 0, 1)]
    assert asked[0] == asked[1] != asked[2]
    assert {one.manner for one in asked[0]} == set(MANNERS)
    assert {one.path for one in asked[0]} == {*ROUTES, "/v1/realtime"}


@pytest.fixture(scope="module")
def said() -> dict[tuple[str, Manner, bool], bytes]:
    """What a real sim engine says to each form of question."""
    import asyncio
    from pathlib import Path

    async def collect() -> dict[tuple[str, Manner, bool], bytes]:
        sim = SimSettings(seed=7, ttft_seconds=0, token_seconds=0, weights_bytes=65536, kv_bytes=65536)
        engine = SimEngine(EngineSettings(engine="sim", gms=False, capacity=8, sim=sim), None, Path("/nonexistent"))
        try:
            await engine.initialize()
            await engine.wake(epoch=1)
            found = {}
            for path, manner, stop in itertools.product(ROUTES, (Manner.STREAM, Manner.WHOLE), (True, False)):
                body = msgspec.json.encode(KNOWN.body(question(path, manner, stop=stop, usage=stop)))
                found[path, manner, stop] = (await ask(engine.app(), path, body)).body
            return found
        finally:
            await engine.shutdown()

    return asyncio.run(collect())


def judged(asked: Question, body: bytes, **got: Any) -> Fate:
    sent = 0.0 if "sent_at" not in got else got.pop("sent_at")
    answer = Got(**{"status": 200, "body": body, "sent_at": sent, "done_at": 4e9, **got})
    return KNOWN.judge(asked, KNOWN.body(asked), answer)[0]


def test_a_cache_may_have_had_any_part_of_the_prompt_but_not_more(said: dict[tuple[str, Manner, bool], bytes]) -> None:
    asked = question("/v1/chat/completions", Manner.WHOLE, stop=True, usage=True)
    body = said["/v1/chat/completions", Manner.WHOLE, True]
    whole = msgspec.json.decode(body)["usage"]["prompt_tokens"]
    assert b'"cached_tokens":16}' in body
    for cached, fate in ((1, Fate.GOOD), (whole, Fate.GOOD), (whole + 1, Fate.WRONG)):
        assert judged(asked, body.replace(b'"cached_tokens":16}', b'"cached_tokens":%d}' % cached)) is fate


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("path", ROUTES)
def test_an_engines_own_answer_is_good_and_any_other_is_not(
    said: dict[tuple[str, Manner, bool], bytes], path: str, stop: bool
) -> None:
    for manner in (Manner.STREAM, Manner.WHOLE):
        asked, body = question(path, manner, stop=stop, usage=stop), said[path, manner, stop]
        assert judged(asked, body) is Fate.GOOD
        assert judged(asked, body, broken="reset") is Fate.LOST
        assert manner is Manner.WHOLE or judged(asked, body[: body.rindex(b"data: ")]) is Fate.LOST
        for at in range(10, len(body), 97):
            assert judged(asked, body[:at], broken="reset") is Fate.LOST
            if body[at : at + 1].isalnum():
                changed = body[:at] + b"#" + body[at + 1 :]
                assert judged(asked, changed) is Fate.WRONG, body[at - 9 : at + 9]


def test_events_twice_or_missing_are_wrong(said: dict[tuple[str, Manner, bool], bytes]) -> None:
    asked, body = question(), said["/v1/completions", Manner.STREAM, False]
    events = body.split(b"\n\n")
    assert judged(asked, b"\n\n".join(events[:3] + events[2:])) is Fate.WRONG
    assert judged(asked, b"\n\n".join(events[:3] + events[4:])) is Fate.WRONG
    assert judged(asked, body + b"data: more\n\n") is Fate.WRONG
    assert judged(asked, body.replace(b"\n\n", b"\n\n" + KEEPALIVE, 3)) is Fate.GOOD


def test_ids_and_times_are_one_throughout(said: dict[tuple[str, Manner, bool], bytes]) -> None:
    asked, body = question(), said["/v1/completions", Manner.STREAM, False]
    half = len(body) // 2
    name = body.split(b'"id":"cmpl-')[1].split(b'"')[0]
    assert judged(asked, body[:half] + body[half:].replace(name, b"0" * 32)) is Fate.WRONG
    assert judged(asked, body, sent_at=3.9e9) is Fate.WRONG  # made before it was asked for


def test_errors_after_the_head_are_losses_and_refusals_before_it_are_none(
    said: dict[tuple[str, Manner, bool], bytes],
) -> None:
    for path, named in (("/v1/completions", False), ("/v1/responses", True)):
        body = said[path, Manner.STREAM, False]
        cut = body[: body.index(b"\n\n", 900) + 2] + error_event(worker_lost("gone"), named=named)
        asked = question(path)
        assert judged(asked, cut) is Fate.LOST
        assert judged(asked, error_event(worker_lost("gone"), named=named)) is Fate.LOST
    refusal = b'{"error":{"message":"m","type":"t","param":null,"code":"no_worker"}}'
    assert judged(question(), refusal, status=503, retry_after=True) is Fate.REFUSED
    assert judged(question(), refusal, status=503) is Fate.LOST
    assert judged(question(), b"", status=0, broken="refused") is Fate.LOST
    assert judged(question(), b"", status=500) is Fate.LOST


def test_who_leaves_must_have_heard_the_right_thing(said: dict[tuple[str, Manner, bool], bytes]) -> None:
    asked, body = question(manner=Manner.CANCEL), said["/v1/completions", Manner.STREAM, False]
    assert judged(asked, body[:500], left=True, broken="the client left") is Fate.LEFT
    assert judged(asked, body[:500] + b"#", left=True, broken="the client left") is Fate.WRONG


@pytest.mark.parametrize("path", ROUTES)
def test_learned_answers_compare_texts_however_they_are_cut(
    said: dict[tuple[str, Manner, bool], bytes], path: str
) -> None:
    learned = LearnedAnswers(model="sim")
    whole, streamed = said[path, Manner.WHOLE, False], said[path, Manner.STREAM, False]
    assert learned.learn(question(path, Manner.WHOLE), Got(status=200, body=whole))

    def fate(body: bytes, manner: Manner = Manner.STREAM, **more: Any) -> Fate:
        return learned.judge(question(path, manner), {}, Got(status=200, body=body, **more))[0]

    assert fate(whole, Manner.WHOLE) is Fate.GOOD
    assert fate(streamed) is Fate.GOOD
    assert fate(streamed[: len(streamed) // 2]) is Fate.LOST
    assert fate(streamed[: len(streamed) // 2], left=True) is Fate.LEFT
    named = path in ("/v1/responses", "/v1/messages")
    assert (
        fate(streamed[:900].rpartition(b"\n\n")[0] + b"\n\n" + error_event(worker_lost("x"), named=named)) is Fate.LOST
    )
    word = KNOWN.text("x", 1)
    text = json.dumps(f" {word}#", ensure_ascii=False).encode()
    key = {"/v1/chat/completions": b'"content":', "/v1/completions": b'"text":'}.get(
        path, b'"delta":' if path == "/v1/responses" else b'"text":'
    )
    at = streamed.index(key + b'" ')
    end = streamed.index(b'"', at + len(key) + 1) + 1
    assert fate(streamed[:at] + key + text + streamed[end:]) is Fate.WRONG


def test_a_silence_belongs_to_the_first_kill_that_falls_into_it() -> None:
    done = [(10.0, "stop-active"), (11.0, "kill-active"), (12.0, "kill-gms")]
    pauses = [
        Pause(9.9, 13.0),
        Pause(10.8, 13.3),
        Pause(10.9, 11.2),
        Pause(11.5, 11.6),
        Pause(11.7, 11.97),
        Pause(15.0, 16.0),
        Pause(8.0, 10.5),
    ]
    found = stalls(pauses, done)
    assert {kind: [round(value, 2) for value in values] for kind, values in found.items()} == {
        "stop-active": [3.1, 2.5, 2.5],  # one was sent to an engine that was stopped already, one was resumed there
        "kill-active": [0.3],
        "kill-gms": [0.27],  # a kill is noted a moment after it happened
    }


def test_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(range(1, 101)), 0.99) == 99
    assert percentile([1.0], 0.99) == 1.0


def test_the_report_counts_what_became_of_each() -> None:
    outcomes = [
        Outcome(client=1, number=number, question=question(), fate=fate, detail=f"{fate}!", pauses=[Pause(1.0, 1.5)])
        for number, fate in enumerate((Fate.GOOD, Fate.LOST, Fate.WRONG, Fate.REFUSED, Fate.LEFT))
    ]
    made = report(outcomes, [(1.2, "kill-active")], skipped=1, late=[0.001, 0.002], plan={"seed": 3})
    assert (made["seed"], made["requests"], made["good"], made["left"], made["lost"], made["wrong"]) == (
        3,
        5,
        1,
        1,
        1,
        1,
    )
    assert made["refused"] == {"refused!": 1}
    assert made["kills"] == {"all": 1, "kill-active": 1}
    assert made["stall_seconds"] == {"kill-active": {"count": 5, "p50": 0.5, "p99": 0.5, "max": 0.5}}
    assert made["late_seconds"]["max"] == 0.002
    assert [problem.split(":")[0] for problem in made["problems"]] == ["wrong", "lost"]
