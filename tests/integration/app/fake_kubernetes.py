"""An API server that knows EndpointSlices: lists and watches over real TLS, with tokens, 410 and cut connections."""

from __future__ import annotations

import asyncio
import datetime
import json
import ssl
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PATH = "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"


def make_credentials(folder: Path) -> None:
    """``tls.key``, and ``ca.crt``, which is the server's own certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(certificate.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "tls.key").write_bytes(private)


class FakeKubernetes:
    """``token``: the one that is good now. ``version`` grows with each change; ``oldest`` is where history begins."""

    def __init__(self, credentials: Path, *, token: str = "first") -> None:
        self.token = token
        self.version = 1
        self.oldest = 0
        self.lists = 0
        self.watches_opened = 0
        self.refused = 0
        self.watchable = True
        self.port = 0
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(credentials / "ca.crt", credentials / "tls.key")
        self._slices: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[int, bytes]] = []
        self._watches: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def put(self, name: str, *workers: str, **conditions: bool) -> None:
        """A slice with these workers, which are all at one port."""
        ports = {int(worker.rsplit(":", 1)[1]) for worker in workers}
        assert len(ports) <= 1
        self.version += 1
        kind = "MODIFIED" if name in self._slices else "ADDED"
        self._slices[name] = {
            "metadata": {"name": name, "resourceVersion": str(self.version)},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [w.split(":")[0]], "conditions": conditions} for w in workers],
            "ports": [{"name": "http", "port": port} for port in ports],
        }
        self._tell(kind, self._slices[name])

    def delete(self, name: str) -> None:
        self.version += 1
        gone = self._slices.pop(name)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", gone)

    def bookmark(self) -> None:
        self.version += 1
        self._tell("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    def forget_history(self) -> None:
        """As after a compaction: older versions are gone, with a change that no watch told of."""
        self.version += 1
        self.oldest = self.version
        self._events.clear()

    def expire_watches(self) -> None:
        self._send(json.dumps({"type": "ERROR", "object": {"kind": "Status", "code": 410}}).encode())
        self.end_watches()

    def end_watches(self) -> None:
        """As at the end of ``timeoutSeconds``."""
        for writer in self._watches:
            writer.write(b"0\r\n\r\n")
            writer.close()
        self._watches.clear()

    def cut_watches(self) -> None:
        for writer in self._watches:
            writer.transport.abort()
        self._watches.clear()

    def _tell(self, kind: str, document: Any) -> None:
        line = json.dumps({"type": kind, "object": document}).encode()
        self._events.append((self.version, line))
        self._send(line)

    def _send(self, line: bytes) -> None:
        for writer in self._watches:
            writer.write(_chunk(line + b"\n"))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await writer.start_tls(self._context)  # here, so that a handshake under way ends with this task
            while await self._one(reader, writer):
                pass
        except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._watches.discard(writer)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        target = urlsplit(head.split(" ")[1])
        asked = {name: values[0] for name, values in parse_qs(target.query).items()}
        assert target.path == PATH
        assert asked["labelSelector"] == "kubernetes.io/service-name=pods"
        if f"authorization: bearer {self.token}\r\n" not in head.lower():
            self.refused += 1
            _answer(writer, 401, {"kind": "Status", "code": 401})
        elif "watch" not in asked:
            self.lists += 1
            items = list(self._slices.values())
            _answer(writer, 200, {"metadata": {"resourceVersion": str(self.version)}, "items": items})
        elif not self.watchable:
            _answer(writer, 403, {"kind": "Status", "code": 403})
        elif int(asked["resourceVersion"]) < self.oldest:
            _answer(writer, 410, {"kind": "Status", "code": 410})
        else:
            assert asked["allowWatchBookmarks"] == "true"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
            for version, line in self._events:
                if version > int(asked["resourceVersion"]):
                    writer.write(_chunk(line + b"\n"))
            self._watches.add(writer)
            self.watches_opened += 1
            await reader.read(1)
            return False
        return True


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _answer(writer: asyncio.StreamWriter, status: int, document: Any) -> None:
    body = json.dumps(document).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body)))
    writer.write(body)
