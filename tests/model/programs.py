"""The programs of processes: instructions around the real machines of `commit/log_access.py`.

An instruction says which operations of the store a process may do next (`operation`), and where it is after a reply. All of it
depends on the process alone, so the explorer computes each reply once. What is to be checked against the truth at that moment
is told as facts: tuples that `World` understands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, auto
from typing import NamedTuple

from checkpointd.commit import log as rules
from checkpointd.commit import log_access as access
from checkpointd.commit.log_access import Compaction, Ended, KnownLog, LogAccess, Rebuild
from checkpointd.layout.log_records import LogState, Record
from tests.model.promises import NAMES, Plans, bits, stored_of

Machine = LogAccess | Compaction | Rebuild
Wish = Callable[[LogState], Sequence[Record]]
Test = Callable[[LogState], bool]
Fact = tuple[object, ...]
NOW: KnownLog = KnownLog()


class Op(IntEnum):
    """What a process does next. The first nine are those of the real machines."""

    LIST = auto()
    ENTRIES = auto()
    STATE = auto()
    PUT = auto()
    PUT_STATE = auto()
    MARK = auto()
    SETTLE = auto()
    REMOVE_STATES = auto()
    REMOVE_ENTRIES = auto()
    SYNC = auto()
    """After a put that is not durable yet."""
    WAIT = auto()
    """A follower waits for entry `number`."""
    STORE = auto()
    VOTES = auto()
    CHOOSE = auto()
    SWEEP = auto()
    READ = auto()
    AFTER_CUT = auto()


class Local(NamedTuple):
    """A process: its place in its program, the log as it knows it, and the machine that it runs."""

    at: int
    known: KnownLog
    machine: Machine | None = None
    partial: tuple[object, ...] = ()
    """Of a request for several objects: the replies that have come (None: not yet), or the numbers that are left."""
    unsynced: int = 0
    """1 + the reply to a put that is not durable yet."""
    choice: int = 0
    held: int = 0
    """Objects that were read, or are to be removed."""
    failures: int = 0
    """The puts without a reply in this try: 0 or 1."""
    tries: int = 0
    """0: the first one; 1: a later one, under another nonce."""


class Operation(NamedTuple):
    op: Op
    number: int = 0
    value: object = None
    late: bool = False
    """Whether the process may give up instead."""


Moved = tuple[Local, tuple[Fact, ...]]


class Instruction:
    compacts = False

    def enter(self, local: Local, program: Program) -> Moved:
        """The process at this instruction, which it has just reached."""
        return local, ()

    def operation(self, local: Local) -> Operation:
        raise NotImplementedError

    def after(self, local: Local, reply: object, program: Program) -> Moved:
        raise NotImplementedError


GIVES_UP, NO_REPLY = "gives up", "no reply"
"""In place of a reply."""


@dataclass(eq=False)
class Program:
    """The instructions of one process. `name`: one letter. `known`: the number of the entry up to which it knows the log at the
    start; None: nothing.
    """

    name: str
    instructions: list[Instruction]
    known: int | None = 1
    thin: bool = False
    """Whether it knows only what was announced since."""
    compacts: bool = field(init=False)

    def __post_init__(self) -> None:
        self.compacts = any(one.compacts for one in self.instructions)

    def enter(self, local: Local, place: int) -> Moved:
        """The process at the beginning of another instruction."""
        fresh = Local(place, local.known, choice=local.choice)
        if place >= len(self.instructions):
            return Local(len(self.instructions), NOW), ()
        return self.instructions[place].enter(fresh, self)

    def on(self, local: Local) -> Moved:
        return self.enter(local, local.at + 1)

    def is_done(self, local: Local) -> bool:
        return local.at >= len(self.instructions)

    def operation(self, local: Local) -> Operation:
        if local.unsynced:
            return Operation(Op.SYNC)
        return self.instructions[local.at].operation(local)

    def after(self, local: Local, reply: object) -> Moved:
        return self.instructions[local.at].after(local, reply, self)


# --- instructions with a machine --------------------------------------------------------------------------------------


def requested(local: Local) -> Operation:
    """The operation that the machine asks for."""
    assert local.machine is not None
    match request := local.machine.request:
        case access.ListLog():
            return Operation(Op.LIST)
        case access.GetEntries(numbers):
            return Operation(Op.ENTRIES, value=numbers)
        case access.GetState(number):
            return Operation(Op.STATE, number)
        case access.PutEntry(entry):
            return Operation(Op.PUT, entry.number, entry)
        case access.PutState(state):
            return Operation(Op.PUT_STATE, state.number, state)
        case access.PutMark(number):
            return Operation(Op.MARK, number)
        case access.Settle():
            return Operation(Op.SETTLE)
        case access.RemoveStates(numbers):
            return Operation(Op.REMOVE_STATES, value=local.partial if local.partial else numbers)
        case access.RemoveEntries(numbers):
            return Operation(Op.REMOVE_ENTRIES, value=local.partial if local.partial else numbers)
    raise AssertionError(request)


class Running(Instruction):
    """Runs a reading or an append to its end. After a fault it begins again with what it knows then."""

    def begin(self, local: Local) -> LogAccess:
        raise NotImplementedError

    def ended(self, local: Local, how: Ended, program: Program) -> Moved:
        raise NotImplementedError

    def enter(self, local: Local, program: Program) -> Moved:
        return local._replace(machine=self.begin(local), partial=()), ()

    def operation(self, local: Local) -> Operation:
        return requested(local)

    def after(self, local: Local, reply: object, program: Program) -> Moved:
        assert isinstance(local.machine, LogAccess)
        after = local.machine.after(reply)  # type: ignore[arg-type]
        if isinstance(after, LogAccess):
            return local._replace(machine=after, partial=()), ()
        if after.fault:
            return self.enter(Local(local.at, after.known, choice=local.choice), program)
        return self.ended(local._replace(known=after.known), after, program)


def proved(known: KnownLog) -> Fact:
    return "proved", known.state


class Read(Running):
    """Read the log to its end. `fresh`: as a process that knows nothing of it yet. `proves`: False is a mistake."""

    def __init__(self, *, fresh: bool = True, settles: bool = True, proves: bool = True) -> None:
        self.fresh, self.settles, self.proves = fresh, settles, proves

    def begin(self, local: Local) -> LogAccess:
        return access.look(NOW if self.fresh else local.known, settles=self.settles)

    def after(self, local: Local, reply: object, program: Program) -> Moved:
        machine = local.machine
        if not self.proves and isinstance(machine, LogAccess) and isinstance(machine.request, access.GetEntries):
            after = machine.after(reply)  # type: ignore[arg-type]
            if isinstance(after, LogAccess) and after.known.state.number > machine.known.state.number:
                return program.on(local._replace(known=after.known))
        return super().after(local, reply, program)

    def ended(self, local: Local, how: Ended, program: Program) -> Moved:
        after, facts = program.on(local)
        return after, (proved(how.known), *facts)


class Follow(Running):
    """A rank reads on until `until`. It may give up, and goes to `late`. If it has fallen behind, it reads all of the log."""

    def __init__(self, until: Test, late: int | None = None) -> None:
        self.until, self.late = until, late

    def enter(self, local: Local, program: Program) -> Moved:
        machine = access.follow(local.known, self.until)
        waits = isinstance(machine.request, access.GetEntries)
        return local._replace(machine=None if waits else machine, partial=()), ()

    def operation(self, local: Local) -> Operation:
        if local.machine is None:
            return Operation(Op.WAIT, local.known.state.number + 1, late=self.late is not None)
        return requested(local)

    def after(self, local: Local, reply: object, program: Program) -> Moved:
        if reply == GIVES_UP:
            assert self.late is not None
            return program.enter(local, self.late)
        if local.machine is None:  # it waits, and either an entry or a newer state has come
            if reply is None:
                return local._replace(machine=access.look(local.known, settles=True)), ()
            local = local._replace(machine=access.follow(local.known, self.until))
        return super().after(local, reply, program)

    def ended(self, local: Local, how: Ended, program: Program) -> Moved:
        if how.is_proved and self.until(how.known.state):
            after, facts = program.on(local)
            return after, (proved(how.known), *facts)
        after, facts = self.enter(Local(local.at, how.known, choice=local.choice), program)
        return after, (proved(how.known), *facts) if how.is_proved else facts


class Append(Running):
    """Append the records that `make` gives for a state, as far as they are not reached yet and if they are valid there.

    `refused`: where to go on if they are refused; None: at the next instruction. `saves`: the attempt whose save must not be
    refused. `nonce`: of the entry; a put that had no reply twice is given up, and asked again under another nonce.
    """

    def __init__(
        self,
        nonce: int,
        make: Callable[[LogState, int], Sequence[Record]],
        refused: int | None = None,
        *,
        saves: int | None = None,
        reached: Test | None = None,
    ) -> None:
        self.make, self.refused, self.saves, self.reached = make, refused, saves, reached
        self.nonces = f"{nonce:016x}", f"{nonce + 0x1000:016x}"
        self._wishes: dict[int, Wish] = {}

    def begin(self, local: Local) -> LogAccess:
        if local.choice not in self._wishes:  # one for each choice, so that equal machines are equal
            self._wishes[local.choice] = lambda state, choice=local.choice: self.wanted(state, choice)
        return access.append(local.known, self._wishes[local.choice], self.nonces[local.tries])

    def left(self, state: LogState, choice: int) -> list[Record]:
        if self.reached is not None and self.reached(state):
            return []
        return [one for one in self.make(state, choice) if not rules.reached(state, one)]

    def wanted(self, state: LogState, choice: int) -> Sequence[Record]:
        records = self.left(state, choice)
        return records if records and not rules.check_all(state, records) else ()

    def after(self, local: Local, reply: object, program: Program) -> Moved:
        if reply == NO_REPLY:
            if local.failures:
                return self.again(local)
            local, reply = local._replace(failures=1), False
        assert isinstance(local.machine, LogAccess)
        after = local.machine.after(reply)  # type: ignore[arg-type]
        if isinstance(after, LogAccess):
            return local._replace(machine=after, partial=()), ()
        if after.fault:
            return self.again(local._replace(known=after.known))
        return self.ended(local._replace(known=after.known), after, program)

    def again(self, local: Local) -> Moved:
        fresh = Local(local.at, local.known, choice=local.choice, tries=1)
        return fresh._replace(machine=self.begin(fresh)), ()

    def ended(self, local: Local, how: Ended, program: Program) -> Moved:
        state = how.known.state
        facts: list[Fact] = [proved(how.known)]
        place = local.at + 1
        if how.put:
            facts.append(("put", state.nonce))
        elif self.left(state, local.choice):
            facts.append(("refused", self.nonces, state, self.saves))
            place = place if self.refused is None else self.refused
        after, more = program.enter(local, place)
        return after, (*facts, *more)


class Compact(Instruction):
    """Put the state that is due, and remove what older ones cover. `unread`: a mistake, the state's number is too great."""

    compacts = True

    def __init__(self, *, unread: bool = False) -> None:
        self.unread = unread

    def enter(self, local: Local, program: Program) -> Moved:
        due, rest = local.known.due, local._replace(known=replace(local.known, due=None))
        due = replace(due, number=due.number + 1) if due and self.unread else due
        return (program.on(rest)) if due is None else (rest._replace(machine=Compaction(due)), ())

    def operation(self, local: Local) -> Operation:
        return requested(local)

    def after(self, local: Local, reply: object, program: Program) -> Moved:
        assert isinstance(local.machine, Compaction)
        after = local.machine.after(reply)  # type: ignore[arg-type]
        if after is None:
            return program.on(local)
        return local._replace(machine=after, partial=()), ()


