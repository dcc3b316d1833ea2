"""Names of the objects in a store, and the rules for tags.

Invariants: every key is relative, separated by `/` and free of `..`. `check_object_name` checks each name that was read from a
file before it reaches a store, so that no checkpoint can make a reader leave its attempt.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

from checkpointd.errors import FormatError, UsageError

LATEST = "latest"
README = "README"
"""A text for people."""
LOG = "log"
"""The directory of the root's log (`commit/log_records.py`)."""
LOG_ROOT = f"{LOG}/root"
"""The object that tells this root from all others."""
SERVICE = ".checkpointd"

_TAG_BYTES_MAX = 200
# Each number has one spelling, so two names never mean one object.
_RANK = r"(\d{5}|[1-9]\d{5,6})"
_ATTEMPT = re.compile(r"(\d{8}|[1-9]\d{8,11})-(0|[1-9]\d{0,8})\Z", re.ASCII)
_OBJECT = re.compile(
    rf"(?:{_RANK}(?:-[01]\.chunks|-(?:0|[1-9]\d{{0,3}})\.file|\.index|\.vote|\.readback)"
    r"|(?:ballot|plan)-[0-9a-f]{32})\Z",
    re.ASCII,
)
_START = re.compile(r"(?:\d{8}|[1-9]\d{8,11})\Z", re.ASCII)
_GROUP = re.compile(r"[1-9]\d{0,3}\Z", re.ASCII)

COORDINATOR = 0
"""The rank of the coordinator."""
START_MAX = 10**12 - 1
STEP_MAX = 2**64 - 1
"""The largest step that the objects of a checkpoint can hold."""
WORLD_SIZE_MAX = 1 << 18
"""The most ranks of a job. An object that declares more is damaged, and nothing is allocated for them."""
RANKS_PER_GROUP = 256
"""The ranks whose objects share a directory of an attempt, so that no directory grows with the ranks."""
FILES_MAX = 10_000
"""The most files of one rank in one checkpoint."""


@dataclass(frozen=True, order=True, slots=True)
class AttemptId:
    """`<start>-<k>`: k counts one rank's saves of one tag in one start, from 0."""

    start: int
    k: int

    def __str__(self) -> str:
        return f"{self.start:08d}-{self.k}"

    @staticmethod
    def of(prefix: str) -> AttemptId:
        """The attempt of `<tag>/<attempt>`, which must name one."""
        found = AttemptId.parse(prefix.rpartition("/")[2])
        assert found is not None, prefix
        return found

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(text: str) -> AttemptId | None:
        """The attempt that `text` names, or None if it names none."""
        match = _ATTEMPT.match(text)
        return AttemptId(int(match[1]), int(match[2])) if match else None


_PLAIN_TAG = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
"""Nearly all tags. A root may have ten thousand."""
_OWN_NAMES = frozenset({LATEST, LOG, README})


def check_tag(tag: str) -> str:
    """Return `tag` as a plain str if it can be the name of a directory below a root, else raise UsageError with the reason."""
    if not isinstance(tag, str):
        raise UsageError(f"a tag is a string, not {type(tag).__name__}: {tag!r}")
    tag = str.__str__(tag)  # subclasses, such as enums, may show themselves in another way than they compare
    if _PLAIN_TAG.fullmatch(tag) and tag not in _OWN_NAMES:
        return tag
    why = None
    if not tag:
        why = "it is empty"
    elif "/" in tag or "\\" in tag:
        why = "it contains a slash"
    elif tag in {".", ".."} or tag.startswith("."):
        why = "it starts with a dot"
    elif tag != tag.strip():
        why = "it starts or ends with white space"
    elif tag == LATEST:
        why = "that name is the pointer to the newest checkpoint"
    elif tag == LOG:
        why = "the root's log has that name"
    elif tag == README:
        why = "a text of that name explains the root"
    elif not tag.isprintable():
        why = "it contains a character that cannot be printed"
    elif not unicodedata.is_normalized("NFC", tag):
        why = "some file systems take it for another spelling of the same text (Unicode NFC), which is the one to use"
    elif len(tag.encode()) > _TAG_BYTES_MAX:
        why = f"it is longer than {_TAG_BYTES_MAX} bytes"
    if why:
        name = unicodedata.normalize("NFC", tag.rstrip("/").rpartition("/")[2])
        example = name if name != tag and is_tag(name) else "global_step100"
        raise UsageError(f"tag {tag!r:.250} cannot be used: {why}; use a plain name such as {example!r}")
    return tag


def is_tag(name: str) -> bool:
    """Whether `name` can be a tag. A listing of a root tells tags from other names by this."""
    try:
        check_tag(name)
    except UsageError:
        return False
    return True


def default_tag(step: int) -> str:
    return f"global_step{step}"


def attempt_prefix(tag: str, attempt: AttemptId) -> str:
    return f"{tag}/{attempt}"


def group_prefix(prefix: str, group: int) -> str:
    """Where the objects of the ranks of `group` lie in the attempt `prefix` (`<tag>/<attempt>`)."""
    return f"{prefix}/{group}" if group else prefix


def group_of(name: str) -> int:
    """The group of the object `name` of an attempt: that of its rank. Records of the whole attempt are in group 0."""
    return rank_group(object_rank(name) or 0)


