"""Mutations of the commit protocol: each leaves out, or turns round, one of its steps, and the simulation must notice.

Each names the invariants that may catch it and the faults under which it shows; `seeds.json` names the seed that catches it.
Steps that another mechanism covers are not here, with the reason:
- recovery that aborts every attempt in doubt, also a complete one: put-if-absent keeps a commit that was made, and an attempt
  that nobody saw committed may be aborted;
- a coordinator that does not check that plans are whole together: ranks here never disagree on the state, tests of
  `commit/decide.py` and `layout/plan.py` do.
Mutations of collection are in `test_collect.py`, which keeps collectors and saves at the same objects.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from checkpointd.commit import decide as decisions
from checkpointd.commit.decide import Decision
from checkpointd.commit.facts import AttemptFacts, Dead
from checkpointd.commit.garbage import dead_weight
from checkpointd.commit.machine import Event
from checkpointd.commit.retention import CheckpointFacts, RemovalChoice
from checkpointd.errors import FencedError, NotFoundError, StoreError
from checkpointd.layout import keys
from checkpointd.layout.catalog_records import CatalogRecord, CatalogState, RecordBatch, batch_key, encode_batch, summary_key
from checkpointd.layout.keys import BALLOT, JOINT_PLAN, OUTCOME, AttemptId, attempt_prefix
from checkpointd.layout.manifest import VERSION, ErrorReport, Lease, Outcome, Start, Vote, encode
from checkpointd.pipeline import attempt
from checkpointd.pipeline.announcement import CatalogAnnouncement
from checkpointd.pipeline.attempt import Attempt
from checkpointd.pipeline.gc import collect, retire
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.outcome import publish, recover
from checkpointd.pipeline.root import catalog, catalog_log, latest, leases, plans, starts
from checkpointd.pipeline.root.catalog_log import CatalogLog
from checkpointd.pipeline.root.wholeness import Lost, Votes, Wholeness
from checkpointd.pipeline.shard import AttemptInfo, Shard
from checkpointd.pipeline.write import persist, vote, write_objects
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


# --- votes --------------------------------------------------------------------------------------------------------


def outcome_before_all_votes(patch: Patch) -> None:
    """The coordinator commits on its own vote."""

    def hasty(self: publish.Ballot, world_size: int) -> Decision | None:
        for rank in range(world_size):
            self.data.setdefault(rank, b"")
        return Decision() if 0 in self.votes else None

    patch.setattr(publish.Ballot, "decide", hasty)


def vote_before_index(patch: Patch) -> None:
    """The yes vote is put before the index that it names."""
    put_new, waiting = vote.put_new, dict[str, bytes]()

    async def turned_round(store: Store, key: str, data: bytes, *, durable: bool = True) -> None:
        if key.endswith(".index"):
            waiting[key] = data
            return
        await put_new(store, key, data, durable=durable)
        index = key.replace(".vote", ".index")
        if index in waiting:
            await put_new(store, index, waiting.pop(index))

    for module in (persist, vote):
        patch.setattr(module, "put_new", turned_round)


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


# --- the outcome --------------------------------------------------------------------------------------------------


def outcome_before_ballot(patch: Patch) -> None:
    """A commit is put before the ballot that it names."""
    put_for_commit, put_outcome = publish.put_for_commit, publish.put_outcome

    async def keep(store: Store, prefix: str, name: str, data: bytes) -> None:
        pass

    async def put(store: Store, draft: publish.Draft) -> Outcome:
        stands = await put_outcome(store, draft)
        if draft.ballot:
            await put_for_commit(store, stands.prefix, BALLOT, draft.ballot)
        return stands

    patch.setattr(publish, "put_for_commit", keep)
    patch.setattr(attempt, "put_outcome", put)


def ballot_not_durable(patch: Patch) -> None:
    """The ballot is visible before the outcome, and not durable."""

    async def put(store: Store, prefix: str, name: str, data: bytes) -> None:
        await (await store.open_writer(f"{prefix}/{name}")).write_at(0, data)

    patch.setattr(publish, "put_for_commit", put)


def outcome_overwritten(patch: Patch) -> None:
    """Who puts an outcome replaces the one that is there."""

    async def put(store: Store, draft: publish.Draft) -> Outcome:
        outcome = draft.outcome
        for name, data in ((BALLOT, draft.ballot), (JOINT_PLAN, draft.plan)):
            if data:
                await publish.put_for_commit(store, outcome.prefix, name, data)
        parsed = AttemptId.parse(outcome.attempt)
        assert parsed is not None
        await store.put(f"{attempt_prefix(outcome.tag, parsed)}/{OUTCOME}", encode(outcome))
        return outcome

    patch.setattr(attempt, "put_outcome", put)


def own_outcome_believed(patch: Patch) -> None:
    """Who put an outcome too late believes in its own all the same."""
    put_outcome = publish.put_outcome

    async def put(store: Store, draft: publish.Draft) -> Outcome:
        await put_outcome(store, draft)
        return draft.outcome

    patch.setattr(attempt, "put_outcome", put)


def outcome_not_settled(patch: Patch) -> None:
    """A rank reports an outcome that it saw, durable or not."""

    async def seen(self: Attempt) -> Outcome | None:
        try:
            return await catalog.read_outcome(self._store, self.info.tag, self.info.attempt)
        except NotFoundError:
            return None

    patch.setattr(Attempt, "_seen", seen)


def committed_on_own_vote(patch: Patch) -> None:
    """A rank reports committed once its own vote is there."""
    fire = Attempt._fire

    def hasty(self: Attempt, event: Event) -> Any:
        done = fire(self, event)
        return fire(self, Event.SAW_COMMIT) if event is Event.VOTED_YES else done

    patch.setattr(Attempt, "_fire", hasty)


def everybody_fenced(patch: Patch) -> None:
    """Every coordinator takes itself for an older start's."""

    async def check(store: Store, number: int, attempt: str | None = None, *, proved: bool = False) -> None:
        raise FencedError("the mutation")

    patch.setattr(starts, "check_fence", check)


