#!/usr/bin/env python3
"""Build the images: `make images`, with podman or docker, whichever is there.

    images.py [--target gateway] [--target worker] [--engines vllm|sim] [--not-compiled] [--base IMAGE] [--tool PROGRAM]

They are called hotspare/TARGET:VERSION, and with `--engines sim` hotspare/TARGET:VERSION-sim. What this Python's pip is
configured with (index, certificate, proxy, wheels on this disk) is used in the build, and is in no layer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from pip_settings import pip_settings  # noqa: E402

CA_IN_BUILD = "/run/ca.pem"
TAKEN_OVER = ("index-url", "trusted-host", "proxy", "default-timeout", "timeout", "no-index")
"""Options of pip whose values mean the same inside of a build."""


class ImagesError(Exception):
    """A sentence for the person at the terminal."""


def find_tool(wanted: str | None) -> str:
    """podman or docker."""
    names = [wanted] if wanted else ["podman", "docker"]
    for name in names:
        if found := shutil.which(name):
            return found
    raise ImagesError(f"there is no {' and no '.join(names)} here; install one of podman and docker")


def local_folders(places: str) -> list[Path]:
    """Of places for wheels, those on this disk."""
    paths = [
        Path(unquote(urlsplit(place).path)) if place.startswith("file:") else Path(place) for place in places.split()
    ]
    return [path for path in paths if path.is_absolute() and path.is_dir()]


def pip_conf(settings: Mapping[str, str], folders: list[Path]) -> str:
    """pip's configuration for a build; ``folders`` are there under the same paths."""
    lines = [f"{name} = {settings[name]}" for name in TAKEN_OVER if settings.get(name)]
    if extra := [url for url in settings.get("extra-index-url", "").split() if not url.startswith("file:")]:
        lines.append(f"extra-index-url = {' '.join(extra)}")
    if settings.get("cert"):
        lines.append(f"cert = {CA_IN_BUILD}")
    if folders:
        lines.append(f"find-links = {' '.join(map(str, folders))}")
    return "\n".join(("[global]", *lines, ""))


def build(
    tool: str, target: str, options: argparse.Namespace, *, secrets: Mapping[str, Path], folders: list[Path]
) -> str:
    """Build one; returns its name."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    name = f"hotspare/{target}:{version}{'-sim' if options.engines == 'sim' else ''}"
    command = [tool, "build", "--target", target, "--tag", name, "--file", "Dockerfile"]
    command += ["--build-arg", f"VERSION={version}", "--build-arg", f"REVISION={revision()}"]
    command += [
        "--build-arg",
        f"ENGINES={options.engines}",
        "--build-arg",
        f"COMPILED={'yes' if options.compiled else ''}",
    ]
    if options.base:
        command += ["--build-arg", f"BASE={options.base}"]
    for secret, path in secrets.items():
        command += ["--secret", f"id={secret},src={path}"]
    if Path(tool).name == "podman":
        # podman's own: docker cannot mount a folder of this machine, and fetches what is in it.
        command += [word for folder in folders for word in ("--volume", f"{folder}:{folder}:ro")]
        command += ["--network", "host"]
        if options.base and options.base.startswith("localhost/"):
            command.append("--pull=never")
    outcome = subprocess.run([*command, "."], cwd=ROOT, env={**os.environ, "DOCKER_BUILDKIT": "1"})
    if outcome.returncode:
        sentence = f"{Path(tool).name} could not build {name} (exit {outcome.returncode}), its words are above"
        if not options.base and target != "worker-cuda":
            sentence += '. If it could not pull the base, name another Debian 12: make images ARGS="--base IMAGE"'
        raise ImagesError(sentence)
    return name


def revision() -> str:
    """The commit that is checked out, "" outside of a repository."""
    git = shutil.which("git")
    done = subprocess.run([git, "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True) if git else None
    return done.stdout.strip() if done is not None and done.returncode == 0 else ""


def run(options: argparse.Namespace) -> None:
    tool = find_tool(options.tool)
    settings = pip_settings(sys.executable)
    folders = local_folders(settings.get("find-links", "")) if Path(tool).name == "podman" else []
    with tempfile.TemporaryDirectory(prefix="hotspare-images-") as scratch:
        secrets = {"pip.conf": Path(scratch) / "pip.conf"}
        secrets["pip.conf"].write_text(pip_conf(settings, folders))
        if settings.get("cert"):
            secrets["ca.pem"] = Path(settings["cert"])
        if options.apt_conf:
            secrets["apt.conf"] = options.apt_conf
        for target in options.target or ("gateway", "worker"):
            began = time.monotonic()
            name = build(tool, target, options, secrets=secrets, folders=folders)
            print(f"images: {name} in {time.monotonic() - began:.1f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="images.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--target", action="append", choices=("gateway", "worker", "worker-cuda"), help="again for more"
    )
    parser.add_argument(
        "--engines", choices=("vllm", "sim"), default="vllm", help="what the worker has (default: vllm)"
    )
    parser.add_argument(
        "--not-compiled", dest="compiled", action="store_false", help="leave the gateway's sources as they are"
    )
    parser.add_argument("--base", metavar="IMAGE", help="a Debian 12 to build on (default: the Dockerfile's)")
    parser.add_argument(
        "--apt-conf", type=Path, metavar="FILE", help="apt's configuration during the build: proxy, mirror"
    )
    parser.add_argument("--tool", metavar="PROGRAM", help="podman or docker (default: the first that is there)")
    # What pip is configured with may be secret: no signal leaves the folder with it behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        run(parser.parse_args())
    except ImagesError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
