"""Whether a parent has used CUDA, asked of a driver; here of the tests' own, which refuses what a fork must not do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fakecuda import FakeGpus, built_once

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_once(tmp_path_factory)


@pytest.fixture
def gpus(library: Path) -> Iterator[FakeGpus]:
    with FakeGpus(library) as machine:
        yield machine


ASKED = """
import ctypes, os, sys
from workers import cuda
assert not cuda.initialised()  # nobody has loaded the driver
driver = ctypes.CDLL("libcuda.so.1")
assert not cuda.initialised()
assert driver.cuInit(0) == 0
assert cuda.initialised()
"""


def test_the_driver_says_whether_it_was_initialised(gpus: FakeGpus) -> None:
    done = gpus.python(ASKED, strict=0)
    assert done.returncode == 0, done.stderr


KEPT = """
import ctypes, sys, types
from workers import factory
from workers.engine import EngineConfigError
from workers.engines.sim.engine import SimEngine
from workers.settings import EngineSettings

class Hasty(SimEngine):
    @staticmethod
    def preload(settings):
        ctypes.CDLL("libcuda.so.1").cuInit(0)

module = types.ModuleType("hasty")
module.Hasty = Hasty
sys.modules["hasty"] = module
factory.preload(EngineSettings(engine="sim"))
factory.preload(EngineSettings(engine="hasty:Hasty", keeper=False))
try:
    factory.preload(EngineSettings(engine="hasty:Hasty"))
except EngineConfigError as error:
    print(error)
"""


def test_an_engine_whose_import_uses_the_gpu_is_not_forked(gpus: FakeGpus) -> None:
    done = gpus.python(KEPT, strict=0)
    assert done.returncode == 0, done.stderr
    assert "importing the engine hasty:Hasty initialised CUDA, which no child of this process could use" in done.stdout
