"""What removes checkpoints of a simulated job beside it: `checkpointd gc`, called now and then, by rules that leave little."""

from __future__ import annotations

import asyncio
import random

from checkpointd.commit.retention import Retention
from checkpointd.errors import CheckpointdError
from checkpointd.pipeline.report.collection import collection
from checkpointd.store.base import Store
from checkpointd.testing.simledger import Ledger

ROUNDS = 12
PAUSE_S_MAX = 2.0


async def collect_now_and_then(store: Store, rules: Retention, rng: random.Random, ledger: Ledger) -> None:
    """Collect, a few times; what the storage refuses is left to the next round."""
    for _ in range(ROUNDS):
        await asyncio.sleep(rng.random() * PAUSE_S_MAX)
        try:
            done = await collection(store, rules, dry_run=False)
        except CheckpointdError:
            continue
        except Exception as error:
            ledger.report(error)
            return
        ledger.collected += len(done.removed)
