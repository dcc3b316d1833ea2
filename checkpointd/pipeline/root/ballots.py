"""The ballots of commits, as readers use them: the vote of one rank, or the votes of all.

The files of votes in an attempt carry the votes to the process that decides. After a commit, only its ballot counts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.ballot import BallotTable, table_bytes
from checkpointd.layout.keys import ballot_name, joint_plan_name
from checkpointd.layout.log_records import CommitRecord
from checkpointd.layout.manifest import Vote
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")


async def put_named(store: Store, key: str, data: bytes) -> None:
    """Make the object `key` durable: what a commit will name. Its name has the digest of its content, so other bytes
    there are damaged, and are replaced.
    """
    if not await store.put_if_absent(key, data) and not await _holds(store, key, data):
        log.error("%s is damaged: it is written again", key)
        await store.put(key, data)


async def _holds(store: Store, key: str, data: bytes) -> bool:
    try:
        return await store.get(key, size_max=len(data)) == data
    except (DamagedError, NotFoundError):
        return False


@dataclass(slots=True)
class CountedVotes:
    """The votes that `commit` counted. The table of the ballot is read once, and each vote when it is asked for."""

    store: Store
    commit: CommitRecord
    _table: BallotTable | None = None

    async def of(self, rank: int) -> Vote:
        """The vote of `rank`. Raises NotFoundError if there is no ballot, DamagedError if its bytes are not those that the
        outcome names.
        """
        key, table = ballot_key(self.commit), await self._read_table()
        data = memoryview(bytearray(table.starts[rank + 1] - table.starts[rank]))
        await self.store.get_range(key, table.starts[rank], data)
        return table.vote(rank, data, self.commit.attempt, key)

    async def _read_table(self) -> BallotTable:
        if self._table is None:
            ref, key, ranks = self.commit.ballot, ballot_key(self.commit), self.commit.world_size
            head = memoryview(bytearray(table_bytes(ranks)))
            await self.store.get_range(key, 0, head)
            self._table = BallotTable.of(head, ranks, ref, key)
        return self._table


async def vote_of(store: Store, commit: CommitRecord, rank: int) -> Vote:
    """The vote of `rank` that `commit` counted, for a reader of one vote. Raises as `CountedVotes.of`."""
    return await CountedVotes(store, commit).of(rank)


async def votes_of(store: Store, commit: CommitRecord) -> dict[int, Vote | DamagedError]:
    """All votes that `commit` counted, by rank; in place of a damaged vote, the error. Raises as `vote_of`."""
    ref, key = commit.ballot, ballot_key(commit)
    data = memoryview(await store.get(key, size_max=ref.size))
    table = BallotTable.of(data[: table_bytes(commit.world_size)], commit.world_size, ref, key)
    votes: dict[int, Vote | DamagedError] = {}
    for rank in range(commit.world_size):
        try:
            votes[rank] = table.vote(rank, data[table.starts[rank] : table.starts[rank + 1]], commit.attempt, key)
        except DamagedError as error:
            votes[rank] = error
    return votes


def ballot_key(commit: CommitRecord) -> str:
    """The key of the ballot that `commit` names."""
    return f"{commit.attempt}/{ballot_name(commit.ballot.digest)}"


def joint_plan_key(commit: CommitRecord) -> str:
    """The key of the joint plan that `commit` names; empty if it names none."""
    return f"{commit.attempt}/{joint_plan_name(commit.plan.digest)}" if commit.plan is not None else ""
