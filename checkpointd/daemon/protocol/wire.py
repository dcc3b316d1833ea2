"""The protocol between a client and the sidecar, without any I/O: messages, and the frames that they make.

Invariants
  WIRE-3  Unknown fields of a message are ignored; an unknown message, or a field of another type, is malformed. A change that
      breaks this rule needs a new protocol number.
  WIRE-4  No message takes long to decode: a frame is short, and what may be long (layouts, the contents of a snapshot, a
      snapshot that is given back, a status) comes in parts, of which all but the last say that there is `more`.

A frame is 8 bytes of head and a msgpack map: magic `C7 4B`, number of file descriptors that come with it (1 byte), 0 (1 byte),
length of the map (4 bytes, big-endian). `docs/PROTOCOL.md` describes messages and their order.
"""

from __future__ import annotations

import struct
from dataclasses import asdict
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from checkpointd.commit.decide import OnNoProgress
from checkpointd.commit.retention import Mode, Retention
from checkpointd.errors import WireError
from checkpointd.layout.boxes import Box
from checkpointd.layout.files import LEFTOVERS_MAX
from checkpointd.layout.manifest import Alias, ErrorReport, Inline, Scope
from checkpointd.layout.save_timings import PhaseSeconds

PROTOCOLS = (1, 1)
"""The oldest and the newest protocol that this release speaks."""
MAGIC = 0xC74B
HEAD = struct.Struct(">HBBI")
HELLO_BYTES_MAX = 4096
"""Before the handshake is done, no frame may be longer."""
FRAME_BYTES_MAX = 64 << 10
"""A frame is decoded in one go, while nobody else is served: a few milliseconds at this size (WIRE-4)."""
DESCRIPTORS_MAX = 1
METRICS_MAX = 256
"""Metrics that one save may have."""
TENSORS_MAX = 1 << 18
"""Tensors of one layout."""
TREE_BYTES_MAX = 64 << 20
"""A state's tree with all else that one snapshot has beside its tensors."""
RANKS_TOLD = 4096
"""Ranks that one message names; it leaves out the others."""
IN_FLIGHT_TOLD, BESIDE_TOLD = 128, 32
"""Attempts, and snapshots, that one message tells of: the newest."""
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Id = Annotated[int, Meta(ge=0, le=1 << 53)]
_Seconds = Annotated[float, Meta(ge=0, le=86400 * 31)]
_Name = Annotated[str, Meta(max_length=4096)]
_Nonce = Annotated[str, Meta(max_length=128)]
_Metric = Annotated[str, Meta(max_length=512)]


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
    nonce: _Nonce
    """The epoch's, from its record: tells a root from another one that had its place before."""
    compression: _Name
    chunk_bytes: _Count
    budget_bytes: _Count
    commit_timeout_s: _Seconds

    dedup: bool = True
    """Whether what did not change is referred to instead of written again."""
    on_no_progress: OnNoProgress = "warn"
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


class WireTensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `ShardTensor`: one box of one tensor at byte `offset` of the slot."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    scope: Scope
    offset: int


class Layout(_Message, frozen=True, kw_only=True, tag="layout"):
    """Where the tensors lie in a slot; the saves name it by `layout`. In parts; the newest four are kept."""

    layout: _Id
    nbytes: _Count
    tensors: tuple[WireTensor, ...]
    more: bool = False


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
    takeover: Annotated[int, Meta(ge=0, le=999)]
    left_s: _Seconds
    """Until the deadline of the attempt."""
    metrics: Annotated[dict[_Metric, float], Meta(max_length=METRICS_MAX)] = {}
    keeps_before: _Count = 0
    """Of older epochs than this, no checkpoint goes: the job has not loaded, and was not told to start afresh."""
    unfinished: Annotated[str, Meta(max_length=32)] = ""
    """The directory that was filled for the save: it goes if the save aborts."""
    leftovers: Annotated[tuple[Annotated[str, Meta(max_length=255)], ...], Meta(max_length=LEFTOVERS_MAX)] = ()
    """How the names of files end that go from the directory in which the save's files are shown, unless they are of it."""


class Contents(_Message, frozen=True, kw_only=True, tag="contents"):
    """A part of all that a snapshot has beside its tensors; Announced follows the last one."""

    save: _Id
    aliases: tuple[Alias, ...] = ()
    excluded: tuple[str, ...] = ()
    tree: bytes = b""


