"""Scopes, and the numbers of all that a world consists of: equal values have one number."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

from checkpointd.commit.log_access import KnownLog, LogAccess
from checkpointd.layout.log_records import LogEntry, LogState
from tests.model.programs import Local, Operation, Program
from tests.model.promises import PLANS, Facts, Ghost, Plans
from tests.model.store import Objects

DONE, DEAD = 0, 1
"""The numbers of processes that have ended, and that have crashed."""
FIRST = 1
"""The number of the state with which a scope begins."""
World = tuple[int, ...]
Step = tuple[str, World]
SYNCED, CRASHES = -1, -2


class Rest(NamedTuple):
    """What few steps change."""

    commits_said: int = 0
    aborts_said: int = 0
    """The attempts whose commit, or abort, was reported."""
    lost: int = 0
    """The replies that may still be lost."""
    flight: tuple[tuple[int, int], ...] = ()
    """The puts that may still arrive: number and entry."""
    loose: tuple[tuple[str, int, int], ...] = ()
    """Changes that a power cut may undo: "entry" or "state", its number, and what was there before."""
    shown: tuple[int, ...] = ()
    """The newest listings, the last one last, of which a stale one may be shown."""
    lags: tuple[int, ...] = ()
    """How many changes each process may miss."""


@dataclass(frozen=True)
class Scope:
    """The start of a world. `state`: the one with which the log begins, under the number FIRST; None: a root that is new.

    `last`: the greatest number that an entry may get. `log`: entries that are there. `damaged`: entries and states (names as
    "entry 2") that are unreadable.
    """

    name: str
    about: str
    programs: list[Program]
    state: LogState | None
    objects: int
    last: int
    plans: Plans = PLANS
    lost: int = 0
    late: bool = False
    crash: bool = False
    stale: int = 0
    power: bool = False
    dies: tuple[int, ...] = ()
    """The processes that end with the power."""
    log: tuple[LogEntry, ...] = ()
    states: tuple[int, ...] = ()
    """The numbers after whose entries a state lies there, too."""
    damaged: tuple[str, ...] = ()
    shrinks: bool = False
    """Whether entries may go: by compaction or a power cut."""
    constants: tuple[tuple[str, int], ...] = ()
    """Of `log` and `log_access`, which differ from those of small scopes."""


class Numbered:
    """The numbers of one scope, and what was computed of them."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.store = Objects()
        self.programs = scope.programs
        self._rests: dict[Rest, int] = {}
        self.rests: list[Rest] = []
        self._locals: dict[object, int] = {}
        self.locals: list[tuple[int, Local] | None] = [None, None]
        self.operations: list[Operation | None] = [None, None]
        self.moves: list[dict[object, tuple[int, int]]] = [{}, {}]
        self._facts: dict[tuple[Any, ...], int] = {(): 0}
        self.facts: list[tuple[Any, ...]] = [()]
        self._checked: dict[tuple[int, int], tuple[int, int]] = {}
        self._truths: dict[tuple[Ghost, ...], int] = {}
        self.truths: list[tuple[Ghost, ...]] = []
        self._said: dict[tuple[int, int], Facts] = {}
        self._puts: dict[tuple[int, int, int, int], tuple[int, int]] = {}
        self._right: set[tuple[int, int, int]] = set()
        self._told: dict[int, tuple[int, ...]] = {}
        self._changes: dict[tuple[object, ...], int] = {}

    # --- numbers ------------------------------------------------------------------------------------------------------

    def rest(self, rest: Rest) -> int:
        if rest not in self._rests:
            self._rests[rest] = len(self.rests)
            self.rests.append(rest)
        return self._rests[rest]

    def truth(self, truth: tuple[Ghost, ...]) -> int:
        if truth not in self._truths:
            self._truths[truth] = len(self.truths)
            self.truths.append(truth)
        return self._truths[truth]

    def local(self, pid: int, local: Local) -> int:
        program = self.programs[pid]
        if program.is_done(local):
            return DONE
        local = self._normal(pid, local)
        key = pid, self._key(local)
        if key not in self._locals:
            self._locals[key] = len(self.locals)
            self.locals.append((pid, local))
            self.operations.append(program.operation(local))
            self.moves.append({})
        return self._locals[key]

    def _normal(self, pid: int, local: Local) -> Local:
        """The same without differences that do not matter: where no power cut comes, all that is visible is durable."""
        machine = local.machine
        if isinstance(machine, LogAccess):
            machine = replace(machine, known=self._normal_log(pid, machine.known))
        return local._replace(known=self._normal_log(pid, local.known), machine=machine)

    def _normal_log(self, pid: int, known: KnownLog) -> KnownLog:
        due = known.due if self.programs[pid].compacts else None
        return replace(
            known,
            state=self.store.canonical(known.state),
            is_settled=known.is_settled or not self.scope.power,
            due=None if due is None else self.store.canonical(due),
        )

    def _key(self, value: object) -> object:
        if isinstance(value, LogState):
            return "state", self.store.state(value)
        if isinstance(value, LogEntry):
            return "entry", self.store.entry(value)
        if isinstance(value, tuple):
            return tuple(map(self._key, value))
        if is_dataclass(value) and not isinstance(value, type):
            return type(value), *(self._key(getattr(value, one.name)) for one in fields(value))
        return value

    def fact(self, facts: tuple[Any, ...]) -> int:
        if not facts:
            return 0
        key = self._key(facts)
        assert isinstance(key, tuple)
        if key not in self._facts:
            self._facts[key] = len(self.facts)
            self.facts.append(facts)
        return self._facts[key]

    def said(self, state: int) -> Facts:
        if state not in self._said:
            found = self.store.states[state]
            assert found is not None
            self._said[state] = Facts.of(found)
        return self._said[state]
