"""[P] Reads EndpointSlices, as a Kubernetes API server lists them and tells of their changes.

Every endpoint is a worker, whatever its conditions say. ``ready`` is about a whole pod, and a pod whose one engine has
just died is not ready while its other engine serves; a terminating pod has streams to end, and its own watch says that
it takes no new ones. The watch knows better in each case.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from app.address import Address
from app.discovery.findings import Failed, Finding, Found

LABEL = "kubernetes.io/service-name"
_NAME = r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"
_SERVICE_PORT = re.compile(rf"({_NAME})/({_NAME}):([a-z0-9](?:[-a-z0-9]{{0,61}}[a-z0-9])?)")
_GONE = 410


class ServicePort(NamedTuple):
    """``port`` is the name of a port of the Service, or its endpoints' port number."""

    namespace: str
    service: str
    port: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.service}:{self.port}"


def parse_service_port(text: str) -> ServicePort:
    """Raises:
    ValueError: it is not ``namespace/service:port``.
    """
    match = _SERVICE_PORT.fullmatch(text.strip())
    if match is None:
        raise ValueError("should be namespace/service:port, the port by its name in the Service or by its number")
    return ServicePort(*match.groups())


class BadAnswer(Exception):
    """The API server said what cannot be understood, or refused; the message is a clause."""


class Expired(Exception):
    """The version asked for is too old: list again."""


class _Meta(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str] = []


class _Slice(msgspec.Struct, rename="camel"):
    metadata: _Meta
    address_type: str = ""
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _List(msgspec.Struct):
    metadata: _Meta
    items: list[_Slice] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Bookmark(msgspec.Struct):
    metadata: _Meta


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class Slices:
    """The slices of one Service, up to ``version``."""

    def __init__(self) -> None:
        self.version = ""
        self._slices: dict[str, _Slice] = {}

    def replace(self, document: bytes) -> None:
        """Take over a list.

        Raises:
            BadAnswer: it is none.
        """
        try:
            listed = msgspec.json.decode(document, type=_List)
        except msgspec.DecodeError as error:
            raise BadAnswer(f"gave a list that cannot be read: {error}") from None
        self._slices = {item.metadata.name: item for item in listed.items or []}
        self.version = listed.metadata.resource_version

    def apply(self, line: bytes) -> bool:
        """Take over one event of a watch; whether a slice changed.

        Raises:
            Expired: the watch must begin anew, with a list.
            BadAnswer: it is no event.
        """
        try:
            event = msgspec.json.decode(line, type=_Event)
            match event.type:
                case "ADDED" | "MODIFIED" | "DELETED":
                    item = msgspec.json.decode(event.object, type=_Slice)
                    if event.type == "DELETED":
                        self._slices.pop(item.metadata.name, None)
                    else:
                        self._slices[item.metadata.name] = item
                    self.version = item.metadata.resource_version
                    return True
                case "BOOKMARK":
                    self.version = msgspec.json.decode(event.object, type=_Bookmark).metadata.resource_version
                case "ERROR":
                    status = msgspec.json.decode(event.object, type=_Status)
                    if status.code == _GONE:
                        raise Expired
                    raise BadAnswer(f"ended its watch with {status.code}: {status.message:.200}")
        except msgspec.DecodeError as error:
            raise BadAnswer(f"sent an event that cannot be read: {error}") from None
        return False

    def finding(self, port: str) -> Finding:
        """The workers. No slice, and slices without endpoints, mean that there are none."""
        found: list[Address] = []
        known: set[str] = set()
        for item in self._family():
            numbers = [p.port for p in item.ports or [] if p.port and port in (p.name, str(p.port))]
            hosts = [endpoint.addresses[0] for endpoint in item.endpoints or [] if endpoint.addresses]
            found.extend(Address(host, number) for host in hosts for number in numbers[:1])
            if hosts:
                known.update(p.name or str(p.port) for p in item.ports or [])
        if not found and known:
            return Failed(f"has no port {port!r}; it has {', '.join(sorted(known))}")
        return Found(tuple(sorted(found)), certain=True)

    def _family(self) -> list[_Slice]:
        """The slices of the one address family that counts: a Service with two has slices for each."""
        filled = {item.address_type for item in self._slices.values() if item.endpoints}
        counts = "IPv4" if "IPv4" in filled else "IPv6"
        return [item for item in self._slices.values() if item.address_type == counts]


def retry_delay(failures: int, fraction: float) -> float:
    """Seconds until the API server is asked again after so many failures in a row: 0.5 to 30, give or take a third
    (``fraction`` is random, 0 to 1), so that a hundred gateways do not come at once."""
    return min(30.0, 0.5 * 2.0 ** min(failures, 10)) * (2 / 3 + fraction * 2 / 3)
