"""A world: a root and the processes that work at it, and all steps that can be next. One step is one operation of the store.

Faults
  stop      A process may stop between any two steps for as long as it likes: that is what an order of steps is. For safety
            this is the same as a crash. Scopes that look at liveness have crashes of their own.
  reply     The reply to a put may be lost: the put had its effect, or has it later, or never (`late` puts).
  stale     A list or a get may miss the last K changes of the log's directory, as on an NFS client, but not a change before
            the process's own newest put.
  cut       A power cut undoes any set of changes of the directory that nobody has synced. It ends all processes but one.
  damage    Entries and states that are unreadable from the start.

A world is a tuple of integers: the directory, the truth, the objects, the rest, and each process.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from checkpointd.commit.log import for_followers
from checkpointd.commit.log_access import Compaction, KnownLog, LogAccess, Settle
from checkpointd.layout.log_records import LogEntry, LogState
from tests.model.checked import Checked
from tests.model.numbered import CRASHES, DEAD, FIRST, SYNCED, Rest, World
from tests.model.programs import GIVES_UP, NO_REPLY, Local, Op, Operation
from tests.model.promises import NAMES, Facts, Ghost, Violation
from tests.model.store import BAD, NONE, Directory

FRESH_OWN = True
"""Whether a list shows all that was there at the process's own newest put. It does on every store that `doctor` lets pass."""