def rank_group(rank: int) -> int:
    """The group of `rank`."""
    return rank // RANKS_PER_GROUP


def object_key(prefix: str, name: str) -> str:
    """The key of the object `name` of the attempt `prefix`."""
    return f"{group_prefix(prefix, group_of(name))}/{name}"


def is_group(name: str) -> bool:
    """Whether the directory `name` in an attempt holds the objects of a group of ranks."""
    return _GROUP.match(name) is not None


def holder_of(key: str) -> str:
    """The attempt `<tag>/<attempt>` that holds the object with this key."""
    tag, attempt, *_ = key.split("/")
    return f"{tag}/{attempt}"


def is_attempt(prefix: str) -> bool:
    """Whether `prefix` is that of an attempt: `<tag>/<attempt>`."""
    tag, _, attempt = prefix.partition("/")
    return is_tag(tag) and AttemptId.parse(attempt) is not None


def refers_to_bytes(key: str) -> bool:
    """Whether `key` can be that of an object of an attempt that holds the bytes of tensors."""
    folder, _, name = key.rpartition("/")
    if object_rank(name) is None or not holds_bytes(name):
        return False
    prefix = folder.removesuffix(f"/{group_of(name)}")
    return is_attempt(prefix) and object_key(prefix, name) == key


def chunks_name(rank: int, part: int) -> str:
    """The chunks object `part` (0 or 1) of a rank."""
    return f"{rank:05d}-{part}.chunks"


def file_name(rank: int, number: int) -> str:
    """The object that holds file `number` of a rank."""
    return f"{rank:05d}-{number}.file"


def holds_bytes(name: str) -> bool:
    """Whether the object `name` holds the bytes of tensors."""
    return name.endswith((".chunks", ".file"))


def is_bulk(name: str) -> bool:
    """Whether the object `name` is of an attempt's shards: chunks, a file, or an index."""
    return name.endswith(".index") or holds_bytes(name)


def index_name(rank: int) -> str:
    return f"{rank:05d}.index"


def index_rank(name: str) -> int | None:
    """The rank of the index `name`, or None if `name` is not an index."""
    return object_rank(name) if name.endswith(".index") else None


def vote_name(rank: int) -> str:
    return f"{rank:05d}.vote"


def vote_rank(name: str) -> int | None:
    """The rank of the vote `name`, or None if `name` is not a vote."""
    return object_rank(name) if name.endswith(".vote") else None


def read_back_name(rank: int) -> str:
    """The record that a rank has read its shard back."""
    return f"{rank:05d}.readback"


def read_back_rank(name: str) -> int | None:
    """The rank of the read-back record `name`; None if `name` is not such a record."""
    return object_rank(name) if name.endswith(".readback") else None


def object_rank(name: str) -> int | None:
    """The rank that wrote the object `name` of an attempt; None for records of the whole attempt, and for other names."""
    match = _OBJECT.match(name)
    return int(match[1]) if match and match[1] else None


def ballot_name(digest: str) -> str:
    """The ballot whose table has this digest."""
    return f"ballot-{digest}"


def is_ballot(name: str) -> bool:
    return name.startswith("ballot-") and _OBJECT.match(name) is not None


def joint_plan_name(digest: str) -> str:
    """The joint plan with this digest."""
    return f"plan-{digest}"


def check_holder(held_by: str) -> str:
    """Return `held_by` if it has the form `<tag>/<attempt>`, else raise FormatError."""
    if not is_attempt(held_by):
        raise FormatError(f"{held_by!r} is not the name of an attempt, <tag>/<attempt>; the index is damaged or hostile")
    return held_by


def check_object_name(name: str) -> str:
    """Return `name` if an object of an attempt can have it, else raise FormatError."""
    if not _OBJECT.match(name):
        raise FormatError(f"{name!r} is not the name of an object of an attempt; the index is damaged or hostile")
    return name


def check_chunks_ref(name: str, writer: int) -> str:
    """Return `name` if it is a chunks object or a file of rank `writer`, else raise FormatError."""
    check_object_name(name)
    if not holds_bytes(name) or object_rank(name) != writer:
        raise FormatError(f"the index of rank {writer} refers to {name!r}, which is not a chunks object of that rank")
    return name


def start_of(name: str) -> int | None:
    """The number of the start whose job lease has this `name`; None if it is another one."""
    return int(name) if _START.match(name) else None


LEASES = f"{SERVICE}/leases"


def job_lease_key(start: int) -> str:
    """The key of the lease of the job that runs `start`."""
    return f"{LEASES}/{start:08d}"


ATTEMPT_LEASES = f"{LEASES}/attempts"


def attempt_lease_key(prefix: str) -> str:
    """The key of the lease of the attempt `prefix` (`<tag>/<attempt>`), which shows who works at it."""
    return f"{ATTEMPT_LEASES}/{prefix}"


SHOWN = f"{SERVICE}/shown"
_RECORD = "record"


def shown_key(at: str) -> str:
    """The key of the record of the files that the plain directory `at` shows."""
    return f"{SHOWN}/{at}/{_RECORD}"


MIRROR = f"{SERVICE}/mirror"
"""The object that names what a mirror has begun to copy."""
MIRRORS = "mirror of "
"""How the name of whoever holds a mirror begins; the origin follows."""
