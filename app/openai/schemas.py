"""[P] What the relayed routes take and give, as JSON schemas with an example each: the main fields, none of the rest.

They describe; nothing is validated by them. Workers know their fields, and unknown ones pass, so every object is open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
FLAG: Final[Schema] = {"type": "boolean"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 1}
MODEL: Final[Schema] = {"type": "string", "description": "One of GET /v1/models. May be left out where there is one."}
STREAM: Final[Schema] = {"type": "boolean", "description": "Answer with server-sent events."}


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def record(required: str = "", /, **properties: Schema) -> Schema:
    """An open object; ``required`` names fields, separated by spaces."""
    found: Schema = {"type": "object", "properties": properties, "additionalProperties": True}
    return {**found, "required": required.split()} if required else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One kind of route."""

    tag: str
    summary: str
    request: Schema
    example: Mapping[str, Any]
    answer: Schema
    """Of a whole answer; empty for one whose form depends on the request."""
    media_type: str = "application/json"


_TEXTS: Final = either(TEXT, array(TEXT, minItems=1))
_INPUT: Final = either(TEXT, array(TEXT, minItems=1), array({"type": "integer", "minimum": 0}, minItems=1))
_PART: Final = record("type", type=TEXT, text=TEXT)
_MESSAGE: Final = record("role", role=TEXT, content=either(TEXT, array(_PART), {"type": "null"}))
_SAMPLING: Final[dict[str, Schema]] = {
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
}
_STOP: Final = either(TEXT, array(TEXT, maxItems=4))
_USAGE: Final = record(prompt_tokens={"type": "integer"}, total_tokens={"type": "integer"})
_LIST: Final = record("data", object=TEXT, model=TEXT, data=array(record("index", index={"type": "integer"})))
_USER: Final = {"role": "user", "content": "What is the capital of France?"}
_AUDIO: Final = record("file", file={"type": "string", "format": "binary"}, model=MODEL, language=TEXT, stream=STREAM)

