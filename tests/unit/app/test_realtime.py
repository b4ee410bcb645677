from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from app.openai.chat_stream import ChatChunk, decode_chunk
from app.openai.realtime_events import MAX_EVENT_ID
from app.realtime.conversation import MAX_ITEMS
from app.realtime.response import MAX_TOOL_CALLS, Failure
from app.realtime.session import (
    MAX_RESPONSES,
    Action,
    RealtimeLimits,
    RealtimeSession,
    SendEvent,
    StartResponse,
    StopResponse,
)

ServerEvent: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
SAID: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
LOST = Failure("worker_lost", "server_error", "gone")


class Driven:
    """A session, and what it has said. Every event is checked with the types of the ``openai`` package."""

    def __init__(self, *, event_bytes: int = 1 << 20, conversation_bytes: int = 1 << 20) -> None:
        limits = RealtimeLimits(event_bytes=event_bytes, conversation_bytes=conversation_bytes)
        self.session = RealtimeSession("tiny", "t0", limits)
        self.started: list[StartResponse] = []
        self.stopped: list[str] = []

    def did(self, actions: list[Action]) -> list[Any]:
        """The events among these actions."""
        events = []
        for action in actions:
            if isinstance(action, SendEvent):
                ServerEvent.validate_json(action.data)
                events.append(json.loads(action.data))
            elif isinstance(action, StartResponse):
                self.started.append(action)
            else:
                self.stopped.append(action.response_id)
        return events

    def send(self, kind: str, **more: Any) -> list[Any]:
        return self.did(self.session.frame(json.dumps({"type": kind} | more)))

    def add(self, **item: Any) -> list[Any]:
        return self.send("conversation.item.create", item=SAID | item)

    def respond(self, **config: Any) -> str:
        """Starts a response; returns its id."""
        before = len(self.started)
        events = self.send("response.create", response=config)
        assert [event["type"] for event in events] == ["response.created"]
        assert len(self.started) == before + 1
        return self.started[-1].response_id

    def say(self, response_id: str, **delta: Any) -> list[Any]:
        return self.did(self.session.chunk(response_id, piece(**delta)))

    def messages(self, number: int = -1) -> Any:
        return json.loads(self.started[number].body)["messages"]


def piece(finish_reason: str | None = None, **delta: Any) -> ChatChunk:
    choice = {"index": 0, "delta": {"role": "assistant"} | delta, "finish_reason": finish_reason}
    found = decode_chunk(json.dumps({"id": "c", "choices": [choice]}).encode())
    assert found is not None
    return found


def kinds(events: list[Any]) -> list[str]:
    return [event["type"] for event in events]


def code(events: list[Any]) -> str:
    (event,) = events
    found: str = event["error"]["code"]
    return found


# Every state and every event of the client


def idle() -> Driven:
    driven = Driven()
    driven.did(driven.session.opened())
    driven.add(id="said")
    return driven


def responding() -> Driven:
    driven = idle()
    driven.say(driven.respond(), content="a")
    return driven


def aside() -> Driven:
    driven = idle()
    driven.respond(conversation="none")
    return driven


def both() -> Driven:
    driven = responding()
    driven.respond(conversation="none")
    return driven


def draining() -> Driven:
    driven = responding()
    driven.did(driven.session.drain())
    return driven


def drained() -> Driven:
    driven = idle()
    driven.did(driven.session.drain())
    return driven


