"""How the project's other processes are started: which module each one is, and how it is found.

``python -m`` looks into the working folder first, and somebody who starts ``hotspare`` in a project of their own may
well have a package called ``app`` there. So children get ``PYTHONSAFEPATH``, unless the working folder is where this
very package lies (a checkout that is not installed). Grandchildren inherit it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final, NamedTuple


class PassedOn(NamedTuple):
    """A command that is another module's ``__main__``."""

    module: tuple[str, ...]
    help: str


PASSED_ON: Final[Mapping[str, PassedOn]] = {
    "gateway": PassedOn(("app",), "The gateway: OpenAI API in front of worker pods."),
    "pod": PassedOn(("workers", "pod"), "One pod on this machine: a memory service and its engines."),
    "engine": PassedOn(("workers", "engine"), "One engine and its keeper; in Kubernetes, a container of the pod."),
    "gms": PassedOn(("gms",), "The memory service of one device."),
}

UP_HELP: Final = "A gateway and its pods on this machine, until Ctrl-C."

_ROOT: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs ``module`` with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def safe_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child that must find our packages, not the working folder's."""
    child = dict(environment)
    if os.path.realpath(os.getcwd()) != os.path.realpath(_ROOT):
        child["PYTHONSAFEPATH"] = "1"
    return child