class Rebuilding(Instruction):
    """Make the log again. `records`: what the objects show beyond a state, and the begin of a start."""

    def __init__(self, nonce: int, records: Callable[[LogState, int], Sequence[Record]]) -> None:
        self.nonce, self.records = nonce, records

    def enter(self, local: Local, program: Program) -> Moved:
        return local._replace(machine=Rebuild()), ()

    def operation(self, local: Local) -> Operation:
        machine = local.machine
        assert isinstance(machine, Rebuild)
        if not machine.is_done:
            return requested(local)
        if not local.held:
            return Operation(Op.CHOOSE, value=lambda objects: {"looks at the objects": objects})
        made = self.made(machine, local.choice)
        return Operation(Op.PUT_STATE, made.number, made)

    def made(self, machine: Rebuild, objects: int) -> LogState:
        return rules.rebuilt(machine.state, machine.number, f"{self.nonce:016x}", self.records(machine.state, objects))

    def after(self, local: Local, reply: object, program: Program) -> Moved:
        machine = local.machine
        assert isinstance(machine, Rebuild)
        if machine.is_done:
            if not local.held:
                assert isinstance(reply, int)
                return local._replace(held=1, choice=reply), ()
            return program.on(local._replace(known=NOW, choice=0))
        machine = machine.after(reply)  # type: ignore[arg-type]
        if machine.is_done and machine.is_done_by_others:
            return program.on(local._replace(known=NOW))
        return local._replace(machine=machine, partial=()), ()


