"""The coordinator's part: gather votes, decide, put the outcome, move `latest`.

Invariants
  C1  The outcome is put only with `put_if_absent`: whoever is first decides, and everybody reads that one.
  C2  A commit is put only by the coordinator of the newest epoch or of an attempt that it spares, or by recovery, and only
      with every vote read and valid.
  C3  `latest` moves after the outcome is durable, never before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from checkpointd.commit.decide import Decision, decide, is_stale, unshared
from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.keys import OUTCOME, AttemptId, attempt_prefix, is_bulk, object_rank, vote_name, vote_rank
from checkpointd.layout.manifest import Index, Outcome, Vote, VoteRef, decode, digest, encode
from checkpointd.layout.plan import Doubled, Listing, Names, compared
from checkpointd.pipeline import catalog
from checkpointd.pipeline.doubled import unequal
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.pipeline.workers import run_workers
from checkpointd.store.base import Entry, Store

RECOVERY = -1
"""`decided_by` of an outcome that no rank of the attempt put."""
OVERLAP_REMEDY = (
    "these ranks say that they hold the same part of it: pass the module itself as you train it, which tells what ranks hold "
    "together, or give each tensor a name of its own"
)
READS = 16
"""So many votes, or plans, are read at once: a store far away answers each of thousands only after a while."""


@dataclass(slots=True)
class Ballot:
    """The votes of one attempt as far as they were read; a vote that cannot be read stands as None."""

    store: Store
    tag: str
    attempt: AttemptId
    votes: dict[int, Vote | None] = field(default_factory=dict)
    refs: dict[int, VoteRef] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.tag, self.attempt)

    async def gather(self, entries: list[Entry]) -> None:
        """Read the votes among `entries` that were not read before."""
        ranks = {rank for entry in entries if (rank := vote_rank(entry.name)) is not None} - self.votes.keys()
        await run_workers([partial(self._read, rank) for rank in sorted(ranks)], READS, lambda: None)

    async def _read(self, rank: int) -> None:
        key = f"{self.prefix}/{vote_name(rank)}"
        try:
            # Its voter may not have made it durable yet, and what is decided on it must never outlive it (S4).
            await self.store.settle(key)
            data = await self.store.get(key)
            self.refs[rank] = VoteRef(digest=digest(data), size=len(data))
            self.votes[rank] = decode(data, Vote, key)
        except DamagedError:
            self.votes[rank] = None

    def decide(self, world_size: int) -> Decision | None:
        return decide(self.votes, tag=self.tag, attempt=str(self.attempt), world_size=world_size)


@dataclass(slots=True)
class PlanCheck:
    """Whether the plans that the votes name are whole together; remembered, since plans rarely change.

    What several ranks list alike is compared for every attempt: it must hold the same values each time.
    """

    store: Store
    _names: Names = field(default_factory=Names)
    _listings: dict[str, Listing] = field(default_factory=dict)
    _whole: dict[tuple[str, ...], tuple[Doubled, ...]] = field(default_factory=dict)

    async def fault(self, votes: Mapping[int, Vote | None]) -> Decision | None:
        """The abort that the plans call for, or None."""
        ranks = sorted(votes)
        digests = tuple((vote.plan or "") if (vote := votes[rank]) else "" for rank in ranks)
        doubled = self._whole.get(digests)
        if doubled is None:
            found = dict(self._listings)
            try:
                await run_workers([partial(self._take, name, found) for name in dict.fromkeys(digests)], READS, lambda: None)
            except (NotFoundError, DamagedError) as error:
                return unshared(str(error))
            comparison = compared({rank: found[name] for rank, name in zip(ranks, digests, strict=True)}, self._names)
            if comparison.fault:
                overlaps = comparison.fault.endswith(" overlap")
                return unshared(f"{comparison.fault}: {OVERLAP_REMEDY}" if overlaps else comparison.fault)
            # Two attempts may be checked at once, so nothing that the other needs lies in what is replaced here.
            doubled = comparison.doubled
            self._whole = {digests: doubled}
            self._listings = {name: found[name] for name in digests}
        return await self._unequal(votes, doubled) if doubled else None

    async def _unequal(self, votes: Mapping[int, Vote | None], doubled: tuple[Doubled, ...]) -> Decision | None:
        async def read(rank: int) -> Index:
            vote = votes[rank]
            attempt = AttemptId.parse(vote.attempt) if vote is not None else None
            assert vote is not None  # its plan was read
            assert attempt is not None  # decide() compared it
            return await catalog.index_named_by(self.store, attempt_prefix(vote.tag, attempt), vote)

        try:
            fault = await unequal(read, doubled, READS)
        except (NotFoundError, DamagedError) as error:
            return unshared(str(error))
        return unshared(fault) if fault else None

    async def _take(self, name: str, found: dict[str, Listing]) -> None:
        if name not in found:
            found[name] = Listing.of(await catalog.read_plan(self.store, name), self._names)


async def put_outcome(store: Store, outcome: Outcome) -> Outcome:
    """Put `outcome` if the attempt has none; the outcome that stands, durable."""
    attempt = AttemptId.parse(outcome.attempt)
    assert attempt is not None
    key = f"{attempt_prefix(outcome.tag, attempt)}/{OUTCOME}"
    if await store.put_if_absent(key, encode(outcome)):
        return outcome
    return await catalog.read_outcome(store, outcome.tag, attempt)


def outcome_of(
    info: AttemptInfo,
    decision: Decision,
    refs: Mapping[int, VoteRef],
    *,
    decided_by: int,
    votes: Mapping[int, Vote | None] | None = None,
) -> Outcome:
    """The outcome that `decision` stands for. A commit says what its `votes` say, where they are given: what they refer to."""
    counted = votes if decision.commit else None
    first = (counted or {}).get(0)
    return Outcome(
        tag=info.tag,
        attempt=str(info.attempt),
        step=info.step,
        world_size=info.world_size,
        outcome="commit" if decision.commit else "abort",
        order=(info.attempt.epoch, info.n),
        save_latest=info.save_latest,
        votes={str(rank): ref for rank, ref in sorted(refs.items())},
        refers=None if counted is None else _refers(counted),
        metrics={} if first is None else first.metrics,
        stale=counted is not None and is_stale(counted),
        files=sum(len(vote.files or ()) for vote in (counted or {}).values() if vote is not None),
        shown_at="" if first is None else first.shown_at,
        unfinished="" if first is None else first.unfinished,
        beside=() if first is None else first.beside,
        error=decision.error,
        ranks=decision.ranks,
        decided_by=decided_by,
        writer=writer(),
    )


def _refers(votes: Mapping[int, Vote | None]) -> tuple[str, ...]:
    return tuple(sorted({key for vote in votes.values() if vote is not None for key in vote.refers}))


def missing_ranks(entries: list[Entry], world_size: int) -> dict[int, str]:
    """The ranks without a vote, and what their objects say of how far they came."""
    names = [entry.name for entry in entries]
    voted = {rank for name in names if (rank := vote_rank(name)) is not None}
    begun = {object_rank(n) for n in names if is_bulk(n)}
    return {
        rank: "had begun to write" if rank in begun else "had written nothing"
        for rank in range(world_size)
        if rank not in voted
    }
