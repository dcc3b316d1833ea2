"""EXPORTLEASE-1 to EXPORTLEASE-3 of export_leases.py, in virtual time: what stays for an export, and for how long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig
from checkpointd.errors import StoreError
from checkpointd.export.own_lease import OwnExportLease
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt
from checkpointd.layout.manifest import BallotRef
from checkpointd.pipeline.gc.export_leases import LEASES_OF_EXPORTS, ExportLease, ExportLeases, is_wanted
from checkpointd.pipeline.gc.tidying import Tidier
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.store.memory import MemoryStore
from checkpointd.store.writers import Life
from tests.builders import attempts_at
from tests.lease_builders import LENGTH_S, SINCE, now, sight, simulated
from tests.unit.export.exported_roots import save

TO = "/models/run1"


async def root_of(*steps: int) -> MemoryStore:
    store = MemoryStore("root")
    await save(store, *steps)
    return store


def own(root: MemoryStore, every_steps: int | None = None) -> OwnExportLease:
    return OwnExportLease(root, TO, every_steps, sight("exporter"))


def watching(root: MemoryStore, life: Life = "unknown") -> ExportLeases:
    return ExportLeases(root, sight("job", life))


async def prefixes(root: MemoryStore, *steps: int) -> list[str]:
    found = {checkpoint.commit.step: checkpoint.prefix for checkpoint in await root_view.checkpoints(root)}
    return [found[step] for step in steps]


async def kept(leases: ExportLeases, root: MemoryStore) -> list[int]:
    """The steps of the checkpoints that stay."""
    found = await leases.kept(await attempts_at(root))
    return sorted(c.commit.step for c in await root_view.checkpoints(root) if c.prefix in found)


async def newest(root: MemoryStore) -> tuple[int, int]:
    return (await root_view.checkpoints(root))[0].commit.order


async def kill(lease: OwnExportLease) -> None:
    """What is left when its process is killed."""
    lease.lapse()
    assert lease._held._task is not None
    await lease._held._task


@given(
    steps=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=12),
    named=st.lists(st.integers(0, 12), max_size=4),
    seen=st.integers(0, 13),
    every=st.none() | st.integers(1, 5),
)
def test_exportlease_1_at_most_two(steps: list[tuple[int, bool]], named: list[int], seen: int, every: int | None) -> None:
    keeps = tuple(f"tag{number}/00000001-0" for number in named)
    lease = ExportLease(
        process="p", count=1, length_s=LENGTH_S, writer=SINCE, to=TO, keeps=keeps, every_steps=every, seen=(1, seen)
    )
    newest_first = [checkpoint(n, step, is_damaged) for n, (step, is_damaged) in enumerate(steps)][::-1]
    unseen = [c.prefix for c in newest_first if c.commit.order > (1, seen) and is_wanted(c.commit.step, every)]
    damaged = {c.prefix for c in newest_first if c.read_back == "damaged"}
    waiting = [prefix for prefix in unseen if prefix not in damaged][:1] or [*keeps[1:2]]
    assert lease.kept_among(newest_first) == {*keeps[:1], *waiting}


def checkpoint(n: int, step: int, is_damaged: bool) -> LoggedAttempt:
    ballot = BallotRef(digest="0" * 64, size=1)
    commit = CommitRecord(attempt=f"tag{n}/00000001-0", n=n, step=step, world_size=1, ballot=ballot, decided_by=0, writer=SINCE)
    return msgspec.structs.replace(LoggedAttempt.of(commit), damaged="damaged" if is_damaged else "")


@pytest.mark.parametrize(("life", "stays"), [("ended", []), ("running", [1])])
def test_exportlease_2_a_process_of_this_machine_is_known_to_have_ended_or_to_run(life: Life, stays: list[int]) -> None:
    async def main() -> None:
        root = await root_of(1, 2)
        lease, leases = own(root), watching(root, life)
        await lease.keep(await prefixes(root, 1), await newest(root))
        await kill(lease)
        await kept(leases, root)
        await asyncio.sleep(2 * LENGTH_S)
        assert await kept(leases, root) == stays

    simulated(main)


@pytest.mark.parametrize(("lives", "took_s"), [(True, LENGTH_S / 3), (False, LENGTH_S)])
def test_exportlease_2_a_single_look_waits_until_it_knows(lives: bool, took_s: float) -> None:
    async def main() -> None:
        root = await root_of(1, 2)
        lease, leases = own(root), watching(root)
        await lease.keep(await prefixes(root, 1), await newest(root))
        if not lives:
            await kill(lease)
        began = now()
        await leases.settle()
        assert took_s - 1 <= now() - began <= took_s + 1
        assert await kept(leases, root) == ([1] if lives else [])
        await lease.release()

    simulated(main)


def test_exportlease_3_on_a_full_disk_no_checkpoint_stays_for_an_export() -> None:
    async def main() -> None:
        root = await root_of(1, 2)
        lease = own(root)
        await lease.keep(await prefixes(root, 2, 1), await newest(root))
        tidier = Tidier(root, CommitConfig(retention=Retention(keep_last=1)))
        info = AttemptInfo(
            tag="global_step3", attempt=AttemptId(await starts.newest(root), 0), rank=0, world_size=1, step=3, n=1
        )
        await tidier.tidy(info)
        assert await prefixes(root, 1, 2)
        assert await tidier.more_room_for(info, now() + 100, tidier.freed)
        assert [c.commit.step for c in await root_view.checkpoints(root)] == [2]
        await lease.release()

    simulated(main)


def test_a_root_that_may_not_be_written_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class ReadOnly(MemoryStore):
        async def put(self, key: str, data: bytes) -> None:
            if key.startswith(LEASES_OF_EXPORTS):
                raise StoreError("it is read-only")
            await super().put(key, data)

    async def main() -> None:
        root = ReadOnly("root")
        await save(root, 1)
        lease = own(root)
        for seen in range(3):
            await lease.keep([], (1, seen))
        await lease.release()

    caplog.set_level(logging.WARNING)
    simulated(main)
    assert [record.getMessage() for record in caplog.records] == [
        "retention at memory://root may remove checkpoints before they are exported, because no lease can be put there: "
        "it is read-only"
    ]


def test_nothing_is_put_where_a_root_was_removed_and_again_where_one_has_begun() -> None:
    async def main() -> None:
        root = await root_of(1)
        RootLog.of(root).belongs_to(None)  # the job is another process
        lease = own(root)
        await lease.keep([], (1, 1))
        objects: Sequence[str] = [*root._objects]
        await root.delete_each(objects)
        await asyncio.sleep(2 * LENGTH_S)
        assert not root._objects
        await save(root, 1)
        await lease.keep(await prefixes(root, 1), (1, 1))
        leases = watching(root)
        await kept(leases, root)
        await asyncio.sleep(2 * LENGTH_S)
        assert await kept(leases, root) == [1]
        await lease.release()

    simulated(main)


async def test_exportlease_3_a_lease_that_cannot_be_read_keeps_nothing_and_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As that of a daemon of another user: retention would otherwise remove nothing any more."""

    class Unreadable(MemoryStore):
        async def get(self, key: str, *, size_max: int = 1 << 20) -> bytes:
            if key.startswith(LEASES_OF_EXPORTS):
                raise StoreError("permission denied")
            return await super().get(key, size_max=size_max)

    root = Unreadable("root")
    await save(root, 1, 2)
    lease, leases = own(root), watching(root)
    await lease.keep(await prefixes(root, 1), await newest(root))
    for _ in range(3):
        assert await kept(leases, root) == []
    assert [record.getMessage() for record in caplog.records] == [
        "what an export of memory://root still needs is not known, so nothing stays for it: permission denied"
    ]
    await lease.release()


