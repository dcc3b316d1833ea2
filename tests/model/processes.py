"""What processes do at a root: coordinators, ranks, starts, retention, compaction, loads, rebuilds. Each is a program.

`mistake`: a mistake that is planted in a program, for the mutations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checkpointd.commit import log as rules
from checkpointd.layout.log_records import (
    AbortRecord,
    AnnounceRecord,
    BeginRecord,
    CommitRecord,
    HoldRecord,
    LogEntry,
    LogState,
    Record,
    RemoveRecord,
    RollbackRecord,
    SweepRecord,
    VerifyRecord,
)
from checkpointd.layout.manifest import BallotRef, ErrorReport, WriterIdentity
from tests.model.programs import (
    Append,
    Choose,
    Compact,
    Follow,
    Instruction,
    Load,
    Look,
    Owns,
    Put,
    Read,
    Rebuilding,
    Report,
    Skip,
    Sweep,
    Test,
)
from tests.model.promises import (
    BALLOT,
    NAMES,
    PLANS,
    R0,
    R1,
    VOTE0,
    VOTE1,
    VOTES,
    Plans,
    W,
    X,
    Y,
    Z,
    bits,
    stored_of,
)

END = 99
"""In a program: the place after the last instruction."""
WHOLE = 32
"""In a choice: the process takes Y for whole. The lower bits are the mask of attempts that it spares."""
WRITER = WriterIdentity(host="node", pid=1, time="2000-01-01T00:00:00Z")
OWNED = "0000000000000005"
"""The nonce of the start with which a scope begins."""

Program = list[Instruction]


# --- records ----------------------------------------------------------------------------------------------------------


def begin(start: int, nonce: int, *, spared: Sequence[int] = (), origin: str = "") -> BeginRecord:
    names = tuple(NAMES[one] for one in spared)
    return BeginRecord(start=start, nonce=f"{nonce:016x}", world_size=2, spared=names, origin=origin, writer=WRITER)


def announce(a: int, plans: Plans = PLANS) -> AnnounceRecord:
    base = plans[a].base
    return AnnounceRecord(attempt=NAMES[a], n=a, step=a, base="" if base is None else NAMES[base])


def commit(a: int, plans: Plans = PLANS, *, rebuilt: bool = False) -> CommitRecord:
    return CommitRecord(
        attempt=NAMES[a],
        n=a,
        step=a,
        world_size=2,
        ballot=BallotRef(digest="0" * 16, size=1),
        holders=plans[a].holders,
        left=plans[a].left,
        rebuilt=rebuilt,
        decided_by=0,
        writer=WRITER,
    )


def abort(a: int) -> AbortRecord:
    return AbortRecord(attempt=NAMES[a], error=ErrorReport(code="Error", message="late"), decided_by=0, writer=WRITER)


def remove(a: int, start: int) -> RemoveRecord:
    return RemoveRecord(attempts=(NAMES[a],), reason="old", start=start, writer=WRITER)


def note(number: int, start: int = 5) -> AnnounceRecord:
    """A record that concerns no attempt of a scope, and that nothing refuses in this start."""
    return AnnounceRecord(attempt=f"note/{start:08d}-{10 + number}", step=0)


def has_note(number: int) -> Test:
    return lambda state: any(name.startswith("note/") and name.endswith(f"-{10 + number}") for name in state.attempts)


def state_of(*known: Record, start: int = 5, origin: str = "") -> LogState:
    """The state with which a scope begins: that after entry 1."""
    first = BeginRecord(start=start, nonce=OWNED, world_size=2, origin=origin, writer=WRITER)
    return rules.following(LogState(), [LogEntry(number=1, nonce="1" * 16, before="", records=(first, *known))])


def checkpoint(a: int, plans: Plans = PLANS) -> tuple[Record, ...]:
    return announce(a, plans), commit(a, plans), VerifyRecord(attempt=NAMES[a], nbytes=1)


# --- questions to a state ---------------------------------------------------------------------------------------------


def status(state: LogState, a: int) -> str:
    known = state.attempts.get(NAMES[a])
    return "" if known is None else known.status


def is_known(a: int) -> Test:
    return lambda state: NAMES[a] in state.attempts


def is_decided(a: int) -> Test:
    return lambda state: status(state, a) not in ("", "undecided")


def always(*records: Record) -> Callable[[LogState, int], Sequence[Record]]:
    return lambda *_: records


# --- programs ---------------------------------------------------------------------------------------------------------


def ended(program: Program) -> Program:
    """`program`, with places END set to its end."""
    for one in program:
        for name in ("refused", "late", "place"):
            if getattr(one, name, None) == END:
                setattr(one, name, len(program))
    return program


def shifted(program: Program, by: int) -> Program:
    """`program`, to be put behind `by` other instructions."""
    for one in program:
        for name in ("refused", "late", "place"):
            if isinstance(place := getattr(one, name, None), int):
                setattr(one, name, place + by)
    return program


def announcing(a: int, nonce: int, plans: Plans = PLANS) -> Append:
    return Append(nonce, always(announce(a, plans)), END, saves=a)


def committing(a: int, nonce: int, plans: Plans = PLANS) -> Append:
    return Append(nonce, always(commit(a, plans)), saves=a)


def aborting(a: int, nonce: int) -> Append:
    return Append(nonce, always(abort(a)))


def notes(count: int, nonce: int) -> Program:
    def make(number: int) -> Callable[[LogState, int], Sequence[Record]]:
        return lambda state, _: [note(number, state.start)]

    return [Append(nonce + i, make(i), reached=has_note(i)) for i in range(count)]


def coordinator(nonce: int, *, announces: bool = True, plans: Plans = PLANS) -> Program:
    """Rank 0 saves Y: announce, objects, all votes, ballot, commit; or the abort at its deadline."""
    head = [announcing(Y, nonce), Put(bits(Y, R0, VOTE0))] if announces else []
    n = len(head)
    return ended(
        [
            *head,
            Look(VOTES, n + 4),
            Put(bits(Y, BALLOT)),
            committing(Y, nonce + 1, plans),
            Skip(lambda *_: True, n + 5),
            aborting(Y, nonce + 2),
            Report(Y),
        ]
    )


def voter(nonce: int) -> Program:
    """Rank 1 saves Y and follows it to its decision; or puts the abort at its deadline."""
    return ended(
        [
            Follow(is_known(Y), END),
            Put(bits(Y, R1, VOTE1)),
            Follow(is_decided(Y), 4),
            Skip(lambda *_: True, 5),
            aborting(Y, nonce),
            Report(Y),
        ]
    )


def daemon(nonce: int) -> Program:
    """A sidecar finishes Y for dead trainers: the second rank's part, then as a coordinator."""
    return [Put(bits(Y, R1, VOTE1)), *shifted(coordinator(nonce, announces=False), 1)]


