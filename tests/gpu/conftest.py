"""One GPU for the whole run, a limit for its time, and the report at its end.

`make gpu` runs this folder with the pytest.ini beside this file; without a GPU all is skipped. With --fake-driver all
but torch's part runs on the tests' fake driver, in small sizes: so it is kept working where there is no GPU.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.gpu_bench import described
from tests.gpu.harness import Actor, Budget, Machine
from tests.gpu.report import Fact, Report
from tests.process.gms import processes
from tests.process.gms.bench import Device
from tests.support.fakecuda import FakeGpus, build

HERE = Path(__file__).parent
ORDER = ("facts", "timings", "deaths", "kernel", "promotion", "vllm", "service", "kv", "weights")
"""What cannot be learned without a GPU comes first, in case the time does not suffice for all."""
RUN_SECONDS = 460.0
"""Eight minutes, with what pytest itself takes."""
LAST_PART = 0.12
"""Of that time: nothing is started in it any more, so that what runs can end."""
DEADLINE_SECONDS = 45.0
"""For a line of the process tests' agents: waking a GPU, and filling one, takes longer than anything on the host."""
FAKE_BYTES = 512 << 20

pytest.register_assert_rewrite("tests.process.gms.test_kv", "tests.process.gms.test_weights")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fake-driver", action="store_true", help="use the fake CUDA driver and small sizes")
    parser.addoption("--seconds", type=float, default=RUN_SECONDS, help="the time that the run may take")


_REPORT = pytest.StashKey[Report]()


def pytest_configure(config: pytest.Config) -> None:
    out = os.environ.get("OUT")
    fake = config.getoption("--fake-driver", default=False)
    title = "# What the fake driver said (no GPU: the times mean nothing)" if fake else "# What a GPU said"
    config.stash[_REPORT] = Report(title, Path(out) / "gpu-report.md" if out else None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Within the suite of all tests these are skipped: they need the GPU for themselves, and minutes."""
    places = {HERE / f"test_{name}.py": place for place, name in enumerate(ORDER)}
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.gpu)
            if config.inipath != HERE / "pytest.ini":
                item.add_marker(pytest.mark.skip(reason="needs a GPU for itself: make gpu"))
    items.sort(key=lambda item: places.get(item.path, -1))


@pytest.fixture(scope="session")
def fake_driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """The folder with it, if the run is to use it."""
    if not request.config.getoption("--fake-driver"):
        return None
    return build(tmp_path_factory.getbasetemp() / "fakecuda")


@pytest.fixture(scope="session")
def budget(request: pytest.FixtureRequest, fake_driver: Path | None) -> Iterator[Budget]:
    """It begins once the fake driver is built. At its very end the run is broken off in the middle of a test, and still
    reports."""

    def break_off(number: int, frame: object) -> None:
        request.config.stash[_REPORT].note("Broken off: the time was over.")
        pytest.exit("the time is over", returncode=1)

    seconds = request.config.getoption("--seconds")
    before = signal.signal(signal.SIGALRM, break_off)
    signal.setitimer(signal.ITIMER_REAL, seconds, 10.0)  # again, should what ends the tests hang as well
    try:
        yield Budget(seconds * (1 - LAST_PART))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest, fake_driver: Path | None, budget: Budget) -> Iterator[Machine]:
    """The GPU, kept awake. Skips all if there is none."""
    if fake_driver is None:
        yield from _machine(request.config.stash[_REPORT], budget, None)
        return
    with FakeGpus(fake_driver, memory_bytes=FAKE_BYTES) as gpus:
        yield from _machine(request.config.stash[_REPORT], budget, gpus)


def _machine(report: Report, budget: Budget, fake: FakeGpus | None) -> Iterator[Machine]:
    environment = {} if fake is None else fake.environment("awake")
    with Actor(["-m", "tests.gpu.driver"], environment) as awake:
        found: dict[str, Any] = awake.json(seconds=60)
        if "reason" in found:
            pytest.skip(f"no GPU here: {found['reason']}")
        report.note(
            f"{found['name']}, {found['total_bytes'] >> 20} MiB of which {found['free_bytes'] >> 20} are free, driver "
            f"{found['driver']}, Linux {found['kernel']}, Python {found['python']}."
        )
        report.add(Fact("what the device is", found["uuid"]))
        report.add(Fact("granularity", f"{found['granularity']} bytes"))
        for number, value in found["attributes"].items():
            relied = "" if number == "110" else "1"
            report.add(Fact(f"attribute {number}", str(value), relied))
        if fake is not None:
            report.note("This was the FAKE driver: times are those of files in memory, and facts what it assumes.")
        yield Machine(found, report, budget, fake)
        awake.finish()


@pytest.fixture(scope="session")
def device(machine: Machine, fake_driver: Path | None) -> Iterator[Device]:
    """For the process tests' bench."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "DEADLINE", DEADLINE_SECONDS)
        yield described(machine, fake_driver)


@pytest.fixture(autouse=True)
def _within_the_time(machine: Machine) -> None:
    machine.budget.check()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The report, last of all that is said, and what the tests came to within it."""
    report = config.stash[_REPORT]
    if config.inipath != HERE / "pytest.ini":
        return
    counts = {kind: len(terminalreporter.stats.get(kind, ())) for kind in ("passed", "failed", "error", "skipped")}
    told = [f"{count} {kind}" for kind, count in counts.items() if count]
    report.note(f"Tests: {', '.join(told) or 'none ended'}.")
    for failed in terminalreporter.stats.get("failed", ()):
        report.note(f"Failed: {failed.nodeid}.")
    reasons = Counter(
        skipped.longrepr[2].removeprefix("Skipped: ") for skipped in terminalreporter.stats.get("skipped", ())
    )
    for reason, count in reasons.items():
        report.note(f"Skipped, {count}: {reason}")
    terminalreporter.section("report")
    terminalreporter.write_line(report.render())
