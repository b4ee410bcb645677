"""The order of a drain: grace, refusing, waiting, the end; and the routes that are not waited for."""

from __future__ import annotations

import pytest

from workers.drain_plan import DrainFacts, DrainPlan, Phase
from workers.route_groups import RouteGroup, group_of

CHAT, AUDIO = RouteGroup.CHAT, RouteGroup.AUDIO
ALL = frozenset(RouteGroup)


def facts(watches: int = 1, **requests: int) -> DrainFacts:
    return DrainFacts(watches=watches, requests={RouteGroup(name): count for name, count in requests.items()})


def plan(*, grace: float = 5, timeout: float = 20, waits_for: frozenset[RouteGroup] = ALL) -> DrainPlan:
    return DrainPlan(now=100, grace_seconds=grace, timeout_seconds=timeout, waits_for=waits_for)


def test_in_its_order() -> None:
    drain = plan()
    look = drain.look(facts(chat=1), now=100)
    assert (look.phase, look.refuse, look.again_in, look.left_seconds) == (Phase.GRACE, False, 5, 20)
    look = drain.look(facts(), now=104)  # idle, but somebody may not have heard yet
    assert (look.phase, look.refuse, look.again_in) == (Phase.GRACE, False, 1)
    look = drain.look(facts(chat=2), now=105)
    assert (look.phase, look.refuse, look.again_in) == (Phase.WAITING, True, 15)
    look = drain.look(facts(chat=1), now=110)
    assert (look.phase, look.over) == (Phase.WAITING, False)
    look = drain.look(facts(), now=111)
    assert (look.phase, look.over) == (Phase.DRAINED, True)


def test_nobody_who_watches_nobody_who_comes_late() -> None:
    assert plan().look(facts(watches=0), now=100).phase is Phase.DRAINED
    assert plan().look(facts(watches=0, chat=1), now=100).phase is Phase.WAITING
    drain = plan()
    assert drain.look(facts(watches=1), now=100).phase is Phase.GRACE
    assert drain.look(facts(watches=0), now=101).phase is Phase.DRAINED


def test_there_is_no_way_back_to_the_grace_period() -> None:
    drain = plan()
    drain.look(facts(watches=0, chat=1), now=100)
    assert drain.look(facts(watches=1, chat=1), now=101).phase is Phase.WAITING


def test_the_time_is_one_for_all_parts() -> None:
    drain = plan()
    drain.look(facts(chat=1), now=105)
    assert drain.look(facts(chat=1), now=119.9).phase is Phase.WAITING
    look = drain.look(facts(chat=1), now=120)
    assert (look.phase, look.over, look.left_seconds) == (Phase.OVERRUN, True, 0)


@pytest.mark.parametrize(("requests", "phase"), [({}, Phase.DRAINED), ({"chat": 1}, Phase.OVERRUN)])
def test_without_any_time(requests: dict[str, int], phase: Phase) -> None:
    assert plan(grace=0, timeout=0).look(facts(**requests), now=100).phase is phase


def test_routes_that_are_not_waited_for_are_cut_once_after_the_grace_period() -> None:
    drain = plan(waits_for=ALL - {CHAT})
    assert drain.look(facts(chat=3, audio=1), now=100).cut == frozenset()
    look = drain.look(facts(chat=3, audio=1), now=105)
    assert (look.cut, look.phase) == ({CHAT}, Phase.WAITING)
    assert drain.look(facts(chat=3, audio=1), now=106).cut == frozenset()
    assert drain.look(facts(chat=3), now=107).phase is Phase.DRAINED


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("/v1/chat/completions", RouteGroup.CHAT),
        ("/v1/completions", RouteGroup.COMPLETIONS),
        ("/v1/responses", RouteGroup.RESPONSES),
        ("/v1/messages", RouteGroup.MESSAGES),
        ("/v1/messages/count_tokens", RouteGroup.OTHER),
        ("/v1/embeddings", RouteGroup.POOLING),
        ("/rerank", RouteGroup.POOLING),
        ("/v1/audio/transcriptions", RouteGroup.AUDIO),
        ("/tokenize", RouteGroup.OTHER),
        ("/v1/chat/completions/", RouteGroup.OTHER),
    ],
)
def test_the_group_of_a_route(path: str, group: RouteGroup) -> None:
    assert group_of(path) is group
