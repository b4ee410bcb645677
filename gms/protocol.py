"""What clients and the memory service say to each other. Pure: bytes in, messages out.

A frame is a u32 little-endian length and a msgpack body of at most MAX_FRAME bytes. File descriptors travel by
SCM_RIGHTS beside the first byte of their frame, and every message states how many belong to it (`fds`): the receiver
compares, so that a lost or a smuggled descriptor is an error and never an off-by-one. A connection has one request
under way at a time: request, reply, request, reply. Bounds on names, sizes and times stand in the types, so that a
message that decodes is within them. docs/gms.md goes through the messages one by one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

VERSION: Final = 2
MAX_FRAME: Final = 4 * 1024 * 1024
"""Bytes of one frame's body. Fits a full manifest together with a full allocation list."""
MAX_FIRST_FRAME: Final = 4096
"""Bytes a connection may send before its hello was accepted."""
MAX_MANIFEST: Final = 2 * 1024 * 1024
MAX_FDS: Final = 64
"""Descriptors in one message: the pidfds of an engine and of its ranks, or the chunks of an allocation. An allocation
of more chunks travels in several messages."""
MAX_PARTS: Final = 64
"""Stretches of allocations in one hand-back: each has a descriptor at least."""
MAX_PIECES: Final = 65536
"""Digests of one allocation: one for every tensor and every 64 MiB."""
MAX_EVENTS: Final = 256
"""Events in one reply."""
MAX_ALLOCATION: Final = 1 << 48
HEADER_BYTES: Final = 4

Name = Annotated[str, Meta(pattern=r"^[\x20-\x7e]{1,128}\Z")]
Tag = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,128}\Z")]
PoolName = Annotated[str, Meta(pattern=r"^(kv|kv_index|weights/[A-Za-z0-9._-]{1,128})\Z")]
Epoch = Annotated[int, Meta(ge=0, lt=1 << 62)]
SizeBytes = Annotated[int, Meta(gt=0, le=MAX_ALLOCATION)]
Timeout = Annotated[float, Meta(ge=0, le=86400)]
FdCount = Annotated[int, Meta(ge=0, le=MAX_FDS)]
Index = Annotated[int, Meta(ge=0, lt=1 << 32)]
Generation = Annotated[int, Meta(ge=0, lt=1 << 62)]
Digest = Annotated[bytes, Meta(min_length=4, max_length=64)]
Digests = dict[Tag, Annotated[list[Digest], Meta(max_length=MAX_PIECES)]]
"""For each allocation the digests of its pieces, in the order of `gms.integrity.pieces`."""


class LeaseMode(StrEnum):
    RW = "rw"
    RO = "ro"
    RW_OR_RO = "rw_or_ro"
    """The first client writes; everybody else waits for its commit and reads."""


class ErrorCode(StrEnum):
    ALREADY_ATTACHED = "already_attached"
    BAD_FDS = "bad_fds"
    BAD_MESSAGE = "bad_message"
    BUSY = "busy"
    CLOSED = "closed"
    CORRUPT = "corrupt"
    EXISTS = "exists"
    FENCED = "fenced"
    INTERNAL = "internal"
    INVALID = "invalid"
    MISMATCH = "mismatch"
    NOT_ATTACHED = "not_attached"
    NOT_FOUND = "not_found"
    NOT_PERMITTED = "not_permitted"
    OUT_OF_MEMORY = "out_of_memory"
    SERVICE_GONE = "service_gone"
    SIZE_MISMATCH = "size_mismatch"
    STALE_EPOCH = "stale_epoch"
    STILL_MAPPED = "still_mapped"
    TIMEOUT = "timeout"
    TOO_MANY = "too_many"
    VERSION_MISMATCH = "version_mismatch"
    WRONG_DEVICE = "wrong_device"


