"""The objects of a checkpoint as types, and their bytes. `docs/FORMAT.md` describes the same for other languages.

The chain of digests: outcome -> votes -> indexes -> chunks, and votes -> plans. Small objects are JSON; an index is msgpack
(measured against JSON in `benchmarks/index.py`). Each object begins with its format and version; an unknown one is refused.

Types of which there are millions are left out of the garbage collector's care (`gc=False`): they can be in no cycle, and to
look for one takes longer than to decode them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec
import xxhash
from typing_extensions import Buffer

from checkpointd.errors import ERRORS, AbortedError, CheckpointdError, FormatError, StagingError
from checkpointd.layout.boxes import Box
from checkpointd.layout.keys import WORLD_SIZE_MAX, index_rank
from checkpointd.layout.save_timings import Cost, PhaseSeconds

VERSION = 1

CHUNK_BYTES_MAX = (1 << 30) + (1 << 23)
"""No chunk is larger, raw or stored: 1 GiB and what a codec may add."""

LEASE_S_MAX = 600.0
"""No lease is longer: nobody waits longer for a job that has died."""

LISTING_BYTES_MAX = 1 << 28
"""No index and no plan is larger; a reader holds one in memory. About 4 million chunks, or 700,000 tensors."""

Scope = Literal["rank", "global"]
"""`rank`: this rank's own, never mixed with another's. `global`: a part of a tensor that the ranks hold together."""


Trained = Literal["", "moved", "still"]

InlineReason = Literal["refused", "lost"]
"""Why a trainer that uses a sidecar persisted a save itself: the sidecar would not take it, or could not be reached."""


class _Object(msgspec.Struct, frozen=True, kw_only=True):
    pass


class WriterIdentity(_Object, frozen=True, kw_only=True):
    """Who wrote an object: for people, never for a decision."""

    host: str
    pid: int
    time: str
    """UTC, ISO 8601, by that machine's clock."""


