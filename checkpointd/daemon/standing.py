"""How things stand with a daemon: its hub as plain data."""

from __future__ import annotations

import os
import socket
import time

from checkpointd import __version__
from checkpointd.daemon.hub import Hub, RankRecord
from checkpointd.daemon.status import DaemonStatus, HeldStatus, MemoryStatus, RankStatus, RootStatus

RECENT_MAX = 1024
"""Ended saves that are told of each root, the newest: with 256 ranks four each, and an answer that stays below a megabyte."""


def standing(hub: Hub) -> DaemonStatus:
    """Everything, from memory alone: asking costs no storage anything."""
    config = hub.config
    return DaemonStatus(
        release=__version__,
        host=socket.gethostname(),
        pid=os.getpid(),
        socket=config.socket,
        started_at=hub.started_at,
        now=time.time(),
        clients=hub.clients,
        clients_max=config.clients_max,
        refused=hub.refused,
        leaving=hub.leaving,
        memory=MemoryStatus(
            mapped=hub.account.used, mapped_max=hub.account.limit, held=hub.tier.nbytes, held_max=hub.tier.held_bytes_max
        ),
        bandwidth_bps=config.bandwidth_bps,
        roots=tuple(_root(hub, root) for root in hub.known_roots()),
    )


def _root(hub: Hub, root: str) -> RootStatus:
    ranks = hub.ranks_at(root)
    look = hub.looks.get(root)
    return RootStatus(
        root=root,
        latest=look.latest if look else None,
        newest_step=look.newest_step if look else None,
        newest_committed_at=look.newest_committed_at if look else None,
        checkpoints=look.checkpoints if look else (),
        ranks=tuple(map(_rank, ranks)),
        in_flight=tuple(job.status() for job in hub.jobs.at(root)),
        recent=tuple(job.status() for job in hub.jobs.ended_at(root)[-RECENT_MAX:]),
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
    )


def _rank(record: RankRecord) -> RankStatus:
    return RankStatus(
        rank=record.rank,
        world_size=record.world_size,
        epoch=record.epoch,
        pid=record.pid,
        connected=record.connections > 0,
        since=record.since,
        saves_committed=record.committed,
        saves_failed=record.failed,
        saves_stale=record.stale,
        bytes_persisted=record.bytes_persisted,
        bytes_stored=record.bytes_stored,
        stall_s=record.stall_s,
    )