STATES = {
    "idle": idle,
    "responding": responding,
    "aside": aside,
    "both": both,
    "draining": draining,
    "drained": drained,
}
EVENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "update": ("session.update", {"session": {"type": "realtime", "instructions": "x"}}),
    "create": ("conversation.item.create", {"item": SAID}),
    "retrieve": ("conversation.item.retrieve", {"item_id": "said"}),
    "delete": ("conversation.item.delete", {"item_id": "said"}),
    "respond": ("response.create", {}),
    "respond aside": ("response.create", {"response": {"conversation": "none"}}),
    "cancel": ("response.cancel", {}),
    "nonsense": ("nonsense", {}),
}
SAME = {
    "update": ["session.updated"],
    "create": ["conversation.item.added", "conversation.item.done"],
    "retrieve": ["conversation.item.retrieved"],
    "delete": ["conversation.item.deleted"],
    "nonsense": ["unknown_event"],
}
BUSY = "conversation_already_has_active_response"
CANCELLED = ["output_text.done", "content_part.done", "conversation.item.done", "output_item.done", "done"]
CANCELLED = [name if name.startswith("conversation") else f"response.{name}" for name in CANCELLED]
DIFFERENT: dict[str, dict[str, list[str]]] = {
    "respond": {
        "idle": ["response.created"],
        "responding": [BUSY],
        "aside": ["response.created"],
        "both": [BUSY],
        "draining": ["draining"],
        "drained": ["draining"],
    },
    "respond aside": {
        "idle": ["response.created"],
        "responding": ["response.created"],
        "aside": ["response.created"],
        "both": ["response.created"],
        "draining": ["draining"],
        "drained": ["draining"],
    },
    "cancel": {
        "idle": ["response_cancel_not_active"],
        "responding": CANCELLED,
        "aside": ["response_cancel_not_active"],
        "both": CANCELLED,
        "draining": CANCELLED,
        "drained": ["response_cancel_not_active"],
    },
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STATES)
def test_every_event_in_every_state(state: str, event: str) -> None:
    driven = STATES[state]()
    kind, more = EVENTS[event]
    found = driven.send(kind, **more, event_id="mine")
    said = [e["error"]["code"] if e["type"] == "error" else e["type"] for e in found]
    assert said == (SAME.get(event) or DIFFERENT[event][state])
    assert all(e["error"]["event_id"] == "mine" for e in found if e["type"] == "error")


FACTS: dict[str, Callable[[Driven, str], list[Action]]] = {
    "chunk": lambda driven, response: driven.session.chunk(response, piece(content="b")),
    "error": lambda driven, response: driven.session.chunk(response, ChatChunk(error=None, choices=[])),
    "ended": lambda driven, response: driven.session.ended(response),
    "failed": lambda driven, response: driven.session.failed(response, LOST),
}


@pytest.mark.parametrize("fact", FACTS)
@pytest.mark.parametrize("state", ["idle", "cancelled", "ended", "failed"])
def test_what_comes_late_says_nothing(state: str, fact: str) -> None:
    driven = responding()
    response = driven.started[0].response_id
    if state == "cancelled":
        driven.send("response.cancel")
        assert driven.stopped == [response]
    elif state == "ended":
        driven.did(driven.session.ended(response))
    elif state == "failed":
        driven.did(driven.session.failed(response, LOST))
    assert FACTS[fact](driven, "unknown" if state == "idle" else response) == []


# Responses


@pytest.mark.parametrize(
    ("finish_reason", "status", "details"),
    [
        ("stop", "completed", {"type": "completed"}),
        ("tool_calls", "completed", {"type": "completed"}),
        (None, "completed", {"type": "completed"}),
        ("length", "incomplete", {"type": "incomplete", "reason": "max_output_tokens"}),
        ("content_filter", "incomplete", {"type": "incomplete", "reason": "content_filter"}),
    ],
)
def test_how_a_response_ends(finish_reason: str | None, status: str, details: Any) -> None:
    driven = responding()
    response = driven.started[0].response_id
    driven.did(driven.session.chunk(response, piece(finish_reason)))
    done = driven.did(driven.session.ended(response))[-1]["response"]
    assert (done["status"], done["status_details"]) == (status, details)
    assert done["output"][0]["status"] == ("completed" if status == "completed" else "incomplete")
    assert driven.session.idle
    assert not driven.session.finished


def test_a_response_that_says_nothing_has_no_output() -> None:
    driven = idle()
    response = driven.respond()
    events = driven.did(driven.session.ended(response))
    assert kinds(events) == ["response.done"]
    assert events[0]["response"]["output"] == []


