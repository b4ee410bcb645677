"""The promise, whole: an OpenAI client, the gateway, a pod of two real vLLM engines, and a kill."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from tests.support.machine import Machine
from tests.support.processes import MS
from workers.contract import Role

pytestmark = [pytest.mark.engine, pytest.mark.process, pytest.mark.sdk, pytest.mark.timeout(240)]

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("end-to-end")
    machine = Machine(folder / "run", folder, ("--engine", "vllm"), {}, deadline_seconds=120_000 * MS)
    yield machine
    machine.end()


def ask(client: OpenAI) -> str:
    answer = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=24
    )
    return answer.choices[0].message.content or ""


def stream(client: OpenAI) -> str:
    events = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=24,
        stream=True,
    )
    return "".join(event.choices[0].delta.content or "" for event in events)


def ask_in_other_forms(url: str, client: OpenAI, said: str) -> None:
    """Every other route that this model serves, once through the gateway."""
    question: Any = [{"role": "user", "content": QUESTION}]
    response = client.responses.create(model="smollm2", input=question, temperature=0, max_output_tokens=24)
    assert response.output_text == said
    assert client.responses.create(model="smollm2", input="Hi", max_output_tokens=4, store=True).output
    events = list(
        client.responses.create(model="smollm2", input=question, temperature=0, max_output_tokens=24, stream=True)
    )
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == said
    assert events[-1].type in ("response.completed", "response.incomplete")
    for lost in ({"previous_response_id": response.id}, {"background": True}):
        with pytest.raises(BadRequestError) as refused:
            client.responses.create(model="smollm2", input="Hi", **lost)  # type: ignore[call-overload]
        assert refused.value.code == "unsupported_stateful"

    with httpx.Client(base_url=url, timeout=60, trust_env=False) as plain:
        body = {"model": "smollm2", "messages": question, "max_tokens": 24, "temperature": 0}
        message = plain.post("/v1/messages", json=body).json()
        assert message["content"][0]["text"] == said
        stream = plain.post("/v1/messages", json=body | {"stream": True}).text
        assert "event: message_stop" in stream
        assert "worker_lost" not in stream
        counted = plain.post("/v1/messages/count_tokens", json={"model": "smollm2", "messages": question}).json()
        assert counted["input_tokens"] == message["usage"]["input_tokens"]
        ids = plain.post("/tokenize", json={"model": "smollm2", "prompt": QUESTION}).json()["tokens"]
        assert plain.post("/detokenize", json={"model": "smollm2", "tokens": ids}).json() == {"prompt": QUESTION}
        for path in ("/v1/embeddings", "/rerank", "/score", "/classify", "/pooling"):
            # Routes of models that this one is not: an error in the envelope, and no 5xx that looks like a failure.
            answer = plain.post(path, json={"model": "smollm2", "input": "x"})
            assert answer.status_code in (400, 404, 501), (path, answer.text)
            assert answer.json()["error"]["message"]


def roles(status: dict[str, Any]) -> dict[str, str]:
    return {name: engine["role"] for name, engine in status["pods"][0]["engines"].items()}


def test_the_next_request_after_a_kill_is_answered_by_the_other_engine(machine: Machine) -> None:
    url = machine.until_complete()
    before = machine.status_command()
    assert sorted(roles(before).values()) == [Role.ACTIVE, Role.STANDBY]
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["smollm2"]
        said = ask(client)
        assert "Paris" in said
        assert stream(client) == said
        ask_in_other_forms(url, client, said)
        machine.descendants()

        machine.fault("kill-active")
        assert ask(client) == said
        assert stream(client) == said

    machine.until_said(r"pod-0: [ab] is parked again, redundancy restored after [\d.]+ s")
    after = machine.status_command()
    swapped = {Role.ACTIVE: Role.STANDBY, Role.STANDBY: Role.ACTIVE}
    assert roles(after) == {name: swapped[Role(role)] for name, role in roles(before).items()}
    assert after["pods"][0]["engines"].keys() == {"a", "b"}
    weights = {engine["weights_role"] for engine in after["pods"][0]["engines"].values()}
    assert weights <= {"writer", "reader"}
    machine.descendants()

    machine.up.signal(signal.SIGINT)
    assert machine.up.wait(seconds=60_000 * MS) == 0
    machine.assert_all_gone()
    assert machine.left() == []
