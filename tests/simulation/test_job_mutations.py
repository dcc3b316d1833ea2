"""Mutations of the commit protocol: each leaves out, or turns round, one of its steps, and the simulation must notice.

Each names the invariants that may catch it and the faults under which it shows; `seeds.json` names the seed that catches it.
Steps that another mechanism covers are not here, with the reason:
- recovery that aborts every attempt in doubt, also a complete one: the log keeps a commit that was made, and an attempt that
  nobody saw committed may be aborted;
- a coordinator that does not look for newer starts: the log refuses its commit;
- a coordinator that does not check that plans are whole together: ranks here never disagree on the state, tests of
  `commit/decide.py` and `layout/plan.py` do;
- a choice by retention of all checkpoints, the newest too: the log refuses it, unless one that stays was read back.
`tests/model/` tries mutations of the log in every order of a few processes.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from checkpointd.commit import decide as decisions
from checkpointd.commit import log as table
from checkpointd.commit import log_access as steps
from checkpointd.commit.decide import Decision
from checkpointd.commit.machine import Event
from checkpointd.errors import StagingError, StoreError
from checkpointd.layout import keys
from checkpointd.layout.log_records import (
    AbortRecord,
    BeginRecord,
    CommitRecord,
    LoggedAttempt,
    LogState,
    encode_entry,
    encode_state,
    entry_key,
)
from checkpointd.layout.manifest import ErrorReport, Lease, Vote
from checkpointd.pipeline import announcement, attempt
from checkpointd.pipeline.announcement import Announcement
from checkpointd.pipeline.attempt import Attempt
from checkpointd.pipeline.gc import collect, retire
from checkpointd.pipeline.outcome import publish, recover, starting
from checkpointd.pipeline.root import latest, leases, log, root_view, starts
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.shard import AttemptInfo, Shard
from checkpointd.pipeline.write import persist, vote
from checkpointd.store.base import Store
from checkpointd.testing.job import simrank
from checkpointd.testing.job.simjob import run_schedule
from checkpointd.testing.job.simledger import InvariantError
from checkpointd.testing.job.simrank import JobConfig
from checkpointd.testing.job.simschedule import (
    ACTOR,
    Fault,
    Kill,
    LoseSidecar,
    Moment,
    Pause,
    PowerCut,
    Refuse,
    Schedule,
    SecondJob,
)
from checkpointd.testing.job.simsidecar import SimSidecar, snapshot_of
from checkpointd.testing.simdisk import ProcessDisk
from checkpointd.testing.simfs import SimFile
from tests.simulation.named_seeds import NamedSeeds

# Thousands of runs in virtual time: a busy machine needs minutes for the largest.
pytestmark = pytest.mark.timeout(600)

RUNS_MAX = 200
"""Seeds that are searched where none is named."""

Faults = tuple[tuple[int | Moment, Fault], ...]
Patch = pytest.MonkeyPatch


def always(*faults: tuple[int | Moment, Fault]) -> Callable[[int], Faults]:
    """The same faults for every seed."""

    def same(_: int) -> Faults:
        return faults

    return same


NO_FAULTS = always()


@dataclass(frozen=True)
class Mutation:
    """`apply` breaks the code; `faults` may differ from seed to seed."""

    apply: Callable[[Patch], None]
    invariants: tuple[str, ...]
    faults: Callable[[int], Faults] = NO_FAULTS
    steps: int = 1
    deviations: bool = False
    sidecars: bool = False
    world_size: int = 3
    sweeps_foreign: bool = False
    view: type[ProcessDisk] = ProcessDisk
    name: str = "job"
    asks_sidecar: bool = True
    keeps: int | None = None
    frozen: bool = False


# --- votes --------------------------------------------------------------------------------------------------------


def commit_before_all_votes(patch: Patch) -> None:
    """The coordinator commits on its own vote."""

    def hasty(self: publish.Ballot, world_size: int) -> Decision | None:
        for rank in range(world_size):
            self.data.setdefault(rank, b"")
        return Decision() if 0 in self.votes else None

    patch.setattr(publish.Ballot, "decide", hasty)


def vote_before_index(patch: Patch) -> None:
    """The yes vote is put before the index that it names."""
    put_new, put_yes, waiting = persist.put_new, vote.put_yes, dict[str, bytes]()

    async def held_back(store: Store, key: str, data: bytes) -> None:
        waiting[key] = data

    async def turned_round(store: Store, info: AttemptInfo, said: Vote) -> None:
        await put_yes(store, info, said)
        index = info.key(keys.index_name(info.rank))
        await put_new(store, index, waiting.pop(index))

    patch.setattr(persist, "put_new", held_back)
    patch.setattr(vote, "put_yes", turned_round)


def nothing(patch: Patch) -> None:
    """The code stays as it is; the disk is what breaks."""


class ForgetsChunks(ProcessDisk):
    """Never syncs chunks."""

    async def sync_node(self, file: SimFile, path: str) -> None:
        if not path.endswith(".chunks"):
            await super().sync_node(file, path)


def uncertain_vote_taken_back(patch: Patch) -> None:
    """A yes vote whose put failed, but which may be there, is treated as if it were not: the shard goes."""

    async def fail(self: Attempt, error: StoreError) -> None:
        await self._fail(error, Event.SHARD_FAILED)

    patch.setattr(Attempt, "_doubt", fail)


# --- the decision -------------------------------------------------------------------------------------------------


def commit_before_ballot(patch: Patch) -> None:
    """A commit is put before the ballot that it names."""
    put_named_by, append = publish.put_named_by, publish.append

    async def keep(*_: object) -> None:
        return None

    async def put(root_log: RootLog, draft: publish.Draft) -> LoggedAttempt:
        stands = await append(root_log, draft)
        if isinstance(draft.record, CommitRecord):
            await put_named_by(root_log.store, draft.record, draft)
        return stands

    patch.setattr(publish, "put_named_by", keep)
    patch.setattr(attempt, "append", put)


def ballot_not_durable(patch: Patch) -> None:
    """The ballot is visible before the commit, and not durable."""

    async def put(store: Store, key: str, data: bytes) -> None:
        await (await store.open_writer(key)).write_at(0, data)

    patch.setattr(publish, "put_named", put)


def own_decision_believed(patch: Patch) -> None:
    """Who decides too late believes in its own decision all the same."""
    append = publish.append

    async def put(root_log: RootLog, draft: publish.Draft) -> LoggedAttempt:
        await append(root_log, draft)
        record = draft.record
        if isinstance(record, CommitRecord):
            return LoggedAttempt.of(record)
        return LoggedAttempt(prefix=record.attempt, status="aborted", abort=record)

    patch.setattr(attempt, "append", put)


def seen_and_not_settled(patch: Patch) -> None:
    """A rank reports a decision that it saw, durable or not."""
    follow = steps.follow
    patch.setattr(steps, "follow", lambda *of: replace(follow(*of), settles=False))


def committed_on_own_vote(patch: Patch) -> None:
    """A rank reports committed once its own vote is there."""
    fire = Attempt._fire

    def hasty(self: Attempt, event: Event) -> Any:
        done = fire(self, event)
        return fire(self, Event.SAW_COMMIT) if event is Event.VOTED_YES else done

    patch.setattr(Attempt, "_fire", hasty)


def everybody_fenced(patch: Patch) -> None:
    """Every rank takes itself for an older start's."""
    patch.setattr(announcement, "is_admitted", lambda *_: False)


