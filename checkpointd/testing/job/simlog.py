"""The log of a simulated job's root as the effects on its storage show it, and what it allows others to do.

It follows the entries that count, checks each with the table of `commit/log.py`, and notes by itself what they decide, so that
a fault in the table shows, too.

  log-valid     Each entry has the number and the nonce that follow, and records that the table allows there. It is put only
                when the entry before it is durable (LOG-1, LOG-3, LOG-5). Nothing replaces an entry or a state, and an old
                number is used again only below the states.
  one-decision  An attempt is announced once and decided once. A newer start decides all attempts that it does not spare, and
                nothing is left undecided that an older start has left (LOG-7, LOG-8).
  named-durable The ballot and the joint plan of a commit are durable before it, and so is all that the votes in the ballot
                name. All of these votes are yes (LOG-9).
  removed-newer A person removes all but the newest checkpoint that asked for `latest`. Rules remove a checkpoint only if a
                newer one stays, and one that stays was read back whole.
  states-tell   A state says what the entries up to its number say (LOG-6).
  covered       An entry or state goes only if STATES_KEPT newer states are durable, and no state before the entry is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from checkpointd.commit.branches import newest_of
from checkpointd.commit.log import check, following
from checkpointd.commit.log_access import STATES_KEPT
from checkpointd.errors import DamagedError
from checkpointd.layout.ballot import BallotTable, table_bytes
from checkpointd.layout.keys import LOG, LOG_ROOT, object_key, vote_rank
from checkpointd.layout.log_records import (
    AbortRecord,
    AnnounceRecord,
    AttemptStatus,
    BeginRecord,
    CommitRecord,
    LogEntry,
    LogListing,
    LogState,
    Record,
    RemoveRecord,
    decode_entry,
    encode_state,
    entry_key,
    state_key,
)
from checkpointd.layout.manifest import Vote, decode
from checkpointd.pipeline.gc.collect import DELETED_BY_NAME, DELETED_WITH_TAG
from checkpointd.pipeline.root.ballots import ballot_key, joint_plan_key
from checkpointd.testing.job.simroot import ObjectChange, SimRoot

ANY_SIZE = -1


class InvariantError(AssertionError):
    """A run broke the invariant `name`."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name = name


class Fate(NamedTuple):
    """The status of an attempt since entry `number`."""

    status: AttemptStatus
    number: int