def no_fence(patch: Patch) -> None:
    """A coordinator does not look whether there is a newer start."""

    async def check(store: Store, number: int, attempt: str | None = None, *, proved: bool = False) -> None:
        return None

    patch.setattr(starts, "check_fence", check)


def aborted_counts(patch: Patch) -> None:
    """Whatever has an outcome is taken for a checkpoint."""

    def state(self: catalog.AttemptView) -> str:
        return "committed" if self.outcome else "in-doubt"

    async def whole(self: Wholeness, attempt: catalog.AttemptView, votes: Votes) -> tuple[Lost, ...]:
        return ()  # what an aborted attempt has lost cannot be told without a ballot

    patch.setattr(catalog.AttemptView, "state", property(state))
    patch.setattr(Wholeness, "_lost_of", whole)


def start_begun_twice(patch: Patch) -> None:
    """A starting job goes on in the newest start instead of taking the next."""
    begin = starts.begin

    async def reuse(store: Store, number: int, *arguments: Any, **options: Any) -> Start | None:
        newest = await starts.newest(store)
        return await starts.read(store, newest) if newest else await begin(store, number, *arguments, **options)

    patch.setattr(starts, "begin", reuse)


def unforeseen_error(patch: Patch) -> None:
    """Checking the plans fails with an error of no kind that is expected."""

    async def fail(self: publish.PlanCheck, votes: Mapping[int, Vote | None]) -> Decision | None:
        raise KeyError("plans")

    patch.setattr(publish.PlanCheck, "fault", fail)


# --- latest -------------------------------------------------------------------------------------------------------


def latest_before_outcome(patch: Patch) -> None:
    """`latest` moves when the votes are in, before the outcome is put."""
    put_outcome = publish.put_outcome

    async def put(store: Store, draft: publish.Draft) -> Outcome:
        if draft.outcome.outcome == "commit":
            await store.put("latest", f"{draft.outcome.tag}\n".encode())
        return await put_outcome(store, draft)

    patch.setattr(attempt, "put_outcome", put)


