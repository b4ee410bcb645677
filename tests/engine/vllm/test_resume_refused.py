"""What is not resumed, each by name, and that a resume which fails harms nobody else."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import msgspec
import pytest

from tests.engine.vllm.harness import EngineProcess
from tests.engine.vllm.resume_rows import CHAT, COMPLETIONS, ROWS, WHOLE_ROWS, Row
from tests.engine.vllm.resuming import Answer, Client, Pair, difference
from tests.support.processes import until
from workers.resume import ResumeHead, encode_resume

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

BY_NAME = {row.name: row for row in (*ROWS, *WHOLE_ROWS)}


def cut(pair: Pair, row: Row, units: int) -> Client:
    """A client that has these many units of the row's answer."""
    whole = Client(row.path, row.request(), root=f"root-{row.name}").ask(pair.first)
    assert whole.status == 200, whole.raw
    client = Client(row.path, row.request(), root=f"root-{row.name}")
    client.read(*whole.units[:units])
    return client


def altered(client: Client, **changes: Any) -> bytes:
    """The client's resume with other notes, counts or body."""
    log = client.splitter.log
    notes = changes.pop("notes", bytes(log.rest))
    body = changes.pop("body", client.body)
    head = ResumeHead(events=log.events, crc=log.crc.decode(), notes=len(notes))
    return encode_resume(msgspec.structs.replace(head, **changes), notes, body)


def words(client: Client) -> dict[str, str]:
    """Of the first note."""
    return dict(word.split("=", 1) for word in client.splitter.log.rest.decode().splitlines()[0].split())


def refused(answer: Answer, saying: str) -> None:
    assert answer.status == 409, answer.raw
    assert json.loads(answer.raw)["error"]["code"] == "resume_unsupported"
    assert saying in answer.error


@pytest.fixture(scope="module")
def chat(resume_pair: Pair) -> Client:
    """Cut after four units of a chat completion."""
    return cut(resume_pair, BY_NAME["chat"], 4)


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        ({"crc": "1"}, "the replay gave"),
        ({"events": 2}, "the replay gave"),
        (
            {"body": b'{"messages":[{"role":"user","content":"Hello"}],"model":"smollm2","stream":true}'},
            "another one here",
        ),
        ({"more": "0:49152"}, "a token 49152"),
        ({"more": "0:9999999999"}, "a token 9999999999"),
        ({"more": "1:5"}, "a choice 1"),
        ({"more": "0:2|0:5"}, "after the end"),
        ({"more": "0:"}, "gives nothing"),
        ({"more": "l=AAAA"}, "not asked for"),
        ({"more": "x=some_reason"}, "some_reason"),
    ],
    ids=["crc", "count", "prompt", "vocabulary", "large", "choice", "after_the_end", "no_token", "logprobs", "marked"],
)
def test_notes_that_do_not_fit_are_refused(
    resume_pair: Pair, chat: Client, changes: dict[str, Any], saying: str
) -> None:
    changes = dict(changes)
    if more := changes.pop("more", ""):
        changes["notes"] = bytes(chat.splitter.log.rest) + more.encode() + b"\n"
    refused(chat.resume(resume_pair.second, altered(chat, **changes)), saying)


def test_no_more_of_a_prompt_is_cached_than_there_is(resume_pair: Pair, chat: Client) -> None:
    notes = bytes(chat.splitter.log.rest)
    more = re.sub(rb" p=[0-9]+", b" p=100000", notes)
    assert more != notes
    refused(chat.resume(resume_pair.second, altered(chat, notes=more)), "more cached tokens")
    assert chat.resume(resume_pair.second).status == 200


def test_engines_with_other_settings_refuse(other_pair: Pair, chat: Client) -> None:
    refused(chat.resume(other_pair.second), "another one here")


def test_a_grammar_that_does_not_take_the_tokens_refuses(resume_pair: Pair) -> None:
    client = cut(resume_pair, BY_NAME["whole_json_schema"], 1)
    notes = f"g=0:5,6,7 k={words(client)['k']}\n".encode()
    refused(client.resume(resume_pair.second, altered(client, notes=notes)), "does not take its tokens")
    assert client.ask(resume_pair.second).status == 200


@pytest.mark.parametrize(
    ("said", "saying"),
    [("", "lack logprobs"), (" l=AAAA", "cannot be read"), (" l=!", "cannot be read"), (None, "of other tokens")],
    ids=["none", "short", "no_base64", "of_others"],
)
def test_logprobs_that_do_not_fit_are_refused(resume_pair: Pair, said: str | None, saying: str) -> None:
    client = cut(resume_pair, BY_NAME["logprobs"], 1)
    noted = words(client)
    notes = f"k={noted['k']} " + (f"g=0:5 l={noted['l']}\n" if said is None else f"g={noted['g']}{said}\n")
    refused(client.resume(resume_pair.second, altered(client, notes=notes.encode())), saying)


CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 4}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (Row("multi_prompt", COMPLETIONS, {"prompt": ["One", "Two"], "max_tokens": 4}), "several_generations"),
        (
            Row("echo_logprobs", COMPLETIONS, {"prompt": "One", "echo": True, "logprobs": 1, "max_tokens": 4}),
            "prompt_logprobs",
        ),
        (Row("prompt_logprobs", CHAT, {**CHAT_BODY, "prompt_logprobs": 1}, stream=False), "prompt_logprobs"),
        (Row("logprobs_of_ids", CHAT, {**CHAT_BODY, "logprobs": True, "logprob_token_ids": [5, 6]}), "logprobs_of_all"),
        (Row("beam_search", CHAT, {**CHAT_BODY, "use_beam_search": True, "n": 2}, stream=False), "several_generations"),
    ],
    ids=lambda value: value.name if isinstance(value, Row) else "",
)
def test_what_cannot_be_resumed_says_so_and_is_refused(resume_pair: Pair, row: Row, reason: str) -> None:
    client = Client(row.path, row.request(), root="r")
    answer = client.ask(resume_pair.first)
    assert answer.status == 200, answer.raw
    if row.stream:
        client.read(answer.units[0])
        assert client.splitter.log.unresumable == f"engine:{reason}"
        said = answer.units[0].split(b"\n")[0].partition(b"c=")[2].partition(b" ")[2]
        refused(client.resume(resume_pair.second, altered(client, notes=said + b"\n")), reason)
        notes = said.replace(b" x=" + reason.encode(), b"") + b"\n0:5\n"
    else:
        notes = b"g=0:5 t=1\n"
    # Whatever the notes lack, the engine knows it itself.
    assert client.resume(resume_pair.second, altered(client, notes=notes)).status == 409


def test_others_do_not_notice_resumes_that_fail(resume_pair: Pair, chat: Client) -> None:
    row = Row("beside", CHAT, {**CHAT_BODY, "max_tokens": 40, "ignore_eos": True})
    wanted = Client(row.path, row.request(), root="beside")
    wanted.read(wanted.ask(resume_pair.first).raw)
    beside = Client(row.path, row.request(), root="beside")
    reading = threading.Thread(target=lambda: beside.read(beside.ask(resume_pair.second).raw))
    reading.start()
    try:
        for more in (b"0:49152", b"7:5", b"0:2|0:5", b"0:"):
            notes = bytes(chat.splitter.log.rest) + more + b"\n"
            assert chat.resume(resume_pair.second, altered(chat, notes=notes)).status == 409
    finally:
        reading.join()
    beside.seen, wanted.seen = (_undated(client.seen, wanted.seen) for client in (beside, wanted))
    assert not difference(beside.seen, wanted.seen)
    until(lambda: not resume_pair.second.status()["busy"], saying="nothing is left of the resumes")


def _undated(raw: bytes, of: bytes) -> bytes:
    created = json.loads(of.split(b"\n\n")[0].removeprefix(b"data: "))["created"]
    events = [json.loads(event[6:]) for event in raw.split(b"\n\n") if event.startswith(b"data: {")]
    return b"".join(b"data: " + json.dumps(event | {"created": created}).encode() + b"\n\n" for event in events)


def test_a_client_cannot_bring_tokens_along(resume_pair: Pair) -> None:
    row = BY_NAME["chat"]
    plain = Client(row.path, {**row.request(), "stream": False}, root="p")
    smuggling = Client(row.path, {**json.loads(plain.body), "vllm_xargs": {"hotspare_resumed": [5, 6]}}, root="p")
    said = [_text(client, resume_pair.first) for client in (plain, smuggling)]
    assert said[0] == said[1]


def _text(client: Client, engine: EngineProcess) -> str:
    answer = engine.client.post(client.path, content=client.body, headers={"content-type": "application/json"})
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize(
    "seam",
    [
        "vllm.v1.core.sched.scheduler:Scheduler._handle_blocked_waiting_request",
        "vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
        "vllm.entrypoints.openai.responses.utils:random_uuid",
    ],
)
def test_a_missing_seam_is_named(resume_pair: Pair, seam: str) -> None:
    said = resume_pair.first.control("without", seam).json()["answer"]
    module, _, attribute = seam.partition(":")
    assert "does not fit vllm 0.32" in said
    assert module in said
    assert attribute in said or "makes its ids in another way" in said
