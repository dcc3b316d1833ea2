"""Groups the saves of single ranks by attempt, for people. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from checkpointd.daemon.status.model import RootStatus, SaveStatus
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline.shard import NEARLY_DONE, part_done

DONE = frozenset({"spooled", "uploading", "prepared", "committed"})
"""The phases after persisting: the bytes are durable, at the root or in the spool."""
IN_SPOOL = frozenset({"spooled", "uploading"})
"""The phases in which the bytes are durable in the spool, and go to the root."""
LEFT_OUT = frozenset({"SkippedError", "SupersededError"})
"""The errors of saves that a job leaves out by its own settings."""
SHOWN = {"prepared": "voted"}
"""Phases that people see under another name."""


@dataclass(slots=True)
class SaveGroup:
    """One attempt at a tag: the saves of this node's ranks, by rank."""

    tag: str
    attempt: str
    step: int
    saves: list[SaveStatus] = field(default_factory=list)
    absent: tuple[int, ...] = ()
    """Ranks of this node that have not called save() for it, while it is live."""

    @property
    def name(self) -> str:
        return f"{self.tag} ({self.attempt})"

    @property
    def live(self) -> bool:
        return any(save.ended_at is None for save in self.saves)

    @property
    def began_at(self) -> float:
        return min(save.began_at for save in self.saves)

    @property
    def ended_at(self) -> float | None:
        """When the last rank here ended; None while one has not ended."""
        times = [save.ended_at for save in self.saves if save.ended_at is not None]
        return max(times) if len(times) == len(self.saves) else None

    @property
    def counts(self) -> dict[str, int]:
        """How many ranks are in each phase, the most frequent phase first, in the words for people."""
        return dict(Counter(SHOWN.get(save.phase, save.phase) for save in self.saves).most_common())

    @property
    def goes_up(self) -> bool:
        """Whether the ranks have persisted, and some of their bytes still go from the spool to the root."""
        phases = {save.phase for save in self.saves}
        return bool(phases & IN_SPOOL) and not phases & {"staging", "staged", "persisting"}

    @property
    def fraction(self) -> float:
        """How far persisting has come, or the upload if it `goes_up`, over the ranks here, absent ones, too: 0 to 1, which it
        only is when no vote is missing.
        """
        part = fraction if self.goes_up else _persisted
        done = sum(map(part, self.saves)) / (len(self.saves) + len(self.absent))
        return done if self.votes_missing == () else min(done, NEARLY_DONE)

    @property
    def has_voted(self) -> bool:
        """Whether every rank here has voted."""
        return not self.absent and all(save.phase in ("prepared", "committed") for save in self.saves)

    @property
    def uploaded(self) -> int:
        return sum(save.uploaded for save in self.saves)

    @property
    def upload_total(self) -> int:
        return sum(save.upload_total for save in self.saves)

    @property
    def raw_total(self) -> int:
        return sum(save.raw_total for save in self.saves)

    @property
    def raw_done(self) -> int:
        return sum(save.raw_done for save in self.saves)

    @property
    def stored(self) -> int:
        return sum(save.stored for save in self.saves)

    @property
    def speed_bps(self) -> float | None:
        """Bytes per second of all ranks together that persist now."""
        return sum(save.speed_bps or 0.0 for save in self._persisting) or None

    @property
    def eta_s(self) -> float | None:
        """Seconds until the slowest rank will have persisted."""
        return max((save.eta_s for save in self._persisting if save.eta_s is not None), default=None)

    @property
    def votes_missing(self) -> tuple[int, ...] | None:
        """The ranks without a vote; None if the coordinator is not on this node, or its save has ended."""
        return next((save.votes_missing for save in self.saves if save.votes_missing is not None), None)

    @property
    def committed(self) -> bool:
        return any(save.phase == "committed" for save in self.saves)

    @property
    def is_in_spool(self) -> bool:
        """Whether every rank's bytes are durable in the spool, and go to the root."""
        return all(save.phase in IN_SPOOL for save in self.saves)

    @property
    def was_left_out(self) -> bool:
        """Whether it ended since a save was skipped or replaced, as the job asks for, and nothing failed."""
        return all(save.error is not None and save.error.code in LEFT_OUT for save in self.saves)

    @property
    def causes(self) -> dict[tuple[str, str], list[SaveStatus]]:
        """The saves that did not commit, by phase and message; those that were aborted by others last."""
        found: dict[tuple[str, str], list[SaveStatus]] = {}
        for save in sorted((s for s in self.saves if s.error is not None), key=lambda s: s.phase == "aborted"):
            assert save.error is not None
            found.setdefault((save.phase, save.error.message), []).append(save)
        return found

    @property
    def _persisting(self) -> list[SaveStatus]:
        return [save for save in self.saves if save.phase == "persisting"]


def fraction(save: SaveStatus) -> float:
    """The part of one rank's bytes that is on the disk, or, if they are in the spool, at the root; 1 only when it has voted."""
    return part_done(save.uploaded, save.upload_total) if save.phase in IN_SPOOL else _persisted(save)


def _persisted(save: SaveStatus) -> float:
    return 1.0 if save.phase in DONE else part_done(save.raw_done, save.raw_total)


def foremost(attempts: Sequence[SaveGroup], most: int) -> tuple[list[SaveGroup], list[SaveGroup]]:
    """The `most` attempts to show first, and the others: what only waits in the spool comes last, and older ones after newer
    ones. Both parts are in the order in which they began.
    """
    waits = [all(save.phase == "spooled" for save in attempt.saves) for attempt in attempts]
    ordered = sorted(range(len(attempts)), key=lambda at: (waits[at], -at))
    return [attempts[at] for at in sorted(ordered[:most])], [attempts[at] for at in sorted(ordered[most:])]


def gather(saves: Iterable[SaveStatus]) -> list[SaveGroup]:
    """The attempts that `saves` belong to, in the order in which they began."""
    found: dict[tuple[str, str], SaveGroup] = {}
    for save in saves:
        found.setdefault((save.tag, save.attempt), SaveGroup(save.tag, save.attempt, save.step)).saves.append(save)
    for attempt in found.values():
        attempt.saves.sort(key=lambda save: save.rank)
    return sorted(found.values(), key=lambda attempt: attempt.began_at)


def attempts_of(root: RootStatus) -> list[SaveGroup]:
    """All known attempts at a root, the newest last."""
    found = gather([*root.recent, *root.in_flight])
    for attempt in found:
        if attempt.live and (named := AttemptId.parse(attempt.attempt)) is not None:
            begun = {rank.rank for rank in root.ranks if rank.connected and rank.start == named.start}
            attempt.absent = tuple(sorted(begun - {save.rank for save in attempt.saves}))
    return found


def in_flight(root: RootStatus) -> list[SaveGroup]:
    """The attempts that have not ended on every rank here, the newest last."""
    return [attempt for attempt in attempts_of(root) if attempt.live]


def uncommitted(root: RootStatus) -> list[SaveGroup]:
    """The attempts since the newest commit, newest first: those that ended without one, and those in flight."""
    found: list[SaveGroup] = []
    for attempt in reversed(attempts_of(root)):
        ended = attempt.ended_at
        if attempt.committed or (root.newest_committed_at or 0.0) > (ended or inf):
            break
        found.append(attempt)
    return found
