"""What is asked for in the matrix of docs/resume.md: one row is one kind of request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
_TOOL = {"type": "function", "function": {"name": "set_person", "description": "x", "parameters": SCHEMA}}
_USAGE = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Row:
    """One kind of request."""

    name: str
    path: str
    body: dict[str, Any]
    stream: bool = True
    cuts: tuple[int, ...] = field(default=())
    """After which units beside the first, the middle one and the last."""

    def request(self) -> dict[str, Any]:
        return {"model": "smollm2", **self.body, "stream": self.stream}


def _chat(name: str, text: str = "Tell me a story about a cat.", *, cuts: tuple[int, ...] = (), **more: Any) -> Row:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 10, **more}
    return Row(name, CHAT, body, cuts=cuts)


def _completion(name: str, text: str = "The capital of France is", **more: Any) -> Row:
    return Row(name, COMPLETIONS, {"prompt": text, "temperature": 0, "max_tokens": 10, **more})


def _whole(name: str, row: Row) -> Row:
    return Row(name, row.path, {key: value for key, value in row.body.items() if key != "stream_options"}, stream=False)


_SCHEMA = _chat("json_schema", "Invent a person as JSON.", response_format=_FORMAT, max_tokens=24)
_RESPONSES = Row("responses", RESPONSES, {"input": "Tell me a story.", "temperature": 0, "max_output_tokens": 8})
_MESSAGES = Row(
    "messages", MESSAGES, {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 8}
)
_TOOL_NAMED = _chat(
    "tool_choice_named",
    "Set the person Bob, 3.",
    tools=[_TOOL],
    tool_choice={"type": "function", "function": {"name": "set_person"}},
    max_tokens=24,
)
_LOGPROBS = _chat("logprobs", logprobs=True, top_logprobs=3, max_tokens=8)
_N2 = _chat("n2_seeded", n=2, seed=7, temperature=1.0, max_tokens=8, **_USAGE)

ROWS = (
    _chat("chat"),
    _completion("completions"),
    _completion("echo", echo=True),
    _N2,
    _completion("n2_stop", n=2, seed=3, temperature=1.2, stop=[".", " in"]),
    _LOGPROBS,
    _chat("logprobs_of_the_sampled", logprobs=True, top_logprobs=0, seed=5, temperature=1.5, max_tokens=6),
    _completion("completions_logprobs", logprobs=2, max_tokens=6),
    _chat("max_tokens_at_the_cut", max_tokens=4, cuts=(2, 3, 4, 5), **_USAGE),
    _chat("one_token", max_tokens=1),
    _chat("presence_frequency_repetition", presence_penalty=0.8, frequency_penalty=0.7, repetition_penalty=1.2),
    _chat("min_tokens", "Say hi.", max_tokens=24, min_tokens=20),
    _chat("end_of_sequence", "Say hi.", max_tokens=60, **_USAGE),
    _chat("bad_words", bad_words=["cat", " brave cat", " Whiskers", " the"]),
    _chat("logit_bias", logit_bias={"284": 2, "260": -3}),
    _SCHEMA,
    _chat("regex", structured_outputs={"regex": "[a-c]{3}-[0-9]{3} (yes|no)"}),
    _chat("choice", structured_outputs={"choice": ["a long first answer", "another, second one"]}),
    _chat("characters_over_tokens", structured_outputs={"choice": ["日本語 🎉 naïve — 中文 🚀"]}, max_tokens=30),
    _TOOL_NAMED,
    _chat("tool_choice_required", "Set the person Bob, 3.", tools=[_TOOL], tool_choice="required", max_tokens=32),
    _chat("include_usage", **_USAGE),
    _chat("continuous_usage", stream_options={"include_usage": True, "continuous_usage_stats": True}),
    _chat("seeded_sampling", seed=42, temperature=0.9, top_p=0.95),
    _chat("stream_interval", stream_interval=3),
    _chat("token_ids", return_token_ids=True),
    _RESPONSES,
    Row(
        "responses_logprobs",
        RESPONSES,
        {**_RESPONSES.body, "include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 5},
    ),
    _MESSAGES,
)

WHOLE_ROWS = (
    _whole("whole_chat", _chat("")),
    _whole("whole_completions", _completion("", echo=True)),
    _whole("whole_n2", _N2),
    _whole("whole_logprobs", _LOGPROBS),
    _whole("whole_json_schema", _SCHEMA),
    _whole("whole_tool_choice_named", _TOOL_NAMED),
    _whole("whole_responses", _RESPONSES),
    _whole("whole_messages", _MESSAGES),
)

_THINKING = {"logit_bias": {"6": 18}, "frequency_penalty": 2.0}
"""Brings this small model to write the mark that ends its reasoning."""

OTHER_ROWS = (
    _chat("reasoning", max_tokens=16, **_THINKING),
    _chat(
        "reasoning_then_json_schema", "Invent a person as JSON.", max_tokens=40, response_format=_FORMAT, **_THINKING
    ),
    _chat("penalties_of_the_other_scheduler", presence_penalty=0.8, frequency_penalty=0.7, repetition_penalty=1.2),
    _chat("seed_and_a_prefill_in_chunks", "One, two, three, four. " * 12, seed=11, temperature=0.9),
    _whole("whole_reasoning", _chat("", max_tokens=16, **_THINKING)),
)
"""For engines with a reasoning parser, vLLM's asynchronous scheduler, and a prefill in small chunks."""