def start_begun_twice(patch: Patch) -> None:
    """A starting job goes on in the newest start instead of taking the next."""
    begin = starts.begin

    async def reuse(store: Store, begun: BeginRecord, **options: Any) -> BeginRecord | None:
        newest = await starts.newest(store)
        return await starts.read(store, newest) if newest else await begin(store, begun, **options)

    patch.setattr(starts, "begin", reuse)


def start_not_begun(patch: Patch) -> None:
    """A starting job loads and saves without having begun."""

    async def believed(_: Store, begun: BeginRecord, **__: object) -> BeginRecord:
        return begun

    patch.setattr(starts, "begin", believed)


def start_fences_nobody(patch: Patch) -> None:
    """A begin leaves undecided what older starts have left, and so does the start that puts it."""
    begin = table._Change._begin

    def lax(self: table._Change, record: BeginRecord) -> None:
        undecided = {name: one for name, one in self.attempts.items() if one.status == "undecided"}
        begin(self, record)
        self.attempts.update(undecided)

    decided_now = starting.decided_now

    async def commits_only(*given: Any) -> list[CommitRecord | AbortRecord]:
        return [record for record in await decided_now(*given) if isinstance(record, CommitRecord)]

    patch.setattr(table._Change, "_begin", lax)
    patch.setattr(starting, "decided_now", commits_only)


