"""The protocol between a client and the sidecar, without any I/O: messages, and frames on a byte stream.

Invariants
  W1  Nothing that comes in can make a `Decoder` hold more than one frame of `frame_bytes_max` and what was fed at once.
  W2  What is malformed raises WireError, and nothing else; a decoder that has raised takes nothing more.
  W3  Unknown fields of a message are ignored; an unknown message, or a field of another type, is malformed. A change that
      breaks this rule needs a new protocol number.

A frame is 8 bytes of head and a msgpack map: magic `C7 4B`, number of file descriptors that come with it (1 byte), 0 (1 byte),
length of the map (4 bytes, big-endian). `docs/PROTOCOL.md` describes messages and their order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from typing_extensions import Buffer

from checkpointd.commit.decide import OnStale
from checkpointd.commit.retention import Mode, Retention
from checkpointd.errors import WireError
from checkpointd.layout.boxes import Box
from checkpointd.layout.manifest import Alias, ErrorReport, Scope

PROTOCOLS = (1, 1)
"""The oldest and the newest protocol that this release speaks."""
MAGIC = 0xC74B
HEAD = struct.Struct(">HBBI")
HELLO_BYTES_MAX = 4096
"""Before the handshake is done, no frame may be longer."""
FRAME_BYTES_MAX = 64 << 20
DESCRIPTORS_MAX = 1
METRICS_MAX = 256
"""Metrics that one save may have."""

TENSORS_MAX = 1 << 18
"""Tensors of one layout: taking in as many holds the daemon's loop for about a second."""
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Id = Annotated[int, Meta(ge=0, le=1 << 53)]
_Seconds = Annotated[float, Meta(ge=0, le=86400 * 31)]
_Name = Annotated[str, Meta(max_length=4096)]
_Text = Annotated[str, Meta(max_length=16384)]


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    pass


# --- both ways: the handshake, which every version understands ------------------------------------------------------


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """The client's first word: the protocols it speaks, oldest and newest, and what it comes for."""

    protocols: tuple[int, int]
    release: _Name
    role: Literal["rank", "status"] = "rank"


class Welcome(_Message, frozen=True, kw_only=True, tag="welcome"):
    """The daemon's answer: the protocol that both speak from here on, and its bounds."""

    protocol: int
    release: _Name
    pid: int
    frame_bytes_max: _Count
    slots_max: _Count
    memory_bytes_max: _Count


class Refused(_Message, frozen=True, kw_only=True, tag="refused"):
    """Why the daemon will not do what was asked. `save`: the save that ends with it; without one the connection ends."""

    error: ErrorReport
    save: _Id | None = None


# --- from a rank to the daemon --------------------------------------------------------------------------------------


class Join(_Message, frozen=True, kw_only=True, tag="join"):
    """Who the client is. Answered by Joined."""

    root: _Name
    rank: _Count
    world_size: Annotated[int, Meta(ge=1, le=1 << 18)]


class Look(_Message, frozen=True, kw_only=True, tag="look"):
    """What do you hold and work at now? Answered by Joined."""


class Rules(_Message, frozen=True, kw_only=True):
    """The fields of a `Retention`, unchecked."""

    keep_last: int | None = None
    every_steps: int | None = None
    younger_than_s: float | None = None
    best: int | None = None
    metric: _Name | None = None
    mode: Mode = "min"

    @staticmethod
    def of(rules: Retention) -> Rules:
        return Rules(**asdict(rules))

    def checked(self) -> Retention:
        """UsageError where it cannot be."""
        return Retention(**msgspec.structs.asdict(self))


class Begin(_Message, frozen=True, kw_only=True, tag="begin"):
    """The epoch that the saves from here on belong to, and how they are persisted."""

    epoch: _Count
    nonce: _Name
    """The epoch's, from its record: tells a root from another one that had its place before."""
    compression: _Name
    chunk_bytes: _Count
    budget_bytes: _Count
    commit_timeout_s: _Seconds

    dedup: bool = True
    """Whether what did not change is referred to instead of written again."""
    on_stale: OnStale = "warn"
    retention: Rules | None = None
    """Which checkpoints stay; None: all."""
    read_back: bool = True
    """Whether what was committed is read back while no save is in flight."""


class Slot(_Message, frozen=True, kw_only=True, tag="slot"):
    """Memory for snapshots: one descriptor comes with it, a memfd of `nbytes` that can neither shrink nor grow.

    Its last page is the mark's (see Announced); a layout takes what is before it.
    """

    slot: _Id
    nbytes: _Count


