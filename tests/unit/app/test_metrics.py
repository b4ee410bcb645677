from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

from app.discovery.follower import Discovery
from app.discovery.sources import StaticSource
from app.drain import DrainStage
from app.fleet.registry import WorkerRegistry
from app.lifecycle import Lifecycle
from app.relay.relayed import Report
from app.telemetry.loop_lag import LoopLag
from app.telemetry.metrics import GAUGE_MERGE, GatewayMetrics

UNITS = (
    "seconds|bytes|info|requests|sessions|retries|disconnects|errors|lifecycle|fds|dropped|state|stage|epoch|routable|"
    "up|workers|spans|connections|resumes|tokens|refusals"
)
BASE_UNITS = re.compile(rf"_({UNITS})$")


def request(metrics: GatewayMetrics, **given: object) -> None:
    facts = {"route": "chat", "model": "m", "status": 200, "seconds": 1.0}
    facts |= {"first_token_seconds": None, "inter_token_seconds": None}
    metrics.request(**(facts | given))  # type: ignore[arg-type]


async def text(metrics: GatewayMetrics) -> str:
    return (await metrics.text()).decode()


def test_every_gauge_says_how_several_processes_become_one() -> None:
    families = list(GatewayMetrics().collectors.collect())
    gauges = {family.name for family in families if family.type == "gauge"}
    assert gauges <= GAUGE_MERGE.keys()
    hotspare = {name for name in GAUGE_MERGE if name.startswith("hotspare_")}
    assert hotspare == {name for name in gauges if name.startswith("hotspare_")}


def test_names_are_ours_and_in_base_units() -> None:
    for family in GatewayMetrics().collectors.collect():
        assert family.name.startswith(("hotspare_", "process_")), family.name
        assert family.documentation.endswith("."), family.name
        if family.name.startswith("hotspare_"):
            assert BASE_UNITS.search(family.name), family.name


def test_every_metric_is_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    for family in GatewayMetrics().collectors.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"`{name}`" in page, f"{name} belongs into the table in docs/metrics.md"


async def test_requests_count_under_route_model_and_status() -> None:
    metrics = GatewayMetrics()
    request(metrics)
    request(metrics, first_token_seconds=0.02, inter_token_seconds=0.004)
    request(metrics, status=404, model="")
    said = await text(metrics)
    assert 'hotspare_requests_total{model="m",route="chat",status="200"} 2.0' in said
    assert 'hotspare_requests_total{model="",route="chat",status="404"} 1.0' in said
    assert 'hotspare_request_duration_seconds_count{route="chat"} 3.0' in said
    assert 'hotspare_time_to_first_token_seconds_bucket{le="0.025",route="chat"} 1.0' in said
    assert 'hotspare_inter_token_latency_seconds_bucket{le="0.0025",route="chat"} 0.0' in said
    assert 'hotspare_inter_token_latency_seconds_bucket{le="0.005",route="chat"} 1.0' in said


async def test_the_process_and_the_build_are_described() -> None:
    said = await text(GatewayMetrics())
    build = r'^hotspare_build_info\{compiled="(true|false)",python="3\.\d+\.\d+",version=".+"\} 1\.0$'
    assert re.search(build, said, re.MULTILINE)
    for name in ("cpu_seconds_total", "open_fds", "resident_memory_bytes", "start_time_seconds"):
        assert re.search(rf"^process_{name} [0-9.e+]+$", said, re.MULTILINE), name


async def test_a_drain_is_seen() -> None:
    metrics = GatewayMetrics()
    registry = WorkerRegistry((), connect_timeout=1, heartbeat_timeout=1)
    metrics.drain_cut(3)
    metrics.look(
        lifecycle=Lifecycle.DRAINING,
        inflight=2,
        queued=1,
        kept_bytes=77,
        drain_stage=DrainStage.WAITING,
        drain_remaining=1.5,
        log_lines_dropped=4,
        registry=registry,
        discovery=Discovery(StaticSource([]), registry, on_discovered=lambda: None),
    )
    said = await text(metrics)
    assert "hotspare_queued_requests 1.0" in said
    assert "hotspare_resume_kept_bytes 77.0" in said
    assert 'hotspare_lifecycle{state="draining"} 1.0' in said
    assert 'hotspare_lifecycle{state="ready"} 0.0' in said
    assert "hotspare_drain_cut_requests_total 3.0" in said
    assert "hotspare_drain_remaining_seconds 1.5" in said
    assert 'hotspare_drain_stage{stage="waiting"} 1.0' in said
    assert 'hotspare_drain_stage{stage="none"} 0.0' in said
    assert "hotspare_log_lines_dropped_total 4.0" in said
    assert "hotspare_inflight_requests 2.0" in said


async def test_a_loop_that_is_blocked_is_late() -> None:
    lags: list[float] = []
    loop = asyncio.get_running_loop()
    noticed = loop.create_future()

    def observe(seconds: float) -> None:
        lags.append(seconds)
        if not noticed.done():
            noticed.set_result(None)

    async with LoopLag(observe):
        time.sleep(0.35)  # noqa: ASYNC251  # this is the blocking
        async with asyncio.timeout(5):
            await noticed
    assert lags[0] >= 0.1
    assert len(lags) == 1  # and none after the end


def test_the_time_between_events() -> None:
    report = Report(streamed=True, events=5, first_byte_at=10.0, last_event_at=10.4)
    assert report.event_seconds is not None
    assert abs(report.event_seconds - 0.1) < 1e-9
    assert Report(streamed=True, events=1, first_byte_at=10.0, last_event_at=10.0).event_seconds is None
    assert Report(events=0, first_byte_at=10.0).event_seconds is None
