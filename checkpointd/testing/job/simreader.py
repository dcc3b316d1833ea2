"""Reads checkpoints beside a simulated job, as `open_checkpoint` does.

Its invariants, beside those of `simledger.py`:

  reads-whole   A reader opens a checkpoint, and passes over none. All of its tensors are as they were saved, bit for bit.
                Otherwise the reader ends with a clear error.
  reads-only    A reader has no effect on the storage.
"""

from __future__ import annotations

import asyncio
import random

from checkpointd.config import LoadConfig
from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError
from checkpointd.pipeline.read.checkpoint_view import CheckpointView
from checkpointd.pipeline.read.choice import CheckpointFinder
from checkpointd.store.base import Store
from checkpointd.testing.job.simledger import Contents, InvariantError, Ledger
from checkpointd.testing.job.simrank import read_contents

ROUNDS = 6
PAUSE_S_MAX = 4.0
THINK_S_MAX = 1.0
"""The longest pause of a reader between opening a checkpoint and reading a rank's tensors."""


async def read_now_and_then(store: Store, name: str, rng: random.Random, ledger: Ledger) -> None:
    """Open the newest checkpoint and read all of it, a few times, as process `name`."""
    ledger.readers.add(name)
    for _ in range(ROUNDS):
        await asyncio.sleep(rng.random() * PAUSE_S_MAX)
        try:
            await _read(store, rng, ledger)
        except NotFoundError:
            continue  # nothing is committed yet, or what was opened is gone: a clear error
        except CheckpointdError as error:
            if name in ledger.refused:
                continue
            ledger.report(InvariantError("reads-whole", f"{name} cannot read: {error!r}"))
            return
        except Exception as error:
            ledger.report(error)
            return
        ledger.read += 1


async def _read(store: Store, rng: random.Random, ledger: Ledger) -> None:
    floor = ledger.newest
    reading = CheckpointFinder(store, None, config=LoadConfig(reads=2, block_bytes=8192))
    world, found = await reading.begin(), None
    while found is None:
        try:
            found = await _contents(reading, world, rng)
        except (DamagedError, NotFoundError) as error:
            world = await reading.instead(world.checkpoint, error)
    checkpoint = world.checkpoint
    if reading.passed_over:
        raise InvariantError("reads-whole", f"{checkpoint.prefix} was read, past {reading.passed_over[0]}")
    for rank, contents in found.items():
        ledger.whole(checkpoint.prefix, rank, contents)
    ledger.not_older(checkpoint, floor, "a reader")


async def _contents(reading: CheckpointFinder, world: CheckpointView, rng: random.Random) -> dict[int, Contents]:
    found = {}
    for rank in world.indexes:
        await asyncio.sleep(rng.random() * THINK_S_MAX)
        found[rank] = await read_contents(reading.patient(world.checkpoint), world.checkpoint, rank)
    return found
