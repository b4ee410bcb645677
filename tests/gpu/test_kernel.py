"""What a process that is killed inside a kernel may still do to the pages of the next one: nothing."""

from __future__ import annotations

from tests.gpu.harness import MIB, Machine
from tests.gpu.report import Duration, Fact
from tests.gpu.services import Service


def test_nothing_changes_after_the_grant(machine: Machine) -> None:
    size = machine.share(64 * MIB, 4 * MIB)
    role = "writer" if machine.fake is None else "hand_writer"
    with (
        Service(machine, "cuda:0") as service,
        machine.actor("tests.gpu.kernel", service.path, "heir", size) as heir,
        machine.actor("tests.gpu.kernel", service.path, role, size) as writer,
    ):
        heir.expect("parked")
        writer.expect("writing")
        heir.tell()
        service.until_waiting("kv")
        killed = writer.kill()
        found = heir.json(seconds=60)
        heir.finish()
    what = "the pages of a writer that was killed inside a kernel"
    machine.report.add(Duration(f"SIGKILL → {what} granted", (found["granted"] - killed) * 1e3))
    machine.report.add(Duration("granted → mapped by the next one", (found["mapped"] - found["granted"]) * 1e3))
    changed = "unchanged" if found["states"] == 1 else f"{found['states']} states"
    machine.report.add(Fact(f"{what}, looked at {found['looks']} times after the grant", changed, "unchanged"))
    assert (found["fresh"], found["created"]) == (False, False)
    assert found["least"] > 0, "the writer never wrote there"
    assert found["states"] == 1, f"the pages changed after they were granted: {found}"
