"""What `make test` does to a machine for the tests of pods: what it installs, when it does not, and that nothing goes
on when it has ended. apt-get, podman and the checks are stand-ins; scripts and Makefile are ours.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import DEADLINE_SECONDS, until

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]
NEEDED = "podman runc conmon netavark aardvark-dns catatonit iptables mmdebstrap"
REAL = "awk bash cat cut dirname env find flock make mkdir rm setsid sh sha256sum sleep sort umount uname xargs"
APT = """#!/bin/bash
case "$*" in
*indextargets*) cat "$STAND_INS/mirrors" ;;
*)
    echo "$@" >>"$STAND_INS/apt"
    while [ -e "$STAND_INS/slow" ]; do sleep 0.02; done
    echo "done" >>"$STAND_INS/apt"
    case "$*" in *update) exit 0 ;; esac
    exit "$(cat "$STAND_INS/apt-exit")"
    ;;
esac
"""
PODMAN = """#!/bin/bash
echo "$@" >>"$STAND_INS/podman"
[ "$1" != ps ] || printf 'left Storage\\nother Up\\n'
"""


class Checkout:
    """A folder with our scripts, on a machine that has no podman. Whatever they call is a stand-in or harmless."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stand_ins = folder / "stand-ins"
        self.stand_ins.mkdir()
        shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("Makefile", "Dockerfile", ".dockerignore", "LICENSE", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        for name in ("requirements", "app", "gms", "tests", "workers"):
            (folder / name).mkdir()
        for name in REAL.split():
            found = shutil.which(name)
            assert found is not None, f"{name} is missing here"
            (self.stand_ins / name).symlink_to(found)
        self.write("stand-ins/id", "#!/bin/sh\necho 0\n")
        self.write("stand-ins/dpkg", "#!/bin/sh\nexit 1\n")
        self.write("stand-ins/apt-get", APT)
        self.write("stand-ins/mirrors", "https://mirror.example/debian bookworm\n")
        self.write("stand-ins/apt-exit", "100")
        self.write("scripts/setup.sh", "#!/bin/sh\n")
        self.write("scripts/kube_tools.py", "")
        self.environment = {"PATH": str(self.stand_ins), "STAND_INS": str(self.stand_ins)}

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(self, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )

    def start(self, *command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
        )

    def apt(self) -> list[str]:
        """What apt-get was called for, and \"done\" where it came to its end."""
        path = self.stand_ins / "apt"
        return path.read_text().splitlines() if path.exists() else []

    def podman_is_there(self) -> None:
        """As after scripts/podman.sh; whoever builds an image does not come to an end."""
        self.write("stand-ins/dpkg", "#!/bin/sh\n")
        key = hashlib.sha256((self.folder / "scripts" / "podman.sh").read_bytes()).hexdigest()
        self.write(".tools/podman/ready", f"{key} {self.folder}/.tools/podman")
        self.write(".tools/podman/bin/podman", PODMAN)
        self.write(".tools/podman/images", "of the build before")
        self.write(".venv/bin/python", '#!/bin/bash\necho $$ >"$STAND_INS/build"\nwhile :; do sleep 0.02; done\n')

    def building(self) -> int:
        """The process that builds, once there is one."""
        path = self.stand_ins / "build"
        return until(lambda: path.exists() and int(path.read_text() or 0), saying="an image is being built")

    def ended(self) -> bool:
        """Whether no process of a background job is left: all of them have the lock."""
        with (self.folder / ".tools" / "pod_images.job").open() as file:
            command = ["flock", "--nonblock", str(file.fileno())]
            return subprocess.run(command, pass_fds=[file.fileno()], check=False).returncode == 0


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    checkout = Checkout(tmp_path)
    yield checkout
    (checkout.stand_ins / "slow").unlink(missing_ok=True)
    if (tmp_path / ".tools" / "pod_images.job").exists():
        checkout.run("scripts/pod_images.sh", "--end")
        assert checkout.ended()


# --- what is installed


def test_packages_are_added_and_none_is_removed(checkout: Checkout) -> None:
    done = checkout.run("scripts/podman.sh")
    assert done.returncode == 3
    assert f"podman: apt-get installs {NEEDED}" in done.stdout
    assert "apt-get cannot install" in done.stderr
    (first, _, update, _, second, _) = checkout.apt()
    assert first == second
    assert first.endswith(f" install --no-remove --no-install-recommends {NEEDED}")
    assert update.endswith(" update")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("no mirror", "apt has no mirror with Debian 12 (bookworm), which the images stand on"),
        ("dockerd", f"dockerd is here, and gets no runc beside it unasked; for the tests of pods: {'apt-get install'}"),
        ("containerd", "containerd is here, and gets no runc beside it unasked"),
        ("somebody else", "it is run by root only"),
        ("switched off", "switched off by HOTSPARE_TEST_PODS=0"),
    ],
)
def test_a_machine_is_left_alone(checkout: Checkout, what: str, sentence: str) -> None:
    more = {}
    match what:
        case "no mirror":
            checkout.write("stand-ins/mirrors", "https://mirror.example/debian trixie\n")
        case "dockerd" | "containerd":
            checkout.write(f"stand-ins/{what}", "#!/bin/sh\n")
        case "somebody else":
            checkout.write("stand-ins/id", "#!/bin/sh\necho 1000\n")
        case "switched off":
            more["HOTSPARE_TEST_PODS"] = "0"
    done = checkout.run("scripts/podman.sh", **more)
    assert done.returncode == 3
    assert sentence in done.stderr
    begun = checkout.run("scripts/pod_images.sh", "--begin", str(os.getpid()), **more)
    assert begun.returncode == 0
    assert sentence in begun.stderr
    assert "so the tests of real pods will be skipped" in begun.stderr
    assert checkout.apt() == []


