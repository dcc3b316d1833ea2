"""Keeps a mirror: copies what the origin commits, checkpoint by checkpoint, and applies the rules of the mirror there.

A mirror is a root like any other, with the checkpoints of another root, its origin, under the same tags, attempts and orders.
docs/TIERS.md describes it.

Invariants
  MIRROR-1  Nothing is written at the origin. What is removed there stays at the mirror, which has rules of its own.
  MIRROR-2  Checkpoints are copied in the order of their commits, each to its end before the next one. `latest` at the mirror
      moves only once the whole checkpoint is durable there, and never back.
  MIRROR-3  An attempt at the mirror has the bytes of the origin's, from the outcome to each chunk. So whatever holds for a
      checkpoint at the origin (references, bases of deltas, orders) holds for it at the mirror.
  MIRROR-4  A copy that was interrupted is an attempt without an outcome, which is no checkpoint. The next run goes on with it,
      and copies no object again that is whole. One that is not wanted any more becomes a removed attempt.
  MIRROR-5  A run begins only if all that lies at the mirror came from the origin, and no job has gone on there. It holds an
      start there, and stops when a newer one begins.
  MIRROR-6  A checkpoint that is damaged, unreadable or removed at the origin is named, and holds up no other.
  MIRROR-7  Checkpoints at the mirror are removed only by its rules and by the collection's own (READBACK-3), and none to whose
      objects a commit of the origin refers that is not mirrored yet. One that is damaged, and that the rules would keep if it
      were whole, stays as long as it may be healed, and one that an export needs stays, unless a new checkpoint finds no room.
  MIRROR-8  A checkpoint that a record at the mirror calls damaged, or whose outcome is damaged there, is copied again from the
      same attempt of the origin, object by object, where that has it whole (MIRRORCOPY-5). It counts as whole again only once
      all of it was read back from the mirror. If it cannot be healed, each run names it. If an outcome is gone there that the
      catalog has, the same holds: it is copied again, and its attempt is not taken for a copy that was begun.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from checkpointd.commit.retention import Retention
from checkpointd.config import ABSENCE_S
from checkpointd.errors import CheckpointdError, DamagedError, StoreError, StoreFullError, UnreadableError
from checkpointd.layout.catalog_records import CatalogEntry
from checkpointd.layout.keys import OUTCOME
from checkpointd.layout.manifest import Outcome
from checkpointd.mirror import bare_holders, branches
from checkpointd.mirror.copying import CheckpointCopy, LeftOut
from checkpointd.mirror.hold import Hold, hold
from checkpointd.mirror.news import CheckpointNews, Kind, MirrorReport, News, RemovalNews, news_of
from checkpointd.mirror.planning import (
    Agenda,
    as_healed,
    as_unread,
    damaged_of,
    doubted,
    given_up,
    has_proof,
    missing,
    nbytes_of,
    newest_for_latest,
    outcomes_of,
    planned,
    spared,
)
from checkpointd.mirror.provenance import (
    Lineage,
    check_apart,
    check_begun_apart,
    check_mirror,
    check_record,
    is_of_job,
    lineage_of,
    looked_again,
)
from checkpointd.pipeline.gc.collect import collect
from checkpointd.pipeline.gc.export_leases import ExportLeases
from checkpointd.pipeline.gc.retire import chosen_by
from checkpointd.pipeline.gc.uploads import abort_dead_uploads
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.read.verify import CheckpointVerdict
from checkpointd.pipeline.root import catalog, reserve
from checkpointd.pipeline.root.catalog import AttemptView, Checkpoint
from checkpointd.pipeline.root.catalog_log import CatalogLog
from checkpointd.pipeline.root.catalog_mending import mend
from checkpointd.pipeline.root.latest import move_latest, move_latest_to_newest
from checkpointd.store.base import Store
from checkpointd.store.limited import LimitedStore, TokenBucket
from checkpointd.store.patient import Patience, PatientStore

log = logging.getLogger("checkpointd")


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorConfig:
    """How a mirror is kept."""

    rules: Retention = field(default_factory=Retention)
    """Which checkpoints stay at the mirror."""
    everything: bool = False
    """Whether checkpoints are copied that the rules would remove again at once."""
    verify: bool = False
    """Whether each checkpoint is read back from the mirror after it was copied."""
    limit_bps: float | None = None
    """The most bytes per second that are written; None: no limit."""


@dataclass(slots=True)
class BothRoots:
    """The attempts of both roots at one look, and what is to be done."""

    theirs: list[AttemptView]
    ours: list[AttemptView]
    wanted: list[AttemptView]
    agenda: Agenda


class Mirroring:
    """One origin and its mirror. Call `begin`, then `step` as often as there may be something new, then `end`.

    `tell` gets the news; `on_bytes` the bytes of chunks objects that were copied or compared; `on_copy` each checkpoint whose
    copy begins, with its bytes and how many follow it.
    """

    def __init__(
        self,
        origin: Store,
        mirror: Store,
        config: MirrorConfig | None = None,
        *,
        tell: Callable[[News], None] = lambda _: None,
        on_bytes: Callable[[int], None] = lambda _: None,
        on_copy: Callable[[Checkpoint, int, int], None] = lambda *_: None,
    ) -> None:
        self.config = config or MirrorConfig()
        limit = self.config.limit_bps
        self.origin = origin
        self.mirror = mirror if limit is None else LimitedStore(mirror, TokenBucket(limit))
        self._tell, self._on_bytes, self._on_copy = tell, on_bytes, on_copy
        self._their_log, self._our_log, self._exports = CatalogLog(origin), CatalogLog(self.mirror), ExportLeases(mirror)
        self._hold: Hold | None = None
        self._lineage = Lineage(starts=frozenset())
        self._tried: dict[str, Kind] = {}
        """The attempts of the origin that could not be copied, with the reason."""
        self._not_healed: dict[str, Kind] = {}
        """The attempts that are damaged at the mirror and could not be healed, with the reason."""
        self._recorded: set[str] = set()
        """Those that a record at the origin calls damaged, or whose outcome is: a look shows whether that is still so."""
        self._unread: set[str] = set()
        """Those at the mirror that could not be read back."""
        self._said: set[str] = set()
        self._hurt: set[str] = set()
        """The attempts at the mirror that are not as its catalog says, as far as a whole look, or a copy, has found out."""
        self._seen: BothRoots | None = None
        self._at: tuple[int, str] | None = None
        """The batch of the origin's catalog up to which nothing is left to do, and its fault."""

    # --- beginning and end ----------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Check both roots, and hold the mirror from now on. Raises UsageError, FencedError or RootInUseError if it may not be
        mirrored there; nothing was written then, but a start if both turned out to be one place.
        """
        await check_apart(self.origin, self.mirror)
        self._lineage = await lineage_of(self.origin)
        known, ours = outcomes_of(await self._theirs()), await self._ours()
        removes = not self.config.rules.keeps_all
        record = await check_mirror(self._lineage, self.origin, known, self.mirror, ours, removes=removes)
        ours_now = self._lineage.record(self.origin, record)
        try:
            self._hold = await hold(self.mirror, ours_now, self._our_log)
        except StoreFullError as error:
            log.error("%s; dropping the ballast to make room for a run", error)
            await reserve.drop(self.mirror)
            self._hold = await hold(self.mirror, ours_now, self._our_log)
        try:
            await check_begun_apart(self.origin, self.mirror, self._hold.start)
            # A job may have begun between the look and the hold.
            ours = await self._ours(whole=True)
            await check_mirror(self._lineage, self.origin, known, self.mirror, ours)
            await reserve.on_full_disk(self.mirror, partial(self._settle, ours))
            await reserve.lay(self.mirror)
        except BaseException:
            await self.end()
            raise

    async def end(self) -> None:
        """Let go of the mirror. Raises nothing."""
        if self._hold is not None:
            held, self._hold = self._hold, None
            await held.release()

    async def _settle(self, views: Sequence[AttemptView]) -> None:
        """Record which root the mirror follows, and finish what an earlier run left."""
        await self._held.follow(self._held.record)
        await self._end_commits(views)
        await self.mirror.sweep()
        await abort_dead_uploads(self.mirror, self._our_log)

    async def _end_commits(self, views: Sequence[AttemptView]) -> None:
        """Make outcomes durable that are new, mend the catalog, and move `latest`: a commit may have failed half-way. `latest`
        stays if the newest checkpoint is damaged, or is yet to be read back first.
        """
        await mend(self.mirror, self._our_log, views)
        newest = newest_for_latest(views)
        if newest is None or newest.read_back == "whole" or (newest.read_back == "no" and not self.config.verify):
            await move_latest_to_newest(self.mirror, self._our_log)

    # --- looking ----------------------------------------------------------------------------------------------------

    async def _theirs(self) -> list[AttemptView]:
        """The attempts of the origin. Before one is copied, its own objects are looked at (CATALOG-5)."""
        return await catalog.scan(self.origin, self._their_log, newest=0)

    async def _ours(self, *, whole: bool = False) -> list[AttemptView]:
        """The attempts at the mirror. A `whole` look reads the objects of the newest ones, too, as the catalog may be wrong."""
        views = await catalog.scan(self.mirror, self._our_log, newest=None if whole else 0)
        known = self._our_log.state.entries
        if whole:
            self._hurt |= {view.prefix for view in views if view.entry is None and not _is_as_recorded(view, known)}
            self._hurt |= {prefix for prefix in known if not known[prefix].is_open}.difference(view.prefix for view in views)
            return views
        for at, view in enumerate(views):
            if view.entry is not None and view.prefix in self._hurt:
                views[at] = await catalog.view(self.mirror, view.tag, view.attempt)
                if _is_as_recorded(views[at], known):
                    self._hurt.discard(view.prefix)
        return views

    async def has_news(self) -> bool:
        """Whether the catalog of the origin has a record that was not looked at yet: one listing, if there is none. A caller
        calls `step` now and then all the same, since a catalog may lag behind (CATALOG-5).
        """
        await self._their_log.refresh()
        return self._at is None or bool(self._their_log.fault) or self._at != self._now

    @property
    def _now(self) -> tuple[int, str]:
        return self._their_log.state.number, self._their_log.fault

    @property
    def seen(self) -> BothRoots:
        """Both roots as the last step saw them."""
        assert self._seen is not None, "step() comes first"
        return self._seen

    async def _see(self) -> BothRoots:
        """Both roots now, and what is to be done."""
        theirs, ours = await self._theirs(), await self._ours()
        wanted = missing(theirs, ours)
        going: set[str] = set()
        if wanted:
            stay = [view for view in ours if view.state == "committed"]
            coming = [as_unread(view) for view in wanted if view.prefix not in self._tried]
            chosen = (await chosen_by(self.mirror, [*stay, *coming], self.config.rules, looks=False)).going
            going = {facts.prefix for facts, _ in chosen}
        agenda = planned(
            wanted,
            ours,
            going,
            everything=self.config.everything,
            reached=self._held.record.reached,
            tried=self._tried,
        )
        self._seen = BothRoots(theirs, ours, wanted, agenda)
        return self._seen

    # --- one step ---------------------------------------------------------------------------------------------------

    async def step(self, *, whole: bool = False) -> int:
        """Copy all checkpoints that are due, apply the rules, and heal what is damaged. Returns how many were copied. `whole`:
        look at objects of the mirror that its catalog may be wrong about, too, and end commits that failed, as `begin` does.

        Raises FencedError if the mirror has another holder, and StoreError if a storage fails; the next step goes on then.
        """
        copied, last = 0, None
        await self._follow_starts()
        if whole:
            views = await self._ours(whole=True)
            self._not_healed = {prefix: kind for prefix, kind in self._not_healed.items() if kind != "blocked"}
            await self._held.check()
            await reserve.on_full_disk(self.mirror, partial(self._end_commits, views))
        seen = await self._see()
        while True:
            newest = max((checkpoint.outcome.order for checkpoint in seen.agenda.due), default=(0, 0))
            last = newest if last is None else last
            due = [checkpoint for checkpoint in seen.agenda.due if checkpoint.outcome.order <= last]
            self._name(seen)
            left_out = {checkpoint.prefix for checkpoint in seen.agenda.left_out}
            for view in seen.agenda.leftovers:
                await self._give_up(view, is_left_out=view.prefix in left_out)
            if not due:
                # Checkpoints that came after the first look are for the next step. A root that is not there looks empty.
                is_all = not seen.agenda.due and self._their_log.state.number > 0
                self._at = self._now if is_all else None
                break
            try:
                is_copied = await self._copy(due[0], seen, len(due) - 1)
            except StoreFullError:
                if not await self._make_room(await self._see(), is_full=True):
                    raise
                is_copied = False  # the rules have made room
            copied += is_copied
            seen = await self._see()
            if is_copied and await self._make_room(seen):
                seen = await self._see()
        await branches.follow(self.origin, self.mirror, seen.theirs, seen.ours)
        if not copied:
            await self._make_room(seen)
        if self.config.verify and await self._prove(newest_for_latest(seen.ours)):  # an earlier run may not have
            seen = await self._see()
        if await self._heal(seen):
            await self._make_room(await self._see())  # what waited for something whole may go; reading takes long
        return copied

    async def _make_room(self, seen: BothRoots, *, is_full: bool = False) -> bool:
        """Apply the rules. `is_full`: what is damaged does not wait to be healed. Returns whether anything was removed."""
        return await reserve.on_full_disk(self.mirror, partial(self._retire, seen, is_full=is_full))

    async def _follow_starts(self) -> None:
        """See that the origin is there and is the same root, and record its new starts."""
        lineage = await looked_again(self.origin, self._lineage)
        if lineage is not self._lineage:
            record = self._held.record
            check_record(record, lineage, self.origin, self.mirror, is_shared=False)
            await self._held.check()
            await self._held.follow(lineage.record(self.origin, record))
            self._lineage = lineage

    def try_again(self) -> None:
        """Try checkpoints again that could not be read or healed, or that the mirror or a record stood in the way of."""
        self._tried = {prefix: self._tried[prefix] for prefix in given_up(self._tried) - self._recorded}
        stays = {prefix for prefix, kind in self._not_healed.items() if kind in ("damaged", "blocked")}  # all of it was read
        self._not_healed = {prefix: self._not_healed[prefix] for prefix in stays - self._recorded}
        self._recorded.clear()
        self._unread.clear()

    @property
    def has_origin_begun(self) -> bool:
        """Whether a job has ever begun at the origin, as of the last step."""
        return bool(self._lineage.starts)

    @property
    def left(self) -> dict[str, Kind]:
        """The attempts of the origin that could not be copied, with the reason."""
        return dict(self._tried)

    @property
    def _held(self) -> Hold:
        assert self._hold is not None, "begin() comes first"
        return self._hold

    async def _copy(self, checkpoint: Checkpoint, seen: BothRoots, behind: int) -> bool:
        """Copy one checkpoint. Returns whether that was possible; the news says why not."""
        self._on_copy(checkpoint, nbytes_of(checkpoint), behind)
        proof = next(iter(catalog.commits_of(seen.ours)), None)
        copy = self._copy_of(checkpoint, seen, proof)
        try:
            await self._check_record(checkpoint)
            amount = await copy.run()
        except LeftOut as left:
            if left.holder in self._had() - self._hurt:
                self._hurt.add(left.holder)  # it is looked at now, and copied first if its outcome is gone
                return False
            self._tried[checkpoint.prefix] = left.why
            self._say(checkpoint, left.why, str(left))
            return False
        verdict = await read_back(self.mirror, checkpoint) if self.config.verify else None
        if checkpoint.may_be_latest and (verdict is None or verdict.whole):
            await move_latest(self.mirror, checkpoint.tag, checkpoint.outcome.order)
        if verdict is None or not verdict.damage:  # what is damaged is healed, or named, once the others are copied
            verified = verdict is not None and verdict.whole
            self._tell(news_of(checkpoint, "mirrored", copied=amount.copied, found=amount.found, verified=verified))
        if verdict is not None:
            self._say_unread(checkpoint, verdict)
        return True

    def _copy_of(
        self, checkpoint: Checkpoint, seen: BothRoots, proof: Checkpoint | None, *, heals: bool = False
    ) -> CheckpointCopy:
        had, known = self._had(), outcomes_of(seen.theirs)
        coming = {view.prefix for view in seen.theirs if view.state == "committed"} - given_up(self._tried)
        doubts = doubted(seen.ours, known)
        return CheckpointCopy(
            self.origin, self.mirror, checkpoint, self._held, proof, known, self._on_bytes, heals, had, coming, doubts
        )

    def _had(self) -> set[str]:
        """The checkpoints of the mirror, as its catalog says."""
        decided = [one for one in self._our_log.state.entries.values() if not one.is_open and not one.removed]
        return {one.prefix for one in decided if (found := _outcome_in(one)) is not None and found.outcome == "commit"}

    async def _check_record(self, checkpoint: Checkpoint) -> None:
        """Raise LeftOut if a record in the attempt at the origin says that it is damaged, or if that cannot be told."""
        try:
            view = await catalog.view(self.origin, checkpoint.tag, checkpoint.attempt)
        except UnreadableError as error:
            raise LeftOut("unreadable", str(error)) from error
        if view.read_back == "damaged":
            self._recorded.add(checkpoint.prefix)
            raise LeftOut("damaged", f"a record at {self.origin.url} says that it is damaged")

    async def _give_up(self, view: AttemptView, *, is_left_out: bool) -> None:
        """Make an attempt that was begun and is not wanted any more a removed one. A file server may lag behind, so one that a
        single look at the origin did not show stays as it is. So does what a job began here, as where an origin is healed.
        """
        if await is_of_job(self.mirror, view.attempt.start):
            return
        there = await catalog.view(self.origin, view.tag, view.attempt)
        if there.state not in ("committed", "deleted"):
            key, patient = f"{view.prefix}/{OUTCOME}", PatientStore(self.origin, Patience(ABSENCE_S, ABSENCE_S))
            if await patient.stat(key) is not None:
                return
        elif there.state == "committed" and not is_left_out:
            return
        if view.sizes and view.prefix in self._had() and not is_left_out:
            self._say_view(view, f"its outcome is gone at {self.mirror.url}, and {self.origin.url} does not have it any more")
            return
        await self._held.check()
        kept = await bare_holders.kept_at_origin(self.origin, there) if there.sizes else ()
        outcome = there.outcome if there.outcome is not None and there.outcome.outcome == "commit" else None
        await bare_holders.mark_bare(self.mirror, view.tag, view.attempt, kept, outcome)
        log.info("%s: what was copied of it is removed at %s", view.prefix, self.mirror.url)

    # --- what is damaged at the mirror ------------------------------------------------------------------------------

    async def _heal(self, seen: BothRoots) -> bool:
        """Copy again what is damaged at the mirror, oldest first, or say why not (MIRROR-8). Returns whether that was tried."""
        there = {view.prefix: view for view in seen.theirs}
        orders = {view.prefix: view.order or (0, 0) for view in seen.theirs}
        due = [view for view in damaged_of(seen.ours) if view.prefix not in self._not_healed]
        for view in sorted(due, key=lambda view: orders.get(view.prefix, (0, 0))):
            says = view.damage or f"a record at {self.mirror.url} says that it is damaged"
            try:
                await self._heal_one(view, there.get(view.prefix), seen)
            except LeftOut as left:
                if left.holder in self._had() - self._hurt:
                    self._hurt.add(left.holder)  # the next step looks at it
                else:
                    self._not_healed[view.prefix] = left.why
                self._say_view(view, f"{says}, and {left}")
            except StoreFullError as error:
                self._not_healed[view.prefix] = "blocked"
                self._say_view(view, f"{says}, and there is no room to copy it again: {error}")
        return bool(due)

    async def _heal_one(self, view: AttemptView, there: AttemptView | None, seen: BothRoots) -> None:
        """Heal one checkpoint. Raises LeftOut if that is not possible."""
        now = await catalog.view(self.mirror, view.tag, view.attempt)
        if now.state not in ("committed", "damaged", "unreadable"):
            return  # the rules, or a person, have removed it since the look
        if there is None or there.outcome is None or there.state != "committed":
            raise LeftOut("removed", f"{self.origin.url} does not have it any more")
        checkpoint = Checkpoint(there.tag, there.attempt, there.outcome)
        await self._check_record(checkpoint)
        self._on_copy(checkpoint, nbytes_of(checkpoint), 0)
        amount = await self._copy_of(checkpoint, seen, None, heals=True).run()
        verdict = await read_back(self.mirror, checkpoint)
        if verdict.damage:
            raise LeftOut("blocked", f"it was copied again in vain: {verdict.damage[0].message}")
        if verdict.unreadable:
            raise LeftOut("unreadable", f"it was copied again, and cannot be read back now: {verdict.unreadable[0].message}")
        if checkpoint.may_be_latest:
            await move_latest(self.mirror, checkpoint.tag, checkpoint.outcome.order)
        self._said.discard(_said("damaged-here", view.prefix))
        self._tell(news_of(checkpoint, "healed", copied=amount.copied, found=amount.found, verified=True))

    # --- the rules of the mirror ------------------------------------------------------------------------------------

    async def _retire(self, seen: BothRoots, *, is_full: bool) -> bool:
        """Remove what no rule keeps at the mirror, and leftovers (MIRROR-7). Returns whether anything was removed."""
        exports = None if is_full else self._exports
        choice = await chosen_by(self.mirror, seen.ours, self.config.rules, exports=exports)
        if choice.surplus or (choice.going and not has_proof(seen.ours, {facts.prefix for facts, _ in choice.going})):
            # Jobs read back what they save; here, only the newest that is to take the place of older ones is.
            await self._prove(next(iter(catalog.commits_of(seen.ours)), None))
            seen.ours = await self._ours()
            choice = await chosen_by(self.mirror, seen.ours, self.config.rules, exports=exports)
        stays = spared(seen.agenda.due, seen.theirs, seen.ours)
        if not is_full:
            stays |= await self._to_be_healed(seen)
        going = [dead for dead in choice.going if dead[0].prefix not in stays]
        failed: list[StoreError] = []
        await self._held.check()
        lost = {facts.prefix for facts, _ in going}
        staying = catalog.commits_of(view for view in seen.ours if view.read_back == "whole" and view.prefix not in lost)
        removed = await collect(
            self.mirror, [v.facts for v in seen.ours], going, staying=staying, known=self._our_log, failed=failed
        )
        await self._our_log.refresh()
        await self._our_log.compact()
        if failed:
            raise failed[0]
        gone = {(one.tag, one.attempt) for one in removed}
        if retired := tuple(facts.tag for facts, _ in going if (facts.tag, str(facts.attempt)) in gone):
            self._tell(RemovalNews(retired=retired, freed_bytes=sum(one.freed_bytes for one in removed)))
        return bool(removed)

    async def _to_be_healed(self, seen: BothRoots) -> set[str]:
        """The damaged checkpoints that may be healed yet, and that the rules would keep if they were whole, by prefix."""
        there = {view.prefix for view in seen.theirs if view.state == "committed"} - given_up(self._not_healed)
        found = {view.prefix for view in damaged_of(seen.ours)} & there
        if not found:
            return found
        healed = [as_healed(view) if view.prefix in found else view for view in seen.ours]
        return found - {dead[0].prefix for dead in (await chosen_by(self.mirror, healed, self.config.rules, looks=False)).going}

    async def _prove(self, newest: Checkpoint | None) -> bool:
        """Read a checkpoint back from the mirror, unless that was done or tried. Returns whether its result is new."""
        if newest is None or newest.read_back != "no" or newest.prefix in self._unread:
            return False
        verdict = await read_back(self.mirror, newest)
        if self.config.verify and verdict.whole and newest.may_be_latest:
            await move_latest(self.mirror, newest.tag, newest.outcome.order)
        self._say_unread(newest, verdict)
        return newest.prefix not in self._unread

    # --- news -------------------------------------------------------------------------------------------------------

    def _name(self, seen: BothRoots) -> None:
        """Tell of checkpoints that are not copied, each once."""
        words = "the rules of the mirror would remove it again"
        for checkpoint in seen.agenda.left_out:
            if checkpoint.outcome.order > self._held.record.reached:  # else a run has said so
                self._say(checkpoint, "left-out", words)
        for checkpoint in seen.agenda.damaged:
            self._tried[checkpoint.prefix] = "damaged"
            self._recorded.add(checkpoint.prefix)
            self._say(checkpoint, "damaged", f"a record at {self.origin.url} says that it is damaged")
        for view in seen.theirs:
            fault = catalog.fault_of(view)
            if fault is None:
                continue
            kind: Kind = "damaged" if isinstance(fault, DamagedError) else "unreadable"
            self._tried[view.prefix] = kind
            self._recorded.add(view.prefix)
            if view.prefix not in self._said:
                self._said.add(view.prefix)
                self._tell(CheckpointNews(kind=kind, tag=view.tag, attempt=str(view.attempt), step=-1, why=str(fault)))

    def _say(self, checkpoint: Checkpoint, kind: Kind, why: str) -> None:
        if _said(kind, checkpoint.prefix) not in self._said:
            self._said.add(_said(kind, checkpoint.prefix))
            self._tell(news_of(checkpoint, kind, why=why))

    def _say_unread(self, checkpoint: Checkpoint, verdict: CheckpointVerdict) -> None:
        """Tell of a checkpoint that could not be read back. That proves no damage."""
        if verdict.unreadable and not verdict.damage:
            self._unread.add(checkpoint.prefix)
            why = verdict.unreadable[0].message
            self._say(checkpoint, "unreadable", f"it cannot be read back at {self.mirror.url} now: {why}")

    def _say_view(self, view: AttemptView, why: str) -> None:
        """Tell of an attempt that is damaged at the mirror, once."""
        if _said("damaged-here", view.prefix) not in self._said:
            self._said.add(_said("damaged-here", view.prefix))
            step = view.outcome.step if view.outcome is not None else -1
            self._tell(CheckpointNews(kind="damaged-here", tag=view.tag, attempt=str(view.attempt), step=step, why=why))


def _said(kind: Kind, prefix: str) -> str:
    return f"{kind} {prefix}"


def _is_as_recorded(view: AttemptView, known: Mapping[str, CatalogEntry]) -> bool:
    """Whether the objects of an attempt, in `view`, are as the catalog with the entries `known` says. Those of an open one are
    looked at in any case, and what was removed stays so.
    """
    entry = known.get(view.prefix)
    if entry is None or entry.is_open or entry.removed:
        return True
    recorded = AttemptView(view.tag, view.attempt, {}, _outcome_in(entry), entry=entry)
    return (view.state, view.read_back == "damaged") == (recorded.state, recorded.read_back == "damaged")


def _outcome_in(entry: CatalogEntry) -> Outcome | None:
    """The outcome that the catalog tells; None if no writer puts such a one, so that all directories are read (CATALOG-6)."""
    try:
        return entry.decoded
    except DamagedError:
        return None


async def run_once(mirroring: Mirroring, news: list[News]) -> MirrorReport:
    """One run: begin, copy what is due, end. `news`: the list to which the mirroring tells its news."""
    await mirroring.begin()
    try:
        await mirroring.step()
        latest = await catalog.readable_latest(mirroring.mirror)
    finally:
        await mirroring.end()
    checkpoints = tuple(one for one in news if isinstance(one, CheckpointNews))
    removals = [one for one in news if isinstance(one, RemovalNews)]
    return MirrorReport(
        origin=mirroring.origin.url,
        mirror=mirroring.mirror.url,
        checkpoints=checkpoints,
        retired=tuple(tag for one in removals for tag in one.retired),
        freed_bytes=sum(one.freed_bytes for one in removals),
        latest=latest,
    )


def error_of(report: MirrorReport) -> type[CheckpointdError] | None:
    """The class of error that the checkpoints that were not copied amount to; None if all is well."""
    if report.of("damaged", "damaged-here"):
        return DamagedError
    return StoreError if report.of("unreadable", "blocked") else None
