"""What a person configured for pip, said again for uv, which does not read pip's configuration.

Only settings that are really set are passed on, only through the environment of the uv process, and never printed:
an index URL may hold a password. A setting that uv was given itself always wins.
"""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

# pip's option -> uv's variable, for options whose value means the same to both.
SAME_MEANING = {
    "index-url": "UV_DEFAULT_INDEX",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}
# uv's older names of the same setting: a person who set one of them has answered the question.
OLDER_NAMES = {"UV_DEFAULT_INDEX": "UV_INDEX_URL", "UV_INDEX": "UV_EXTRA_INDEX_URL"}


def pip_settings(python: str | Path) -> dict[str, str]:
    """The options of that Python's pip for `install`, from its files and its environment, by their plain names."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ranked: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        name, separator, value = line.partition("=")
        section, _, option = name.lstrip(":").replace(":.", ".").partition(".")
        rank = {"global": 0, "install": 1, "env": 2}.get(section)
        if not separator or rank is None:
            continue
        if option not in ranked or ranked[option][0] <= rank:
            ranked[option] = (rank, str(ast.literal_eval(value)))
    return {option: value for option, (_, value) in ranked.items()}


def translate(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that uv needs beside `environment` to install as pip would.

    Extra indexes on this machine's disk (`file://`) are left out: they only ever save pip a download.
    """
    wanted = {uv_name: settings[option] for option, uv_name in SAME_MEANING.items() if settings.get(option)}
    extra = [url for url in settings.get("extra-index-url", "").split() if not url.startswith("file:")]
    if extra:
        wanted["UV_INDEX"] = " ".join(extra)
        # pip looks at all indexes alike. The locks' hashes decide what is accepted, whichever index has it.
        wanted["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    if settings.get("find-links"):
        wanted["UV_FIND_LINKS"] = ",".join(settings["find-links"].split())
    if settings.get("trusted-host"):
        wanted["UV_INSECURE_HOST"] = " ".join(settings["trusted-host"].split())
    if settings.get("proxy"):
        wanted["HTTPS_PROXY"] = wanted["HTTP_PROXY"] = settings["proxy"]
    if settings.get("no-index", "").lower() in {"1", "true", "yes", "on"}:
        wanted["UV_NO_INDEX"] = "1"
    return {
        name: value
        for name, value in wanted.items()
        if name not in environment and OLDER_NAMES.get(name, name) not in environment
    }


def uv_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment to start uv with."""
    return {**os.environ, **translate(settings, os.environ)}


def torch_source(settings: Mapping[str, str]) -> list[str]:
    """The uv options that say where the CPU build of torch comes from.

    A folder of wheels configured for pip that has it is enough; otherwise uv's own knowledge of torch's CPU builds.
    """
    places = [*settings.get("find-links", "").split(), *os.environ.get("UV_FIND_LINKS", "").split(",")]
    for place in filter(None, places):
        folder = Path(unquote(urlsplit(place).path)) if place.startswith("file:") else Path(place)
        if folder.is_dir() and any(folder.glob("torch-*+cpu-*.whl")):
            return []
    return ["--torch-backend=cpu"]
