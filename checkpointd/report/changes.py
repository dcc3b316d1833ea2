"""The changes between two reports on a root, in lines."""

from __future__ import annotations

from collections.abc import Iterator

from checkpointd.phrases import rank_runs
from checkpointd.pipeline.root.wholeness import is_removed, lost_text
from checkpointd.report.status import Flight, Standing


def changes(before: Standing | None, after: Standing) -> Iterator[str]:
    """One line for each difference of `after` from `before`; if `before` is None, a line for everything in `after`."""
    if after.log_damage and (before is None or before.log_damage != after.log_damage):
        yield f"log: {after.log_damage}"
    if before is None or before.holder != after.holder:
        yield _job(after)
    if before is None:
        yield f"checkpoints: {after.checkpoints}"
    yield from _aborted(before, after)
    yield from _committed(before, after)
    yield from _incomplete(before, after)
    if before is None or before.latest != after.latest:
        yield f"latest: {after.latest.note or after.latest.tag or 'none'}"
    known = before.flights if before else ()
    for flight in after.flights:
        if flight not in known:
            yield _flight(flight)


def _job(found: Standing) -> str:
    holder = found.holder
    if holder is None:
        return "job: none ever ran here"
    return f"job: start {holder.start}, {holder.world_size} ranks, {holder}, {holder.life}"


def _aborted(before: Standing | None, after: Standing) -> Iterator[str]:
    known = {(f.tag, f.attempt) for f in before.failures} if before else set()
    for failure in reversed(after.failures):
        if (failure.tag, failure.attempt) not in known:
            yield f"aborted: {failure.tag} ({failure.attempt}): {failure.code}: {failure.message}"


def _committed(before: Standing | None, after: Standing) -> Iterator[str]:
    """Commits that are newer than all known ones. If a commit is removed, an older one enters the list, and is not reported."""
    newest = max((commit.order for commit in before.commits), default=(0, -1)) if before else (0, -1)
    for commit in reversed(after.commits):
        if commit.order > newest:
            yield f"committed: {commit.tag} ({commit.attempt}), step {commit.step}"


def _incomplete(before: Standing | None, after: Standing) -> Iterator[str]:
    known = before.incomplete if before else ()
    for one in after.incomplete:
        if one not in known:
            yield f"{'removed' if is_removed(one.lost) else 'not whole'}: {one.tag} ({one.attempt}): {lost_text(one.lost)}"


def _flight(flight: Flight) -> str:
    missing = [word.rank for word in flight.ranks if word.vote == "missing"]
    waiting = f", waiting for {rank_runs(missing)}" if missing else ""
    state = "in doubt" if flight.orphaned else "in flight"
    of = f" of {flight.world_size}" if flight.world_size else ""
    return f"{state}: {flight.tag} ({flight.attempt}): {flight.votes}{of} voted{waiting}, {flight.object_bytes} bytes"
