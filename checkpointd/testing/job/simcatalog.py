"""The catalog of a simulated job: damages it beside the job, and checks it after every effect on the storage.

The invariant `catalog-tells` of `simledger.py` is CATALOG-1 to CATALOG-4 of `pipeline/root/catalog_log.py`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from checkpointd.errors import CheckpointdError
from checkpointd.layout.catalog_records import (
    CATALOG,
    CatalogEntry,
    CatalogRecord,
    CatalogState,
    RecordBatch,
    decode_batch,
    numbers,
    summary_key,
)
from checkpointd.layout.keys import OUTCOME, AttemptId
from checkpointd.layout.manifest import digest
from checkpointd.pipeline.root.catalog_mending import rebuild
from checkpointd.store.base import Store
from checkpointd.testing.job.simroot import ObjectChange, SimRoot

DAMAGER = "damager"
"""The names of processes that damage the catalog begin with this."""
ROUNDS = 6
PAUSE_S_MAX = 4.0


@dataclass(slots=True)
class CatalogWatch:
    """The catalog at `root` as the effects on its storage show it."""

    root: SimRoot
    _batches: dict[int, RecordBatch] = field(default_factory=dict)
    _summaries: dict[int, dict[str, CatalogEntry]] = field(default_factory=dict)
    _intents: dict[str, list[str]] = field(default_factory=dict)
    """The keys of the batches that announce an attempt."""
    _intent_at: dict[str, float] = field(default_factory=dict)
    """When the first of these batches was put."""
    _announced: set[str] = field(default_factory=set)
    """The attempts of which such a batch was durable when an object came."""
    _closed: dict[str, str] = field(default_factory=dict)
    """The digest of the outcome that was durable when a close came. A writer that was stopped may put the close again when the
    attempt has been forgotten (CATALOG-7).
    """

    def announced_at(self, prefix: str) -> float:
        """When the catalog first announced the attempt; infinite if it never did."""
        return self._intent_at.get(prefix, math.inf)

    def fault_after(self, change: ObjectChange) -> str:
        """What `change` broke, in words; empty if it broke nothing."""
        folder, _, name = change.key.rpartition("/")
        if change.process.startswith(DAMAGER) and change.what in ("replaced", "removed"):
            return ""
        if folder == CATALOG and name.endswith((".records", ".summary")):
            return self._touched(change, name)
        if change.what in ("made", "begun"):
            return self._object_put(change.key)
        return ""

    def _touched(self, change: ObjectChange, name: str) -> str:
        process, what, key = change
        if what in ("replaced", "written"):
            return f"{process} replaced {key}"
        summaries, batches = numbers([name])
        if what == "removed":
            return self._removed(key, [n - 1 for n in batches] + summaries)
        if what == "made" and summaries:
            return self._summed_up(key, summaries[0])
        return self._recorded(key, batches[0]) if what == "made" else ""

    def _object_put(self, key: str) -> str:
        """CATALOG-1."""
        tag, _, rest = key.partition("/")
        name = rest.partition("/")[0]
        prefix = f"{tag}/{name}"
        if AttemptId.parse(name) is None or prefix in self._announced:
            return ""
        summed_up = [summary_key(number) for number, known in self._summaries.items() if prefix in known]
        if not any(map(self._is_durable, (*self._intents.get(prefix, ()), *summed_up))):
            return f"{key} came before a durable record announced {prefix}"
        self._announced.add(prefix)
        return ""

    def _recorded(self, key: str, number: int) -> str:
        """CATALOG-2."""
        batch = decode_batch(self.root.visible(key) or b"", number)
        if number > max(self._summaries, default=0):
            self._batches[number] = batch
        for record in batch.records:
            if record.kind == "intent":
                self._intents.setdefault(record.prefix, []).append(key)
                self._intent_at.setdefault(record.prefix, self.root.storage.loop.time())
            if record.kind == "close" and not self._is_outcome(record):
                return f"{key} closes {record.prefix}, whose outcome is not durable, or another one"
        return ""

    def _is_outcome(self, close: CatalogRecord) -> bool:
        """Whether the outcome of `close` is durable, or was when an earlier close came."""
        outcome = self.root.durable(f"{close.prefix}/{OUTCOME}")
        if outcome is not None and digest(outcome) == close.digest:
            self._closed[close.prefix] = close.digest
        return self._closed.get(close.prefix) == close.digest

    def _summed_up(self, key: str, number: int) -> str:
        """CATALOG-4: the summary has the state after all batches up to its number."""
        found = CatalogState.read(self.root.visible(key) or b"", number).entries
        before = max((n for n in self._summaries if n < number), default=0)
        batches = [self._batches.get(n) for n in range(before + 1, number + 1)]
        self._summaries[number] = found
        if batches[-1] is not None and batches[-1].records[0].kind == "rebuilt":
            return ""
        state = CatalogState(before, dict(self._summaries.get(before, {})))
        for batch in batches:
            if batch is None:
                return f"{key} covers a batch that nobody put"
            state.apply(batch)
        return "" if _shown(state.entries) == _shown(found) else f"{key} is not the state after the batches up to it"

    def _removed(self, key: str, covered: list[int]) -> str:
        """CATALOG-4: a summary that is not the newest covers what goes, and both are durable."""
        summaries = numbers(self.root.durable_names(CATALOG))[0]
        return (
            "" if summaries[-2:-1] > covered else f"{key} is gone, and of the durable summaries {summaries} two must cover it"
        )

    def _is_durable(self, key: str) -> bool:
        return self.root.durable(key) is not None


def _shown(entries: dict[str, CatalogEntry]) -> list[bytes]:
    return [msgspec.json.encode(entry) for entry in entries.values()]


async def damage_now_and_then(store: Store, rng: random.Random, ledger_report: Callable[[Exception], None]) -> None:
    """A few times, damage or remove an object of the catalog, as a bad disk or a person does, or make the catalog again.

    A batch with an intent is left alone: without it, nobody can know of an attempt that has no objects yet. The newest batch
    is never removed, since nothing shows that there was one.
    """
    for _ in range(ROUNDS):
        await asyncio.sleep(rng.random() * PAUSE_S_MAX)
        try:
            if rng.random() < 0.5:
                await rebuild(store)
            else:
                await _damage(store, rng)
        except CheckpointdError:
            continue
        except Exception as error:
            ledger_report(error)
            return


async def _damage(store: Store, rng: random.Random) -> None:
    names = [entry.name for entry in await store.list(CATALOG)]
    for name in rng.sample(names, len(names)):
        _, number = numbers([name])
        if number and any(
            record.kind == "intent" for record in decode_batch(await store.get(f"{CATALOG}/{name}"), number[0]).records
        ):
            continue
        if number and name != max(n for n in names if n.endswith(".records")) and rng.random() < 0.5:
            await store.delete(f"{CATALOG}/{name}")
        else:
            await store.put(f"{CATALOG}/{name}", b"{}")
        return