def spooled(nonce: int) -> Program:
    """A sidecar saves Y from a spool once the next start has begun."""
    return [Follow(lambda state: state.start > 5), *shifted(coordinator(nonce), 1)]


def start(
    nonce: int, *, saves: bool = False, unannounced: bool = False, until: int = END, mistake: str = "", plans: Plans = PLANS
) -> Program:
    """The next start: it reads, decides about Y, begins, and decides what it has spared. With `saves`, it then saves Z."""
    owner = f"{nonce:016x}"

    def before(state: LogState, objects: int) -> dict[str, int]:
        if unannounced:
            return {"spares Y, which waits in a spool": 1 << Y}
        if status(state, Y) != "undecided":
            return {"has nothing to decide": 0}
        options = {"spares Y": 1 << Y, "leaves Y": 0}
        if objects & VOTES == VOTES:
            options["finds Y whole"] = WHOLE
        return options

    def records(state: LogState, choice: int) -> Sequence[Record]:
        first = [commit(Y, plans)] if choice & WHOLE and status(state, Y) == "undecided" else []
        wishes = choice & 1 << Y and (unannounced or status(state, Y) == "undecided")
        spared = [Y] if wishes and rules.may_be_spared(state, NAMES[Y]) else []
        return [*first, begin(state.start + 1, nonce, spared=spared)]

    def is_begun(state: LogState) -> bool:
        return any(rules.reached(state, begin(number, nonce)) for number in range(1, state.start + 1))

    def after(state: LogState, objects: int) -> dict[str, int]:
        return {"finds Y whole": WHOLE} if objects & VOTES == VOTES else {"finds Y incomplete": 0}

    def verdict(state: LogState, choice: int) -> Sequence[Record]:
        return [commit(Y, plans) if choice & WHOLE else abort(Y)]

    def is_settled(state: LogState) -> bool:
        return status(state, Y) != "undecided"

    rest = [announcing(Z, nonce + 2), Put(stored_of(Z)), committing(Z, nonce + 3), Report(Z)] if saves else []
    late = END if mistake == "a start does not decide what it has spared" else 8
    whole = [
        Read(),
        Choose(before),
        Skip(lambda _, choice: not choice & WHOLE, 4),
        Put(bits(Y, BALLOT)),
        Append(nonce, records, END, reached=is_begun),
        Owns(owner, END),
        Follow(is_settled, late),
        Skip(lambda *_: True, 12),
        Choose(after),
        Skip(lambda _, choice: not choice & WHOLE, 11),
        Put(bits(Y, BALLOT)),
        Append(nonce + 1, verdict),
        Report(Y),
        *rest,
    ]
    return ended(whole[:until])


