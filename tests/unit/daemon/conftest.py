"""A daemon in this process, and a raw client for the tests, made of frames and a memfd, without the code of the real client."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
from typing_extensions import Buffer

from checkpointd.commit.machine import FINAL, Phase
from checkpointd.config import ServeConfig
from checkpointd.daemon import served_roots
from checkpointd.daemon.memory.layouts import wire_tensors
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.channel import Channel, Received, connect
from checkpointd.daemon.protocol.parts import contents_parts, layout_parts, snapshot_of
from checkpointd.daemon.service import Service
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.log_records import BeginRecord
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root import own_root
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root_id import made_id
from checkpointd.pipeline.shard import PAGE, Shard
from checkpointd.store.base import Store
from checkpointd.store.posix.store import PosixStore
from checkpointd.store.writers import new_writer
from tests.builders import make_shard, rank_arrays

M = TypeVar("M")

ADD_SEALS, SEAL_SHRINK, SEAL_GROW, SEAL_FUTURE_WRITE = 1033, 2, 4, 16
SEALS = SEAL_SHRINK | SEAL_GROW | SEAL_FUTURE_WRITE
ENDS = frozenset(str(phase) for phase in FINAL)


class _Slots:
    """How the slots of the running test are called: those of an earlier one may wait for the garbage collector."""

    numbers = itertools.count()
    name = "test-slot"


@pytest.fixture(autouse=True)
def _slots_by_test() -> None:
    _Slots.name = f"test-slot-{next(_Slots.numbers)}"


@pytest.fixture(autouse=True)
def _storage_answers_in_time() -> Iterator[None]:
    """On a busy machine, too."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (own_root, served_roots):
            patch.setattr(module, "ANSWER_S", 60.0)
        yield


def empty_memfd(flags: int = os.MFD_CLOEXEC) -> int:
    """An empty memfd that can be sealed; the caller's to close."""
    return os.memfd_create(_Slots.name, flags | os.MFD_ALLOW_SEALING)


def sealed_memfd(content: Buffer, seals: int = SEALS) -> int:
    """A memfd that holds `content`, sealed; the caller's to close."""
    descriptor = empty_memfd()
    os.write(descriptor, content)
    fcntl.fcntl(descriptor, ADD_SEALS, seals)
    return descriptor


def slot_bytes(shard: Shard) -> int:
    """The size of a slot for `shard`: its buffer, and the page of the mark."""
    return len(shard.buffer) + PAGE


def slot_of(shard: Shard, mark: int = 0) -> int:
    """A slot that holds `shard`, and says that the snapshot `mark` is whole."""
    return sealed_memfd(shard.buffer.tobytes() + bytes(PAGE - 8) + mark.to_bytes(8, "little"))


async def until(condition: Callable[[], bool]) -> None:
    """Return when `condition` holds; the test's own timeout is the limit."""
    while not condition():
        await asyncio.sleep(0.002)


