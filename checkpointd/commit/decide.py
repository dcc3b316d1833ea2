"""The decision that follows from votes: commit, abort, or wait.

Four places act on it, and the record that comes first in the log counts: the coordinator (`pipeline/outcome/publish.py`), any
rank whose deadline has passed (`pipeline/attempt.py`, aborts only), the next start (`pipeline/outcome/recover.py`), and a
daemon whose trainer has ended (`daemon/roots/in_doubt.py`).

Invariants
  DECIDE-1  A commit needs a valid yes vote of every rank for this attempt and one step, and plans that together cover every
      tensor once.
  DECIDE-2  A no vote or an invalid vote aborts at once. A missing vote aborts only after the deadline, or when nobody can vote
      any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from checkpointd.layout.files import clash
from checkpointd.layout.manifest import RANKS_AT_FAULT_MAX, ErrorReport, Vote
from checkpointd.phrases import listed, rank_runs

OnNoProgress = Literal["warn", "abort", "ignore"]
ON_EVERY_RANK = "Call save() on every rank, not on one rank alone"
NAMED_MAX = 32
"""The most ranks that one line of the log names."""
REASON_MAX = 4000
"""The most characters of a rank's reason that its vote and the outcome keep."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A commit if `error` is None, else an abort for that reason; `ranks`: the first RANKS_AT_FAULT_MAX at fault."""

    error: ErrorReport | None = None
    ranks: tuple[int, ...] = field(default=())

    @property
    def commit(self) -> bool:
        return self.error is None


def decide(votes: Mapping[int, Vote | None], *, tag: str, attempt: str, world_size: int) -> Decision | None:
    """Commit, abort, or None while votes are missing and no vote so far forbids a commit.

    Pass None for a vote that exists but cannot be read: it counts as invalid, so the decision is an abort.
    """
    bad = sorted(r for r, v in votes.items() if v is None or vote_fault(v, r, tag, attempt, world_size) is not None)
    if bad:
        vote = votes[bad[0]]
        why = "cannot be read" if vote is None else vote_fault(vote, bad[0], tag, attempt, world_size)
        return abort("AbortedError", f"the vote of rank {bad[0]} {why}{_and_more(bad)}", bad)
    no = sorted(r for r, v in votes.items() if v is not None and v.vote == "no")
    if no:
        return refused({rank: vote.error for rank in no if (vote := votes[rank]) is not None})
    if not votes.keys() >= set(range(world_size)):
        return None
    cast = {rank: vote for rank, vote in votes.items() if vote is not None}
    steps = {rank: vote.step for rank, vote in cast.items()}
    if len(set(steps.values())) > 1:
        return _other_step(steps)
    fault = _files_fault({rank: vote.files for rank, vote in cast.items()}) or _place_fault(cast)
    return unshared(fault) if fault else Decision()


def _files_fault(files: Mapping[int, tuple[str, ...] | None]) -> str | None:
    """Why the files of all ranks cannot lie in one directory; None if they can, or if no rank stored files."""
    storing, not_storing = ([r for r in sorted(files) if (files[r] is None) is absent] for absent in (False, True))
    if storing and not_storing:
        return f"{rank_runs(storing)} stored files, and {rank_runs(not_storing)} a state"
    owners: dict[str, int] = {}
    for rank in storing:
        for name in files[rank] or ():
            if owners.setdefault(name, rank) != rank:
                return f"ranks {owners[name]} and {rank} both stored a file {name!r}"
    if (both := clash(owners)) is not None:
        return f"rank {owners[both]} stored a file {both!r}, and others have files in a directory of that name"
    return None


def _place_fault(votes: Mapping[int, Vote]) -> str | None:
    """Why the files of all ranks cannot be shown in one directory; None if they can."""
    first, *others = sorted(votes)
    one = votes[first]
    for rank in others:
        other = votes[rank]
        if other.shown_at != one.shown_at:
            return f"rank {first} stored files for {one.shown_at!r}, and rank {rank} for {other.shown_at!r}"
        if other.unfinished != one.unfinished:
            return f"rank {first} filled the directory {one.unfinished!r}, and rank {rank} {other.unfinished!r}"
    return None


def _other_step(steps: Mapping[int, int]) -> Decision:
    first = min(steps)
    others = sorted(rank for rank, step in steps.items() if step != steps[first])
    message = (
        f"rank {first} saved step {steps[first]} and rank {others[0]} step {steps[others[0]]}{_and_more(others)} under one "
        "tag: they called save() for this tag a different number of times. Call save() on every rank each time, or give each "
        "step its own tag"
    )
    return abort("AbortedError", message, others)


def _and_more(ranks: Sequence[int]) -> str:
    """The number of ranks at fault beside the one that a message names."""
    return f" (and {len(ranks) - 1} more ranks)" if len(ranks) > 1 else ""


