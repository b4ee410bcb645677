"""What a client holds of an allocation: its chunks' descriptors, which travel as many at a time as go into a message.

Descriptors have one owner: an Allocation, from the moment the last chunk came until `close()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from gms import fdpass, protocol
from gms.connection import Connection
from gms.mapping import Chunk
from gms.protocol import MAX_FDS, MAX_PARTS, ErrorCode, GmsError, Part


class Allocation:
    """Pages of the service: `size_bytes` of them in chunks, whose descriptors this object owns. `size_bytes` is what
    was asked for, rounded up to whole pages; each chunk has `chunk_bytes`, the last one possibly less. `created` says
    that they are new, and on host memory zero."""

    def __init__(self, tag: str, size_bytes: int, chunk_bytes: int, fds: Sequence[int], *, created: bool) -> None:
        self.tag = tag
        self.size_bytes = size_bytes
        self.chunk_bytes = chunk_bytes
        self.created = created
        self._fds = list(fds)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """In order, as `Reservation.map` takes them. Raises GmsError(closed)."""
        if not self._fds:
            raise GmsError(
                ErrorCode.CLOSED, f"The descriptors of {self.tag!r} were closed by their owner; export it again."
            )
        return tuple(
            Chunk(fd, min(self.chunk_bytes, self.size_bytes - number * self.chunk_bytes))
            for number, fd in enumerate(self._fds)
        )

    @property
    def fd(self) -> int:
        """The descriptor of an allocation of one chunk. Raises GmsError: closed, invalid if there are several."""
        chunks = self.chunks
        if len(chunks) > 1:
            raise GmsError(ErrorCode.INVALID, f"{self.tag!r} has {len(chunks)} chunks; use each one's descriptor.")
        return chunks[0].fd

    def close(self) -> None:
        """Closes the descriptors; mappings made from them stay."""
        fdpass.close_all(self._fds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def chunk_count(pages: protocol.Pages) -> int:
    return -(-pages.size_bytes // pages.chunk_bytes)


def check_chunks(pages: protocol.Pages, first: int, received: int) -> None:
    """What came must be the next chunks of an allocation, one at least and none too many."""
    if pages.chunk_bytes <= 0 or pages.size_bytes <= 0:
        raise GmsError(
            ErrorCode.BAD_MESSAGE,
            f"The memory service sent {pages.tag!r} with {pages.size_bytes} bytes in chunks of {pages.chunk_bytes}.",
        )
    due = min(chunk_count(pages) - first, MAX_FDS)
    if pages.first != first or not 1 <= received <= due:
        raise GmsError(
            ErrorCode.BAD_FDS,
            f"The memory service sent {received} chunks of {pages.tag!r} from number {pages.first} on; due were {due} "
            f"from number {first} on.",
        )


def receive_allocation(
    connection: Connection, request: protocol.Allocate | protocol.Export, *, wait_seconds: float = 0.0
) -> Allocation:
    """One allocation with all its chunks, which take several replies if they are many."""
    fds: list[int] = []
    try:
        pages = connection.call(request, protocol.Pages, wait_seconds=wait_seconds, received=fds)
        check_chunks(pages, 0, len(fds))
        while len(fds) < chunk_count(pages):
            more: list[int] = []
            export = protocol.Export(pool=request.pool, tag=request.tag, first=len(fds))
            follow = connection.call(export, protocol.Pages, received=more)
            first = len(fds)
            fds += more
            if (follow.size_bytes, follow.chunk_bytes) != (pages.size_bytes, pages.chunk_bytes):
                raise GmsError(ErrorCode.MISMATCH, f"{pages.tag!r} was replaced while it was exported; try again.")
            check_chunks(follow, first, len(more))
    except BaseException:
        fdpass.close_all(fds)
        raise
    return Allocation(pages.tag, pages.size_bytes, pages.chunk_bytes, fds, created=pages.created)


def hand_back_messages(allocations: Sequence[Allocation]) -> list[tuple[list[Part], list[int]]]:
    """The chunks of all allocations in messages of at most MAX_FDS descriptors and MAX_PARTS parts."""
    messages: list[tuple[list[Part], list[int]]] = []
    for allocation in allocations:
        chunks = allocation.chunks
        first = 0
        while first < len(chunks):
            if not messages or len(messages[-1][1]) == MAX_FDS or len(messages[-1][0]) == MAX_PARTS:
                messages.append(([], []))
            parts, fds = messages[-1]
            count = min(len(chunks) - first, MAX_FDS - len(fds))
            parts.append(Part(allocation.tag, first, count))
            fds += [chunk.fd for chunk in chunks[first : first + count]]
            first += count
    return messages
