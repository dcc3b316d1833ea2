"""The record of a shard in a spool: all that is needed to upload it and to vote, without the process that wrote it."""

from __future__ import annotations

from typing import Literal

import msgspec

from checkpointd.commit.facts import Order
from checkpointd.commit.retention import KEEPS_NONE
from checkpointd.layout.keys import SERVICE, AttemptId, is_tag
from checkpointd.layout.manifest import VERSION, Vote, WriterIdentity, decode_sealed, digest, sealed

SPOOLED = f"{SERVICE}/spooled"
"""Below this prefix of a spool lie the records."""

Note = Literal["announced", "superseded", "committed"]
"""What is noted beside a record. `announced`: the log of the root names the attempt. `superseded`: the rank votes no, for a
newer save. `committed`: the attempt has committed, and the shard stays for restarts."""


class SpooledRules(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a `Retention`."""

    keep_last: int | None = None
    every_steps: int | None = None
    younger_than_s: float | None = None
    best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"


class SpoolRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.spooled"):
    """One rank's shard of one attempt, whose objects lie in the spool under the keys that they get at the root."""

    version: int = VERSION
    url: str
    """The root."""
    nonce: str
    """The nonce of the attempt's start."""
    uid: int
    """The user whose save it is."""
    vote: Vote
    """The yes vote, as it is put once all that it names is at the root."""
    required: bool = False
    """Whether it must not be dropped for a newer save."""
    keeps_before: Order = KEEPS_NONE
    """Checkpoints before this order stay (RETENTION-6 in `commit/retention.py`)."""
    commit_timeout_s: float
    on_no_progress: Literal["warn", "abort", "ignore"] = "warn"
    read_back: bool = True
    retention: SpooledRules = SpooledRules()
    spooled_at: float
    """Seconds since 1970, by the clock of this node. After a restart it tells how much of the time-out is left."""
    writer: WriterIdentity

    @property
    def prefix(self) -> str:
        return self.vote.prefix

    @property
    def attempt(self) -> AttemptId:
        attempt = AttemptId.parse(self.vote.attempt)
        assert attempt is not None  # `decode_record` takes no other
        return attempt

    @property
    def order(self) -> tuple[int, int]:
        """The place of the save among this rank's saves."""
        return (self.attempt.start, self.vote.n)

    @property
    def key(self) -> str:
        return record_key(self.prefix, self.vote.rank)


def record_key(prefix: str, rank: int) -> str:
    """The key of the record of a rank's shard of the attempt `prefix` (`<tag>/<attempt>`). All records lie in one directory."""
    tag, _, attempt = prefix.rpartition("/")
    return f"{SPOOLED}/{attempt}-{rank:05d}-{digest(tag.encode())}"


def note_key(record: str, note: str) -> str:
    """The key of a note beside the record with the key `record`."""
    return f"{record}.{note}"


def encode_record(record: SpoolRecord) -> bytes:
    return sealed(msgspec.json.format(msgspec.json.encode(record), indent=2))


def decode_record(data: bytes, key: str) -> SpoolRecord:
    """The record in `data`. Raises FormatError, which names `key` and the fault."""
    return decode_sealed(data, SpoolRecord, key, _fault)


def _fault(record: SpoolRecord) -> str | None:
    vote = record.vote
    if not is_tag(vote.tag) or AttemptId.parse(vote.attempt) is None:
        return f"is of {vote.tag!r}, attempt {vote.attempt!r}, which cannot be"
    if vote.vote != "yes" or vote.index is None:
        return "has a vote that names no index"
    return None
