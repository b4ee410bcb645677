"""EndpointSlices: lists, events, and what they mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.address import Address
from app.discovery.endpoints import BadAnswer, Expired, ServicePort, Slices, parse_service_port, retry_delay
from app.discovery.findings import Failed, Found


def piece(name: str, *hosts: str, family: str = "IPv4", ports: Any = "usual", version: str = "1") -> dict[str, Any]:
    endpoints = [{"addresses": [host], "conditions": {"ready": True}} for host in hosts]
    usual = [{"name": "metrics", "port": 9}, {"name": "http", "port": 8100, "protocol": "TCP"}]
    return {
        "metadata": {"name": name, "resourceVersion": version, "labels": {}},
        "addressType": family,
        "endpoints": endpoints or None,
        "ports": usual if ports == "usual" else ports,
    }


def listed(*pieces: dict[str, Any], version: str = "5") -> bytes:
    return json.dumps({"kind": "x", "metadata": {"resourceVersion": version}, "items": list(pieces)}).encode()


def event(kind: str, document: Any) -> bytes:
    return json.dumps({"type": kind, "object": document}).encode()


def slices(*pieces: dict[str, Any]) -> Slices:
    made = Slices()
    made.replace(listed(*pieces))
    return made


def test_a_list() -> None:
    made = slices(piece("a", "10.0.0.2", "10.0.0.1"), piece("b", "10.0.0.3"))
    assert made.version == "5"
    expected = tuple(Address(f"10.0.0.{last}", 8100) for last in (1, 2, 3))
    assert made.finding("http") == made.finding("8100") == Found(expected, certain=True)


@pytest.mark.parametrize("conditions", [{"ready": False}, {"serving": False, "terminating": True}, {}, None])
def test_every_endpoint_is_a_worker_whatever_its_conditions(conditions: Any) -> None:
    document = piece("a", "10.0.0.1")
    document["endpoints"][0]["conditions"] = conditions
    assert slices(document).finding("http") == Found((Address("10.0.0.1", 8100),), certain=True)


def test_nobody_is_meant_so() -> None:
    nobody = Found((), certain=True)
    assert slices().finding("http") == nobody
    assert slices(piece("a", ports=None)).finding("http") == nobody
    made = Slices()
    made.replace(b'{"metadata":{"resourceVersion":"1"},"items":null}')
    assert made.finding("http") == nobody


def test_a_port_that_is_not_there() -> None:
    assert slices(piece("a", "10.0.0.1")).finding("web") == Failed("has no port 'web'; it has http, metrics")


def test_two_families_count_once() -> None:
    both = slices(piece("a", "10.0.0.1"), piece("b", "fd00::1", family="IPv6"))
    assert both.finding("http") == Found((Address("10.0.0.1", 8100),), certain=True)
    assert slices(piece("a"), piece("b", "fd00::1", family="IPv6")).finding("http") == Found(
        (Address("fd00::1", 8100),), certain=True
    )
    assert slices(piece("a", "pods.example", family="FQDN")).finding("http") == Found((), certain=True)


def test_slices_have_different_ports() -> None:
    made = slices(piece("a", "10.0.0.1"), piece("b", "10.0.0.2", ports=[{"name": "http", "port": 81}]))
    assert made.finding("http") == Found((Address("10.0.0.1", 8100), Address("10.0.0.2", 81)), certain=True)


def test_events() -> None:
    made = slices(piece("a", "10.0.0.1"))
    assert made.apply(event("ADDED", piece("b", "10.0.0.2", version="6")))
    assert made.apply(event("MODIFIED", piece("a", "10.0.0.3", version="7")))
    assert made.finding("http") == Found((Address("10.0.0.2", 8100), Address("10.0.0.3", 8100)), certain=True)
    assert not made.apply(event("BOOKMARK", {"metadata": {"resourceVersion": "8"}}))
    assert made.version == "8"
    assert made.apply(event("DELETED", piece("b", version="9")))
    assert made.apply(event("DELETED", piece("never", version="9")))
    assert made.finding("http") == Found((Address("10.0.0.3", 8100),), certain=True)
    assert made.version == "9"
    assert not made.apply(event("INVENTED", {}))


def test_errors_within_a_watch() -> None:
    made = slices()
    with pytest.raises(Expired):
        made.apply(event("ERROR", {"kind": "Status", "code": 410, "message": "too old"}))
    with pytest.raises(BadAnswer, match="ended its watch with 500: oops"):
        made.apply(event("ERROR", {"code": 500, "message": "oops"}))


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b'{"type":"ADDED"}', b'{"type":"ADDED","object":{"metadata":3}}', b"\xff"]
)
def test_what_is_no_event(line: bytes) -> None:
    with pytest.raises(BadAnswer, match="cannot be read"):
        slices().apply(line)


def test_what_is_no_list() -> None:
    with pytest.raises(BadAnswer, match="cannot be read"):
        Slices().replace(b"<html>")


def test_names_of_services() -> None:
    assert parse_service_port(" ns/pods:http ") == ServicePort("ns", "pods", "http")
    assert str(ServicePort("ns", "pods", "8100")) == "ns/pods:8100"
    for text in ("", "pods:http", "ns/pods", "ns/pods:", "ns/Pods:http", "ns/pods:http/x", "../x/pods:http"):
        with pytest.raises(ValueError, match="namespace/service:port"):
            parse_service_port(text)


def test_delays_grow_and_are_spread() -> None:
    assert [retry_delay(n, 0.5) for n in (0, 1, 2, 20)] == pytest.approx([0.5, 1, 2, 30])
    assert retry_delay(20, 0) == pytest.approx(20)
    assert retry_delay(20, 1) == pytest.approx(40)
