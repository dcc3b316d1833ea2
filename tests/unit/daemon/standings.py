"""Daemons that never were: statuses for the page, the metrics and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from checkpointd.daemon.status import (
    CheckpointStatus,
    DaemonStatus,
    HeldStatus,
    MemoryStatus,
    RankStatus,
    RootStatus,
    SaveStatus,
)
from checkpointd.layout.manifest import ErrorReport

NOW = 1_790_000_000.0
GIB = 1 << 30


def save(
    rank: int,
    step: int,
    *,
    began: float,
    phase: str = "committed",
    staging: float = 0.8,
    persisting: float = 4.0,
    commit: float = 0.6,
    done: float = 1.0,
    total: int = 2 * GIB,
    error: ErrorReport | None = None,
    advice: str = "",
    missing: tuple[int, ...] | None = None,
    tag: str | None = None,
    waiting: float = 0.0,
) -> SaveStatus:
    """A save that began at `began` and spent so many seconds in each phase; `done` of `total` bytes are persisted."""
    reached = {"staging": 0, "staged": 1, "persisting": 2, "prepared": 3}.get(phase, 4)
    staged_at = began + staging
    persisting_at = staged_at + waiting
    failed_early = error is not None and error.phase == "staging"
    raw_done = int(total * done) if reached >= 2 and not failed_early else 0
    return SaveStatus(
        tag=tag if tag is not None else f"global_step{step}",
        attempt="00000003-0",
        step=step,
        rank=rank,
        phase=phase,
        raw_total=total if reached >= 2 else 0,
        raw_done=raw_done,
        stored=int(raw_done * 0.66),
        speed_bps=raw_done / persisting if raw_done else None,
        eta_s=(total - raw_done) / (raw_done / persisting) if raw_done and phase == "persisting" else None,
        votes_missing=missing,
        error=error,
        began_at=began,
        staged_at=staged_at if reached >= 1 and not failed_early else None,
        persisting_at=persisting_at if reached >= 2 and not failed_early else None,
        voted_at=persisting_at + persisting if reached >= 3 and (error is None or error.phase == "prepared") else None,
        ended_at=persisting_at + persisting + commit if reached == 4 else None,
        advice=advice,
    )


def rank_status(rank: int, world_size: int, *, connected: bool = True, failed: int = 0) -> RankStatus:
    return RankStatus(
        rank=rank,
        world_size=world_size,
        epoch=3,
        pid=4000 + rank,
        connected=connected,
        since=NOW - 7300,
        saves_committed=41 - failed,
        saves_failed=failed,
        bytes_persisted=(41 - failed) * 2 * GIB,
        bytes_stored=int((41 - failed) * 2 * GIB * 0.66),
        stall_s=0.0125 * 41 + 0.001 * rank,
    )


def checkpoints(newest: int, count: int, world_size: int, *, every: int = 100) -> tuple[CheckpointStatus, ...]:
    return tuple(
        CheckpointStatus(
            tag=f"global_step{newest - k * every}",
            attempt="00000003-0",
            step=newest - k * every,
            world_size=world_size,
            order=(3, 40 - k),
            committed_at=datetime.fromtimestamp(NOW - 93 - 600 * k, UTC).isoformat(),
            is_latest=k == 0,
        )
        for k in range(count)
    )


def root_status(
    root: str,
    *,
    ranks: Sequence[RankStatus],
    in_flight: Sequence[SaveStatus] = (),
    recent: Sequence[SaveStatus] = (),
    newest: int | None = 4100,
    problem: ErrorReport | None = None,
) -> RootStatus:
    world = ranks[0].world_size if ranks else 1
    return RootStatus(
        root=root,
        latest=None if newest is None else f"global_step{newest}",
        newest_step=newest,
        newest_committed_at=None if newest is None else NOW - 93,
        checkpoints=() if newest is None else checkpoints(newest, 8, world),
        ranks=tuple(ranks),
        in_flight=tuple(in_flight),
        recent=tuple(recent),
        held=tuple(
            HeldStatus(
                tag=f"global_step{newest}",
                attempt="00000003-0",
                step=newest or 0,
                rank=r.rank,
                nbytes=2 * GIB,
                phase="committed",
            )
            for r in ranks
            if newest is not None
        ),
        commit_s=(7.1, 7.2, 7.2, 7.4),
        problem=problem,
    )


def daemon_status(*roots: RootStatus, leaving: bool = False, now: float = NOW) -> DaemonStatus:
    held = sum(held.nbytes for root in roots for held in root.held)
    return DaemonStatus(
        release="0.1.0",
        host="node-17",
        pid=812,
        socket="/run/checkpointd/checkpointd.sock",
        started_at=NOW - 86_000,
        now=now,
        clients=sum(len(root.ranks) for root in roots),
        clients_max=512,
        refused=2,
        leaving=leaving,
        memory=MemoryStatus(mapped=held * 2, mapped_max=max(held * 3, 64 * GIB), held=held, held_max=max(2 * held, 64 * GIB)),
        bandwidth_bps=1.5e9,
        roots=roots,
    )


BUSY_ROOT = "/mnt/ckpts/llama-7b"


def spread(rank: int, step: int) -> float:
    """Between 0 and 1, the same each time: so that ranks differ as they do."""
    return ((rank * 7919 + step * 104_729) % 997) / 997


def busy(ranks: int = 8, saves: int = 4) -> DaemonStatus:
    """A job in good health in the middle of a save; rank 1 is slow."""
    recent = []
    for k in range(saves):
        step = 4100 - 100 * (saves - 1 - k)
        began = NOW - 100 - 600 * (saves - 1 - k)
        for r in range(ranks):
            slow = 2.2 if r % 16 == 1 and k == saves - 2 else 0.0
            took = 3.2 + 1.2 * spread(r, step) + slow
            staging = 0.5 + 0.4 * spread(r, step + 1)
            recent.append(
                save(
                    r,
                    step,
                    began=began + 0.05 * spread(r, 3),
                    staging=staging,
                    persisting=took,
                    commit=max(0.2, 7.2 - took - staging),
                )
            )
    flying = []
    for r in range(ranks):
        voted = r % 8 in (0, 4)
        flying.append(
            save(
                r,
                4200,
                began=NOW - 3.4,
                phase="prepared" if voted else "persisting",
                staging=0.6,
                persisting=2.6,
                done=1.0 if voted else 0.35 + 0.5 * spread(r, 11),
                missing=tuple(x for x in range(ranks) if x % 8 not in (0, 4)) if r == 0 else None,
            )
        )
    return daemon_status(
        root_status(BUSY_ROOT, ranks=[rank_status(r, ranks) for r in range(ranks)], in_flight=flying, recent=recent)
    )


def failing() -> DaemonStatus:
    """A job whose last saves went wrong in several ways, and a root that cannot be looked at."""
    late = ErrorReport(
        code="DeadlineError",
        message="global_step4000: no vote of rank 3 came within 600 s; it had not begun to persist",
        phase="prepared",
    )
    full = ErrorReport(
        code="StoreFullError", message="write: no space left on device (/mnt/ckpts/llama-7b)", phase="persisting"
    )
    others = ErrorReport(
        code="AbortedError", message="global_step4100: rank 2 failed while persisting: no space left", phase="persisting"
    )
    look = "Look at the log of rank 3: it did not call save() for this step and tag, or was stuck or killed before its vote."
    free = "Free some space, or raise the quota, where rank 2 writes. The next save starts afresh."
    recent = [save(r, 3900, began=NOW - 1300, persisting=4 + 0.3 * r, commit=2 - 0.3 * r) for r in range(4)]
    recent += [save(r, 4000, began=NOW - 1000, phase="aborted", commit=590, error=late, advice=look) for r in range(3)]
    recent += [
        save(
            r,
            4100,
            began=NOW - 120,
            phase="failed" if r == 2 else "aborted",
            error=full if r == 2 else others,
            advice=free,
            done=0.4,
        )
        for r in range(4)
    ]
    ranks = [rank_status(r, 4, connected=r != 3, failed=2) for r in range(4)]
    lost = ErrorReport(code="StoreError", message="/mnt/scratch/run2: Stale file handle", phase="")
    return daemon_status(
        root_status(BUSY_ROOT, ranks=ranks, recent=recent, newest=3900),
        root_status("/mnt/scratch/run2", ranks=[rank_status(0, 1)], newest=None, problem=lost),
        leaving=True,
    )


HOSTILE = "<img src=x onerror=\"document.title='broken in'\">&amp;'\"\u202e"


def hostile() -> DaemonStatus:
    """Names and messages that try to be more than text."""
    error = ErrorReport(code="StagingError", message=f"{HOSTILE} was torn", phase="staging")
    return daemon_status(
        root_status(
            f"/mnt/{HOSTILE}",
            ranks=[rank_status(0, 1)],
            in_flight=[save(0, 2, began=NOW - 1, phase="persisting", done=0.5, persisting=1.0, tag=f"flying {HOSTILE}")],
            recent=[
                save(0, 1, began=NOW - 60, phase="failed", error=error, advice=HOSTILE, tag=HOSTILE),
                save(0, 0, began=NOW - 90, tag=f"good {HOSTILE}"),
            ],
        )
    )
