"""What ``hotspare bench gateway`` makes of its samples, and what it says when it cannot measure."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from app.cli.bench.command import build
from app.cli.bench.gateway.figures import (
    RATIOS,
    Load,
    Sample,
    compare,
    medians,
    parse_load,
    stream_ratios,
    summarise,
    table,
    with_added_ttft,
)
from app.cli.bench.gateway.gateways import Gateway, Surroundings, started
from app.cli.errors import CliError

LINE = (
    '{"seconds":2.000000,"completed":100,"events":500,"latency_us":{"p50":397,"p99":5259},"first_event_us":null,'
    '"failed":{"status":0,"closed":1,"connect":0,"short":2,"content":0,"timeout":0},"last_status":0}\n'
)


def sample(gateway: str, round_: int = 0, *, failed: int = 0, problem: str = "", **figures: float) -> Sample:
    return Sample(
        gateway=gateway,
        measure="rps",
        round=round_,
        figures=figures,
        completed=10,
        failed=failed,
        problem=problem,
    )


def test_the_generators_line_is_read() -> None:
    load = parse_load(LINE)
    assert (load.requests_per_second, load.events_per_second) == (50, 250)
    assert load.latency_us is not None
    assert load.latency_us.p99 == 5259
    assert load.first_event_us is None
    assert load.failed.total == 3
    assert not load.sound
    assert not parse_load(LINE.replace('"completed":100', '"completed":0').replace('"closed":1', '"closed":0')).sound


@pytest.mark.parametrize("line", ["", "load: out of memory", "{}", LINE[:-3]])
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        parse_load(line)


def test_nothing_answered_is_not_sound() -> None:
    whole = msgspec.json.decode(LINE)
    whole["failed"] = {}
    assert msgspec.convert(whole, Load).sound
    assert not msgspec.convert({**whole, "completed": 0}, Load).sound


def test_medians_are_each_gateways_own() -> None:
    samples = [sample("a", n, rps_c1=value) for n, value in enumerate((10.0, 1000.0, 12.0))]
    samples += [sample("b", rps_c1=5.0), sample("b", 1, paced_cpu_us=3.0), sample("b", 2, failed=4)]
    assert medians(samples) == {"a": {"rps_c1": 12.0}, "b": {"rps_c1": 5.0, "paced_cpu_us": 3.0}}


def test_added_time_is_above_the_worker_asked_directly() -> None:
    figures = with_added_ttft({"direct": {"ttft_us": 40.0}, "hotspare": {"ttft_us": 240.0}, "nginx": {}})
    assert figures == {
        "direct": {"ttft_us": 40.0},
        "hotspare": {"ttft_us": 240.0, "added_ttft_us": 200.0},
        "nginx": {},
    }
    assert with_added_ttft({"hotspare": {"ttft_us": 240.0}}) == {"hotspare": {"ttft_us": 240.0}}


def test_ratios_are_ours_by_theirs_and_missing_where_one_is() -> None:
    figures = {
        "direct": {"rps_c1": 9.0},
        "hotspare": {"rps_c1": 30.0, "rps_c32": 10.0, "added_ttft_us": 5.0},
        "nginx": {"rps_c1": 20.0, "added_ttft_us": -1.0},
    }
    (peer,) = [compare(figures, RATIOS)[name] for name in ("nginx",)]
    assert set(peer) == {ratio.key for ratio in RATIOS}
    assert (peer["rps_c1"], peer["rps_c32"], peer["added_ttft"]) == (1.5, None, None)
    assert set(compare(figures, RATIOS)) == {"nginx"}


def test_the_most_streams_give_the_key_without_a_number() -> None:
    assert [ratio.key for ratio in stream_ratios([5000, 1000])] == ["kib_per_stream_1000", "kib_per_stream"]
    assert stream_ratios([]) == ()


def test_a_failing_gateway_is_counted_and_gives_no_figure() -> None:
    samples = [
        sample("direct", rps_c1=3.0),
        sample("hotspare", rps_c1=30.0),
        sample("nginx", failed=7, problem="Failed(short=7)"),
    ]
    versions = {"direct": "", "hotspare": "0.1.0", "nginx": "1.22.1"}
    machine = {"cores": 2, "load_average_before": [0.1, 0.0, 0.0]}
    report = summarise(samples, RATIOS, versions, {"skipped": {"vllm-router": "not installed"}, "machine": machine})
    assert report["gateways"]["nginx"] == {"version": "1.22.1", "requests": 10, "failed": 7}
    assert report["vs"]["nginx"]["rps_c1"] is None
    assert report["problems"] == ["nginx, rps: Failed(short=7)"]
    assert len(report["samples"]) == 3
    lines = table(report, RATIOS)
    assert "| requests/s, 1 connection | 3 | 30 | - |" in lines
    assert "hotspare 0.1.0; nginx 1.22.1" in lines
    assert "nginx: 7 requests failed" in lines
    assert "not measured: vllm-router: not installed" in lines
    assert not any("32 connections" in line or "busy" in line for line in lines)
    machine["load_average_before"] = [3.0, 0.0, 0.0]
    assert any("load average 3.0 on 2 cores" in line for line in table(report, RATIOS))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peers", "nginx,haproxy"], "'haproxy'"),
        (["--only", "rps,latency"], "'latency'"),
        (["--streams", "many"], "--streams=many"),
        (["--streams", "0"], "--streams=0"),
    ],
)
def test_what_it_does_not_know_is_refused(arguments: list[str], said: str) -> None:
    refused = CliRunner().invoke(build(), ["gateway", *arguments])
    assert isinstance(refused.exception, CliError)
    assert said in str(refused.exception)
    assert refused.exception.code == 2


def test_the_group_has_it() -> None:
    names = typer.main.get_group(build()).commands
    assert "gateway" in names


def test_a_gateways_port_is_nobody_elses_before_it_listens(tmp_path: Path) -> None:
    class Taken(Exception):
        pass

    def command(_: Surroundings, port: int) -> Sequence[str]:
        with socket.socket() as other:
            try:
                other.bind(("127.0.0.1", port))
            except OSError:
                raise Taken from None
        return ["true"]

    around = Surroundings(Path("true"), tmp_path, (), frozenset(), "key")
    with pytest.raises(Taken), started(Gateway("it", "1", command), around):
        pass