class Worlds(Checked):
    """The worlds of one scope. What the real code does is computed once for each process and reply."""

    # --- the start ----------------------------------------------------------------------------------------------------

    def start(self) -> World:
        scope, store = self.scope, self.store
        log = [NONE] * (scope.last + 2)
        states: dict[int, int] = {}
        known: dict[int, LogState] = {}
        if scope.state is None:
            ghost, after = Ghost(0, 0, 0), store.state(LogState())
            truth, begin = [ghost], 0
        else:
            after = store.state(scope.state)
            states[FIRST] = after
            ghost = begun(scope.state)
            truth, begin = [Ghost(0, 0, 0), ghost], FIRST
        known[begin] = store.canonical(store.states[after] or LogState())
        for entry in scope.log:
            log[entry.number] = store.entry(entry)
            after = store.after(after, log[entry.number])
            found = store.states[after]
            assert found is not None
            known[entry.number] = found
            truth.append(truth[-1].after(entry))
            if entry.number in scope.states:
                states[entry.number] = after
        for name in scope.damaged:
            what, number = name.split()
            if what == "entry":
                log[int(number)] = BAD
            else:
                states[int(number)] = BAD
        directory = store.directory(Directory(tuple(log), tuple(sorted(states.items()))))
        shown = (store.listing_of[directory],) if scope.stale else ()
        rest = Rest(lost=scope.lost, shown=shown, lags=(0,) * len(scope.programs) if scope.stale else ())
        procs = []
        for pid, program in enumerate(scope.programs):
            state = LogState() if program.known is None else known[program.known]
            if program.thin:
                state = for_followers(state)
            local, _ = program.enter(Local(0, KnownLog(state, is_whole=not program.thin)), 0)
            procs.append(self.local(pid, local))
        return (directory, self.truth(tuple(truth)), scope.objects, self.rest(rest), *procs)

    # --- steps --------------------------------------------------------------------------------------------------------

    def steps(self, world: World) -> Iterator[tuple[int, object, World]]:
        """The worlds that can be next, each with the process that moves, and with what it does or is told."""
        rest = world[3]
        later: list[tuple[int, object, World]] = []
        for pid in range(len(self.programs)):
            number = world[4 + pid]
            if number > DEAD:
                for step in self._moves(world, pid, number):
                    if self._is_alone(world, number, step[1]):
                        yield step
                        return
                    later.append(step)
        yield from later
        if self.scope.crash:
            for pid, number in enumerate(world[4:]):
                if number > DEAD:
                    yield pid, CRASHES, (*world[: 4 + pid], DEAD, *world[5 + pid :])
        if self.rests[rest].flight:
            yield from self._arrivals(world)
        if self.scope.power and any(world[4 + pid] > DEAD for pid in self.scope.dies):
            yield from self._cuts(world)

    def _is_alone(self, world: World, number: int, what: object) -> bool:
        """Whether the step cannot be changed by any other, now or later, and changes nothing that others see. It may then be
        taken before all others: every order comes to the same. That holds where an entry stays once it is there.
        """
        if self.scope.shrinks or self.scope.stale:
            return False
        operation = self.operations[number]
        assert operation is not None
        match operation.op, what:
            case Op.ENTRIES, (_, _, int(entry)):
                return entry != NONE
            case Op.PUT, ("put", False):
                return True
        return False

    def _moves(self, world: World, pid: int, number: int) -> Iterator[tuple[int, object, World]]:
        operation = self.operations[number]
        assert operation is not None
        directory, objects = world[0], world[2]
        there = self.store.directories[directory]
        match operation.op:
            case Op.LIST:
                for listing in self._listings(world, pid):
                    yield self._go(world, pid, number, ("list", listing))
            case Op.ENTRIES:
                yield from self._entries(world, pid, number, operation)
            case Op.WAIT:
                for entry in self._gets(world, pid, operation.number):
                    if entry != NONE:
                        yield self._go(world, pid, number, ("entry", operation.number, entry))
                is_behind = any(self.store.listings[one].covered >= operation.number for one in self._listings(world, pid))
                if is_behind and (there.log[operation.number] == NONE or self.scope.stale):
                    yield self._go(world, pid, number, ("behind",))
            case Op.STATE:
                for state in self._states(world, pid, operation.number):
                    yield self._go(world, pid, number, ("state", state))
            case Op.PUT:
                yield from self._put(world, pid, number, operation)
            case Op.PUT_STATE:
                assert isinstance(operation.value, LogState)
                if there.has_state(operation.number):
                    yield self._go(world, pid, number, ("there",))
                else:
                    state = self.store.state(operation.value)
                    after = self._changed(world, pid, "state", operation.number, state)
                    yield self._answered(after, pid, number, ("done",))
            case Op.MARK:
                after = world
                if operation.number not in there.marks:
                    marked = there._replace(marks=tuple(sorted((*there.marks, operation.number))))
                    after = (self.store.directory(marked), *world[1:])
                yield self._go(after, pid, number, ("done",))
            case Op.SETTLE:
                yield self._go(self._synced(world), pid, number, ("done",))
            case Op.SYNC:
                one = self.locals[number]
                assert one is not None
                yield self._go(self._synced(world), pid, number, (SYNCED,))
            case Op.REMOVE_STATES | Op.REMOVE_ENTRIES:
                yield from self._removals(world, pid, number, operation)
            case _:
                yield from self._with_objects(world, pid, number, operation, objects)
        if operation.late:
            yield self._go(world, pid, number, GIVES_UP)

    def _with_objects(self, world: World, pid: int, number: int, operation: Operation, objects: int) -> Any:
        match operation.op:
            case Op.STORE:
                yield self._go(self._with(world, objects | operation.number), pid, number, ("done",))
            case Op.VOTES:
                if objects & operation.number == operation.number:
                    yield self._go(world, pid, number, ("done",))
            case Op.CHOOSE:
                assert callable(operation.value)
                for label, choice in operation.value(objects).items():
                    yield self._go(world, pid, number, ("choose", choice, label))
            case Op.SWEEP:
                what = objects & operation.number
                if not what:
                    yield self._go(world, pid, number, ("left", 0))
                else:
                    one = what & -what
                    yield self._go(self._with(world, objects & ~one), pid, number, ("left", what & ~one))
            case Op.READ:
                yield self._go(world, pid, number, ("found", bool(objects & operation.number)))
            case Op.AFTER_CUT:
                if not any(world[4 + one] > DEAD for one in self.scope.dies):
                    yield self._go(world, pid, number, ("done",))

    # --- replies ------------------------------------------------------------------------------------------------------

    def _go(self, world: World, pid: int, number: int, reply: object) -> tuple[int, object, World]:
        """Process `pid` gets a reply. Raises Violation if what it then does or believes breaks a promise."""
        known = self.moves[number]
        if (move := known.get(reply)) is None:
            move = known[reply] = self._move(pid, number, reply)
        after, facts = move
        if facts:
            world = self._checked_facts(world, facts)
        return pid, reply, (*world[: 4 + pid], after, *world[5 + pid :])

    def _move(self, pid: int, number: int, reply: object) -> tuple[int, int]:
        one = self.locals[number]
        assert one is not None
        local, program = one[1], self.programs[pid]
        match reply:
            case ("list", int(listing)):
                told: object = self.store.listings[listing]
            case ("entry", int(wanted), int(entry)):
                operation = self.operations[number]
                assert operation is not None
                numbers = operation.value if isinstance(operation.value, tuple) else (wanted,)
                parts = list(local.partial or (None,) * len(numbers))
                parts[numbers.index(wanted)] = self.store.got_entry(entry)
                if None in parts:
                    return self.local(pid, local._replace(partial=tuple(parts))), 0
                told, local = tuple(parts), local._replace(partial=())
            case ("behind",):
                told = None
            case ("state", int(state)):
                told = self.store.got_state(state)
            case ("put", bool(is_put)):
                told = is_put
            case ("removed", int(which)):
                operation = self.operations[number]
                assert operation is not None
                assert isinstance(operation.value, tuple)
                left = tuple(one for one in operation.value if one != which)
                if left:
                    return self.local(pid, local._replace(partial=left)), 0
                told, local = True, local._replace(partial=())
            case ("choose", int(choice), _):
                told = choice
            case ("left", int(left_over)):
                told = left_over
            case ("found", bool(is_found)):
                told = is_found
            case ("unsynced", answer):
                return self.local(pid, local._replace(unsynced=1 + bool(answer))), 0
            case (-1,):
                told, local = local.unsynced == 2, local._replace(unsynced=0)
            case ("unsure",):
                told = NO_REPLY
            case _:
                told = reply if reply == GIVES_UP else True
        after, facts = program.after(local, told)
        while (
            not self.scope.power
            and isinstance(after.machine, LogAccess | Compaction)
            and isinstance(after.machine.request, Settle)
        ):
            after, more = program.after(after, True)  # where no power cut comes, all that is visible is durable
            facts += more
        return self.local(pid, after), self.fact(facts)

    def _answered(self, world: World, pid: int, number: int, reply: tuple[object, ...]) -> tuple[int, object, World]:
        """The reply to a put, which comes once it is durable."""
        if self.scope.power:
            return self._go(world, pid, number, ("unsynced", True))
        return self._go(world, pid, number, reply)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _listings(self, world: World, pid: int) -> list[int]:
        if not self.scope.stale:
            return [self.store.listing_of[world[0]]]
        rest = self.rests[world[3]]
        return list(dict.fromkeys(rest.shown[len(rest.shown) - 1 - min(rest.lags[pid], len(rest.shown) - 1) :]))

    def _gets(self, world: World, pid: int, number: int) -> list[int]:
        there = self.store.directories[world[0]].log
        entry = there[number] if number < len(there) else NONE
        if entry and self.scope.stale:
            listings = (self.store.listings[one] for one in self._listings(world, pid))
            if any(number not in one.entries for one in listings):
                return [entry, NONE]
        return [entry]

    def _states(self, world: World, pid: int, number: int) -> list[int]:
        state = dict(self.store.directories[world[0]].states).get(number, NONE)
        if state and self.scope.stale:
            listings = (self.store.listings[one] for one in self._listings(world, pid))
            if any(number not in one.states for one in listings):
                return [state, NONE]
        return [state]

    def _entries(self, world: World, pid: int, number: int, operation: Operation) -> Iterator[tuple[int, object, World]]:
        """Single gets of a batch, in any order."""
        one = self.locals[number]
        assert one is not None
        assert isinstance(operation.value, tuple)
        parts = one[1].partial or (None,) * len(operation.value)
        for wanted, part in zip(operation.value, parts, strict=True):
            if part is None:
                for entry in self._gets(world, pid, wanted):
                    yield self._go(world, pid, number, ("entry", wanted, entry))

    # --- changes ------------------------------------------------------------------------------------------------------

    def _with(self, world: World, objects: int) -> World:
        after = (world[0], world[1], objects, *world[3:])
        self._check_stored(after)
        return after

    def _put(self, world: World, pid: int, number: int, operation: Operation) -> Iterator[tuple[int, object, World]]:
        assert isinstance(operation.value, LogEntry)
        at, directory = operation.number, self.store.directories[world[0]]
        assert at <= self.scope.last, f"the scope {self.scope.name} needs more entries"
        entry, taken = self.store.entry(operation.value), directory.log[at] != NONE
        if taken:
            yield self._go(world, pid, number, ("put", False))
            if not self.scope.shrinks:
                return  # a lost reply comes to the same
        else:
            yield self._answered(self._changed(world, pid, "entry", at, entry), pid, number, ("put", True))
        rest = self.rests[world[3]]
        if rest.lost:
            less = (*world[:3], self.rest(rest._replace(lost=rest.lost - 1)), *world[4:])
            if not taken:
                yield self._go(self._changed(less, pid, "entry", at, entry), pid, number, ("unsure",))
            if self.scope.late and not (taken and not self.scope.shrinks):
                flight = tuple(sorted((*rest.flight, (at, entry))))
                less = (*world[:3], self.rest(rest._replace(lost=rest.lost - 1, flight=flight)), *world[4:])
            yield self._go(less, pid, number, ("unsure",))

    def _arrivals(self, world: World) -> Iterator[tuple[int, object, World]]:
        rest, directory = self.rests[world[3]], self.store.directories[world[0]]
        for one in rest.flight:
            left = list(rest.flight)
            left.remove(one)
            after = (*world[:3], self.rest(rest._replace(flight=tuple(left))), *world[4:])
            if directory.log[one[0]] == NONE:
                after = self._changed(after, -1, "entry", *one)
            yield -1, ("arrives", *one), after

    def _removals(self, world: World, pid: int, number: int, operation: Operation) -> Iterator[tuple[int, object, World]]:
        """Single removals of a batch, in any order."""
        assert isinstance(operation.value, tuple)
        what = "state" if operation.op is Op.REMOVE_STATES else "entry"
        directory = self.store.directories[world[0]]
        there = [
            one for one in operation.value if (directory.has_state(one) if what == "state" else directory.log[one] != NONE)
        ]
        gone = [one for one in operation.value if one not in there]
        if gone:
            yield self._go(world, pid, number, ("removed", gone[0]))
            return
        if not operation.value:
            yield self._go(world, pid, number, ("done",))
        for one in there:
            yield self._go(self._changed(world, pid, what, one, NONE), pid, number, ("removed", one))

    def _changed(self, world: World, pid: int, what: str, number: int, value: int) -> World:
        """After an entry or a state was put or removed (NONE)."""
        before = self.store.directories[world[0]]
        was = before.log[number] if what == "entry" else dict(before.states).get(number, NONE)
        truth = world[1]
        if what == "entry":
            after = before.with_entry(number, value)
            if value != NONE:
                truth = self._grown(world, number, value)
        else:
            after = before.with_state(number, value) if value != NONE else before.without_state(number)
            if value != NONE and number in before.marks:
                truth = self._rebuilt(world, number, value)
        directory, rest = self.store.directory(after), self.rests[world[3]]
        if self.scope.stale:
            shown = (*rest.shown, self.store.listing_of[directory])[-self.scope.stale - 1 :]
            lags = [min(lag + 1, self.scope.stale) for lag in rest.lags]
            if value != NONE and pid >= 0 and FRESH_OWN:
                lags[pid] = 0
            rest = rest._replace(shown=shown, lags=tuple(lags))
        if self.scope.power:
            loose = [one for one in rest.loose if one[:2] != (what, number)]
            rest = rest._replace(loose=tuple(sorted((*loose, (what, number, was)))))
        if rest.flight and not self.scope.shrinks:  # a put that comes too late does nothing
            rest = rest._replace(flight=tuple(one for one in rest.flight if one[0] != number))
        changed = (directory, truth, world[2], self.rest(rest), *world[4:])
        self._check_stored(changed)
        return changed

    def _grown(self, world: World, number: int, entry: int) -> int:
        """An entry takes a free number. What truly follows the history becomes part of it."""
        key = world[0], world[1], number, entry
        if key not in self._puts:
            truth, directory = self.truths[world[1]], self.store.directories[world[0]]
            is_closed = any(mark >= number for mark in directory.marks)
            grown = truth
            if number == len(truth) and not is_closed:
                found = self.store.entries[entry]
                assert found is not None
                grown = (*truth, truth[-1].after(found))
            elif number > len(truth) and not is_closed:
                raise Violation("f", f"entry {number} leaves a gap after {len(truth) - 1}")
            self._puts[key] = self.truth(grown), 0
        grown_to = self._puts[key][0]
        rest = self.rests[world[3]]
        if rest.aborts_said & self.truths[grown_to][-1].commits and not self.scope.damaged:
            raise Violation("a", "an attempt commits whose abort was reported")
        return grown_to

    def _rebuilt(self, world: World, number: int, state: int) -> int:
        """The state of a rebuild is the truth from then on. It may revive what was aborted, but loses no commit."""
        said, truth = self.said(state), self.truths[world[1]]
        ghost, found = truth[-1], self.store.states[state]
        assert found is not None
        if self.rests[world[3]].commits_said & ~(said.live | said.removed):
            raise Violation("d", "a commit that was reported is lost by the rebuild")
        begins = (*ghost.begins, *(one for one in starts_in(found) if one not in ghost.begins))
        made = ghost._replace(
            start=said.start,
            announced=said.known,
            commits=said.live | said.removed,
            aborts=said.aborted,
            fenced=0,
            removed=said.removed,
            begins=begins,
            spared=0,
        )
        return self.truth((*truth, *[made] * (number + 1 - len(truth))))

    def _synced(self, world: World) -> World:
        rest = self.rests[world[3]]
        return (*world[:3], self.rest(rest._replace(loose=())), *world[4:]) if rest.loose else world

    def _cuts(self, world: World) -> Iterator[tuple[int, object, World]]:
        """The power goes: any of the changes that are not durable may be undone, and most processes end."""
        rest, directory, truth = self.rests[world[3]], self.store.directories[world[0]], self.truths[world[1]]
        procs = [DEAD if pid in self.scope.dies and one > DEAD else one for pid, one in enumerate(world[4:])]
        for count in range(len(rest.loose) + 1):
            for undone in combinations(rest.loose, count):
                after = directory
                for what, number, was in undone:
                    if what == "entry":
                        after = after.with_entry(number, was)
                    else:
                        after = after.with_state(number, was) if was != NONE else after.without_state(number)
                covered = max((number for number, _ in after.states), default=0)
                created = [number for what, number, was in undone if what == "entry" and was == NONE and number > covered]
                first = min(created, default=len(after.log))
                if any(after.log[first:]):
                    raise Violation("d", f"a power cut takes entry {first} and leaves a later one")
                kept = max(first, 1 + covered)
                left = (
                    self.store.directory(after),
                    self.truth(truth[:kept]),
                    world[2],
                    self.rest(rest._replace(loose=())),
                    *procs,
                )
                if rest.commits_said & ~self.truths[left[1]][-1].commits:
                    raise Violation("d", "a commit that was reported is lost")
                self._check_stored(left, after_cut=True)
                yield -1, ("cut", tuple(f"{what} {number}" for what, number, _ in undone)), left


def starts_in(state: LogState) -> tuple[tuple[int, str], ...]:
    """The starts, as a ghost knows them."""
    return tuple((one.start, one.nonce) for one in state.begins)


def begun(state: LogState) -> Ghost:
    """The ghost of the state with which a scope begins."""
    said = Facts.of(state)
    verified = sum(1 << a for a, name in enumerate(NAMES) if (one := state.attempts.get(name)) and one.verified)
    spared = sum(1 << NAMES.index(name) for name in (state.begin.spared if state.begin else ()) if name in NAMES)
    return Ghost(
        state.start,
        said.known,
        said.live | said.removed,
        said.aborted,
        removed=said.removed,
        verified=verified,
        spared=spared,
        begins=starts_in(state),
    )
