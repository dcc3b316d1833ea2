"""The catalog of a simulated job: damages it beside the job, and checks it after every effect on the disk.

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
    decode_record,
    numbers,
    summary_key,
)
from checkpointd.layout.keys import OUTCOME, AttemptId
from checkpointd.layout.manifest import digest
from checkpointd.pipeline.root.catalog_mending import rebuild
from checkpointd.store.base import Store
from checkpointd.testing.simdisk import SimDisk
from checkpointd.testing.simfs import SimDirectory, SimFile
from checkpointd.testing.simstorage import Effect

DAMAGER = "damager"
"""The names of processes that damage the catalog begin with this."""
ROUNDS = 6
PAUSE_S_MAX = 4.0


@dataclass(slots=True)
class CatalogWatch:
    """The catalog at `root` as the effects on `disk` show it."""

    disk: SimDisk
    root: str
    _records: dict[int, CatalogRecord] = field(default_factory=dict)
    _summaries: dict[int, dict[str, CatalogEntry]] = field(default_factory=dict)
    _intents: dict[str, list[str]] = field(default_factory=dict)
    """The paths of the records that announce an attempt."""
    _intent_at: dict[str, float] = field(default_factory=dict)
    """When the first of these records was put."""
    _announced: set[str] = field(default_factory=set)
    """The attempts of which such a record was durable when an object came."""

    def announced_at(self, prefix: str) -> float:
        """When the catalog first announced the attempt; infinite if it never did."""
        return self._intent_at.get(prefix, math.inf)

    def fault_after(self, effect: Effect, target: str) -> str:
        """What `effect` broke, in words; empty if it broke nothing."""
        folder, _, name = target.rpartition("/")
        if effect.process.startswith(DAMAGER) and effect.kind in ("rename", "unlink"):
            return ""
        if folder == f"{self.root}/{CATALOG}" and name.endswith((".record", ".summary")):
            return self._touched(effect, target, name)
        if effect.kind in ("link", "create"):
            return self._object_put(target)
        return ""

    def _touched(self, effect: Effect, path: str, name: str) -> str:
        if effect.kind in ("rename", "write", "truncate"):
            return f"{effect.process} replaced {path}"
        summaries, records = numbers([name])
        if effect.kind == "unlink":
            return self._removed(path, [n - 1 for n in records] + summaries)
        if effect.kind == "link" and summaries:
            return self._summed_up(path, summaries[0])
        return self._recorded(path, records[0]) if effect.kind == "link" else ""

    def _object_put(self, path: str) -> str:
        """CATALOG-1."""
        tag, _, rest = path.removeprefix(f"{self.root}/").partition("/")
        name = rest.partition("/")[0]
        prefix = f"{tag}/{name}"
        if AttemptId.parse(name) is None or prefix in self._announced:
            return ""
        summed_up = [f"{self.root}/{summary_key(number)}" for number, known in self._summaries.items() if prefix in known]
        if not any(map(self._is_durable, (*self._intents.get(prefix, ()), *summed_up))):
            return f"{path} came before a durable record announced {prefix}"
        self._announced.add(prefix)
        return ""

    def _recorded(self, path: str, number: int) -> str:
        """CATALOG-2."""
        record = decode_record(bytes(self.disk.fs.file(path).data), number)
        if number > max(self._summaries, default=0):
            self._records[number] = record
        if record.kind == "intent":
            self._intents.setdefault(record.prefix, []).append(path)
            self._intent_at.setdefault(record.prefix, self.disk.loop.time())
        if record.kind == "close":
            outcome = self.disk.fs.durable_node(f"{self.root}/{record.prefix}/{OUTCOME}")
            if not isinstance(outcome, SimFile) or digest(outcome.durable) != record.digest:
                return f"{path} closes {record.prefix}, whose outcome is not durable, or another one"
        return ""

    def _summed_up(self, path: str, number: int) -> str:
        """CATALOG-4: the summary has the state after all records up to its number."""
        found = CatalogState.read(bytes(self.disk.fs.file(path).data), number).entries
        before = max((n for n in self._summaries if n < number), default=0)
        records = [self._records.get(n) for n in range(before + 1, number + 1)]
        self._summaries[number] = found
        if records[-1] is not None and records[-1].kind == "rebuilt":
            return ""
        state = CatalogState(before, dict(self._summaries.get(before, {})))
        for record in records:
            if record is None:
                return f"{path} covers a record that nobody put"
            state.apply(record)
        return "" if _shown(state.entries) == _shown(found) else f"{path} is not the state after the records up to it"

    def _removed(self, path: str, covered: list[int]) -> str:
        """CATALOG-4: a summary that is not the newest covers what goes, and both are durable."""
        durable = self.disk.fs.durable_node(f"{self.root}/{CATALOG}")
        summaries = numbers(durable.durable)[0] if isinstance(durable, SimDirectory) else []
        return (
            "" if summaries[-2:-1] > covered else f"{path} is gone, and of the durable summaries {summaries} two must cover it"
        )

    def _is_durable(self, path: str) -> bool:
        return isinstance(self.disk.fs.durable_node(path), SimFile)


def _shown(entries: dict[str, CatalogEntry]) -> list[bytes]:
    return [msgspec.json.encode(entry) for entry in entries.values()]


async def damage_now_and_then(store: Store, rng: random.Random, ledger_report: Callable[[Exception], None]) -> None:
    """A few times, damage or remove an object of the catalog, as a bad disk or a person does, or make the catalog again.

    An intent is left alone: without it, nobody can know of an attempt that has no objects yet. The newest record is never
    removed, since nothing shows that there was one.
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
        _, records = numbers([name])
        if records and decode_record(await store.get(f"{CATALOG}/{name}"), records[0]).kind == "intent":
            continue
        if records and name != max(n for n in names if n.endswith(".record")) and rng.random() < 0.5:
            await store.delete(f"{CATALOG}/{name}")
        else:
            await store.put(f"{CATALOG}/{name}", b"{}")
        return
