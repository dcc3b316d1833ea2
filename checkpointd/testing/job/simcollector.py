"""Removes checkpoints beside a simulated job, as calls of `checkpointd gc` with strict rules and `checkpointd delete` do."""

from __future__ import annotations

import asyncio
import random

from checkpointd.admin.gc import CollectionReport, collection, deletion
from checkpointd.commit.retention import Retention
from checkpointd.errors import CheckpointdError
from checkpointd.pipeline.root import root_view
from checkpointd.store.base import Store
from checkpointd.testing.job.simledger import Ledger

ROUNDS = 12
PAUSE_S_MAX = 2.0


async def collect_now_and_then(store: Store, rules: Retention, rng: random.Random, ledger: Ledger, *, deletes: bool) -> None:
    """Collect a few times or, with `deletes`, remove a checkpoint by name. After a refusal, the next round tries again."""
    for _ in range(ROUNDS):
        await asyncio.sleep(rng.random() * PAUSE_S_MAX)
        try:
            if deletes and rng.random() < 0.5:
                done = await _delete_one(store, rng)
            else:
                done = await collection(store, rules, dry_run=False)
        except CheckpointdError:
            continue
        except Exception as error:
            ledger.report(error)
            return
        ledger.collected += len(done.removed)


async def _delete_one(store: Store, rng: random.Random) -> CollectionReport:
    """Delete a random checkpoint. If it is the newest, this is refused."""
    tags = [checkpoint.tag for checkpoint in await root_view.checkpoints(store)]
    return await deletion(store, rng.choice(tags or ["none"]), force=False, dry_run=False)
