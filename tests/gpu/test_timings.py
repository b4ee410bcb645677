"""How long create, export, import, map and set-access take, by the size of the chunks."""

from __future__ import annotations

import pytest

from tests.gpu.harness import MIB, Machine

CHUNKS = [2 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 512 * MIB, 1024 * MIB]
MOST_BYTES = 64 << 30
MOST_CHUNKS = 8192
"""64 GiB in chunks of 2 MiB would be four times as many, and say the same."""


@pytest.mark.parametrize("chunk_bytes", CHUNKS, ids=lambda size: f"{size // MIB}-mib")
def test_of_each_call(machine: Machine, chunk_bytes: int) -> None:
    total = machine.share(min(MOST_BYTES, MOST_CHUNKS * chunk_bytes), 48 * MIB)
    if total < chunk_bytes:
        pytest.skip(f"no room for a chunk of {chunk_bytes // MIB} MiB")
    machine.case("tests.gpu.timings", "chunks", chunk_bytes, total, seconds=90)


def test_of_mapping_as_engines_do(machine: Machine) -> None:
    chunk_bytes = machine.share(512 * MIB, 8 * MIB)
    machine.case("tests.gpu.timings", "attach", chunk_bytes, machine.share(MOST_BYTES, 48 * MIB), seconds=90)