def open_descriptors() -> set[str]:
    """What this process has open, by number and target, but for the leases that jobs of earlier tests renew.

    What earlier tests left may be closed at any moment: compare with `<=`.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return {one for one in found if "/.checkpointd/" not in one}


def slots_mapped() -> int:
    """How many slots of this test are mapped."""
    return Path("/proc/self/maps").read_text().count(f"memfd:{_Slots.name} ")


def slots_open() -> int:
    """How many descriptors of slots of this test are open."""
    return sum(f"memfd:{_Slots.name} " in one for one in open_descriptors())


@dataclass
class RawClient:
    """One connection; `heard` are the messages that came while another one was waited for."""

    channel: Channel
    welcome: wire.Welcome
    heard: list[wire.Message] = field(default_factory=list)
    root: str = ""

    async def send(self, message: wire.Message, descriptor: int | None = None) -> None:
        await self.channel.send(message, descriptor)

    async def receive(self) -> Received:
        """The next message; a snapshot in one piece."""
        received = await self.channel.receive()
        assert received is not None, f"the daemon hung up; before, it said {self.heard}"
        if isinstance(received.message, wire.Snapshot):
            parts = [received.message]
            while parts[-1].more:
                part = await self.channel.receive()
                assert part is not None
                assert isinstance(part.message, wire.Snapshot)
                parts.append(part.message)
            received = Received(snapshot_of(parts), received.descriptor)
        self.heard.append(received.message)
        return received

    async def next(self, kind: type[M], matches: Callable[[M], bool] = lambda _: True) -> M:
        """The next message of this kind that matches, of those not yet returned by `next`."""
        while True:
            for message in self.heard:
                if isinstance(message, kind) and matches(message):
                    self.heard.remove(message)
                    return message
            await self.receive()

    async def refused(self) -> ErrorReport:
        return (await self.next(wire.Refused)).error

    async def ended(self) -> None:
        """Return when the daemon has hung up."""
        while (received := await self.channel.receive()) is not None:
            self.heard.append(received.message)

    async def join(self, root: Path | str, rank: int = 0, world_size: int = 1) -> wire.Joined:
        self.root = str(root)
        await self.send(wire.Join(root=self.root, rank=rank, world_size=world_size))
        return await self.next(wire.Joined)

    async def begin(self, start: int, **options: object) -> None:
        """The job has begun `start`: its record is there, and the daemon is told."""
        settings = {
            "nonce": N1,
            "compression": "none",
            "chunk_bytes": 4096,
            "budget_bytes": 64 << 20,
            "commit_timeout_s": 60.0,
            **options,
        }
        if self.root:
            async with PosixStore(self.root) as store:
                await put_start(store, start, str(settings["nonce"]))
        await self.send(wire.Begin(start=start, **settings))  # type: ignore[arg-type]  # fields of Begin, named by the test

    async def slot(self, number: int, shard: Shard) -> None:
        descriptor = slot_of(shard)
        try:
            await self.send(wire.Slot(slot=number, nbytes=slot_bytes(shard)), descriptor)
        finally:
            os.close(descriptor)

    async def layout(self, number: int, shard: Shard) -> None:
        for part in layout_parts(number, len(shard.buffer), wire_tensors(shard.tensors)):
            await self.send(part)

    async def save(self, number: int, **options: object) -> None:
        """Options: fields of Save."""
        settings = {
            "tag": f"global_step{number}",
            "attempt": str(AttemptId(1, 0)),
            "step": number,
            "n": number,
            "save_latest": True,
            "left_s": 60.0,
            **options,
        }
        await self.send(wire.Save(save=number, **settings))  # type: ignore[arg-type]  # fields of Save, named by the test

    async def announced(self, save: int, shard: Shard, *, slot: int = 0, layout: int = 0, mark: int = 1) -> None:
        for part in contents_parts(save, shard.aliases, shard.excluded, shard.tree):
            await self.send(part)
        await self.send(wire.Announced(save=save, slot=slot, layout=layout, mark=mark))

    async def staged(self, save: int, shard: Shard, *, slot: int = 0, layout: int = 0) -> None:
        """Announce the snapshot and say that it is whole."""
        await self.announced(save, shard, slot=slot, layout=layout)
        await self.send(wire.Staged(save=save))

    async def phase(self, save: int, *phases: Phase) -> wire.PhaseEntered:
        """The next word that `save` entered one of `phases`."""
        names = {str(phase) for phase in phases}
        return await self.next(wire.PhaseEntered, lambda m: m.save == save and m.phase in names)

    async def outcome(self, save: int) -> wire.PhaseEntered:
        return await self.next(wire.PhaseEntered, lambda m: m.save == save and m.phase in ENDS)

    async def ready(self, root: Path, shard: Shard, *, rank: int = 0, world_size: int = 1, start: int = 1) -> wire.Joined:
        """Join, begin, and hand over slot 0 and layout 0 for `shard`."""
        joined = await self.join(root, rank, world_size)
        await self.begin(start)
        await self.slot(0, shard)
        await self.layout(0, shard)
        return joined

    async def whole_save(self, number: int, shard: Shard, *, slot: int = 0, layout: int = 0, **options: object) -> None:
        await self.save(number, **options)
        await self.staged(number, shard, slot=slot, layout=layout)

    def close(self) -> None:
        self.channel.close()


async def answered(client: RawClient) -> None:
    """The connection goes on."""
    await client.send(wire.Ping())
    await client.next(wire.Pong)


class Daemon:
    """A running Service; roots lie below `folder`."""

    def __init__(self, folder: Path, **options: object) -> None:
        settings = {
            "socket": str(folder / "run" / "socket"),
            "roots": (str(folder),),
            "progress_interval_s": 0.01,
            "grace_s": 5.0,
            "hello_s": 60.0,
            **options,
        }
        self.config = ServeConfig(**settings)  # type: ignore[arg-type]  # fields of ServeConfig, named by the test
        self.service = Service(self.config)
        self._clients: list[RawClient] = []
        self._running: asyncio.Task[None] | None = None

    @property
    def path(self) -> str:
        return self.config.socket

    @property
    def hub(self):  # type: ignore[no-untyped-def]  # whatever the service has
        return self.service.hub

    async def start(self) -> None:
        self._running = asyncio.create_task(self.service.run())
        ready = asyncio.create_task(self.service.ready())
        await asyncio.wait({self._running, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._running.done():
            self._running.result()

    async def stop(self) -> None:
        """Leave, and wait for the end."""
        assert self._running is not None
        for client in self._clients:
            client.close()
        self.service.leave()
        await self._running

    async def left(self) -> None:
        """Return when the service has ended by itself."""
        assert self._running is not None
        await asyncio.shield(self._running)

    async def channel(self) -> Channel:
        return await connect(self.path)

    async def client(self, role: str = "rank") -> RawClient:
        """A connection with the handshake done."""
        channel = await self.channel()
        await channel.send(wire.Hello(protocols=wire.PROTOCOLS, release="test", role=role))  # type: ignore[arg-type]
        received = await channel.receive()
        assert received is not None
        assert isinstance(received.message, wire.Welcome), received.message
        channel.allow_frames(received.message.frame_bytes_max)
        client = RawClient(channel, received.message)
        self._clients.append(client)
        return client

    def raw(self) -> socket.socket:
        """A bare connection, blocking, on which nothing was said."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(self.path)
        return connection


