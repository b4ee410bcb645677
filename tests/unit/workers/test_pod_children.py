"""What the supervisor does with its children's output; the processes themselves are in tests/process/pod."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.processes import until
from workers.children import LineSplitter, LogSink, label_line, logged_error
from workers.pod_commands import command_lines, environment
from workers.settings import PodSettings


def split(chunks: list[bytes], max_bytes: int = 8) -> list[bytes]:
    splitter = LineSplitter(max_bytes=max_bytes)
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.flush()


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"one", [b"one"]),
        (b"one\n", [b"one"]),
        (b"one\ntwo\nthr", [b"one", b"two", b"thr"]),
        (b"\n\n", [b"", b""]),
        (b"one\r\n", [b"one"]),
        (b"12345678\n", [b"12345678"]),
        (b"123456789\n", [b"12345678", b"9"]),
        (b"1234567812345678", [b"12345678", b"12345678"]),
    ],
)
def test_lines_whole_and_byte_by_byte(data: bytes, lines: list[bytes]) -> None:
    assert split([data]) == lines
    if b"\r" not in data:
        assert split([data[at : at + 1] for at in range(len(data))]) == lines


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_no_line_is_too_long_and_nothing_is_lost(chunks: list[bytes]) -> None:
    lines = split(chunks)
    assert all(len(line) <= 8 for line in lines)
    strip = bytes.maketrans(b"\r", b"\n")
    assert b"".join(lines).translate(strip, b"\n\r") == b"".join(chunks).translate(strip, b"\n\r")


def test_memory_is_bounded_without_a_line_end() -> None:
    splitter = LineSplitter(max_bytes=8)
    for _ in range(1000):
        splitter.feed(b"12345")
    assert sum(map(len, splitter.flush())) <= 8


def test_labels_for_people() -> None:
    assert label_line("pod-0/gms", b"hello", form="console", pid=7, now=0) == b"pod-0/gms hello"


def test_labels_in_json() -> None:
    labelled = label_line("p", b'{"message":"x"}', form="json", pid=7, now=0)
    assert msgspec.json.decode(labelled) == {"process": "p", "message": "x"}


@pytest.mark.parametrize(
    ("line", "message"), [(b"{}", "{}"), (b'plain "text"', 'plain "text"'), (b"\xff", "\ufffd"), (b"", "")]
)
def test_what_is_no_log_line_gets_the_fields_of_one(line: bytes, message: str) -> None:
    assert msgspec.json.decode(label_line("p", line, form="json", pid=7, now=1.25)) == {
        "process": "p",
        "time": "1970-01-01T00:00:01.250Z",
        "level": "info",
        "logger": "output",
        "message": message,
        "pid": 7,
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"12:00:00.000 ERROR   no such model", "no such model"),
        (b"12:00:00.000 INFO    no such model", None),
        (b'{"level":"error","message":"no such model"}', "no such model"),
        (b'{"level":"info","message":"no such model"}', None),
        (b'{"level":"error"', None),
        (b"", None),
    ],
)
def test_errors_are_found_in_log_lines(line: bytes, message: str | None) -> None:
    assert logged_error(line) == message


def read_all(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        return file.read()


def test_the_sink_writes_lines_in_order_and_takes_logging() -> None:
    reading_end, writing_end = os.pipe()
    sink = LogSink(writing_end)
    stream = logging.StreamHandler()
    root = logging.getLogger()
    root.addHandler(stream)
    try:
        sink.put(b"one")
        with sink.takes_logging():
            logging.getLogger("test").warning("two")
        sink.put(b"three")
    finally:
        root.removeHandler(stream)
        sink.close()
        os.close(writing_end)
    assert read_all(reading_end) == b"one\ntwo\nthree\n"


def test_the_sink_drops_lines_rather_than_wait_and_says_how_many() -> None:
    reading_end, writing_end = os.pipe()
    os.set_blocking(writing_end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing_end, b"\n" * 4096)
    os.set_blocking(writing_end, True)
    sink = LogSink(writing_end, max_lines=4)
    for number in range(20):
        sink.put(b"line %d" % number)
    with os.fdopen(reading_end, "rb") as output:
        while (line := output.readline()) == b"\n":
            pass  # what the pipe was filled with
        assert line == b"line 0\n"
        for number in range(1, 4):
            assert output.readline() == b"line %d\n" % number  # so there is room in the queue again
        sink.put(b"after")
        sink.close()
        os.close(writing_end)
        rest = output.read().decode().splitlines()
    notes = [line for line in rest if line.endswith("lines could not be written, or nobody read them)")]
    dropped = sum(int(note[1:].split()[0]) for note in notes)
    assert dropped + sum(line.startswith("line ") for line in rest) == 20 - 4
    assert dropped >= 14
    assert rest[-1] == "after"


def test_the_sink_survives_its_reader() -> None:
    reading_end, writing_end = os.pipe()
    sink = LogSink(writing_end)
    os.close(reading_end)
    for _ in range(100):
        sink.put(b"x")
    sink.close()
    os.close(writing_end)


def test_engines_know_their_port_and_each_others() -> None:
    settings = PodSettings(admin_ports=(9001, 9002), instance="life-1", engine="sim", log_format="json")
    commands = command_lines(settings)
    assert commands["engine-a"][1:] == ["-m", "workers", "engine", "--engine-id", "a", "--admin-port", "9001"]
    env = environment(settings, "engine-a", inherited={"HOTSPARE_SIM_SEED": "3", "HOTSPARE_INSTANCE": "old"})
    assert env["HOTSPARE_SIM_SEED"] == "3"
    assert env["HOTSPARE_INSTANCE"] == "life-1"
    assert env["HOTSPARE_STANDBY_ADMIN_PORTS"] == "9002"
    assert env["HOTSPARE_PARENT_PID"] == str(os.getpid())
    assert env["HOTSPARE_GMS"] == "true"
    assert env["HOTSPARE_LOG_FORMAT"] == "json"


def test_an_engine_without_a_spare_has_no_neighbour() -> None:
    settings = PodSettings(shadows=0, gms=False)
    assert set(command_lines(settings)) == {"engine-a"}
    assert environment(settings, "engine-a", inherited={})["HOTSPARE_STANDBY_ADMIN_PORTS"] == ""


def test_the_memory_service_gets_what_was_asked_for() -> None:
    settings = PodSettings(gms_metrics_port=0, gms_memory_limit_bytes=1 << 30, run_dir="/run/hotspare")
    assert command_lines(settings)["gms"][1:] == [
        *("-m", "gms", "--socket", "/run/hotspare/pod-0/gms-cpu-0.sock", "--device", "cpu:0"),
        *("--metrics-port", "0", "--memory-limit", "1073741824"),
    ]
    assert "HOTSPARE_STANDBY_ADMIN_PORTS" not in environment(settings, "gms", inherited={})


def test_a_disk_that_was_full_costs_lines_and_not_the_log() -> None:
    with open("/dev/full", "wb") as full, tempfile.TemporaryFile() as file:
        fd = os.dup(full.fileno())
        try:
            sink = LogSink(fd)
            sink.put(b"lost")
            until(lambda: sink._dropped == 1, saying="the line could not be written")
            os.dup2(file.fileno(), fd)
            sink.put(b"kept")
            sink.close()
        finally:
            os.close(fd)
        file.seek(0)
        assert file.read() == b"(1 lines could not be written, or nobody read them)\nkept\n"
