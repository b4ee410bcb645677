"""A pair of real engines over one memory service: shared weights, equal tokens, KV cache that comes and goes."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tests.engine.vllm.harness import Driver, EngineProcess
from tests.engine.vllm.running import PROMPTS, Running
from tests.engine.vllm.running import TOKENS as STREAM_TOKENS
from workers.memory import MemoryService

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

TOKENS = 64


class Pair(NamedTuple):
    writer: EngineProcess
    reader: EngineProcess
    tokens: list[int]
    """What the writer generated, before the reader existed."""
    epochs: Iterator[int]
    """Promotions of the pod: each wake takes the next."""

    def wake(self, engine: EngineProcess) -> None:
        engine.wake(next(self.epochs))


@pytest.fixture(scope="module")
def pair(driver: Driver, service: MemoryService, model_folder: Path) -> Iterator[Pair]:
    """The writer ran once and is parked; the reader started without a checkpoint. Both parked between tests."""
    writer = driver.fork("writer", msgspec.structs.replace(service, engine="a"))
    try:
        epochs = itertools.count(1)
        writer.wake(next(epochs))
        tokens = writer.token_ids(TOKENS)
        writer.park()
        with _checkpoint_hollow(model_folder):
            reader = driver.fork("reader", msgspec.structs.replace(service, engine="b"))
        try:
            yield Pair(writer, reader, tokens, epochs)
        finally:
            reader.kill()
    finally:
        writer.kill()


def test_everything_was_imported_before_the_fork(pair: Pair) -> None:
    """So that a start takes seconds, and packages may be replaced on disk while an engine's parent lives."""
    pair.wake(pair.writer)
    try:
        pair.writer.token_ids(8)
        assert " ".join(pair.writer.control("imported").json()["answer"]) == ""
    finally:
        pair.writer.park()


class _checkpoint_hollow:
    """Puts a file of the same name, size and time, with nothing in it, in the checkpoint's place."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "model.safetensors"
        self._original = self._path.resolve()

    def __enter__(self) -> None:
        stat = self._original.stat()
        self._path.unlink()
        with self._path.open("wb") as hollow:
            hollow.truncate(stat.st_size)
        os.utime(self._path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def __exit__(self, *_: object) -> None:
        self._path.unlink()
        self._path.symlink_to(self._original)


def kv_mappings(pid: int) -> list[str]:
    """Lines of the process's memory map that belong to the KV pool, or to scratch."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if re.search(r"memfd:gms(:kv|-scratch)", line)]


