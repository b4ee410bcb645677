"""The gateway's compiled modules: which they are, and when a process uses them.

``make compile`` makes extension modules of the way that every request takes (mypyc), into a folder of their own. What
they do is what their sources say. A build is used whole or not at all, and only by the Python that it was made for and
while the gateway's sources are what it was made from; else the sources are run, and a warning says so. Nothing lies
beside the sources, so nothing shadows them by accident, and tests and tools never see a build unless they ask for it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from pathlib import Path
from typing import Final

from app.start_error import StartError

logger = logging.getLogger(__name__)

ROOT: Final = Path(__file__).parent.parent
FOLDER: Final = ROOT / "build" / "compiled"
GROUP: Final = "hotspare_gateway"
MODULES: Final = (
    "app.admission",
    "app.clients.direct",
    "app.clients.output",
    "app.clients.protocol",
    "app.clients.request_head",
    "app.clients.turns",
    "app.fleet.room",
    "app.fleet.routing",
    "app.http_headers",
    "app.intake.accounts",
    "app.intake.arrival",
    "app.intake.request_ids",
    "app.openai.answers",
    "app.openai.frames",
    "app.openai.sse",
    "app.openai.units",
    "app.relay.attempt",
    "app.relay.deadlines",
    "app.relay.delivery",
    "app.relay.exchange",
    "app.relay.headers",
    "app.relay.kept",
    "app.relay.relay",
    "app.relay.relayed",
    "app.relay.search",
    "app.relay.service_rate",
    "app.relay.waiting",
    "app.telemetry.access_log",
    "app.upstream.connection",
    "app.upstream.pool",
)
"""None of them may be imported before :func:`use`, so none that reading the settings needs."""
_STAMP: Final = "made-from"


def stamp(root: Path = ROOT) -> str:
    """What a build is good for: one Python, and the sources under ``root``. All of the gateway's count, since a
    compiled module holds constants of others."""
    digest = hashlib.sha256()
    for folder in ("app", "workers"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(
                b"%b\0%b" % (str(path.relative_to(root)).encode(), hashlib.sha256(path.read_bytes()).digest())
            )
    return f"{EXTENSION_SUFFIXES[0]} {digest.hexdigest()}"


def sign(folder: Path, root: Path = ROOT) -> None:
    """Say what the build in this folder was made from."""
    (folder / _STAMP).write_text(stamp(root))


def fit(folder: Path = FOLDER, root: Path = ROOT) -> bool | None:
    """Whether the build that is there may be used; ``None`` if there is none."""
    try:
        return (folder / _STAMP).read_text() == stamp(root)
    except FileNotFoundError:
        return None


def use(folder: Path = FOLDER, modules: tuple[str, ...] = MODULES, root: Path = ROOT, *, group: str = GROUP) -> bool:
    """Have these modules come from the build, if there is one and it is good; returns whether they do.

    Raises:
        StartError: it is damaged.
    """
    fits = fit(folder, root)
    if fits is None:
        return False
    if not fits:
        logger.warning(
            "the compiled modules are not of these sources, or not for this Python, and are not used; "
            "make compile makes them anew, make clean removes them"
        )
        return False
    early = [name for name in modules if name in sys.modules]
    if early:  # a mixture of both would not fit together
        logger.warning("the compiled modules are not used: %s were imported before", ", ".join(early))
        return False
    _load_group(folder, group)
    for package in sorted({name.rpartition(".")[0] for name in modules}):
        importlib.import_module(package).__path__.insert(0, str(folder.joinpath(*package.split("."))))
    return True


def used() -> bool:
    """Whether this process runs compiled modules."""
    return f"{GROUP}__mypyc" in sys.modules


def _load_group(folder: Path, group: str) -> None:
    """The library that holds the code of all of them; each module's own is only a door to it."""
    name = f"{group}__mypyc"
    loader = ExtensionFileLoader(name, str(folder / f"{name}{EXTENSION_SUFFIXES[0]}"))
    spec = importlib.util.spec_from_loader(name, loader)
    if spec is None:
        raise StartError(f"{folder} cannot be used")
    try:
        library = importlib.util.module_from_spec(spec)
        loader.exec_module(library)
    except ImportError as error:
        raise StartError(f"{folder} is damaged ({error}); make compile makes it anew, make clean removes it") from None
    sys.modules[name] = library
