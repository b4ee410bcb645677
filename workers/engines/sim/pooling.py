"""Routes of models that give numbers and no text: embeddings, rerank, score, classify, pooling.

A vector is a hash of its text. A score is the share of words that two texts have in common, so that a test can say
which document comes first.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from hashlib import shake_128
from typing import Annotated, Any, Literal

import msgspec

from workers.engines.sim import tokens
from workers.engines.sim.api import ApiError, Positive, check_model, decode

DIMENSIONS = 64
LABELS = ("LABEL_0", "LABEL_1")

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=tokens.VOCAB_SIZE)]
Input = str | list[str | TokenId | list[TokenId]]
Texts = Annotated[list[str], msgspec.Meta(min_length=1)]


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True):
    input: Input
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    query: str
    documents: Texts
    model: str | None = None
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The two names of each side that vLLM takes."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    model: str | None = None


_pooling = msgspec.json.Decoder(PoolingRequest)
_rerank = msgspec.json.Decoder(RerankRequest)
_score = msgspec.json.Decoder(ScoreRequest)


def embeddings(body: bytes, *, model: str) -> bytes:
    """Answer ``POST /v1/embeddings``; vectors of length 1, as numbers or as base64 of little-endian float32.

    Raises:
        ApiError: 400 or 404, with the parameter that is wrong.
    """
    request, inputs = _inputs(body, model)
    size = request.dimensions or DIMENSIONS
    if size > DIMENSIONS:
        raise ApiError(400, f"this model has {DIMENSIONS} dimensions", param="dimensions")
    data = []
    for index, ids in enumerate(inputs):
        vector = _vector(ids, size)
        packed = base64.b64encode(struct.pack(f"<{size}f", *vector)).decode()
        embedding = packed if request.encoding_format == "base64" else vector
        data.append({"index": index, "object": "embedding", "embedding": embedding})
    return _list(data, model, inputs)


def pooling(body: bytes, *, model: str) -> bytes:
    """Answer ``POST /pooling``. Raises as ``embeddings``."""
    _, inputs = _inputs(body, model)
    data = [{"index": index, "object": "pooling", "data": _vector(ids, DIMENSIONS)} for index, ids in enumerate(inputs)]
    return _list(data, model, inputs)


def classify(body: bytes, *, model: str) -> bytes:
    """Answer ``POST /classify``. Raises as ``embeddings``."""
    _, inputs = _inputs(body, model)
    data = []
    for index, ids in enumerate(inputs):
        share = (_vector(ids, 1 + len(LABELS))[0] + 1) / 2
        label = LABELS[share < 0.5]
        data.append({"index": index, "label": label, "probs": [share, 1 - share], "num_classes": len(LABELS)})
    return _list(data, model, inputs)


def rerank(body: bytes, *, model: str) -> bytes:
    """Answer ``POST /rerank``. Raises as ``embeddings``."""
    request: RerankRequest = decode(_rerank, body)
    check_model(request.model, model)
    results = [
        {"index": index, "document": {"text": text}, "relevance_score": _likeness(request.query, text)}
        for index, text in enumerate(request.documents)
    ]
    results.sort(key=lambda result: -float(result["relevance_score"]))  # type: ignore[arg-type]
    wanted = len(results) if request.top_n is None else request.top_n or len(results)
    used = sum(len(tokens.encode(request.query)) + len(tokens.encode(text)) for text in request.documents)
    return msgspec.json.encode(
        {"id": "rerank-sim", "model": model, "usage": {"total_tokens": used}, "results": results[:wanted]}
    )


def score(body: bytes, *, model: str) -> bytes:
    """Answer ``POST /score``: one text against each of the other side, or pairs. Raises as ``embeddings``."""
    request: ScoreRequest = decode(_score, body)
    check_model(request.model, model)
    left, right = (
        _side(request.queries or request.text_1, "queries"),
        _side(request.documents or request.text_2, "documents"),
    )
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise ApiError(400, "the two sides have different lengths", param="documents")
    data = [
        {"index": index, "object": "score", "score": _likeness(one, other)}
        for index, (one, other) in enumerate(zip(left, right, strict=True))
    ]
    return _list(data, model, [tokens.encode(one + other) for one, other in zip(left, right, strict=True)])


def _side(texts: str | list[str] | None, name: str) -> list[str]:
    if not texts:
        raise ApiError(400, f"give {name}", param=name)
    return [texts] if isinstance(texts, str) else texts


def _inputs(body: bytes, model: str) -> tuple[PoolingRequest, list[list[int]]]:
    request: PoolingRequest = decode(_pooling, body)
    check_model(request.model, model)
    given = request.input
    if isinstance(given, str):
        found = [tokens.encode(given)]
    elif given and all(isinstance(item, int) for item in given):
        found = [[item for item in given if isinstance(item, int)]]
    else:
        found = [
            tokens.encode(item) if isinstance(item, str) else [item] if isinstance(item, int) else item
            for item in given
        ]
    if not found or not all(found):
        raise ApiError(400, "the input is empty", param="input")
    return request, found


def _vector(ids: Sequence[int], size: int) -> list[float]:
    words = memoryview(shake_128(struct.pack(f"<{len(ids)}I", *ids)).digest(4 * size)).cast("I")
    raw = [word / 2**31 - 1 for word in words]
    length = math.sqrt(sum(value * value for value in raw)) or 1.0
    return [value / length for value in raw]


def _likeness(one: str, other: str) -> float:
    first, second = set(one.lower().split()), set(other.lower().split())
    return len(first & second) / len(first | second) if first | second else 0.0


def _list(data: list[dict[str, Any]], model: str, inputs: Sequence[Sequence[int]]) -> bytes:
    used = sum(len(ids) for ids in inputs)
    usage = {"prompt_tokens": used, "total_tokens": used, "completion_tokens": 0}
    return msgspec.json.encode({"object": "list", "model": model, "data": data, "usage": usage})