def latest_goes_back(patch: Patch) -> None:
    """Whoever commits last moves `latest`, whatever it names."""

    def always_moves(*_: object) -> bool:
        return True

    patch.setattr(latest, "moves_latest", always_moves)


def latest_not_repaired(patch: Patch) -> None:
    """Recovery leaves `latest` where it finds it."""

    async def stay(store: Store, tag: str, order: tuple[int, int], *, is_start: bool = False) -> bool:
        return False

    patch.setattr(recover, "move_latest", stay)


# --- recovery and collection --------------------------------------------------------------------------------------


def recovery_commits_what_is_incomplete(patch: Patch) -> None:
    """An attempt in doubt is committed though votes are missing."""

    def rash(votes: Mapping[int, Vote | None], **_: object) -> Decision:
        return Decision() if votes else Decision(ErrorReport(code="AbortedError", message="no rank had voted"))

    draft_of = recover.draft_of

    def filled(info: AttemptInfo, decision: Decision, votes: publish.Ballot, *, decided_by: int, plan: bytes) -> publish.Draft:
        for rank in range(info.world_size):
            votes.data.setdefault(rank, b"")
        return draft_of(info, decision, votes, decided_by=decided_by, plan=plan)

    patch.setattr(decisions, "recover", rash)
    patch.setattr(recover, "draft_of", filled)


def removed_without_a_mark(patch: Patch) -> None:
    """A replaced attempt's chunks go while its outcome still says that it is a checkpoint."""

    async def sweep(store: Store, attempts: list[AttemptFacts], going: Sequence[Dead] = (), **_: object) -> list[object]:
        for facts, _ in [*dead_weight(attempts), *going]:
            prefix = attempt_prefix(facts.tag, facts.attempt)
            for entry in await store.list(prefix):
                if entry.name.endswith((".index", ".chunks")):
                    await store.delete(f"{prefix}/{entry.name}")
        return []

    patch.setattr(retire, "collect", sweep)


def newest_removed(patch: Patch) -> None:
    """Collection takes every commit of a tag for replaced."""

    def all_of(commits: Iterable[CheckpointFacts], *_: object, **__: object) -> RemovalChoice:
        return RemovalChoice(going=tuple((commit.attempt, "the mutation") for commit in commits))

    patch.setattr(retire, "choose", all_of)


def in_doubt_removed(patch: Patch) -> None:
    """Collection takes the bulk of attempts that are not decided yet."""

    def dead(attempts: list[AttemptFacts]) -> list[Dead]:
        return [(facts, "the mutation") for facts in attempts if facts.state == "in-doubt" and facts.bulk]

    patch.setattr(collect, "dead_weight", dead)


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

    async def none(store: Store, sight: leases.Sight, known: Sequence[str] = (), log: object = None) -> tuple[str, ...]:
        return ()

    patch.setattr(leases, "attempts_at_work", none)


# --- writers and surviving attempts ------------------------------------------------------------------------------------


def hands_share_names(patch: Patch) -> None:
    """Whoever takes an attempt over writes the objects that the one before it wrote."""

    def index_name(rank: int, takeover: int = 0) -> str:
        return keys.index_name(rank)

    def chunks_name(rank: int, part: int, takeover: int = 0) -> str:
        return keys.chunks_name(rank, part)

    for module in (write_objects, vote):
        patch.setattr(module, "chunks_name", chunks_name)
    for module in (persist, vote):
        patch.setattr(module, "index_name", index_name)


def every_hand_dropped(patch: Patch) -> None:
    """A writer that drops its shard drops every other writer's as well."""

    async def drop(store: Store, info: AttemptInfo) -> None:
        for entry in await store.list(info.prefix):
            if keys.object_rank(entry.name) == info.rank and keys.object_takeover(entry.name) is not None:
                await store.delete(info.key(entry.name))

    for module in (persist, vote, attempt):
        patch.setattr(module, "drop_shard", drop)