def anonymous_kib(pid: int) -> int:
    """Private memory of the process, what it still shares with its parent included."""
    found = re.search(r"^Anonymous: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_the_parent_forks_from_one_thread(driver: Driver) -> None:
    assert driver.ready.threads == 1


def test_no_library_silences_us(driver: Driver) -> None:
    assert set(driver.ready.levels.values()) == {logging.INFO}


def test_the_loop_beats_while_an_engine_starts(pair: Pair) -> None:
    """A loop that stood still meanwhile would have paused for nearly all of the start."""
    for engine in (pair.writer, pair.reader):
        assert engine.report.longest_pause < max(2.0, engine.report.seconds / 2)


def test_weights_are_shared(pair: Pair) -> None:
    for engine, role in ((pair.writer, "writer"), (pair.reader, "reader")):
        memory = engine.status()["memory"]
        assert memory["weights_role"] == role
        assert memory["weights_bytes"] > 500_000_000
        copies = memory["weights_outside_gms_bytes"] / memory["weights_bytes"]
        assert copies <= 0.01


def weights_mappings(pid: int) -> int:
    """How often the weights' pages are mapped in a process."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    found = [line.split() for line in lines if "memfd:gms:weights" in line]
    assert {rights for _, rights, *_ in found} == {"r--s"}
    return len(found)


def test_both_multiply_with_the_matrices_that_one_of_them_packed(pair: Pair, model_folder: Path) -> None:
    layers = json.loads((model_folder / "config.json").read_text())["num_hidden_layers"]
    assert weights_mappings(pair.writer.pid) > 4 * layers
    # The output layer's matrix is the input's as well: its writer packed it twice.
    assert weights_mappings(pair.writer.pid) - 1 == weights_mappings(pair.reader.pid) > 4 * layers


def test_the_writers_private_copies_are_gone(pair: Pair) -> None:
    weights_kib = pair.writer.status()["memory"]["weights_bytes"] // 1024
    assert anonymous_kib(pair.writer.pid) - anonymous_kib(pair.reader.pid) < weights_kib // 4


def test_a_parked_engine_holds_no_kv_memory(pair: Pair) -> None:
    assert kv_mappings(pair.reader.pid) == []
    assert pair.reader.status()["memory"]["kv_mapped"] is False
    pair.wake(pair.reader)
    assert kv_mappings(pair.reader.pid)
    assert pair.reader.status()["memory"]["kv_mapped"] is True
    pair.reader.park()
    assert kv_mappings(pair.reader.pid) == []


def test_the_reader_generates_what_the_writer_did(pair: Pair) -> None:
    pair.wake(pair.reader)
    assert pair.reader.token_ids(TOKENS) == pair.tokens
    assert "Paris" in pair.reader.ask("What is the capital of France?")
    status = pair.reader.status()
    assert status["steps"] >= TOKENS
    assert status["busy"] is False
    assert status["models"] == ["smollm2"]
    said = pair.reader.client.get("/v1/models").json()["data"][0]["max_model_len"]
    assert status["max_model_len"] == said
    pair.reader.park()


def test_both_say_the_same_of_their_configuration(pair: Pair) -> None:
    """``system_fingerprint`` is part of answers: a resume from one engine at the other must find its own there."""
    said = []
    for engine in (pair.writer, pair.reader):
        pair.wake(engine)
        body = {"model": "smollm2", "prompt": "One", "max_tokens": 1}
        said.append(engine.client.post("/v1/completions", json=body).json()["system_fingerprint"])
        engine.park()
    assert said[0]
    assert said[0] == said[1]


def test_ten_cycles_change_nothing(pair: Pair) -> None:
    for _ in range(10):
        pair.wake(pair.reader)
        assert pair.reader.token_ids(8) == pair.tokens[:8]
        pair.reader.park()


def test_a_wake_that_is_refused_leaves_the_engine_parked(pair: Pair) -> None:
    pair.wake(pair.reader)
    pair.reader.park()
    refused = pair.reader.control("wake", "1")  # an epoch that is over
    assert refused.status_code == 500
    assert refused.json()["error"] == "GmsError"
    assert kv_mappings(pair.reader.pid) == []
    pair.wake(pair.reader)
    pair.reader.park()


def test_only_client_routes_are_served(pair: Pair) -> None:
    for path in (
        "/v1/load_lora_adapter",
        "/sleep",
        "/collective_rpc",
        "/scale_elastic_ep",
        "/inference/v1/abort_requests",
    ):
        assert pair.reader.client.post(path, json={}).status_code == 404
    assert pair.reader.client.get("/openapi.json").status_code == 404
    assert pair.reader.client.get("/v1/models").json()["data"][0]["id"] == "smollm2"


@pytest.fixture(scope="module")
def uninterrupted(pair: Pair) -> list[list[int]]:
    """The tokens of answers that nothing interrupts."""
    pair.wake(pair.writer)
    tokens = Running(pair.writer).wait()
    pair.writer.park()
    return tokens


@pytest.mark.parametrize("other_epoch", [False, True], ids=["nobody_between", "another_epoch_between"])
def test_requests_outlive_a_hand_over_that_is_taken_back(
    pair: Pair, uninterrupted: list[list[int]], other_epoch: bool
) -> None:
    """They wait without pages, and go on with the same tokens, over pages that somebody else has written meanwhile."""
    pair.wake(pair.writer)
    running = Running(pair.writer)
    running.until_each_has(5)
    answer = pair.writer.control("quiesce")
    assert answer.status_code == 200, answer.text
    assert pair.writer.status()["memory"]["kv_mapped"] is False
    assert kv_mappings(pair.writer.pid) == []
    assert all(len(tokens) < STREAM_TOKENS for tokens in running.tokens)
    if other_epoch:
        pair.wake(pair.reader)
        theirs = Running(pair.reader, PROMPTS[::-1])
        assert theirs.wait() == uninterrupted[::-1]
        pair.reader.park()
    pair.wake(pair.writer)
    assert running.wait() == uninterrupted
    pair.writer.park()


def test_a_core_that_hangs_in_its_step_keeps_nobody_waiting_and_goes_on_if_it_does(
    pair: Pair, uninterrupted: list[list[int]]
) -> None:
    """In time it is said that the engine serves on; it is busy, so that its keeper finds it, should it make no step."""
    pair.wake(pair.writer)
    running = Running(pair.writer)
    running.until_each_has(5)
    assert pair.writer.control("hang-in-step").status_code == 200
    before = pair.writer.status()["steps"]
    for _ in range(2):
        began = time.monotonic()
        answer = pair.writer.control("quiesce", "0.5")
        assert (answer.status_code, answer.json()["error"]) == (500, "TimeoutError")
        assert time.monotonic() - began < 5
    status = pair.writer.status()
    assert (status["busy"], status["memory"]["kv_mapped"], status["steps"]) == (True, True, before)
    assert pair.writer.control("go-on").status_code == 200
    assert running.wait() == uninterrupted
    answer = pair.writer.control("quiesce")  # and once more, in order
    assert answer.status_code == 200, answer.text
    assert kv_mappings(pair.writer.pid) == []


def test_pages_that_are_not_released_in_time_are_the_engines_death(pair: Pair) -> None:
    pair.wake(pair.reader)
    assert pair.reader.control("hang-in-release").status_code == 200
    answer = pair.reader.control("quiesce")
    assert (answer.status_code, answer.json()["error"]) == (500, "EngineDeadError")
    assert "the KV pages were not released within 0.5 s" in answer.json()["message"]
    assert pair.reader.control("go-on").status_code == 200
    pair.wake(pair.reader)
    assert pair.reader.token_ids(TOKENS) == pair.tokens
    pair.reader.park()


def test_the_promoted_shadow_goes_on_after_a_kill(pair: Pair) -> None:
    pair.wake(pair.writer)
    with pair.writer.client.stream(
        "POST", "/v1/completions", json={"model": "smollm2", "prompt": "One", "max_tokens": 500, "stream": True}
    ) as stream:
        next(stream.iter_lines())
        pair.writer.kill()
    pair.wake(pair.reader)
    assert pair.reader.token_ids(TOKENS) == pair.tokens


def test_a_dead_core_is_noticed_and_answers_errors(pair: Pair) -> None:
    """Last: it costs the engine."""
    assert pair.reader.control("health").status_code == 200
    assert pair.reader.control("break").status_code == 200
    for _ in range(2):  # the request that meets the fault, and one that comes later
        answer = pair.reader.client.post("/v1/completions", json={"model": "smollm2", "prompt": "x", "max_tokens": 4})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"]
    health = pair.reader.control("health")
    assert health.status_code == 500
    assert health.json()["error"] == "EngineDeadError"
    assert pair.reader.control("park").json()["error"] == "EngineDeadError"
