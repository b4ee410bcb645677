"""Subprocesses on a machine of fake GPUs. Nothing here loads the driver into the test's own process."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fakecuda import FakeGpus, built_once

PRELUDE = "from tests.process.gms.cuda.prelude import *\n"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_once(tmp_path_factory)


@pytest.fixture
def gpus(fake_cuda: Path) -> Iterator[FakeGpus]:
    with FakeGpus(fake_cuda) as machine:
        yield machine


@pytest.fixture
def run(gpus: FakeGpus) -> Run:
    """Runs code after PRELUDE; it must end well, and unless `complaints` are expected without any."""

    def run_(code: str, *, complaints: bool = False, **settings: object) -> subprocess.CompletedProcess[str]:
        done = gpus.python(PRELUDE + textwrap.dedent(code), **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        assert complaints or not gpus.complaints(), gpus.complaints()
        return done

    return run_
