"""The daemon as a whole: accepts connections, serves each of them, and finishes its saves when it is told to leave.

Invariants
  SERVICE-1  No connection keeps another one waiting. If the daemon runs out of descriptors, it ends only connections that
      needed a new one, or that have not sent their hello.
  SERVICE-2  After SIGTERM the daemon takes no new saves; saves in flight have `grace_s` to end.
  SERVICE-3  A failure of one connection never stops the daemon from accepting others.
  SERVICE-4  No user can take all connections from the other users, and trainers cannot take those of status clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, cast

from checkpointd import __version__
from checkpointd.bucket_urls import is_bucket_url
from checkpointd.config import ServeConfig, share
from checkpointd.daemon.hub import Hub
from checkpointd.daemon.hub_status import standing
from checkpointd.daemon.jobs import SaveJob
from checkpointd.daemon.process.logs import told
from checkpointd.daemon.process.process_exit import NO_ROOM, PAUSE_S
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.channel import Channel
from checkpointd.daemon.protocol.listener import Door, door_at
from checkpointd.daemon.protocol.parts import report_parts
from checkpointd.daemon.protocol.peers import Peer
from checkpointd.daemon.session import RankSession
from checkpointd.daemon.tiers.node_spool import NodeSpool
from checkpointd.daemon.users import may_ask, warn_of_shut_out
from checkpointd.errors import CheckpointdError, SidecarFullError, UsageError, WireError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.system_errors import in_words

log = logging.getLogger("checkpointd")

_SAY_AGAIN_S = 10.0
"""How often the log repeats the same failure."""
_REPORT_PAUSE = 2.0
"""A status report is reused for so many times as long as it took to make, so frequent questions do not block the loop."""
IDLE_LOOK_S = 5.0
"""How often the daemon looks whether anybody needs it."""
WORKERS_MAX = 32
STATUS_CLIENTS_MAX = 64
"""Connections of status clients, in addition to `clients_max` of ranks."""


@dataclass(slots=True)
class ConnectionLimit:
    """The limit of connections of one `kind`, in all and for one user. `advice`: what to do when all are taken."""

    kind: str
    advice: str
    most: int
    most_of_user: int
    _taken: Counter[int] = field(default_factory=Counter)

    def take(self, uid: int) -> None:
        """SidecarFullError if none is left."""
        if self._taken.total() >= self.most:
            raise SidecarFullError(f"all connections for {self.kind} are taken ({self.most}): {self.advice}")
        if self._taken[uid] >= self.most_of_user:
            raise SidecarFullError(
                f"user {uid} has taken its share of the connections for {self.kind} ({self.most_of_user} of {self.most}): "
                f"{self.advice}"
            )
        self._taken[uid] += 1

    def give_back(self, uid: int) -> None:
        self._taken[uid] -= 1


class Service:
    """One daemon. `run` serves until `leave` is called."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.hub = Hub(config)
        spool = config.spool_config
        self.spool = None if spool is None else NodeSpool(self.hub, spool)
        self.hub.spool = self.spool
        self._places = {
            "rank": ConnectionLimit("ranks", "raise clients_max (--clients)", config.clients_max, config.user_clients),
            # A limit of their own: if a probe were refused, its supervisor would kill a daemon that is only busy.
            "status": ConnectionLimit(
                "status clients",
                "ask with fewer at once",
                STATUS_CLIENTS_MAX,
                share(STATUS_CLIENTS_MAX, None, (*config.uids, *config.status_uids)),
            ),
        }
        self._told_to_leave = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._greeting: dict[asyncio.Task[None], None] = {}
        """Connections that have not sent their hello, the oldest first."""
        self._report: tuple[float, tuple[wire.Report, ...]] | None = None
        """Until when the last report is reused, and its parts."""
        self._beside: set[asyncio.Task[None]] = set()
        self._ready = asyncio.Event()

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until the daemon leaves. It is cancelled, and has ended, before any store is closed."""
        self._beside.add(asyncio.create_task(work))

    async def run(self) -> None:
        """Listen and serve. Returns after `leave`, when the saves in flight have ended or `grace_s` is over."""
        loop = asyncio.get_running_loop()
        workers = ThreadPoolExecutor(min(WORKERS_MAX, self.config.encoders + 4), thread_name_prefix="checkpointd-worker")
        loop.set_default_executor(workers)
        if self.spool is not None:
            await self.spool.take_up()
        with door_at(self.config.socket, self.config.group) as door:
            accepting = asyncio.create_task(self._accept_all(door))
            log.info("listening at %s for %s", self.config.socket, ", ".join(map(_resolved, self.config.roots)))
            warn_of_shut_out(self.config.socket, (*self.config.uids, *self.config.status_uids))
            self._ready.set()
            try:
                await self._told_to_leave.wait()
                await self._finish()
            finally:
                await _ended([accepting])
                await _ended(self._connections)
                await _ended(self._beside)
                await asyncio.gather(*(reader.close() for reader in self.hub.readers.values()))
                await asyncio.gather(*(tidier.close() for tidier in self.hub.tidiers))
        await self.hub.roots.close()
        if self.spool is not None:
            await self.spool.close()
        workers.shutdown(wait=False, cancel_futures=True)

    async def leave_when_idle(self, idle_s: float) -> None:
        """Leave once nobody has needed this daemon for `idle_s`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + idle_s
        while loop.time() < until:
            await asyncio.sleep(min(IDLE_LOOK_S, idle_s))
            if self._is_needed():
                until = loop.time() + idle_s
        log.info("no trainer and no work for %g s: this daemon leaves", idle_s)
        self.leave()

    def _is_needed(self) -> bool:
        """Whether there is a trainer, a save, a snapshot for the next start, or a shard to read back."""
        hub, config = self.hub, self.config
        at_work = bool(hub.jobs) or any(hub.tier) or any(reader.has_work for reader in hub.readers.values())
        return at_work or bool(hub.clients or self._greeting or config.mirrors or config.exports)

    async def ready(self) -> None:
        """Return once clients can connect."""
        await self._ready.wait()

    async def leaving(self) -> None:
        """Return once `leave` was called."""
        await self._told_to_leave.wait()

    def leave(self) -> None:
        """Take no new saves, finish those in flight, then return from `run`."""
        self.hub.leaving = True
        self._told_to_leave.set()

    async def _finish(self) -> None:
        """End the saves in flight, and then the removals that they ask for, all within `grace_s`."""
        until = asyncio.get_running_loop().time() + self.config.grace_s
        await self._finish_saves()
        with contextlib.suppress(TimeoutError):  # the next save at the root removes the rest
            async with asyncio.timeout_at(until):
                await asyncio.gather(*(tidier.rest() for tidier in self.hub.tidiers))

    async def _finish_saves(self) -> None:
        waiting = self.hub.jobs.all()
        if not waiting:
            return
        log.info("leaving: %d saves in flight have %g s to end", len(waiting), self.config.grace_s)
        self.hub.roots.lift_limit()
        if self.spool is not None:
            self.spool.leaves()
        # What is in the spool is safe, and the next daemon goes on with it.
        ends = [job.task if self.config.spool_finish else asyncio.create_task(_safe(job)) for job in waiting]
        await asyncio.wait(ends, timeout=self.config.grace_s)
        left = [job for job in waiting if not job.task.done()]
        for job in left:
            if job.is_in_spool:
                log.warning("%s: left in the spool; the next daemon on this node uploads it", job.info.prefix)
            else:
                log.error(
                    "%s: left in flight after %g s; its client, or the next start, decides it",
                    job.info.prefix,
                    self.config.grace_s,
                )
            job.task.cancel()
        await asyncio.wait({job.task for job in waiting}, timeout=PAUSE_S)

    # --- connections ---------------------------------------------------------------------------------------------

    async def _accept_all(self, door: Door) -> None:
        """Accept from the socket of `door`, and from the new one if it is bound again."""
        accepting: list[asyncio.Task[None]] = []
        try:
            async with contextlib.aclosing(door.sockets()) as listeners:
                async for listener in listeners:
                    await _ended(accepting)
                    accepting = [asyncio.create_task(self._accept(listener))]
        finally:
            await _ended(accepting)

    async def _accept(self, listener: socket.socket) -> None:
        loop, said = asyncio.get_running_loop(), -_SAY_AGAIN_S
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                full = error.errno in NO_ROOM
                if full and loop.time() - said >= _SAY_AGAIN_S:
                    said = loop.time()
                    log.error("no connection can be taken: %s", in_words(error, "listener"))
                if not (full and self._drop_a_silent_one()):
                    await asyncio.sleep(PAUSE_S)
                continue
            except Exception:
                log.exception("accepting a connection failed in an unforeseen way; please report it")
                await asyncio.sleep(PAUSE_S)
                continue
            if len(self._greeting) >= self.config.clients_max:
                self._drop_a_silent_one()
            task = asyncio.create_task(self._serve(connection))
            self._connections.add(task)
            self._greeting[task] = None
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._greeting.pop(task, None)

    def _drop_a_silent_one(self) -> bool:
        """End the oldest connection without a hello; False if there is none."""
        task = next(iter(self._greeting), None)
        if task is None:
            return False
        del self._greeting[task]
        task.cancel()
        return True

    async def _serve(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        try:
            await self._heard_out(channel)
        finally:
            channel.close()

    async def _heard_out(self, channel: Channel) -> None:
        peer = channel.peer
        try:
            await self._converse(channel, peer)
        except CheckpointdError as error:
            self.hub.refuse(error)
            text = told(str(error))
            self.hub.said.warning(
                f"turned away {error.code}", peer.uid, "process %d (user %d) was turned away: %s", peer.pid, peer.uid, text
            )
            await _tell(channel, ErrorReport.of(error, message=text))
        except OSError as error:
            log.info("process %d: %s", peer.pid, error)
        except Exception:
            log.exception("serving process %d failed in an unforeseen way; please report it", peer.pid)

    async def _converse(self, channel: Channel, peer: Peer) -> None:
        served = peer.uid in self.config.uids
        if not served and not may_ask(peer.uid, self.config.status_uids):
            raise _not_served(peer.uid, self.config.uids)
        hello = await self._greeted(channel)
        if not served and hello.role != "status":
            raise _not_served(peer.uid, self.config.uids)
        places = self._places[hello.role]
        places.take(peer.uid)
        try:
            await self._welcome(channel, hello)
            if hello.role == "status":
                await self._answer(channel)
            else:
                await self._serve_rank(channel, peer)
        finally:
            places.give_back(peer.uid)

    async def _serve_rank(self, channel: Channel, peer: Peer) -> None:
        self.hub.clients += 1
        try:
            channel.allow_frames(wire.FRAME_BYTES_MAX)
            channel.charge_to(self.hub.account_of(peer.uid), self.hub.turns)
            await RankSession(self.hub, channel, peer).run()
        finally:
            self.hub.clients -= 1

    async def _greeted(self, channel: Channel) -> wire.Hello:
        try:
            async with asyncio.timeout(self.config.hello_s):
                received = await channel.receive()
        except TimeoutError as error:
            raise WireError(f"no hello came within {self.config.hello_s:g} s") from error
        finally:
            self._greeting.pop(cast(asyncio.Task[None], asyncio.current_task()), None)
        if received is None:
            raise ConnectionError("gone before its hello")
        if received.descriptor is not None:
            os.close(received.descriptor)
        hello = received.message
        if not isinstance(hello, wire.Hello):
            raise WireError(f"the first message must be a hello, not a {type(hello).__name__}")
        return hello

    async def _welcome(self, channel: Channel, hello: wire.Hello) -> None:
        protocol = wire.common_protocol(hello.protocols)
        if protocol is None:
            raise WireError(
                f"this daemon is checkpointd {__version__} and speaks protocols {wire.PROTOCOLS[0]} to {wire.PROTOCOLS[1]}; "
                f"the client is {hello.release} and speaks {hello.protocols[0]} to {hello.protocols[1]}: upgrade the older one"
            )
        welcome = wire.Welcome(
            protocol=protocol,
            release=__version__,
            pid=os.getpid(),
            frame_bytes_max=wire.FRAME_BYTES_MAX,
            slots_max=self.config.slots_max,
            memory_bytes_max=self.config.user_bytes,
        )
        await channel.send(welcome)

    async def _answer(self, channel: Channel) -> None:
        """Send the status to a status client each time it asks."""
        while (received := await channel.receive()) is not None:
            if received.descriptor is not None:
                os.close(received.descriptor)
            if not isinstance(received.message, wire.Query):
                raise WireError(f"a status client may only send queries, and sent a {type(received.message).__name__}")
            for part in self._reported():
                await channel.send(part)

    def _reported(self) -> tuple[wire.Report, ...]:
        began = time.monotonic()
        if self._report is None or began >= self._report[0]:
            made = tuple(report_parts(standing(self.hub).to_json().decode()))
            ended = time.monotonic()
            self._report = (ended + _REPORT_PAUSE * (ended - began), made)
        return self._report[1]


async def _safe(job: SaveJob) -> None:
    """Return when the shard of `job` is in the spool, or the job has ended and its task with it."""
    await job.safe.wait()
    if not job.is_in_spool:
        await asyncio.wait({job.task})  # it may still remove its lease


def _resolved(root: str) -> str:
    """A root, with the path that its links lead to now: the daemon follows no links later."""
    real = root if is_bucket_url(root) else os.path.realpath(root)
    return root if real == root else f"{root} (it is {real})"


def _not_served(uid: int, served: tuple[int, ...]) -> UsageError:
    users = ", ".join(map(str, served))
    return UsageError(
        f"user {uid} may not use this daemon, which serves user {users}: "
        f"start it with --uid {uid} as well, or run as user {users}"
    )


async def _tell(channel: Channel, report: ErrorReport) -> None:
    """Send the reason to a client that is refused, if it still listens."""
    try:
        async with asyncio.timeout(1.0):
            await channel.send(wire.Refused(error=report))
    except OSError:
        return


async def _ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
