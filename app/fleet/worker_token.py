"""[P] The token by which workers know this gateway, as it goes onto the wire."""

from __future__ import annotations

from workers.contract import HEADER_WORKER_TOKEN


class WorkerToken:
    """``last_lines`` end the head of every request to a worker. They are made once, not with each request."""

    __slots__ = ("last_lines", "refused")

    def __init__(self, token: str = "") -> None:
        self.last_lines = b""
        self.refused = ""
        """What it means that a worker says no; a sentence for logs and status."""
        self.replace(token)

    def replace(self, token: str) -> None:
        """From now on this one; with an empty text, none."""
        self.last_lines = f"{HEADER_WORKER_TOKEN}: {token}\r\n\r\n".encode() if token else b"\r\n"
        self.refused = (
            "it does not accept this gateway's worker token; "
            "HOTSPARE_WORKER_TOKEN, or the file that HOTSPARE_WORKER_TOKEN_FILE names, must be the same for both"
            if token
            else "it wants a worker token, and this gateway has none; set HOTSPARE_WORKER_TOKEN_FILE, or "
            "HOTSPARE_WORKER_TOKEN, to what the worker has"
        )