def dropped_unlooked(patch: Patch) -> None:
    """A writer that is not sure of its own vote drops its shard after a commit, whatever the vote names."""
    patch.setattr(attempt, "drop_unless_named", vote.drop_shard)


def first_hand_tidied_for(patch: Patch) -> None:
    """What later writers wrote is taken for leftovers, whatever the vote names."""

    async def drop(store: Store, facts: AttemptFacts) -> None:
        prefix = attempt_prefix(facts.tag, facts.attempt)
        for entry in await store.list(prefix):
            if keys.object_takeover(entry.name):
                await store.delete(f"{prefix}/{entry.name}")

    patch.setattr(collect, "_drop_unnamed", drop)


def surviving_forgotten(patch: Patch) -> None:
    """Recovery decides a surviving attempt."""

    async def forgetful(store: Store, start: int, surviving: Sequence[str] = ()) -> recover.Recovery:
        return await recover.recover(store, start)

    patch.setattr(simrank, "recover", forgetful)


def swept_all_the_same(patch: Patch) -> None:
    """Recovery removes temporary files though writers that it cannot see are still at work."""

    async def sweeping(store: Store, start: int, surviving: Sequence[str] = ()) -> recover.Recovery:
        await store.sweep()
        return await recover.recover(store, start, surviving)

    patch.setattr(simrank, "recover", sweeping)


def surviving_outcome_not_settled(patch: Patch) -> None:
    """Recovery points `latest` at a commit of a surviving attempt, durable or not."""
    settle = recover._Settling.settle

    async def lax(self: recover._Settling, view: catalog.AttemptView) -> tuple[catalog.AttemptView, Outcome | None]:
        return (view, None) if view.prefix in self.surviving else await settle(self, view)

    patch.setattr(recover._Settling, "settle", lax)


def plan_removed_too_early(patch: Patch) -> None:
    """A writer removes its older plan as soon as it uses a newer one."""
    use = plans.OwnPlans.use

    async def hasty(self: plans.OwnPlans, store: Store, info: AttemptInfo, shard: Shard) -> plans.OwnPlan:
        known = await use(self, store, info, shard)
        for key in self._undecided.keys() - {known.key}:
            await store.delete(key)
        return known

    patch.setattr(plans.OwnPlans, "use", hasty)


def plans_of_surviving_removed(patch: Patch) -> None:
    """A start removes the plans of all older starts."""

    async def all_older(store: Store, start: int, surviving: Sequence[str] = ()) -> int:
        return await plans.remove_plans(store, start)

    patch.setattr(recover, "remove_plans", all_older)


# --- the catalog --------------------------------------------------------------------------------------------------


def closed_too_early(patch: Patch) -> None:
    """The close of an attempt is put before its outcome."""
    put_outcome = publish.put_outcome

    async def put(store: Store, draft: publish.Draft) -> Outcome:
        await catalog_log.note_outcome(store, draft.outcome)
        return await put_outcome(store, draft)

    patch.setattr(attempt, "put_outcome", put)


def written_unannounced(patch: Patch) -> None:
    """Nobody waits until the attempt is announced."""

    async def at_once(self: CatalogAnnouncement, deadline: float) -> None:
        return None

    patch.setattr(CatalogAnnouncement, "awaited", at_once)


def summary_misses_a_record(patch: Patch) -> None:
    """A summary is put under the number of a record that it leaves out."""
    encode_summary = catalog_log.encode_summary

    def encoded(state: CatalogState) -> bytes:
        return encode_summary(CatalogState(state.number, dict([*state.entries.items()][:-1])))

    patch.setattr(catalog_log, "encode_summary", encoded)


