"""Re-create requirements/*.txt from requirements/*.in (`make lock`).

All groups are resolved together first, and each one is then compiled under the versions of that common answer, so a
package has the same version in every lock. Versions already locked are kept where they still fit; `--upgrade` takes
the newest ones.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from pip_settings import pip_settings, torch_source, uv_environment  # noqa: E402

GROUPS = ("core", "vllm", "opentelemetry", "load", "test", "pictures", "compile")
PYTHON_VERSION = "3.11"
PLATFORM = "x86_64-manylinux_2_28"


class LockError(Exception):
    """The groups have no common answer."""


def compile_lock(output: Path, sources: list[Path], extra: list[str]) -> None:
    """Run `uv pip compile` so that the lock names neither this machine nor an index."""
    settings = pip_settings(sys.executable)
    command = [
        sys.executable, "-m", "uv", "pip", "compile", "--quiet",
        "--python-version", PYTHON_VERSION, "--python-platform", PLATFORM,
        "--excludes", "requirements/excludes.txt",
        "--no-emit-index-url", "--no-emit-find-links",
        "--custom-compile-command", "make lock",
        *torch_source(settings), *extra,
        "--output-file", str(output), *(str(source) for source in sources),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, env=uv_environment(settings), check=True)


def lock(upgrade: bool) -> None:
    """Write all locks, or none if one cannot be made.

    The common answer is handed to each group as uv's preferences, as if it were the group's present lock, and the
    outcome is checked against it: a constraints file would be named, with its temporary path, in every lock.
    """
    folder = Path("requirements")
    kept = [] if upgrade else [line for group in GROUPS for line in pinned(ROOT / folder / f"{group}.txt")]
    with tempfile.TemporaryDirectory() as scratch:
        common = Path(scratch) / "common.txt"
        common.write_text("".join(f"{line}\n" for line in dict.fromkeys(kept)))
        compile_lock(common, [folder / f"{group}.in" for group in GROUPS], ["--no-annotate", "--no-header"])
        agreed = set(pinned(common))
        for group in GROUPS:
            output = Path(scratch) / f"{group}.txt"
            shutil.copy(common, output)
            compile_lock(output, [folder / f"{group}.in"], ["--generate-hashes", "--annotation-style", "line"])
            strays = set(pinned(output)) - agreed
            if strays:
                raise LockError(f"group {group} needs {', '.join(sorted(strays))}, the others other versions")
        installer = Path(scratch) / "uv.txt"
        compile_lock(installer, [folder / "uv.in"], ["--generate-hashes", "--annotation-style", "line"])
        for name in (*GROUPS, "uv"):
            target = ROOT / folder / f"{name}.txt"
            shutil.copy(Path(scratch) / f"{name}.txt", target)
            print(f"{target.relative_to(ROOT)}: {len(pinned(target))} packages")


def pinned(path: Path) -> list[str]:
    """The `name==version` lines of a lock; none if there is no lock yet."""
    if not path.exists():
        return []
    return [line.split()[0] for line in path.read_text().splitlines() if line[:1].isalnum() and "==" in line]


def main() -> int:
    parser = argparse.ArgumentParser(description="Re-create the locks in requirements/.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions instead of the locked ones")
    try:
        lock(upgrade=parser.parse_args().upgrade)
    except subprocess.CalledProcessError as error:
        print(f"lock: uv could not resolve the requirements (exit {error.returncode}); see above.", file=sys.stderr)
        return 1
    except LockError as error:
        print(f"lock: {error}. Loosen one of the requirements/*.in files.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
