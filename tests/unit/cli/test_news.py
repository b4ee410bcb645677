"""What ``up`` tells of a pod, look by look."""

from __future__ import annotations

import msgspec

from app.cli.news import News, PodNews
from app.cli.reports import Absence, EngineAnswer
from workers.contract import Role
from workers.state import DrainState, EngineState, Promotion, ServiceLink


def report(
    engine: str, role: Role, *, pid: int, at: float, since: float, epoch: int = 0, granted: float | None = None
) -> EngineState:
    promotion = None
    if granted is not None:
        done = granted + 0.004
        promotion = Promotion(epoch=epoch, granted=granted, epoch_written=granted, memory_mapped=done, bound=done)
    return EngineState(
        worker="pod-0",
        keeper_pid=None,
        restarts=0,
        steps=0,
        models=(),
        standby=None,
        memory=None,
        instance="i",
        engine=engine,
        role=role,
        role_seconds=at - since,
        pid=pid,
        epoch=epoch,
        inflight=0,
        capacity=64,
        rss_bytes=0,
        monotonic=at,
        promotion=promotion,
        failure="no memory" if role is Role.FAILED else None,
    )


def active(engine: str, *, pid: int, at: float, granted: float, epoch: int = 1) -> EngineState:
    return report(engine, Role.ACTIVE, pid=pid, at=at, since=granted + 0.004, epoch=epoch, granted=granted)


def parked(engine: str, *, pid: int, at: float, since: float) -> EngineState:
    return report(engine, Role.STANDBY, pid=pid, at=at, since=since)


def texts(news: list[News]) -> list[str]:
    return [item.text for item in news]


def started() -> PodNews:
    news = PodNews("pod-0")
    answers: dict[str, EngineAnswer] = {
        "a": active("a", pid=1, at=10.0, granted=9.0),
        "b": parked("b", pid=2, at=10.0, since=9.5),
    }
    assert texts(news.look(answers, now=10.0)) == [
        "pod-0: a is active, epoch 1, 4.0 ms after it got the lock",
        "pod-0: b is parked, the spare is ready",
    ]
    return news


def test_a_start_look_by_look() -> None:
    news = PodNews("pod-0")
    assert news.look({"a": Absence.GONE, "b": Absence.GONE}, now=0.0) == []
    starting = report("a", Role.INIT, pid=1, at=0.5, since=0.4)
    assert news.look({"a": starting, "b": Absence.GONE}, now=0.5) == []
    assert news.look({"a": parked("a", pid=1, at=1, since=0.9), "b": Absence.GONE}, now=1) == []
    both = {"a": active("a", pid=1, at=2, granted=1.1), "b": parked("b", pid=2, at=2, since=1.5)}
    assert [round(item.at, 3) for item in news.look(both, now=2)] == [1.104, 1.5]
    assert news.look(both, now=3) == []


def test_the_active_engine_dies_and_somebody_looks_in_between() -> None:
    news = started()
    taken = active("b", pid=2, at=12.1, granted=12.0, epoch=2)
    assert texts(news.look({"a": Absence.GONE, "b": taken}, now=12.1)) == [
        "pod-0: a is gone, it was ACTIVE",
        "pod-0: b is active, epoch 2, 4.0 ms after it got the lock",
    ]
    back = {"a": parked("a", pid=3, at=14.5, since=14.3), "b": active("b", pid=2, at=14.5, granted=12.0, epoch=2)}
    (item,) = news.look(back, now=14.5)
    assert item.text == "pod-0: a is parked again, redundancy restored after 2.3 s"
    assert item.at == 14.3


def test_all_of_it_between_two_looks() -> None:
    news = started()
    after = {"a": parked("a", pid=3, at=12.25, since=12.2), "b": active("b", pid=2, at=12.25, granted=12.1, epoch=2)}
    assert texts(news.look(after, now=12.25)) == [
        "pod-0: a is gone, it was ACTIVE",
        "pod-0: b is active, epoch 2, 4.0 ms after it got the lock",
        "pod-0: a is parked again, redundancy restored after 0.1 s",
    ]


