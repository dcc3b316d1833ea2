"""A candidate of a load as one rank sees it: where it is read from, and the places of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from checkpointd.layout.keys import AttemptId, attempt_prefix
from checkpointd.layout.log_records import CommitRecord
from checkpointd_client.restore.content import RankContent
from checkpointd_client.restore.plan import Restoration
from checkpointd_client.restore.store_source import CandidateSource


@dataclass(frozen=True, slots=True)
class Candidate:
    """The attempt that the ranks try next: from the root, `in_memory` from the sidecars, or `in_spool` from the nodes' disks.

    `near`: it is at the root, and each rank may read what its node has of it (NEAR-2 in `spool_source.py`).
    """

    tag: str
    attempt: AttemptId
    in_memory: bool = False
    in_spool: bool = False
    near: bool = False
    share_reads: bool = False
    """Whether ranks that read the same share the reading."""
    commit: CommitRecord | None = None
    """Of a checkpoint at the root, as rank 0 has read it."""
    nonce: str = ""
    """That of its start, if the log still tells it: a snapshot in memory with another one is of another root."""

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.tag, self.attempt)

    @property
    def is_not_of_root(self) -> bool:
        return self.in_memory or self.in_spool


@dataclass(frozen=True, slots=True)
class Seen:
    """The content of a candidate for this rank, and the objects whose state a match may ask for (`restore.plan.askable`)."""

    source: CandidateSource
    content: RankContent
    askable: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Examined:
    """A candidate that is whole on this rank, and the places of its tensors."""

    source: CandidateSource
    restoration: Restoration
    content: RankContent
