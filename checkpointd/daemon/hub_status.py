"""The daemon's status: the state of its hub as plain data."""

from __future__ import annotations

import os
import socket
import time

from checkpointd import __version__
from checkpointd.daemon.hub import Hub, RankRecord
from checkpointd.daemon.process.logs import escaped
from checkpointd.daemon.roots.root_monitor import ROOTS_MAX
from checkpointd.daemon.status.model import ELSEWHERE, DaemonStatus, HeldStatus, MemoryStatus, RankStatus, RootStatus
from checkpointd.daemon.status.verdict import attention, judged
from checkpointd.phrases import listed
from checkpointd.report.advice import for_root

RECENT_MAX = 1024
"""Ended saves that the status shows of each root, the newest: four for each of 256 ranks, in less than a megabyte."""
NAME_MAX = 200
"""Characters of a root's name in a list of roots."""


def standing(hub: Hub) -> DaemonStatus:
    """The whole status, from memory; does not use the storage."""
    config = hub.config
    now = time.time()
    hub.memory.settle()
    return DaemonStatus(
        release=__version__,
        host=socket.gethostname(),
        pid=os.getpid(),
        socket=config.socket,
        started_at=hub.started_at,
        now=now,
        clients=hub.clients,
        clients_max=config.clients_max,
        refused=hub.refused,
        refusals=dict(hub.refusals),
        leaving=hub.leaving,
        memory=MemoryStatus(
            mapped=hub.account.used, mapped_max=hub.account.limit, held=hub.tier.nbytes, held_max=hub.tier.held_bytes_max
        ),
        bandwidth_bps=config.bandwidth_bps,
        serves=hub.roots.serves,
        mirrors=hub.mirrors.progress,
        exports=hub.exports.progress,
        spool=None if hub.spool is None else hub.spool.status(),
        left_out=_left_out(hub),
        roots=tuple(sorted((judged(_root(hub, root), now) for root in hub.known_roots()), key=attention)),
    )


def _left_out(hub: Hub) -> tuple[str, ...]:
    roots = hub.not_looked_after
    if not roots:
        return ()
    named = listed([escaped(root, NAME_MAX) for root in roots])
    others = "one other" if len(roots) == 1 else f"{len(roots)} others"
    return (
        f"This daemon looks after {ROOTS_MAX} roots, those in use first, and not after {others}. Saves are persisted there, "
        "too, but checkpoints are not shown, and attempts in doubt are not decided. "
        f"{ELSEWHERE} Not looked after: {named}.",
    )


def _root(hub: Hub, root: str) -> RootStatus:
    ranks = hub.ranks_at(root)
    look = hub.root_scans.get(root)
    return RootStatus(
        root=root,
        name=hub.names.get(root, ""),
        latest=look.latest if look else None,
        newest_step=look.newest_step if look else None,
        newest_committed_at=look.newest_committed_at if look else None,
        checkpoints=look.checkpoints if look else (),
        ranks=tuple(map(_rank, ranks)),
        in_flight=tuple(job.status() for job in hub.jobs.at(root)),
        recent=tuple(ended.save for ended in hub.jobs.ended_at(root)[-RECENT_MAX:]),
        held=tuple(
            HeldStatus(
                tag=kept.info.tag,
                attempt=str(kept.info.attempt),
                step=kept.info.step,
                rank=kept.info.rank,
                nbytes=kept.slot.nbytes,
                phase=kept.phase,
            )
            for kept in hub.tier
            if kept.root == root
        ),
        commit_s=tuple(next((rank.commit_s for rank in ranks if rank.rank == 0), ())),
        problem=look.problem if look else None,
        problem_advice=for_root(look.problem) if look and look.problem else "",
        history=look.history if look else (),
        space=look.space if look else None,
        requests=hub.roots.requests(root),
    )


def _rank(record: RankRecord) -> RankStatus:
    return RankStatus(
        rank=record.rank,
        world_size=record.world_size,
        start=record.start,
        pid=record.pid,
        connected=record.connections > 0,
        since=record.since,
        saves_committed=record.tally.committed,
        saves_failed=record.tally.failed,
        saves_no_progress=record.tally.no_progress,
        saves_inline=sum(record.tally.inline.values()),
        bytes_persisted=record.tally.bytes_persisted,
        bytes_stored=record.tally.bytes_stored,
        stall_s=record.tally.stall_s,
        gone_at=record.gone_at,
        left_well=record.left_well,
    )
