"""The small objects of a root as types, and their bytes. `docs/FORMAT.md` describes the same for other languages.

The chain of digests: log -> ballot -> votes -> indexes -> chunks. Small objects are JSON; an index is msgpack (`indexes.py`).
Each of them begins with its format and version; unknown ones are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, TypeVar

import msgspec
import xxhash
from typing_extensions import Buffer

from checkpointd.errors import ERRORS, AbortedError, CheckpointdError, FormatError, StagingError
from checkpointd.layout.keys import WORLD_SIZE_MAX, index_rank, object_key, refers_to_bytes
from checkpointd.layout.save_timings import PhaseSeconds

VERSION = 3

LEASE_S_MAX = 600.0
"""The longest lease, so nobody waits longer for a job that has died."""

LISTING_BYTES_MAX = 1 << 28
"""The largest index, since a reader holds it in memory. It has room for about 4 million chunks, or 700,000 tensors."""

VOTE_BYTES_MAX = 4 << 20
"""The size limit of a vote, which names objects, files and metrics."""

BALLOT_BYTES_MAX = 1 << 30
"""The size limit of a ballot: room for the votes of 2^18 ranks, each of 4 KiB."""

RANKS_AT_FAULT_MAX = 64
"""The most ranks that an abort lists."""

Branches: TypeAlias = tuple[tuple[tuple[int, int], tuple[int, int]], ...]
"""Branches that were left, oldest first: of each, the order of the checkpoint from which training went on, and that of the
first save after it. What lies between is of the branch."""
BRANCHES_MAX = 256
"""The most branches that a save remembers, the last ones."""

Trained = Literal["", "moved", "still"]
"""`moved`: a tensor that requires grad differs from the checkpoint before. `still`: none does. Empty: nothing to compare
with."""

InlineReason = Literal["refused", "lost"]
"""Why a trainer that uses a sidecar persisted a save itself: the sidecar refused it, or could not be reached."""


class _Object(msgspec.Struct, frozen=True, kw_only=True):
    pass


class WriterIdentity(_Object, frozen=True, kw_only=True, gc=False):
    """The process that wrote an object. It is for people; no decision uses it."""

    host: str
    pid: int
    time: str
    """UTC, ISO 8601, by the clock of `host`."""


class Lease(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.lease"):
    """Shows that a job is at work at the root, or a daemon at an attempt. Each renewal raises `count`."""

    version: int = VERSION
    process: str
    """The unique name of the holder: host, boot, process and its start (see `store/writers.py`)."""
    job: str = ""
    count: int
    length_s: float
    """The holder counts as gone when another process has seen the same count for this many seconds of its own clock."""
    writer: WriterIdentity
    """The holder when it began; renewals do not change it."""


class ObjectRef(_Object, frozen=True, kw_only=True, omit_defaults=True):
    """A chunks object: its name inside the attempt that holds it, and its size in bytes."""

    name: str
    size: int
    held_by: str = ""
    """`<tag>/<attempt>` of the older attempt that holds the object; empty: the attempt of the index. Never an attempt that only
    refers to the object."""

    def key(self, prefix: str) -> str:
        """The key of the object, for an index of the attempt `prefix` (`<tag>/<attempt>`)."""
        return object_key(self.held_by or prefix, self.name)


class ErrorReport(_Object, frozen=True, kw_only=True):
    """An error in votes, outcomes and status: the name of a class in `errors.ERRORS`, the message, and the phase of the
    save."""

    code: str
    message: str
    phase: str = ""

    @classmethod
    def of(cls, error: BaseException, phase: str = "", message: str | None = None) -> ErrorReport:
        """The report of `error`, with its own message or `message`, and the nearest class of `errors.py`. Of an error that has
        none, that is StagingError if the snapshot failed, else CheckpointdError.
        """
        unknown = StagingError if phase == "staging" else CheckpointdError
        code = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in ERRORS), unknown.__name__)
        return cls(code=code, message=(str(error) or repr(error)) if message is None else message, phase=phase)

    def error(
        self, message: str | None = None, *, ranks: Sequence[int] = (), unknown: type[CheckpointdError] = CheckpointdError
    ) -> CheckpointdError:
        """The reported error as an exception; of class `unknown` if this release does not have its class. `ranks`: those at
        fault in a save that was aborted. The context of an error that is no AbortedError is then one, which tracebacks omit.
        """
        kind, text = ERRORS.get(self.code, unknown), self.message if message is None else message
        if issubclass(kind, AbortedError):
            return kind(text, ranks=tuple(ranks))
        error = kind(text)
        if ranks:
            error.ranks = tuple(ranks)
            error.__context__, error.__suppress_context__ = AbortedError(text, ranks=error.ranks), True
        return error


NO_REASON = ErrorReport(code=AbortedError.__name__, message="no reason was recorded")


class PlanRef(_Object, frozen=True, kw_only=True):
    """The plan with which an index begins: its size in bytes, and their digest."""

    size: int
    digest: str


class IndexRef(_Object, frozen=True, kw_only=True):
    name: str
    size: int
    digest: str
    plan: PlanRef


class BesideFile(msgspec.Struct, frozen=True, array_like=True):
    """A file that another program wrote beside a checkpoint's files, as it was when they were shown.

    The file is removed with the checkpoint if it has not changed since.
    """

    path: str
    """Relative to the directory that the other program filled."""
    size: int
    changed_ns: int
    """The time of the last change of its content, in nanoseconds since 1970, by the clock of the file system."""


class Inline(_Object, frozen=True, kw_only=True):
    """The reason for an inline save."""

    reason: InlineReason
    """For machines; `why` says the same to people."""
    why: str


class StoredContent(_Object, frozen=True, kw_only=True):
    """The digests of what a rank stored beside the elements of global tensors.

    `own_values`: the digest of each own value by its FQN: a value of a part of the state in which there is no global tensor.
    `frame`: the digest of all else. Ranks with equal digests stored the same.
    """

    frame: str
    own_values: dict[str, str] = {}


class Vote(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.vote"):
    """A rank's vote: its shard is durable (yes), or it failed (no)."""

    version: int = VERSION
    tag: str
    attempt: str
    rank: int
    world_size: int
    step: int
    n: int
    """The number of this rank's earlier saves in its start. That of rank 0 is announced."""
    root: str = ""
    """The id of the root at which it was put first; empty if the rank did not know it. A directory that somebody has brought
    from another root is told by it."""
    save_latest: bool
    vote: Literal["yes", "no"]
    index: IndexRef | None = None
    raw_bytes: int = 0
    stored_bytes: int = 0
    tensors: int = 0
    refers: tuple[str, ...] = ()
    """Keys of the older attempts' objects that the index names."""
    objects: tuple[ObjectRef, ...] = ()
    """The objects of this attempt that the index names, so that a listing shows if one is missing."""
    metrics: dict[str, float] = {}
    left: Branches = ()
    """As in a commit; that of rank 0 counts."""
    trained: Trained = ""
    files: tuple[str, ...] | None = None
    """The names of this rank's files, by number; None if it stores a state."""
    shown_at: str = ""
    """The directory that will show the files, relative to the directory in which the root lies."""
    unfinished: str = ""
    """The name under which the directory above `shown_at` was filled, if other programs filled it for this save."""
    held_s: float = 0.0
    """Seconds for which this save held training on this rank; 0 if unknown."""
    seconds: PhaseSeconds = PhaseSeconds()
    """How long the parts of this rank's save took, up to its yes."""
    inline: Inline | None = None
    """Set if this was an inline save."""
    content: StoredContent | None = None
    """Set in a yes vote of one of several ranks that store a state."""
    error: ErrorReport | None = None
    writer: WriterIdentity

    @property
    def prefix(self) -> str:
        return f"{self.tag}/{self.attempt}"


