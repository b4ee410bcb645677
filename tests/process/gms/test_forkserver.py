"""What the other tests' processes are forked by: they must be as if started anew."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.process.gms.forkserver import ForkServer
from tests.process.gms.processes import Process, until

pytestmark = pytest.mark.process

TOOL = ["-m", "json.tool", "--compact"]
"""Any program that reads its input to the end."""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer(["json"]) as made:
        yield made


Fork = Callable[..., Process]


@pytest.fixture
def fork(server: ForkServer) -> Iterator[Fork]:
    with ExitStack() as stack:

        def start(stream: str = "stdout") -> Process:
            process = Process(TOOL, stream=stream, server=server)
            stack.callback(process.close)
            return process

        yield start


def end_of_input(process: Process) -> None:
    assert process.process.stdin is not None
    process.process.stdin.close()


def test_arguments_streams_and_exit_code(fork: Fork) -> None:
    good, bad = fork(), fork("stderr")
    good.tell('{"a": 1}')
    bad.tell("no JSON")
    assert (good.process.poll(), bad.process.poll()) == (None, None)
    for process in (good, bad):
        end_of_input(process)
    assert good.rest() == '{"a":1}\n'
    assert "Expecting value" in bad.rest()
    assert (good.wait(), bad.wait()) == (0, 1)


def test_a_signal_is_the_exit_code_and_later_ones_go_nowhere(fork: Fork) -> None:
    process = fork()
    process.kill()
    assert (process.wait(), process.process.poll()) == (-signal.SIGKILL, -signal.SIGKILL)
    process.signal(signal.SIGTERM)


def test_nothing_is_inherited(fork: Fork) -> None:
    """Not even the pipes of those that were forked before."""
    first, second = fork(), fork()
    until(lambda: len(os.listdir(f"/proc/{second.pid}/fd")) == 3, f"{second.fds()}: three descriptors")
    end_of_input(first)
    assert first.wait() == 1