@dataclass(slots=True)
class LogWatch:
    """The log at `root`. `retires`: whether newer checkpoints of other tags may lead to removals, too."""

    root: SimRoot
    retires: bool = False
    state: LogState = field(default_factory=LogState)
    """After the last entry that counts, durable or not."""
    put: tuple[Record, ...] = ()
    """The records of the entry that the last effect put."""
    relied_on: int = 0
    """The number of the newest entry on which somebody has acted or reported."""
    entries_max: int = 0
    """The most entries that were there at once."""
    late: int = 0
    """The entries that came late, under numbers that were used before."""
    _entries: list[LogEntry] = field(default_factory=list)
    _states: dict[int, LogState] = field(default_factory=dict)
    """After each entry."""
    _fates: dict[str, Fate] = field(default_factory=dict)
    """By `<tag>/<attempt>`: of all attempts that were ever announced."""
    _begins: dict[int, int] = field(default_factory=dict)
    """The number of the entry in which each start began."""
    _named: dict[str, dict[str, int]] = field(default_factory=dict)
    """The keys of all objects of each attempt that was a checkpoint, with their sizes, by `<tag>/<attempt>`."""

    # --- what others may rely on ----------------------------------------------------------------------------------

    def fate(self, attempt: str) -> Fate | None:
        """What the log says of `attempt` (`<tag>/<attempt>`), durable or not; None if it was not announced."""
        return self._fates.get(attempt)

    def count(self, status: AttemptStatus) -> int:
        """How many attempts have this status, also those that the log has forgotten."""
        return sum(known.status == status for known in self._fates.values())

    def is_undecided(self, attempt: str) -> bool:
        known = self._fates.get(attempt)
        return known is not None and known.status == "undecided"

    def is_durable(self, number: int) -> bool:
        """Whether no power cut takes back what entry `number` says."""
        listing = self._durable()
        return number in listing.entries or number <= listing.covered

    def durable_fate(self, attempt: str) -> Fate | None:
        """What the log durably says of `attempt`."""
        known = self._fates.get(attempt)
        while known is not None and not self.is_durable(known.number):
            known = self._fate_before(attempt, known.number)
        return known

    def had_checkpoint_of(self, tag: str) -> bool:
        """Whether the log durably had a checkpoint of `tag` at some time."""
        of = [name for name, known in self._fates.items() if name.rpartition("/")[0] == tag]
        return any(name in self._named and self.is_durable(self._decided_at(name)) for name in of)

    def rely_on(self, attempt: str, status: AttemptStatus, who: str) -> None:
        """`who` acts or reports that `attempt` is a checkpoint, or aborted: this must be so, durably."""
        known = self._fates.get(attempt)
        is_so = known is not None and (known.status == status or (known.status, status) == ("removed", "checkpoint"))
        if known is None or not is_so:
            raise InvariantError("one-decision", f"{who} takes {attempt} for {status}; in the log it is {known}")
        decided = self._decided_at(attempt)
        if not self.is_durable(decided):
            raise InvariantError("durable", f"{who} takes {attempt} for {status}, and entry {decided} is not durable")
        self.relied_on = max(self.relied_on, decided)

    def rely_on_start(self, start: int, who: str) -> None:
        """`who` goes on in `start`, which must have begun, durably."""
        number = self._begins.get(start)
        if number is None or not self.is_durable(number):
            raise InvariantError("durable", f"{who} goes on in start {start}, and it has not begun durably")
        self.relied_on = max(self.relied_on, number)

    # --- changes ----------------------------------------------------------------------------------------------------

    def changed(self, change: ObjectChange) -> None:
        """Take a change of an object in the log."""
        process, what, key = change
        listing = LogListing.of([key.removeprefix(f"{LOG}/")])
        if what in ("replaced", "written", "begun"):
            raise InvariantError("log-valid", f"{process}: {key} was {what}")
        if what == "made" and listing.entries:
            self._entry_put(listing.entries[0], process)
        elif what == "made" and listing.states:
            self._state_put(listing.states[0], process)
        elif what == "removed":
            self._removed(key, listing, process)

    def _entry_put(self, number: int, process: str) -> None:
        entry = decode_entry(self.root.visible(entry_key(number)) or b"", number)
        if number <= self.state.number and number <= self._visible().covered:
            self.late += 1  # it counts for nobody
            return
        if (number, entry.before) != (self.state.number + 1, self.state.nonce):
            raise InvariantError("log-valid", f"{process} put entry {number}, which does not follow {self.state.number}")
        if number > 1 and not self.is_durable(number - 1):
            raise InvariantError("log-valid", f"{process} put entry {number}, and entry {number - 1} is not durable")
        for record, before in self._one_by_one(entry):
            if refused := check(before, record):
                raise InvariantError("log-valid", f"{process} put entry {number}, but {refused}: {record}")
            if isinstance(record, CommitRecord):
                self._named[record.attempt] = self._named_by(record, process)
            if isinstance(record, RemoveRecord):
                self._check_removal(before, record, process)
        self._take(entry)
        self.put, self.entries_max = entry.records, max(self.entries_max, len(self._visible().entries))
        undecided = [one.prefix for one in self.state.attempts.values() if one.status == "undecided"]
        newest = max(
            (one for one in self.state.attempts.values() if one.may_be_latest), key=lambda one: one.order, default=None
        )
        if newest_of(self.state) != newest:
            raise InvariantError("log-valid", f"after entry {number}, the heads do not tell that {newest} is the newest")
        if undecided != [name for name, known in self._fates.items() if known.status == "undecided"]:
            raise InvariantError("one-decision", f"after entry {number}, other attempts are undecided than {undecided}")

    def _one_by_one(self, entry: LogEntry) -> Iterator[tuple[Record, LogState]]:
        """The records of `entry`, each with the state before it."""
        for at, record in enumerate(entry.records):
            yield record, following(self.state, [_part(entry, at)])

    def _take(self, entry: LogEntry) -> None:
        self._entries.append(entry)
        for record in entry.records:
            self._note(record, entry.number)
        self.state = self._states[entry.number] = following(self.state, [entry])

    def _note(self, record: Record, number: int) -> None:
        match record:
            case BeginRecord():
                self._begins[record.start] = number
                fenced = [n for n, one in self._fates.items() if one.status == "undecided" and n not in record.spared]
                self._fates.update(dict.fromkeys(fenced, Fate("aborted", number)))
            case AnnounceRecord():
                if record.attempt in self._fates:
                    raise InvariantError("one-decision", f"{record.attempt} is announced again in entry {number}")
                self._fates[record.attempt] = Fate("undecided", number)
            case CommitRecord():
                self._step(record.attempt, "undecided", "checkpoint", number)
            case AbortRecord():
                self._step(record.attempt, "undecided", "aborted", number)
            case RemoveRecord():
                for name in record.attempts:
                    self._step(name, "checkpoint", "removed", number)

    def _step(self, attempt: str, before: AttemptStatus, after: AttemptStatus, number: int) -> None:
        known = self._fates.get(attempt)
        if known is None or known.status != before:
            raise InvariantError("one-decision", f"entry {number} makes {attempt} {after}, which is {known}")
        self._fates[attempt] = Fate(after, number)

    def _check_removal(self, before: LogState, record: RemoveRecord, process: str) -> None:
        staying = [one for one in before.attempts.values() if one.status == "checkpoint" and one.prefix not in record.attempts]
        newest, is_person = newest_of(before), record.reason in (DELETED_BY_NAME, DELETED_WITH_TAG)
        for name in record.attempts:
            going = before.attempts[name]
            alike = [one for one in staying if self.retires or one.tag == going.tag]
            if going == newest if is_person else not any(one.order > going.order for one in alike):
                raise InvariantError("removed-newer", f"{process} removed {name}, and nothing newer replaced it")
        if not is_person and not any(one.verified and not one.damaged for one in staying):
            raise InvariantError("removed-newer", f"{process} removed {record.attempts}, and nothing that stays is verified")

    def _named_by(self, commit: CommitRecord, process: str) -> dict[str, int]:
        """All objects that `commit` names, with the votes in its ballot; they must be durable."""
        ballot, plan = ballot_key(commit), joint_plan_key(commit)
        data = self.root.durable(ballot)
        if data is None or len(data) != commit.ballot.size:
            raise InvariantError("named-durable", f"{process} committed {commit.attempt}, and {ballot} is not durable")
        found = {ballot: len(data)} | ({plan: commit.plan.size} if commit.plan is not None else {})
        for vote in _votes_in(data, commit):
            if vote is None or vote.vote != "yes":
                raise InvariantError("named-durable", f"{process} committed {commit.attempt} with the vote {vote}")
            found |= objects_named_by(vote)
        for key, size in found.items():
            there = self.root.durable(key)
            if there is None or size not in (ANY_SIZE, len(there)):
                raise InvariantError("named-durable", f"{process} committed {commit.attempt}, and {key} is not durable")
        return found

    def _state_put(self, number: int, process: str) -> None:
        known = self._states.get(number)
        if known is None or encode_state(known) != self.root.visible(state_key(number)):
            raise InvariantError("states-tell", f"{process} put state {number}, which does not say what the entries say")

    def _removed(self, key: str, of: LogListing, process: str) -> None:
        visible, durable = self._visible(), self._durable()
        for number in (*of.entries, *of.states):
            newer = [one for one in durable.states if one > number or (of.entries and one == number)]
            left = [one for one in visible.states if one < number] if of.entries else []
            if left or len(newer) < STATES_KEPT:
                raise InvariantError("covered", f"{process} removed {key}; there are the states {visible.states}")
        if key == LOG_ROOT:
            raise InvariantError("covered", f"{process} removed {key}")

    # --- objects of attempts -----------------------------------------------------------------------------------------

    def why_stays(self, key: str, attempt: str) -> str:
        """Why the object `key` of `attempt` must not be removed or changed; empty if it may."""
        for one in self.state.attempts.values():
            if one.status == "checkpoint" and one.prefix != attempt and key in self._named.get(one.prefix, ()):
                return f"the checkpoint {one.prefix} refers to it"
            if one.status == "undecided" and one.base and key in self._named.get(one.base, ()):
                return f"{one.prefix} is undecided, and its base {one.base} needs it"
        known = self.durable_fate(attempt)
        if known is None or known.status == "undecided":
            named = self.fate(attempt) is not None and key in self._voted(attempt)
            return f"{attempt} is not durably decided, and a vote names it" if named else ""
        return f"{attempt} is a checkpoint" if known.status == "checkpoint" and key in self._named[attempt] else ""

    def _voted(self, attempt: str) -> dict[str, int]:
        """The votes of `attempt` that are there, and the objects that those with a yes name."""
        found: dict[str, int] = {}
        for vote, key in self.votes(attempt):
            found |= {key: ANY_SIZE} | (objects_named_by(vote) if vote.vote == "yes" else {})
        return found

    def votes(self, attempt: str) -> Iterator[tuple[Vote, str]]:
        """The votes of `attempt` that can be seen, with their keys."""
        for group in ("", *(name for name in self.root.names(attempt) if name.isdigit())):
            folder = f"{attempt}/{group}" if group else attempt
            for name in self.root.names(folder):
                data = self.root.visible(f"{folder}/{name}") if vote_rank(name) is not None else None
                try:
                    if data is not None:
                        yield decode(data, Vote, name), f"{folder}/{name}"
                except DamagedError:
                    continue

    # --- power cuts -------------------------------------------------------------------------------------------------

    def after_power_cut(self) -> None:
        """Go on from what the storage still holds, which must be all that anybody has relied on."""
        visible, last = self._visible(), 0
        for number in visible.states:
            if number in self._states and self.root.visible(state_key(number)) == encode_state(self._states[number]):
                last = max(last, number)
        while last + 1 in visible.entries and last < len(self._entries):
            entry = decode_entry(self.root.visible(entry_key(last + 1)) or b"", last + 1)
            if entry.nonce != self._entries[last].nonce:
                break
            last += 1
        if last < self.relied_on:
            raise InvariantError("durable", f"the log came back up to entry {last}; entry {self.relied_on} was relied on")
        if visible.last > last:
            raise InvariantError("durable", f"the log came back up to entry {last}, and has {visible.last} all the same")
        self._back_to(last)

    def _back_to(self, number: int) -> None:
        entries = self._entries[:number]
        self._entries, self._fates, self._begins = [], {}, {}
        self._states.clear()
        self.state = LogState()
        for entry in entries:
            self._take(entry)

    def _fate_before(self, attempt: str, number: int) -> Fate | None:
        """Of an attempt, before the entry `number`."""
        known = self._states[number - 1].attempts.get(attempt) if number > 1 else None
        if known is None:
            return None
        first = next(
            n for n in range(1, number) if (one := self._states[n].attempts.get(attempt)) and one.status == known.status
        )
        return Fate(known.status, first)

    def _decided_at(self, attempt: str) -> int:
        """The number of the entry that decided `attempt`."""
        known = self._fates[attempt]
        before = self._fate_before(attempt, known.number) if known.status == "removed" else None
        return known.number if before is None else before.number

    def _visible(self) -> LogListing:
        return LogListing.of(self.root.names(LOG))

    def _durable(self) -> LogListing:
        return LogListing.of(self.root.durable_names(LOG))


def _part(entry: LogEntry, count: int) -> LogEntry:
    """`entry` with its first `count` records."""
    return LogEntry(number=entry.number, nonce=entry.nonce, before=entry.before, records=entry.records[:count])


def _votes_in(ballot: bytes, commit: CommitRecord) -> Iterator[Vote | None]:
    """The votes that `commit` counts; None for one that is none."""
    key, ranks = ballot_key(commit), commit.world_size
    table = BallotTable.of(memoryview(ballot)[: table_bytes(ranks)], ranks, commit.ballot, key)
    for rank in range(ranks):
        try:
            yield table.vote(rank, ballot[table.starts[rank] : table.starts[rank + 1]], commit.attempt, key)
        except DamagedError:
            yield None


def objects_named_by(vote: Vote) -> dict[str, int]:
    """The keys of the objects that a yes names, with their sizes, or ANY_SIZE."""
    found = {ref.key(vote.prefix): ref.size for ref in vote.objects} | dict.fromkeys(vote.refers, ANY_SIZE)
    if vote.index is not None:
        found[object_key(vote.prefix, vote.index.name)] = vote.index.size
    return found
