"""A proxy between a client and an S3 server that makes faults by rules, counts requests, and keeps a journal.

It lives on a thread of its own with a loop of its own, so that tests may use it from any loop, thread or process. It holds one
piece of a body at a time, and passes on each byte as it came: signatures stay valid. Each request goes to the server on a
connection of its own, and never more often than a rule says.
"""

from __future__ import annotations

import asyncio
import random
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self, TypeVar
from urllib.parse import urlsplit

from tests.servers.bodies import Cut, cut_after, keep, only, pass_on, silence, slowly, stored
from tests.servers.faults import (
    ArriveLate,
    BlackHole,
    CutBefore,
    CutBody,
    CutReply,
    Delay,
    Fault,
    LoseReply,
    Refuse,
    RepeatLater,
    Rule,
    Slow,
    Twice,
)
from tests.servers.http_messages import HEAD_MAX, ReplyHead, RequestHead, read_head
from tests.servers.journal import Exchange, Journal
from tests.servers.s3_server import free_ports

IN_MEMORY = 1 << 20
"""A body that is sent twice, or later, lies in a file if it is larger."""
CALL_S_MAX = 60.0

T = TypeVar("T")


class FaultyProxy:
    """Serves at `endpoint`, for the server at the endpoint `server`, until it is closed.

    `seed` is for rules with a probability.
    """

    def __init__(self, server: str, *, seed: int = 0) -> None:
        url = urlsplit(server)
        self._server = url.hostname, url.port
        self._seed = seed
        (self._port,) = free_ports(1)
        self.journal = Journal()
        self._rules: list[Rule] = []
        self._rules_made = 0
        self._held: list[Held] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listener: socket.socket | None = None
        self._mistakes: list[BaseException] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty proxy", daemon=True)
        self._thread.start()
        self._call(self._listen())

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def add(self, fault: Fault, **which: Any) -> Rule:
        """A new rule with this fault; `which` are the other fields of Rule. Of several that match, the oldest hits."""
        with self.journal.changed:
            rule = Rule(fault, random.Random(f"{self._seed} {self._rules_made}"), **which)
            self._rules_made += 1
            self._rules.append(rule)
        return rule

    def remove(self, *rules: Rule) -> None:
        """Take away these rules, or all."""
        with self.journal.changed:
            self._rules = [rule for rule in self._rules if rules and not any(rule is one for one in rules)]

    @property
    def received(self) -> Counter[str]:
        return self.journal.received

    @property
    def forwarded(self) -> Counter[str]:
        return self.journal.forwarded

    def settle(self) -> None:
        """Wait until no client is connected, and the server has answered all that it was asked."""
        self._call(self._settle())

    def deliver(self) -> list[Exchange]:
        """The server gets now what it was to get later; returns what became of each."""
        return self._call(self._deliver([*self._held]))

    def go_away(self) -> None:
        """Connections are refused, and those that are there are cut, as if the server's machine were gone."""
        self._call(self._stop())

    def come_back(self) -> None:
        """Serve again, at the same endpoint."""
        self._call(self._listen())

    def close(self) -> None:
        """Raises what went wrong in the proxy itself."""
        if self._loop.is_closed():
            return
        self._call(self._stop())
        self._call(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for held in self._held:
            held.body.close()
        if self._mistakes:
            raise self._mistakes[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # From here on, all runs on the proxy's own thread.

    def _call(self, job: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(CALL_S_MAX)

    async def _listen(self) -> None:
        assert self._listener is None, "it serves"
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=128)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        """asyncio's own server loses connections that come while it is closed: they stay open, and nobody reads them."""
        with suppress(BlockingIOError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # otherwise some replies take 40 ms
            self._start(self._meet(connection)).add_done_callback(lambda _: connection.close())

    def _start(self, job: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._mistakes.append(error)

    async def _settle(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _stop(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # sockets are closed one step after their transports

    async def _meet(self, connection: socket.socket) -> None:
        """One connection of a client."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=HEAD_MAX)
        writer.transport.set_write_buffer_limits(0)  # so that drain() waits until all was sent
        try:
            while raw := await read_head(reader):
                request = RequestHead(raw)
                exchange = self._begin(request)
                try:
                    goes_on = await self._exchange(exchange, reader, writer)
                finally:
                    self.journal.ended(exchange)
                    self._count_down(exchange)
                if not goes_on:
                    break
        except (Cut, OSError, EOFError):
            pass
        finally:
            writer.transport.abort()  # all that was written has been sent

    def _begin(self, request: RequestHead) -> Exchange:
        fault = None
        with self.journal.changed:
            for rule in self._rules:
                if rule.strikes(request, taken=fault is not None):
                    fault = rule.fault
            return self.journal.begin(request, fault)

    async def _exchange(self, exchange: Exchange, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its reply, with its fault; returns whether another request may follow on the connection."""
        request, fault = exchange.request, exchange.fault
        body, client = request.body(reader), Client(writer)
        match fault:
            case CutBefore():
                raise Cut
            case Refuse():
                return await self._refuse(exchange, fault, body, writer)
            case BlackHole():
                await keep(request, body, writer, None)
                await silence(reader)
            case CutBody():
                body = cut_after(body, fault.after_bytes)
            case Delay():
                await asyncio.sleep(fault.before_s)
                client.after_s = fault.after_s
            case Slow():
                body = slowly(body, fault.bytes_per_s)
                client.bytes_per_s = fault.bytes_per_s
            case CutReply():
                client.bytes_max = fault.after_bytes
            case LoseReply():
                client.hears = False
                await self._ask(exchange, body, client)
                if fault.silent:
                    await silence(reader)
                raise Cut
            case Twice() | RepeatLater() | ArriveLate():
                return await self._repeat(exchange, fault, body, writer)
        return await self._ask(exchange, body, client)

    async def _ask(self, exchange: Exchange, body: AsyncIterator[bytes], client: Client) -> bool:
        """Ask the server, and pass on what it answers. Raises Cut if it does not, or if the client is to hear no more."""
        try:
            reader, writer = await asyncio.open_connection(*self._server, limit=HEAD_MAX)
        except OSError as error:
            self.journal.asked(exchange, reached=False)
            raise Cut from error
        self.journal.asked(exchange, reached=True)
        writer.transport.set_write_buffer_limits(0)
        writer.write(exchange.request.raw)
        upload = asyncio.create_task(pass_on(body, writer))
        try:
            reply = await self._reply(exchange, reader, client)
            await upload
            return not (exchange.request.closes or reply.closes or reply.until_close)
        finally:
            writer.transport.abort()
            upload.cancel()
            await asyncio.gather(upload, return_exceptions=True)

    async def _reply(self, exchange: Exchange, reader: asyncio.StreamReader, client: Client) -> ReplyHead:
        try:
            reply = ReplyHead(await read_head(reader))
            while reply.raw and reply.status < 200:
                await client.informed(reply)
                reply = ReplyHead(await read_head(reader))
        except (OSError, EOFError):
            reply = ReplyHead(b"")
        if not reply.raw:
            self.journal.answered(exchange, "cut")
            raise Cut
        self.journal.answered(exchange, str(reply.status))
        await asyncio.sleep(client.after_s)
        if client.hears:
            self.journal.heard(exchange, str(reply.status))
        try:
            await client.answered(reply)
            async for piece in reply.body(reader, exchange.request.method):
                await client.got(piece)
        except BaseException:
            if client.hears:
                self.journal.heard(exchange, f"{reply.status} cut")
            raise
        return reply

    async def _refuse(
        self, exchange: Exchange, fault: Refuse, body: AsyncIterator[bytes], writer: asyncio.StreamWriter
    ) -> bool:
        request = exchange.request
        if not request.waits_for_continue:
            async for _ in body:
                pass
        text = f"<Error><Code>{fault.code}</Code><Message>a fault of the proxy</Message></Error>"
        head = [f"HTTP/1.1 {fault.status} {fault.code}", "Content-Type: application/xml", f"Content-Length: {len(text)}"]
        head += ["Connection: close"] if request.waits_for_continue else []
        self.journal.heard(exchange, str(fault.status))
        text = "" if request.method == "HEAD" else text
        writer.write("\r\n".join([*head, "", text]).encode())
        await writer.drain()
        return not (request.closes or request.waits_for_continue)

    async def _repeat(
        self,
        exchange: Exchange,
        fault: Twice | RepeatLater | ArriveLate,
        body: AsyncIterator[bytes],
        writer: asyncio.StreamWriter,
    ) -> bool:
        kept = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115 - it outlives this call if it is held
        try:
            await keep(exchange.request, body, writer, kept)
            if isinstance(fault, Twice):
                await self._ask(exchange, stored(kept), Client(None))
            goes_on = isinstance(fault, ArriveLate) or await self._ask(exchange, stored(kept), Client(writer, informs=False))
        except BaseException:
            kept.close()
            raise
        if isinstance(fault, Twice):
            kept.close()
            return goes_on
        self._held.append(Held(exchange, kept, fault.requests))
        if isinstance(fault, ArriveLate):
            raise Cut
        return goes_on

    def _count_down(self, done: Exchange) -> None:
        """Another request was made: some of those that are held may be due."""
        for held in self._held:
            if held.requests is not None and held.exchange is not done:
                held.requests -= 1
        due = [held for held in self._held if held.requests is not None and held.requests <= 0 and held.exchange is not done]
        if due:
            self._start(self._deliver(due))

    async def _deliver(self, due: list[Held]) -> list[Exchange]:
        due = [held for held in due if held in self._held]
        self._held = [held for held in self._held if held not in due]
        done = []
        for held in due:
            exchange = self.journal.begin(held.exchange.request, held.exchange.fault, held.exchange.number)
            with held.body, suppress(Cut, OSError, EOFError):
                await self._ask(exchange, stored(held.body), Client(None))
            self.journal.ended(exchange)
            done.append(exchange)
        return done


@dataclass(eq=False)
class Held:
    """A request that the server gets later."""

    exchange: Exchange
    body: IO[bytes]
    requests: int | None
    """How many others come before it; None if it waits for `deliver`."""


@dataclass
class Client:
    """Who hears what the server answers."""

    writer: asyncio.StreamWriter | None
    """None for nobody."""
    hears: bool = True
    informs: bool = True
    """Whether it hears `100 Continue` from the server."""
    after_s: float = 0.0
    bytes_max: int | None = None
    """Of the body."""
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        self.hears = self.hears and self.writer is not None

    async def informed(self, reply: ReplyHead) -> None:
        if self.informs:
            await self._write(reply.raw)

    async def answered(self, reply: ReplyHead) -> None:
        if self.hears:
            await self._write(reply.raw)

    async def got(self, piece: bytes) -> None:
        if not self.hears:
            return
        if self.bytes_max is not None and len(piece) > self.bytes_max:
            await self._write(piece[: self.bytes_max])
            raise Cut
        if self.bytes_max is not None:
            self.bytes_max -= len(piece)
        if self.bytes_per_s is None:
            await self._write(piece)
        else:
            async for part in slowly(only(piece), self.bytes_per_s):
                await self._write(part)

    async def _write(self, data: bytes) -> None:
        if self.writer is not None:
            self.writer.write(data)
            await self.writer.drain()