def test_docker_does_not_matter_where_nothing_is_to_be_installed(checkout: Checkout) -> None:
    checkout.write("stand-ins/dockerd", "#!/bin/sh\n")
    checkout.podman_is_there()
    assert checkout.run("scripts/podman.sh").returncode == 0


# --- the job in the background


def test_it_is_said_what_is_installed_in_the_background(checkout: Checkout) -> None:
    done = checkout.run("scripts/pod_images.sh", "--begin", str(os.getpid()))
    assert f"apt-get installs {NEEDED}, in the background (log: .tools/pod_images.log)" in done.stdout
    assert "HOTSPARE_TEST_PODS=0" in done.stdout
    until(checkout.ended, saying="the job has ended")
    assert "apt-get cannot install" in (checkout.folder / ".tools" / "pod_images.log").read_text()


def test_apt_get_comes_to_its_end_and_nothing_after_it(checkout: Checkout) -> None:
    checkout.write("stand-ins/slow", "")
    checkout.write("stand-ins/apt-exit", "0")
    checkout.run("scripts/pod_images.sh", "--begin", str(os.getpid()))
    until(lambda: len(checkout.apt()) == 1, saying="apt-get runs")
    ending = checkout.start("scripts/pod_images.sh", "--end")
    assert ending.stdout is not None
    assert "waiting for what runs in the background" in ending.stdout.readline()
    assert ending.poll() is None
    assert "done" not in checkout.apt()
    (checkout.stand_ins / "slow").unlink()
    assert ending.wait(DEADLINE_SECONDS) == 0
    ending.stdout.close()
    assert checkout.apt()[1:] == ["done"]
    assert checkout.ended()
    assert not (checkout.folder / ".tools" / "podman").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_build_ends_with_whoever_began_it(checkout: Checkout, number: int) -> None:
    checkout.podman_is_there()
    maker = subprocess.Popen([str(checkout.stand_ins / "sleep"), "100"])
    checkout.run("scripts/pod_images.sh", "--begin", str(maker.pid))
    checkout.building()
    assert not checkout.ended()
    assert not (checkout.folder / ".tools" / "podman" / "images").exists(), "images are no longer those of that build"
    maker.send_signal(number)
    maker.wait()
    until(checkout.ended, saying="the job has ended")
    said = (checkout.stand_ins / "podman").read_text().splitlines()
    assert said[-1] == "rm --force left", "what a build leaves in podman's storage"


def test_a_check_that_fails_leaves_no_build(checkout: Checkout) -> None:
    checkout.podman_is_there()
    checkout.write(".venv/bin/ruff", '#!/bin/bash\nwhile [ ! -s "$STAND_INS/build" ]; do sleep 0.02; done\nexit 1\n')
    done = checkout.run("make", "test")
    assert done.returncode == 2
    checkout.building()
    until(checkout.ended, saying="the job has ended")


def test_clean_waits_for_a_build_of_somebody_and_ends_its_own(checkout: Checkout) -> None:
    checkout.podman_is_there()
    checkout.run("scripts/pod_images.sh", "--begin", str(os.getpid()))
    checkout.building()
    done = checkout.run("make", "clean")
    assert done.returncode == 0, done.stderr
    assert checkout.ended()
    assert not (checkout.folder / ".tools" / "podman").exists()

    checkout.podman_is_there()
    (checkout.stand_ins / "build").unlink()
    somebody = checkout.start("scripts/pod_images.sh")
    build = checkout.building()
    removing = checkout.start("scripts/podman.sh", "--remove")
    assert removing.stdout is not None
    assert removing.stdout.readline() == "podman: waiting for another run of scripts/pod_images.sh\n"
    assert (checkout.folder / ".tools" / "podman" / "ready").exists()
    os.kill(build, signal.SIGKILL)
    somebody.communicate(timeout=DEADLINE_SECONDS)
    assert removing.wait(DEADLINE_SECONDS) == 0
    removing.stdout.close()
    assert not (checkout.folder / ".tools" / "podman").exists()


def test_a_build_that_is_ended_leaves_no_settings_of_pip(tmp_path: Path) -> None:
    tool, secrets = tmp_path / "docker", tmp_path / "secrets"
    tool.write_text("#!/bin/sh\ntouch $STARTED\nexec sleep 100\n")
    tool.chmod(0o755)
    secrets.mkdir()
    environment = {**os.environ, "TMPDIR": str(secrets), "STARTED": str(tmp_path / "started")}
    command = [sys.executable, str(ROOT / "scripts" / "images.py"), "--tool", str(tool)]
    build = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        until(lambda: (tmp_path / "started").exists(), saying="the build runs")
        assert [path.name for path in secrets.glob("*/*")] == ["pip.conf"]
        os.killpg(build.pid, signal.SIGTERM)
        assert build.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM
    finally:
        if build.poll() is None:
            os.killpg(build.pid, signal.SIGKILL)
            build.wait()
    assert list(secrets.iterdir()) == []