def slot_bytes_charged(daemon: Daemon) -> int:
    """What is charged for the slots of all clients; all else that is charged is less than a page here."""
    daemon.hub.memory.release_lingering()
    return sum(slot.nbytes for slot in daemon.hub.memory._slots.values())


N1, N2 = "a1" * 8, "a2" * 8
"""Nonces of starts."""
StartDaemon = Callable[..., "contextlib.AbstractAsyncContextManager[Daemon]"]


@contextlib.asynccontextmanager
async def serving(folder: Path, **options: object) -> AsyncIterator[Daemon]:
    """A daemon for the roots below `folder`, with fields of ServeConfig; stopped at the end."""
    daemon = Daemon(folder, **options)
    await daemon.start()
    try:
        yield daemon
    finally:
        await daemon.stop()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(os.path.realpath(tmp_path)) / "job"


@pytest.fixture
async def daemon(root: Path) -> AsyncIterator[Daemon]:
    async with serving(root.parent) as running:
        yield running


@pytest.fixture
async def store(root: Path) -> AsyncIterator[PosixStore]:
    """The store at `root`, with start 1 begun."""
    async with PosixStore(root) as opened:
        await put_start(opened, 1, N1)
        yield opened


async def put_start(store: Store, start: int, nonce: str, spared: tuple[str, ...] = ()) -> None:
    """Take a start with a nonce that the test knows."""
    await made_id(store)
    process = new_writer()
    begin = BeginRecord(start=start, nonce=nonce, world_size=1, process=process, spared=spared, writer=writer())
    assert not await RootLog.of(store).add(begin)


def shard_of(seed: int = 0) -> Shard:
    """A small snapshot that differs from seed to seed."""
    return make_shard(rank_arrays(seed))
