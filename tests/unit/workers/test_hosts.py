from __future__ import annotations

import asyncio
import socket

import pytest

from workers.hosts import authority
from workers.http_get import GetFailed, http_get, http_post


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("host", "written"),
    [
        ("127.0.0.1", "127.0.0.1:8100"),
        ("localhost", "localhost:8100"),
        ("::1", "[::1]:8100"),
        ("fe80::1%eth0", "[fe80::1]:8100"),
    ],
)
def test_how_a_host_and_a_port_are_written(host: str, written: str) -> None:
    assert authority(host, 8100) == written


HOSTS = ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here"))]


@pytest.mark.parametrize("host", HOSTS)
async def test_a_neighbour_is_asked_by_its_name(host: str) -> None:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(answer, host, 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await http_get(host, port, "/live", timeout_seconds=5) == (200, b"{}")
        assert await http_post(host, port, "/x", b"{}", timeout_seconds=5) == (200, b"{}")
    assert all(f"\r\nhost: {authority(host, port)}\r\n".encode() in head for head in heads)
    with pytest.raises(GetFailed) as refused:
        await http_get(host, port, "/live", timeout_seconds=5)
    assert str(refused.value).startswith(f"{authority(host, port)}/live: ")
