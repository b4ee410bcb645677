"""When the lock of a killed engine is free, and when its memory is."""

from __future__ import annotations

import pytest

from tests.gpu.harness import MIB, Machine


@pytest.mark.parametrize("gib", [1, 32])
def test_what_a_killed_engine_lets_go_of_first(machine: Machine, gib: int) -> None:
    size = machine.share(gib << 30, 2 * gib * MIB)
    if size < gib << 30 and machine.fake is None:
        pytest.skip(f"no room for {gib} GiB")
    machine.case("tests.gpu.deaths", size, seconds=60)
