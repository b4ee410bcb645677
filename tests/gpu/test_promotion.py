"""A promotion with torch: a graph that was captured over scratch backing runs over the pages of a killed engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from tests.gpu.harness import MIB, Actor, Machine
from tests.gpu.report import Duration, Fact
from tests.gpu.services import Service

STARTS_SECONDS = 90.0
"""Two processes import torch at once and load its kernels."""


def test_a_captured_graph_goes_on_over_the_pages_of_a_killed_engine(machine: Machine, tmp_path: Path) -> None:
    """With the fake driver it is host memory and a CPU, without a graph: torch cannot compute on that GPU."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    device = "cuda:0" if machine.fake is None else "cpu:0"
    with _actor("able", device) as able:
        found = able.json(STARTS_SECONDS)
        if found["reason"]:
            pytest.skip(found["reason"])
        machine.report.note(f"torch {found['torch']}, its part on {device}.")
    kv_bytes = machine.share(1 << 30, 16 * MIB) // (16 * MIB) * (16 * MIB)  # eight chunks, of whole granules
    lock = tmp_path / "active.lock"
    lock.touch()
    chunk_bytes = kv_bytes // 8
    with (
        Service(machine, device, "--chunk-size", str(chunk_bytes)) as service,
        _actor("active", service.path, device, lock, kv_bytes) as active,
        _actor("shadow", service.path, device, lock, kv_bytes) as shadow,
    ):
        assert active.json(STARTS_SECONDS) == {"serving": True}
        assert shadow.json(STARTS_SECONDS) == "parked"
        killed = active.kill()
        found = shadow.json()
        shadow.finish()
        with _actor("auditor", service.path, device, lock, kv_bytes) as auditor:
            written = auditor.json(STARTS_SECONDS)
            auditor.finish()
    times = {"SIGKILL": killed} | {step: found[step] for step in ("lock", "granted", "mapped", "answered")}
    for (before, since), (after, at) in pairwise(times.items()):
        machine.report.add(Duration(f"promotion on {device}: {before} → {after}", (at - since) * 1e3))
    facts = {
        "weights from a second process, read-only": found["weights"] and found["shared"],
        "a graph captured over scratch, replayed over the pages of a killed engine": found["answer"],
        "what that graph wrote is in the service's pages": written,
    }
    for question, holds in facts.items():
        machine.report.add(Fact(f"{question} ({device})", "as expected" if holds else "otherwise", "as expected"))
    assert not found["created"], "the shadow got new pages instead of the dead one's"
    assert all(facts.values()), facts


@contextmanager
def _actor(role: str, *arguments: object) -> Iterator[Actor]:
    """Not on the fake driver, where torch would see a GPU."""
    with Actor(["-m", "tests.gpu.promotion", role, *map(str, arguments)], {}) as actor:
        yield actor
