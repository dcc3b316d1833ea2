"""The protocol between a client and the sidecar, without I/O: the messages and their frames.

Invariants
  WIRE-3  Unknown fields of a message are ignored. An unknown message, or a field of another type, is malformed. A change that
      violates this rule needs a new protocol number.
  WIRE-4  No message takes long to decode, because frames are short. Long data (layouts, the contents of a snapshot, a snapshot
      that is given back, a status) comes in parts; all parts except the last have `more`.

A frame is a head of 8 bytes and a msgpack map. The head: magic `C7 4B`, number of file descriptors that come with the frame
(1 byte), 0 (1 byte), length of the map (4 bytes, big-endian). `docs/PROTOCOL.md` describes the messages and their order.
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
from checkpointd.layout.files import PLACE_MAX
from checkpointd.layout.indexes import Alias, Scope
from checkpointd.layout.manifest import BRANCHES_MAX, ErrorReport, Inline
from checkpointd.layout.save_timings import PhaseSeconds

PROTOCOLS = (1, 1)
"""The oldest and the newest protocol that this release speaks."""
MAGIC = 0xC74B
HEAD = struct.Struct(">HBBI")
HELLO_BYTES_MAX = 4096
"""Before the handshake is done, no frame may be longer."""
FRAME_BYTES_MAX = 64 << 10
"""Decoding a frame blocks the loop: a few milliseconds at this size (WIRE-4)."""
DESCRIPTORS_MAX = 1
METRICS_MAX = 256
"""Metrics that one save may have."""
TENSORS_MAX = 1 << 18
"""Tensors of one layout."""
TREE_BYTES_MAX = 64 << 20
"""The state tree of one snapshot."""
RANKS_TOLD = 4096
"""Ranks that one message names; it leaves out the rest."""
IN_FLIGHT_TOLD, BESIDE_TOLD = 128, 32
"""Attempts and snapshots that one message lists: the newest."""
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Id = Annotated[int, Meta(ge=0, le=1 << 53)]
_Seconds = Annotated[float, Meta(ge=0, le=86400 * 31)]
_Name = Annotated[str, Meta(max_length=4096)]
_Nonce = Annotated[str, Meta(max_length=128)]
TROUBLE_MAX = 1000
_Trouble = Annotated[str, Meta(max_length=TROUBLE_MAX)]
_Metric = Annotated[str, Meta(max_length=512)]


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    pass


# --- both ways: the handshake, which every version understands ------------------------------------------------------


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """The client's first message: the oldest and the newest protocol that it speaks, and its role."""

    protocols: tuple[int, int]
    release: _Name
    role: Literal["rank", "status"] = "rank"


class Welcome(_Message, frozen=True, kw_only=True, tag="welcome"):
    """The daemon's answer: the protocol that both speak from here on, and the daemon's limits."""

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
    """Asks for the retained snapshots and the attempts in flight. Answered by Joined."""


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
        """The rules, checked. UsageError if they are invalid."""
        return Retention(**msgspec.structs.asdict(self))


class Begin(_Message, frozen=True, kw_only=True, tag="begin"):
    """The start of the saves from here on, and how to persist them."""

    start: _Count
    nonce: _Nonce
    """From the start's record: tells the root from an earlier root at the same path."""
    compression: _Name
    chunk_bytes: _Count
    budget_bytes: _Count
    commit_timeout_s: _Seconds

    dedup: bool = True
    """Whether unchanged chunks become references."""
    full_every: _Count | None = None
    """Every so many checkpoints, one is stored in full; None: all of them."""
    on_no_progress: OnNoProgress = "warn"
    retention: Rules | None = None
    """Which checkpoints stay; None: all of them."""
    read_back: bool = True
    """Whether to read checkpoints back while no save is in flight."""


