"""What request number N of a scenario asks: by seed and number alone, so that whoever judges it knows it, too."""

from __future__ import annotations

import itertools
import math
import random
from functools import lru_cache
from typing import Final, NamedTuple

from app.cli.bench.chaos.plan import Manner, Question
from app.cli.bench.loadtest.scenario import KINDS, Lengths, Scenario
from workers.engines.sim.tokens import WORDS

LATEST_CANCEL: Final = 8
"""A client that cancels leaves after one read to so many."""
TURNS: Final = 2
"""Of a realtime session."""


class Asked(NamedTuple):
    """A request, and the name of its kind."""

    kind: str
    question: Question


def asked(scenario: Scenario, number: int) -> Asked:
    """Request ``number``."""
    chance = random.Random(f"{scenario.seed} {number}")  # noqa: S311 - not for secrets
    (kind,) = chance.choices(list(scenario.mix), weights=list(scenario.mix.values()))
    path, streams = KINDS[kind]
    turns = TURNS if kind == "realtime" else 1
    return Asked(
        kind,
        Question(
            path=path,
            manner=_manner(scenario, kind, streams, chance.random()),
            prompts=tuple(_prompt(scenario, chance) for _ in range(turns)),
            tokens=_length(scenario.answer_tokens, chance),
            usage=True,
            leave_after=chance.randint(1, LATEST_CANCEL),
        ),
    )


def _manner(scenario: Scenario, kind: str, streams: bool, drawn: float) -> Manner:
    if kind == "realtime":
        return Manner.REALTIME
    if not streams:
        return Manner.WHOLE
    if drawn < scenario.cancels:
        return Manner.CANCEL
    return Manner.SLOW if drawn < scenario.cancels + scenario.slow_readers else Manner.STREAM


def _length(lengths: int | Lengths, chance: random.Random) -> int:
    if isinstance(lengths, int):
        return lengths
    if lengths.uniform is not None:
        return chance.randint(lengths.uniform.least, lengths.uniform.most)
    if lengths.lognormal is None:
        raise AssertionError("lengths without a distribution")
    drawn = chance.lognormvariate(math.log(lengths.lognormal.median), lengths.lognormal.sigma)
    return min(lengths.lognormal.most, max(1, round(drawn)))


def _longest(lengths: int | Lengths) -> int:
    if isinstance(lengths, int):
        return lengths
    return max(one.most for one in (lengths.uniform, lengths.lognormal) if one is not None)


def _prompt(scenario: Scenario, chance: random.Random) -> str:
    """A piece of one long text. Cutting it costs the same for one word and for a hundred thousand."""
    text, starts = _text(2 * _longest(scenario.prompt_words) + 4096)
    words = _length(scenario.prompt_words, chance)
    first = chance.randrange(len(starts) - words)
    return text[starts[first] : starts[first + words] - 1]


@lru_cache(maxsize=4)
def _text(words: int) -> tuple[str, list[int]]:
    """So many words, a space after each, and where each begins."""
    drawn = random.Random("text").choices(WORDS, k=words)  # noqa: S311 - not for secrets
    starts = list(itertools.accumulate((len(word) + 1 for word in drawn[:-1]), initial=0))
    return " ".join(drawn) + " ", starts
