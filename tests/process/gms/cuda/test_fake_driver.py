"""The fake refuses what a GPU would refuse, so that the other tests mean something."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fakecuda
from tests.support.fakecuda import FakeGpus, compiler

from .conftest import PRELUDE, Run

ROOT = Path(__file__).parents[4]
MISUSES = {
    "before cuInit": ("from cuda.bindings import driver as cu; cu.cuDeviceGetCount()", "before cuInit"),
    "odd size": ("d.create(0, G + 4096)", "not a multiple of 2 MiB"),
    "released twice": ("h = d.create(0, G); d.release(h); d.release(h)", "unknown or released handle"),
    "export of a released handle": ("h = d.create(0, G); d.release(h); d.export(h)", "unknown or released handle"),
    "map of a released handle": (
        "h = d.create(0, G); a = d.reserve(G); d.release(h); d.map(a, G, h)",
        "unknown or released handle",
    ),
    "mapped twice": ("h = d.create(0, G); a = d.reserve(G); d.map(a, G, h); d.map(a, G, h)", "over a mapping"),
    "map of a part": ("h = d.create(0, 2 * G); a = d.reserve(2 * G); d.map(a, G, h)", "is not the handle's"),
    "map beyond": ("h = d.create(0, 2 * G); a = d.reserve(G); d.map(a, 2 * G, h)", "outside any reservation"),
    "map without addresses": ("h = d.create(0, G); d.map(G, G, h)", "outside any reservation"),
    "unmap of a part": (
        "h = d.create(0, 2 * G); a = d.reserve(2 * G); d.map(a, 2 * G, h); d.unmap(a, G)",
        "not whole mappings",
    ),
    "unmapped twice": (
        "h = d.create(0, G); a = d.reserve(G); d.map(a, G, h); d.unmap(a, G); d.unmap(a, G)",
        "not whole mappings",
    ),
    "access to more than is mapped": (
        "h = d.create(0, G); a = d.reserve(2 * G); d.map(a, G, h); d.allow(0, a, 2 * G, writable=True)",
        "not whole mappings",
    ),
    "access for another GPU": (
        "h = d.create(0, G); a = d.reserve(G); d.map(a, G, h); d.allow(1, a, G, writable=True)",
        "that the memory is not on",
    ),
    "free of what is mapped": (
        "h = d.create(0, G); a = d.reserve(G); d.map(a, G, h); d.free(a, G)",
        "free of a mapped range",
    ),
    "free of a part": ("a = d.reserve(2 * G); d.free(a, G)", "no whole reservation"),
    "a context where none may be": ("d.retain_context(0)", "must not make a context"),
    "a context released too often": ("d.release_context(0)", "released too often"),
    "after a fork": (
        """
if os.fork() == 0:
    d._cuda.cuMemCreate(G, d._properties_of_0, 0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))""",
        "in a forked child",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_ends_the_process_or_is_an_error(gpus: FakeGpus, name: str) -> None:
    code, says = MISUSES[name]
    start = "" if name == "before cuInit" else "d = Driver(); d._properties_of_0 = d._properties(0)\n"
    settings = {"no_context": int("context where none" in name), "devices": 2}
    done = gpus.python(PRELUDE + start + code, **settings)
    ended = (-signal.SIGABRT, 256 - signal.SIGABRT)  # itself, or its forked child
    assert done.returncode in ended, done.stdout + done.stderr
    assert any("MISUSE" in line and says in line for line in gpus.complaints()), gpus.complaints()
    lenient = gpus.python(PRELUDE + start + code, log="lenient", strict=0, **settings)
    assert lenient.returncode in (0, 1), lenient.stderr
    assert any("MISUSE" in line and says in line for line in gpus.complaints("lenient"))


def test_a_limit_holds_over_processes_and_survives_kills(gpus: FakeGpus) -> None:
    """What a killed process had is free again; a descriptor alone keeps memory."""
    limit = {"mem": 8 << 20}
    for _ in range(3):
        killed = gpus.python(PRELUDE + "Driver().create(0, 3 * G); os.kill(os.getpid(), 9)", **limit)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    code = """
d = Driver()
handle = d.create(0, 3 * G)
fd = d.export(handle)
d.release(handle)
raised(OutOfMemoryError, d.create, 0, 2 * G)
os.close(fd)
d.release(d.create(0, 4 * G))
"""
    done = gpus.python(PRELUDE + code, **limit)
    assert (done.returncode, gpus.complaints()) == (0, []), done.stderr


def test_what_is_left_is_reported(gpus: FakeGpus) -> None:
    code = "d = Driver(); h = d.create(0, G); a = d.reserve(G); d.map(a, G, h); d.reserve(G)"
    assert gpus.python(PRELUDE + code).returncode == 0
    assert gpus.complaints() == ["LEAK handles=1 mappings=1 reservations=2"]
    assert gpus.calls().count("cuMemMap") == 1


def test_memory_is_poisoned_and_errors_are_counted(run: Run) -> None:
    run(
        """
        d = Driver()
        os.environ["FAKE_CUDA_FAIL"] = "cuMemCreate@2=999,cuMemRelease@1=1"
        first = d.create(0, G)
        assert raised(CudaError, d.create, 0, G).number == 999
        second = d.create(0, G)
        assert raised(CudaError, d.release, first).number == 1
        d.release(first)
        d.release(second)
        with Reservation(G, memory=device_memory("cuda:0")) as range_:
            range_.map_scratch(G)
            assert range_.read(0, G) == b"\\xa5" * G
        """
    )


def test_two_builds_at_once_both_give_a_library(tmp_path: Path) -> None:
    compiler()
    code = "import sys, pathlib\nfrom tests.support.fakecuda import build\nprint(build(pathlib.Path(sys.argv[1])))"
    builds = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "lib")], cwd=ROOT, stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [build.wait(50) for build in builds] == [0, 0]
    assert [path.name for path in (tmp_path / "lib").iterdir()] == ["libcuda.so.1"]


def test_a_build_that_fails_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler()
    monkeypatch.setattr(fakecuda, "PARTS", ("no-such-part.c",))
    with pytest.raises(AssertionError, match=r"does not compile:\n(.|\n)*no-such-part"):
        fakecuda.build(tmp_path / "lib")
    assert list((tmp_path / "lib").iterdir()) == []


def test_without_a_compiler_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match="apt-get install gcc"):
        fakecuda.build(tmp_path / "lib")


def test_the_binary_interface_is_that_of_cuda_h() -> None:
    places = [
        *Path("/usr/local").glob("cuda*/include"),
        *Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/include"),
    ]
    include = next((place for place in places if (place / "cuda.h").exists()), None)
    if include is None:
        pytest.skip("no cuda.h on this machine; it comes with a CUDA toolkit")
    check = [compiler(), "-std=gnu11", "-fsyntax-only", "-I", str(include), str(fakecuda.SOURCES / "abi_check.c")]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