def removed_with_the_newest_summary(patch: Patch) -> None:
    """What the newest summary covers goes at once."""

    async def compact(self: CatalogLog, *, every: int | None = None) -> None:
        if not self.state.number:
            return
        await self.store.put_if_absent(summary_key(self.state.number), catalog_log.encode_summary(self.state))
        for number in (await catalog_log._listed(self.store))[1]:
            if number <= self.state.number:
                await self.store.delete(batch_key(number))

    patch.setattr(CatalogLog, "compact", compact)


def records_replaced(patch: Patch) -> None:
    """A record takes the next number, whether another one has taken it or not."""

    async def put(self: CatalogLog, records: Iterable[CatalogRecord]) -> int:
        summaries, taken = await catalog_log._listed(self.store)
        first = max([*summaries[-1:], *taken[-1:]], default=0) + 1
        batch = RecordBatch(version=VERSION, number=first, writer=writer(), records=tuple(records))
        await self.store.put(batch_key(first), encode_batch(batch))
        return first

    patch.setattr(CatalogLog, "_put", put)


def cut_off(name: str, kind: str) -> Callable[[int], Faults]:
    """The connection to one sidecar breaks at one of its effects of that kind; rank and effect differ from seed to seed."""

    def at(seed: int) -> Faults:
        return ((Moment(kind, name, 1 + seed % 3), LoseSidecar(seed // 3 % 3, "cut off")),)

    return at


def stop_coordinator(seed: int) -> Faults:
    """The coordinator stops between outcome visible and durable; the power fails when the others have gone on to the next."""
    return (Moment("link", "/outcome", 1), Pause(0, 30.0)), (Moment("link", ".vote", 4 + seed % 3), PowerCut())


MUTATIONS = {
    "the outcome before all votes are there": Mutation(
        outcome_before_all_votes, ("latest-whole", "always-ends", "nothing-lost"), lambda seed: ((60 + seed, Kill(2)),)
    ),
    "the vote before the index": Mutation(
        vote_before_index, ("latest-whole", "nothing-lost"), lambda seed: ((Moment("link", ".vote", 1 + seed % 3), Kill()),)
    ),
    "chunks never synced": Mutation(
        nothing,
        ("latest-whole", "nothing-lost"),
        always((Moment("link", "/latest", 1), PowerCut())),
        view=ForgetsChunks,
    ),
    "an uncertain vote taken back": Mutation(
        uncertain_vote_taken_back,
        ("latest-whole", "always-ends", "nothing-lost"),
        lambda seed: ((Moment("link", ".index", 1 + seed % 3), Refuse(ACTOR, errno.ETIMEDOUT, 1, "link")),),
    ),
    "the outcome before the ballot": Mutation(
        outcome_before_ballot, ("latest-whole", "nothing-lost", "ranks-agree"), always((Moment("link", "/outcome", 1), Kill(0)))
    ),
    "a ballot that is not durable": Mutation(
        ballot_not_durable, ("latest-whole", "nothing-lost"), always((Moment("link", "/latest", 1), PowerCut()))
    ),
    "an outcome overwritten": Mutation(
        outcome_overwritten,
        ("one-outcome",),
    ),
    "one's own outcome believed": Mutation(
        own_outcome_believed,
        ("ranks-agree", "one-outcome"),
        lambda seed: ((Moment("link", ".vote", 3), Pause(0, 19.0 + seed / 20)),),
    ),
    "an outcome reported before it is durable": Mutation(
        outcome_not_settled, ("one-outcome", "ranks-agree", "nothing-lost"), stop_coordinator, steps=2
    ),
    "committed on one's own vote": Mutation(committed_on_own_vote, ("ranks-agree", "always-ends")),
    "an aborted attempt taken for a checkpoint": Mutation(
        aborted_counts,
        ("aborted-never-loaded", "latest-whole", "latest-forward"),
        lambda seed: ((Moment("link", ".vote", 3), Pause(0, 25.0)), (150 + seed, Kill(1))),
    ),
    "a start begun twice": Mutation(
        start_begun_twice, ("always-ends", "next-save-works"), lambda seed: ((80 + seed, Kill(1)),)
    ),
    "an error that nobody foresaw": Mutation(unforeseen_error, ("always-ends",)),
    "the newest start fenced": Mutation(everybody_fenced, ("next-save-works",)),
    "no fence": Mutation(no_fence, ("fenced",), lambda seed: ((100 + seed, SecondJob()),), steps=3),
    "latest before the outcome": Mutation(latest_before_outcome, ("latest-whole",)),
    "latest goes back": Mutation(latest_goes_back, ("latest-forward",), steps=3),
    "latest not repaired": Mutation(latest_not_repaired, ("latest-forward",), always((Moment("link", "/outcome", 1), Kill(0)))),
    "recovery commits what is incomplete": Mutation(
        recovery_commits_what_is_incomplete,
        ("latest-whole", "nothing-lost"),
        lambda seed: ((Moment("link", ".vote", 1 + seed % 2), Kill(2)),),
    ),
    "removed without a mark": Mutation(removed_without_a_mark, ("nothing-lost",), steps=3, deviations=True),
    "the newest removed": Mutation(
        newest_removed, ("latest-whole", "latest-forward", "nothing-lost"), steps=3, deviations=True
    ),
    "writers that share names": Mutation(
        hands_share_names,
        ("latest-whole", "nothing-lost"),
        lambda seed: ((Moment("link", ".index", 1 + seed % 3), LoseSidecar(seed // 3 % 3, "cut off")),),
        sidecars=True,
    ),
    "every writer's objects dropped": Mutation(
        every_hand_dropped, ("latest-whole", "nothing-lost"), cut_off(".chunks", "create"), sidecars=True
    ),
    "one's own objects dropped without looking at the vote": Mutation(
        dropped_unlooked,
        ("latest-whole", "nothing-lost"),
        lambda seed: ((Moment("link", ".index", 1 + seed % 3), Refuse(ACTOR, errno.ETIMEDOUT, 1, "link")),),
        sidecars=True,
    ),
    "a later writer's objects taken for leftovers": Mutation(
        first_hand_tidied_for, ("latest-whole", "nothing-lost"), cut_off(".chunks", "create"), sidecars=True
    ),
    "surviving forgotten": Mutation(surviving_forgotten, ("surviving",), lambda seed: ((60 + seed, Kill(0)),), sidecars=True),
    "temporary files of unseen writers swept": Mutation(
        swept_all_the_same,
        ("surviving",),
        lambda seed: ((60 + seed, SecondJob()),),
        sidecars=True,
        sweeps_foreign=True,
    ),
    "latest rests on the outcome of a surviving attempt that is not durable": Mutation(
        surviving_outcome_not_settled,
        ("latest-whole",),
        always((Moment("link", "/outcome", 1), Pause(ACTOR, 30.0, replaced=True))),
        sidecars=True,
        world_size=1,
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
    "a plan removed too early": Mutation(plan_removed_too_early, ("plan-stands",), steps=4, deviations=True),
    "the plans of surviving attempts removed": Mutation(
        plans_of_surviving_removed, ("plan-stands",), lambda seed: ((60 + seed, Kill(0)),), sidecars=True
    ),
    "an attempt closed before its outcome": Mutation(closed_too_early, ("catalog-tells",)),
    "an attempt written before it is announced": Mutation(written_unannounced, ("catalog-tells",)),
    "a summary that misses a record": Mutation(summary_misses_a_record, ("catalog-tells",), steps=3),
    "what only the newest summary covers removed": Mutation(removed_with_the_newest_summary, ("catalog-tells",), steps=3),
    "a record replaced": Mutation(records_replaced, ("catalog-tells",)),
    "what is in doubt removed": Mutation(in_doubt_removed, ("latest-whole", "nothing-lost"), steps=3, deviations=True),
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
    )
    return Schedule(job=job, faults=mutation.faults(seed), sweeps_foreign=mutation.sweeps_foreign, view=mutation.view)
