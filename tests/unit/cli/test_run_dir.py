"""The run folder: what is read from it, and how ``up`` takes it and leaves it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.cli.claim import RunDirClaim
from app.cli.errors import CliError
from app.cli.run_dir import find_pod, is_running, read_gateway, read_pod, read_pods
from workers.pod_files import (
    EngineFile,
    EngineRecord,
    MemoryServiceRecord,
    PodFolder,
    PodRecord,
    announced,
    own_pid_namespace,
)


def write_pod(run_dir: Path, name: str, *, gms: bool = True) -> PodRecord:
    record = PodRecord(
        pod=name,
        instance="life-1",
        pid=os.getpid(),
        host="127.0.0.1",
        serving_port=8100,
        gms=MemoryServiceRecord(pid=None, socket="/r/gms.sock", metrics_port=8109) if gms else None,
        engines={"a": EngineRecord(pid=7, admin_port=8101, restarts=2)},
    )
    folder = PodFolder(run_dir / name)
    folder.open()
    folder.write(record)
    folder.close()
    return record


def test_pods_as_their_supervisors_write_them(tmp_path: Path) -> None:
    write_pod(tmp_path, "pod-1", gms=False)
    record = write_pod(tmp_path, "pod-0")
    (tmp_path / "logs").mkdir()
    pods = read_pods(tmp_path)
    assert [pod.pod for pod in pods] == ["pod-0", "pod-1"]
    assert (pods[0].instance, pods[0].pid) == (record.instance, record.pid)
    assert pods[0].engines["a"].restarts == 2
    assert pods[0].gms is not None
    assert pods[0].gms.pid is None
    assert pods[1].gms is None


def test_nothing_there_is_nothing(tmp_path: Path) -> None:
    assert read_pods(tmp_path / "absent") == []
    assert read_pod(tmp_path / "absent") is None
    assert read_gateway(tmp_path) is None


def test_a_newer_field_is_ignored_and_nonsense_is_named(tmp_path: Path) -> None:
    (tmp_path / "gateway.json").write_text('{"pid": 1, "host": "h", "port": 2, "new": 3}')
    gateway = read_gateway(tmp_path)
    assert gateway is not None
    assert gateway.port == 2
    (tmp_path / "gateway.json").write_text('{"pid": "one"}')
    with pytest.raises(CliError, match=r"gateway\.json is not a file of this version"):
        read_gateway(tmp_path)


def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gateway.json")
    with pytest.raises(CliError, match=r"gateway\.json cannot be read: it is not a regular file"):
        read_gateway(tmp_path)


def test_a_pid_counts_only_with_its_module() -> None:
    assert not is_running(None, module="workers")
    assert not is_running(os.getpid(), module="workers-of-somebody-else")
    assert not is_running(2**22 + 1, module="workers")


def test_a_claim_leaves_nothing_of_a_failed_attempt(tmp_path: Path) -> None:
    run_dir = tmp_path / "deep" / "run"
    with RunDirClaim(run_dir) as claim:
        assert run_dir.stat().st_mode & 0o777 == 0o700
        claim.rotate_logs({"pod-0"})
        (claim.logs / "pod-0.log").write_text("it broke")
    assert list(tmp_path.iterdir()) == []


def test_logs_stay_when_they_are_worth_it(tmp_path: Path) -> None:
    with RunDirClaim(tmp_path / "run") as claim:
        (claim.logs / "pod-0.log").write_text("it broke")
        claim.keep_logs = True
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["logs"]


@pytest.mark.parametrize("worth_it", [True, False])
def test_one_earlier_log_is_kept_and_taken_back_after_an_attempt_that_came_to_nothing(
    tmp_path: Path, worth_it: bool
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for name in ("gateway.log", "gateway.log.1", "pod-0.log", "pod-1.log", "pod-1.log.1", "notes.txt"):
        (logs / name).write_text(name)
    with RunDirClaim(tmp_path) as claim:
        claim.rotate_logs({"gateway", "pod-0"})
        (logs / "gateway.log").write_text("new")
        claim.keep_logs = worth_it
    expected = {"gateway.log": "gateway.log", "pod-0.log": "pod-0.log", "notes.txt": "notes.txt"}
    if worth_it:
        expected = {"gateway.log.1": "gateway.log", "pod-0.log.1": "pod-0.log", "notes.txt": "notes.txt"}
        expected["gateway.log"] = "new"
    assert {path.name: path.read_text() for path in logs.iterdir()} == expected


def test_other_peoples_files_stay(tmp_path: Path) -> None:
    (tmp_path / "run" / "pod-0").mkdir(parents=True)
    (tmp_path / "run" / "pod-0" / "notes.txt").write_text("mine")
    with RunDirClaim(tmp_path / "run") as claim:
        claim.sweep(["pod-0", "pod-1"])
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["pod-0", "notes.txt"]


def test_one_up_at_a_time(tmp_path: Path) -> None:
    with RunDirClaim(tmp_path):
        with pytest.raises(CliError, match=rf"another `hotspare up` \(pid {os.getpid()}\) runs in") as caught:
            RunDirClaim(tmp_path).__enter__()
        assert caught.value.code == 2
    with RunDirClaim(tmp_path):
        pass


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CliError, match=r"run folder .* cannot be used: .*--run-dir or HOTSPARE_RUN_DIR") as caught:
        RunDirClaim(tmp_path / "file" / "run").__enter__()
    assert caught.value.code == 2


def test_sweeping_removes_what_was_killed_and_spares_what_runs(tmp_path: Path) -> None:
    for name in ("pod-0", "pod-1"):
        write_pod(tmp_path, name)
        (tmp_path / name / "active.lock").write_text("1")
    (tmp_path / "gateway.json").write_text('{"pid": 4194305, "host": "h", "port": 1}')
    alive = PodFolder(tmp_path / "pod-1")
    alive.open()
    with RunDirClaim(tmp_path) as claim:
        claim.sweep(["pod-0", "pod-1"])
    assert [path.name for path in tmp_path.iterdir()] == ["pod-1"]
    assert (tmp_path / "pod-1" / "pod.json").exists()
    alive.close()


def engine_file(
    engine: str, *, namespace: int, instance: str = "life-1", gms: tuple[str, ...] = ("/r/s.sock",)
) -> EngineFile:
    return EngineFile(
        pod="worker-0",
        instance=instance,
        engine=engine,
        pid=1,
        pid_namespace=namespace,
        host="0.0.0.0",
        serving_port=8100,
        admin_port=8101 + (engine == "b"),
        gms=gms,
    )


def test_where_nobody_runs_the_pod_its_engines_say_where_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "worker-0"
    folder.mkdir()
    here, elsewhere = own_pid_namespace(), own_pid_namespace() + 1
    with (
        announced(folder, engine_file("b", namespace=elsewhere)),
        announced(folder, engine_file("a", namespace=here, gms=("/r/0.sock", "/r/1.sock"))),
    ):
        (pod,) = read_pods(tmp_path)
        assert (pod.pod, pod.instance, pod.pid, pod.serving_port) == ("worker-0", "life-1", None, 8100)
        assert pod.engines == {
            "a": EngineRecord(pid=1, admin_port=8101, restarts=0),
            "b": EngineRecord(pid=None, admin_port=8102, restarts=0, apart=True),
        }
        assert pod.gms == MemoryServiceRecord(pid=None, socket="/r/0.sock", metrics_port=0)
        assert pod.more_gms == {"gms-1": MemoryServiceRecord(pid=None, socket="/r/1.sock", metrics_port=0)}
        # A supervisor's word is better.
        write_pod(tmp_path, "worker-0")
        found = read_pod(folder)
        assert found is not None
        assert found.pid == os.getpid()
    assert sorted(path.name for path in folder.iterdir()) == ["pod.json", "pod.lock"]


def test_an_engines_file_is_cleaned_away_with_the_pod(tmp_path: Path) -> None:
    folder = PodFolder(tmp_path / "worker-0")
    folder.open()
    (tmp_path / "worker-0" / "engine-a.json").write_text("{}")
    folder.clean()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_the_only_pod_need_not_be_named(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"name a pod \(pods in .*: none\)"):
        find_pod(None, tmp_path)
    write_pod(tmp_path, "pod-0")
    assert find_pod(None, tmp_path).pod == find_pod("pod-0", tmp_path).pod == "pod-0"
    write_pod(tmp_path, "pod-1")
    with pytest.raises(CliError, match=r"name a pod \(pods in .*: pod-0, pod-1\)"):
        find_pod(None, tmp_path)
    with pytest.raises(CliError, match=r"there is no pod '\.\./pod-0'"):
        find_pod("../pod-0", tmp_path)
