"""[P] Paths of OpenAI's API, and of vLLM's, that are refused here, each with a sentence instead of a bare 404.

Two kinds: what would need state inside one engine, which dies with it (``unsupported_stateful``), and what a fleet of
inference workers does not offer at all. A path that is in neither is simply not there.
"""

from __future__ import annotations

import re
from typing import Final

from app.openai.errors import GatewayError, not_found, unsupported_stateful
from app.openai.surface import RELAY_ROUTES

_STATEFUL: Final = (
    (
        re.compile(r"/v1/responses/.+"),
        "answers are not kept (every request runs as store: false), so there is none to fetch, cancel or delete",
    ),
    (
        re.compile(r"/v1/chat/completions/chatcmpl[^/]*(/messages)?"),
        "chat completions are not kept, so there is none to fetch, change or delete",
    ),
    (re.compile(r"/v1/conversations(/.*)?"), "no conversations are kept here; send the whole conversation as input"),
    (
        re.compile(r"/v1/(un)?load_lora_adapter"),
        "an adapter that is loaded at run time is lost with its engine; configure it when the workers start",
    ),
)

_NOT_OFFERED: Final = frozenset(
    (
        "assistants",
        "batches",
        "chatkit",
        "containers",
        "evals",
        "files",
        "fine_tuning",
        "organization",
        "threads",
        "uploads",
        "vector_stores",
    )
)
_NOT_SERVED: Final = frozenset(("audio/speech", "audio/voices", "images", "moderations", "videos"))
"""Inference, of which no engine that we know of serves anything."""
_VERSION: Final = "/v1"
_VERSIONED: Final = frozenset((*RELAY_ROUTES, "/v1/models", "/v1/realtime"))
_FAMILY: Final = re.compile(r"/v1/((?:audio/)?[a-z_]+)(?:/.*)?")


def refusal(path: str) -> GatewayError | None:
    """Why there is nothing at this path, if there is more to say than that."""
    for pattern, reason in _STATEFUL:
        if pattern.fullmatch(path):
            return unsupported_stateful(reason)
    if path == "/":
        return not_found(path, because="There is no page at '/'; the API begins at /v1, and /docs describes it.")
    if (meant := _meant(path)) is not None:
        return not_found(
            path, because=f"There is no route {path[:200]!r} here; did you mean {meant}? A base URL ends in /v1, once."
        )
    if (near := _near(path)) is not None:
        return not_found(path, because=f"There is no route {path[:200]!r} here; did you mean {near}?")
    family = _FAMILY.fullmatch(path)
    if family is not None and family[1] in _NOT_OFFERED:
        return not_found(
            path, because=f"There is no {path[:200]!r} here: this gateway serves inference only, not {family[1]}."
        )
    if family is not None and family[1] in _NOT_SERVED:
        return not_found(path, because=f"There is no {path[:200]!r} here: no worker serves {family[1]}.")
    return None


def _meant(path: str) -> str | None:
    """The route that a client asked for whose base URL has no version, or two."""
    meant = path.removeprefix(_VERSION) if path.startswith(_VERSION * 2) else _VERSION + path
    meant = meant.rstrip("/")
    return meant if meant in _VERSIONED and path not in _VERSIONED else None


def _near(path: str) -> str | None:
    """The route that has a slash too many at its end, or an ``s`` too many or too few at the end of a word."""
    key = _loosely(path)
    return None if path in _VERSIONED else _LOOSELY.get(key)


def _loosely(path: str) -> str:
    return "/".join(word.removesuffix("s") for word in path.rstrip("/").split("/")).lower()


_LOOSELY: Final = {_loosely(path): path for path in sorted(_VERSIONED)}