class Announced(_Message, frozen=True, kw_only=True, tag="announced"):
    """Where the snapshot of a save will be. Its Contents have come before; the slot is not used otherwise before Free.

    When it is whole, the client writes `mark` to the slot's last 8 bytes (little-endian), its last act on it: where the client
    dies before it can say Staged, the mark says it.
    """

    save: _Id
    slot: _Id
    layout: _Id
    mark: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class Staged(_Message, frozen=True, kw_only=True, tag="staged"):
    """The slot holds the whole snapshot, and is not written again before Free."""

    save: _Id
    held_s: _Seconds = 0.0
    """How long the save has held training. It holds it no more."""


class Spoiled(_Message, frozen=True, kw_only=True, tag="spoiled"):
    """There will be no snapshot: the daemon votes no with `error`."""

    save: _Id
    error: ErrorReport
    held_s: _Seconds = 0.0


class Inlined(_Message, frozen=True, kw_only=True, tag="inlined"):
    """A save of this rank that its trainer persisted itself has ended."""

    tag: _Name
    attempt: _Name
    step: _Count
    phase: _Name
    """How it ended, in the word that people read."""
    inline: Inline
    raw_total: _Count
    stored: _Count
    began_s: _Seconds
    """So many seconds ago save() was called."""
    ended_s: _Seconds
    """So many seconds ago it ended."""
    held_s: _Seconds = 0.0
    no_progress: bool = False
    seconds: PhaseSeconds = PhaseSeconds()
    error: ErrorReport | None = None


class Fetch(_Message, frozen=True, kw_only=True, tag="fetch"):
    """Give me the snapshot of a rank of my root that you hold. Answered by Snapshot in parts, the first with its descriptor."""

    attempt: _Name
    tag: _Name
    rank: _Count | None = None
    """None: my own."""


class Ping(_Message, frozen=True, kw_only=True, tag="ping"):
    """Are you there? Answered by Pong."""


class Leave(_Message, frozen=True, kw_only=True, tag="leave"):
    """The trainer ends well: its snapshot need not be held for a restart."""


# --- from the daemon to a rank --------------------------------------------------------------------------------------


class RetainedSnapshot(_Message, frozen=True, kw_only=True):
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
    nonce: str
    """Of its epoch: the root may have been removed and made again since."""


class Joined(_Message, frozen=True, kw_only=True, tag="joined"):
    """What is held for this rank, the attempts at its root that are worked at, and what is held there for its other ranks."""

    held: tuple[RetainedSnapshot, ...]
    in_flight: tuple[InFlight, ...]
    beside: tuple[RetainedSnapshot, ...] = ()


class PhaseEntered(_Message, frozen=True, kw_only=True, tag="phase"):
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
    no_progress: bool = False
    seconds: PhaseSeconds | None = None
    """Once the rank has voted: how long it took for what."""
    """It was committed, and what is trained had not changed since the checkpoint before."""


class Free(_Message, frozen=True, kw_only=True, tag="free"):
    """The daemon will not read this slot any more."""

    slot: _Id


class Pong(_Message, frozen=True, kw_only=True, tag="pong"):
    """Here I am."""


class Snapshot(_Message, frozen=True, kw_only=True, tag="snapshot"):
    """A part of a snapshot given back: what Layout and Contents said of it, and each tensor's xxh3-128."""

    held: RetainedSnapshot
    nbytes: _Count
    tensors: tuple[WireTensor, ...] = ()
    aliases: tuple[Alias, ...] = ()
    excluded: tuple[str, ...] = ()
    tree: bytes = b""
    digests: tuple[bytes, ...] = ()
    more: bool = False


# --- status ---------------------------------------------------------------------------------------------------------


class Query(_Message, frozen=True, kw_only=True, tag="query"):
    """How do things stand? Answered by Report, in parts."""


class Report(_Message, frozen=True, kw_only=True, tag="report"):
    """A part of the daemon's status (`daemon/status/model.py`), as JSON."""

    status: str
    more: bool = False


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
    | Contents
    | Announced
    | Staged
    | Spoiled
    | Inlined
    | Fetch
    | Leave
    | Ping
    | Joined
    | PhaseEntered
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
            f"a {type(message).__name__} message of {len(body)} bytes is too long for the socket ({FRAME_BYTES_MAX})"
        )
    return HEAD.pack(MAGIC, descriptors, 0, len(body)) + body


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
