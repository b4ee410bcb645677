"""When a benchmark takes a pod for complete."""

from __future__ import annotations

import pytest

from app.cli.bench.pods import complete
from tests.unit.cli.test_news import report
from workers.contract import Role
from workers.pod_files import EngineRecord, PodRecord


def pod_of(engines: str) -> PodRecord:
    records = {name: EngineRecord(pid=1, admin_port=1, restarts=0) for name in engines}
    return PodRecord(pod="pod-0", instance="i", pid=1, host="h", serving_port=1, gms=None, engines=records)


@pytest.mark.parametrize(
    ("engines", "roles", "active"),
    [
        ("ab", {"a": Role.ACTIVE, "b": Role.STANDBY}, "a"),
        ("ab", {"a": Role.STANDBY, "b": Role.ACTIVE}, "b"),
        ("ab", {"a": Role.ACTIVE, "b": Role.INIT}, None),
        ("ab", {"a": Role.ACTIVE}, None),
        ("ab", {"a": Role.STANDBY, "b": Role.PROMOTING}, None),
        ("abc", {"a": Role.ACTIVE, "b": Role.STANDBY, "c": Role.INIT}, "a"),
        ("a", {"a": Role.ACTIVE}, "a"),
        ("a", {"a": Role.INIT}, None),
        ("a", {}, None),
    ],
)
def test_a_pod_is_complete_with_an_active_engine_and_a_spare(
    engines: str, roles: dict[str, Role], active: str | None
) -> None:
    states = [report(name, role, pid=1, at=2.0, since=1.0) for name, role in roles.items()]
    found = complete(pod_of(engines), states)
    assert (found.engine if found is not None else None) == active
