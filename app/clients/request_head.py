"""[P] What a request's head must be, beyond what the parser insists on.

The parser (llhttp, strict) refuses bare line ends, folded lines, control characters, spaces before a colon, several
lengths and a length beside a transfer coding. What it lets pass, and what a second reader of the same bytes could take
otherwise than we do, is refused here:

* versions other than 1.0 and 1.1; a target that is no plain path (a gateway is no proxy: no absolute form, no
  fragment); no ``host``, or two; a transfer coding in HTTP/1.0;
* a transfer coding other than chunked alone: the parser undoes no other one, nor would a worker;
* an expectation that nobody here can meet.

``RTSP/1.0`` in the request line is HTTP/1.0 to the parser, which does not tell the two apart.

Most heads of a connection have the same ``host`` and nothing else that is looked at, so the protocol keeps the fields
of the last good head and asks only when they differ.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from app.openai.errors import (
    Header,
    expectation_failed,
    malformed_request,
    unknown_transfer_encoding,
    unsupported_version,
)

LOOKED_AT: Final = frozenset((b"host", b"transfer-encoding", b"expect"))
"""The fields that :func:`check_fields` is given, in the order of the head, names in lower case."""

_PATH: Final = re.compile(rb"/[\x21\x22\x24-\x7e]*")
_HOST: Final = re.compile(rb"[A-Za-z0-9._~%!$&'()*+;=:\[\]-]*")


def check_target(method: bytes, target: bytes) -> None:
    """A path from the root, with a query perhaps; or ``*`` to ask about the server as a whole.

    Raises:
        GatewayError: 400.
    """
    if _PATH.fullmatch(target) is None and (method, target) != (b"OPTIONS", b"*"):
        raise malformed_request("the target must be a path that begins with /, of visible ASCII characters without #")


def check_fields(version: str, fields: Sequence[Header]) -> bool:
    """Returns whether the client waits for ``100 Continue`` before it sends its body.

    Raises:
        GatewayError: 400, 417, 501 or 505.
    """
    if version not in ("1.1", "1.0"):
        raise unsupported_version(version)
    expects = False
    hosts = 0
    for name, value in fields:
        if name == b"host":
            hosts += 1
            if _HOST.fullmatch(value.strip()) is None:
                raise malformed_request("the host is not one")
        elif name == b"transfer-encoding":
            if version == "1.0":
                raise malformed_request("HTTP/1.0 has no transfer encodings")
            if value.strip().lower() != b"chunked":
                raise unknown_transfer_encoding(value.decode("latin-1"))
        elif version == "1.1":  # an expectation in HTTP/1.0 means nothing
            if value.strip().lower() != b"100-continue":
                raise expectation_failed(value.decode("latin-1"))
            expects = True
    if hosts > 1:
        raise malformed_request("there are several hosts")
    if not hosts and version == "1.1":
        raise malformed_request("the host is missing")
    return expects
