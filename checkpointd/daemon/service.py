"""The daemon as a whole: accepts connections, serves each one, and leaves well when it is told to.

Invariants
  D1  No connection keeps another one waiting, and running out of descriptors ends nothing but the connection that needed one.
  D2  After SIGTERM nothing new is taken; what is in flight has `grace_s` to end.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from checkpointd import __version__
from checkpointd.config import ServeConfig
from checkpointd.daemon import wire
from checkpointd.daemon.channel import Channel, Peer
from checkpointd.daemon.hub import Hub
from checkpointd.daemon.jobs import Job
from checkpointd.daemon.listener import listening
from checkpointd.daemon.session import Session
from checkpointd.daemon.standing import standing
from checkpointd.errors import CheckpointdError, SidecarError, StagingError, UsageError, WireError
from checkpointd.layout.manifest import ErrorReport

log = logging.getLogger("checkpointd")

_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE_S = 0.2
WORKERS_MAX = 32


class Service:
    """One daemon. `run` serves until `leave` is called."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.hub = Hub(config)
        self._told_to_leave = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._deaths: set[asyncio.Task[None]] = set()
        self._ready = asyncio.Event()

    async def run(self) -> None:
        """Listen and serve. Returns after `leave`, when what was in flight has ended or the grace is over."""
        loop = asyncio.get_running_loop()
        workers = ThreadPoolExecutor(min(WORKERS_MAX, self.config.encoders + 4), thread_name_prefix="checkpointd-worker")
        loop.set_default_executor(workers)
        with listening(self.config.socket, self.config.group) as listener:
            accepting = asyncio.create_task(self._accept(listener))
            log.info("listening at %s for %s", self.config.socket, ", ".join(self.config.roots))
            self._ready.set()
            try:
                await self._told_to_leave.wait()
                await self._finish()
            finally:
                accepting.cancel()
                await _ended([accepting, *self._connections, *self._deaths])
        await self.hub.roots.close()
        workers.shutdown(wait=False, cancel_futures=True)

    async def ready(self) -> None:
        """Return once clients can connect."""
        await self._ready.wait()

    async def leaving(self) -> None:
        """Return once `leave` was called."""
        await self._told_to_leave.wait()

    def leave(self) -> None:
        """Take nothing new, finish what is in flight, then return from `run`."""
        self.hub.leaving = True
        self._told_to_leave.set()

    async def _finish(self) -> None:
        waiting = self.hub.jobs.all()
        if not waiting:
            return
        log.info("leaving: %d saves in flight have %g s to end", len(waiting), self.config.grace_s)
        self.hub.roots.lift_limit()
        _, late = await asyncio.wait({job.task for job in waiting}, timeout=self.config.grace_s)
        for job in waiting:
            if job.task in late:
                log.error(
                    "%s: left in flight after %g s; its client, or the next start, decides it",
                    job.info.prefix,
                    self.config.grace_s,
                )
                job.task.cancel()

    # --- connections ---------------------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in _NO_ROOM:
                    log.error("no connection can be taken: %s; raise `ulimit -n`", error.strerror)
                await asyncio.sleep(_PAUSE_S)
                continue
            task = asyncio.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        peer = channel.peer
        self.hub.clients += 1
        try:
            await self._converse(channel, peer)
        except WireError as error:
            self.hub.refused += 1
            log.warning("process %d (user %d): %s", peer.pid, peer.uid, error)
            await _tell(channel, error)
        except CheckpointdError as error:
            self.hub.refused += 1
            log.warning("process %d (user %d) was turned away: %s", peer.pid, peer.uid, error)
            await _tell(channel, error)
        except (ConnectionError, OSError) as error:
            log.info("process %d: %s", peer.pid, error)
        except Exception:
            log.exception("serving process %d failed in an unforeseen way; please report it", peer.pid)
        finally:
            self.hub.clients -= 1
            channel.close()

    async def _converse(self, channel: Channel, peer: Peer) -> None:
        if peer.uid not in self.config.uids:
            raise UsageError(
                f"user {peer.uid} may not use this daemon: it serves users {', '.join(map(str, self.config.uids))}"
            )
        if self.hub.clients > self.config.clients_max:
            raise SidecarError(f"this daemon has {self.config.clients_max} clients already (clients_max)")
        hello = await self._greeted(channel)
        channel.allow_frames(wire.FRAME_BYTES_MAX if hello.role == "rank" else wire.HELLO_BYTES_MAX)
        if hello.role == "status":
            await self._answer(channel)
        else:
            await Session(self.hub, channel, peer.pid, self._left).run()

    async def _greeted(self, channel: Channel) -> wire.Hello:
        try:
            async with asyncio.timeout(self.config.hello_s):
                received = await channel.receive()
        except TimeoutError as error:
            raise WireError(f"no hello came within {self.config.hello_s:g} s") from error
        if received is None:
            raise ConnectionError("gone before its hello")
        if received.descriptor is not None:
            os.close(received.descriptor)
        hello = received.message
        if not isinstance(hello, wire.Hello):
            raise WireError(f"the first message must be a hello, not a {type(hello).__name__}")
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
            memory_bytes_max=self.config.client_bytes_max,
        )
        await channel.send(welcome)
        return hello

    async def _answer(self, channel: Channel) -> None:
        """Tell a status client how things stand, each time it asks."""
        while (received := await channel.receive()) is not None:
            if received.descriptor is not None:
                os.close(received.descriptor)
            if not isinstance(received.message, wire.Query):
                raise WireError(f"a status client asks queries, and sent a {type(received.message).__name__}")
            await channel.send(wire.Report(status=standing(self.hub).to_json().decode()))

    # --- clients that are gone -----------------------------------------------------------------------------------

    def _left(self, pid: int, unstaged: list[Job]) -> None:
        """A connection ended while these snapshots were being taken: they go with their process, not with the connection."""
        if not unstaged:
            return
        task = asyncio.create_task(self._spoil_when_dead(pid, unstaged))
        self._deaths.add(task)
        task.add_done_callback(self._deaths.discard)

    async def _spoil_when_dead(self, pid: int, unstaged: list[Job]) -> None:
        await _death_of(pid, until=[job.task for job in unstaged])
        for job in unstaged:
            job.spoiled(StagingError(f"rank {job.info.rank} (process {pid}) ended while its snapshot was being taken"))


async def _tell(channel: Channel, error: CheckpointdError) -> None:
    """Give the reason to a client that is being turned away, if it still listens."""
    try:
        async with asyncio.timeout(1.0):
            await channel.send(wire.Refused(error=ErrorReport(code=error.code, message=str(error))))
    except (OSError, TimeoutError):
        return


async def _death_of(pid: int, until: Iterable[asyncio.Task[None]]) -> None:
    """Return when process `pid` is gone, or all of `until` are done, or nothing can be known of it."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return  # gone already, or in a namespace that is not seen from here
    loop = asyncio.get_running_loop()
    dead = asyncio.Event()
    try:
        if select.select([descriptor], [], [], 0)[0]:
            return
        loop.add_reader(descriptor, dead.set)
        waiting = asyncio.create_task(dead.wait())
        try:
            over = asyncio.ensure_future(asyncio.wait(set(until)))
            await asyncio.wait([waiting, over], return_when=asyncio.FIRST_COMPLETED)
            over.cancel()
        finally:
            waiting.cancel()
            loop.remove_reader(descriptor)
    finally:
        os.close(descriptor)


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