class BallotRef(_Object, frozen=True, kw_only=True, gc=False):
    """The ballot of a commit (`ballot.py`): the digest of its table, and the size of all of it."""

    digest: str
    size: int


class JointPlanRef(_Object, frozen=True, kw_only=True, gc=False):
    """The joint plan of a commit (`joint_plan.py`)."""

    digest: str
    size: int


class ReadBack(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.readback"):
    """The record that one rank has read back its shard, past the cache, and found it whole."""

    version: int = VERSION
    rank: int
    nbytes: int
    writer: WriterIdentity


class Shown(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.shown"):
    """The record of the attempt whose files a plain directory shows."""

    version: int = VERSION
    tag: str
    attempt: str
    order: tuple[int, int]
    files: tuple[str, ...]
    beside: tuple[BesideFile, ...] = ()
    """Files of other programs that appeared with the checkpoint and are removed with it."""

    @property
    def prefix(self) -> str:
        return f"{self.tag}/{self.attempt}"


class Mirrored(_Object, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.mirror"):
    """What a mirror has begun to copy. Its log knows an attempt only once all of it is there."""

    version: int = VERSION
    begun: tuple[str, ...]
    """Attempts (`<tag>/<attempt>`) of which objects may be there, although the log does not know them."""
    writer: WriterIdentity


SmallObject: TypeAlias = Lease | Vote | ReadBack | Shown | Mirrored
_T = TypeVar("_T", Lease, Vote, ReadBack, Shown, Mirrored)
_S = TypeVar("_S", bound=msgspec.Struct)


class Header(msgspec.Struct):  # the beginning of every object
    format: str = ""
    version: int = 0


def digest(data: Buffer) -> str:
    """The digest of an object: xxh3-128 of its bytes, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


_NO_CHECKSUM = b"0" * 32
_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{32})"\n}\n\Z')


def encode(obj: SmallObject) -> bytes:
    """`obj` as JSON that a person can read, ending in its own checksum and a newline.

    The checksum is the digest of the object's bytes with 32 zeros in place of the checksum.
    """
    return sealed(msgspec.json.format(_plain(obj), indent=2))


def sealed(body: bytes) -> bytes:
    """A JSON object whose closing brace stands on a line of its own, with the checksum as its last key."""
    data = body[: body.rindex(b"\n}")] + b',\n  "checksum": "' + _NO_CHECKSUM + b'"\n}\n'
    return digest(data).encode().join(data.rsplit(_NO_CHECKSUM, 1))


_OPTIONAL = (
    "refers",
    "job",
    "metrics",
    "left",
    "trained",
    "shown_at",
    "unfinished",
    "beside",
    "objects",
    "held_s",
    "seconds",
    "inline",
    "content",
)
"""Keys that are left out if they are empty."""


def _plain(obj: SmallObject) -> bytes:
    """JSON without empty optional keys."""
    fields = msgspec.to_builtins(obj)
    for name in _OPTIONAL:
        if name in fields and not fields[name]:
            del fields[name]
    if fields.get("files") in (None, 0):
        fields.pop("files", None)  # an empty list stays in a vote: this rank has no files, but other ranks may
    return msgspec.json.encode(fields)


def _check_seal(data: bytes, key: str) -> None:
    match = _CHECKSUM.search(data, max(0, len(data) - 64))
    if match is None:
        raise FormatError(f"{key} is damaged: it does not end in its checksum", key=key)
    blank = data[: match.start(1)] + _NO_CHECKSUM + data[match.end(1) :]
    if digest(blank).encode() != match[1]:
        raise FormatError(f"{key} is damaged: its checksum is {match[1].decode()}, its bytes give another", key=key)


def decode(data: bytes, kind: type[_T], key: str) -> _T:
    """The object of type `kind` in `data`. Raises FormatError, which names `key` and the fault."""
    return decode_sealed(data, kind, key, _fault)


def decode_sealed(data: bytes, kind: type[_S], key: str, fault_of: Callable[[_S], str | None]) -> _S:
    """As `decode`, for any object with a checksum of itself. `fault_of`: what no writer puts there, in words."""
    try:
        header = msgspec.json.decode(data, type=Header)
        check_header(header, kind, key)
        _check_seal(data, key)
        found = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"{key} is damaged: {error!s:.500}", key=key) from error
    if fault := fault_of(found):
        raise FormatError(f"{key} {fault}", key=key)
    return found


def is_of_another_version(data: bytes) -> bool:
    """Whether `data` is whole, and of a format version that this release does not read."""
    try:
        _check_seal(data, "")
        return msgspec.json.decode(data, type=Header).version != VERSION
    except (FormatError, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False


def _fault(obj: SmallObject) -> str | None:
    """The values in `obj` that no writer puts there and that would mislead a reader, in words."""
    if isinstance(obj, Vote):
        return _vote_fault(obj)
    if isinstance(obj, Lease) and not 0 < obj.length_s <= LEASE_S_MAX:
        return f"is a lease of {obj.length_s:g} seconds, which cannot be"
    return None


def _vote_fault(vote: Vote) -> str | None:
    if not 0 <= vote.rank < vote.world_size <= WORLD_SIZE_MAX:
        return f"is a vote of rank {vote.rank} of {vote.world_size}, which cannot be"
    ref = vote.index
    if ref is not None and (index_rank(ref.name) != vote.rank or not 0 <= ref.plan.size <= ref.size <= LISTING_BYTES_MAX):
        return f"names an index {ref.name!r} of {ref.size} bytes, which cannot be rank {vote.rank}'s"
    foreign = next((key for key in vote.refers if not refers_to_bytes(key)), None)
    return None if foreign is None else f"refers to {foreign!r}, which cannot hold bytes of a checkpoint"


def check_header(header: Header, kind: type, key: str) -> None:
    """Raise FormatError unless `header` says that the object is of type `kind`, in the version of this release."""
    expected = kind.__struct_config__.tag  # type: ignore[attr-defined]  # msgspec puts it on every Struct class
    if header.format != expected:
        raise FormatError(f"{key} is not a {expected} object (it says {header.format!r:.100})", key=key)
    if header.version != VERSION:
        raise FormatError(
            f"{key} has format version {header.version}, and this release reads version {VERSION}: "
            "read it with the release that wrote it, or a newer one",
            key=key,
        )
