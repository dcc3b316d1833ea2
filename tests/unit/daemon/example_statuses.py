"""Made-up statuses of daemons, for tests of the page, the metrics and the command line."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from checkpointd.daemon.status.model import (
    CheckpointStatus,
    DaemonStatus,
    HeldStatus,
    MemoryStatus,
    PastSave,
    RankStatus,
    RootStatus,
    SaveStatus,
    SpaceStatus,
)
from checkpointd.daemon.status.verdict import attention, judged
from checkpointd.layout.manifest import ErrorReport
from checkpointd.layout.save_timings import PhaseSeconds
from checkpointd.report.advice import for_root

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
        seconds=PhaseSeconds(
            staging=staging,
            persisting=persisting,
            hash=persisting / 9,
            codec=persisting / 2,
            disk=persisting * 0.8,
            waiting=commit,
        )
        if phase == "committed"
        else PhaseSeconds(),
    )


def rank_status(rank: int, world_size: int, *, connected: bool = True, failed: int = 0, left_well: bool = False) -> RankStatus:
    return RankStatus(
        rank=rank,
        world_size=world_size,
        start=3,
        pid=4000 + rank,
        connected=connected,
        since=NOW - 7300,
        saves_committed=41 - failed,
        saves_failed=failed,
        bytes_persisted=(41 - failed) * 2 * GIB,
        bytes_stored=int((41 - failed) * 2 * GIB * 0.66),
        stall_s=0.0125 * 41 + 0.001 * rank,
        gone_at=None if connected else NOW - 60,
        left_well=left_well,
    )


def checkpoints(newest: int, count: int, world_size: int, *, every: int = 100) -> tuple[CheckpointStatus, ...]:
    return tuple(
        CheckpointStatus(
            tag=f"global_step{newest - k * every}",
            attempt="00000003-0",
            step=newest - k * every,
            world_size=world_size,
            order=(3, 40 - k),
            committed_at=NOW - 93 - 600 * k,
            is_latest=k == 0,
        )
        for k in range(count)
    )


def noise(k: int, kind: int) -> float:
    """Between 0 and 1, the same each time, and with no pattern that an eye sees."""
    return (((k + 1) * 7919 + kind * 104_729) ** 2 % 99_991) / 99_991


def history(newest: int, count: int, world_size: int, *, every: int = 100) -> tuple[PastSave, ...]:
    """Saves of the past ten minutes apart, oldest first: the loss falls, one in twenty does not commit."""
    return tuple(
        PastSave(
            tag=f"global_step{newest - k * every}",
            step=newest - k * every,
            at=NOW - 93 - 600 * k,
            committed=k % 20 != 11,
            took_s=None if k % 20 == 11 else 6.4 + 1.8 * noise(k, 5) + (4.0 if k == 30 else 0.0),
            held_s=None if k % 20 == 11 else 0.011 + 0.004 * noise(k, 6),
            raw_bytes=None if k % 20 == 11 else world_size * 2 * GIB,
            stored_bytes=None if k % 20 == 11 else int(world_size * (1.3 + 0.05 * noise(k, 7)) * GIB),
            metrics={} if k % 20 == 11 else {"loss": 2.1 + 0.012 * k + 0.05 * noise(k, 8)},
        )
        for k in reversed(range(count))
    )


def root_status(
    root: str,
    *,
    ranks: Sequence[RankStatus],
    in_flight: Sequence[SaveStatus] = (),
    recent: Sequence[SaveStatus] = (),
    newest: int | None = 4100,
    problem: ErrorReport | None = None,
    past: int = 48,
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
        problem_advice=for_root(problem) if problem else "",
        history=() if newest is None else history(newest, past, world),
        space=None
        if problem
        else SpaceStatus(free_bytes=812 * GIB, total_bytes=4000 * GIB, growth_bytes_per_day=62.0 * GIB, days_left=812 / 62),
    )


def daemon_status(*unjudged: RootStatus, leaving: bool = False, now: float = NOW) -> DaemonStatus:
    roots = sorted((judged(root, now) for root in unjudged), key=attention)
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
        serves=("/mnt/ckpts", "/mnt/scratch"),
        roots=tuple(roots),
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
    here = root_status(BUSY_ROOT, ranks=ranks, recent=recent, newest=3900)
    return daemon_status(
        structs.replace(here, newest_committed_at=NOW - 1293),
        root_status("/mnt/scratch/run2", ranks=[rank_status(0, 1)], newest=None, problem=lost),
        leaving=True,
    )


def overlapping() -> DaemonStatus:
    """Saves that come faster than they are committed: each begins while the one before is under way; the last one is slow."""
    recent = [
        save(r, 3700 + 100 * k, began=NOW - 40 + 6 * k, persisting=8 + r, commit=1 - 0.2 * r)
        for k in range(4)
        for r in range(4)
    ]
    flying = [
        save(r, 4100, began=NOW - 14, phase="persisting", staging=0.7, persisting=13, done=0.2 + 0.1 * r) for r in range(4)
    ]
    ranks = [rank_status(r, 4) for r in range(4)]
    return daemon_status(root_status(BUSY_ROOT, ranks=ranks, recent=recent, in_flight=flying, newest=4000))


def spooling(saves: int = 3, ranks: int = 2) -> DaemonStatus:
    """Saves that lie in the spools while the bucket is slow: the newest is uploaded, the others wait."""
    nbytes, flying = 16 << 20, []
    for k in range(saves):
        for r in range(ranks):
            one = save(r, 100 * (k + 1), began=NOW - 60 * (saves - k), phase="persisting", total=nbytes, tag=f"step{k + 1}")
            is_newest = k == saves - 1
            flying.append(
                structs.replace(
                    one,
                    phase="uploading" if is_newest else "spooled",
                    speed_bps=None,
                    eta_s=None,
                    spooled_at=one.began_at + 5,
                    uploading_at=one.began_at + 9 if is_newest else None,
                    uploaded=min(nbytes, nbytes // 4 * r) if is_newest else 0,
                    upload_total=nbytes,
                )
            )
    return daemon_status(root_status("s3://bucket/run", ranks=[rank_status(r, ranks) for r in range(ranks)], in_flight=flying))


def many(count: int = 20) -> DaemonStatus:
    """As many roots as a node of a large team has: one fails, one lost a trainer, one is late, two save; most have ended."""
    found = []
    for k in range(count):
        root, ranks = f"/mnt/ckpts/team-{'abc'[k % 3]}/run-{k + 1:02d}", [rank_status(r, 2) for r in range(2)]
        saved = [save(r, 100 * n, began=NOW - 700 * (4 - n)) for n in range(1, 4) for r in range(2)]
        if k == 7:
            found.append(structs.replace(failing().roots[-1], root=root))
        elif k == 11:
            found.append(root_status(root, ranks=[ranks[0], rank_status(1, 2, connected=False)], recent=saved))
        elif k == 5:
            late = [save(r, 100 * n, began=NOW - 5000 + 600 * n) for n in range(1, 4) for r in range(2)]
            found.append(structs.replace(root_status(root, ranks=ranks, recent=late), newest_committed_at=NOW - 3194))
        elif k in (3, 14):
            flying = [save(r, 400, began=NOW - 2, phase="persisting", persisting=1.4, done=0.5) for r in range(2)]
            found.append(root_status(root, ranks=ranks, recent=saved, in_flight=flying))
        elif k % 4 == 0:
            found.append(root_status(root, ranks=ranks, recent=saved))
        elif k % 4 == 2:
            found.append(root_status(root, ranks=[]))
        else:
            gone = [rank_status(r, 2, connected=False, left_well=True) for r in range(2)]
            found.append(root_status(root, ranks=gone, recent=saved))
    return daemon_status(*found)


def fresh() -> DaemonStatus:
    """A daemon that has just begun: a trainer is there, and nothing is known yet."""
    new = structs.replace(rank_status(0, 1), saves_committed=0, start=None, bytes_persisted=0, bytes_stored=0, stall_s=0.0)
    root = root_status("/mnt/ckpts/new", ranks=[new], newest=None)
    return daemon_status(structs.replace(root, commit_s=(), space=None))


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