class GmsError(Exception):
    """Something the memory service refused or could not do. The message is one sentence for a person: what happened,
    whose fault it is, what to do next. `code` is one of ErrorCode; `retryable` says whether the same call can work
    later without a change on the caller's side."""

    def __init__(self, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = str(code)
        self.retryable = retryable


class Message(Struct, tag=True, frozen=True, kw_only=True, forbid_unknown_fields=False):
    fds: FdCount = 0


HOST_TAG: Final = "host-"
"""What is allocated under a tag that begins so is memory of the host, whatever the service's device is."""


class AllocationInfo(Struct, frozen=True):
    """`size_bytes` in chunks of `chunk_bytes`, the last one possibly smaller; each chunk has its own descriptor."""

    tag: str
    size_bytes: int
    chunk_bytes: int


class LeaseInfo(Struct, frozen=True):
    """Who holds a pool. `pid` is None where the holder lives in another PID namespace."""

    engine: str
    instance: str
    pid: int | None
    mode: LeaseMode


class PoolStatus(Struct, frozen=True, kw_only=True):
    """One pool as it is now. `bytes` counts every generation that still stands, `orphaned_bytes` those among them that
    only wait for a former holder's death; `allocations` are those of the current generation. `waits` says, a sentence
    for each, who waits for a lease and for what; `corrupt` why what was committed is not given out any more."""

    name: str
    state: str
    generation: int
    epoch: int
    bytes: int
    high_water_bytes: int
    orphaned_bytes: int
    waiting: int
    waits: list[str]
    leases: list[LeaseInfo]
    allocations: list[AllocationInfo]
    corrupt: str = ""


class Status(Struct, frozen=True, kw_only=True):
    """`memory_waits` says, a sentence for each, who waits for memory, how much and since when. `journal` is why pages
    could not be taken back after a restart as things stand, empty if they could."""

    device: str
    device_id: str
    pools: list[PoolStatus]
    total_bytes: int
    high_water_bytes: int
    memory_limit: int | None
    bytes_by_owner: dict[str, int]
    memory_waits: list[str]
    clients: int
    journal: str = ""


class Event(Struct, frozen=True, kw_only=True):
    """Something that happened. `seq` counts from 1 in a service's life; `pool` and `client` are empty where none is
    meant, `detail` is a sentence for people."""

    seq: int
    unix_seconds: float
    kind: str
    pool: str = ""
    client: str = ""
    detail: str = ""


# Requests


class Hello(Message, frozen=True, kw_only=True):
    """The first message. Its descriptors are pidfds: the client's own, then those of processes that map for it.

    `device_id` is what the device is, whatever number it has in this process: the name of a host device, the UUID of a
    GPU; `device` is what the client calls it, for sentences."""

    version: int
    client: Name
    engine: Name
    instance: Name
    device: Name
    device_id: Name
    epoch: Epoch = 0


class Attach(Message, frozen=True, kw_only=True):
    """Asks for a lease. With `verify` what is committed is checksummed before it is granted for reading; only where the
    service can read its device's memory."""

    pool: PoolName
    mode: LeaseMode
    epoch: Epoch = 0
    timeout_seconds: Timeout = 60.0
    verify: bool = False


class Allocate(Message, frozen=True, kw_only=True):
    """`timeout_seconds` is how long to wait for room."""

    pool: PoolName
    tag: Tag
    size_bytes: SizeBytes
    timeout_seconds: Timeout = 0.0


class Export(Message, frozen=True, kw_only=True):
    """The chunks from number `first` on, as many as go into one reply."""

    pool: PoolName
    tag: Tag
    first: Index = 0


class PutManifest(Message, frozen=True, kw_only=True):
    """What a holder of a `kv` pool says about its pages to the next holder; a writer of weights commits its own."""

    pool: PoolName
    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST)]


class GetManifest(Message, frozen=True, kw_only=True):
    """Needs no lease. With `digests` those of what is committed are wanted, too."""

    pool: PoolName
    digests: bool = False


class Commit(Message, frozen=True, kw_only=True):
    """`digests`: the writer's word for what it wrote, where the service cannot read its device's memory; else empty."""

    pool: PoolName
    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST)]
    digests: Digests = {}


class Part(Struct, frozen=True):
    """`count` chunks of an allocation, from number `first` on."""

    tag: Tag
    first: Index
    count: Annotated[int, Meta(ge=1, le=MAX_FDS)]


class Adopt(Message, frozen=True, kw_only=True):
    """Hands pages back to a restarted service; the chunks' descriptors travel beside it, part after part. With `more`
    another such message follows, which is answered Done; the last one is answered with the lease as it was."""

    pool: PoolName
    generation: Generation
    mode: LeaseMode
    epoch: Epoch = 0
    parts: Annotated[list[Part], Meta(min_length=1, max_length=MAX_PARTS)]
    more: bool = False


class Verify(Message, frozen=True, kw_only=True):
    """Compares what is committed with what was. `digests` come from a reader that has computed them, where the service
    cannot read its device's memory; else they are empty and the service computes."""

    pool: PoolName
    digests: Digests = {}


class GetEvents(Message, frozen=True, kw_only=True):
    """Events after number `after`; waits up to `timeout_seconds` for the first of them."""

    after: Index = 0
    timeout_seconds: Annotated[float, Meta(ge=0, le=60)] = 0.0


class Release(Message, frozen=True, kw_only=True):
    """Gives a lease back. `quiesced` is the holder's word that it and its ranks have no mapping left."""

    pool: PoolName
    quiesced: bool = False