def unforeseen_error(patch: Patch) -> None:
    """Checking the plans fails with an error of no kind that is expected."""

    async def fail(self: publish.PlanCheck, votes: Mapping[int, Vote | None]) -> Decision | None:
        raise KeyError("plans")

    patch.setattr(publish.PlanCheck, "fault", fail)


# --- latest -------------------------------------------------------------------------------------------------------


def latest_before_commit(patch: Patch) -> None:
    """`latest` moves when the votes are in, before the commit is put."""
    append = publish.append

    async def put(root_log: RootLog, draft: publish.Draft) -> LoggedAttempt:
        if isinstance(draft.record, CommitRecord):
            await root_log.store.put("latest", f"{draft.record.tag}\n".encode())
        return await append(root_log, draft)

    patch.setattr(attempt, "append", put)


def latest_names_the_oldest(patch: Patch) -> None:
    """`latest` moves to the oldest checkpoint."""

    def oldest(state: LogState) -> LoggedAttempt | None:
        found = [one for one in state.attempts.values() if one.status == "checkpoint"]
        return min(found, key=lambda one: one.order, default=None)

    patch.setattr(latest, "newest_of", oldest)


def latest_not_repaired(patch: Patch) -> None:
    """Recovery leaves `latest` where it finds it."""

    async def stay(root_log: RootLog, *, is_start: bool = False) -> str | None:
        return await root_view.readable_latest(root_log.store)

    patch.setattr(recover, "move_latest", stay)


# --- recovery and collection --------------------------------------------------------------------------------------


def recovery_commits_what_is_incomplete(patch: Patch) -> None:
    """An attempt in doubt is committed though votes are missing."""

    def rash(votes: Mapping[int, Vote | None], **_: object) -> Decision:
        return Decision() if 0 in votes else Decision(ErrorReport(code="AbortedError", message="no rank had voted"))

    draft_of = publish.draft_of

    def filled(info: AttemptInfo, decision: Decision, votes: publish.Ballot, *, decided_by: int, plan: bytes) -> publish.Draft:
        for rank in range(info.world_size):
            votes.data.setdefault(rank, b"")
        return draft_of(info, decision, votes, decided_by=decided_by, plan=plan)

    patch.setattr(decisions, "recover", rash)
    patch.setattr(recover, "draft_of", filled)


def removed_before_its_record(patch: Patch) -> None:
    """The chunks of a retired checkpoint go before the log says that it is none any more."""
    remove = collect.remove

    async def late(store: Store, going: Mapping[str, Sequence[str]], start: int = 0) -> str:
        for prefix in [one for some in going.values() for one in some]:
            for entry in await root_view.objects_of(store, prefix):
                if entry.name.endswith((".index", ".chunks")):
                    await store.delete(keys.object_key(prefix, entry.name))
        return await remove(store, going, start)

    patch.setattr(retire, "remove", late)


def removed_unproved(patch: Patch) -> None:
    """Retention removes as a person does, and without a checkpoint that was read back."""
    remove = collect.remove

    async def believed(*_: object) -> bool:
        return True

    async def by_hand(store: Store, going: Mapping[str, Sequence[str]], start: int = 0) -> str:
        return await remove(store, going)

    patch.setattr(retire, "survivor", believed)
    patch.setattr(retire, "remove", by_hand)


def undecided_swept(patch: Patch) -> None:
    """The objects of attempts that are not decided yet are removed with those of dead ones."""
    swept_next = collect.swept_next

    def too_many(state: LogState, *only: Any) -> list[LoggedAttempt]:
        return [*swept_next(state, *only), *(one for one in state.attempts.values() if one.status == "undecided")]

    patch.setattr(collect, "swept_next", too_many)


