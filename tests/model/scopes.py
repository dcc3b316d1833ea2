"""The scopes: which processes work at which root, and what may fail. Each is small enough to explore to its end.

`size` 0: of the gate; 1: of the night.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checkpointd.layout.log_records import LogEntry
from tests.model.numbered import Scope
from tests.model.processes import (
    aborting,
    announce,
    announcing,
    begin,
    checkpoint,
    commit,
    committing,
    compactor,
    coordinator,
    daemon,
    forgetting,
    going_back,
    going_on,
    has_note,
    is_decided,
    mirroring,
    note,
    notes,
    reader,
    rebuild,
    renaming,
    retention,
    shifted,
    spooled,
    start,
    state_of,
    voter,
)
from tests.model.programs import AfterCut, Compact, Follow, Instruction, Program, Put, Read, Report, Sweep
from tests.model.promises import PINNING, PLANS, R0, VOTE0, Y_HERE, Plan, U, W, X, Y, bits, stored_of

Make = Callable[[int, str], Scope]
X_HERE = stored_of(X)
SCOPES: dict[str, Make] = {}


def scope(about: str) -> Callable[[Callable[[int, str], dict[str, Any]]], Make]:
    """A function that gives the fields of a scope, for a size and a mistake, becomes one of the scopes."""

    def of(make_fields: Callable[[int, str], dict[str, Any]]) -> Make:
        name = make_fields.__name__.strip("_").replace("_", " ")

        def make(size: int = 1, mistake: str = "") -> Scope:
            return Scope(name=name, about=about, **make_fields(size, mistake))

        SCOPES[name] = make
        return make

    return of


def fields(**given: Any) -> dict[str, Any]:
    return given


def program(name: str, *instructions: Instruction, **options: Any) -> Program:
    return Program(name, list(instructions), **options)


UNDECIDED_Y = state_of(*checkpoint(X), announce(Y))
ONE = state_of(*checkpoint(X))
BRANCHES = (*PLANS[:Y], Plan(X, bits(X, R0), left=(((5, 0), (5, 3)),)), Plan())
"""Y goes on from X, after a person has gone back to it."""


def written(*records: Any) -> tuple[LogEntry, ...]:
    """Entries with one record each, from number 2 on."""
    found, before = list[LogEntry](), "1" * 16
    for number, record in enumerate(records, 2):
        found.append(LogEntry(number=number, nonce=f"{0x71 + number:016x}", before=before, records=(record,)))
        before = found[-1].nonce
    return tuple(found)


BEHIND: dict[str, Any] = fields(log=written(note(8), note(9)), states=(2,))
"""A log that has gone on: a process that knows entry 1 is late, and compaction is about to remove entry 2."""


@scope("a coordinator, a second rank, the next start and one more; crashes")
def _decide(size: int, mistake: str) -> dict[str, Any]:
    starts = [program("B", *start(0x21, mistake=mistake)), program("C", *start(0x31, mistake=mistake))]
    return fields(
        programs=[program("A", *coordinator(1)), program("V", *voter(0x11)), *starts[: 1 + size]],
        state=ONE,
        objects=X_HERE,
        last=10,
        crash=True,
    )


@scope("a coordinator and a rank that knows nothing of older attempts, and puts states; a compactor; a reply is lost")
def _ranks(size: int, mistake: str) -> dict[str, Any]:
    rank = program("V", *voter(0x11), Compact(), thin=True)
    return fields(
        programs=[program("A", *coordinator(1)), rank, program("K", *compactor(size))],
        state=ONE,
        objects=X_HERE,
        last=8,
        lost=1,
        shrinks=True,
    )


@scope("a coordinator, a second rank, the next start; replies are lost, and the puts may arrive late")
def _late_puts(size: int, mistake: str) -> dict[str, Any]:
    return fields(
        programs=[program("A", *coordinator(1)), program("V", *voter(0x11)), program("B", *start(0x21))],
        state=ONE,
        objects=X_HERE,
        last=8,
        lost=1 + 2 * size,
        late=True,
    )


@scope("a late coordinator, two starts that may spare Y, the first saves Z; two late puts")
def _two_starts(size: int, mistake: str) -> dict[str, Any]:
    return fields(
        programs=[
            program("A", *coordinator(1, announces=False)),
            program("B", *start(0x21, saves=True)),
            program("C", *start(0x31)),
        ],
        state=UNDECIDED_Y,
        objects=X_HERE | Y_HERE,
        last=11,
        lost=2 * size,
        late=True,
    )


@scope("a sidecar finishes Y; a late coordinator, two starts; crashes")
def _spared(size: int, mistake: str) -> dict[str, Any]:
    starts = [program("B", *start(0x21, mistake=mistake)), program("C", *start(0x31, mistake=mistake))]
    return fields(
        programs=[program("A", *coordinator(1, announces=False)), program("D", *daemon(0x41)), *starts[: 1 + size]],
        state=UNDECIDED_Y,
        objects=X_HERE | bits(Y, R0, VOTE0),
        last=11,
        crash=True,
    )


@scope("Y waits in a spool and is not announced; one start spares it, the other does not; late puts")
def _spool(size: int, mistake: str) -> dict[str, Any]:
    return fields(
        programs=[program("D", *spooled(0x41)), program("B", *start(0x21, unannounced=True)), program("C", *start(0x31))],
        state=ONE,
        objects=X_HERE | bits(Y, 1, 3),
        last=10,
        lost=1 + size,
        late=True,
    )


@scope("retention removes X and W, to which the save Y refers; the next start; a load; a reply is lost")
def _retention(size: int, mistake: str) -> dict[str, Any]:
    plans = PINNING
    known = [*checkpoint(X, plans), *checkpoint(W, plans), *checkpoint(U, plans)]
    keeps = [
        *retention(X, 0x51, 5, mistake=mistake),
        *retention(W, 0x52, 5, mistake=mistake),
        *forgetting(X, 0x53, mistake=mistake),
    ]
    readers = [program("L", *reader(plans))] if size else []
    return fields(
        programs=[
            program("A", announcing(Y, 1, plans), Put(Y_HERE | stored_of(Y)), committing(Y, 2, plans)),
            program("T", *keeps),
            program("B", *start(0x21, until=6, plans=plans)),
            *readers,
        ],
        state=state_of(*known),
        plans=plans,
        objects=stored_of(X) | stored_of(W) | stored_of(U),
        last=10,
        lost=size,
    )


@scope("three removals of three checkpoints, one by a person, and a load; a reply is lost")
def _removers(size: int, mistake: str) -> dict[str, Any]:
    keeps = [*retention(X, 0x51, 5, mistake=mistake), *forgetting(X, 0x53, mistake=mistake)]
    person = [program("P", *retention(U, 0x54, 0, mistake=mistake))]
    return fields(
        programs=[
            program("T", *keeps),
            program("S", *retention(W, 0x52, 5, mistake=mistake)),
            *person,
            program("L", *reader()),
        ],
        state=state_of(*checkpoint(X), *checkpoint(W), *checkpoint(U)),
        objects=stored_of(X) | stored_of(W) | stored_of(U),
        last=8,
        lost=size,
    )


@scope("two removals of X, one of them late; a save that takes the name of X again; a reply is lost")
def _names(size: int, mistake: str) -> dict[str, Any]:
    return fields(
        programs=[
            program("T", *retention(X, 0x51, 5), *forgetting(X, 0x53)),
            program("S", *retention(X, 0x54, 5), *forgetting(X, 0x55)),
            program("A", *renaming(1)),
        ],
        state=state_of(*checkpoint(X), *checkpoint(U)),
        objects=stored_of(X) | stored_of(U),
        last=10,
        lost=size,
        constants=(("FORGET_AFTER", 0),),
    )


@scope("a late commit, a late abort, other appends, a compactor")
def _compaction(size: int, mistake: str) -> dict[str, Any]:
    return fields(
        programs=[
            program("A", committing(Y, 1), Report(Y)),
            program("V", aborting(Y, 0x11), Report(Y)),
            program("F", *notes(1 + size, 0x61)),
            program("K", *compactor(2, mistake=mistake)),
        ],
        state=UNDECIDED_Y,
        objects=X_HERE | stored_of(Y),
        last=8,
        shrinks=True,
    )


@scope("a late commit and a late abort may take numbers that were used before; a rank follows; a compactor")
def _strays(size: int, mistake: str) -> dict[str, Any]:
    return fields(
        programs=[
            program("A", committing(Y, 1), Report(Y)),
            program("V", Follow(has_note(9)), Report(Y)),
            program("D", aborting(Y, 0x11), Report(Y)),
            program("F", *notes(size, 0x61), known=3),
            program("K", *compactor(1, mistake=mistake), known=2),
        ],
        state=UNDECIDED_Y,
        objects=X_HERE | stored_of(Y),
        last=9,
        shrinks=True,
        **BEHIND,
    )


@scope("a process that knows nothing of the log reads it while others append and compact")
def _fresh_readers(size: int, mistake: str) -> dict[str, Any]:
    return fields(
        programs=[
            program("A", committing(Y, 1), Report(Y), known=2),
            program("F", *notes(1 + size, 0x61), known=3),
            program("K", *compactor(2, mistake=mistake), known=2),
            program("L", Read(settles=False), known=None),
        ],
        state=UNDECIDED_Y,
        objects=X_HERE | stored_of(Y),
        last=9,
        shrinks=True,
        **BEHIND,
    )


@scope("a late commit, another append, two compactors, one of them late")
def _compactors(size: int, mistake: str) -> dict[str, Any]:
    return fields(
        programs=[
            program("A", committing(Y, 1), Report(Y)),
            program("F", *notes(size, 0x61), known=3),
            program("K", *compactor(1, mistake=mistake), known=2),
            program("J", *compactor(1, mistake=mistake)),
        ],
        state=UNDECIDED_Y,
        objects=X_HERE | stored_of(Y),
        last=9,
        shrinks=True,
        **BEHIND,
    )


@scope("a late removal, other appends, a compactor; a reply is lost, and the put may arrive late")
def _late_remover(size: int, mistake: str) -> dict[str, Any]:
    return fields(
        programs=[
            program("T", *retention(X, 0x51, 5)),
            program("F", *notes(1 + size, 0x61), known=3),
            program("K", *compactor(1 + size), known=2),
        ],
        state=state_of(*checkpoint(X), *checkpoint(U)),
        objects=stored_of(X) | stored_of(U),
        last=9,
        lost=1,
        late=True,
        shrinks=True,
        **BEHIND,
    )


@scope("two starts, one of them late, other appends, a compactor")
def _late_start(size: int, mistake: str) -> dict[str, Any]:
    return fields(
        programs=[
            program("B", *start(0x21, until=6)),
            program("C", *start(0x31, until=6)),
            program("F", *notes(size, 0x61)),
            program("K", *compactor(2)),
        ],
        state=ONE,
        objects=X_HERE,
        last=8,
        shrinks=True,
    )


@scope("a late commit, a late abort, other appends, a compactor; a list or a get may miss the last 3 changes of log/")
def _stale_lists(size: int, mistake: str) -> dict[str, Any]:
    late = [program("V", aborting(Y, 0x11), Report(Y))] if size else []
    return fields(
        programs=[
            program("A", committing(Y, 1), Report(Y)),
            *late,
            program("F", *notes(1, 0x61), known=3),
            program("K", *compactor(1), known=2),
        ],
        state=UNDECIDED_Y,
        objects=X_HERE | stored_of(Y),
        last=9,
        stale=3,
        shrinks=True,
        **BEHIND,
    )


@scope("the same, with a rank that only reads instead of the late abort")
def _stale_follower(size: int, mistake: str) -> dict[str, Any]:
    follows = program("V", Follow(is_decided(Y)), Report(Y))
    return fields(
        programs=[
            program("A", committing(Y, 1), Report(Y)),
            follows,
            program("F", *notes(size, 0x61), known=3),
            program("K", *compactor(1), known=2),
        ],
        state=UNDECIDED_Y,
        objects=X_HERE | stored_of(Y),
        last=9,
        stale=3,
        shrinks=True,
        **BEHIND,
    )


@scope("a late removal, other appends, a compactor; a list or a get may miss all changes but one's own")
def _stale_appends(size: int, mistake: str) -> dict[str, Any]:
    return fields(
        programs=[
            program("T", *retention(X, 0x51, 5)),
            program("F", *notes(1, 0x61), known=3),
            program("K", *compactor(1 + size), known=2),
        ],
        state=state_of(*checkpoint(X), *checkpoint(U)),
        objects=stored_of(X) | stored_of(U),
        last=9,
        stale=12,
        shrinks=True,
        log=BEHIND["log"],
    )


@scope("a save by two ranks and other appends, a power cut at any moment, a start after it")
def _power_cut(size: int, mistake: str) -> dict[str, Any]:
    ranks = [program("A", *coordinator(1)), program("V", *voter(0x11)), program("F", *notes(2 * size, 0x61))][: 2 + size]
    last = program("B", AfterCut(), *shifted(start(0x21), 1))
    return fields(
        programs=[*ranks, last],
        state=ONE,
        objects=X_HERE,
        last=11,
        power=True,
        shrinks=True,
        lost=1,
        dies=tuple(range(len(ranks))),
    )


@scope("three processes put states and remove what these cover; a power cut at any moment, a start after it")
def _power_cut_in_compaction(size: int, mistake: str) -> dict[str, Any]:
    ranks = [program("K", *compactor(1)), program("F", *notes(1, 0x61), Compact()), program("G", *notes(2, 0x71), Compact())]
    last = program("B", AfterCut(), *shifted(start(0x21, until=6), 1), known=None)
    return fields(programs=[*ranks, last], state=ONE, objects=X_HERE, last=8, power=True, shrinks=True, dies=(0, 1, 2))


@scope("entry 3 is unreadable; two rebuilds while a commit, an abort or another append and a load run")
def _rebuild(size: int, mistake: str) -> dict[str, Any]:
    known = [*checkpoint(X), *checkpoint(U), announce(Y)]
    second = [program("H", *rebuild(0x91))] if size else []
    return fields(
        programs=[
            program("A", *coordinator(1, announces=False)[1:], known=4),
            program("G", *rebuild(0x81)),
            *second,
            program("L", *reader()),
        ],
        state=state_of(*known),
        objects=X_HERE | stored_of(U) | Y_HERE,
        last=14,
        shrinks=True,
        log=written(note(7), note(8), note(9)),
        damaged=("entry 3",),
    )


@scope("entry 3, which commits Y, is unreadable, and a start has begun since; two rebuilds and a load; Y was reported")
def _rebuild_past_a_gap(size: int, mistake: str) -> dict[str, Any]:
    known = [*checkpoint(X), *checkpoint(U), announce(Y)]
    second = [program("H", *rebuild(0x91))] if size else []
    return fields(
        programs=[
            program("A", Follow(is_decided(Y)), Report(Y), known=3),
            program("G", *rebuild(0x81)),
            *second,
            program("L", *reader()),
        ],
        state=state_of(*known),
        objects=X_HERE | stored_of(U) | stored_of(Y),
        last=14,
        shrinks=True,
        log=written(note(7), commit(Y), begin(6, 0x61)),
        damaged=("entry 3",),
    )


@scope("entry 3 is unreadable; a rebuild while a late abort, a follower and an append of another run")
def _rebuild_beside_followers(size: int, mistake: str) -> dict[str, Any]:
    known = [*checkpoint(X), *checkpoint(U), announce(Y)]
    follows = program("W", Follow(is_decided(Y)), Report(Y), known=4)
    return fields(
        programs=[
            program("V", aborting(Y, 0x11), Report(Y), known=4),
            follows,
            program("F", *notes(size, 0x61), known=4),
            program("G", *rebuild(0x81)),
        ],
        state=state_of(*known),
        objects=X_HERE | stored_of(U) | stored_of(Y),
        last=14,
        shrinks=True,
        log=written(note(7), note(8), note(9)),
        damaged=("entry 3",),
    )


@scope("the newest state is unreadable; a commit, other appends, a compactor, a process that knows nothing")
def _damaged_state(size: int, mistake: str) -> dict[str, Any]:
    return fields(
        programs=[
            program("A", committing(Y, 1), Report(Y)),
            program("F", *notes(size, 0x65), known=3),
            program("K", *compactor(1 + size)),
            program("L", Read(settles=False), known=None),
        ],
        state=UNDECIDED_Y,
        objects=X_HERE | stored_of(Y),
        last=9,
        shrinks=True,
        log=written(note(1), note(2)),
        states=(3,),
        damaged=("state 3",),
    )


@scope("two starts of a new root; replies are lost, and the puts may arrive late")
def _new_root(size: int, mistake: str) -> dict[str, Any]:
    programs = [program("B", *start(0x21, until=6), known=None), program("C", *start(0x31, until=6), known=None)]
    return fields(programs=programs, state=None, objects=0, last=7, lost=1 + size, late=True)


@scope("a save goes on from X and leaves a branch, of which U commits late; replies are lost, and the puts may arrive late")
def _branches(size: int, mistake: str) -> dict[str, Any]:
    known = [*checkpoint(X, BRANCHES), *checkpoint(W, BRANCHES), announce(U, BRANCHES), announce(Y, BRANCHES)]
    return fields(
        programs=[
            program("A", committing(U, 1, BRANCHES), Report(U)),
            program("S", committing(Y, 0x11, BRANCHES), Report(Y)),
            program("T", *retention(W, 0x51, 5)),
            program("L", *reader(BRANCHES)),
        ],
        state=state_of(*known),
        plans=BRANCHES,
        objects=stored_of(X) | stored_of(W) | stored_of(U) | stored_of(Y),
        last=8,
        lost=1 + size,
        late=True,
    )


@scope("a person goes back to X while U is undecided; the start saves Z; a compactor")
def _rollback(size: int, mistake: str) -> dict[str, Any]:
    known = [*checkpoint(X), *checkpoint(W), announce(U)]
    saving = [Follow(lambda state: state.start > 5), *shifted(going_on(0x21, PLANS), 1)]
    if mistake:  # then no start begins, and a save of this one may come between two rollbacks
        saving = [announcing(Y, 0x21), Put(stored_of(Y)), committing(Y, 0x22), Report(Y)]
    return fields(
        programs=[
            program("A", committing(U, 1), Report(U)),
            program("P", *going_back(0x11, mistake=mistake)),
            program("S", *saving),
            program("K", *compactor(1 + size)),
        ],
        state=state_of(*known),
        objects=stored_of(X) | stored_of(W) | stored_of(U),
        last=8,
        shrinks=True,
    )


@scope("a mirror copies Y and holds X, to which Y refers; another mirror does the same; a sweep of what nobody needs")
def _mirror(size: int, mistake: str) -> dict[str, Any]:
    plans = (*PLANS[:Y], Plan(None, bits(X, R0)), Plan())
    others = [program("N", *mirroring(0x11, plans)), program("S", Read(), Sweep(), *forgetting(X, 0x21))]
    return fields(
        programs=[program("M", *mirroring(1, plans)), *others],
        state=state_of(start=7, origin="/origin"),
        plans=plans,
        objects=0,
        last=9,
        lost=size,
    )
