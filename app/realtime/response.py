"""One response of a session: what it has said so far, and the events that tell it. [P]

Chunks of a chat completion come in, events go out. Text and each call of a tool are items of their own, in the order in
which they begin. However it ends, what was begun is closed: the last text, its part, its item, then ``response.done``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from app.openai.chat_stream import ChatChunk, ToolCallDelta, Usage
from app.openai.realtime_events import ResponseConfig, encode
from app.openai.realtime_items import Item
from app.realtime.conversation import Conversation

Outcome = Literal["completed", "incomplete", "cancelled", "failed"]
NewId: TypeAlias = Callable[[str], str]
MAX_TOOL_CALLS: Final = 128


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a response failed."""

    code: str
    type: str
    message: str


@dataclass(slots=True)
class _Output:
    """An item being generated. Its text is kept in pieces until it is done."""

    item: Item
    index: int
    pieces: list[str]


class RealtimeResponse:
    """``conversation``: where its items go; ``None`` for a response out of band."""

    def __init__(
        self,
        response_id: str,
        config: ResponseConfig,
        conversation: Conversation | None,
        new_id: NewId,
        *,
        max_output_tokens: int | Literal["inf"],
        max_bytes: int,
    ) -> None:
        self.id = response_id
        self.conversation = conversation
        self._metadata = config.metadata
        self._max_output_tokens = max_output_tokens
        self._new_id = new_id
        self._outputs: list[_Output] = []
        self._message: _Output | None = None
        """The text being written; a call of a tool ends it. Calls may come mixed and end with the response."""
        self._calls: dict[int, _Output] = {}
        self._usage: Usage | None = None
        self._finish_reason = ""
        self._room = max_bytes
        self._events: list[bytes] = []
        self.overflowed = False
        """There is more output than may be kept: end this response."""

    def created(self) -> list[bytes]:
        self._emit("response.created", response=self._wire("in_progress", None))
        return self._taken()

    def chunk(self, chunk: ChatChunk) -> list[bytes]:
        """Events for one event of the completion."""
        if chunk.usage is not None:
            self._usage = chunk.usage
        if isinstance(chunk.choices, list) and chunk.choices:
            choice = chunk.choices[0]
            if choice.delta is not None:
                if choice.delta.content:
                    self._text(choice.delta.content)
                for call in choice.delta.tool_calls or ():
                    self._call(call)
            if choice.finish_reason:
                self._finish_reason = choice.finish_reason
        return self._taken()

    def ended(self) -> list[bytes]:
        """The completion came to its own end."""
        reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(self._finish_reason)
        if reason is None:
            return self._finish("completed", {"type": "completed"})
        return self._finish("incomplete", {"type": "incomplete", "reason": reason})

    def cancelled(self) -> list[bytes]:
        return self._finish("cancelled", {"type": "cancelled", "reason": "client_cancelled"})

    def failed(self, failure: Failure) -> list[bytes]:
        error = {"type": failure.type, "code": failure.code, "message": failure.message}
        return self._finish("failed", {"type": "failed", "error": error})

    # Output as it comes

    def _text(self, text: str) -> None:
        if not self._takes(text):
            return
        output = self._message
        if output is None:
            output = self._message = self._begin(Item(id=self._new_id("item"), kind="message", role="assistant"))
            self._emit("response.content_part.added", **self._place(output), content_index=0, part=_part(""))
        output.pieces.append(text)
        self._emit("response.output_text.delta", **self._place(output), content_index=0, delta=text)

    def _call(self, call: ToolCallDelta) -> None:
        name = (call.function and call.function.name) or ""
        arguments = (call.function and call.function.arguments) or ""
        if not self._takes(name + arguments):
            return
        output = self._calls.get(call.index)
        if output is None:
            if len(self._calls) >= MAX_TOOL_CALLS:
                self.overflowed = True
                return
            self._end_message("completed")
            item = Item(id=self._new_id("item"), kind="function_call", name=name)
            item.call_id = call.id or self._new_id("call")
            output = self._calls[call.index] = self._begin(item)
        if arguments:
            output.pieces.append(arguments)
            self._emit(
                "response.function_call_arguments.delta",
                **self._place(output),
                call_id=output.item.call_id,
                delta=arguments,
            )

    def _takes(self, text: str) -> bool:
        self._room -= len(text.encode("utf-8", "surrogatepass"))
        self.overflowed = self.overflowed or self._room < 0
        return not self.overflowed

    def _begin(self, item: Item) -> _Output:
        item.status = "in_progress"
        output = _Output(item, len(self._outputs), [])
        self._outputs.append(output)
        self._emit("response.output_item.added", response_id=self.id, output_index=output.index, item=item.wire())
        if self.conversation is not None:
            before = self.conversation.append(item)
            self._emit("conversation.item.added", previous_item_id=before, item=item.wire())
        return output

    def _end_message(self, status: Literal["completed", "incomplete"]) -> None:
        output, self._message = self._message, None
        if output is not None:
            text = "".join(output.pieces)
            output.item.parts = [text]
            self._emit("response.output_text.done", **self._place(output), content_index=0, text=text)
            self._emit("response.content_part.done", **self._place(output), content_index=0, part=_part(text))
            self._end_item(output, status)

    def _end_call(self, output: _Output, status: Literal["completed", "incomplete"]) -> None:
        item = output.item
        item.arguments = "".join(output.pieces)
        self._emit(
            "response.function_call_arguments.done",
            **self._place(output),
            call_id=item.call_id,
            name=item.name,
            arguments=item.arguments,
        )
        self._end_item(output, status)

    def _end_item(self, output: _Output, status: Literal["completed", "incomplete"]) -> None:
        item = output.item
        item.status = status
        output.pieces.clear()
        if self.conversation is not None:
            self.conversation.grown(item)
            before = self.conversation.before(item)
            self._emit("conversation.item.done", previous_item_id=before, item=item.wire())
        self._emit("response.output_item.done", response_id=self.id, output_index=output.index, item=item.wire())

    def _finish(self, outcome: Outcome, details: dict[str, object]) -> list[bytes]:
        status: Literal["completed", "incomplete"] = "completed" if outcome == "completed" else "incomplete"
        self._end_message(status)
        for call in self._calls.values():
            self._end_call(call, status)
        self._emit("response.done", response=self._wire(outcome, details))
        return self._taken()

    def _place(self, output: _Output) -> dict[str, object]:
        return {"response_id": self.id, "item_id": output.item.id, "output_index": output.index}

    def _wire(self, status: str, details: dict[str, object] | None) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": details,
            "conversation_id": None if self.conversation is None else self.conversation.id,
            "output": [output.item.wire() for output in self._outputs],
            "output_modalities": ["text"],
            "max_output_tokens": self._max_output_tokens,
            "metadata": self._metadata,
            "usage": None if self._usage is None else _usage(self._usage),
        }

    def _emit(self, kind: str, **fields: object) -> None:
        self._events.append(encode(kind, self._new_id("event"), fields))

    def _taken(self) -> list[bytes]:
        events, self._events = self._events, []
        return events


def _part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def _usage(usage: Usage) -> dict[str, object]:
    cached = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
    output = usage.completion_tokens or 0
    return {
        "total_tokens": usage.prompt_tokens + output,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": output,
        "input_token_details": {
            "text_tokens": usage.prompt_tokens,
            "audio_tokens": 0,
            "image_tokens": 0,
            "cached_tokens": cached,
            "cached_tokens_details": {"text_tokens": cached, "audio_tokens": 0, "image_tokens": 0},
        },
        "output_token_details": {"text_tokens": output, "audio_tokens": 0},
    }