def references_ignored(patch: Patch) -> None:
    """The objects of a removed checkpoint go, whoever refers to them."""

    async def none(*_: object, **__: object) -> tuple[dict[str, None], dict[str, frozenset[str]]]:
        return {}, {}

    patch.setattr(collect, "references", none)


# --- leases -------------------------------------------------------------------------------------------------------


def living_job_overlooked(patch: Patch) -> None:
    """A start does not look whether another job is alive."""

    async def nobody(store: Store, job: str, sight: leases.Sight) -> None:
        return None

    patch.setattr(leases, "living_job", nobody)


def lease_never_renewed(patch: Patch) -> None:
    """A lease is put once and never again."""

    async def once(self: leases.HeldLease, is_put: bool) -> None:
        if not is_put:
            await self._put()

    patch.setattr(leases.HeldLease, "_keep_on", once)


def dead_job_waited_for(patch: Patch) -> None:
    """A lease that nobody renews is watched for ten times its length."""
    seen_alive = leases._seen_alive

    async def patient(watch: leases.Watch, about: str) -> Lease | None:
        if not watch.has_ended():
            await asyncio.sleep(9 * watch.length_s)
        return await seen_alive(watch, about)

    patch.setattr(leases, "_seen_alive", patient)


def attempts_of_others_overlooked(patch: Patch) -> None:
    """A start does not look at the leases of attempts."""

    async def none(store: Store, sight: leases.Sight, known: Sequence[str] = ()) -> tuple[str, ...]:
        return ()

    patch.setattr(leases, "attempts_at_work", none)


# --- writers and surviving attempts ------------------------------------------------------------------------------------


def written_twice(patch: Patch) -> None:
    """A trainer that has lost its sidecar in the middle of a save writes the shard itself."""

    async def handed_over(
        self: simrank.Rank, info: AttemptInfo, taking: asyncio.Task[Shard], sidecar: Callable[[], SimSidecar]
    ) -> Attempt:
        snapshot = snapshot_of(self.process, taking, StagingError(f"{self.name} died"))
        current = sidecar()
        work = current.begin(info, snapshot)
        ended: list[asyncio.Future[Any]] = [work, current.lost]
        await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        attempt = work.result() if work.done() else None
        return await self._runner.run(info, snapshot) if attempt is None else attempt

    patch.setattr(simrank.Rank, "_handed_over", handed_over)


def shard_of_the_lost_removed(patch: Patch) -> None:
    """A trainer that has lost its sidecar removes the shard before its no is there."""

    async def hasty(store: Store, info: AttemptInfo, error: ErrorReport, *, has_written: bool = True) -> bool:
        return await vote.vote_no(store, info, error)

    patch.setattr(attempt, "vote_no", hasty)


def surviving_forgotten(patch: Patch) -> None:
    """A start spares nobody."""

    async def none(*_: object) -> tuple[str, ...]:
        return ()

    patch.setattr(starts, "unfenced", none)


def swept_all_the_same(patch: Patch) -> None:
    """Recovery removes temporary files though writers that it cannot see are still at work."""

    async def sweeping(store: Store, before: LogState) -> recover.Recovery:
        await store.sweep()
        return await recover.recover(store, before)

    patch.setattr(simrank, "recover", sweeping)


# --- the log ------------------------------------------------------------------------------------------------------


def written_unannounced(patch: Patch) -> None:
    """Nobody waits until the attempt is announced."""

    async def at_once(self: Announcement, deadline: float) -> None:
        return None

    patch.setattr(Announcement, "awaited", at_once)


def fenced_and_written(patch: Patch) -> None:
    """Whoever sees a newer start while it waits for an announcement writes all the same."""
    make = Announcement.make

    async def lax(self: Announcement) -> None:
        if self.log.state.start <= self.info.attempt.start:
            await make(self)

    patch.setattr(Announcement, "make", lax)


def entry_replaced(patch: Patch) -> None:
    """An entry takes the next number, whether another one has taken it or not."""
    do = RootLog._do

    async def put(self: RootLog, request: steps.Request) -> steps.Reply:
        if not isinstance(request, steps.PutEntry):
            return await do(self, request)
        await self.store.put(entry_key(request.entry.number), encode_entry(request.entry))
        return True

    patch.setattr(RootLog, "_do", put)


