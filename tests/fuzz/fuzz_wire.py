"""A mutational fuzzer of the sidecar's socket: `python -m tests.fuzz.fuzz_wire decoder|session COUNT [--seed N]`.

Stops with the seed of the input that broke something: an exception other than WireError, a decoder or an outbox that holds more
than it may, a descriptor or a slot that is left, a hang, or memory that grows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import random
import resource
import sys
import time
from typing import cast
from unittest import mock

import uvloop

from checkpointd.config import ServeConfig
from checkpointd.daemon.hub import Hub
from checkpointd.daemon.hub_status import standing
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.channel import Channel, Received
from checkpointd.daemon.protocol.decoder import Decoder
from checkpointd.daemon.protocol.peers import Peer
from checkpointd.daemon.protocol.wire import HEAD, HELLO_BYTES_MAX
from checkpointd.daemon.session import OUTBOX, RankSession
from checkpointd.errors import StagingError, WireError
from checkpointd.pipeline.root import own_root
from checkpointd.store.memory import MemoryStore
from tests.fuzz.frames import SHARD, conversation, stream
from tests.unit.daemon.conftest import open_descriptors, put_start, slot_of

HANG_S = 60
GROWTH_BYTES_MAX = 96 << 20
ROOT = "/fuzz"


# --- the decoder ---------------------------------------------------------------------------------------------------------


def decode_one(seed: int) -> int:
    """One damaged stream, in pieces; how many messages came out of it."""
    source = random.Random(seed)
    data, decoder, found = stream(source), Decoder(HELLO_BYTES_MAX), 0
    try:
        while data:
            cut = source.randint(1, len(data))
            for message, descriptors in decoder.feed(data[:cut]):
                found += 1
                assert 0 <= descriptors <= wire.DESCRIPTORS_MAX, message
            data = data[cut:]
            assert decoder.buffered <= HELLO_BYTES_MAX + HEAD.size
            assert decoder.announced <= wire.DESCRIPTORS_MAX
    except WireError:
        assert decoder.buffered == 0
    return found


# --- the session ---------------------------------------------------------------------------------------------------------


class ScriptedChannel:
    """Says its lines, hears what is sent, and hangs up; every other client reads nothing."""

    def __init__(self, source: random.Random, slot: int) -> None:
        self._lines = conversation(source, ROOT)
        self._source, self._slot = source, slot
        self._deaf = source.random() < 0.2
        self.closed = False
        self.sent: list[wire.Message] = []

    async def receive(self, stall_s: float | None = None) -> Received | None:
        for _ in range(self._source.choice((1, 1, 1, 1, 1, 50))):  # so far the daemon gets before the next word
            await asyncio.sleep(0)
        if not self._lines or self.closed:
            return None
        message, with_descriptor = self._lines.pop(0)
        return Received(message, os.dup(self._slot) if with_descriptor else None)

    async def send(self, message: wire.Message, descriptor: int | None = None) -> None:
        if self.closed or self._deaf:
            raise ConnectionError("hung up")
        wire.encode(message)
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True

    def expect_no_more(self) -> None:
        self._lines.clear()


class Stage:
    """A hub whose roots lie in memory, used by many sessions one after another."""

    def __init__(self) -> None:
        # The size of one slot is the bound of all: sessions come to it all the time.
        self.hub = Hub(ServeConfig(socket="/fuzz.sock", roots=(ROOT,), user_bytes_max=3 << 15, memory_bytes_max=1 << 17))
        self.store = MemoryStore()
        self.hub.roots = mock.Mock(wraps=self.hub.roots, serves=self.hub.roots.serves)
        self.hub.roots.checked = mock.AsyncMock(side_effect=self.hub.roots.check)
        self.hub.roots.opened = mock.AsyncMock(return_value=self.store)
        self.slots = [slot_of(SHARD, mark=mark) for mark in (0, 1, 2)]

    async def session(self, seed: int) -> int:
        """One client from its first word to its end; how many messages it heard."""
        source = random.Random(seed)
        channel = ScriptedChannel(source, source.choice(self.slots))
        session = RankSession(self.hub, cast(Channel, channel), Peer(os.getpid(), os.getuid(), os.getgid()))
        with contextlib.suppress(ConnectionError):
            await session.run()
        assert session._outbox.qsize() <= OUTBOX
        assert sum(not job.has_voted for job in self.hub.jobs.all()) <= 4 * self.hub.config.saves_max
        assert self.hub.account.used <= self.hub.account.limit
        assert self.hub.account_of(os.getuid()).used == self.hub.account.used
        for job in self.hub.jobs.all():
            job.attempt._deadline = 0.0
        if source.random() < 0.1:
            standing(self.hub).to_json()
        return len(channel.sent)

    async def _end_jobs(self) -> None:
        jobs = self.hub.jobs.all()
        for job in jobs:
            job.spoiled(StagingError("the fuzzer has seen enough"))
            job.attempt._deadline = 0.0
        if jobs:
            await asyncio.wait({job.task for job in jobs})

    def _drop_all(self) -> None:
        for kept in self.hub.tier:
            self.hub.tier.drop(kept)

    async def end(self) -> None:
        """All jobs end, and nothing is left mapped or open."""
        await self._end_jobs()
        self._drop_all()
        assert len(self.hub.memory) == 0
        for _ in range(20):  # so many turns of the loop may still hold frames of jobs that have just ended
            await asyncio.sleep(0)
        assert self.hub.memory.release_lingering() == 0
        assert self.hub.account.used == 0
        for slot in self.slots:
            os.close(slot)


async def sessions(seeds: range, per_stage: int = 500) -> int:
    """The conversations of `seeds`; how many messages the daemon sent."""
    heard = 0
    for start in range(seeds.start, seeds.stop, per_stage):
        stage = Stage()
        await put_start(stage.store, 1, "n")
        for seed in range(start, min(start + per_stage, seeds.stop)):
            try:
                heard += await stage.session(seed)
            except BaseException:
                print(f"session seed {seed} of the stage from {start}", file=sys.stderr)
                raise
        await stage.end()
    return heard


# --- running -------------------------------------------------------------------------------------------------------------


def rss() -> int:
    """Bytes of this process that are in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def fuzz_decoder(seeds: range) -> int:
    found = 0
    for seed in seeds:
        try:
            found += decode_one(seed)
        except BaseException:
            print(f"decoder seed {seed}", file=sys.stderr)
            raise
    return found


def fuzz_sessions(seeds: range) -> int:
    log = logging.getLogger("checkpointd")
    # Some clients name a start that has no record. The look for it takes this long.
    with mock.patch.object(log, "disabled", True), mock.patch.object(own_root, "ABSENCE_S", 0.02):
        return uvloop.run(sessions(seeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=("decoder", "session"))
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    arguments = parser.parse_args()
    fuzz = fuzz_decoder if arguments.target == "decoder" else fuzz_sessions
    began, done, found, before, files = time.monotonic(), 0, 0, 0, 0
    while done < arguments.count:
        batch = min(2_000, arguments.count - done)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        found += fuzz(range(arguments.seed + done, arguments.seed + done + batch))
        done += batch
        open_files = len(open_descriptors())
        if not before:  # after the first batch: what is made once is there
            before, files = rss(), open_files
        growth = rss() - before
        print(f"{done} inputs, {found} messages, {time.monotonic() - began:.0f} s, {growth / 1e6:+.1f} MB", flush=True)
        assert growth < GROWTH_BYTES_MAX, "memory grows"
        assert open_files <= files, f"descriptors are left open: {open_descriptors()}"
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
