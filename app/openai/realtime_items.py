"""The items of a realtime conversation, and what they are to a chat completion. [P]"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from app.openai.realtime_events import ItemConfig, RealtimeProblem, SharedConfig, ToolChoiceFunction

Kind = Literal["message", "function_call", "function_call_output"]
Status = Literal["in_progress", "completed", "incomplete"]

_PART_TYPES: Final = {"user": "input_text", "system": "input_text", "assistant": "output_text"}
ITEM_OVERHEAD_BYTES: Final = 256
"""What an item without text is counted as."""


@dataclass(slots=True, kw_only=True, eq=False)
class Item:
    """One item. Which fields are used depends on ``kind``."""

    id: str
    kind: Kind
    status: Status = "completed"
    role: str = ""
    parts: list[str] = field(default_factory=list)
    name: str = ""
    call_id: str = ""
    arguments: str = ""
    output: str = ""

    @property
    def size(self) -> int:
        """Bytes, about."""
        texts = (*self.parts, self.name, self.call_id, self.arguments, self.output)
        return ITEM_OVERHEAD_BYTES + sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)

    def wire(self) -> dict[str, object]:
        """As the protocol shows it."""
        item: dict[str, object] = {"id": self.id, "object": "realtime.item", "type": self.kind, "status": self.status}
        if self.kind == "message":
            item["role"] = self.role
            item["content"] = [{"type": _PART_TYPES[self.role], "text": text} for text in self.parts]
        elif self.kind == "function_call":
            item.update(call_id=self.call_id, name=self.name, arguments=self.arguments)
        else:
            item.update(call_id=self.call_id, output=self.output)
        return item


def make_item(config: ItemConfig, new_id: str, where: str) -> Item:
    """An item that a client sent. ``where``: its path within the event, for errors.

    Raises:
        RealtimeProblem: it is not an item that can be had here.
    """
    found = Item(id=config.id or new_id, kind="message")
    if config.type == "message":
        return _message(config, found, where)
    if config.type == "function_call":
        found.kind = "function_call"
        found.name = _needed(config.name, f"{where}.name")
        found.arguments = _needed(config.arguments, f"{where}.arguments")
        found.call_id = config.call_id or new_id.replace("item_", "call_", 1)
        return found
    if config.type == "function_call_output":
        found.kind = "function_call_output"
        found.call_id = _needed(config.call_id, f"{where}.call_id")
        found.output = _needed(config.output, f"{where}.output")
        return found
    raise RealtimeProblem(
        "invalid_value",
        f"An item's type must be message, function_call or function_call_output, not {config.type[:100]!r}.",
        param=f"{where}.type",
    )


def _message(config: ItemConfig, item: Item, where: str) -> Item:
    expected = _PART_TYPES.get(config.role or "")
    if config.role is None or expected is None:
        raise RealtimeProblem(
            "invalid_value", "A message's role must be user, system or assistant.", param=f"{where}.role"
        )
    item.role = config.role
    for number, part in enumerate(_needed(config.content, f"{where}.content")):
        place = f"{where}.content[{number}]"
        if part.type in ("input_audio", "output_audio") or part.audio is not None or part.transcript is not None:
            raise RealtimeProblem(
                "audio_not_supported", f"Sessions carry text only here; send {expected!r}.", param=f"{place}.type"
            )
        if part.type != expected or part.image_url is not None or part.detail is not None:
            raise RealtimeProblem(
                "invalid_value",
                f"Content of a message of role {config.role!r} must be of type {expected!r}, with 'text'.",
                param=f"{place}.type",
            )
        item.parts.append(_needed(part.text, f"{place}.text"))
    if config.role == "assistant" and config.status == "incomplete":
        item.status = "incomplete"
    return item


def _needed(value: Any, param: str) -> Any:
    if value is None:
        raise RealtimeProblem("missing_required_parameter", f"{param} is missing.", param=param)
    return value


def chat_messages(instructions: str, items: Iterable[Item]) -> list[dict[str, object]]:
    """The conversation as chat completions know it. What is still being generated is left out.

    Calls that follow an assistant's text, or one another, belong to one message: so chat templates expect it.
    """
    messages: list[dict[str, object]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if item.status == "in_progress":
            continue
        if item.kind == "message":
            if item.parts or item.role != "assistant":
                glue = "" if item.role == "assistant" else "\n"
                messages.append({"role": item.role, "content": glue.join(item.parts)})
        elif item.kind == "function_call":
            call = {"id": item.call_id, "type": "function"}
            function = {"name": item.name, "arguments": item.arguments}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            calls: Any = messages[-1].setdefault("tool_calls", [])
            calls.append({**call, "function": function})
        else:
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
    return messages


def chat_request(
    model: str, messages: Sequence[dict[str, object]], session: SharedConfig, response: SharedConfig
) -> dict[str, object]:
    """The body of the chat completion that answers. What the response says goes before what the session says."""
    request: dict[str, object] = {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    limit = response.max_output_tokens or session.max_output_tokens
    if isinstance(limit, int):
        request["max_completion_tokens"] = limit
    tools = session.tools if response.tools is None else response.tools
    if tools:
        request["tools"] = [
            {"type": "function", "function": {key: value for key, value in _described(tool) if value is not None}}
            for tool in tools
        ]
        choice = response.tool_choice or session.tool_choice
        if isinstance(choice, ToolChoiceFunction):
            request["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        elif choice is not None:
            request["tool_choice"] = choice
        parallel = session.parallel_tool_calls if response.parallel_tool_calls is None else response.parallel_tool_calls
        if parallel is not None:
            request["parallel_tool_calls"] = parallel
    return request


def _described(tool: Any) -> Iterable[tuple[str, object]]:
    return ("name", tool.name), ("description", tool.description), ("parameters", tool.parameters)