def test_a_failed_response_keeps_what_was_said() -> None:
    driven = responding()
    done = driven.did(driven.session.failed(driven.started[0].response_id, LOST))[-1]["response"]
    assert done["status_details"]["error"] == {"type": "server_error", "code": "worker_lost", "message": "gone"}
    driven.respond()
    assert driven.messages() == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]


def test_an_error_in_the_stream_fails_the_response() -> None:
    driven = responding()
    found = decode_chunk(b'{"error":{"message":"m","type":"t","code":400,"param":null}}')
    assert found is not None
    done = driven.did(driven.session.chunk(driven.started[0].response_id, found))[-1]["response"]
    assert done["status_details"] == {"type": "failed", "error": {"type": "t", "code": "400", "message": "m"}}


def test_calls_that_come_mixed() -> None:
    driven = idle()
    response = driven.respond()
    for index, arguments in ((0, "a"), (1, "b"), (0, "c"), (1, "d")):
        function = {"name": f"f{index}", "arguments": arguments}
        driven.say(response, tool_calls=[{"index": index, "id": f"call{index}", "function": function}])
    driven.say(response, content="text")
    output = driven.did(driven.session.ended(response))[-1]["response"]["output"]
    assert [(item["type"], item.get("arguments")) for item in output] == [
        ("function_call", "ac"),
        ("function_call", "bd"),
        ("message", None),
    ]


def test_output_is_bounded() -> None:
    driven = Driven(conversation_bytes=1000)
    driven.add()
    response = driven.respond()
    driven.say(response, content="é" * 400)
    done = driven.say(response, content="é" * 200)[-1]["response"]
    assert done["status_details"]["error"]["code"] == "response_too_large"
    assert done["output"][0]["content"][0]["text"] == "é" * 400
    assert driven.stopped == [response]
    response = driven.respond(conversation="none")
    for index in range(MAX_TOOL_CALLS):
        assert kinds(driven.say(response, tool_calls=[{"index": index, "function": {"name": "f"}}]))
    done = driven.say(response, tool_calls=[{"index": MAX_TOOL_CALLS, "function": {"name": "f"}}])[-1]
    assert done["response"]["status"] == "failed"


def test_responses_are_limited() -> None:
    driven = idle()
    for _ in range(MAX_RESPONSES):
        driven.respond(conversation="none")
    assert code(driven.send("response.create", response={"conversation": "none"})) == "too_many_responses"
    assert kinds(driven.send("response.cancel", response_id=driven.started[0].response_id)) == ["response.done"]
    driven.respond(conversation="none")


def test_what_a_response_says_goes_before_what_the_session_says() -> None:
    driven = Driven()
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object", "x": [1]}}
    driven.send(
        "session.update",
        session={
            "type": "realtime",
            "instructions": "session",
            "max_output_tokens": 5,
            "tools": [tool],
            "tool_choice": {"type": "function", "name": "f"},
            "parallel_tool_calls": False,
        },
    )
    driven.add()
    driven.respond(conversation="none")
    driven.respond(conversation="none", instructions="", max_output_tokens="inf", tools=[])
    first, second = (json.loads(start.body) for start in driven.started)
    assert first == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "session"}, {"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 5,
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "description": "d", "parameters": {"type": "object", "x": [1]}},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
    }
    assert second["messages"] == [{"role": "user", "content": "hi"}]
    assert not {"max_completion_tokens", "tools", "tool_choice"} & set(second)


def test_input_of_a_response_may_refer_to_items() -> None:
    driven = idle()
    driven.respond(conversation="none", input=[SAID | {"role": "system"}, {"type": "item_reference", "id": "said"}])
    assert [message["role"] for message in driven.messages()] == ["system", "user"]
    events = driven.send("response.create", response={"input": [{"type": "item_reference", "id": "nobody"}]})
    assert code(events) == "item_not_found"


def test_an_item_in_progress_is_not_deleted_and_not_sent() -> None:
    driven = responding()
    item = driven.say(driven.started[0].response_id, content="b")[0]["item_id"]
    assert code(driven.send("conversation.item.delete", item_id=item)) == "item_in_progress"
    driven.respond(conversation="none")
    assert driven.messages() == [{"role": "user", "content": "hi"}]