class GetStatus(Message, frozen=True, kw_only=True):
    pass


# Replies


class Welcome(Message, frozen=True, kw_only=True):
    version: int
    device: str


class Granted(Message, frozen=True, kw_only=True):
    """A lease. `fresh` means that no page of an earlier holder came with it.

    The descriptor beside it, if there is one, is locked (flock) and the service keeps no copy of it: as long as the
    client has it open, a restarted service knows that pages may still be handed back.
    """

    mode: LeaseMode
    generation: int
    fresh: bool
    manifest: bytes
    allocations: list[AllocationInfo]


class Pages(Message, frozen=True, kw_only=True):
    """One allocation; the descriptors of its chunks from number `first` on travel beside it, as many as fit.
    `size_bytes` is rounded up to the backend's granularity. What is `created` is zero on host memory and undefined on a
    GPU."""

    tag: str
    size_bytes: int
    chunk_bytes: int
    created: bool
    first: int = 0


class ManifestReply(Message, frozen=True, kw_only=True):
    """`generation` 0: nothing is there. `digests` are what the service compares with when it verifies, made by
    `algorithm`; empty if none were wanted, or there are none."""

    generation: int
    manifest: bytes
    allocations: list[AllocationInfo]
    digests: Digests = {}
    algorithm: str = ""


class Verified(Message, frozen=True, kw_only=True):
    generation: int
    size_bytes: int


class EventsReply(Message, frozen=True, kw_only=True):
    """`last` is the newest event's number; ask with it next. Events that are older than the service keeps are gone."""

    events: list[Event]
    last: int


class Done(Message, frozen=True, kw_only=True):
    pass


class StatusReply(Message, frozen=True, kw_only=True):
    status: Status


class Failure(Message, frozen=True, kw_only=True):
    code: str
    message: str
    retryable: bool = False


Request = (
    Hello
    | Attach
    | Allocate
    | Export
    | PutManifest
    | GetManifest
    | Commit
    | Release
    | Adopt
    | Verify
    | GetStatus
    | GetEvents
)
Reply = Welcome | Granted | Pages | ManifestReply | Verified | Done | StatusReply | EventsReply | Failure

_T = TypeVar("_T")
_ENCODER: Final = msgspec.msgpack.Encoder()
_REQUESTS: Final = msgspec.msgpack.Decoder(Request)
_REPLIES: Final = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """The message as one frame. Raises GmsError(bad_message) if it does not fit into MAX_FRAME."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME:
        raise GmsError(
            ErrorCode.BAD_MESSAGE,
            f"A message of {len(body)} bytes does not fit into a frame of at most {MAX_FRAME}; send less at once.",
        )
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def decode_request(frame: bytes) -> Request:
    """Raises GmsError: invalid (a field is out of its bounds; the stream is sound), bad_message (this is not ours)."""
    return _decode(_REQUESTS, frame)


def decode_reply(frame: bytes) -> Reply:
    return _decode(_REPLIES, frame)


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    try:
        return decoder.decode(frame)
    except msgspec.ValidationError as error:
        raise GmsError(
            ErrorCode.INVALID, f"A message is out of bounds ({error}); correct what this client asks for."
        ) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise GmsError(
            ErrorCode.BAD_MESSAGE,
            f"A message could not be read ({error}); the peer speaks another protocol or is broken.",
        ) from error


class FrameDecoder:
    """Cuts a byte stream into frame bodies. Feed it bytes as they come, take frames until None.

    A length over the limit raises GmsError(bad_message) as soon as the header is complete, and from then on always:
    there is no way to find the next frame in such a stream.
    """

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self.max_frame = max_frame
        self._buffer = bytearray()

    @property
    def buffered(self) -> int:
        """Bytes held that are not yet part of a frame taken."""
        return len(self._buffer)

    @property
    def complete(self) -> bool:
        """Whether a whole frame is held that was not taken yet."""
        return len(self._buffer) >= HEADER_BYTES and len(self._buffer) >= HEADER_BYTES + self._length()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next_frame(self) -> bytes | None:
        if len(self._buffer) < HEADER_BYTES:
            return None
        length = self._length()
        if length > self.max_frame:
            raise GmsError(
                ErrorCode.BAD_MESSAGE,
                f"A frame announces {length} bytes, the limit is {self.max_frame}; the peer speaks another protocol.",
            )
        end = HEADER_BYTES + length
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[HEADER_BYTES:end])
        del self._buffer[:end]
        return frame

    def _length(self) -> int:
        """Of the body that begins the buffer."""
        return int.from_bytes(self._buffer[:HEADER_BYTES], "little")