class DropSlot(_Message, frozen=True, kw_only=True, tag="drop-slot"):
    """The client will not use this slot again."""

    slot: _Id


class WireTensor(msgspec.Struct, frozen=True, array_like=True):
    """A `ShardTensor`: one box of one tensor at byte `offset` of the slot."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    scope: Scope
    offset: int


class Layout(_Message, frozen=True, kw_only=True, tag="layout"):
    """Where the tensors lie in a slot; the saves name it by `layout`. The newest four are kept."""

    layout: _Id
    nbytes: _Count
    tensors: Annotated[tuple[WireTensor, ...], Meta(max_length=TENSORS_MAX)]


class Save(_Message, frozen=True, kw_only=True, tag="save"):
    """A save was called; its snapshot is being taken. The attempt begins, and Staged or Spoiled must follow.

    Announced comes before Staged, and should come at once: it is what lets a snapshot that is whole outlive its trainer.
    """

    save: _Id
    tag: _Name
    attempt: _Name
    step: _Count
    n: _Count
    save_latest: bool
    hand: Annotated[int, Meta(ge=0, le=999)]
    left_s: _Seconds
    """Until the deadline of the attempt."""
    metrics: Annotated[dict[_Name, float], Meta(max_length=METRICS_MAX)] = {}
    keeps_before: _Count = 0
    """Of older epochs than this, no checkpoint goes: the job has not loaded, and was not told to start afresh."""
    unfinished: Annotated[str, Meta(max_length=32)] = ""
    """The directory that was filled for the save: it goes if the save aborts."""


class Announced(_Message, frozen=True, kw_only=True, tag="announced"):
    """Where the snapshot of a save will be, and all else that belongs to it; the slot is not used otherwise before Free.

    When it is whole, the client writes `mark` to the slot's last 8 bytes (little-endian), its last act on it: where the client
    dies before it can say Staged, the mark says it.
    """

    save: _Id
    slot: _Id
    layout: _Id
    mark: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    aliases: tuple[Alias, ...]
    excluded: tuple[str, ...]
    tree: bytes


class Staged(_Message, frozen=True, kw_only=True, tag="staged"):
    """The slot holds the whole snapshot, and is not written again before Free."""

    save: _Id
    held_s: _Seconds = 0.0
    """How long training was held for this snapshot, so far."""


class Spoiled(_Message, frozen=True, kw_only=True, tag="spoiled"):
    """There will be no snapshot: the daemon votes no with `error`."""

    save: _Id
    error: ErrorReport


class Fetch(_Message, frozen=True, kw_only=True, tag="fetch"):
    """Give me the snapshot of a rank of my root that you hold. Answered by Snapshot, with its descriptor."""

    attempt: _Name
    tag: _Name
    rank: _Count | None = None
    """None: my own."""


class Ping(_Message, frozen=True, kw_only=True, tag="ping"):
    """Are you there? Answered by Pong."""


class Leave(_Message, frozen=True, kw_only=True, tag="leave"):
    """The trainer ends well: its snapshot need not be held for a restart."""


# --- from the daemon to a rank --------------------------------------------------------------------------------------


class Held(_Message, frozen=True, kw_only=True):
    """A complete snapshot that the daemon holds in memory; `order` as in an outcome, by this rank's own count."""

    tag: str
    attempt: str
    step: int
    order: tuple[int, int]
    world_size: int
    nbytes: int
    phase: str
    nonce: str
    """Of the epoch that it was saved in."""
    rank: int | None = None
    """Whose it is; None from a daemon that does not say, which holds the asking rank's alone."""


class InFlight(_Message, frozen=True, kw_only=True):
    """An attempt of this root that the daemon still works at."""

    tag: str
    attempt: str
    rank: int
    phase: str


class Joined(_Message, frozen=True, kw_only=True, tag="joined"):
    """What is held for this rank, the attempts at its root that are worked at, and what is held there for its other ranks."""

    held: tuple[Held, ...]
    in_flight: tuple[InFlight, ...]
    beside: tuple[Held, ...] = ()


class Phase(_Message, frozen=True, kw_only=True, tag="phase"):
    """The save entered `phase`; `error` says why where it is not on its way to a commit."""

    save: _Id
    phase: _Name
    error: ErrorReport | None = None
    ranks: tuple[int, ...] = ()


