"""The start of a job: rank 0 takes its number and recovers. Every rank learns it, and checks that it sees the same root."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import msgspec
from torch.distributed import Store as MeetingStore  # type: ignore[attr-defined]  # exported, but not in __all__

from checkpointd.commands import at_tag, command
from checkpointd.commit.branches import newest_of
from checkpointd.commit.log import for_followers
from checkpointd.config import Ranks
from checkpointd.errors import CheckpointdError, NotFoundError, RootNotSharedError, SidecarError, StoreFullError
from checkpointd.layout.log_records import BeginRecord, decode_state, encode_state
from checkpointd.phrases import listed, rank_runs
from checkpointd.pipeline.outcome import starting
from checkpointd.pipeline.outcome.recover import recover
from checkpointd.pipeline.root import leases, reserve, starts
from checkpointd.pipeline.root.leases import Beginner, HeldLease
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store import writers
from checkpointd.store.base import Store
from checkpointd.store.conditions import check_conditions_of
from checkpointd_client.ranks.board import Board, broadcast_from_coordinator
from checkpointd_client.ranks.neighbours import is_new, neighbours
from checkpointd_client.ranks.writer import WriterThread

log = logging.getLogger("checkpointd")

RECOVERY_TIMEOUT_S = 900.0
"""Long enough for a root with very many attempts on a slow file system."""
START_TIMEOUT_S = 120.0
"""The ranks wait at least this long for each other to make their Checkpointers."""
_DOING = (
    "making its Checkpointer. Call Checkpointer(...) on every rank, not on rank 0 alone, or pass the ranks that save as "
    "process_group=..."
)
LOOK_TIMEOUT_S = 30.0
_RECOVERING = "rank 0 takes its start's number, and decides the attempts that earlier jobs have left"
_LOOKS = 6
"""How often a rank looks for the start before it says that the root is not shared: network file systems cache for a while."""
_NAMED_MAX = 8


@dataclass(frozen=True, slots=True)
class Begun:
    """The job's own start."""

    number: int
    nonce: str
    latest: str | None
    checkpoints: int = 0
    """The number of checkpoints of earlier starts."""
    entry: int = 0
    """The number of the last entry in the root's log, as rank 0 has read it."""
    log: str = ""
    """The state of the log there, as far as another rank needs it to follow the log."""
    latest_attempt: str = ""
    """The attempt of `latest`; empty without one."""


@dataclass(frozen=True, slots=True)
class Started:
    """A start as rank 0 knows it, with the job's lease, which `end` releases, and the surviving attempts of older starts."""

    begun: Begun
    lease: HeldLease
    surviving: tuple[str, ...]


def begin_start(
    writer: WriterThread,
    store: Store,
    ranks: Ranks,
    beginner: Beginner,
    surviving: Callable[[], tuple[str, ...]] = tuple,
    meeting: MeetingStore | None = None,
    *,
    create: bool = True,
) -> tuple[Begun, Started | None]:
    """On rank 0, take the next start and recover; on every rank, learn its number and nonce. They meet in the store
    `meeting`, by default the job's.

    `surviving` gives the attempts of older starts ("tag/attempt") that rank 0's sidecar still works at and may commit. Only
    rank 0 calls it. If another job is alive at the root, every rank raises RootInUseError. Without `create`, every rank raises
    NotFoundError if there is no root, and nothing is made.
    """
    started: list[Started] = []

    def take() -> dict[str, object]:
        if not create:
            writer.call(check_is_root(store), LOOK_TIMEOUT_S)
        begun_here = writer.call(
            begin(store, replace(beginner, surviving=surviving())), RECOVERY_TIMEOUT_S, lambda: _RECOVERING
        )
        started.append(begun_here)
        begun = begun_here.begun
        return asdict(begun)

    try:
        heard = broadcast_from_coordinator(
            ranks,
            take,
            doing=_DOING,
            come_s=max(START_TIMEOUT_S, beginner.commit_timeout_s),
            make_s=2 * RECOVERY_TIMEOUT_S,
            store=meeting,
        )
    except BaseException:
        for one in started:
            end(writer, one)
        raise
    return msgspec.convert(heard, Begun), next(iter(started), None)


def end(writer: WriterThread, started: Started | None, timeout_s: float = 2 * leases.ANSWER_S) -> None:
    """Release the job's lease, so that the next start at the root need not wait for it to expire. Raises nothing."""
    if started is not None:
        with suppress(CheckpointdError):  # if the storage does not answer, the log says so already
            writer.call(started.lease.release(), timeout_s)


def instead(root: str) -> str:
    """The advice to a job that may not begin at `root`, because another job is alive there."""
    return (
        f"One job at a time saves at a root. To read its checkpoints, call open_checkpoint({root!r}), which disturbs nobody; "
        "to save beside it, choose another root; to take this root over, so that every save of that job fails from then on, "
        "pass take_over=True. If both are starts of one job, give them the same job=..."
    )


async def check_is_root(store: Store) -> None:
    """Raise NotFoundError if no job ever saved at `store`. Writes nothing."""
    if await is_new(store):
        found = await neighbours(store.url)
        hint = f"Jobs have saved at {listed(found)}: is the path right?" if found else "Is the path right?"
        raise NotFoundError(
            f"there is no root at {store.url}, and create=False makes none. {hint} To begin a new one, leave out create=False"
        )


async def _say_new(store: Store) -> None:
    """Log that training begins at a new root, and warn if the path looks mistyped."""
    log.info("new root at %s: no job has saved here before", store.url)
    if found := await neighbours(store.url):
        log.warning(
            "the root at %s is new, but jobs have saved at %s. If this job was to go on from there, end it and mend the path. "
            "create=False refuses to make a root",
            store.url,
            listed(found),
        )


