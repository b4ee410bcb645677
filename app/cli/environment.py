"""HOTSPARE_ variables that nobody reads: a typing mistake there would otherwise be a setting that does nothing.

Every process ignores the variables of the others, so only the command above them all can tell which are unknown. It
looks before each of its commands, and therefore imports next to nothing; a process started by its module does not look.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from app.cli.errors import CliError
from app.cli.variables import ELSEWHERE, KNOWN, PREFIX, meant
from workers.exit_codes import ExitCode


def refuse_unknown(environment: Mapping[str, str], *, not_suggested: Collection[str] = ()) -> None:
    """Look for HOTSPARE_ variables that no process knows. ``not_suggested`` are known, and no help to who mistyped.

    Raises:
        CliError: there is one; names it, and the nearest known name.
    """
    # Names as pydantic-settings compares them: without case.
    given = {name.upper(): name for name in environment if name.upper().startswith(PREFIX)}
    unknown = [given[name] for name in sorted(given.keys() - KNOWN)]
    sentences = [
        _sentence(name, KNOWN.difference(not_suggested))
        for name in unknown
        if not is_service_link(name.upper(), environment[name])
    ]
    if sentences:
        raise CliError("; ".join(sentences), code=ExitCode.BAD_CONFIGURATION)


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes made this variable: it gives a container some for every service of its namespace, and one
    called ``hotspare-gateway`` leads to HOTSPARE_GATEWAY_SERVICE_HOST, HOTSPARE_GATEWAY_PORT and the like."""
    import re

    if re.fullmatch(r"\w+_SERVICE_(HOST|PORT(_\w+)?)|\w+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?", name):
        return True
    return name.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://"))


def _sentence(name: str, known: Collection[str]) -> str:
    word = name.upper().removeprefix(PREFIX)
    near = [ELSEWHERE[word]] if word in ELSEWHERE else meant(word, [other.removeprefix(PREFIX) for other in known])
    hint = (
        f"did you mean {' or '.join(PREFIX + other for other in near)}?" if near else "unset it, or correct its name;"
    )
    return f"the environment variable {name} is unknown to hotspare: {hint} all names are in docs/settings.md"
