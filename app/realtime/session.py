"""A realtime session: events of its client and facts about its responses in, actions out. [P]

The session's state is its configuration, its conversation and the responses that run. At most one response at a time
belongs to the conversation; others, out of band, run beside it. Each one is a chat completion, which the shell
(``connection``) has relayed like any request, so what happens to workers is no matter of the session.

Nothing that a client sends ends a session: what is wrong with an event is answered by an ``error`` event that names it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from app.openai.chat_stream import ChatChunk
from app.openai.realtime_events import (
    ClientEvent,
    ItemConfig,
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    RealtimeProblem,
    ResponseCancel,
    ResponseConfig,
    ResponseCreate,
    SessionConfig,
    SessionUpdate,
    ToolChoiceFunction,
    check_config,
    decode_event,
    decode_head,
    encode,
    error_fields,
)
from app.openai.realtime_items import Item, chat_messages, chat_request, make_item
from app.realtime.conversation import Conversation
from app.realtime.response import Failure, RealtimeResponse

MAX_RESPONSES: Final = 16
"""How many responses of one session run at a time: one in the conversation, the others out of band."""


@dataclass(frozen=True, slots=True)
class SendEvent:
    data: bytes


@dataclass(frozen=True, slots=True)
class StartResponse:
    """Have this chat completion relayed; report its events under ``response_id``."""

    response_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class StopResponse:
    """Its end is told already: no report is needed any more."""

    response_id: str


Action: TypeAlias = SendEvent | StartResponse | StopResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class RealtimeLimits:
    event_bytes: int
    """Of one event of the client."""
    conversation_bytes: int
    """Of the texts of a conversation, and of one response."""


class RealtimeSession:
    """``token``: unique to the session, of harmless characters; all ids are made from it."""

    def __init__(self, model: str, token: str, limits: RealtimeLimits) -> None:
        self._model = model
        self._token = token
        self._limits = limits
        self._numbers = itertools.count(1)
        self._config = SessionConfig(type="realtime", instructions="", tools=(), max_output_tokens="inf")
        self._conversation = Conversation(f"conv_{token}", max_bytes=limits.conversation_bytes)
        self._responses: dict[str, RealtimeResponse] = {}
        self._draining = False

    @property
    def id(self) -> str:
        return f"sess_{self._token}"

    @property
    def idle(self) -> bool:
        return not self._responses

    @property
    def finished(self) -> bool:
        """Draining, and nothing runs any more: time to close."""
        return self._draining and self.idle

    # What happens

    def opened(self) -> list[Action]:
        return [self._send("session.created", session=self._session())]

    def frame(self, frame: str | bytes) -> list[Action]:
        """A message of the client."""
        event_id: str | None = None
        try:
            if isinstance(frame, bytes):
                raise RealtimeProblem("binary_frame", "Events are text frames; this one is binary.")
            if _size(frame) > self._limits.event_bytes:
                raise RealtimeProblem(
                    "event_too_large", f"An event is at most {self._limits.event_bytes} bytes; this one is larger."
                )
            kind, event_id = decode_head(frame)
            return self._handle(decode_event(kind, frame))
        except RealtimeProblem as problem:
            return [self._refuse(problem, event_id or problem.event_id)]

    def chunk(self, response_id: str, chunk: ChatChunk) -> list[Action]:
        """An event of a response's completion."""
        response = self._responses.get(response_id)
        if response is None:
            return []
        if chunk.error is not None:
            code = str(chunk.error.code or "") or "worker_error"
            failure = Failure(code, chunk.error.type or "server_error", chunk.error.message or "The worker failed.")
            return self.failed(response_id, failure)
        actions: list[Action] = [SendEvent(event) for event in response.chunk(chunk)]
        if response.overflowed:
            said = f"A response holds at most {self._limits.conversation_bytes} bytes of text here."
            failure = Failure("response_too_large", "server_error", said)
            actions += [*self.failed(response_id, failure), StopResponse(response_id)]
        return actions

    def ended(self, response_id: str) -> list[Action]:
        """A response's completion came to its end."""
        response = self._responses.pop(response_id, None)
        return [] if response is None else [SendEvent(event) for event in response.ended()]

    def failed(self, response_id: str, failure: Failure) -> list[Action]:
        response = self._responses.pop(response_id, None)
        return [] if response is None else [SendEvent(event) for event in response.failed(failure)]

    def drain(self) -> list[Action]:
        """The gateway is going away: what runs goes on, and nothing new begins."""
        if self._draining:
            return []
        self._draining = True
        said = "This gateway is shutting down: the session is closed once its response is done. Connect again."
        return [self._refuse(RealtimeProblem("draining", said, type="server_error"), None)]

    # Events of the client

    def _handle(self, event: ClientEvent) -> list[Action]:
        match event:
            case SessionUpdate():
                return self._update(event.session)
            case ItemCreate():
                return self._create_item(event)
            case ItemRetrieve():
                item = self._conversation.find(event.item_id, "item_id")
                return [self._send("conversation.item.retrieved", item=item.wire())]
            case ItemDelete():
                self._conversation.delete(event.item_id)
                return [self._send("conversation.item.deleted", item_id=event.item_id)]
            case ResponseCreate():
                return self._respond(event.response or ResponseConfig())
            case ResponseCancel():
                return self._cancel(event.response_id)
        raise AssertionError(event)  # decode_event knows no others

    def _update(self, config: SessionConfig) -> list[Action]:
        if config.type != "realtime":
            raise RealtimeProblem(
                "not_supported",
                f"A session's type is 'realtime' here, not {config.type[:100]!r}.",
                param="session.type",
            )
        if config.model not in (None, self._model):
            raise RealtimeProblem(
                "cannot_update_model", "A session keeps its model; open another session.", param="session.model"
            )
        check_config(config, "session")
        said = {name: getattr(config, name) for name in _UPDATABLE if getattr(config, name) is not None}
        self._config = msgspec.structs.replace(self._config, **said)
        return [self._send("session.updated", session=self._session())]

    def _create_item(self, event: ItemCreate) -> list[Action]:
        item = make_item(event.item, self._new_id("item"), "item")
        before = self._conversation.insert(item, event.previous_item_id)
        return [
            self._send("conversation.item.added", previous_item_id=before, item=item.wire()),
            self._send("conversation.item.done", previous_item_id=before, item=item.wire()),
        ]

    def _respond(self, config: ResponseConfig) -> list[Action]:
        check_config(config, "response")
        if config.conversation not in (None, "auto", "none"):
            raise RealtimeProblem(
                "invalid_value", "A response's conversation is 'auto' or 'none'.", param="response.conversation"
            )
        if self._draining:
            raise RealtimeProblem("draining", "This gateway is shutting down; connect again.", type="server_error")
        conversation = None if config.conversation == "none" else self._conversation
        if conversation is not None:
            self._check_free(conversation)
        if len(self._responses) >= MAX_RESPONSES:
            raise RealtimeProblem(
                "too_many_responses",
                f"At most {MAX_RESPONSES} responses of a session run at a time; wait for one to be done.",
            )
        items = self._conversation.items if config.input is None else self._input(config.input)
        instructions = self._config.instructions if config.instructions is None else config.instructions
        messages = chat_messages(instructions or "", items)
        if not messages:
            raise RealtimeProblem("empty_conversation", "There is nothing to respond to: no item and no instructions.")
        response = RealtimeResponse(
            self._new_id("resp"),
            config,
            conversation,
            self._new_id,
            max_output_tokens=config.max_output_tokens or self._config.max_output_tokens or "inf",
            max_bytes=self._limits.conversation_bytes,
        )
        body = msgspec.json.encode(chat_request(self._model, messages, self._config, config))
        self._responses[response.id] = response
        return [*(SendEvent(event) for event in response.created()), StartResponse(response.id, body)]

    def _check_free(self, conversation: Conversation) -> None:
        conversation.check_room()
        active = next((r.id for r in self._responses.values() if r.conversation is not None), None)
        if active is not None:
            raise RealtimeProblem(
                "conversation_already_has_active_response",
                f"The conversation has a response in progress already: {active}. Wait for its response.done, cancel "
                "it, or ask with conversation 'none'.",
            )

    def _input(self, configs: tuple[ItemConfig, ...]) -> list[Item]:
        """Items of a response's own; references are to those of the conversation."""
        items = []
        for number, config in enumerate(configs):
            where = f"response.input[{number}]"
            if config.type == "item_reference":
                items.append(self._conversation.find(config.id or "", f"{where}.id"))
            else:
                items.append(make_item(config, self._new_id("item"), where))
        return items

    def _cancel(self, response_id: str | None) -> list[Action]:
        if response_id is None:
            found = next((r for r in self._responses.values() if r.conversation is not None), None)
        else:
            found = self._responses.get(response_id)
        if found is None:
            raise RealtimeProblem("response_cancel_not_active", "There is no such response in progress.")
        del self._responses[found.id]
        return [StopResponse(found.id), *(SendEvent(event) for event in found.cancelled())]

    # What is said

    def _session(self) -> dict[str, object]:
        config = self._config
        choice = config.tool_choice
        return {
            "type": "realtime",
            "object": "realtime.session",
            "id": self.id,
            "model": self._model,
            "output_modalities": ["text"],
            "instructions": config.instructions,
            "tools": config.tools,
            "tool_choice": choice if isinstance(choice, ToolChoiceFunction) else choice or "auto",
            "parallel_tool_calls": config.parallel_tool_calls,
            "max_output_tokens": config.max_output_tokens,
            "truncation": "disabled",
        }

    def _refuse(self, problem: RealtimeProblem, event_id: str | None) -> SendEvent:
        return SendEvent(encode("error", self._new_id("event"), error_fields(problem, event_id)))

    def _send(self, kind: str, **fields: object) -> SendEvent:
        return SendEvent(encode(kind, self._new_id("event"), fields))

    def _new_id(self, kind: str) -> str:
        while True:  # clients may choose ids, too
            made = f"{kind}_{self._token}{next(self._numbers):06x}"
            if not self._conversation.has(made):
                return made


def _size(frame: str) -> int:
    """Bytes."""
    return len(frame) if frame.isascii() else len(frame.encode("utf-8", "surrogatepass"))


_UPDATABLE: Final = ("instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens")