DESCRIPTIONS: Final[Mapping[str, Description]] = MappingProxyType(
    {
        "chat": Description(
            tag="Generate",
            summary="Chat completion",
            request=record(
                "messages",
                model=MODEL,
                messages=array(_MESSAGE, minItems=1),
                max_completion_tokens=COUNT,
                max_tokens=COUNT,
                stop=_STOP,
                stream=STREAM,
                stream_options=record(include_usage=FLAG),
                tools=array(record("type", type=TEXT)),
                response_format=record("type", type=TEXT),
                **_SAMPLING,
            ),
            example={"model": "smollm2", "messages": [_USER], "max_tokens": 64},
            answer=record(
                "id object model choices",
                id=TEXT,
                object={"const": "chat.completion"},
                created={"type": "integer"},
                model=TEXT,
                choices=array(record("index message finish_reason", index={"type": "integer"}, message=_MESSAGE)),
                usage=_USAGE,
            ),
        ),
        "completions": Description(
            tag="Generate",
            summary="Completion of a prompt",
            request=record(
                "prompt", model=MODEL, prompt=_INPUT, max_tokens=COUNT, stop=_STOP, stream=STREAM, **_SAMPLING
            ),
            example={"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 64},
            answer=record(
                "id object model choices",
                id=TEXT,
                object={"const": "text_completion"},
                created={"type": "integer"},
                model=TEXT,
                choices=array(record("index text finish_reason", index={"type": "integer"}, text=TEXT)),
                usage=_USAGE,
            ),
        ),
        "responses": Description(
            tag="Generate",
            summary="Response; runs as store: false, since workers keep no answers",
            request=record(
                "input",
                model=MODEL,
                input=either(TEXT, array(_MESSAGE, minItems=1)),
                instructions=TEXT,
                max_output_tokens=COUNT,
                stream=STREAM,
                tools=array(record("type", type=TEXT)),
                **_SAMPLING,
            ),
            example={"model": "smollm2", "input": "What is the capital of France?"},
            answer=record(
                "id object status model output",
                id=TEXT,
                object={"const": "response"},
                status=TEXT,
                model=TEXT,
                output=array(record("type", type=TEXT)),
            ),
        ),
        "messages": Description(
            tag="Generate",
            summary="Message, in Anthropic's form",
            request=record(
                "messages max_tokens",
                model=MODEL,
                messages=array(_MESSAGE, minItems=1),
                max_tokens=COUNT,
                system=either(TEXT, array(_PART)),
                stop_sequences=array(TEXT),
                stream=STREAM,
                **_SAMPLING,
            ),
            example={"model": "smollm2", "messages": [_USER], "max_tokens": 64},
            answer=record(
                "id type role content stop_reason",
                id=TEXT,
                type={"const": "message"},
                role=TEXT,
                content=array(_PART),
                stop_reason=TEXT,
            ),
        ),
        "count_tokens": Description(
            tag="Tokens",
            summary="How many tokens a message would have, in Anthropic's form",
            request=record(
                "messages",
                model=MODEL,
                messages=array(_MESSAGE, minItems=1),
                system=either(TEXT, array(_PART)),
            ),
            example={"model": "smollm2", "messages": [_USER]},
            answer=record("input_tokens", input_tokens={"type": "integer", "minimum": 0}),
        ),
        "tokenize": Description(
            tag="Tokens",
            summary="Text or messages to token ids",
            request=record(model=MODEL, prompt=TEXT, messages=array(_MESSAGE, minItems=1)),
            example={"model": "smollm2", "prompt": "Once upon a time"},
            answer=record("count tokens", count={"type": "integer"}, tokens=array({"type": "integer"})),
        ),
        "detokenize": Description(
            tag="Tokens",
            summary="Token ids to text",
            request=record("tokens", model=MODEL, tokens=array({"type": "integer", "minimum": 0})),
            example={"model": "smollm2", "tokens": [9038, 2501, 263, 931]},
            answer=record("prompt", prompt=TEXT),
        ),
        "embeddings": Description(
            tag="Measure",
            summary="Embeddings",
            request=record(
                "input", model=MODEL, input=_INPUT, encoding_format={"enum": ["float", "base64"]}, dimensions=COUNT
            ),
            example={"model": "an-embedding-model", "input": ["a text", "another"]},
            answer=_LIST,
        ),
        "pooling": Description(
            tag="Measure",
            summary="The pooled output of a model",
            request=record("input", model=MODEL, input=_INPUT),
            example={"model": "a-pooling-model", "input": "a text"},
            answer=_LIST,
        ),
        "classify": Description(
            tag="Measure",
            summary="Classes of texts",
            request=record("input", model=MODEL, input=_INPUT),
            example={"model": "a-classifier", "input": ["a text"]},
            answer=_LIST,
        ),
        "score": Description(
            tag="Measure",
            summary="How well pairs of texts go together",
            request=record("text_1 text_2", model=MODEL, text_1=_TEXTS, text_2=_TEXTS),
            example={"model": "a-cross-encoder", "text_1": "a question", "text_2": ["an answer", "another"]},
            answer=_LIST,
        ),
        "rerank": Description(
            tag="Measure",
            summary="Documents in the order of their relevance",
            request=record(
                "query documents",
                model=MODEL,
                query=TEXT,
                documents=array(TEXT, minItems=1),
                top_n={"type": "integer", "minimum": 0},
            ),
            example={"model": "a-cross-encoder", "query": "a question", "documents": ["an answer", "another"]},
            answer=record(
                "results",
                results=array(
                    record("index relevance_score", index={"type": "integer"}, relevance_score={"type": "number"})
                ),
            ),
        ),
        "transcriptions": Description(
            tag="Audio",
            summary="Speech to text",
            request=_AUDIO,
            example={"model": "a-speech-model", "file": "speech.wav"},
            answer=record("text", text=TEXT),
            media_type="multipart/form-data",
        ),
        "translations": Description(
            tag="Audio",
            summary="Speech to English text",
            request=_AUDIO,
            example={"model": "a-speech-model", "file": "speech.wav"},
            answer=record("text", text=TEXT),
            media_type="multipart/form-data",
        ),
    }
)
"""By the name of a relayed route."""
