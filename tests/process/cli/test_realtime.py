"""A realtime session over pods that are processes: its engine is killed in the middle of a response."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from openai import OpenAI

from tests.support.machine import StartUp

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:connect:DeprecationWarning"),  # how the openai package opens a WebSocket
]
SAID: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Count the stars."}]}


def until(connection: Any, kind: str) -> Any:
    for event in connection:
        assert event.type != "error", event
        if event.type == kind:
            return event
    raise AssertionError(f"the session ended before {kind}")


def test_a_session_outlives_the_engine_that_answers_it(start_up: StartUp) -> None:
    machine = start_up("--pods", "1", HOTSPARE_SIM_TOKEN_SECONDS="0.02")
    url = machine.until_complete()
    (pod,) = machine.settled()["pods"]
    (active,) = (engine["pid"] for engine in pod["engines"].values() if engine["role"] == "ACTIVE")
    with (
        OpenAI(base_url=f"{url}/v1", api_key="none", timeout=20) as client,
        client.realtime.connect(model="sim") as connection,
    ):
        connection.conversation.item.create(item=SAID)
        connection.response.create(response={"max_output_tokens": 400})
        until(connection, "response.output_text.delta")
        os.kill(active, signal.SIGKILL)
        cut = until(connection, "response.done").response
        text = cut.output[0].content[0].text
        assert text
        if cut.status == "failed":  # nothing is lost but the rest of this response
            assert cut.status_details.error.code == "worker_lost"
        else:  # it was resumed
            assert (cut.status, cut.usage.output_tokens) == ("incomplete", 400)
        connection.response.create(response={"max_output_tokens": 5})
        done = until(connection, "response.done").response
        assert (done.status, done.status_details.reason) == ("incomplete", "max_output_tokens")
        assert done.usage.output_tokens == 5
        assert done.usage.input_tokens > 0
