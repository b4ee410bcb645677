from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.exit_codes import ExitCode
from workers.pod_plan import RESTART_SETTLED_SECONDS, Action, Deadline, Kill, Phase, PodPlan, Start, Terminate

GRACE, SERVICE_GRACE = 15.0, 2.0
KILLED = -9


def plan(service: str | None = "gms") -> PodPlan:
    """All processes started at 0 s."""
    made = PodPlan(service=service, engines=("a", "b"), grace_seconds=GRACE, service_grace_seconds=SERVICE_GRACE)
    assert made.begin() == [Start(name) for name in made.names]
    for name in made.names:
        made.started(name, now=0.0)
    return made


def test_all_start_at_once_the_memory_service_first() -> None:
    assert plan().names == ("gms", "a", "b")
    assert plan(service=None).names == ("a", "b")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("gms", [0.0, *[1.0] * 7]), ("a", [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0])],
)
def test_what_dies_is_started_again_at_once_and_then_later_and_later(name: str, expected: list[float]) -> None:
    made = plan()
    delays = []
    for life in range(8):
        (action,) = made.exited(name, KILLED, now=float(life))
        assert isinstance(action, Start)
        delays.append(action.delay_seconds)
        assert made.start_due(name)
        made.started(name, now=float(life))
    assert delays == expected
    assert made.restarts(name) == 8


@pytest.mark.parametrize("code", [0, 1, 2, 70, 75, -15])
def test_every_end_is_followed_by_a_start_once_the_pod_runs(code: int) -> None:
    made = plan()
    made.exited("a", KILLED, now=1.0)
    made.started("a", now=1.0)
    (action,) = made.exited("a", code, now=100.0)
    assert action == Start("a", 1.0 if code == ExitCode.BAD_CONFIGURATION else 0.0)


def test_a_start_that_is_due_is_not_wanted_twice_nor_while_stopping() -> None:
    made = plan()
    assert not made.start_due("a")
    made.exited("a", KILLED, now=1.0)
    assert made.start_due("a")
    made.stop()
    assert not made.start_due("a")


def test_an_orderly_stop() -> None:
    made = plan()
    assert made.stop() == [Terminate("a"), Terminate("b"), Deadline(Phase.STOPPING_ENGINES, GRACE)]
    assert made.exited("b", 0, now=1.0) == []
    assert made.exited("a", 0, now=2.0) == [Terminate("gms"), Deadline(Phase.STOPPING_SERVICE, SERVICE_GRACE)]
    assert made.exited("gms", 0, now=3.0) == []
    assert made.finished
    assert made.exit_code is ExitCode.DRAINED
    assert made.deadline_passed(Phase.STOPPING_ENGINES) == []
    assert made.deadline_passed(Phase.STOPPING_SERVICE) == []
    assert made.stop() == []


def test_a_stop_without_a_memory_service() -> None:
    made = plan(service=None)
    made.stop()
    made.exited("a", 0, now=1.0)
    made.exited("b", 0, now=1.0)
    assert made.finished


def test_a_stop_while_everything_is_down() -> None:
    made = plan()
    for name in made.names:
        made.exited(name, KILLED, now=1.0)
    assert made.stop() == []
    assert made.finished


def test_a_stop_while_only_the_memory_service_is_up() -> None:
    made = plan()
    made.exited("a", KILLED, now=1.0)
    made.exited("b", KILLED, now=1.0)
    assert made.stop() == [Terminate("gms"), Deadline(Phase.STOPPING_SERVICE, SERVICE_GRACE)]


def test_a_memory_service_that_dies_during_the_stop_is_not_missed() -> None:
    made = plan()
    made.stop()
    assert made.exited("gms", KILLED, now=1.0) == []
    made.exited("a", 0, now=1.0)
    assert made.exited("b", 0, now=1.0) == []
    assert made.finished


def test_what_does_not_go_is_killed() -> None:
    made = plan()
    made.stop()
    made.exited("a", 0, now=1.0)
    assert made.deadline_passed(Phase.STOPPING_ENGINES) == [Kill("b")]
    assert made.exited("b", KILLED, now=16.0) == [Terminate("gms"), Deadline(Phase.STOPPING_SERVICE, SERVICE_GRACE)]
    assert made.deadline_passed(Phase.STOPPING_SERVICE) == [Kill("gms")]
    made.exited("gms", KILLED, now=18.0)
    assert made.finished
    assert made.exit_code is ExitCode.FORCED


@pytest.mark.parametrize("ended", [(), ("a",), ("a", "b")])
def test_a_second_signal_kills_everything(ended: tuple[str, ...]) -> None:
    made = plan()
    made.stop()
    for name in ended:
        made.exited(name, 0, now=1.0)
    left = [name for name in made.names if name not in ended]
    assert made.stop() == [Kill(name) for name in left]
    assert made.stop() == []
    for name in left:
        assert not made.finished
        made.exited(name, KILLED, now=2.0)
    assert made.finished
    assert made.exit_code is ExitCode.FORCED


def test_a_configuration_that_no_engine_can_start_with_ends_the_pod() -> None:
    made = plan()
    assert made.exited("a", ExitCode.BAD_CONFIGURATION, now=1.0) == [Start("a", 1.0)]
    made.started("a", now=2.0)
    actions = made.exited("b", ExitCode.BAD_CONFIGURATION, now=2.1)
    assert actions == [Terminate("a"), Deadline(Phase.STOPPING_ENGINES, GRACE)]
    made.exited("a", -15, now=2.2)
    made.exited("gms", 0, now=1.3)
    assert made.finished
    assert made.exit_code is ExitCode.BAD_CONFIGURATION