# Items


def test_ids_of_clients_do_not_get_in_the_way() -> None:
    driven = idle()
    assert code(driven.add(id="said")) == "item_exists"
    assert code(driven.add(id="root")) == "item_exists"
    for number in range(64):
        driven.add(id=f"item_t0{number:06x}")
    response = driven.respond()
    item = driven.say(response, content="a")[0]["item"]["id"]
    assert len(driven.send("conversation.item.retrieve", item_id=item)) == 1
    assert driven.did(driven.session.ended(response))[-1]["response"]["status"] == "completed"


def test_a_conversation_is_bounded() -> None:
    driven = Driven()
    for _ in range(MAX_ITEMS):
        assert len(driven.add()) == 2
    assert code(driven.add()) == "conversation_too_large"
    assert code(driven.send("response.create")) == "conversation_too_large"
    driven.respond(conversation="none")


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "message", "role": "user"}, "item.content"),
        ({"type": "message", "role": "nobody", "content": []}, "item.role"),
        (
            {"type": "message", "role": "user", "content": [{"type": "output_text", "text": "x"}]},
            "item.content[0].type",
        ),
        (
            {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": "x"}]},
            "item.content[0].type",
        ),
        ({"type": "message", "role": "user", "content": [{"type": "input_text"}]}, "item.content[0].text"),
        ({"type": "function_call", "name": "f"}, "item.arguments"),
        ({"type": "function_call_output", "output": "x"}, "item.call_id"),
        ({"type": "mcp_call"}, "item.type"),
        ({"type": "item_reference", "id": "said"}, "item.type"),
        ({"type": "message", "role": "user", "content": [{"type": "input_text", "text": 1}]}, "item.content[0].text"),
    ],
)
def test_items_that_are_refused(item: Any, param: str) -> None:
    events = idle().send("conversation.item.create", item=item)
    assert code(events)
    assert events[0]["error"]["param"] == param


# Frames


def test_sizes_are_bytes() -> None:
    driven = Driven(event_bytes=1024)
    frame = '{"type":"response.cancel","event_id":"%s"}'
    fits = frame % ("x" * (1024 - len(frame) + 2))
    assert len(fits) == 1024
    assert code(driven.did(driven.session.frame(fits))) == "invalid_value"  # read, and its id is too long
    assert code(driven.did(driven.session.frame(fits + " "))) == "event_too_large"
    assert code(driven.did(driven.session.frame(frame % ("é" * 500)))) == "event_too_large"
    assert MAX_EVENT_ID < 1024


@given(st.one_of(st.text(max_size=200), st.binary(max_size=50)))
def test_any_frame_is_answered(frame: str | bytes) -> None:
    driven = Driven()
    assert len(driven.did(driven.session.frame(frame))) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)
FIELDS = ("item", "session", "response", "item_id", "previous_item_id", "response_id", "event_id")


@given(kind=st.sampled_from([name for name, _ in EVENTS.values()]), more=st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_event_is_answered(kind: str, more: dict[str, Any]) -> None:
    driven = responding()
    assert driven.send(kind, **more)


@given(st.binary(max_size=100))
def test_any_chunk_is_read_or_not(data: bytes) -> None:
    assert decode_chunk(data) is None or isinstance(decode_chunk(data), ChatChunk)


def test_a_drain_is_told_once() -> None:
    driven = responding()
    (told,) = driven.did(driven.session.drain())
    assert (told["error"]["type"], told["error"]["code"], told["error"]["event_id"]) == (
        "server_error",
        "draining",
        None,
    )
    assert driven.session.drain() == []
    assert not driven.session.finished
    driven.did(driven.session.ended(driven.started[0].response_id))
    assert driven.session.finished


def test_a_stop_is_an_action() -> None:
    driven = responding()
    actions = driven.session.frame('{"type":"response.cancel"}')
    assert actions[0] == StopResponse(driven.started[0].response_id)