class Epoch(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.epoch"):
    """Who runs an epoch. `nonce` is what the other ranks compare to know that they share the root.

    `world_size` 0: no ranks run in it, it was taken by `checkpointd recover`.
    """

    version: int = VERSION
    epoch: int
    nonce: str
    world_size: int
    process: str = ""
    """The holder, exactly (`store/writers.py` makes the name): what tells on its own machine whether it still runs."""
    surviving: tuple[str, ...] = ()
    """Attempts of older epochs, each `<tag>/<attempt>`, whose writers go on: while this epoch is the newest, they are not
    fenced, and nobody else decides them."""
    commit_timeout_s: float = 0.0
    """How long the ranks of its attempts may take to vote, in seconds; 0 where that was not recorded."""
    job: str = ""
    """The job's name, by which its next start is known; empty where it has none."""
    writer: WriterIdentity


class Lease(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.lease"):
    """Who is at work: a job at the root, or a daemon at an attempt. Each renewal raises `count`."""

    version: int = VERSION
    process: str
    """The holder, exactly: host, boot, process and its start (`store/writers.py` makes the name)."""
    job: str = ""
    count: int
    length_s: float
    """Whoever sees the same count for so many seconds, by a clock of its own, may take the holder for gone."""
    writer: WriterIdentity
    """The holder when it began; a renewal leaves it as it is."""


class PlanTensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One part of one tensor that a rank writes."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    scope: Scope = "rank"


class Plan(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.plan"):
    """What one rank writes. `box` is in elements of the global `shape`."""

    version: int = VERSION
    rank: int
    world_size: int
    tensors: tuple[PlanTensor, ...]


class ObjectRef(_Object, frozen=True, kw_only=True, omit_defaults=True):
    """A chunks object: its name inside the attempt that holds it, and its size in bytes."""

    name: str
    size: int
    held_by: str = ""
    """`<tag>/<attempt>` of the older attempt that holds it, and never one that only refers to it; empty: the index's own."""

    def key(self, prefix: str) -> str:
        """Where the object lies, named by an index of the attempt `prefix` (`<tag>/<attempt>`)."""
        return f"{self.held_by or prefix}/{self.name}"


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run of whole elements of one box, row-major. Sizes and offsets in bytes."""

    object: int
    """Position in the index's `objects`."""
    offset: int
    stored: int
    raw: int
    codec: str
    checksum: int
    """xxh3-64 of the stored bytes."""
    digest: bytes
    """xxh3-128 of the raw bytes, 16 bytes, big-endian."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the bytes of one box of one tensor lie; the chunks follow each other in the box, row-major."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    scope: Scope
    chunks: tuple[Chunk, ...]


class Alias(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that shares the memory of `owner`: element strides and offset into the owner's contiguous elements."""

    fqn: str
    owner: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Index(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.index"):
    """Everything that one rank stored in one attempt."""

    version: int = VERSION
    tag: str
    attempt: str
    rank: int
    world_size: int
    step: int
    objects: tuple[ObjectRef, ...]
    """This attempt's own, and those of older attempts in which unchanged chunks lie."""
    tensors: tuple[TensorEntry, ...]
    aliases: tuple[Alias, ...]
    excluded: tuple[str, ...]
    """FQNs of frozen parameters that were left out on purpose."""
    tree: bytes
    """The state tree (`tree.py`), msgpack."""


class ErrorReport(_Object, frozen=True, kw_only=True):
    """An error as votes, outcomes and status carry it: a class of `errors.ERRORS`, the phase it struck in, its message."""

    code: str
    message: str
    phase: str = ""

    @classmethod
    def of(cls, error: BaseException, phase: str = "", message: str | None = None) -> ErrorReport:
        """The report of `error`, with its own message or another one. What is not of `errors.py` becomes a StagingError."""
        code = error.code if isinstance(error, CheckpointdError) else StagingError.__name__
        return cls(code=code, message=(str(error) or repr(error)) if message is None else message, phase=phase)

    def error(
        self, message: str | None = None, *, ranks: Sequence[int] = (), unknown: type[CheckpointdError] = CheckpointdError
    ) -> CheckpointdError:
        """The error that was reported, as its class; `unknown` where this release has no such class."""
        kind, text = ERRORS.get(self.code, unknown), self.message if message is None else message
        return kind(text, ranks=tuple(ranks)) if issubclass(kind, AbortedError) else kind(text)


NO_REASON = ErrorReport(code=AbortedError.__name__, message="no reason was recorded")


class IndexRef(_Object, frozen=True, kw_only=True):
    name: str
    size: int
    digest: str


class BesideFile(msgspec.Struct, frozen=True, array_like=True):
    """A file that another program has filled beside a checkpoint's, as it was at the vote: only that one goes with them."""

    path: str
    """Relative to the directory above the checkpoint's files."""
    size: int
    changed_ns: int
    """When its content was last modified, in nanoseconds since 1970, by the clock of the file system."""


class Inline(_Object, frozen=True, kw_only=True):
    """Why a save was persisted by its trainer, although that uses a sidecar."""

    reason: InlineReason
    """For machines: people read `why`, which says it, too."""
    why: str


class Vote(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.vote"):
    """A rank's durable word on its shard of an attempt."""

    version: int = VERSION
    tag: str
    attempt: str
    rank: int
    world_size: int
    step: int
    n: int
    """This rank's saves in its epoch before this one: rank 0's is the checkpoint's place in the order."""
    save_latest: bool
    vote: Literal["yes", "no"]
    index: IndexRef | None = None
    plan: str | None = None
    raw_bytes: int = 0
    stored_bytes: int = 0
    tensors: int = 0
    refers: tuple[str, ...] = ()
    """Keys of the older attempts' objects that the index names."""
    objects: tuple[ObjectRef, ...] = ()  # the attempt's own that the index names, so that a listing shows where one is gone
    metrics: dict[str, float] = {}
    trained: Trained = ""
    """Whether this rank's tensors that require grad differ from the checkpoint before; empty: there is nothing to compare."""
    files: tuple[str, ...] | None = None
    """The names of this rank's files, by number, where it stores files; None where it stores a state."""
    shown_at: str = ""
    """The directory that is to show them, relative to the one in which the root lies."""
    unfinished: str = ""
    """Where the directory above that one was filled, if it was: it gets its name when the files are shown."""
    leftovers: tuple[str, ...] = ()
    """How the names of files end that must not stay beside these where they are shown, unless they are of this save."""
    held_s: float = 0.0
    """Seconds for which this save held training on this rank; 0 where that is not known."""
    beside: tuple[BesideFile, ...] = ()
    """On rank 0, the files that lay there: they go with the checkpoint."""
    seconds: PhaseSeconds = PhaseSeconds()
    """How long this rank took for what, up to its yes."""
    inline: Inline | None = None
    """The rank's trainer persisted it itself, although it uses a sidecar; None: it uses none, or that did."""
    error: ErrorReport | None = None
    writer: WriterIdentity


class VoteRef(_Object, frozen=True, kw_only=True):
    digest: str
    size: int


class Outcome(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.outcome"):
    """The one object that decides an attempt. Commit: the digest of every rank's vote. Abort: why, and which ranks."""

    version: int = VERSION
    tag: str
    attempt: str
    step: int
    world_size: int
    outcome: Literal["commit", "abort"]
    order: tuple[int, int]
    save_latest: bool
    votes: dict[str, VoteRef] = {}
    refers: tuple[str, ...] | None = None
    """Keys of all objects of older attempts that the checkpoint needs; None: of an older release, only the votes tell."""
    metrics: dict[str, float] = {}
    """What the user passed to save() on rank 0, for retention to choose by."""
    no_progress: bool = False
    """Whether the step moved on since the checkpoint before, and on no rank a tensor that requires grad changed."""
    cost: Cost | None = None
    files: int = 0
    """How many files all ranks together store; 0 where they store a state."""
    shown_at: str = ""
    unfinished: str = ""
    leftovers: tuple[str, ...] = ()
    beside: tuple[BesideFile, ...] = ()
    error: ErrorReport | None = None
    ranks: tuple[int, ...] = ()
    decided_by: int
    """The rank that put the outcome; -1 for recovery at a start or by the command line."""
    writer: WriterIdentity


class Deleted(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.deleted"):
    """The mark that an attempt is being, or was, removed: it is not a checkpoint whatever else it holds."""

    version: int = VERSION
    reason: str
    kept: tuple[str, ...] = ()
    """Chunks objects of the attempt that newer checkpoints still need. All others are condemned: nobody may refer to them."""
    user: str = ""
    """The user who removed it, with the number: `alice (1000)`; empty where that was not recorded."""
    writer: WriterIdentity


class Verified(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.verified"):
    """The record that all of a checkpoint was read back and found whole after it was written."""

    version: int = VERSION
    nbytes: int
    uncached: bool = False
    """Whether it was read from the storage itself, past the cache of the machine that read it; as records of now always are."""
    writer: WriterIdentity


class ReadBack(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.readback"):
    """The record that one rank has read back what it had stored, past the cache, and found it whole."""

    version: int = VERSION
    rank: int
    nbytes: int
    writer: WriterIdentity


class Damaged(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.damaged"):
    """The record that a checkpoint was read and is not what was written. It counts whatever else is there."""

    version: int = VERSION
    faults: tuple[str, ...]
    """The first faults, in words."""
    writer: WriterIdentity


class PassedOver(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.passed-over"):
    """The record that load() took an older checkpoint because this one was found damaged: retention never removes it."""

    version: int = VERSION
    why: str
    writer: WriterIdentity


class Shown(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.shown"):
    """Whose files a plain directory shows."""

    version: int = VERSION
    tag: str
    attempt: str
    order: tuple[int, int]
    save_latest: bool
    files: tuple[str, ...]
    beside: tuple[BesideFile, ...] = ()
    """Files that other programs had filled and that appeared with these: they go with them."""
    going: bool = False
    """Whether they are being hidden: if the directory is gone, then nobody else need have removed it."""


SmallObject = Epoch | Lease | Plan | Vote | Outcome | Deleted | Verified | ReadBack | Damaged | PassedOver | Shown
_T = TypeVar("_T", Epoch, Lease, Plan, Vote, Outcome, Deleted, Verified, ReadBack, Damaged, PassedOver, Shown)


class Header(msgspec.Struct):
    """How every object begins."""

    format: str = ""
    version: int = 0


def digest(data: Buffer) -> str:
    """xxh3-128 of `data`, 32 hexadecimal digits: what every object's digest means."""
    return xxhash.xxh3_128_hexdigest(data)


_NO_CHECKSUM = b"0" * 32
_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{32})"\n}\n\Z')


def encode(obj: SmallObject) -> bytes:
    """`obj` as JSON that a person can read, ending in its own checksum and a newline.

    The checksum is the digest of the very bytes of the object with 32 zeros in the checksum's place.
    """
    body = msgspec.json.format(_plain(obj), indent=2)
    data = body[: body.rindex(b"\n}")] + b',\n  "checksum": "' + _NO_CHECKSUM + b'"\n}\n'
    head, tail = data.rsplit(_NO_CHECKSUM, 1)
    return head + digest(data).encode() + tail


_LATER = (
    "surviving",
    "commit_timeout_s",
    "job",
    "metrics",
    "kept",
    "trained",
    "no_progress",
    "shown_at",
    "unfinished",
    "leftovers",
    "beside",
    "going",
    "objects",
    "uncached",
    "held_s",
    "cost",
    "seconds",
    "inline",
    "user",
)
"""Keys that were not there at first: left out where they say nothing."""
_FILES = "files"
"""Left out where it is None or 0: an empty one in a vote says that the rank has no file beside ranks that have."""


def _plain(obj: SmallObject) -> bytes:
    """JSON without the later keys that say nothing: the bytes are those that the first release wrote."""
    fields = msgspec.to_builtins(obj)
    for name in _LATER:
        if name in fields and not fields[name]:
            del fields[name]
    if _FILES in fields and fields[_FILES] in (None, 0):
        del fields[_FILES]
    if "refers" in fields and not (fields["refers"] or (isinstance(obj, Outcome) and obj.refers is not None)):
        del fields["refers"]  # in an outcome, an empty one says that there is none
    return msgspec.json.encode(fields)


def _check_seal(data: bytes, key: str) -> None:
    match = _CHECKSUM.search(data)
    if match is None:
        raise FormatError(f"{key} is damaged: it does not end in its checksum", key=key)
    blank = data[: match.start(1)] + _NO_CHECKSUM + data[match.end(1) :]
    if digest(blank).encode() != match[1]:
        raise FormatError(f"{key} is damaged: its checksum is {match[1].decode()}, its bytes give another", key=key)


def decode(data: bytes, kind: type[_T], key: str) -> _T:
    """The object of type `kind` in `data`; FormatError names `key` and what is wrong."""
    try:
        header = msgspec.json.decode(data, type=Header)
        check_header(header, kind, key)
        _check_seal(data, key)
        found = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"{key} is damaged: {error}", key=key) from error
    fault = _fault(found)
    if fault:
        raise FormatError(f"{key} {fault}", key=key)
    return found


def _fault(obj: SmallObject) -> str | None:
    if isinstance(obj, Vote):
        return _vote_fault(obj)
    if isinstance(obj, Lease):
        return _lease_fault(obj)
    return _outcome_fault(obj) if isinstance(obj, Outcome) else None


def _vote_fault(vote: Vote) -> str | None:
    """What in `vote` would lead a reader astray: a rank outside its world, another index than this rank's."""
    if not 0 <= vote.rank < vote.world_size <= WORLD_SIZE_MAX:
        return f"is a vote of rank {vote.rank} of {vote.world_size}, which cannot be"
    ref = vote.index
    if ref is not None and (index_rank(ref.name) != vote.rank or not 0 <= ref.size <= LISTING_BYTES_MAX):
        return f"names an index {ref.name!r} of {ref.size} bytes, which cannot be rank {vote.rank}'s"
    return None


def _lease_fault(lease: Lease) -> str | None:
    """What in `lease` would make whoever watches it wait for ever, or not at all."""
    if not 0 < lease.length_s <= LEASE_S_MAX:
        return f"is a lease of {lease.length_s:g} seconds, which cannot be"
    return None


def _outcome_fault(outcome: Outcome) -> str | None:
    """What in `outcome` would lead a reader astray: ranks without votes in a commit."""
    if not 0 <= outcome.world_size <= WORLD_SIZE_MAX:
        return f"speaks of {outcome.world_size} ranks, which cannot be"
    if outcome.outcome == "commit" and outcome.votes.keys() != {str(rank) for rank in range(outcome.world_size)}:
        return f"is a commit of {outcome.world_size} ranks, and does not have the vote of each"
    return None


def check_header(header: Header, kind: type, key: str) -> None:
    """Raise FormatError unless `header` is that of a `kind` in this release's version."""
    expected = kind.__struct_config__.tag  # type: ignore[attr-defined]  # msgspec puts it on every Struct class
    if header.format != expected:
        raise FormatError(f"{key} is not a {expected} object (it says {header.format!r})", key=key)
    if header.version != VERSION:
        raise FormatError(
            f"{key} has format version {header.version}, and this release reads version {VERSION}: "
            "read it with the release that wrote it, or a newer one",
            key=key,
        )
