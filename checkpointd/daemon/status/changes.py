"""The changes between two statuses of a daemon, in lines."""

from __future__ import annotations

from collections.abc import Iterator

from checkpointd.daemon.status.model import DaemonStatus, RootStatus
from checkpointd.daemon.status.save_groups import SaveGroup, attempts_of
from checkpointd.phrases import lasting, rank_runs


def changes(before: DaemonStatus | None, after: DaemonStatus) -> Iterator[str]:
    """One line for each change from `before` to `after`. If `before` is None, the daemon and the saves in flight."""
    yield from _daemon(before, after)
    known = {root.root: root for root in before.roots} if before else {}
    for root in after.roots:
        for line in _root(known.get(root.root), root, news=before is not None):
            yield f"{root.root}: {line}"


def _daemon(before: DaemonStatus | None, after: DaemonStatus) -> Iterator[str]:
    if before is None or (before.pid, before.started_at) != (after.pid, after.started_at):
        yield f"daemon: checkpointd {after.release}, process {after.pid} on {after.host}"
        before = None
    if after.leaving and (before is None or not before.leaving):
        yield "daemon: leaving; it finishes the saves in flight"


def _root(before: RootStatus | None, after: RootStatus, *, news: bool) -> Iterator[str]:
    if after.problem is not None and (before is None or before.problem != after.problem):
        yield f"cannot be looked at: {after.problem.message}"
    if before is not None and before.problem is not None and after.problem is None:
        yield "can be looked at again"
    if before is None or _connected(before) != _connected(after):
        yield _trainers(after)
    known = {(a.tag, a.attempt): _said(a) for a in attempts_of(before)} if before else {}
    for attempt in attempts_of(after):
        line = _said(attempt)
        if (attempt.live or news) and known.get((attempt.tag, attempt.attempt)) != line:
            yield line
    if before is None or before.latest != after.latest:
        yield f"latest: {after.latest or 'none'}"


def _connected(root: RootStatus) -> dict[int, bool]:
    return {rank.rank: rank.connected for rank in root.ranks}


def _trainers(root: RootStatus) -> str:
    gone = [rank.rank for rank in root.ranks if not rank.connected]
    missing = f"; gone: {rank_runs(gone)}" if gone else ""
    return f"trainers: {len(root.ranks) - len(gone)} of {len(root.ranks)} connected{missing}"


def _said(attempt: SaveGroup) -> str:
    """The attempt in words that change only when something happens: without bytes and speed."""
    counts = ", ".join(f"{number} {phase}" for phase, number in attempt.counts.items())
    if attempt.live:
        missing = attempt.votes_missing
        return f"in flight: {attempt.name}: {counts}{f'; waiting for {rank_runs(missing)}' if missing else ''}"
    why = "; ".join(f"{rank_runs(s.rank for s in saves)}: {message}" for (_, message), saves in attempt.causes.items())
    took = (attempt.ended_at or attempt.began_at) - attempt.began_at
    return f"ended: {attempt.name}: {counts}{f': {why}' if why else f' in {lasting(took)}'}"
