"""Engines by name, by entry point and by class; and which classes are refused."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from workers import factory
from workers.engine import Engine, EngineConfigError
from workers.engines import catalogue, fit
from workers.engines.sim import SimEngine
from workers.settings import EngineSettings, PodSettings, SettingsError, load_settings

ROOT = Path(__file__).parents[3]


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages with engines, as an installer leaves them."""
    for package, points in (
        ("other-engine", "other = other_engine:Other\nvllm = other_engine:Thief\ntwice = other_engine:A\n"),
        ("more-engines", "twice = more:B\nbroken = more\n"),
    ):
        info = tmp_path / f"{package.replace('-', '_')}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{catalogue.GROUP}]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_names_of_ours_are_those_of_our_metadata() -> None:
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert metadata["project"]["entry-points"][catalogue.GROUP] == catalogue.OURS


@pytest.mark.parametrize("name", catalogue.OURS)
def test_each_of_ours_fits(name: str) -> None:
    found = catalogue.find(name)
    assert found.package == "hotspare"
    fit.check_class(catalogue.load(found), name=name)


def test_an_engine_of_another_package_is_found_by_its_name(others: Path) -> None:
    assert catalogue.find("other") == catalogue.Found(name="other", target="other_engine:Other", package="other-engine")
    assert "other" in [found.name for found in catalogue.installed()]


def test_no_package_can_stand_in_for_ours(others: Path) -> None:
    assert catalogue.find("vllm").target == catalogue.OURS["vllm"]
    assert [found.package for found in catalogue.installed() if found.name == "vllm"] == ["hotspare"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("tgi", r"there is no engine 'tgi' here; there are vllm, sim.*, other, .*'hotspare\.engines'"),
        ("twice", "more-engines and other-engine both bring an engine 'twice'; name the class itself"),
        ("broken", "there is no engine 'broken'"),
        ("no/name", "'no/name' is neither the name of an engine nor a class"),
        ("module:", "'module:' is neither the name of an engine nor a class"),
        ("", "'' is neither the name of an engine nor a class"),
    ],
)
def test_what_is_no_engine_is_refused_in_a_sentence(others: Path, name: str, sentence: str) -> None:
    with pytest.raises(EngineConfigError, match=sentence):
        catalogue.find(name)


@pytest.mark.parametrize("settings", [EngineSettings, PodSettings])
def test_settings_refuse_an_engine_that_is_not_there(settings: type[Any]) -> None:
    with pytest.raises(SettingsError, match=r"^HOTSPARE_ENGINE \(given: 'tgi'\): there is no engine 'tgi' here"):
        load_settings(settings, {"engine": "tgi"})


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("no_such_module_here:Engine", "No module named 'no_such_module_here'; install it in this environment"),
        ("workers.engines.sim.nothing:Engine", "No module named 'workers.engines.sim.nothing'; install it"),
        ("workers.engines.sim:NoSuch", "workers.engines.sim has no NoSuch"),
        ("workers.life:end_process", "workers.life is no class: end_process"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_a_sentence(target: str, sentence: str) -> None:
    with pytest.raises(EngineConfigError, match=sentence):
        catalogue.load(catalogue.find(target))


def test_an_import_that_fails_inside_does_not_blame_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine_with_needs.py").write_text("import no_such_library_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineConfigError, match=r"No module named 'no_such_library_here'$"):
        catalogue.load(catalogue.find("engine_with_needs:Engine"))


class NoPark(SimEngine):
    park = None  # type: ignore[assignment]


class BlockingPark(SimEngine):
    def park(self) -> None:  # type: ignore[override]
        pass


class WaitingApp(SimEngine):
    async def app(self) -> None:  # type: ignore[override]
        pass


class WithoutEpoch(SimEngine):
    async def wake(self) -> None:  # type: ignore[override]
        pass


class OtherConstructor(SimEngine):
    def __init__(self, settings: EngineSettings) -> None:
        pass


class WithoutModels:
    """All methods, and none of the facts."""


for _name in (*fit.methods(), "preload"):
    setattr(WithoutModels, _name, getattr(SimEngine, _name, None))


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (NoPark, "it has no method `park`"),
        (BlockingPark, "its `park` must be `async def`"),
        (WaitingApp, "its `app` must be a plain `def`, not `async def`"),
        (WithoutEpoch, "its `wake` must be callable as `wake(epoch=…)`"),
        (OtherConstructor, "it cannot be made as Class(settings, service, runtime_dir)"),
    ],
)
def test_a_class_that_does_not_fit_is_refused_with_what_is_missing(cls: type[Any], sentence: str) -> None:
    with pytest.raises(EngineConfigError) as refused:
        fit.check_class(cls, name="mine:Mine")
    assert str(refused.value).startswith("mine:Mine is no engine: ")
    assert sentence in str(refused.value)


def test_everything_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(EngineConfigError) as refused:
        fit.check_class(object, name="mine:Mine")
    assert all(f"it has no method `{name}`" in str(refused.value) for name in fit.methods())


def test_facts_may_be_set_by_the_constructor_and_are_looked_for_then() -> None:
    with pytest.raises(EngineConfigError, match="it has no `models`; it has no `max_model_len`; it has no `steps`"):
        fit.check_instance(WithoutModels(), name="mine:Mine")


def test_an_instance_that_does_not_fit_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_an_engine.py").write_text(
        "from workers.engines.sim import SimEngine\n"
        "class Half(SimEngine):\n"
        "    def __init__(self, settings, service, runtime_dir):\n"
        "        pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = EngineSettings(engine="half_an_engine:Half", run_dir=tmp_path)
    with pytest.raises(EngineConfigError, match="it has no `models`"):
        factory.build_engine(settings, None, runtime_dir=tmp_path)


def test_the_protocol_names_what_is_asked_for() -> None:
    """So that a renamed or private member of the Protocol does not silently drop out of the check."""
    assert {"initialize", "wake", "park", "app", "check_health", "kv_usage", "memory", "custody", "shutdown"} <= set(
        fit.methods()
    )
    assert set(fit.facts()) == {"models", "max_model_len", "steps", "busy", "dead"}
    assert Engine.__name__ == "Engine"


IMPORTED = """
import sys
from workers.factory import build_engine, preload
from workers.settings import EngineSettings
preload(EngineSettings(engine=sys.argv[1]))
print(*sorted({"vllm", "torch", "sglang", "tensorrt_llm"} & set(sys.modules)))
"""


def test_whoever_wants_the_sim_imports_no_other_engine() -> None:
    command = [sys.executable, "-c", IMPORTED, "sim"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


THREADS = """
import threading
from workers.engines.sim import SimEngine
class Threads(SimEngine):
    @staticmethod
    def preload(settings):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.mark.parametrize(("keeper", "refused"), [("--keeper", True), ("--no-keeper", False)])
def test_a_preload_that_starts_threads_is_refused_under_a_keeper(tmp_path: Path, keeper: str, refused: bool) -> None:
    (tmp_path / "threads_engine.py").write_text(THREADS)
    program = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from workers.factory import preload; from workers.settings import EngineSettings\n"
        "preload(EngineSettings(engine='threads_engine:Threads', keeper=sys.argv[2] == '--keeper'))\n"
        "os._exit(0)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), keeper]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ("started 1 threads, and its keeper cannot fork with them" in done.stderr) is refused, done.stderr
    assert done.returncode == (1 if refused else 0)
