from __future__ import annotations

import pytest

from gms.custody_phases import CustodyState, Phase
from workers.state import ServiceLink, service_link


def state(pool: str, phase: Phase, *, seconds: float = 1.0, restored: int = 0, reason: str = "") -> CustodyState:
    return CustodyState(pool=pool, phase=phase, seconds=seconds, restored=restored, reason=reason)


HELD = ServiceLink(connected=True, adrift_seconds=None, restored=0, private=(), problem="")


@pytest.mark.parametrize(
    ("states", "link", "summary"),
    [
        ([state("weights/x", Phase.HELD)], HELD, "connected"),
        (
            [state("weights/x", Phase.HELD, restored=2), state("kv", Phase.ADRIFT, seconds=0.51234)],
            ServiceLink(connected=False, adrift_seconds=0.512, restored=2, private=(), problem=""),
            "gone for 0.5 s",
        ),
        (
            [state("weights/x", Phase.ADRIFT, seconds=3.0), state("kv", Phase.ADRIFT, seconds=2.0)],
            ServiceLink(connected=False, adrift_seconds=3.0, restored=0, private=(), problem=""),
            "gone for 3.0 s",
        ),
        (
            [state("weights/x", Phase.PRIVATE, reason="unknown."), state("kv", Phase.PRIVATE, reason="unknown.")],
            ServiceLink(
                connected=False, adrift_seconds=None, restored=0, private=("weights/x", "kv"), problem="unknown."
            ),
            "private copy of weights/x, kv: unknown.",
        ),
    ],
)
def test_how_an_engine_stands_with_the_service(states: list[CustodyState], link: ServiceLink, summary: str) -> None:
    assert service_link(states) == link
    assert link.summary == summary


def test_who_holds_nothing_has_no_link() -> None:
    assert service_link(()) is None


def test_pages_that_a_newer_epoch_has_are_no_private_copy() -> None:
    link = service_link([state("kv", Phase.LOST, reason="epoch 8 has it.")])
    assert link is not None
    assert (link.connected, link.private, link.problem) == (False, (), "epoch 8 has it.")
    assert link.summary == "epoch 8 has it."
