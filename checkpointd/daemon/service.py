"""The daemon as a whole: accepts connections, serves each one, and leaves well when it is told to.

Invariants
  Z1  No connection keeps another one waiting, and running out of descriptors ends nothing but connections that needed one, or
      had not said who they are.
  Z2  After SIGTERM nothing new is taken; what is in flight has `grace_s` to end.
  Z3  Nothing that goes wrong with one connection ends the accepting of others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from checkpointd import __version__
from checkpointd.config import ServeConfig
from checkpointd.daemon import wire
from checkpointd.daemon.channel import Channel, Peer
from checkpointd.daemon.deaths import NO_ROOM, PAUSE_S, death_of
from checkpointd.daemon.hub import Hub
from checkpointd.daemon.jobs import Job
from checkpointd.daemon.listener import listening
from checkpointd.daemon.session import Session, clean
from checkpointd.daemon.standing import standing
from checkpointd.errors import CheckpointdError, SidecarError, StagingError, UsageError, WireError
from checkpointd.layout.manifest import ErrorReport

log = logging.getLogger("checkpointd")

_SAY_AGAIN_S = 10.0
"""What goes wrong again and again is said so often."""
_REPORT_PAUSE = 2.0
"""A status report is good for this many times what it took to make: whoever asks without a pause does not hold the loop."""
WORKERS_MAX = 32


class Service:
    """One daemon. `run` serves until `leave` is called."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.hub = Hub(config)
        self._told_to_leave = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._greeting: dict[asyncio.Task[None], None] = {}
        """Connections that have not said who they are, the oldest first."""
        self._report: tuple[float, wire.Report] | None = None
        """The last one, and until when it is good."""
        self._deaths: set[asyncio.Task[None]] = set()
        self._beside: set[asyncio.Task[None]] = set()
        self._ready = asyncio.Event()

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the socket. It is cancelled when the daemon leaves, and has ended before any store is closed."""
        self._beside.add(asyncio.create_task(work))

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
                await _ended([accepting])
                await _ended(self._connections)
                await _ended(self._deaths)
                await _ended(self._beside)
                await asyncio.gather(*(reader.close() for reader in self.hub.readers.values()))
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
        await asyncio.wait({job.task for job in waiting}, timeout=PAUSE_S)

    # --- connections ---------------------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop, said = asyncio.get_running_loop(), -_SAY_AGAIN_S
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                full = error.errno in NO_ROOM
                if full and loop.time() - said >= _SAY_AGAIN_S:
                    said = loop.time()
                    log.error("no connection can be taken: %s; raise `ulimit -n`", error.strerror)
                if not (full and self._drop_a_silent_one()):
                    await asyncio.sleep(PAUSE_S)
                continue
            except Exception:
                log.exception("a connection could not be taken, in an unforeseen way; please report it")
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
        """End the connection that has been there for longest without a word; False where there is none."""
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
            self.hub.refused += 1
            text = clean(str(error))
            log.warning("process %d (user %d) was turned away: %s", peer.pid, peer.uid, text)
            await _tell(channel, ErrorReport(code=error.code, message=text))
        except OSError as error:
            log.info("process %d: %s", peer.pid, error)
        except Exception:
            log.exception("serving process %d failed in an unforeseen way; please report it", peer.pid)

    async def _converse(self, channel: Channel, peer: Peer) -> None:
        if peer.uid not in self.config.uids:
            raise UsageError(
                f"user {peer.uid} may not use this daemon: it serves users {', '.join(map(str, self.config.uids))}"
            )
        hello = await self._greeted(channel)
        if self.hub.clients >= self.config.clients_max:
            raise SidecarError(f"this daemon has {self.config.clients_max} clients already (clients_max)")
        self.hub.clients += 1
        try:
            await self._welcome(channel, hello)
            if hello.role == "status":
                await self._answer(channel)
            else:
                channel.allow_frames(wire.FRAME_BYTES_MAX)
                await Session(self.hub, channel, peer, self._left).run()
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
            memory_bytes_max=self.config.client_bytes_max,
        )
        await channel.send(welcome)

    async def _answer(self, channel: Channel) -> None:
        """Tell a status client how things stand, each time it asks."""
        while (received := await channel.receive()) is not None:
            if received.descriptor is not None:
                os.close(received.descriptor)
            if not isinstance(received.message, wire.Query):
                raise WireError(f"a status client asks queries, and sent a {type(received.message).__name__}")
            await channel.send(self._reported())

    def _reported(self) -> wire.Report:
        began = time.monotonic()
        if self._report is None or began >= self._report[0]:
            made = wire.Report(status=standing(self.hub).to_json().decode())
            ended = time.monotonic()
            self._report = (ended + _REPORT_PAUSE * (ended - began), made)
        return self._report[1]

    # --- clients that are gone -----------------------------------------------------------------------------------

    def _left(self, pid: int, unstaged: list[Job]) -> None:
        """A connection ended while these snapshots were being taken: they go with their process, not with the connection."""
        if not unstaged:
            return
        task = asyncio.create_task(self._spoil_when_dead(pid, unstaged))
        self._deaths.add(task)
        task.add_done_callback(self._deaths.discard)

    async def _spoil_when_dead(self, pid: int, unstaged: list[Job]) -> None:
        death = asyncio.ensure_future(death_of(pid))
        over = asyncio.ensure_future(asyncio.wait({job.task for job in unstaged}))
        try:
            await asyncio.wait({death, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
            over.cancel()
        for job in unstaged:
            job.client_died(StagingError(f"rank {job.info.rank} (process {pid}) ended while its snapshot was being taken"))


async def _tell(channel: Channel, report: ErrorReport) -> None:
    """Give the reason to a client that is being turned away, if it still listens."""
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