def retention(a: int, nonce: int, of_start: int, *, mistake: str = "") -> Program:
    """Remove `a`, and then the objects that nobody needs. `of_start`: 0 for a person."""
    removing = Append(nonce, always(remove(a, of_start)))
    if mistake == "objects go before their removal":
        return [Sweep(before=a), removing]
    return [removing, Sweep()]


def forgetting(a: int, nonce: int, *, mistake: str = "") -> Program:
    """After a sweep: say so, if it has removed all objects of `a`."""

    def was_needed(state: LogState, choice: int) -> bool:
        return NAMES[a] in rules.needed_by_others(state) or status(state, a) != "removed"

    record = SweepRecord(attempts=(NAMES[a],))
    swept = Append(nonce, always(record))
    if mistake == "swept although objects were kept":
        return [swept]
    return [SkipNext(was_needed), swept]


class SkipNext(Skip):
    """Leave the next instruction out if the state says so."""

    def __init__(self, when: Callable[[LogState, int], bool]) -> None:
        super().__init__(when, -1)

    def enter(self, local, program):  # type: ignore[no-untyped-def]
        return program.enter(local, local.at + 1 + bool(self.when(local.known.state, local.choice)))


def renaming(nonce: int) -> Program:
    """A save that takes the name of X again."""
    return ended(
        [
            Append(nonce, always(announce(X)), END),
            Skip(lambda state, _: status(state, X) != "undecided", END),
            Put(stored_of(X)),
            Append(nonce + 1, always(commit(X))),
            Put(stored_of(X)),
        ]
    )


def going_back(nonce: int, *, mistake: str = "") -> Program:
    """A person goes back to X: a start begins and goes back in one entry, so that its aim is that of both."""
    back = RollbackRecord(attempt=NAMES[X], user="alice (1000)", writer=WRITER)

    def records(state: LogState, choice: int) -> Sequence[Record]:
        return [begin(state.start + 1, nonce), back]

    def is_begun(state: LogState) -> bool:
        return any(rules.reached(state, begin(number, nonce)) for number in range(1, state.start + 1))

    if mistake == "a rollback is put without a begin":
        return [Append(nonce, always(back))]
    return [Append(nonce, records, reached=is_begun)]


def going_on(nonce: int, plans: Plans) -> Program:
    """A start loads the newest checkpoint of the current branch, and saves Z."""
    return ended(
        [Append(nonce, always(announce(Z, plans)), END), Put(stored_of(Z)), committing(Z, nonce + 1, plans), Report(Z)]
    )


def mirroring(nonce: int, plans: Plans) -> Program:
    """A mirror copies Y, which refers to X, and holds X."""
    return ended(
        [
            Put(stored_of(X)),
            Put(stored_of(Y)),
            Append(nonce, always(announce(Y, plans), commit(Y, plans), HoldRecord(attempt=NAMES[X])), saves=Y),
            Report(Y),
        ]
    )


def compactor(rounds: int, *, mistake: str = "") -> Program:
    reads = Read(fresh=False, proves=mistake != "(unnecessary) a state is put that is not proved")
    return [reads, Compact(unread=mistake == "a state covers an entry that its writer has not read")] * rounds


def reader(plans: Plans = PLANS) -> Program:
    return [Read(settles=False), Load(plans)]


def rebuild(nonce: int, plans: Plans = PLANS) -> Program:
    """Make the log again, as a start."""

    def records(state: LogState, objects: int) -> Sequence[Record]:
        whole = [a for a in (X, W, Y) if (stored_of(a) | plans[a].refers) & ~objects == 0]
        undecided = [a for a in whole if status(state, a) in ("", "undecided")]
        return [*(commit(a, plans, rebuilt=True) for a in undecided), begin(state.start + 1, nonce)]

    return [Rebuilding(nonce, records)]