class Slot(_Message, frozen=True, kw_only=True, tag="slot"):
    """Memory for snapshots. Comes with one descriptor, a memfd of `nbytes` that can neither shrink nor grow.

    Its last page is for the mark (see Announced); a layout uses the pages before.
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
    """Where the tensors lie in a slot; saves name the layout by its number. Comes in parts; the newest four are kept."""

    layout: _Id
    nbytes: _Count
    tensors: tuple[WireTensor, ...]
    more: bool = False


class Save(_Message, frozen=True, kw_only=True, tag="save"):
    """save() was called and its snapshot is in staging. The attempt begins, and Staged or Spoiled must follow.

    Announced must come before Staged, and should come at once: only with it can a whole snapshot outlive its trainer.
    """

    save: _Id
    tag: _Name
    attempt: _Name
    step: _Count
    n: _Count
    save_latest: bool
    left_s: _Seconds
    """Seconds until the deadline of the attempt."""
    metrics: Annotated[dict[_Metric, float], Meta(max_length=METRICS_MAX)] = {}
    keeps_before: tuple[_Count, _Count] = (0, 0)
    """Checkpoints before this order stay: the job has not loaded, and nobody told it to start afresh, or it saves old steps."""
    left: Annotated[tuple[tuple[tuple[_Count, _Count], tuple[_Count, _Count]], ...], Meta(max_length=BRANCHES_MAX)] = ()
    """The branches that were left on the way to this save."""
    unfinished: Annotated[str, Meta(max_length=32)] = ""
    """The unfinished directory of the save, which is removed if the save aborts."""
    shown_at: Annotated[str, Meta(max_length=PLACE_MAX)] = ""
    """The directory that shows a state; that of files is in the tree."""
    required: bool = False
    """It must not be dropped from the spool for a newer save."""
    spooled: bool = False
    """An earlier daemon had the snapshot in its spool, and the client has it no more. A daemon without it refuses the save."""


class Contents(_Message, frozen=True, kw_only=True, tag="contents"):
    """A part of a snapshot's data beside its tensors; Announced follows the last part."""

    save: _Id
    aliases: tuple[Alias, ...] = ()
    excluded: tuple[str, ...] = ()
    tree: bytes = b""


class Announced(_Message, frozen=True, kw_only=True, tag="announced"):
    """Where the snapshot of a save will be. Its Contents come before. The client uses the slot for nothing else until Free.

    When the snapshot is whole, the client finally writes `mark` to the slot's last 8 bytes (little-endian). If the client dies
    before it sends Staged, the mark stands for that message.
    """

    save: _Id
    slot: _Id
    layout: _Id
    mark: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]


class Staged(_Message, frozen=True, kw_only=True, tag="staged"):
    """The slot holds the whole snapshot. The client does not write to it again until Free."""

    save: _Id
    held_s: _Seconds = 0.0
    """How long the save has held training, in all."""


class Paced(_Message, frozen=True, kw_only=True, tag="paced"):
    """The save works for `share` of the time from now on, as long as it then ends within `left_s` seconds; 1 is full speed."""

    save: _Id
    share: Annotated[float, Meta(gt=0, le=1)]
    left_s: _Seconds


class Spoiled(_Message, frozen=True, kw_only=True, tag="spoiled"):
    """There will be no snapshot: the daemon votes no with `error`."""

    save: _Id
    error: ErrorReport
    held_s: _Seconds = 0.0


class Inlined(_Message, frozen=True, kw_only=True, tag="inlined"):
    """An inline save of this rank has ended."""

    tag: _Name
    attempt: _Name
    step: _Count
    phase: _Name
    """How it ended, as the status shows it."""
    inline: Inline
    raw_total: _Count
    stored: _Count
    began_s: _Seconds
    """Seconds since save() was called."""
    ended_s: _Seconds
    """Seconds since the save ended."""
    held_s: _Seconds = 0.0
    no_progress: bool = False
    seconds: PhaseSeconds = PhaseSeconds()
    error: ErrorReport | None = None


