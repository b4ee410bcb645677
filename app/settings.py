"""Settings of the gateway: the only place in ``app`` that reads the environment.

Every field is set by an environment variable (``HOTSPARE_`` + the field's name) or by a command-line flag (the field's
name with dashes); flags win. A bad value refuses to start, with a sentence.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.address import Address, parse_address, parse_addresses
from app.discovery.endpoints import ServicePort, parse_service_port
from app.security.credentials import parse_keys
from workers.contract import parse_worker_tokens

MIB = 1024 * 1024
_ORIGIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#@*\s]+/?")
"""Scheme and host, perhaps a port (RFC 6454, section 6.1)."""
SOURCES: Final = ("workers", "workers_file", "workers_dns", "workers_kubernetes")
"""The settings that say where workers are: one of them."""


def _addresses(value: object) -> object:
    return parse_addresses(value) if isinstance(value, str) else value


def _collector(value: str | None) -> str | None:
    if not value:  # as OpenTelemetry has it: an empty variable is as good as none
        return None
    if not value.startswith(("http://", "https://")):
        raise ValueError("a collector's address begins with http:// or https://")
    return value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _keys(value: object) -> object:
    """From the variable (a text) or from flags (a list of texts)."""
    if isinstance(value, list):
        value = ",".join(map(str, value))
    if not isinstance(value, str):
        return value
    keys = tuple(map(SecretStr, parse_keys(value)))
    if not keys:  # whoever sets keys wants a closed door, and none of them would leave it open
        raise ValueError("there is no key in it, and everybody would be let in; name one, or unset it")
    return keys


def _origins(value: tuple[str, ...]) -> tuple[str, ...]:
    for origin in value:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is no origin, such as https://chat.example.com; no page would ever match it")
    return value


def _unset_if_empty(value: object) -> object:
    """An empty variable is as good as none: Compose's ``${NAME:-}`` sets those."""
    return None if value == "" else value


def _listed(value: object) -> object:
    if not isinstance(value, str):
        return value
    items = tuple(item.strip() for item in value.split(",") if item.strip())
    for item in items:
        if not item.isascii() or not item.isprintable() or " " in item:
            raise ValueError(f"{item!r} cannot stand in a header")
    return items


def _address(value: object) -> object:
    return parse_address(value) if isinstance(value, str) and value else value or None


def _service_port(value: object) -> object:
    return parse_service_port(value) if isinstance(value, str) and value else value or None


