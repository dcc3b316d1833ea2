"""Starting up: rank 0 begins the epoch and recovers; every rank learns of it, and that it sees the same root."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from checkpointd.config import CommitConfig, Ranks
from checkpointd.errors import CheckpointdError, NotFoundError, RootNotSharedError, SidecarError, StoreFullError
from checkpointd.layout.keys import epoch_key
from checkpointd.pipeline import ballast, catalog, epochs
from checkpointd.pipeline.recover import recover
from checkpointd.store import writers
from checkpointd.store.base import Store
from checkpointd_client.ranks import Board, broadcast_from_coordinator
from checkpointd_client.writer import Writer

log = logging.getLogger("checkpointd")

RECOVERY_TIMEOUT_S = 900.0
"""A root with very many attempts on a slow file system takes a while; a storage that does not answer takes for ever."""
LOOK_TIMEOUT_S = 30.0
_LOOKS = 6
"""How often a rank looks for the epoch before it says that the root is not shared: network file systems cache for a while."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The epoch that this incarnation of the job runs in."""

    number: int
    nonce: str
    latest: str | None


def begin_epoch(
    writer: Writer, store: Store, ranks: Ranks, commit: CommitConfig, spares: Callable[[], tuple[str, ...]] = tuple
) -> Begun:
    """On rank 0: take the next epoch, recover what older ones left; on every rank: learn its number and nonce.

    `spares`, called on rank 0: attempts of older epochs ("tag/attempt") that its sidecar still works at, and may still commit.
    """

    def take() -> dict[str, object]:
        begun = writer.call(begin(store, ranks.world_size, commit, spares()), RECOVERY_TIMEOUT_S)
        return {"number": begun.number, "nonce": begun.nonce, "latest": begun.latest}

    heard = broadcast_from_coordinator(ranks, take)
    latest = heard["latest"]
    return Begun(int(str(heard["number"])), str(heard["nonce"]), None if latest is None else str(latest))


async def begin(store: Store, world_size: int, commit: CommitConfig, spares: tuple[str, ...] = ()) -> Begun:
    """Take the next epoch for `world_size` ranks, and recover what older ones left."""
    before = await epochs.newest(store)
    if before:
        await _say_who_is_fenced(store, before)
    try:
        epoch = await epochs.take(store, world_size, spares, commit_timeout_s=commit.timeout_s)
    except StoreFullError as error:
        log.error("%s; dropping the ballast to make room for a start", error)
        await ballast.drop(store)
        epoch = await epochs.take(store, world_size, spares, commit_timeout_s=commit.timeout_s)
    await recover(store, epoch.epoch, spares)
    await ballast.take_aboard(store)
    try:
        latest = await catalog.latest(store)
    except CheckpointdError as error:
        log.error("%s", error)
        latest = None
    return Begun(epoch.epoch, epoch.nonce, latest)


async def _say_who_is_fenced(store: Store, before: int) -> None:
    try:
        holder = await epochs.read(store, before)
    except CheckpointdError as error:
        log.error("the record of epoch %d cannot be read: %s", before, error)
        return
    who = holder.writer
    # A Checkpointer of this very process was closed: a second one at the same root is refused.
    ended = writers.is_this_process(holder.process) or writers.has_ended(holder.process)
    log.log(
        logging.INFO if ended else logging.WARNING,
        "epoch %d of %s (process %d on %s, %s) is over: this job runs it now%s",
        before,
        store.url,
        who.pid,
        who.host,
        who.time,
        "" if ended else "; if that one still runs, its saves fail from here on",
    )


def check_shared(writer: Writer, store: Store, ranks: Ranks, board: Board, begun: Begun, timeout_s: float) -> None:
    """Raise RootNotSharedError on every rank, naming those that do not see the epoch that rank 0 wrote."""
    if ranks.world_size == 1:
        return
    problem = root_fault(writer, store, begun)
    board.post("root", problem)
    heard = board.read("root", None, timeout_s, "making its Checkpointer")
    blind = {rank: text for rank, text in heard.items() if text != "ok"}
    if blind:
        named = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(blind.items())[:8])
        raise RootNotSharedError(
            f"the ranks do not share {store.url}: {named}. Every rank must see one and the same directory there: "
            "give the path of a file system that all nodes mount"
        )


def reach_sidecars(ranks: Ranks, board: Board, reach: Callable[[], object], timeout_s: float) -> None:
    """Call `reach` on this rank; raise on every rank where one could not reach its sidecar, naming those."""
    problem: SidecarError | None = None
    try:
        reach()
    except SidecarError as error:
        problem = error
    if ranks.world_size > 1:
        board.post("sidecar", str(problem) if problem else "ok")
        heard = board.read("sidecar", None, timeout_s, "making its Checkpointer, with sidecar=... as well")
        without = {rank: text for rank, text in heard.items() if text != "ok"}
        if without and problem is None:
            named = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(without.items())[:8])
            raise SidecarError(f"ranks {sorted(without)} have no sidecar: {named}")
    if problem is not None:
        raise problem


def root_fault(writer: Writer, store: Store, begun: Begun) -> str:
    """`ok`, or why this rank does not see what rank 0 wrote."""
    problem = ""
    pause = threading.Event()
    for look in range(_LOOKS):
        pause.wait(0.05 * (2**look - 1))
        try:
            seen = writer.call(epochs.read(store, begun.number), LOOK_TIMEOUT_S)
        except NotFoundError:
            problem = f"{socket.gethostname()} does not have {epoch_key(begun.number)}"
            continue
        except CheckpointdError as error:
            problem = str(error)
            continue
        if seen.nonce == begun.nonce:
            return "ok"
        problem = (
            f"{socket.gethostname()} has another epoch {begun.number}, begun by process {seen.writer.pid} on {seen.writer.host}"
        )
    return problem