# --- instructions with objects ----------------------------------------------------------------------------------------


class Put(Instruction):
    """Put objects, in one step."""

    def __init__(self, what: int) -> None:
        self.what = what

    def operation(self, local: Local) -> Operation:
        return Operation(Op.STORE, self.what)

    def after(self, local: Local, reply: object, program: Program) -> Moved:
        return program.on(local)


class Look(Instruction):
    """Look for votes: go on if they are there, else give up and go to `late`; or wait."""

    def __init__(self, what: int, late: int | None) -> None:
        self.what, self.late = what, late

    def operation(self, local: Local) -> Operation:
        return Operation(Op.VOTES, self.what, late=self.late is not None)

    def after(self, local: Local, reply: object, program: Program) -> Moved:
        if reply == GIVES_UP:
            assert self.late is not None
            return program.enter(local, self.late)
        return program.on(local)


class Choose(Instruction):
    """Go on with one of the choices that the state and the objects allow."""

    def __init__(self, options: Callable[[LogState, int], dict[str, int]]) -> None:
        self.options = options

    def operation(self, local: Local) -> Operation:
        return Operation(Op.CHOOSE, value=lambda objects: self.options(local.known.state, objects))

    def after(self, local: Local, reply: object, program: Program) -> Moved:
        assert isinstance(reply, int)
        return program.on(local._replace(choice=reply))