def test_the_death_is_seen_before_the_promotion() -> None:
    news = started()
    still = parked("b", pid=2, at=12.0, since=9.5)
    assert texts(news.look({"a": Absence.GONE, "b": still}, now=12.0)) == ["pod-0: a is gone, it was ACTIVE"]
    news.look({"a": Absence.GONE, "b": active("b", pid=2, at=12.2, granted=12.1, epoch=2)}, now=12.2)
    back = {"a": parked("a", pid=3, at=15, since=14.1), "b": active("b", pid=2, at=15, granted=12.1, epoch=2)}
    assert texts(news.look(back, now=15)) == ["pod-0: a is parked again, redundancy restored after 2.0 s"]


def test_the_spare_dies() -> None:
    news = started()
    same = active("a", pid=1, at=12.0, granted=9.0)
    assert texts(news.look({"a": same, "b": Absence.GONE}, now=12.0)) == ["pod-0: b is gone, it was STANDBY"]
    back = {"a": same, "b": parked("b", pid=4, at=13, since=12.5)}
    # The last sign of life was at 10: the loss cannot be older, and nobody knows better.
    assert texts(news.look(back, now=13)) == ["pod-0: b is parked again, redundancy restored after 2.5 s"]


def test_the_spare_dies_and_then_the_active_engine() -> None:
    news = started()
    news.look({"a": active("a", pid=1, at=11, granted=9.0), "b": Absence.GONE}, now=11)
    assert news.look({"a": active("a", pid=1, at=12, granted=9.0), "b": Absence.GONE}, now=12) == []
    reborn = active("b", pid=4, at=14, granted=13, epoch=2)
    assert texts(news.look({"a": Absence.GONE, "b": reborn}, now=14))[-1].startswith("pod-0: b is active, epoch 2")
    back = {"a": parked("a", pid=5, at=16, since=15.0), "b": reborn}
    assert texts(news.look(back, now=16)) == ["pod-0: a is parked again, redundancy restored after 5.0 s"]


def test_a_stopped_engine_is_silent_until_it_is_killed_or_goes_on() -> None:
    news = started()
    other = parked("b", pid=2, at=11, since=9.5)
    assert texts(news.look({"a": Absence.SILENT, "b": other}, now=11)) == ["pod-0: a (ACTIVE) does not answer"]
    assert news.look({"a": Absence.SILENT, "b": other}, now=12) == []
    goes_on = {"a": active("a", pid=1, at=13, granted=9.0), "b": other}
    assert texts(news.look(goes_on, now=13)) == ["pod-0: a answers again"]
    news.look({"a": Absence.SILENT, "b": other}, now=14)
    assert texts(news.look({"a": Absence.GONE, "b": other}, now=15)) == ["pod-0: a is gone, it was ACTIVE"]


def test_other_roles_are_told_with_their_reason() -> None:
    news = started()
    other = parked("b", pid=2, at=11, since=9.5)
    draining = report("a", Role.DRAINING, pid=1, at=11, since=10.5)
    assert texts(news.look({"a": draining, "b": other}, now=11)) == ["pod-0: a is DRAINING"]
    failed = report("a", Role.FAILED, pid=1, at=12, since=11.5)
    assert texts(news.look({"a": failed, "b": other}, now=12)) == ["pod-0: a is FAILED: no memory"]


def test_with_two_spares_redundancy_is_both_of_them() -> None:
    news = PodNews("pod-0")
    answers: dict[str, EngineAnswer] = {
        "a": active("a", pid=1, at=10.0, granted=9.0),
        "b": parked("b", pid=2, at=10.0, since=9.5),
        "c": report("c", Role.INIT, pid=3, at=10.0, since=9.0),
    }
    assert "spare" not in " ".join(texts(news.look(answers, now=10.0)))
    assert (news.parked, news.complete) == (1, False)
    answers["c"] = parked("c", pid=3, at=11.0, since=10.5)
    assert texts(news.look(answers, now=11.0)) == ["pod-0: c is parked, all 2 spares are ready"]
    answers = {
        "a": report("a", Role.INIT, pid=4, at=12.0, since=11.6),
        "b": active("b", pid=2, at=12.0, granted=11.5, epoch=2),
        "c": parked("c", pid=3, at=12.0, since=10.5),
    }
    assert "redundancy" not in " ".join(texts(news.look(answers, now=12.0)))
    answers["a"] = parked("a", pid=4, at=13.5, since=13.0)
    assert texts(news.look(answers, now=13.5)) == ["pod-0: a is parked again, redundancy restored after 1.5 s"]
    assert news.parked == 2


