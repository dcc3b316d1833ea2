"""The changes between two reports on a root, in lines."""

from __future__ import annotations

from collections.abc import Iterator

from checkpointd.phrases import rank_runs
from checkpointd.pipeline.root.wholeness import in_words
from checkpointd.report.status import Flight, Standing


def changes(before: Standing | None, after: Standing) -> Iterator[str]:
    """One line for each difference of `after` from `before`; if `before` is None, a line for everything in `after`."""
    if after.log_damage and (before is None or before.log_damage != after.log_damage):
        yield f"log: {after.log_damage}"
    if before is None or before.holder != after.holder:
        yield _job(after)
    if before is None:
        yield f"checkpoints: {after.checkpoints}"
    failed = {row.prefix for row in before.failures} if before else set()
    yield from (f"aborted: {row.named}: {row.brief}: {row.why}" for row in reversed(after.failures) if row.prefix not in failed)
    # If a checkpoint is removed, an older one enters the list, and is no news.
    newest = max((row.order for row in before.commits), default=(0, -1)) if before else (0, -1)
    yield from (f"committed: {row.named}, step {row.step}" for row in reversed(after.commits) if row.order > newest)
    said = in_words(before.root, before.missing) if before else []
    yield from (line for line in in_words(after.root, after.missing) if line not in said)
    if before is None or before.latest != after.latest:
        yield f"latest: {after.latest.note or after.latest.tag or 'none'}"
    yield from (_flight(flight) for flight in after.flights if before is None or flight not in before.flights)


def _job(found: Standing) -> str:
    holder = found.holder
    if holder is None:
        return "job: none ever ran here"
    return f"job: start {holder.start}, {holder.world_size} ranks, {holder}, {holder.life}"


def _flight(flight: Flight) -> str:
    missing = [word.rank for word in flight.ranks if word.vote == "missing"]
    waiting = f", waiting for {rank_runs(missing)}" if missing else ""
    state = "in doubt" if flight.orphaned else "in flight"
    of = f" of {flight.world_size}" if flight.world_size else ""
    return f"{state}: {flight.named}: {flight.votes}{of} voted{waiting}, {flight.object_bytes} bytes"
