"""The ballots of commits, as readers use them: the vote of one rank, or the votes of all.

The files of votes in an attempt carry the votes to the process that decides. After a commit, only its ballot counts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.ballot import BallotTable, table_bytes
from checkpointd.layout.keys import BALLOT, OUTCOME
from checkpointd.layout.manifest import BallotRef, Outcome, Vote
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")


async def put_for_commit(store: Store, prefix: str, name: str, data: bytes) -> None:
    """Make the object `name` (the ballot or the joint plan) of the attempt `prefix` durable, for the outcome that will name it.

    All processes that decide an attempt make the same bytes. So other bytes at its key are damaged, and are replaced unless
    the attempt has an outcome, which then decides.
    """
    key = f"{prefix}/{name}"
    if await store.put_if_absent(key, data) or await _holds(store, key, data):
        return
    if await store.stat(f"{prefix}/{OUTCOME}") is None:
        log.error("%s is damaged, and no outcome names it yet: it is written again", key)
        await store.put(key, data)


async def _holds(store: Store, key: str, data: bytes) -> bool:
    try:
        return await store.get(key, size_max=len(data)) == data
    except (DamagedError, NotFoundError):
        return False


@dataclass(slots=True)
class CountedVotes:
    """The votes that the commit `outcome` counted. The table of the ballot is read once, and each vote when it is asked for."""

    store: Store
    outcome: Outcome
    _table: BallotTable | None = None

    async def of(self, rank: int) -> Vote:
        """The vote of `rank`. Raises NotFoundError if there is no ballot, DamagedError if its bytes are not those that the
        outcome names.
        """
        key, table = f"{self.outcome.prefix}/{BALLOT}", await self._read_table()
        data = memoryview(bytearray(table.starts[rank + 1] - table.starts[rank]))
        await self.store.get_range(key, table.starts[rank], data)
        return table.vote(rank, data, self.outcome.prefix, key)

    async def _read_table(self) -> BallotTable:
        if self._table is None:
            ref, key, ranks = ballot_ref(self.outcome), f"{self.outcome.prefix}/{BALLOT}", self.outcome.world_size
            head = memoryview(bytearray(table_bytes(ranks)))
            await self.store.get_range(key, 0, head)
            self._table = BallotTable.of(head, ranks, ref, key)
        return self._table


async def vote_of(store: Store, outcome: Outcome, rank: int) -> Vote:
    """The vote of `rank` that the commit `outcome` counted, for a reader of one vote. Raises as `CountedVotes.of`."""
    return await CountedVotes(store, outcome).of(rank)


async def votes_of(store: Store, outcome: Outcome) -> dict[int, Vote | DamagedError]:
    """All votes that the commit `outcome` counted, by rank; in place of a damaged vote, the error. Raises as `vote_of`."""
    ref, key = ballot_ref(outcome), f"{outcome.prefix}/{BALLOT}"
    data = memoryview(await store.get(key, size_max=ref.size))
    table = BallotTable.of(data[: table_bytes(outcome.world_size)], outcome.world_size, ref, key)
    votes: dict[int, Vote | DamagedError] = {}
    for rank in range(outcome.world_size):
        try:
            votes[rank] = table.vote(rank, data[table.starts[rank] : table.starts[rank + 1]], outcome.prefix, key)
        except DamagedError as error:
            votes[rank] = error
    return votes


def ballot_ref(outcome: Outcome) -> BallotRef:
    """The ballot that `outcome`, a commit, names."""
    assert outcome.ballot is not None  # decode() checks it
    return outcome.ballot
