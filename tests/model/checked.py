"""Checks the promises of `promises.py`: in what a process believes, in what is stored, and at the end."""

from __future__ import annotations

from typing import Any

from checkpointd.layout.log_records import LogState
from tests.model.numbered import DEAD, DONE, Numbered, World
from tests.model.promises import NAMES, STARTS, Ghost, Violation, stored_of
from tests.model.store import BAD, NONE


class Checked(Numbered):
    """Checks the promises in each world of a scope."""

    # --- promises -----------------------------------------------------------------------------------------------------

    def _checked_facts(self, world: World, facts: int) -> World:
        key = facts, world[1]
        if key not in self._checked:
            commits = aborts = 0
            for fact in self.facts[facts]:
                one, two = self._check_fact(fact, self.truths[world[1]])
                commits, aborts = commits | one, aborts | two
            self._checked[key] = commits, aborts
        commits, aborts = self._checked[key]
        if commits or aborts:
            rest = self.rests[world[3]]
            said = rest._replace(commits_said=rest.commits_said | commits, aborts_said=rest.aborts_said | aborts)
            world = (*world[:3], self.rest(said), *world[4:])
        return world

    def _check_fact(self, fact: tuple[Any, ...], truth: tuple[Ghost, ...]) -> tuple[int, int]:
        """Check one fact. Returns the attempts whose commit, and whose abort, is reported."""
        now = truth[-1]
        match fact:
            case "proved", LogState() as state:
                unknown = ~0 if any(one.thin for one in self.programs) else 0
                is_there = state.number < len(truth)
                if not is_there or not self.said(self.store.state(state)).is_true(
                    truth[state.number], self.scope.plans, unknown=unknown
                ):
                    raise Violation("e", f"a process takes for the state after entry {state.number} what it never was")
            case "put", nonce:
                if nonce not in now.nonces:
                    raise Violation("f", "an append reports success, and its entry is not in the log")
            case "refused", nonces, LogState() as state, saves:
                if now.nonces & set(nonces):
                    raise Violation("f", "an append reports a refusal, and its entry is in the log")
                self._check_refusal(state, saves, truth[state.number])
            case "reported", attempt, status:
                if status in ("checkpoint", "removed"):
                    if not now.commits >> attempt & 1:
                        raise Violation("a", f"a process reports the commit of {NAMES[attempt]}, which did not commit")
                    return 1 << attempt, 0
                if status == "aborted":
                    if now.commits >> attempt & 1:
                        raise Violation("a", f"a process reports the abort of {NAMES[attempt]}, which committed")
                    return 0, 1 << attempt
            case "owns", start, nonce:
                if (start, nonce) not in now.begins:
                    raise Violation("k", f"two processes believe that they have begun start {start}")
            case "damaged", attempt:
                raise Violation("e", f"a load takes {NAMES[attempt]} for damaged, and nobody has damaged it")
        return 0, 0

    def _check_refusal(self, state: LogState, saves: int | None, ghost: Ghost) -> None:
        """(i)"""
        if saves is None:
            return
        known = state.attempts.get(NAMES[saves])
        if known is not None and known.status == "undecided" and not ghost.fenced >> saves & 1:
            raise Violation("i", f"the commit of {NAMES[saves]} is refused, and nobody has decided it")
        is_mirror = state.begin is not None and bool(state.begin.origin)
        if known is None and (ghost.spared >> saves & 1 or is_mirror) and not ghost.announced >> saves & 1:
            raise Violation("i", f"{NAMES[saves]} is spared, or mirrored, and may not be announced")

    def _check_stored(self, world: World, *, after_cut: bool = False) -> None:
        """(d), (c): what is stored tells the truth, from the newest state and from the one before it."""
        key = world[0], world[1], world[2]
        if key in self._right:
            return
        directory, ghost = self.store.directories[world[0]], self.truths[world[1]][-1]
        self._check_objects(world[2], ghost)
        pending = bool(directory.marks) and directory.marks[-1] > max((number for number, _ in directory.states), default=0)
        is_covered = BAD not in directory.log or any(number >= directory.log.index(BAD) for number, _ in directory.states)
        if is_covered and not pending:
            is_doubled = len(directory.states) > 1 and not self.scope.damaged and not after_cut
            for place in (-1, -2) if is_doubled else (-1,):
                told = self.store.told(directory, place)
                if told == NONE or not self._tells(told, ghost):
                    words = "if the newest state were damaged, the one before it" if place == -2 else "the log as it is stored"
                    raise Violation("d", f"{words} does not tell the truth")
        self._right.add(key)

    def _tells(self, state: int, ghost: Ghost) -> bool:
        return self.said(state).is_true(ghost, self.scope.plans, unknown=0)

    def _check_objects(self, objects: int, ghost: Ghost) -> None:
        for a, plan in enumerate(self.scope.plans):
            if ghost.live >> a & 1:
                if stored_of(a) & ~objects:
                    raise Violation("c", f"the checkpoint {NAMES[a]} has lost objects of its own")
                if plan.refers & ~objects:
                    raise Violation("c", f"the checkpoint {NAMES[a]} has lost objects to which it refers")

    def check_end(self, world: World) -> None:
        """(g): nobody can do anything any more."""
        stuck = [self.programs[pid].name for pid, one in enumerate(world[4:]) if one > DEAD]
        if stuck:
            raise Violation("g", f"{', '.join(stuck)} wait for ever")
        ghost = self.truths[world[1]][-1]
        state = self.store.told(self.store.directories[world[0]])
        if state != NONE:
            said = self.said(state)
            needed = sum(plan.refers for a, plan in enumerate(self.scope.plans) if ghost.live >> a & 1)
            for a, name in enumerate(NAMES):
                forgotten = (said.swept | ~said.known) >> a & 1 and ghost.removed >> a & 1
                if forgotten and stored_of(a) & world[2] & ~needed:
                    raise Violation("g", f"objects of {name} stay for ever, since the log says that they were swept")
        starts = [pid for pid, one in enumerate(self.programs) if one.name in "BC"]
        if starts and world[4 + starts[-1]] == DONE and all(world[4 + pid] != DEAD or pid < starts[-1] for pid in starts):
            older = sum(1 << a for a, start in enumerate(STARTS) if start < ghost.start)
            if ghost.open & older:
                raise Violation("g", "an attempt of an older start stays undecided")