def test_a_memory_service_that_cannot_start_ends_the_pod() -> None:
    made = plan()
    made.exited("gms", ExitCode.BAD_CONFIGURATION, now=1.0)
    assert made.phase is Phase.STOPPING_ENGINES


def test_one_engine_that_cannot_start_is_tried_again() -> None:
    made = plan()
    made.exited("a", ExitCode.BAD_CONFIGURATION, now=1.0)
    made.started("a", now=1.0)
    made.exited("b", KILLED, now=2.0)
    made.started("b", now=2.0)
    for now in (3.0, 4.0):
        (action,) = made.exited("b", ExitCode.BAD_CONFIGURATION, now=now)
        assert isinstance(action, Start)
        made.started("b", now=now)


@pytest.mark.parametrize("code", [ExitCode.ENGINE_DEAD, ExitCode.MEMORY_SERVICE_LOST])
def test_when_every_keeper_gave_its_engine_up_at_once_the_pod_ends(code: ExitCode) -> None:
    made = plan()
    made.exited("a", code, now=1.0)
    made.started("a", now=2.0)
    made.exited("b", code, now=2.1)
    assert made.phase is Phase.STOPPING_ENGINES
    assert made.exit_code is code


def test_an_engine_without_a_keeper_may_die_as_often_as_it_likes() -> None:
    made = PodPlan(service="gms", engines=("a",), grace_seconds=GRACE, service_grace_seconds=SERVICE_GRACE, kept=False)
    made.started("a", now=0.0)
    assert isinstance(made.exited("a", ExitCode.ENGINE_DEAD, now=9.0)[0], Start)


names = st.sampled_from(["gms", "a", "b"])
happenings = st.one_of(
    st.tuples(st.just("exit"), names, st.sampled_from([0, 1, 2, -9])),
    st.tuples(st.just("stop")),
    st.tuples(st.just("deadline"), st.sampled_from(Phase)),
)


@given(st.lists(happenings, max_size=40))
def test_whatever_happens_a_stop_comes_to_its_end(events: list[tuple[str, ...]]) -> None:
    """A model of the shell: started processes live until they exit, and killed ones exit."""
    made = plan()
    alive = set(made.names)
    pending: list[Action] = []

    def act(actions: list[Action]) -> None:
        pending.extend(actions)
        while pending:
            match pending.pop(0):
                case Start(name):
                    assert name not in alive
                    assert made.phase is Phase.RUNNING
                    alive.add(name)
                    made.started(name, now=0.0)
                case Kill(name):
                    assert name in alive
                    alive.discard(name)
                    pending.extend(made.exited(name, KILLED, now=0.0))
                case Terminate(name):
                    assert name in alive

    for event in events:
        match event:
            case ("exit", name, code):
                if name in alive:
                    alive.discard(name)
                    act(made.exited(name, int(code), now=0.0))
            case ("stop",):
                act(made.stop())
            case ("deadline", phase):
                act(made.deadline_passed(Phase(phase)))
    act(made.stop())
    act(made.stop())
    assert made.finished
    assert not alive


@pytest.mark.parametrize("name", ["gms", "a"])
def test_what_is_killed_again_and_again_comes_back_at_once(name: str) -> None:
    pod = plan()
    for life in range(10):
        now = life * (RESTART_SETTLED_SECONDS + 0.5)
        pod.started(name, now=now)
        assert pod.exited(name, KILLED, now=now + RESTART_SETTLED_SECONDS) == [Start(name)]


def test_a_memory_service_that_is_told_to_end_comes_back_at_once() -> None:
    pod = plan()
    for life in range(10):
        now = life * (RESTART_SETTLED_SECONDS + 0.5)
        pod.started("gms", now=now)
        assert pod.exited("gms", 0, now=now + RESTART_SETTLED_SECONDS) == [Start("gms")]


def test_what_is_killed_before_it_has_settled_backs_off() -> None:
    pod = plan()
    delays = []
    for life in range(4):
        pod.started("a", now=life * 10.0)
        (start,) = pod.exited("a", KILLED, now=life * 10.0 + 0.1)
        assert isinstance(start, Start)
        delays.append(start.delay_seconds)
    assert delays == [0.0, 1.0, 2.0, 4.0]


def test_what_once_was_ready_is_never_given_up() -> None:
    made = plan()
    made.ready("a")
    for name in ("a", "b", "gms"):
        assert made.exited(name, ExitCode.BAD_CONFIGURATION, now=200.0) == [Start(name, 1.0)]
    assert made.phase is Phase.RUNNING


def test_a_start_that_was_asked_for_does_not_wait_for_earlier_failures() -> None:
    made = plan()
    for at in range(6):
        made.started("a", now=at * 40.0)
        (failed,) = made.exited("a", ExitCode.ENGINE_DEAD, now=at * 40.0 + 10)
    assert failed == Start("a", 16.0)
    made.started("a", now=300.0)
    assert made.exited("a", ExitCode.DRAINED, now=310.0) == [Start("a")]


def test_an_engine_that_ends_in_order_again_and_again_before_it_has_settled_waits() -> None:
    made = plan()
    waits = []
    for at in range(3):
        made.started("a", now=float(at))
        (start,) = made.exited("a", ExitCode.DRAINED, now=at + 0.5)
        waits.append(start.delay_seconds)
    assert waits == [0.0, 1.0, 2.0]


def test_what_hangs_is_killed_also_while_the_pod_stops_and_that_is_no_orderly_end() -> None:
    made = plan()
    assert made.hung("a") == [Kill("a")]
    assert made.exit_code is ExitCode.DRAINED
    made.stop()
    assert made.hung("a") == [Kill("a")]
    assert made.exit_code is ExitCode.FORCED
    made.stop()
    assert made.hung("a") == []
