"""Who may talk to the service, and who may take its place; on both devices where the device is asked at all."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gms import protocol
from gms.client import GmsClient, GmsError, LeaseMode
from tests.process.gms.bench import Bench, Device
from tests.process.gms.processes import DEADLINE, until

pytestmark = pytest.mark.process

NOBODY = 65534
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")

STRANGER = f"""
import os, sys
from gms import protocol
from gms.client import GmsClient, GmsError
os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
try:
    GmsClient.connect(sys.argv[1], engine="x", instance="test")
    print("let in", flush=True)
except GmsError as error:
    print(error.code, error, flush=True)
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_the_service_makes_is_its_users_alone(spawn: Any, folder: Path) -> None:
    path = folder / "pod" / "gms.sock"
    spawn(["-m", "gms", "--socket", str(path)], {"HOTSPARE_GMS_LOG_LEVEL": "error"})
    with GmsClient.connect(path, engine="a", instance="test") as client:
        client.attach("kv", LeaseMode.RW, epoch=1).allocate("pages", 4096).close()
        state = Path(f"{path}.state")
        assert [mode(found) for found in (path.parent, state)] == [0o700, 0o700]
        files = [path, Path(f"{path}.lock"), *state.iterdir()]
        assert len(files) == 5  # a record in two copies, and a lease
        assert {str(file): mode(file) for file in files} == {str(file): 0o600 for file in files}


def test_the_modes_do_not_depend_on_the_umask(spawn: Any, folder: Path) -> None:
    path = folder / "pod" / "gms.sock"
    code = "import os, runpy, sys; os.umask(0); sys.argv = ['gms', '--socket', sys.argv[1]]; runpy.run_module('gms')"
    code = code.replace("runpy.run_module('gms')", "runpy.run_module('gms', run_name='__main__')")
    spawn(["-c", code, str(path)], {"HOTSPARE_GMS_LOG_LEVEL": "error"})
    with GmsClient.connect(path, engine="a", instance="test"):
        assert [mode(found) for found in (path, path.parent, Path(f"{path}.state"))] == [0o600, 0o700, 0o700]


def test_a_folder_that_others_may_enter_is_warned_of(spawn: Any, folder: Path) -> None:
    folder.chmod(0o755)
    service = spawn(["-m", "gms", "--socket", str(folder / "gms.sock")], stream="stderr")
    assert service.expect("WARNING").endswith(f"others may enter the socket's folder {folder}; make it 0700")


def test_a_state_folder_that_others_may_enter_is_refused(spawn: Any, folder: Path) -> None:
    """Whoever may write there could say what is to be handed back."""
    path = folder / "gms.sock"
    state = Path(f"{path}.state")
    state.mkdir(mode=0o755)
    service = spawn(["-m", "gms", "--socket", str(path)], stream="stderr")
    assert service.wait() == 2
    assert service.rest() == f"gms: The folder {state} cannot be used: it is not this user's alone (0700).\n"
    assert not path.exists()


@pytest.fixture(scope="module")
def shared(device: Device) -> Iterator[Bench]:
    """One service for all that leave it as it was."""
    with Bench(device) as made:
        yield made


@root
def test_a_stranger_does_not_reach_the_socket(shared: Bench, spawn: Any) -> None:
    said = spawn(["-c", STRANGER, str(shared.path)]).line()
    assert said.startswith("service_gone Cannot reach the memory service")
    assert said.endswith("Permission denied.")


@root
def test_a_stranger_who_reaches_the_socket_is_refused(shared: Bench, spawn: Any) -> None:
    """Should the modes be changed by accident: who the peer is says the kernel."""
    with shared.connect() as client:
        descriptors = shared.service.fds()
        shared.path.parent.chmod(0o755)
        shared.path.chmod(0o666)
        try:
            said = spawn(["-c", STRANGER, str(shared.path)]).line()
        finally:
            shared.path.chmod(0o600)
            shared.path.parent.chmod(0o700)
        assert said.startswith(f"not_permitted User {NOBODY} may not use the memory service of user 0;"), said
        assert client.status().clients == 1
        until(lambda: shared.service.fds() == descriptors, "its connection is closed")


def second(bench: Bench) -> str:
    """What another service on the same path says; it must not have started."""
    process = bench.rival()
    try:
        assert process.wait() == 2
        return process.rest()
    finally:
        process.close()


def test_a_second_service_refuses_to_start(shared: Bench) -> None:
    with shared.connect() as client:
        assert second(shared) == (
            f"gms: Another memory service is alive at {shared.path}; stop it, or use another socket.\n"
        )
        assert client.status().clients == 1
        with shared.connect("b") as other:
            assert other.status().clients == 2


def test_a_second_service_refuses_to_start_while_the_first_hangs(shared: Bench) -> None:
    """It has the pages all the same."""
    shared.signal_service(signal.SIGSTOP)
    assert "Another memory service is alive" in second(shared)
    shared.signal_service(signal.SIGCONT)
    shared.connect().close()


def test_a_client_of_another_release_is_told_both_versions(shared: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "VERSION", 1)
    with pytest.raises(
        GmsError, match="The client speaks version 1, the service 2; use one release for both"
    ) as caught:
        shared.connect()
    assert (caught.value.code, caught.value.retryable) == ("version_mismatch", False)


def test_a_second_service_refuses_to_start_though_somebody_took_the_socket_away(bench: Bench) -> None:
    with bench.connect() as client:
        bench.path.unlink()
        assert "Another memory service is alive" in second(bench)
        assert not bench.path.exists()
        assert client.status().clients == 1


def test_a_second_service_refuses_to_start_while_pages_are_handed_back(bench: Bench) -> None:
    with bench.connect() as holder:
        lease = holder.attach("kv", LeaseMode.RW, epoch=1)
        with lease.allocate("pages", 1) as pages:
            bench.service.kill()
            assert bench.path.exists()  # what a dead service leaves behind is no obstacle
            bench.start()
            with bench.connect() as client:
                assert client.status().pools[0].state == "ADOPTING"
                assert "Another memory service is alive" in second(bench)
                assert client.status().pools[0].state == "ADOPTING"
                client.adopt("kv", generation=lease.generation, mode=LeaseMode.RW, epoch=1, allocations=[pages])
                assert client.status().pools[0].state == "WRITING"


def test_of_services_that_start_at_once_one_stays(folder: Path, socket_path: Path) -> None:
    """Over what a killed one left."""
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(socket_path))
    crowd = [
        subprocess.Popen([sys.executable, "-m", "gms", "--socket", str(socket_path)], stderr=subprocess.DEVNULL)
        for _ in range(4)
    ]
    try:
        seconds = 4 * DEADLINE
        with GmsClient.connect(socket_path, engine="a", instance="test", timeout_seconds=seconds) as client:
            refused = "all but one have refused"
            until(lambda: sum(process.poll() == 2 for process in crowd) == 3, refused, seconds=seconds)
            assert client.status().clients == 1
            assert sum(process.poll() is None for process in crowd) == 1
    finally:
        for process in crowd:
            process.kill()
            process.wait()


def test_a_file_in_the_place_of_the_socket(spawn: Any, socket_path: Path) -> None:
    """A plain file is replaced as a stale socket is; a folder is nobody's to remove."""
    socket_path.mkdir()
    process = spawn(["-m", "gms", "--socket", str(socket_path)], stream="stderr")
    assert process.wait() == 2
    assert process.rest().startswith(f"gms: The socket {socket_path} cannot be made: ")