def _in_cluster() -> str:
    """The API server, as Kubernetes tells every pod; "" elsewhere."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{Address(host, int(port))}" if host and port.isdigit() else ""


def _token(value: SecretStr) -> SecretStr:
    (token,) = parse_worker_tokens(value.get_secret_value().encode())
    return SecretStr(token)


Seconds = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]

SecondsOrOff = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]

OptionalPath = Annotated[Path | None, BeforeValidator(_unset_if_empty)]


class GatewaySettings(BaseSettings):
    """What the gateway process can be told. Durations are seconds, sizes bytes."""

    model_config = SettingsConfigDict(env_prefix="HOTSPARE_", extra="ignore", populate_by_name=True)

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all of the machine."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on. 0: any free one; the log line and ``gateway.json`` say which."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """How many processes serve. More than one share the listening socket, under a supervisor that starts them again."""
    workers: Annotated[tuple[Address, ...], NoDecode, BeforeValidator(_addresses)] = (Address("127.0.0.1", 8100),)
    """The pods' serving ports, comma separated: ``host:port`` or ``http://host:port``. Instead of it, one of the other
    ``workers_`` settings may say where workers are."""
    workers_file: OptionalPath = None
    """A file of workers, one ``host:port`` a line (``#`` begins a comment) or a JSON list of them. Changes are
    taken up while the gateway runs."""
    workers_dns: Annotated[Address | None, BeforeValidator(_address)] = None
    """``host:port``: each address of this name is a worker, as with a headless Service. It is resolved
    every ``discovery_interval_seconds``."""
    workers_kubernetes: Annotated[ServicePort | None, BeforeValidator(_service_port)] = None
    """``namespace/service:port``: each endpoint of this Service is a worker. Followed through EndpointSlices, which the
    gateway's service account must be allowed to list and to watch."""
    kubernetes_api: Annotated[str, Field(pattern="^https?://[^/?#@]+/?$|^$", default_factory=_in_cluster)]
    """The Kubernetes API server's URL. In a pod it is known (``KUBERNETES_SERVICE_HOST``)."""
    kubernetes_credentials: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Folder with ``token`` and ``ca.crt``, the service account's."""
    discovery_interval_seconds: Seconds = 5.0
    """How often ``workers_dns`` is resolved."""

    api_keys: Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_keys)] = ()
    """Keys that clients must show one of, comma separated; the flag can be repeated. Without any, and without a file of
    keys, everybody is let in. Everybody who may list processes can read a flag: prefer the
    file."""
    api_keys_file: OptionalPath = None
    """Further keys, one a line; ``#`` begins a comment. Read again within seconds when it changes. A start
    without any key is refused; if the file is emptied later, its keys are withdrawn."""

    tls_certificate: OptionalPath = None
    """Certificate in PEM form, with its chain: the gateway then speaks HTTPS only. Read again within seconds when it or
    the key changes; a pair that cannot be used changes nothing."""
    tls_key: OptionalPath = None
    """The certificate's key, in PEM form and not encrypted."""
    tls_handshake_timeout_seconds: Seconds = 10.0
    """How long a client may take for its TLS handshake."""

    worker_token: Annotated[SecretStr, AfterValidator(_token)] | None = None
    """Shown to workers, which have the same setting and serve nobody else. Has no flag: those can be read by others."""
    worker_token_file: OptionalPath = None
    """A file with the token, instead: its first line counts that is not empty and does not begin with ``#``. Read again
    within seconds when it changes."""

    wait_for_worker_seconds: Seconds = 15.0
    """How long a request waits while no worker takes it, before it is answered: with 503 ``no_worker``, or with 429
    ``overloaded`` if all workers were full."""
    connect_timeout_seconds: Seconds = 2.0
    """How long connecting to a worker may take."""
    first_byte_timeout_seconds: SecondsOrOff = 60.0
    """Silence allowed before an answer begins; starts again whenever the worker's ``steps`` advance. 0: no limit."""
    stall_timeout_seconds: SecondsOrOff = 60.0
    """Silence allowed within an answer; starts again whenever the worker's ``steps`` advance. A worker's comments are
    silence. 0: no limit."""
    sse_keepalive_seconds: Seconds = 15.0
    """A streaming client that was sent nothing for this long gets a comment (``: keep-alive``), so that proxies keep
    the connection. Clients of server-sent events pass over it."""
    client_write_timeout_seconds: Seconds = 60.0
    """A client that takes no byte for this long, while bytes wait for it, is given up."""
    body_timeout_seconds: Seconds = 60.0
    """How long a client may take to send the whole of a request's body."""
    body_stall_timeout_seconds: Seconds = 20.0
    """A client that sends less than 1024 bytes of a request's body in this time, and not its end, is given up (408)."""
    head_timeout_seconds: Seconds = 30.0
    """How long a client may take to send a request's head, from its connection or from the head's first byte."""
    keep_alive_seconds: Annotated[int, Field(ge=1, le=86400)] = 75
    """How long a client's connection is kept without a request; longer than common proxies keep theirs, so that they
    close first."""
    heartbeat_timeout_seconds: Seconds = 3.5
    """A worker whose watch was silent for this long gets no new requests. Workers speak every second."""

    max_body_bytes: Annotated[int, Field(ge=1024, le=1 << 31)] = 32 * MIB
    """Largest body of a request; a larger one is answered with 413."""
    max_held_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 4 * MIB
    """A complete (non-streaming) answer up to this size is held back until it is whole, so that a worker's death in the
    middle of it stays invisible. A larger one is passed on as it comes; a larger error counts as a broken worker."""
    max_inflight: Annotated[int, Field(ge=1, le=1 << 20)] = 4096
    """Most requests at a time in each process, those that wait included; one more is answered with 429."""
    max_queued: Annotated[int, Field(ge=0, le=1 << 20)] = 1024
    """Most requests for one model that wait at a time in each process because no worker is there or all are full; one
    more is answered with 429 at once. 0: none waits."""
    max_realtime_sessions: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    """Most realtime sessions (WebSockets) at a time in each process; one more is answered with 429."""
    max_realtime_event_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = MIB
    """Largest event of a realtime client; a larger one is answered with an error event. A message of more than twice
    this size is not read: the connection is closed with code 1009."""
    max_realtime_conversation_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 4 * MIB
    """Most text that a realtime session keeps: its conversation's, and each of its responses'."""
    max_connections: Annotated[int, Field(ge=1, le=1 << 20)] = 16384
    """Most connections of clients, for each process; one more is answered with 503, unless it asks for ``/live`` or
    ``/health``."""
    health_needs_worker: bool = False
    """Whether ``/health`` says 503 once no worker was routable for 60 s. For where other gateways, with other workers,
    take over; elsewhere an empty Service would refuse the requests that could have waited here."""
    resume_limit: Annotated[
        int,
        Field(
            ge=0,
            le=100,
            validation_alias=AliasChoices("resume_limit", "HOTSPARE_RESUME_LIMIT", "DYN_MIGRATION_LIMIT"),
        ),
    ] = 3
    """How many times in a row a request whose worker broke goes to another one without gaining anything of its answer;
    one that gains something each time is never given up, and deaths of engines are judged apart. Also
    ``--migration-limit``. 0: no answer is resumed; a request of which nothing was delivered is still started three
    times in all."""
    resume_wait_seconds: Seconds = 60.0
    """How long an answer that is to be resumed waits for a worker: two new engines of one pod may take that long to
    start."""
    resume_home_seconds: SecondsOrOff = 1.0
    """How long an interrupted request waits for the spare of its own worker, if that one had a spare: it takes over in
    a moment, with room for the request and perhaps with its KV cache, while another worker would compute all of it
    again, beside its own requests. After that, or if its worker turns out to live, any worker will do. 0: any at
    once."""
    resume_body_bytes: Annotated[int, Field(ge=0, le=1 << 31)] = 8 * MIB
    """Largest body of a request that is kept while its answer is streamed, so that it can be resumed."""
    resume_max_tokens: Annotated[int, Field(ge=0, le=128 * 1024)] = 128 * 1024
    """About how many tokens of an answer are remembered, at most 131072, which is what engines take; one that is longer
    cannot be resumed any more. One takes some eight bytes."""
    resumes_per_second: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 200.0
    """How many interrupted requests a worker is sent in a second, so that a promotion is not a flood; the rest, and new
    requests behind them, wait. 0: no limit."""
    drain_timeout_seconds: Annotated[
        float,
        Field(
            ge=0,
            le=86400,
            validation_alias=AliasChoices(
                "drain_timeout_seconds",
                "HOTSPARE_DRAIN_TIMEOUT_SECONDS",
                "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
            ),
        ),
    ] = 5.0
    """How long admitted requests may go on after SIGTERM."""

    cors_allow_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed), AfterValidator(_origins)] = ()
    """Web pages of these origins may call the gateway from a browser, comma separated, such as
    ``https://chat.example.com``; ``*``: all. None: no page may."""
    cors_allow_methods: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)] = ("GET", "HEAD", "POST")
    """What such pages may do, comma separated."""
    cors_allow_headers: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)] = ("*",)
    """Headers that such pages may set, comma separated; ``*``: all, ``authorization`` included."""
    cors_max_age_seconds: Annotated[int, Field(ge=0, le=86400)] = 600
    """How long a browser may remember what pages may do."""

    log_format: Literal["console", "json"] = "console"
    """Lines for people, or one JSON object a line."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = "info"
    """Least level that is logged; upper or lower case."""
    otlp_endpoint: Annotated[
        str | None,
        AfterValidator(_collector),
        Field(validation_alias=AliasChoices("otlp_endpoint", "HOTSPARE_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")),
    ] = None
    """Base URL of an OpenTelemetry collector that gets a span for each relayed request, by OTLP over HTTP; usually
    ``http://host:4318``. Needs the extra ``opentelemetry``."""
    access_log: bool = True
    """A line for each relayed request, at level info."""
    parent_pid: Annotated[int, Field(ge=1)] | None = None
    """Die when this process, the parent, dies. Set by the parent on one machine; unset in a container."""
    run_dir: OptionalPath = None
    """Folder for ``gateway.json``, which says pid, host and port while the gateway runs; unset: no such file."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in SOURCES if name in self.model_fields_set and getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are set; workers are found in one way: unset all but one of them")
        if self.workers_kubernetes is not None and not self.kubernetes_api:
            raise ValueError("workers_kubernetes needs an API server: run in a pod, or set kubernetes_api")
        return self

    @model_validator(mode="after")
    def _whole_pair(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both, or neither")
        return self


def another_name(field: str) -> str:
    """The variable that sets this field, where that is one of its other names and not its own; otherwise ""."""
    alias = GatewaySettings.model_fields[field].validation_alias if field in GatewaySettings.model_fields else None
    if not isinstance(alias, AliasChoices):
        return ""
    given = {name.upper() for name in os.environ}
    found = next((str(choice) for choice in alias.choices[1:] if str(choice) in given), "")
    return "" if found == f"HOTSPARE_{field.upper()}" else found