async def begin(store: Store, beginner: Beginner) -> Started:
    """Take the next start, and recover: decide the attempts that older starts left in doubt."""
    is_first = await is_new(store)
    if is_first:
        await _say_new(store)
    await check_conditions_of(store, new=is_first)
    try:
        taken = await starting.begin(store, beginner)
    except StoreFullError as error:
        log.error("%s; dropping the ballast to make room for a start", error)
        await reserve.drop(store)
        taken = await starting.begin(store, beginner)
    start = taken.start
    try:
        if taken.before.begin is not None:
            _say_who_is_fenced(store, start.start, taken.before.begin)
        found = await recover(store, taken.before)
        await reserve.lay(store)
    except BaseException:
        await taken.lease.release()
        raise
    state = RootLog.of(store).state
    newest = newest_of(state)
    latest, attempt = (None, "") if newest is None else (newest.tag, str(newest.id))
    followed = encode_state(for_followers(state)).decode()
    begun = Begun(start.start, start.nonce, latest, found.checkpoints, state.number, followed, attempt)
    return Started(begun, taken.lease, start.spared)


def say_unknown(begun: Begun, root: str, load: str, afresh: str) -> None:
    """Log that the checkpoints of earlier jobs stay because this job has not loaded. `load` and `afresh`: the calls that change
    that.
    """
    if begun.checkpoints:
        log.error(
            "this job saves at %s and has not loaded: all checkpoints that earlier jobs left there (%d, latest: %s) stay, "
            "whatever retention says, even if their tags are saved again. To go on from them, end this job%s, and call %s "
            "before the first save. To start afresh, so that retention counts them as this job's own: %s",
            root,
            begun.checkpoints,
            begun.latest,
            _going_back(begun, root),
            load,
            afresh,
        )


def _going_back(begun: Begun, root: str) -> str:
    """How a job that ends goes back to the checkpoint before it, in words."""
    if begun.latest is None:
        return ""
    back = command("rollback", *at_tag(root, begun.latest), "--attempt", begun.latest_attempt)
    return f", go back with {back} (or the next load takes what this job has saved, and retention removes the others)"


def _say_who_is_fenced(store: Store, start: int, holder: BeginRecord) -> None:
    who = holder.writer
    # A start of this very process has ended: its Checkpointer was closed, since a second one at the root is refused.
    ended = writers.is_this_process(holder.process) or writers.has_ended(holder.process)
    log.log(
        logging.INFO if ended else logging.WARNING,
        "this is start %d at %s. Start %d (process %d on %s, %s) %s",
        start,
        store.url,
        holder.start,
        who.pid,
        who.host,
        who.time,
        "has ended" if ended else "may still run: if so, its saves fail from now on",
    )


def _faults(board: Board, key: str, own: str, timeout_s: float, doing: str) -> tuple[list[int], str]:
    """Share this rank's fault, or "ok", with all ranks; returns the ranks that have one, and the first faults in words."""
    board.post(key, own)
    heard = sorted((rank, text) for rank, text in board.read(key, None, timeout_s, doing).items() if text != "ok")
    return [rank for rank, _ in heard], "; ".join(f"rank {rank}: {text}" for rank, text in heard[:_NAMED_MAX])


def check_shared(writer: WriterThread, store: Store, ranks: Ranks, board: Board, begun: Begun, timeout_s: float) -> None:
    """Raise RootNotSharedError on every rank if one does not see the start that rank 0 wrote."""
    if ranks.world_size == 1:
        return
    _, named = _faults(board, "root", root_fault(writer, store, begun), timeout_s, _DOING)
    if named:
        raise RootNotSharedError(
            f"the ranks do not share {store.url}: {named}. Every rank must see one and the same directory there: "
            "give the path of a file system that all nodes mount"
        )


def reach_sidecars(ranks: Ranks, board: Board, reach: Callable[[], object], timeout_s: float) -> None:
    """Call `reach` on every rank; raise SidecarError on every rank if it fails on one."""
    problem: SidecarError | None = None
    try:
        reach()
    except SidecarError as error:
        problem = error
    if ranks.world_size > 1:
        doing = "making its Checkpointer, with sidecar=... as well"
        without, named = _faults(board, "sidecar", str(problem) if problem else "ok", timeout_s, doing)
        if without and problem is None:
            raise SidecarError(f"no sidecar on {rank_runs(without)}: {named}")
    if problem is not None:
        raise problem


async def _follows(store: Store, begun: Begun) -> bool:
    """Whether this rank begins to follow the log where rank 0 has read it to, and sees the same entry there. Later entries may
    have covered that one since; then the log tells whether the start was taken.
    """
    root_log = RootLog.of(store)
    if root_log.state.number or not begun.log:
        return False
    return await root_log.goes_on_from(decode_state(begun.log.encode(), begun.entry))


def root_fault(writer: WriterThread, store: Store, begun: Begun) -> str:
    """ "ok", or the reason why this rank does not see the start that rank 0 wrote."""
    problem = ""
    pause = threading.Event()
    for look in range(_LOOKS):
        pause.wait(0.05 * (2**look - 1))
        try:
            if writer.call(_follows(store, begun), LOOK_TIMEOUT_S):
                return "ok"
            seen = writer.call(starts.read(store, begun.number), LOOK_TIMEOUT_S)
        except NotFoundError:
            problem = f"{store.url} on {socket.gethostname()} does not have start {begun.number}"
            continue
        except CheckpointdError as error:
            problem = str(error)
            continue
        if seen.nonce == begun.nonce:
            return "ok"
        problem = (
            f"{store.url} on {socket.gethostname()} has another start {begun.number}, taken by process {seen.writer.pid} on "
            f"{seen.writer.host}"
        )
    return problem