def refused(no: Mapping[int, ErrorReport | None]) -> Decision:
    """The abort that follows from the no votes of these ranks. `no` gives the reason of each, or None if it gave no reason."""
    reports = {rank: report for rank, report in no.items() if report is not None}
    # A failure explains more than a skip or a newer save, so a failure is named first.
    ordered = sorted(reports.items(), key=lambda item: (item[1].code in ("SkippedError", "SupersededError"), item[0]))
    if not ordered:
        return abort("AbortedError", f"{rank_runs(list(no))} voted no without a reason", list(no))
    rank, report = ordered[0]
    more = f" (and {len(no) - 1} more ranks voted no)" if len(no) > 1 else ""
    what = "dropped it" if report.code == "SupersededError" else f"failed while {report.phase}"
    message = f"rank {rank} {what}: {shortened(report.message)}{more}"
    return abort(report.code, message, list(no), phase=report.phase)


def shortened(reason: str) -> str:
    """A rank's reason, cut to the length that votes and outcomes keep."""
    return reason if len(reason) <= REASON_MAX else f"{reason[:REASON_MAX]}…"


def vote_fault(vote: Vote, rank: int, tag: str, attempt: str, world_size: int) -> str | None:
    """Why `vote` is not a valid vote of `rank` on this attempt; None if it is."""
    if (vote.rank, vote.tag, vote.attempt) != (rank, tag, attempt):
        return f"belongs to rank {vote.rank} of {vote.tag}/{vote.attempt}"
    if vote.world_size != world_size:
        return f"speaks of {vote.world_size} ranks, not {world_size}"
    if not 0 <= rank < world_size:
        return f"is that of a rank that {world_size} ranks do not have"
    if vote.vote == "yes" and vote.index is None:
        return "says yes without naming an index"
    return None


def deadline(missing: Mapping[int, str], *, timeout_s: float) -> Decision:
    """The abort when votes are still missing after `timeout_s`. `missing` maps each rank to a note on how far it came."""
    ranks = sorted(missing)
    shown = listed([f"rank {r} ({missing[r]})" if missing[r] else f"rank {r}" for r in ranks])
    message = (
        f"no vote from {shown} within {timeout_s:g} s: every rank must call save() for the same step and tag; "
        "the next save starts afresh"
    )
    return abort("DeadlineError", message, ranks)


def awaited_words(votes_missing: Sequence[int] | None) -> str:
    """What an attempt waits for, and what to look at. `votes_missing`: None on a rank that gathers no votes."""
    if votes_missing:
        return (
            f"no vote from {rank_runs(votes_missing, NAMED_MAX)}: save() was not called there for this step and tag, or the "
            f"shard is still being written. {ON_EVERY_RANK}"
        )
    if votes_missing is None:
        return (
            "rank 0 has not put the outcome: save() was not called there for this step and tag, or its log names the ranks "
            f"that have not voted. {ON_EVERY_RANK}"
        )
    return "all ranks have voted; the outcome is not put"


def has_no_progress(votes: Mapping[int, Vote | None]) -> bool:
    """Whether trained tensors are unchanged since an earlier step on some rank, and changed on no rank."""
    words = {vote.trained for vote in votes.values() if vote is not None}
    return "still" in words and "moved" not in words


def no_progress(step: int) -> Decision:
    """The abort of a save of `step` without progress."""
    return abort("NoProgressError", no_progress_words(step), [])


def no_progress_words(step: int) -> str:
    """What is wrong with a save without progress, and what to look at."""
    return (
        f"the step moved on to {step}, but no tensor that requires grad has changed since the checkpoint before: is the model "
        "that is saved the one that is trained, does the optimizer hold its parameters, is the learning rate 0?"
    )


def unshared(fault: str) -> Decision:
    """The abort of an attempt whose ranks describe the state differently."""
    return abort("AbortedError", f"the ranks do not describe one state: {fault}", [])


def recover(votes: Mapping[int, Vote | None], *, tag: str, attempt: str) -> Decision:
    """The decision on an undecided attempt of an older start, which gets no more votes: a missing vote aborts."""
    world_size = next((v.world_size for v in votes.values() if v is not None), 0)
    decision = decide(votes, tag=tag, attempt=attempt, world_size=world_size) if votes else None
    if decision is not None:
        return decision
    missing = sorted(set(range(world_size)) - set(votes))
    who = f"{rank_runs(missing)} had not voted" if missing else "no rank had voted"
    message = f"the job ended before the attempt was decided: {who}"
    return abort("AbortedError", message, missing, phase="recovery")


def abort(code: str, message: str, ranks: Sequence[int] = (), *, phase: str = "vote") -> Decision:
    """An abort for the error class named `code`, which struck in `phase`."""
    return Decision(ErrorReport(code=code, message=message, phase=phase), tuple(ranks)[:RANKS_AT_FAULT_MAX])