def test_an_engine_that_waits_for_requests_before_it_hands_over_is_told_of_once() -> None:
    news = started()
    spare = parked("b", pid=2, at=11.0, since=9.5)
    waiting = DrainState(
        phase="settling",
        seconds=1.0,
        left_seconds=29.0,
        remaining={"chat": 2, "completions": 1},
        bound=("r-1 (/v1/chat/completions, 3.0 s)", "r-2 (/v1/completions, 1.0 s)"),
        cut=False,
    )
    serving = msgspec.structs.replace(active("a", pid=1, at=11.0, granted=9.0), draining=waiting)
    (said,) = texts(news.look({"a": serving, "b": spare}, now=11.0))
    assert said == (
        "pod-0: a waits for 3 requests that no other engine could resume (2 chat, 1 completions), then it hands "
        "over; it is called off in 29 s: r-1 (/v1/chat/completions, 3.0 s); r-2 (/v1/completions, 1.0 s) …"
    )
    fewer = msgspec.structs.replace(waiting, remaining={"chat": 1}, bound=waiting.bound[:1], left_seconds=20.0)
    assert news.look({"a": msgspec.structs.replace(serving, draining=fewer), "b": spare}, now=12.0) == []
    assert news.look({"a": active("a", pid=1, at=13.0, granted=9.0), "b": spare}, now=13.0) == []
    assert len(news.look({"a": serving, "b": spare}, now=14.0)) == 1  # asked for once more


def test_a_memory_service_that_was_killed_and_is_back_is_told_of_once_for_all() -> None:
    news = started()

    def look(at: float, **links: ServiceLink) -> list[str]:
        engines = {"a": active("a", pid=1, at=at, granted=9.0), "b": parked("b", pid=2, at=at, since=9.5)}
        answers = {name: msgspec.structs.replace(engines[name], memory_service=links[name]) for name in engines}
        return texts(news.look(answers, now=at))

    held = ServiceLink(connected=True, adrift_seconds=None, restored=0, private=(), problem="")
    gone = msgspec.structs.replace(held, connected=False, adrift_seconds=0.3)
    again = msgspec.structs.replace(held, restored=1)
    assert look(11.0, a=held, b=held) == []
    assert look(12.0, a=gone, b=gone) == []
    assert look(13.0, a=again, b=gone) == []
    assert look(14.0, a=again, b=again) == ["pod-0: the memory service is back, and has its pages again from a and b"]
    assert look(15.0, a=again, b=again) == []
    twice = msgspec.structs.replace(held, restored=2)  # nobody saw it gone
    assert look(16.0, a=twice, b=twice) == ["pod-0: the memory service is back, and has its pages again from a and b"]


def test_a_silent_spare_restores_nothing() -> None:
    """The active engine dies while one of two spares is stopped: redundancy is back when that one answers again."""
    news = PodNews("pod-0")
    first, b = active("a", pid=1, at=10.0, granted=9.0), parked("b", pid=2, at=10.0, since=9.5)
    news.look({"a": first, "b": b}, now=10.0)
    assert texts(news.look({"a": first, "b": Absence.SILENT}, now=11)) == ["pod-0: b (STANDBY) does not answer"]
    again = active("a", pid=3, at=12, granted=11.5, epoch=2)
    assert texts(news.look({"a": again, "b": Absence.SILENT}, now=12)) == [
        "pod-0: a is gone, it was ACTIVE",
        "pod-0: a is active, epoch 2, 4.0 ms after it got the lock",
    ]
    assert not news.complete
    assert news.parked == 0
    assert texts(news.look({"a": again, "b": parked("b", pid=2, at=14, since=9.5)}, now=14)) == [
        "pod-0: b answers again",
        "pod-0: b is parked again, redundancy restored after 2.5 s",
    ]
