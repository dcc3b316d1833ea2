"""`latest` at a simulated root, checked at each of its moves.

The invariant `latest-forward` of `simledger.py`: `latest` goes back only if a tag is committed again just while another process
moves `latest` off it to an older commit. That process must then give it back (POINTER-2 of `pipeline/root/latest.py`).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple

from checkpointd.commit.facts import Order
from checkpointd.errors import FormatError
from checkpointd.layout.keys import DELETED, LATEST, OUTCOME
from checkpointd.layout.manifest import Outcome, decode
from checkpointd.testing.job.simroot import SimRoot

RACE_S = 6.0
"""How long after its look at a tag a process moves `latest` off it, if nothing hinders it. Few calls take as long as 2 s."""


class Debt(NamedTuple):
    """`latest` went back from the commit of `owed` at `tag` to that of `back`, moved by `mover`."""

    mover: str
    tag: str
    back: Order
    owed: Order
    since: float


@dataclass(slots=True)
class LatestWatch:
    """`latest` at `root` as the effects on its storage show it. `refused`: processes that met an injected error."""

    root: SimRoot
    refused: Container[str]
    hindered_until: float = 0.0
    """Until then, a move may take longer than RACE_S, and a mover may fail to give `latest` back."""
    debts: list[Debt] = field(default_factory=list)
    """What is still to be given back durably."""
    _seen: Order | None = None
    _tag: str = ""
    """The tag that `latest` names."""
    _committed: dict[str, dict[Order, float]] = field(default_factory=dict)
    """By tag: when the outcome of each commit was put."""
    _unasked: set[Order] = field(default_factory=set)
    """The commits whose saves did not ask for `latest`: from them it may have moved on to older ones."""

    def committed(self, outcome: Outcome) -> None:
        """The outcome of a commit was put."""
        self._committed.setdefault(outcome.tag, {})[outcome.order] = self._now
        if not outcome.save_latest:
            self._unasked.add(outcome.order)

    def fault_of_move(self, mover: str) -> str:
        """What `mover`, which has just put `latest`, broke; empty if it broke nothing. Its tag has a durable commit."""
        # A save that commits the tag which `latest` names already leaves `latest` alone.
        orders = [self._seen, *(order for order, removed in self._durable_commits(self._tag).items() if not removed)]
        before = max((order for order in orders if order is not None), default=None)
        tag = self._tag
        self.look()
        order = self._seen
        if before is None or order is None or order >= before:
            return ""
        if not self._raced(mover, tag, before, order):
            return f"{mover} moved latest from order {before} back to {order}"
        self.debts.append(Debt(mover, tag, order, before, self._now))
        return ""

    def _raced(self, mover: str, tag: str, before: Order, order: Order) -> bool:
        """Whether `mover` may have looked at `tag` before the commit of `before`, and found a commit older than `order`."""
        commits = self._committed.get(tag, {})
        recent = before in commits and self._now - commits[before] < RACE_S
        hindered = self._now < self.hindered_until or mover in self.refused
        return any(older < order for older in commits) and (recent or hindered)

    def look(self) -> None:
        """Believe what `latest` names now."""
        self._tag = _named(self.root.visible(LATEST))
        self._seen = self.order()

    def synced(self) -> None:
        """What was given back is durable."""
        durable = self._order_of(self.root.durable(LATEST))
        self.debts = [debt for debt in self.debts if durable is None or durable < debt.owed]

    def stands(self, order: Order) -> bool:
        """Whether `latest` is at `order` or beyond, or went back from there and is still to be given back."""
        least = min([order, *(debt.back for debt in self.debts if debt.owed >= order)])
        current = self.order()
        return current is not None and current >= least

    def may_be_back_after(self, start: float) -> bool:
        """Whether `latest` may be behind although a job that began at `start` has moved it to the newest commit."""
        return any(debt.mover in self.root.storage.alive() or debt.since >= start for debt in self.debts)

    def fault_of_debts(self, mover: str | None = None, back: Order | None = None) -> str:
        """What should have been given back by now: by `mover` after its move to the commit of `back`, or by anybody; empty if
        nothing. The dead owe nothing, and what was removed is owed to nobody: the next commit or start moves `latest` on.
        """
        current = self.order()
        for debt in self.debts:
            there = self._durable_commits(debt.tag).get(debt.owed, True) is False
            blamed = (
                debt.mover in self.root.storage.alive() and debt.mover not in self.refused and debt.since >= self.hindered_until
            )
            asked = debt.owed not in self._unasked and (mover is None or (debt.mover, debt.back) == (mover, back))
            if asked and blamed and there and (current is None or current < debt.owed):
                return f"{debt.mover} moved latest from order {debt.owed} back to {debt.back}, and did not give it back"
        return ""

    def order(self) -> Order | None:
        """The order of the durable commit that `latest` names."""
        return self._order_of(self.root.visible(LATEST))

    @property
    def _now(self) -> float:
        return self.root.storage.loop.time()

    def _order_of(self, pointer: bytes | None) -> Order | None:
        return max(self._durable_commits(_named(pointer)), default=None)

    def _durable_commits(self, tag: str) -> dict[Order, bool]:
        """The orders of the durable commits of `tag`, and whether each was removed."""
        found = {}
        for name in sorted(self.root.durable_names(tag)) if tag else ():
            key = f"{tag}/{name}/{OUTCOME}"
            outcome = outcome_in(self.root.durable(key), key)
            if outcome is not None and outcome.outcome == "commit":
                found[outcome.order] = self.root.visible(f"{tag}/{name}/{DELETED}") is not None
        return found


def _named(pointer: bytes | None) -> str:
    return (pointer or b"").decode(errors="replace").strip()


def outcome_in(data: bytes | None, key: str) -> Outcome | None:
    """The outcome that `data`, the content of `key`, is."""
    try:
        return None if data is None else decode(data, Outcome, key)
    except FormatError:
        return None
