"""The process tests of the weights, on the GPU of this run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.gpu.gpu_bench import GpuBench, on_bench
from tests.process.gms import test_weights
from tests.process.gms.bench import Device

globals().update(on_bench(test_weights))
_NAMES = itertools.count()


@pytest.fixture(scope="module")
def shared(device: Device) -> Iterator[GpuBench]:
    with GpuBench(device, "--chunk-size", str(device.unit)) as bench:
        yield bench


@pytest.fixture
def bench(shared: GpuBench) -> Iterator[GpuBench]:
    yield shared
    shared.end_agents()


@pytest.fixture
def pool() -> str:
    return f"weights/{next(_NAMES)}"
