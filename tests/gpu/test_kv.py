"""The process tests of the KV pages, on the GPU of this run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.gpu_bench import GpuBench, on_bench
from tests.process.gms import test_kv
from tests.process.gms.bench import Device

globals().update(on_bench(test_kv))


@pytest.fixture
def bench(device: Device) -> Iterator[GpuBench]:
    with GpuBench(device) as made:
        yield made