def nothing_settled(patch: Patch) -> None:
    """What was read counts, durable or not."""

    async def settled(self: RootLog, number: int) -> None:
        return None

    patch.setattr(RootLog, "_settle", settled)


def state_misses_an_attempt(patch: Patch) -> None:
    """A state leaves an attempt out."""

    def short(state: LogState) -> bytes:
        return encode_state(replace(state, attempts=dict([*state.attempts.items()][:-1])))

    patch.setattr(log, "encode_state", short)


def removed_with_the_newest_state(patch: Patch) -> None:
    """What the newest state covers goes at once."""
    patch.setattr(steps, "STATES_KEPT", 1)


def cut_off(name: str, kind: str) -> Callable[[int], Faults]:
    """The connection to one sidecar breaks at one of its effects of that kind; rank and effect differ from seed to seed."""

    def at(seed: int) -> Faults:
        return ((Moment(kind, name, 1 + seed % 3), LoseSidecar(seed // 3 % 3, "cut off")),)

    return at


def stop_coordinator(seed: int) -> Faults:
    """The coordinator stops between commit visible and durable; the power fails when the others have gone on to the next."""
    return (Moment("link", "commit", 1), Pause(0, 30.0)), (Moment("link", ".vote", 4 + seed % 3), PowerCut())


MUTATIONS = {
    "a commit before all votes are there": Mutation(
        commit_before_all_votes, ("named-durable",), lambda seed: ((60 + seed, Kill(2)),)
    ),
    "the vote before the index": Mutation(
        vote_before_index,
        ("named-durable", "latest-whole", "nothing-lost"),
        lambda seed: ((Moment("link", ".vote", 1 + seed % 9), Kill()),),
        steps=3,  # the coordinator reads the index of a rank whose plan it does not know
    ),
    "chunks never synced": Mutation(nothing, ("named-durable",), view=ForgetsChunks),
    "an uncertain vote taken back": Mutation(
        uncertain_vote_taken_back,
        ("objects-stay", "always-ends"),
        lambda seed: ((Moment("link", ".index", 1 + seed % 3), Refuse(ACTOR, errno.ETIMEDOUT, 1, "link")),),
    ),
    "a commit before the ballot": Mutation(commit_before_ballot, ("named-durable",)),
    "a ballot that is not durable": Mutation(ballot_not_durable, ("named-durable", "objects-stay")),
    "one's own decision believed": Mutation(
        own_decision_believed,
        ("ranks-agree", "one-decision"),
        lambda seed: ((Moment("link", "ballot", 1), Pause(0, 15.0 + seed % 40 / 10)),),
    ),
    "a decision reported before it is durable": Mutation(seen_and_not_settled, ("durable",), stop_coordinator, steps=2),
    "committed on one's own vote": Mutation(committed_on_own_vote, ("ranks-agree", "always-ends")),
    "a start begun twice": Mutation(
        start_begun_twice, ("always-ends", "next-save-works", "one-decision"), lambda seed: ((80 + seed, Kill(1)),)
    ),
    "a start that has not begun": Mutation(start_not_begun, ("durable",)),
    "a start that fences nobody": Mutation(
        start_fences_nobody, ("one-decision",), lambda seed: ((Moment("link", ".vote", 1 + seed % 2), Kill(2)),)
    ),
    "an error that nobody foresaw": Mutation(unforeseen_error, ("always-ends",)),
    "the newest start fenced": Mutation(everybody_fenced, ("next-save-works", "always-ends")),
    "latest before the commit": Mutation(latest_before_commit, ("latest-whole",)),
    "latest at the oldest": Mutation(latest_names_the_oldest, ("latest-follows",), steps=3),
    "latest not repaired": Mutation(latest_not_repaired, ("latest-follows",), always((Moment("link", "commit", 1), Kill(0)))),
    "recovery commits what is incomplete": Mutation(
        recovery_commits_what_is_incomplete,
        ("named-durable",),
        lambda seed: ((Moment("link", ".vote", 1 + seed % 2), Kill(2)),),
    ),
    "removed before its record": Mutation(removed_before_its_record, ("objects-stay",), steps=3, keeps=1),
    "removed before another one was read back": Mutation(removed_unproved, ("removed-newer",), steps=3, keeps=1),
    "what is undecided swept": Mutation(undecided_swept, ("objects-stay",), steps=3, deviations=True),
    "what others refer to swept": Mutation(references_ignored, ("objects-stay",), steps=3, keeps=1, frozen=True),
    "a shard with two writers": Mutation(
        written_twice, ("objects-stay", "latest-whole", "nothing-lost"), cut_off(".index", "link"), sidecars=True
    ),
    "the shard of a lost sidecar removed before the no": Mutation(
        shard_of_the_lost_removed, ("objects-stay", "latest-whole", "nothing-lost"), cut_off(".index", "link"), sidecars=True
    ),
    "surviving forgotten": Mutation(
        surviving_forgotten, ("outlived", "surviving"), lambda seed: ((60 + seed, Kill(0)),), sidecars=True
    ),
    "temporary files of unseen writers swept": Mutation(
        swept_all_the_same,
        ("surviving",),
        lambda seed: ((60 + seed, SecondJob()),),
        sidecars=True,
        sweeps_foreign=True,
    ),
    "a living job overlooked": Mutation(
        living_job_overlooked, ("left-alone",), lambda seed: ((60 + seed, SecondJob("stranger")),), steps=3
    ),
    "a lease never renewed": Mutation(
        lease_never_renewed,
        ("left-alone",),
        lambda seed: ((60 + seed, SecondJob("stranger")),),
        steps=12,
        world_size=1,
    ),
    "a dead job waited for without end": Mutation(
        dead_job_waited_for, ("always-starts",), lambda seed: ((60 + seed, Kill(0)),), name=""
    ),
    "attempts of other daemons overlooked": Mutation(
        attempts_of_others_overlooked,
        ("outlived",),
        lambda seed: ((60 + seed, Kill(0)),),
        sidecars=True,
        asks_sidecar=False,
    ),
    "an attempt written before it is announced": Mutation(written_unannounced, ("announced",)),
    "an attempt written though it is fenced": Mutation(
        fenced_and_written, ("announced",), lambda seed: ((50 + seed, SecondJob("usurper")),), steps=3
    ),
    "an entry replaced": Mutation(entry_replaced, ("log-valid",)),
    "nothing settled": Mutation(
        nothing_settled, ("durable", "log-valid"), always((Moment("link", "commit", 1), Pause(ACTOR, 30.0, replaced=True)))
    ),
    "a state that misses an attempt": Mutation(state_misses_an_attempt, ("states-tell",), steps=3),
    "what only the newest state covers removed": Mutation(removed_with_the_newest_state, ("covered",), steps=3),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_caught(name: str, named_seeds: NamedSeeds) -> None:
    mutation = MUTATIONS[name]
    seed = check_caught(f"disk: {name}", mutation.apply, mutation.invariants, lambda at: schedule_of(mutation, at), named_seeds)
    # The same schedule does not break the code as it is.
    run_schedule(replace(schedule_of(mutation, seed), view=ProcessDisk))


def check_caught(
    name: str,
    apply: Callable[[Patch], None],
    invariants: tuple[str, ...],
    schedule: Callable[[int], Schedule],
    named_seeds: NamedSeeds,
) -> int:
    """A seed under which the mutation breaks one of the invariants that it names."""

    def breaks(seed: int) -> str | None:
        with pytest.MonkeyPatch.context() as patch:
            apply(patch)
            try:
                run_schedule(schedule(seed))
            except InvariantError as error:
                return error.name if error.name in invariants else None
        return None

    seed, _ = named_seeds.caught(name, breaks, range(RUNS_MAX))
    return seed


def schedule_of(mutation: Mutation, seed: int) -> Schedule:
    job = JobConfig(
        seed=seed,
        steps=mutation.steps,
        deviations=mutation.deviations,
        sidecars=mutation.sidecars,
        world_size=mutation.world_size,
        name=mutation.name,
        asks_sidecar=mutation.asks_sidecar,
        keeps=mutation.keeps,
        frozen=mutation.frozen,
    )
    return Schedule(job=job, faults=mutation.faults(seed), sweeps_foreign=mutation.sweeps_foreign, view=mutation.view)