class Progress(_Message, frozen=True, kw_only=True, tag="progress"):
    """How far persisting has come, in bytes; and on the coordinator, whose votes are missing."""

    save: _Id
    raw_total: _Count
    raw_done: _Count
    """On the disk, past the system's cache; `raw_kept` of them unchanged since the checkpoint before."""
    raw_kept: _Count = 0
    stored: _Count
    writing_s: _Seconds | None = None
    """How long it has been written; None before that."""
    votes_missing: tuple[int, ...] | None = None
    stale: bool = False
    """It was committed, and what is trained had not changed since the checkpoint before."""


class Free(_Message, frozen=True, kw_only=True, tag="free"):
    """The daemon will not read this slot any more."""

    slot: _Id


class Pong(_Message, frozen=True, kw_only=True, tag="pong"):
    """Here I am."""


class Snapshot(_Message, frozen=True, kw_only=True, tag="snapshot"):
    """A snapshot given back: what Layout and Staged said of it, and each tensor's xxh3-128. One descriptor comes with it."""

    held: Held
    nbytes: _Count
    tensors: tuple[WireTensor, ...]
    aliases: tuple[Alias, ...]
    excluded: tuple[str, ...]
    tree: bytes
    digests: tuple[bytes, ...]


# --- status ---------------------------------------------------------------------------------------------------------


class Query(_Message, frozen=True, kw_only=True, tag="query"):
    """How do things stand? Answered by Report."""


class Report(_Message, frozen=True, kw_only=True, tag="report"):
    """The daemon's status (`daemon/status.py`), as JSON."""

    status: str


Message = (
    Hello
    | Welcome
    | Refused
    | Join
    | Look
    | Begin
    | Slot
    | DropSlot
    | Layout
    | Save
    | Announced
    | Staged
    | Spoiled
    | Fetch
    | Leave
    | Ping
    | Joined
    | Phase
    | Progress
    | Free
    | Pong
    | Snapshot
    | Query
    | Report
)

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message, descriptors: int = 0) -> bytes:
    """The frame of `message`, with which `descriptors` file descriptors go."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise WireError(
            f"a {type(message).__name__} message of {len(body)} bytes is too long for the socket ({FRAME_BYTES_MAX}): "
            "save fewer or larger tensors"
        )
    return HEAD.pack(MAGIC, descriptors, 0, len(body)) + body


class Decoder:
    """Cuts a stream of bytes into (message, number of descriptors that came with it)."""

    def __init__(self, frame_bytes_max: int = HELLO_BYTES_MAX) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._bytes = bytearray()
        self._failed = False

    @property
    def buffered(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._bytes)

    @property
    def announced(self) -> int:
        """How many descriptors the frame that is not complete may bring: as many as it announces, once that is known."""
        if not self._bytes:
            return 0
        return DESCRIPTORS_MAX if len(self._bytes) < HEAD.size else int(HEAD.unpack_from(self._bytes)[1])

    def feed(self, data: Buffer) -> Iterator[tuple[Message, int]]:
        """The messages that `data` completes. WireError where it is not this protocol."""
        if self._failed:
            raise WireError("this stream was malformed before")
        self._bytes += data
        try:
            while (frame := self._frame()) is not None:
                yield frame
        except WireError:
            self._failed = True
            self._bytes.clear()
            raise

    def _frame(self) -> tuple[Message, int] | None:
        if len(self._bytes) < HEAD.size:
            return None
        magic, descriptors, zero, length = HEAD.unpack_from(self._bytes)
        if magic != MAGIC or zero:
            raise WireError(f"this is no checkpointd client: its frame begins with {bytes(self._bytes[: HEAD.size])!r}")
        if descriptors > DESCRIPTORS_MAX:
            raise WireError(f"a frame announces {descriptors} descriptors; at most {DESCRIPTORS_MAX} may come with one")
        if length > self.frame_bytes_max:
            raise WireError(f"a frame announces {length} bytes; at most {self.frame_bytes_max} are allowed here")
        end = HEAD.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(memoryview(self._bytes)[HEAD.size : end])
        del self._bytes[:end]
        return decode(body), descriptors


def decode(body: bytes) -> Message:
    """The message in one frame's map."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise WireError(f"a message is malformed: {error}") from error


def common_protocol(theirs: tuple[int, int]) -> int | None:
    """The newest protocol that both sides speak."""
    newest = min(theirs[1], PROTOCOLS[1])
    return newest if newest >= max(theirs[0], PROTOCOLS[0]) else None
