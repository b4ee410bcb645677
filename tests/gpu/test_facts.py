"""Facts that only a GPU can tell. Those that the code relies on fail when they are otherwise; the others are noted."""

from __future__ import annotations

import pytest

from tests.gpu import facts, sharing
from tests.gpu.harness import MIB, Machine


@pytest.mark.parametrize("name", facts.CASES)
def test_of_one_process(machine: Machine, name: str) -> None:
    machine.case("tests.gpu.facts", name, machine.share(256 * MIB, 32 * MIB), rude=name in facts.RUDE)


@pytest.mark.parametrize("name", sharing.CASES)
def test_of_several_processes(machine: Machine, name: str) -> None:
    machine.case("tests.gpu.sharing", name, rude=name in sharing.RUDE)
