"""[P] What is compared: the ways in which a killed engine comes back, from none of ours to all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

CARRY_OVER: Final = "HOTSPARE_KV_CARRY_OVER"


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One way, as ``hotspare up`` is told about it."""

    name: str
    meaning: str
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    spare: bool = False
    """A shadow is parked before each kill, and takes over."""
    ours: bool = True
    """Not: vLLM's own server, without us, that the benchmark starts again."""


_ARMS: Final = (
    Arm(name="stock", meaning="vllm serve, started again at once", ours=False),
    Arm(
        name="cold",
        meaning="an engine without shadow, keeper and memory service, started again",
        flags=("--shadows", "0", "--no-gms", "--no-keeper"),
    ),
    Arm(
        name="cold_gms",
        meaning="the same, with weights and KV cache in a memory service",
        flags=("--shadows", "0", "--no-keeper"),
    ),
    Arm(name="keeper", meaning="the same, forked again by a keeper", flags=("--shadows", "0")),
    Arm(name="shadow", meaning="a shadow takes over", env=((CARRY_OVER, "false"),), spare=True),
    Arm(
        name="shadow_carry",
        meaning="a shadow takes over, with the KV cache's content",
        env=((CARRY_OVER, "true"),),
        spare=True,
    ),
)

ARMS: Final[Mapping[str, Arm]] = MappingProxyType({arm.name: arm for arm in _ARMS})

LOADS: Final = ("none", "streams")
"""``none``: one small request at a time, which is how recovery is seen at all. ``streams``: answers of some length are
streamed to several clients all the time."""


def chosen(names: Sequence[str], *, engine: str, known_variables: frozenset[str]) -> tuple[list[Arm], dict[str, str]]:
    """The arms of these names that can be run, and why the others cannot."""
    arms: list[Arm] = []
    skipped: dict[str, str] = {}
    for name in names:
        arm = ARMS[name]
        unknown = [variable for variable, _ in arm.env if variable not in known_variables]
        if not arm.ours and engine != "vllm":
            skipped[name] = f"there is no other server of the engine {engine}"
        elif unknown and name == "shadow_carry":
            skipped[name] = "the KV cache's content is not carried over in this version"
        else:
            arms.append(msgspec.structs.replace(arm, env=() if unknown else arm.env))
    return arms, skipped