class Fetch(_Message, frozen=True, kw_only=True, tag="fetch"):
    """Asks for the retained snapshot of a rank of this root. Answered by parts of Snapshot, the first with the descriptor."""

    attempt: _Name
    tag: _Name
    rank: _Count | None = None
    """None: the asking rank."""


class Ping(_Message, frozen=True, kw_only=True, tag="ping"):
    """Asks whether the daemon is there. Answered by Pong."""


class Leave(_Message, frozen=True, kw_only=True, tag="leave"):
    """The trainer closed its Checkpointer, so its snapshot need not be retained for a restart."""


# --- from the daemon to a rank --------------------------------------------------------------------------------------


class RetainedSnapshot(_Message, frozen=True, kw_only=True):
    """A snapshot that the daemon retains in memory; `order` as of a commit, but by this rank's own count."""

    tag: str
    attempt: str
    step: int
    order: tuple[int, int]
    world_size: int
    nbytes: int
    phase: str
    nonce: str
    """The nonce of its start."""
    rank: int | None = None
    """The rank that it belongs to; None from an old daemon, which holds only the asking rank's."""


class InFlight(_Message, frozen=True, kw_only=True):
    """An attempt of this root that the daemon still works at."""

    tag: str
    attempt: str
    rank: int
    phase: str
    nonce: str
    """The nonce of its start: the root may have been removed and made again since."""


class SpoolPlaceTold(_Message, frozen=True, kw_only=True):
    """The spool of this node for the client's root: its directory, and how long a save may lie in it."""

    path: _Name
    timeout_s: _Seconds


class Joined(_Message, frozen=True, kw_only=True, tag="joined"):
    """The retained snapshots of this rank (`held`), of other ranks at its root (`beside`), and the attempts in flight."""

    held: tuple[RetainedSnapshot, ...]
    in_flight: tuple[InFlight, ...]
    beside: tuple[RetainedSnapshot, ...] = ()
    spool: SpoolPlaceTold | None = None
    """None: this daemon has no spool."""
    trouble: _Trouble = ""
    """Why the daemon does not reach the client's root now; empty if it does, as far as it knows."""


class PhaseEntered(_Message, frozen=True, kw_only=True, tag="phase"):
    """The save entered `phase`. `error` says why, if the save can no longer commit."""

    save: _Id
    phase: _Name
    error: ErrorReport | None = None
    ranks: tuple[int, ...] = ()


class Progress(_Message, frozen=True, kw_only=True, tag="progress"):
    """The progress of persisting, in bytes, and on the coordinator the ranks whose votes are missing."""

    save: _Id
    raw_total: _Count
    raw_done: _Count
    """Bytes on the disk, past the system's cache; `raw_kept` of them are unchanged since the checkpoint before."""
    raw_kept: _Count = 0
    stored: _Count
    writing_s: _Seconds | None = None
    """Seconds since the first write; None before that."""
    votes_missing: tuple[int, ...] | None = None
    no_progress: bool = False
    """It was committed, although no trained tensor had changed since the checkpoint before."""
    seconds: PhaseSeconds | None = None
    """How long the parts of the save took; None before the rank has voted."""
    rested_s: _Seconds = 0.0
    """How long the workers have rested at the client's wish, added up."""
    uploaded: _Count = 0
    upload_total: _Count = 0
    """Bytes that go from the spool to the root, and those of them that are there; 0 without a spool."""
    trouble: _Trouble = ""
    """As in Joined."""


class Free(_Message, frozen=True, kw_only=True, tag="free"):
    """The daemon does not read this slot any longer."""

    slot: _Id


class Pong(_Message, frozen=True, kw_only=True, tag="pong"):
    """The answer to Ping."""


class Snapshot(_Message, frozen=True, kw_only=True, tag="snapshot"):
    """A part of a retained snapshot: its data from Layout and Contents, and the xxh3-128 of each tensor."""

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
    """Asks for the status. Answered by parts of Report."""


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
    | Paced
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
    """The frame of `message`, which comes with `descriptors` file descriptors."""
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
