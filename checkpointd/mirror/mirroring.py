"""Keeps a mirror: copies what the origin commits, checkpoint by checkpoint, and applies the rules of the mirror there.

A mirror is a root like any other, with the checkpoints of another root, its origin, under the same tags, attempts and orders.
docs/TIERS.md describes it.

Invariants
  MIRROR-1  Nothing is written at the origin. What is removed there stays at the mirror, which has rules of its own.
  MIRROR-2  Checkpoints are copied in the order of their commits, each to its end before the next one. `latest` at the mirror
      moves only once the whole checkpoint is durable there, and never back.
  MIRROR-3  An attempt at the mirror has the bytes of the origin's, and its commit is the same record. So whatever holds for a
      checkpoint at the origin (references, bases of deltas, orders, branches) holds for it at the mirror.
  MIRROR-4  A copy that was interrupted is a directory of which the log knows nothing. The record of the mirror names it. The
      next run goes on with it, and copies no object again that is whole. If nobody wants it any more, the log gets it as a
      removed attempt, so that it is swept.
  MIRROR-5  A run begins only if all that lies at the mirror came from the origin, and no job has gone on there. It holds a
      start there, which is newer than those of the origin, and stops when a newer one begins.
  MIRROR-6  A checkpoint that is damaged, unreadable or removed at the origin is named, and holds up no other.
  MIRROR-7  Checkpoints at the mirror are removed only by its rules, once one that stays was read back (READBACK-3), and none to
      whose objects a commit of the origin refers that is not mirrored yet, or a save in flight may refer. One that is damaged,
      and that the rules would keep if it were whole, stays as long as it may be healed, and one that an export needs stays,
      unless a new checkpoint finds no room.
  MIRROR-8  A checkpoint that the log of the mirror calls damaged is copied again from the same attempt of the origin, object by
      object, where that has it whole (MIRRORCOPY-4). It counts as whole again only once all of it was read back from the
      mirror. If it cannot be healed, each run names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from checkpointd.commit.branches import commits_of, newest_of
from checkpointd.commit.log import may_be_held
from checkpointd.commit.retention import Retention, choose
from checkpointd.errors import (
    CheckpointdError,
    DamagedError,
    NotFoundError,
    RootGoneError,
    StoreError,
    StoreFullError,
    UnreadableError,
    UsageError,
)
from checkpointd.layout.keys import MIRROR, is_attempt
from checkpointd.layout.log_records import HoldRecord, LoggedAttempt, LogState, Record
from checkpointd.layout.manifest import Mirrored, decode, encode
from checkpointd.mirror import branches
from checkpointd.mirror.copying import CheckpointCopy, LeftOut
from checkpointd.mirror.hold import Hold, hold
from checkpointd.mirror.news import CheckpointNews, Kind, MirrorReport, News, RemovalNews, news_of
from checkpointd.mirror.planning import (
    Agenda,
    as_unread,
    damaged_of,
    has_proof,
    missing,
    nbytes_of,
    planned,
    reached,
    spared,
)
from checkpointd.mirror.provenance import ANOTHER, Side, check_apart, check_mirror, side_of
from checkpointd.pipeline.gc.collect import sweep
from checkpointd.pipeline.gc.export_leases import ExportLeases
from checkpointd.pipeline.gc.retire import age_s, chosen_by, retired
from checkpointd.pipeline.gc.uploads import abort_dead_uploads
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.read.verify import CheckpointVerdict
from checkpointd.pipeline.root import reserve, root_view
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Store
from checkpointd.store.limited import LimitedStore, TokenBucket

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


@dataclass(frozen=True, slots=True)
class BothRoots:
    """The logs of both roots at one look, and what is to be done."""

    theirs: LogState
    ours: LogState
    wanted: list[LoggedAttempt]
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
        on_copy: Callable[[LoggedAttempt, int, int], None] = lambda *_: None,
    ) -> None:
        self.config = config or MirrorConfig()
        limit = self.config.limit_bps
        self.origin = origin
        self.mirror = mirror if limit is None else LimitedStore(mirror, TokenBucket(limit))
        self._tell, self._on_bytes, self._on_copy = tell, on_bytes, on_copy
        self._their_log, self._our_log = RootLog.of(origin), RootLog.of(self.mirror)
        self._exports = ExportLeases(mirror)
        self._hold: Hold | None = None
        self._origin_id = ""
        self._begun: tuple[str, ...] = ()
        """The attempts in the mirror's record: objects of them may be there, although the log does not know them."""
        self._tried: dict[str, Kind] = {}
        """The attempts of the origin that could not be copied, with the reason."""
        self._not_healed: dict[str, Kind] = {}
        """The attempts that are damaged at the mirror and could not be healed, with the reason."""
        self._unread: set[str] = set()
        """Those at the mirror that could not be read back."""
        self._said: set[str] = set()
        self._is_swept = False
        """Whether nothing is known to be left of what was removed, and may go."""
        self._seen: BothRoots | None = None
        self._at: int | None = None
        """The entry of the origin's log up to which nothing is left to do."""

    # --- beginning and end ----------------------------------------------------------------------------------------

    async def begin(self) -> bool:
        """Check both roots, and hold the mirror from now on. Returns False if no job has ever begun at the origin. Raises
        UsageError, FencedError or RootInUseError if it may not be mirrored there; nothing was written then.
        """
        check_apart(self.origin, self.mirror)
        theirs, ours = await side_of(self.origin), await side_of(self.mirror)
        if not theirs.id or not theirs.state.begins:
            if self._their_log.fault:
                raise UnreadableError(self._their_log.unreadable)
            if ours.newest is not None and ours.newest.origin:
                raise RootGoneError(f"{self.origin.url} shows no start of a job, and {ours.url} mirrors one: is it mounted?")
            return False
        removes = not self.config.rules.keeps_all
        check_mirror(theirs, ours, removes=removes)

        def admits(state: LogState) -> None:
            check_mirror(theirs, Side(ours.url, ours.id, state), removes=removes)

        try:
            self._hold = await hold(self.mirror, theirs, admits)
        except StoreFullError as error:
            log.error("%s; dropping the ballast to make room for a run", error)
            await reserve.drop(self.mirror)
            self._hold = await hold(self.mirror, theirs, admits)
        self._origin_id = theirs.id
        try:
            await reserve.on_full_disk(self.mirror, self._settle)
            await reserve.lay(self.mirror)
        except BaseException:
            await self.end()
            raise
        return True

    async def end(self) -> None:
        """Let go of the mirror. Raises nothing."""
        if self._hold is not None:
            held, self._hold = self._hold, None
            await held.release()

    async def _settle(self) -> None:
        """Finish what an earlier run left."""
        self._begun = await self._noted()
        await move_latest(self._our_log)
        await self.mirror.sweep()
        await abort_dead_uploads(self.mirror)

    async def _noted(self) -> tuple[str, ...]:
        try:
            found = decode(await self.mirror.get(MIRROR), Mirrored, MIRROR)
            return tuple(filter(is_attempt, found.begun))
        except NotFoundError:
            return ()
        except DamagedError as error:
            log.error("%s (at %s); what an earlier run has begun to copy stays there", error, self.mirror.url)
            return ()

    async def _note(self, begun: Collection[str]) -> None:
        """Note durably that objects of the attempts `begun` may be at the mirror before its log knows them."""
        noted = tuple(sorted({*(one for one in self._begun if may_be_held(self._our_log.state, one)), *begun}))
        if noted != self._begun:
            await self.mirror.put(MIRROR, encode(Mirrored(begun=noted, writer=writer())))
            self._begun = noted

    async def _begin_again(self) -> None:
        """Take a newer start, since the origin has one, or since the log of the mirror must be made again."""
        await self.end()
        await self.begin()

    # --- looking ----------------------------------------------------------------------------------------------------

    async def has_news(self) -> bool:
        """Whether the log of the origin has an entry that was not looked at yet: one listing, if there is none."""
        state = await self._their_log.look()
        return self._at != state.number or bool(self._their_log.fault)

    @property
    def seen(self) -> BothRoots:
        """Both roots as the last step saw them."""
        assert self._seen is not None, "step() comes first"
        return self._seen

    async def _see(self) -> BothRoots:
        """Both roots now, and what is to be done."""
        theirs, ours = await self._their_log.look(), await self._our_log.look()
        wanted = missing(theirs, ours)
        going: set[str] = set()
        if wanted:
            coming = [as_unread(view) for view in wanted if view.prefix not in self._tried]
            choice = choose([*ours.attempts.values(), *coming], self.config.rules, age_s=age_s)
            going = {prefix for prefix, _ in choice.going}
        # An origin of which not all can be read does not tell what it wants no more.
        begun = () if self._their_log.fault else [one for one in self._begun if may_be_held(ours, one)]
        agenda = planned(wanted, begun, going, everything=self.config.everything, tried=self._tried)
        self._seen = BothRoots(theirs, ours, wanted, agenda)
        return self._seen

    # --- one step ---------------------------------------------------------------------------------------------------

    async def step(self) -> int:
        """Copy all checkpoints that are due, apply the rules, and heal what is damaged. Returns how many were copied.

        Raises FencedError if the mirror has another holder, and StoreError if a storage fails; the next step goes on then.
        """
        copied, last = 0, None
        await self._check_origin()
        seen = await self._see()
        while True:
            newest = max((checkpoint.commit.order for checkpoint in seen.agenda.due), default=(0, 0))
            last = newest if last is None else last
            due = [checkpoint for checkpoint in seen.agenda.due if checkpoint.commit.order <= last]
            self._name(seen)
            if seen.agenda.leftovers:
                await self._give_up(seen.agenda.leftovers)
            if not due:
                # Checkpoints that came after the first look are for the next step. A root that is not there looks empty.
                self._at = None if seen.agenda.due else seen.theirs.number or None
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
        if not copied:
            await self._make_room(seen)
        if self.config.verify:
            await self._prove(newest_of(self._our_log.state))  # an earlier run may not have done so
        if await self._heal():
            await self._make_room(await self._see())  # what waited for something whole may go; reading takes long
        await self._follow_branches()
        await self._our_log.compact()
        return copied

    async def _check_origin(self) -> None:
        """See that the origin is there and is the same root, and that the start of this process names the newest of its."""
        theirs = await side_of(self.origin)
        if not theirs.id or not theirs.state.number:
            raise RootGoneError(f"{self.origin.url} shows nothing of its job any more: was it unmounted, or removed?")
        if theirs.id != self._origin_id:
            raise UsageError(
                f"{self.mirror.url} mirrors another root than the one that lies at {self.origin.url} now. {ANOTHER}"
            )
        await self._our_log.look()
        if self._our_log.fault or theirs.begin != self._held.start.origin_begin:
            await self._begin_again()

    async def _make_room(self, seen: BothRoots, *, is_full: bool = False) -> bool:
        """Apply the rules. `is_full`: what is damaged does not wait to be healed. Returns whether anything was removed."""
        return await reserve.on_full_disk(self.mirror, partial(self._retire, seen, is_full=is_full))

    async def _follow_branches(self) -> None:
        """Repeat how the origin was rolled back, and let `latest` follow."""
        records: list[Record] = [*branches.rollbacks(self._their_log.state, self._our_log.state)]
        if records:
            await self._held.check()
            await self._our_log.add(*records)
            await move_latest(self._our_log)
            await self._see()

    def try_again(self, *, everything: bool = False) -> None:
        """Try checkpoints again that could not be read or healed, or that the mirror or a record stood in the way of.
        `everything`: also what was found damaged.
        """
        lasting = () if everything else ("damaged", "blocked")  # all of it was read
        self._tried = {prefix: kind for prefix, kind in self._tried.items() if kind in ("damaged", "removed")}
        self._not_healed = {prefix: kind for prefix, kind in self._not_healed.items() if kind in lasting}
        self._unread.clear()

    @property
    def left(self) -> dict[str, Kind]:
        """The attempts of the origin that could not be copied, with the reason."""
        recorded: dict[str, Kind] = {} if self._seen is None else {one.prefix: "damaged" for one in self.seen.agenda.damaged}
        return self._tried | recorded

    @property
    def _held(self) -> Hold:
        assert self._hold is not None, "begin() comes first"
        return self._hold

    async def _copy(self, checkpoint: LoggedAttempt, seen: BothRoots, behind: int) -> bool:
        """Copy one checkpoint. Returns whether that was possible; the news says why not."""
        self._on_copy(checkpoint, nbytes_of(checkpoint), behind)
        copy = CheckpointCopy(self.origin, self.mirror, checkpoint, self._held, seen.ours, self._on_bytes, begins=self._note)
        try:
            amount = await copy.run()
        except LeftOut as left:
            self._tried[checkpoint.prefix] = left.why
            self._say(checkpoint, left.why, str(left))
            return False
        if checkpoint.may_be_latest:
            await move_latest(self._our_log)
        verdict = await read_back(self.mirror, checkpoint) if self.config.verify else None
        if verdict is None or not verdict.damage:  # what is damaged is healed, or named, once the others are copied
            verified = verdict is not None and verdict.whole
            self._tell(news_of(checkpoint, "mirrored", copied=amount.copied, found=amount.found, verified=verified))
        if verdict is not None:
            self._say_unread(checkpoint, verdict)
        return True

    async def _give_up(self, names: Collection[str]) -> None:
        """Let the attempts go that were begun and are not wanted any more."""
        await self._held.check()
        if refused := await self._our_log.add(*(HoldRecord(attempt=name) for name in names)):
            log.warning("what was copied of %s stays at %s for now: %s", ", ".join(names), self.mirror.url, refused)
            return
        self._is_swept = False
        log.info("%s: what was copied of it is removed at %s", ", ".join(names), self.mirror.url)

    # --- what is damaged at the mirror ------------------------------------------------------------------------------

    async def _heal(self) -> bool:
        """Copy again what is damaged at the mirror, oldest first, or say why not (MIRROR-8). Returns whether that was tried."""
        due = [one for one in damaged_of(self._our_log.state) if one.prefix not in self._not_healed]
        for one in due:
            says = f"a record at {self.mirror.url} says that it is damaged"
            try:
                await self._heal_one(one, self._their_log.state.attempts.get(one.prefix))
            except LeftOut as left:
                self._not_healed[one.prefix] = left.why
                self._say(one, "damaged-here", f"{says}, and {left}")
            except StoreFullError as error:
                self._not_healed[one.prefix] = "blocked"
                self._say(one, "damaged-here", f"{says}, and there is no room to copy it again: {error}")
        return bool(due)

    async def _heal_one(self, one: LoggedAttempt, there: LoggedAttempt | None) -> None:
        """Heal one checkpoint. Raises LeftOut if that is not possible."""
        state = await self._held.check()
        if state.attempts[one.prefix].status != "checkpoint":
            return  # the rules, or a person, have removed it since the look
        if there is None or there.status != "checkpoint":
            raise LeftOut("removed", f"{self.origin.url} does not have it any more")
        if there.damaged:
            raise LeftOut("damaged", f"so does one at {self.origin.url}")
        self._on_copy(there, nbytes_of(there), 0)
        copy = CheckpointCopy(self.origin, self.mirror, there, self._held, state, self._on_bytes, heals=True)
        amount = await copy.run()
        verdict = await read_back(self.mirror, there)
        if verdict.damage:
            raise LeftOut("blocked", f"it was copied again in vain: {verdict.damage[0].message}")
        if verdict.unreadable:
            raise LeftOut("unreadable", f"it was copied again, and cannot be read back now: {verdict.unreadable[0].message}")
        self._said.discard(_said("damaged-here", one.prefix))
        self._tell(news_of(there, "healed", copied=amount.copied, found=amount.found, verified=True))

    # --- the rules of the mirror ------------------------------------------------------------------------------------

    async def _retire(self, seen: BothRoots, *, is_full: bool) -> bool:
        """Remove what no rule keeps at the mirror, and leftovers (MIRROR-7). Returns whether anything was removed."""
        exports, ours, rules = None if is_full else self._exports, seen.ours, self.config.rules
        choice = await chosen_by(self.mirror, ours.attempts.values(), rules, exports=exports)
        if choice.surplus or (choice.going and not has_proof(ours, {prefix for prefix, _ in choice.going})):
            # Jobs read back what they save; here, only the newest that is to take the place of older ones is.
            await self._prove(next(iter(commits_of(ours.attempts.values())), None))
            ours = await self._our_log.look()
            choice = await chosen_by(self.mirror, ours.attempts.values(), rules, exports=exports)
        stays = spared(seen.agenda.due, seen.theirs)
        if not is_full:
            stays |= await self._to_be_healed(seen.theirs, ours)
        going = [dead for dead in choice.going if dead[0] not in stays]
        await self._held.check()
        gone = set(await retired(self.mirror, ours.attempts.values(), going, start=self._held.start.start) if going else ())
        freed = await self._swept() if gone or not self._is_swept else 0
        if retired_tags := tuple(ours.attempts[prefix].tag for prefix, _ in going if prefix in gone):
            self._tell(RemovalNews(retired=retired_tags, freed_bytes=freed))
        return bool(gone)

    async def _swept(self) -> int:
        """Remove the objects of removed attempts that nobody needs; returns the bytes that were freed."""
        failed: list[StoreError] = []
        removed = await sweep(self.mirror, failed=failed)
        if failed:
            raise failed[0]
        self._is_swept = True
        return sum(one.freed_bytes for one in removed)

    async def _to_be_healed(self, theirs: LogState, ours: LogState) -> set[str]:
        """The damaged checkpoints that may be healed yet, and that the rules would keep if they were whole."""
        there = {name for name, one in theirs.attempts.items() if one.status == "checkpoint" and name not in self._given_up}
        found = {one.prefix for one in damaged_of(ours)} & there
        if not found:
            return found
        healed = [as_unread(one) if one.prefix in found else one for one in commits_of(ours.attempts.values())]
        choice = choose(healed, self.config.rules, age_s=age_s)
        return found - {prefix for prefix, _ in choice.going}

    @property
    def _given_up(self) -> set[str]:
        """The damaged checkpoints of the mirror that the origin cannot heal."""
        return {prefix for prefix, kind in self._not_healed.items() if kind in ("damaged", "removed")}

    async def _prove(self, newest: LoggedAttempt | None) -> None:
        """Read a checkpoint back from the mirror, unless that was done or tried."""
        if newest is not None and newest.read_back == "no" and newest.prefix not in self._unread:
            self._say_unread(newest, await read_back(self.mirror, newest))

    # --- news -------------------------------------------------------------------------------------------------------

    def _name(self, seen: BothRoots) -> None:
        """Tell of checkpoints that are not copied, each once."""
        for checkpoint in seen.agenda.left_out:
            if checkpoint.commit.order > reached(seen.ours):  # else a run has said so
                self._say(checkpoint, "left-out", "the rules of the mirror would remove it again")
        for checkpoint in seen.agenda.damaged:
            self._say(checkpoint, "damaged", f"a record at {self.origin.url} says that it is damaged")

    def _say(self, checkpoint: LoggedAttempt, kind: Kind, why: str) -> None:
        if _said(kind, checkpoint.prefix) not in self._said:
            self._said.add(_said(kind, checkpoint.prefix))
            self._tell(news_of(checkpoint, kind, why=why))

    def _say_unread(self, checkpoint: LoggedAttempt, verdict: CheckpointVerdict) -> None:
        """Tell of a checkpoint that could not be read back. That proves no damage."""
        if verdict.unreadable and not verdict.damage:
            self._unread.add(checkpoint.prefix)
            why = verdict.unreadable[0].message
            self._say(checkpoint, "unreadable", f"it cannot be read back at {self.mirror.url} now: {why}")


def _said(kind: Kind, prefix: str) -> str:
    return f"{kind} {prefix}"


async def run_once(mirroring: Mirroring, news: list[News]) -> MirrorReport:
    """One run: begin, copy what is due, end. `news`: the list to which the mirroring tells its news."""
    if not await mirroring.begin():
        raise NotFoundError(f"{mirroring.origin.url} is not a root: no job has begun there")
    try:
        await mirroring.step()
        latest = await root_view.readable_latest(mirroring.mirror)
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
