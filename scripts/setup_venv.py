"""Create .venv and install the locked packages of some groups into it. Started by scripts/setup.sh.

Only the standard library, in a Python that may be too old for this project: the check for that comes first, so this
file keeps to syntax that an old Python can read.
"""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".hotspare-setup"
OLDEST_PYTHON = (3, 11)
# The vllm group holds torch's CPU wheel, and that is locked for this Python on x86_64 only.
VLLM_PYTHON = (3, 11)


class SetupError(Exception):
    """A sentence for the person at the terminal: what failed, whose fault it is, what to do."""


def check_python(groups):
    """Refuse a Python that cannot work before anything is written."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if sys.version_info < OLDEST_PYTHON:
        raise SetupError(
            f"Python {version} ({sys.executable}) is too old, 3.11 is needed. "
            "Install Python 3.11, or name one: PYTHON=/path/to/python3.11 make setup"
        )
    if "vllm" in groups and sys.version_info[:2] != VLLM_PYTHON:
        raise SetupError(
            f"Python {version} ({sys.executable}) is newer than the locks: torch's CPU wheel is locked for "
            "Python 3.11. Install Python 3.11, or name one: PYTHON=/path/to/python3.11 make setup"
        )
    if "vllm" in groups and (sys.platform != "linux" or os.uname().machine != "x86_64"):
        raise SetupError(
            f"the vLLM engine is locked for Linux on x86_64, this is {sys.platform} on {os.uname().machine}. "
            "Use such a machine or container."
        )
    try:
        import ensurepip
        import venv
    except ImportError as error:
        raise SetupError(
            f"{sys.executable} cannot make virtual environments ({error}). "
            "Install its venv module (Debian, Ubuntu: apt-get install python3-venv)."
        ) from error
    del ensurepip, venv


def create_venv():
    """Make .venv, or keep it if its Python works and is the one this script runs in. Returns whether it is new."""
    probe = f"import sys; print(sys.version_info[:2] == {tuple(sys.version_info[:2])})"
    if VENV_PYTHON.exists():
        answer = subprocess.run([VENV_PYTHON, "-c", probe], capture_output=True, text=True)
        if answer.returncode == 0 and answer.stdout.strip() == "True" and not made_elsewhere():
            return False
        print("setup: .venv is of another Python or another folder: making it again", flush=True)
    call([sys.executable, "-m", "venv", "--clear", str(VENV)], "Is the folder writable, is the disk full?")
    return True


def made_elsewhere():
    """Whether .venv was moved or copied here: its scripts still start the Python of the old place."""
    pip = VENV / "bin" / "pip"
    return not pip.exists() or not pip.read_bytes().startswith(b"#!" + os.fsencode(VENV_PYTHON.parent))


def installed_groups(key):
    """The groups that a finished set-up from the same files left in .venv.

    They are not installed again: some wheels (vLLM's says that it is for another Python) would be removed and put back,
    under engines that run from them.
    """
    try:
        had_key, _, *groups = STAMP.read_text().split()
    except (OSError, ValueError):
        return []
    return groups if had_key == key else []


def install_uv():
    command = [VENV_PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "-r", "requirements/uv.txt"]
    call(
        command,
        "Usually the package index could not be reached; pip's own settings are used. Run it again, or see "
        "`pip config list`.",
    )


def install_groups(groups, python=VENV_PYTHON, tools=VENV_PYTHON):
    """Into the environment of `python`, by the uv and with the pip settings of `tools`."""
    from pip_settings import pip_settings, torch_source, uv_environment

    settings = pip_settings(tools)
    command = [tools, "-m", "uv", "pip", "install", "--python", python, "--no-deps"]
    command += ["--require-hashes", "--compile-bytecode"]
    if not sys.stderr.isatty():
        command.append("--quiet")
    if "vllm" in groups:
        command += torch_source(settings)
    for group in groups:
        command += ["-r", f"requirements/{group}.txt"]
    call(
        command,
        "Usually the package index could not be reached; pip's index, certificate and wheel folder are used for uv "
        "too. Run it again: what was downloaded is kept.",
        env=uv_environment(settings),
    )


def install_project():
    command = [VENV_PYTHON, "-m", "uv", "pip", "install", "--python", VENV_PYTHON, "--quiet", "--offline"]
    command += ["--no-deps", "--no-build-isolation", "--editable", "."]
    call(command, "This is a fault of this checkout: look at pyproject.toml.")


def call(command, advice, env=None):
    """Run one command and turn its failure into a sentence; its own output stays on the terminal."""
    outcome = subprocess.run([str(word) for word in command], cwd=ROOT, env=env)
    if outcome.returncode != 0:
        raise SetupError(f"a command ended with {outcome.returncode}, its words are above. {advice}")


def step(name, action, *arguments):
    started = time.monotonic()
    print(f"setup: {name} ...", flush=True)
    try:
        done = action(*arguments)
    except SetupError as error:
        raise SetupError(f"{name}: {error}") from error
    print(f"setup: {name}: {time.monotonic() - started:.1f} s", flush=True)
    return done


def run(key, groups):
    started = time.monotonic()
    check_python(groups)
    VENV.mkdir(exist_ok=True)
    # Outside .venv: `venv --clear` empties that folder.
    with open(ROOT / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        there = installed_groups(key)
        # A set-up that is cut short must not be taken for a finished one.
        if STAMP.exists():
            STAMP.unlink()
        if step("virtual environment", create_venv):
            there = []
        missing = [group for group in groups if group not in there]
        if not there:
            step("uv", install_uv)
        if missing:
            step("packages (" + ", ".join(missing) + ")", install_groups, missing)
        if not there:
            step("hotspare itself", install_project)
        groups = there + missing
        draft = STAMP.with_suffix(".new")
        draft.write_text(f"{key} {os.path.realpath(VENV_PYTHON)} {' '.join(groups)}\n")
        draft.replace(STAMP)
    print(f"setup: ready in {time.monotonic() - started:.1f} s", flush=True)


def main():
    key, *groups = sys.argv[1:]
    try:
        run(key, groups)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again, it goes on where it was", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
