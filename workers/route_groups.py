"""[P] Routes of an engine by what their requests do, for settings and figures that speak of many routes at once."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class RouteGroup(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    AUDIO = "audio"
    POOLING = "pooling"
    """Embeddings, scores, rerankings, classes."""
    OTHER = "other"


_EXACT: Final = {
    "/v1/completions": RouteGroup.COMPLETIONS,
    "/v1/messages": RouteGroup.MESSAGES,
    "/v1/responses": RouteGroup.RESPONSES,
    "/v1/chat/completions": RouteGroup.CHAT,
    "/classify": RouteGroup.POOLING,
    "/pooling": RouteGroup.POOLING,
    "/rerank": RouteGroup.POOLING,
    "/score": RouteGroup.POOLING,
    "/v1/embeddings": RouteGroup.POOLING,
    "/v1/rerank": RouteGroup.POOLING,
    "/v1/score": RouteGroup.POOLING,
    "/v2/rerank": RouteGroup.POOLING,
}

REPEATABLE: Final = frozenset({RouteGroup.POOLING, RouteGroup.AUDIO, RouteGroup.OTHER})
"""Where a gateway has nothing to go on with, but delivers nothing before the end either: it asks another worker again.
(A transcription that streams is the exception.)"""


def group_of(path: str) -> RouteGroup:
    """The group of a request's path."""
    found = _EXACT.get(path)
    if found is None:
        found = RouteGroup.AUDIO if path.startswith("/v1/audio/") else RouteGroup.OTHER
    return found