class Skip(Instruction):
    """Go to `place` if the state and the choice say so."""

    def __init__(self, when: Callable[[LogState, int], bool], place: int) -> None:
        self.when, self.place = when, place

    def enter(self, local: Local, program: Program) -> Moved:
        return program.enter(local, self.place if self.when(local.known.state, local.choice) else local.at + 1)


class Report(Instruction):
    """Tell the user what became of the attempt, by the state that was read."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt

    def enter(self, local: Local, program: Program) -> Moved:
        known = local.known.state.attempts.get(NAMES[self.attempt])
        after, facts = program.on(local)
        return after, facts if known is None else (("reported", self.attempt, known.status), *facts)


class Owns(Instruction):
    """A start goes on if its begin is the newest."""

    def __init__(self, nonce: str, place: int) -> None:
        self.nonce, self.place = nonce, place

    def enter(self, local: Local, program: Program) -> Moved:
        begin = local.known.state.begin
        if begin is None or not owns(begin.nonce, self.nonce):
            return program.enter(local, self.place)
        after, facts = program.on(local)
        return after, (("owns", begin.start, self.nonce), *facts)


def owns(newest: str, own: str) -> bool:
    """Whether the newest begin is one's own."""
    return newest == own


class Sweep(Instruction):
    """Remove the objects of removed attempts that nobody needs, one at a time, as the state says that was read last.

    `before`: a mistake, the objects of this attempt go before its removal.
    """

    def __init__(self, before: int | None = None) -> None:
        self.before = before

    def operation(self, local: Local) -> Operation:
        return Operation(Op.SWEEP, local.held)

    def enter(self, local: Local, program: Program) -> Moved:
        what = sweepable(local.known.state) if self.before is None else stored_of(self.before)
        return (local._replace(held=what), ()) if what else program.on(local)

    def after(self, local: Local, reply: object, program: Program) -> Moved:
        assert isinstance(reply, int)
        return (local._replace(held=reply), ()) if reply else program.on(local)


def sweepable(state: LogState) -> int:
    """The objects that may go."""
    needed = rules.needed_by_others(state)
    known = ((a, state.attempts.get(name)) for a, name in enumerate(NAMES))
    return sum(stored_of(a) for a, one in known if one and one.status == "removed" and not one.swept and NAMES[a] not in needed)


class Load(Instruction):
    """Load the newest checkpoint, object by object. If one is gone, read the log again: it was removed, or it is damaged."""

    def __init__(self, plans: Plans) -> None:
        self.plans = plans

    def newest(self, local: Local) -> int | None:
        known = ((a, local.known.state.attempts.get(name)) for a, name in enumerate(NAMES))
        return max((a for a, one in known if one and one.status == "checkpoint" and not one.left_behind), default=None)

    def enter(self, local: Local, program: Program) -> Moved:
        a = self.newest(local)
        if a is None:
            return program.on(local._replace(choice=0))
        if local.choice == a + 1:  # an object was gone, and the log was read again since
            after, facts = program.on(local._replace(choice=0))
            return after, (("damaged", a), *facts)
        return local._replace(choice=0, held=bits(a, 0, 1) | self.plans[a].refers), ()

    def operation(self, local: Local) -> Operation:
        return Operation(Op.READ, local.held & -local.held)

    def after(self, local: Local, reply: object, program: Program) -> Moved:
        if not reply:
            a = self.newest(local)
            assert a is not None
            return program.enter(local._replace(choice=a + 1), local.at - 1)  # the Read before this
        left = local.held & (local.held - 1)
        return (local._replace(held=left), ()) if left else program.on(local)


class AfterCut(Instruction):
    """Begin only when the processes that a power cut ends are gone."""

    def operation(self, local: Local) -> Operation:
        return Operation(Op.AFTER_CUT)

    def after(self, local: Local, reply: object, program: Program) -> Moved:
        return program.on(local)
