"""Metrics of several processes as those of one."""

from __future__ import annotations

from app.processes.families import Family, Sample, counting, merge
from app.telemetry.metrics import GatewayMetrics, merged_text


def family(kind: str, name: str, **samples: float) -> Family:
    return Family(name, "What.", kind, tuple(Sample(name, (("l", label),), v) for label, v in samples.items()))


def values(families: tuple[Family, ...]) -> dict[tuple[str, str], float]:
    return {(s.name, s.labels[0][1] if s.labels else ""): s.value for f in families for s in f.samples}


def test_counters_add_up_and_keep_what_only_one_has() -> None:
    merged = merge(([family("counter", "c", a=1, b=2)], [family("counter", "c", b=3, d=4)]), {})
    assert values(merged) == {("c", "a"): 1, ("c", "b"): 5, ("c", "d"): 4}


def test_gauges_go_by_the_table_and_else_by_their_largest() -> None:
    each = [[family("gauge", name, a=value) for name in ("s", "m", "x", "other")] for value in (1.0, 3.0, 2.0)]
    merged = merge(each, {"s": "sum", "m": "min", "x": "max"})
    assert values(merged) == {("s", "a"): 6, ("m", "a"): 1, ("x", "a"): 3, ("other", "a"): 3}


def test_what_holds_after_the_end() -> None:
    both = (family("counter", "c", a=1), family("gauge", "g", a=1), family("histogram", "h", a=1))
    assert [f.name for f in counting(both)] == ["c", "h"]


def test_the_gateways_own() -> None:
    metrics = GatewayMetrics()
    for _ in range(2):
        metrics.request(
            route="chat", model="m", status=200, seconds=0.3, first_token_seconds=None, inter_token_seconds=None
        )
    families = metrics.families()
    text = merged_text({0: (families, True), 1: (counting(families), False)}).decode()
    assert 'hotspare_requests_total{model="m",route="chat",status="200"} 4.0' in text
    assert 'hotspare_request_duration_seconds_bucket{le="0.5",route="chat"} 4.0' in text
    assert 'hotspare_request_duration_seconds_sum{route="chat"} 1.2' in text
    assert 'hotspare_process_up{process="0"} 1.0' in text
    assert 'hotspare_process_up{process="1"} 0.0' in text
    assert "# TYPE hotspare_requests_total counter" in text
    assert text.count("# TYPE hotspare_requests_total ") == 1
