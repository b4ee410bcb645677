"""Clock and random ids of vLLM's serving layer, as functions of the request while one is recorded.

An answer's ids and times must be the same on every attempt. vLLM takes both from module globals: ``random_uuid`` of
``vllm.utils``, ``uuid`` and ``time``. Stand-ins take their place, which ask the recorder of the request at hand and do
what was always done where there is none: for a client who came directly, and for the ids by which the engine knows its
own requests (``replay`` takes the recorder away there: those must never repeat).
"""

from __future__ import annotations

import importlib
import random
import sys
import time
import types
import uuid
from collections.abc import Sequence
from typing import Any, Final

from workers.recorder import RECORDER

TIMED: Final = (
    "vllm.entrypoints.anthropic.protocol",
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.openai.chat_completion.protocol",
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.protocol",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.openai.responses.protocol",
    "vllm.entrypoints.openai.responses.serving",
)
"""Modules that say when an answer was created."""

IDENTIFIED: Final = ("vllm.entrypoints.anthropic.serving",)
"""Modules that make ids with ``uuid`` themselves."""

NAMED: Final = (
    "vllm.entrypoints.openai.chat_completion.protocol",
    "vllm.entrypoints.openai.completion.protocol",
    "vllm.entrypoints.openai.responses.context",
    "vllm.entrypoints.openai.responses.harmony",
    "vllm.entrypoints.openai.responses.protocol",
    "vllm.entrypoints.openai.responses.serving",
    "vllm.entrypoints.openai.responses.streaming_events",
    "vllm.entrypoints.openai.responses.utils",
    "vllm.entrypoints.serve.engine.serving",
    "vllm.renderers.chat_utils",
)
"""Modules that have bound ``random_uuid`` when they are imported; tool parsers follow when they are used."""

MISTRAL: Final = "vllm.parser.mistral"

_MARK: Final = "hotspare_shim"


class _Clock(types.ModuleType):
    """``time``, whose ``time()`` is when the answer at hand was created."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def time() -> float:
        recorder = RECORDER.get()
        return time.time() if recorder is None else float(recorder.created)


class _Uuid(types.ModuleType):
    """``uuid``, whose ``uuid4()`` is the next id of the answer at hand."""

    def __getattr__(self, name: str) -> Any:
        return getattr(uuid, name)

    @staticmethod
    def uuid4() -> uuid.UUID:
        recorder = RECORDER.get()
        return uuid.uuid4() if recorder is None else uuid.UUID(hex=recorder.new_id())


def replace_random_uuid() -> None:
    """Before anything else of vLLM's is imported: modules bind the function by name, some in class bodies."""
    utils: Any = importlib.import_module("vllm.utils")
    original = utils.random_uuid
    if getattr(original, _MARK, False):
        return

    def random_uuid() -> str:
        recorder = RECORDER.get()
        made: str = original()
        return made if recorder is None else recorder.new_id()[: len(made)]

    setattr(random_uuid, _MARK, True)
    utils.random_uuid = random_uuid


def replace_clocks() -> None:
    """After the imports."""
    for name in TIMED:
        importlib.import_module(name).time = _Clock("time")  # type: ignore[attr-defined]
    for name in IDENTIFIED:
        importlib.import_module(name).uuid = _Uuid("uuid")  # type: ignore[attr-defined]


def replace_choices() -> None:
    """Once the serving layer is built: Mistral's parser, imported where it is used only, draws letters for ids of tool
    calls."""
    if (parser := sys.modules.get(MISTRAL)) is not None:
        parser.choices = _choices  # type: ignore[attr-defined]


def _choices(population: Sequence[str], weights: Any = None, *, cum_weights: Any = None, k: int = 1) -> list[str]:
    """``random.choices``, or what the next id of the answer at hand says. Not from the generator of ``random``: engines
    are forked from one parent, and all have the same."""
    recorder = RECORDER.get()
    if recorder is None:
        return random.SystemRandom().choices(population, weights, cum_weights=cum_weights, k=k)
    number = int(recorder.new_id(), 16)
    return [population[number // len(population) ** place % len(population)] for place in range(k)]


def unbound() -> list[str]:
    """Modules that did not get the stand-in for ``random_uuid``: they were imported too early, or no longer use it."""
    return [
        name for name in NAMED if not getattr(getattr(importlib.import_module(name), "random_uuid", None), _MARK, False)
    ]
