"""The coordinator's part: gather votes, decide, and append the decision to the log.

Invariants
  LOG-9  A commit is appended only by who has read the vote of every rank and found it a valid yes, and found the plans whole
      together; and only once its ballot is durable, with the bytes of every vote that was counted, and the joint plan that it
      names. So the commit does not need the files of the votes, and they need not be durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from checkpointd.commit.decide import Decision, decide, has_no_progress, unshared
from checkpointd.commit.log import fate
from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, StoreError, StoreFullError
from checkpointd.layout.ballot import encode_ballot, votes_in
from checkpointd.layout.indexes import Index, Plan
from checkpointd.layout.joint_plan import StoredJointPlan, joint_plan, joint_plan_ref
from checkpointd.layout.keys import (
    AttemptId,
    attempt_prefix,
    holder_of,
    is_ballot,
    is_bulk,
    object_key,
    object_rank,
    rank_group,
    vote_name,
    vote_rank,
)
from checkpointd.layout.log_records import AbortRecord, CommitRecord, LoggedAttempt
from checkpointd.layout.manifest import BALLOT_BYTES_MAX, NO_REASON, VOTE_BYTES_MAX, Vote, decode
from checkpointd.layout.plan import Doubled, NumberedPlan, TensorNumbers, compared
from checkpointd.layout.save_timings import Cost
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.read.duplicate_boxes import unequal
from checkpointd.pipeline.root import reserve, root_view
from checkpointd.pipeline.root.ballots import ballot_key, joint_plan_key, put_named
from checkpointd.pipeline.root.indexes import index_named_by, plans_named_by
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.pipeline.workers import aside, uncollected
from checkpointd.store.base import Entry, Store

log = logging.getLogger("checkpointd")

RECOVERY = -1
"""The value of `decided_by` in a record that no rank put."""
OVERLAP_REMEDY = (
    "these ranks say that they hold the same part of it: pass the module itself as you train it, which tells what ranks hold "
    "together, or give each tensor a name of its own"
)
SAME_STATE_REMEDY = (
    "pass the same objects to save() on every rank. With process_group=..., all replicas and shards of each tensor must be on "
    "ranks of that group"
)
KNOWN_MAX = 2
"""The number of combinations of plans that are remembered: two attempts may be decided at once."""
READS = 16
"""The number of indexes read at once, since thousands of reads from a distant store would take long one by one."""
PLANS_AT_ONCE = 64
"""The number of plans that are in memory at once."""


@dataclass(slots=True)
class Ballot:
    """The votes of one attempt that were read so far; None stands for a vote that cannot be read."""

    store: Store
    tag: str
    attempt: AttemptId
    votes: dict[int, Vote | None] = field(default_factory=dict)
    data: dict[int, bytes] = field(default_factory=dict)
    """The bytes of the votes."""

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.tag, self.attempt)

    async def look(self, world_size: int) -> None:
        """Read the votes that have come since the last look. Lists only the groups of ranks that still miss votes."""
        missing = {rank_group(rank) for rank in range(world_size) if rank not in self.votes}
        await self.gather(await root_view.objects_of_groups(self.store, self.prefix, sorted(missing)))

    async def gather(self, entries: list[Entry]) -> None:
        """Read the votes among `entries` that were not read before."""
        ranks = {rank for entry in entries if (rank := vote_rank(entry.name)) is not None} - self.votes.keys()
        key_of = {rank: object_key(self.prefix, vote_name(rank)) for rank in sorted(ranks)}
        found = await self.store.get_each([*key_of.values()], size_max=VOTE_BYTES_MAX)

        def take() -> None:
            for (rank, key), data in zip(key_of.items(), found, strict=True):
                self._take(rank, key, data)

        uncollected(take)

    async def gather_all(self, entries: list[Entry]) -> None:
        """Read the votes among `entries`. Of ranks without one that can be read, the one that a ballot there has: the files of
        votes need not be durable, and a ballot is (LOG-9).
        """
        await self.gather(entries)
        cast = [vote for vote in self.votes.values() if vote is not None]
        if cast and len(cast) == cast[0].world_size:
            return
        for name in (entry.name for entry in entries if is_ballot(entry.name)):
            key = object_key(self.prefix, name)
            try:
                votes = votes_in(await self.store.get(key, size_max=BALLOT_BYTES_MAX), name, key)
            except (DamagedError, NotFoundError) as error:
                log.warning("%s", error)
                continue
            for rank, data in enumerate(votes):
                if self.votes.get(rank) is None:
                    self._take(rank, key, data)

    def _take(self, rank: int, key: str, data: bytes | CheckpointdError) -> None:
        try:
            if isinstance(data, CheckpointdError):
                raise data
            self.votes[rank] = decode(data, Vote, key)
            self.data[rank] = data
        except DamagedError:
            self.votes[rank] = None

    def decide(self, world_size: int) -> Decision | None:
        return decide(self.votes, tag=self.tag, attempt=str(self.attempt), world_size=world_size)


@dataclass(frozen=True, slots=True)
class Checked:
    """Plans that are whole together: the tensors whose boxes must be compared at every attempt, and the joint plan."""

    doubled: tuple[Doubled, ...]
    joint: StoredJointPlan | None
    """None if the ranks hold no tensor together."""

    def joint_plan(self, votes: Mapping[int, Vote | None]) -> bytes:
        """The bytes of the joint plan of ranks that cast `votes`; empty if there is none."""
        cast = (votes[rank] for rank in sorted(votes))
        return b"" if self.joint is None else self.joint.encode(None if vote is None else vote.content for vote in cast)


@dataclass(slots=True)
class PlanCheck:
    """Checks that the plans named by the votes together cover every tensor once. It remembers the result for the same plans.

    Boxes that several ranks list are compared at every attempt, since their values change.
    """

    store: Store
    _names: TensorNumbers = field(default_factory=TensorNumbers)
    _naming: asyncio.Lock = field(default_factory=asyncio.Lock)
    _listings: dict[str, NumberedPlan] = field(default_factory=dict)
    _known: dict[tuple[str, ...], Checked] = field(default_factory=dict)
    """The results for the last KNOWN_MAX combinations of plans, by their digests."""

    async def fault(self, votes: Mapping[int, Vote | None]) -> Decision | None:
        """The abort that the plans call for, or None."""
        cast = {rank: vote for rank, vote in sorted(votes.items()) if vote is not None}
        digests = _digests(votes)
        known = self._known.get(digests)
        if known is None:
            found = dict(self._listings)
            unknown = {name: vote for vote in cast.values() if (name := _plan(vote)) not in found}
            try:
                await self._number(unknown, found)
            except (NotFoundError, DamagedError) as error:
                return unshared(str(error))
            listings = {rank: found[_plan(vote)] for rank, vote in cast.items()}
            checked = await check_together(listings, self._names, sum(vote.tensors for vote in cast.values()))
            if isinstance(checked, Decision):
                return checked
            known = checked
            # Two attempts may be checked at once: each works on its own `found`, so replacing these fields is safe.
            self._known = dict([*self._known.items(), (digests, known)][-KNOWN_MAX:])
            self._listings = {name: found[name] for name in digests}
        return await unequal_boxes(self.store, cast, known.doubled)

    def joint(self, votes: Mapping[int, Vote | None]) -> bytes:
        """The joint plan of `votes`, which `fault` has just checked. Empty if the ranks hold no tensor together."""
        known = self._known.get(_digests(votes))
        return b"" if known is None else known.joint_plan(votes)

    async def _number(self, unknown: Mapping[str, Vote], found: dict[str, NumberedPlan]) -> None:
        """Add the plans that the votes `unknown` name to `found`, a few at a time, since a plan in memory is large."""
        left = iter(unknown.items())
        while some := dict(islice(left, PLANS_AT_ONCE)):
            plans = await plans_named_by(self.store, [*some.values()])
            async with self._naming:
                tensors = sum(len(plan.tensors) for plan in plans)
                numbered = await aside(tensors, _numbered, plans, self._names)
            found.update(zip(some, numbered, strict=True))


def _numbered(plans: Iterable[Plan], names: TensorNumbers) -> list[NumberedPlan]:
    return [NumberedPlan.of(plan, names) for plan in plans]


def _digests(votes: Mapping[int, Vote | None]) -> tuple[str, ...]:
    """The digests of the plans, in the order of the ranks."""
    return tuple(_plan(votes[rank]) for rank in sorted(votes))


def _plan(vote: Vote | None) -> str:
    """The digest of the plan that a vote names."""
    return "" if vote is None or vote.index is None else vote.index.plan.digest


async def check_together(listings: Mapping[int, NumberedPlan], names: TensorNumbers, tensors: int) -> Checked | Decision:
    """The result for the plans of all ranks, of this many `tensors`; the abort if they are not one whole state together."""
    comparison = await aside(tensors, compared, listings, names)
    if comparison.fault:
        remedy = OVERLAP_REMEDY if comparison.fault.endswith(" overlap") else SAME_STATE_REMEDY
        return unshared(f"{comparison.fault}: {remedy}")
    shares = len(listings) > 1 and any(len(listing.tensors) for listing in listings.values())
    return Checked(comparison.doubled, await aside(tensors, joint_plan, listings, names) if shares else None)


async def unequal_boxes(store: Store, votes: Mapping[int, Vote], doubled: tuple[Doubled, ...]) -> Decision | None:
    """The abort if ranks stored other bytes for a box that they all list; None if they did not."""

    async def read(rank: int) -> Index:
        vote = votes[rank]
        return await index_named_by(store, vote.prefix, vote)

    try:
        fault = await unequal(read, doubled, READS) if doubled else None
    except (NotFoundError, DamagedError) as error:
        return unshared(str(error))
    return unshared(fault) if fault else None


@dataclass(frozen=True, slots=True)
class Draft:
    """The record that decides an attempt, not appended yet. A commit has the bytes of its ballot, and those of its joint plan
    if it has one.
    """

    record: CommitRecord | AbortRecord
    ballot: bytes = b""
    plan: bytes = b""


async def append(log: RootLog, draft: Draft) -> LoggedAttempt:
    """Append the record of `draft` unless the attempt is decided. An abort takes the place of the ballast if there is no other
    room, and that of a commit that refers to what was removed meanwhile (LOG-10). Returns the attempt as it is decided,
    durably. Raises StoreError if the log does not take the record, and the attempt is not decided.
    """
    try:
        return await _append(log, draft)
    except StoreFullError:
        if isinstance(draft.record, CommitRecord):
            raise
    await reserve.drop(log.store)
    return await _append(log, draft)


async def _append(log: RootLog, draft: Draft) -> LoggedAttempt:
    record = draft.record
    if isinstance(record, CommitRecord):
        await put_named_by(log.store, record, draft)
    refused = await log.add(record)
    if refused and isinstance(record, CommitRecord):
        error = unshared(refused).error or NO_REASON
        refused = await log.add(
            AbortRecord(attempt=record.attempt, error=error, decided_by=record.decided_by, writer=record.writer)
        )
    decided = log.state.attempts.get(record.attempt)
    if decided is None or decided.status == "undecided":
        raise StoreError(f"{record.attempt} cannot be decided: {refused or fate(log.state, record.attempt)}")
    return decided


async def put_named_by(store: Store, commit: CommitRecord, draft: Draft) -> None:
    """Make durable what `commit` names (LOG-9)."""
    named = {ballot_key(commit): draft.ballot, joint_plan_key(commit): draft.plan}
    await asyncio.gather(*(put_named(store, key, data) for key, data in named.items() if data))


def draft_of(
    info: AttemptInfo, decision: Decision, votes: Ballot, *, decided_by: int, plan: bytes = b"", took_s: float = 0.0
) -> Draft:
    """The record for `decision`, `took_s` after save(). A commit sums up its `votes`: holders, metrics, cost and files.
    `plan`: the joint plan of a commit.
    """
    if not decision.commit:
        return _abort(info, decision, decided_by)
    ref, data = encode_ballot(votes.data[rank] for rank in range(info.world_size))
    if ref.size > BALLOT_BYTES_MAX:
        words = f"their votes have {ref.size} bytes together, more than {BALLOT_BYTES_MAX}"
        return _abort(info, unshared(words), decided_by)
    counted, first = votes.votes, votes.votes[0]
    assert first is not None  # decide() has found all votes valid
    commit = CommitRecord(
        attempt=info.prefix,
        n=info.n,
        step=info.step,
        world_size=info.world_size,
        save_latest=info.save_latest,
        ballot=ref,
        plan=joint_plan_ref(plan) if plan else None,
        holders=_holders(counted),
        metrics=first.metrics,
        left=first.left,
        no_progress=has_no_progress(counted),
        cost=_cost(counted, took_s),
        files=sum(len(vote.files or ()) for vote in counted.values() if vote is not None),
        shown_at=first.shown_at,
        unfinished=first.unfinished,
        decided_by=decided_by,
        writer=writer(),
    )
    return Draft(commit, data, plan)


def _abort(info: AttemptInfo, decision: Decision, decided_by: int) -> Draft:
    error = decision.error or NO_REASON
    return Draft(AbortRecord(attempt=info.prefix, error=error, ranks=decision.ranks, decided_by=decided_by, writer=writer()))


def _cost(votes: Mapping[int, Vote | None], took_s: float) -> Cost:
    cast = [vote for vote in votes.values() if vote is not None]
    return Cost(
        took_s=round(took_s, 6),
        held_s=max((vote.held_s for vote in cast), default=0.0),
        raw_bytes=sum(vote.raw_bytes for vote in cast),
        stored_bytes=sum(vote.stored_bytes for vote in cast),
        written_bytes=sum(ref.size for vote in cast for ref in vote.objects),
    )


def _holders(votes: Mapping[int, Vote | None]) -> tuple[str, ...]:
    return tuple(sorted({holder_of(key) for vote in votes.values() if vote is not None for key in vote.refers}))


def missing_ranks(entries: list[Entry], world_size: int) -> dict[int, str]:
    """The ranks without a vote, with a note on how far each came."""
    names = [entry.name for entry in entries]
    voted = {rank for name in names if (rank := vote_rank(name)) is not None}
    begun = {object_rank(n) for n in names if is_bulk(n)}
    return {
        rank: "had begun to write" if rank in begun else "had written nothing"
        for rank in range(world_size)
        if rank not in voted
    }
