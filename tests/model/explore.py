"""Explores every world of a scope, breadth first, so that the first broken promise comes with the shortest way to it.

A world is kept as a hash of 64 bits: a scope of ten million worlds misses one with a probability below 1e-5.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from checkpointd.commit import log as rules
from checkpointd.commit import log_access as access
from checkpointd.layout.log_records import LogEntry
from tests.model.numbered import CRASHES, Scope, World
from tests.model.programs import Op
from tests.model.promises import Violation
from tests.model.world import Worlds

SMALL = {"STATE_EVERY": 1, "STATES_KEPT": 2, "LOOKS": 2, "REBUILD_GAP": 10, "FORGET_EVERY": 1, "FORGET_AFTER": 1}
"""The constants of the real code in a small scope."""


@dataclass
class Verdict:
    worlds: int = 0
    steps: int = 0
    seconds: float = 0.0
    violation: Violation | None = None
    trace: list[str] = field(default_factory=list)
    is_complete: bool = True
    locals: int = 0
    """The different states of processes."""

    @property
    def words(self) -> str:
        if self.violation is not None:
            return f"BROKEN after {len(self.trace)} steps: {self.violation}"
        return "holds" if self.is_complete else "holds so far (not complete)"


@contextmanager
def small_constants(scope: Scope) -> Iterator[None]:
    """The constants of `commit/log.py` and `commit/log_access.py` are those of the scope."""
    before = dict[tuple[object, str], int]()
    for name, value in {**SMALL, **dict(scope.constants)}.items():
        module = access if hasattr(access, name) else rules
        before[module, name] = getattr(module, name)
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def explore(scope: Scope, *, worlds_max: int = 20_000_000, seconds_max: float = 3600.0) -> Verdict:
    """Explore all worlds of a scope, or until a promise breaks."""
    with small_constants(scope):
        return _explore(Worlds(scope), worlds_max, seconds_max)


def _explore(worlds: Worlds, worlds_max: int, seconds_max: float) -> Verdict:
    began, found = time.monotonic(), Verdict()
    first = worlds.start()
    numbers = {hash(first): 0}
    parents = array("i", [-1])
    edges_from, edges_to, ends = array("i"), array("i"), array("i")
    left = deque([(0, first)])
    at = 0
    try:
        while left:
            at, world = left.popleft()
            is_end = True
            for _, what, after in worlds.steps(world):
                found.steps += 1
                mark = hash(after)
                number = numbers.get(mark)
                if number is None:
                    number = numbers[mark] = len(parents)
                    parents.append(at)
                    left.append((number, after))
                if what != CRASHES and number != at:
                    is_end = False
                    edges_from.append(at)
                    edges_to.append(number)
            if is_end:
                worlds.check_end(world)
                ends.append(at)
            if len(parents) >= worlds_max or (at & 0xFFF == 0 and time.monotonic() - began > seconds_max):
                found.is_complete = False
                break
        else:
            if (lost := _first_that_never_ends(len(parents), edges_from, edges_to, ends)) is not None:
                at = lost
                raise Violation("g", "from here the processes never come to an end")
    except Violation as violation:
        found.violation = violation
        found.trace = _trace(worlds, first, _way(parents, at), numbers)
    found.worlds, found.seconds, found.locals = len(parents), time.monotonic() - began, len(worlds.locals)
    return found


def _first_that_never_ends(count: int, edges_from: array[int], edges_to: array[int], ends: array[int]) -> int | None:
    """The first world from which no end can be reached."""
    can = np.zeros(count, dtype=bool)
    can[np.frombuffer(ends, dtype=np.int32)] = True
    sources, targets = np.frombuffer(edges_from, dtype=np.int32), np.frombuffer(edges_to, dtype=np.int32)
    while sources.size:
        found = sources[can[targets]]
        if not found.size:
            break
        can[found] = True
        left = ~can[sources]
        sources, targets = sources[left], targets[left]
    return None if can.all() else int(np.argmin(can))


def _way(parents: array[int], at: int) -> list[int]:
    found = [at]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found[::-1]


def _trace(worlds: Worlds, first: World, way: list[int], numbers: dict[int, int]) -> list[str]:
    """The steps of a way in words, and the one that breaks the promise."""
    found, world = list[str](), first
    for wanted in way[1:]:
        for pid, what, after in worlds.steps(world):
            if numbers.get(hash(after)) == wanted:
                found.append(described(worlds, world, pid, what))
                world = after
                break
    return found


def described(worlds: Worlds, world: World, pid: int, what: object) -> str:
    """A step in words."""
    if pid < 0:
        assert isinstance(what, tuple)
        return "power cut, losing " + (", ".join(what[1]) or "nothing") if what[0] == "cut" else "a late put arrives"
    name = worlds.programs[pid].name
    if what == CRASHES:
        return f"{name} crashes"
    operation = worlds.operations[world[4 + pid]]
    assert operation is not None
    match operation.op, what:
        case _, str():
            words = what
        case Op.LIST, (_, int(listing)):
            found = worlds.store.listings[listing]
            words = f"lists entries {list(found.entries)}, states {list(found.states)}, marks {list(found.marks)}"
        case ((Op.ENTRIES | Op.WAIT), (_, number, entry)):
            words = f"reads entry {number}" if entry > 0 else f"finds entry {number} {'damaged' if entry else 'missing'}"
        case Op.STATE, (_, state):
            words = f"reads state {operation.number}: {'ok' if state > 0 else 'damaged' if state else 'missing'}"
        case Op.PUT, (how, *_):
            assert isinstance(operation.value, LogEntry)
            records = "+".join(type(one).__name__.removesuffix("Record").lower() for one in operation.value.records)
            ends = "no reply" if how == "unsure" else "taken" if what == ("put", False) else "done"
            words = f"puts {records} as entry {operation.number}: {ends}"
        case Op.CHOOSE, (_, _, label):
            words = str(label)
        case ((Op.REMOVE_ENTRIES | Op.REMOVE_STATES), (_, number)):
            words = f"{operation.op.name.lower().replace('_', ' ')}: {number}"
        case _:
            words = f"{operation.op.name.lower().replace('_', ' ')} {operation.number or ''}"
    return f"{name} {words.strip()}"