def test_exportlease_2_the_time_that_a_read_takes_is_not_idle_time() -> None:
    class Slow(MemoryStore):
        takes_s = 0.0

        async def get(self, key: str, *, size_max: int = 1 << 20) -> bytes:
            if not key.startswith(LEASES_OF_EXPORTS):
                return await super().get(key, size_max=size_max)
            await asyncio.sleep(self.takes_s / 2)
            data = await super().get(key, size_max=size_max)
            await asyncio.sleep(self.takes_s / 2)
            return data

    async def main() -> None:
        root = Slow("root")
        await save(root, 1, 2)
        lease, leases = own(root), watching(root)
        await lease.keep(await prefixes(root, 1), await newest(root))
        await kill(lease)
        root.takes_s = 2 * LENGTH_S
        assert await kept(leases, root) == [1]
        assert await kept(leases, root) == [1]  # the bytes may have been new a moment ago, for all that this process knows
        root.takes_s = 0.0
        assert await kept(leases, root) == []

    simulated(main)


@pytest.mark.parametrize("every_steps", [0, -1])
async def test_a_lease_for_an_impossible_rule_keeps_nothing(every_steps: int, caplog: pytest.LogCaptureFixture) -> None:
    root = await root_of(1, 2)
    lease = own(root, every_steps)
    await lease.keep(await prefixes(root, 1), (0, 0))
    assert await kept(watching(root), root) == []
    assert f"is for an export every {every_steps} steps, which cannot be; it keeps no checkpoint" in caplog.text
    await lease.release()


async def test_what_is_no_lease_keeps_nothing() -> None:
    root = await root_of(1)
    await root.put(f"{LEASES_OF_EXPORTS}/lease", b"half")
    assert await kept(watching(root), root) == []
