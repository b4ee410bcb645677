"""Bytes that two readers could take differently: refused at once, connection closed, and no worker hears of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.integration.app.conftest import Running, read_response, run_gateway
from tests.integration.app.fake_worker import DONE, MODEL, event, streams_then_waits

BODY = json.dumps({"model": MODEL}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
SMUGGLED = POST + LENGTH + b"\r\n" + BODY
"""What would be executed if the bytes before it were taken for less than they are."""
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


def post(*lines: bytes, body: bytes = b"") -> bytes:
    return POST + b"".join(lines) + b"\r\n" + body


def get(target: bytes = b"/live", *lines: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    return b"GET %b %b\r\nhost: g\r\n%b\r\n" % (target, version, b"".join(lines))


HEADS = {
    "both lengths": post(LENGTH, CHUNKED, body=CHUNKS),
    "both lengths, other order": post(CHUNKED, LENGTH, body=CHUNKS),
    "same length twice": post(LENGTH, LENGTH, body=BODY),
    "two lengths": post(LENGTH, b"content-length: 0\r\n", body=BODY),
    "list of lengths": post(b"content-length: %d, %d\r\n" % (len(BODY), len(BODY)), body=BODY),
    "length +5": post(b"content-length: +5\r\n", body=BODY),
    "length -1": post(b"content-length: -1\r\n", body=BODY),
    "length 0x5": post(b"content-length: 0x5\r\n", body=BODY),
    "length 1_0": post(b"content-length: 1_0\r\n", body=BODY),
    "length 1 0": post(b"content-length: 1 0\r\n", body=BODY),
    "no length": post(b"content-length: \r\n", body=BODY),
    "length of 65 bits": post(b"content-length: 18446744073709551616\r\n", body=BODY),
    "length of 100 digits": post(b"content-length: %b\r\n" % (b"9" * 100), body=BODY),
    "xchunked": post(b"transfer-encoding: xchunked\r\n", body=CHUNKS),
    "chunked twice": post(b"transfer-encoding: chunked, chunked\r\n", body=CHUNKS),
    "chunked on two lines": post(CHUNKED, CHUNKED, body=CHUNKS),
    "chunked and then identity": post(b"transfer-encoding: chunked, identity\r\n", body=CHUNKS),
    "gzip and chunked": post(b"transfer-encoding: gzip, chunked\r\n", body=CHUNKS),
    "empty coding": post(b"transfer-encoding:\r\n", body=CHUNKS),
    "empty coding and chunked": post(b"transfer-encoding: , chunked\r\n", body=CHUNKS),
    "chunked and a tab": post(b"transfer-encoding: chunked\t\r\n", body=CHUNKS),
    "chunked after a vertical tab": post(b"transfer-encoding: \x0bchunked\r\n", body=CHUNKS),
    "chunked with a parameter": post(b"transfer-encoding: chunked;q=1\r\n", body=CHUNKS),
    "chunked in quotes": post(b'transfer-encoding: "chunked"\r\n', body=CHUNKS),
    "chunked in HTTP/1.0": post(CHUNKED, body=CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "LF after the request line": get().replace(b"\r\n", b"\n", 1),
    "LF everywhere": get().replace(b"\r\n", b"\n"),
    "LF after a header": post(b"x: 1\n", LENGTH, body=BODY),
    "LF as the empty line": POST + LENGTH + b"\n" + BODY,
    "CR after the request line": get().replace(b"\r\n", b"\r", 1),
    "CR within a value": post(b"x: a\rb\r\n", LENGTH, body=BODY),
    "CR CR LF": post(b"x: a\r\r\n", LENGTH, body=BODY),
    "folded value": post(b"x: a\r\n b\r\n", LENGTH, body=BODY),
    "folded with a tab": post(b"x: a\r\n\tb\r\n", LENGTH, body=BODY),
    "folded coding": post(b"transfer-encoding:\r\n chunked\r\n", body=CHUNKS),
    "space before the first header": b"GET /live HTTP/1.1\r\n host: g\r\n\r\n",
    "space before the colon": post(b"content-length : 5\r\n", body=BODY),
    "tab before the colon": post(b"transfer-encoding\t: chunked\r\n", body=CHUNKS),
    "space in a name": post(b"x y: 1\r\n", LENGTH, body=BODY),
    "no colon": post(b"x\r\n", LENGTH, body=BODY),
    "no name": post(b": 1\r\n", LENGTH, body=BODY),
    "name not ASCII": post(b"x\xc3\xa9: 1\r\n", LENGTH, body=BODY),
    "NUL in a name": post(b"x\x00: 1\r\n", LENGTH, body=BODY),
    "NUL in a value": post(b"x: a\x00b\r\n", LENGTH, body=BODY),
    "control character in a value": post(b"x: a\x1bb\r\n", LENGTH, body=BODY),
    "no host": b"GET /live HTTP/1.1\r\n\r\n",
    "two hosts": get(b"/live", b"host: other\r\n"),
    "the same host twice": get(b"/live", b"host: g\r\n"),
    "two hosts in HTTP/1.0": get(b"/live", b"host: g\r\n", version=b"HTTP/1.0"),
    "a list of hosts": b"GET /live HTTP/1.1\r\nhost: a, b\r\n\r\n",
    "a path in the host": b"GET /live HTTP/1.1\r\nhost: g/x\r\n\r\n",
    "userinfo in the host": b"GET /live HTTP/1.1\r\nhost: a@b\r\n\r\n",
    "absolute target": get(b"http://g/live"),
    "absolute target of a relayed route": post(LENGTH, body=BODY).replace(b"/v1", b"http://g/v1"),
    "file target": get(b"file:///etc/passwd"),
    "star target": get(b"*"),
    "target without a slash": get(b"live"),
    "empty path": get(b"?x"),
    "fragment": get(b"/live#x"),
    "fragment on a relayed route": post(LENGTH, body=BODY).replace(b"completions", b"completions?a#b"),
    "NUL in the target": get(b"/live\x00"),
    "target not ASCII": get(b"/live\xff"),
    "target not ASCII on a relayed route": post(LENGTH, body=BODY).replace(b"completions", b"completions?\xe9"),
    "space in the target": get(b"/live x"),
    "tab in the target": get(b"/live\tx"),
    "DEL in the target": get(b"/live\x7f"),
    "HTTP/0.9": get(version=b"HTTP/0.9"),
    "HTTP/0.9, short": b"GET /live\r\n\r\n",
    "HTTP/1.2": get(version=b"HTTP/1.2"),
    "HTTP/2.0": get(version=b"HTTP/2.0"),
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http/1.1": get(version=b"http/1.1"),
    "HTTP/01.1": get(version=b"HTTP/01.1"),
    "unknown method": get().replace(b"GET", b"GETS"),
    "method in lower case": get().replace(b"GET", b"get"),
    "long method": get().replace(b"GET", b"G" * 5000),
    "tab after the method": get().replace(b"GET ", b"GET\t"),
    "space before the method": b" " + get(),
    "space after the version": get(version=b"HTTP/1.1 "),
    "TLS": bytes.fromhex("16030100c8010000c40303"),
}
BODIES = {
    "size that is none": b"xyz\r\nabc\r\n0\r\n\r\n",
    "size 0x5": b"0x5\r\nabcde\r\n0\r\n\r\n",
    "size +5": b"+5\r\nabcde\r\n0\r\n\r\n",
    "size -5": b"-5\r\nabcde\r\n0\r\n\r\n",
    "space before the size": b" 5\r\nabcde\r\n0\r\n\r\n",
    "space after the size": b"5 \r\nabcde\r\n0\r\n\r\n",
    "empty size": b"\r\nabcde\r\n0\r\n\r\n",
    "size of 68 bits": b"fffffffffffffffff\r\nabcde\r\n0\r\n\r\n",
    "LF after the size": b"%x\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "LF after the data": b"%x\r\n%b\n0\r\n\r\n" % (len(BODY), BODY),
    "LF at the end": b"%x\r\n%b\r\n0\n\n" % (len(BODY), BODY),
    "data longer than its size": b"3\r\n%b\r\n0\r\n\r\n" % BODY,
    "data shorter than its size": b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY) + 1, BODY),
    "LF in an extension": b"%x;a=b\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "LF in a quoted extension": b'%x;a="b\nc"\r\n%b\r\n0\r\n\r\n' % (len(BODY), BODY),
    "CR in an extension": b"%x;a=b\rc\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "NUL in an extension": b"%x;a=\x00\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    "length as a trailer": b"%x\r\n%b\r\n0\r\ncontent-length: 1\r\n\r\n" % (len(BODY), BODY),
    "coding as a trailer": b"%x\r\n%b\r\n0\r\ntransfer-encoding: chunked\r\n\r\n" % (len(BODY), BODY),
    "LF after a trailer": b"%x\r\n%b\r\n0\r\nx: 1\n\r\n" % (len(BODY), BODY),
    "extension without end": b"%x;a=" % len(BODY) + b"x" * 40_000,
    "trailer without end": b"%x\r\n%b\r\n0\r\nx: " % (len(BODY), BODY) + b"x" * 40_000,
    "trailers without end": b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY) + b"x: y\r\n" * 8_000,
}
STATUSES = {400, 501, 505}


async def refused(running: Running, data: bytes, pieces: int = 1) -> str:
    """What is wrong with how these bytes were answered; nothing, if all is well."""
    reader, writer = await running.raw(b"")
    try:
        size = -(-len(data) // pieces)
        for at in range(0, len(data), size):
            writer.write(data[at : at + size])
            await asyncio.sleep(0)
        status, headers, body = await read_response(reader)
        if status not in STATUSES:
            return f"status {status}"
        error = json.loads(body)["error"]
        if list(error) != ["message", "type", "param", "code"] or not headers.get("x-request-id"):
            return f"{headers} {error}"
        if headers.get("connection") != "close" or await reader.read():
            return "the connection goes on"
        return ""
    except asyncio.IncompleteReadError as end:
        return f"no answer: {end.partial!r}"
    except ConnectionError as error:
        return repr(error)
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("pieces", [1, 40], ids=["whole", "in pieces"])
async def test_heads_and_bodies_that_are_refused(workers: Any, pieces: int) -> None:
    (worker,) = await workers("pod-0")
    cases = {name: head + SMUGGLED for name, head in HEADS.items()}
    cases |= {f"chunks: {name}": post(CHUNKED, body=body) + SMUGGLED for name, body in BODIES.items()}
    async with run_gateway(worker) as running, asyncio.timeout(20):
        wrong = {name: said for name, data in cases.items() if (said := await refused(running, data, pieces))}
        assert wrong == {}
        assert worker.calls == []
        await running.until(lambda: running.gateway.admission.inflight == 0)
        assert (await running.chat()).status_code == 200
        text = (await running.client.get("/metrics")).text
        assert 'hotspare_gateway_errors_total{code="malformed_request",route=""}' in text


async def test_what_looks_odd_and_is_not(workers: Any) -> None:
    """Accepted by every reader, and alike."""
    (worker,) = await workers("pod-0")
    extension = b';a=b;c="d;\\"e"'
    chunks = b"%x%b\r\n%b\r\n0%b\r\n\r\n" % (len(BODY), extension, BODY, extension)
    trailers = CHUNKS[:-2] + b"x-t: 1\r\ncontent-type: application/vnd.hotspare.resume\r\nx-hotspare-stream: 0\r\n\r\n"
    odd = {
        "leading zeroes": post(b"content-length: 00000%d\r\n" % len(BODY), body=BODY),
        "blanks around the length": post(b"content-length:\t %d \t\r\n" % len(BODY), body=BODY),
        "empty lines before": b"\r\n\r\n" + post(LENGTH, body=BODY),
        "extensions": post(CHUNKED, body=chunks),
        "leading zeroes of a chunk": post(CHUNKED, body=b"00000000000000000000" + CHUNKS),
        "trailers": post(CHUNKED, body=trailers),
        "CHUNKED": post(b"Transfer-Encoding: CHUNKED\r\n", body=CHUNKS),
        "Latin-1 in a value": post(b"x: \xe9\r\n", LENGTH, body=BODY),
        "empty host": post(LENGTH, body=BODY).replace(b"host: g", b"host:"),
        "host with a port": post(LENGTH, body=BODY).replace(b"host: g", b"host: [::1]:8000"),
    }
    async with run_gateway(worker) as running, asyncio.timeout(10):
        reader, writer = await running.raw(b"")
        for number, (name, data) in enumerate(odd.items()):
            writer.write(data)
            assert (await read_response(reader))[0] == 200, name
            call = worker.calls[number]
            assert call.body == BODY, name
            assert call.headers["x-hotspare-stream"] == "1" if "x-hotspare-stream" in call.headers else True
            assert not {"x-t", "content-type", "transfer-encoding"} & set(call.headers), name
            assert call.headers["content-length"] == str(len(BODY))
        writer.write(b"POST /v1/completions HTTP/1.0\r\n" + LENGTH + b"\r\n" + BODY)  # HTTP/1.0 needs no host
        assert b" 200 " in await reader.readline()
        writer.close()
    assert len(worker.calls) == len(odd) + 1


@pytest.mark.parametrize(
    "rest",
    [b"xyz\r\n", b"5\nabcde\r\n", b"0\r\ncontent-length: 1\r\n\r\n", b"1;" + b"x" * 40_000],
    ids=["size", "line end", "trailer", "extension"],
)
async def test_a_body_that_breaks_later(workers: Any, rest: bytes) -> None:
    """Its client is told at once, not when the time for the body is over."""
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running, asyncio.timeout(5):
        reader, writer = await running.raw(post(CHUNKED, body=b"1\r\n{\r\n"))
        await running.until(lambda: running.gateway.admission.inflight == 1)
        writer.write(rest)
        status, headers, body = await read_response(reader)
        assert (status, json.loads(body)["error"]["code"]) == (400, "malformed_request")
        assert headers["connection"] == "close"
        assert await reader.read() == b""
        await running.until(lambda: running.gateway.admission.inflight == 0)
        writer.close()
    assert worker.calls == []


async def test_garbage_behind_a_request_does_not_hurt_its_answer(workers: Any) -> None:
    (worker,) = await workers("pod-0")
    worker.will(streams_then_waits(event("a")))
    async with run_gateway(worker) as running, asyncio.timeout(5):
        reader, writer = await running.raw_chat(stream=True)
        await reader.readuntil(event("a"))
        writer.write(b"\x00garbage\r\n\r\n" + SMUGGLED)
        await running.read_all()
        worker.calls[0].go.set()
        assert (await reader.read()).endswith(DONE + b"\r\n0\r\n\r\n")
        writer.close()
        assert (await running.chat(tag="the next")).status_code == 200
    assert [call.json.get("tag") for call in worker.calls] == [None, "the next"]


async def test_more_requests_than_wait_on_one_connection(workers: Any) -> None:
    """Those that fit are answered, in their order; then the connection ends."""
    (worker,) = await workers("pod-0")
    async with run_gateway(worker) as running, asyncio.timeout(10):
        one = post(LENGTH, b"x-request-id: %d\r\n", body=BODY)
        reader, writer = await running.raw(b"".join(one % number for number in range(200)))
        seen = []
        while not reader.at_eof():
            status, headers, _ = await read_response(reader)
            seen.append((status, headers["x-request-id"]))
            if headers.get("connection") == "close":
                break
        assert await reader.read() == b""
        writer.close()
    assert seen == [(200, str(number)) for number in range(len(seen))]
    assert 64 <= len(seen) <= 66
    assert len(worker.calls) == len(seen)
