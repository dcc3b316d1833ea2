"""A Checkpointer with a spool of its own, in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointd.commit.machine import IN_SPOOL
from checkpointd.errors import ClosedError, SupersededError, UsageError
from checkpointd.layout.keys import ATTEMPT_LEASES, attempt_lease_key
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.spool.places import DiskPlace
from checkpointd.store.memory import MemoryStore
from checkpointd_client import Checkpointer, SpoolConfig, loader, saver
from checkpointd_client.saves.spool import ProcessSpool
from tests.spooled_saves import AwayStore, Node, until
from tests.unit.client.shown_files import example, save


def state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((900, 100), float(step)), "bias": torch.arange(7) + step}}


def into() -> dict[str, Any]:
    return {"model": {"weight": torch.zeros(900, 100), "bias": torch.zeros(7, dtype=torch.int64)}}


def held(folder: Path, **settings: Any) -> SpoolConfig:
    """A spool whose uploads do not end."""
    return SpoolConfig(directory=str(folder / "spool"), bandwidth_bps=1.0, **settings)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits only a moment for uploads."""
    monkeypatch.setattr(saver, "OVERTIME_S", -600.0)


def test_a_save_climbs_each_rung(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root", spool=tmp_path / "spool") as ckpt:
        handle = ckpt.save(1, state(1))
        assert handle.wait("spooled").was_spooled
        handle.wait()
        timings = handle.timings
        assert timings.spooled_s is not None
        assert timings.durable_s is not None
        assert timings.committed_s is not None
        assert timings.spooled_s <= timings.durable_s <= timings.committed_s
        assert (handle.bytes_uploaded, handle.progress) == (handle.bytes_to_upload, 1.0)
        assert handle.bytes_to_upload > 900 * 100 * 4
        loaded = ckpt.load(target := into())
        assert loaded is not None
        assert (loaded.step, loaded.source) == (1, "spool")
        assert torch.equal(target["model"]["weight"], state(1)["model"]["weight"])


def test_without_a_spool_spooled_means_durable_at_the_root(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as ckpt:
        handle = ckpt.save(1, state(1)).wait("spooled")
        assert handle.phase in ("prepared", "committed")
        assert not handle.was_spooled
        assert handle.timings.spooled_s is None


@pytest.mark.usefixtures("impatient")
def test_more_saves_than_slots_are_spooled_while_nothing_is_uploaded(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path / "root", spool=held(tmp_path))
    handles = [ckpt.save(step, state(step)).wait("spooled") for step in range(1, 6)]
    assert {handle.phase for handle in handles[1:]} == {"spooled"}
    assert {(handle.bytes_to_upload > 900 * 100 * 4, handle.bytes_uploaded) for handle in handles[1:]} == {(True, 0)}
    assert [one.phase for one in ckpt.status().attempts][-4:] == ["spooled"] * 4
    loaded = ckpt.load(target := into())
    assert loaded is not None
    assert (loaded.step, loaded.source) == (5, "spool")
    assert torch.equal(target["model"]["weight"], state(5)["model"]["weight"])
    ckpt.close()
    with pytest.raises(ClosedError, match="the next start on this node uploads it"):
        handles[0].wait()
    assert handles[0].wait("spooled").done()
    with Checkpointer(tmp_path / "root", spool=str(tmp_path / "spool")) as again:
        loaded = again.load(target := into())
        assert loaded is not None
        assert loaded.step == 5
        again.save(6, state(6)).wait()
    with Checkpointer(tmp_path / "root", afresh=True) as without:
        assert [one.step for one in without.list()][:1] == [6]


@pytest.mark.usefixtures("impatient")
def test_loading_and_closing_wait_for_none_of_the_saves_that_lie_in_the_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = Checkpointer(tmp_path / "root", spool=held(tmp_path))
    for step in (1, 2, 3):
        ckpt.save(step, state(step)).wait("spooled")
    monkeypatch.setattr(saver, "SLICE_S", 600.0)
    ckpt.load(into())
    ckpt.close()


def test_superseded_saves_are_no_failures(tmp_path: Path) -> None:
    spool = SpoolConfig(directory=str(tmp_path / "spool"), bandwidth_bps=300_000.0, keep="newest")
    with Checkpointer(tmp_path / "root", spool=spool) as ckpt:
        first = ckpt.save(1, state(1)).wait("uploading")
        waits = ckpt.save(2, state(2)).wait("spooled")
        kept = ckpt.save(3, state(3), required=True).wait("spooled")
        newest = ckpt.save(4, state(4)).wait()
        with pytest.raises(SupersededError, match="superseded in the spool by global_step4"):
            waits.wait()
        kept.wait()
        assert [one.phase for one in (first, waits, kept, newest)] == ["committed", "superseded", "committed", "committed"]
        status = ckpt.status()
        assert (status.saves_failed, status.saves_superseded) == (0, 1)


@pytest.mark.usefixtures("impatient")
def test_a_load_aborts_nothing_that_still_waits_in_the_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only waits there has no lease."""
    with Checkpointer(tmp_path / "root", spool=tmp_path / "spool") as ckpt:
        ckpt.save(1, state(1)).wait()
    ckpt = Checkpointer(tmp_path / "root", spool=held(tmp_path))
    ckpt.load(into())
    ckpt.save(2, state(2)).wait("spooled")
    ckpt.close()
    monkeypatch.setattr(loader, "VOTES_S", 0.1)
    ckpt = Checkpointer(tmp_path / "root", spool=held(tmp_path), commit_timeout_s=6.0)
    loaded = ckpt.load(into(), tag="global_step1")
    assert loaded is not None
    assert (loaded.step, loaded.source) == (1, "store")
    ckpt.close()
    with Checkpointer(tmp_path / "root", spool=tmp_path / "spool") as again:
        loaded = again.load(into())
        assert loaded is not None
        assert loaded.step == 2, "it was not aborted"


async def with_two_left(root: MemoryStore, config: SpoolConfig, *, announced: bool) -> ProcessSpool:
    """The spool of a process that starts after one that has left two saves in it, which the log may announce."""
    place: Any = DiskPlace(config.directory)
    away = AwayStore(root)
    node = await Node(away, config, nonce=(await starts.take(root, 1)).nonce, place=place).begin()
    away.away = True
    for step in (1, 2):
        node.save(step, nbytes=1 << 20)
    await until(lambda: all(attempt.phase in IN_SPOOL for attempt in node.attempts))
    for shard in node.directory.live if announced else ():
        await shard.note("announced")
    for task in node.tasks:
        task.cancel()
    await asyncio.wait(node.tasks)
    spool = ProcessSpool(config, root, node.persist)
    await spool.open()
    return spool


class LeasesTogether(MemoryStore):
    """Puts a lease of an attempt only once both attempts' leases are being put."""

    def __init__(self) -> None:
        super().__init__()
        self.putting: set[str] = set()
        self.both = asyncio.Event()

    async def put(self, key: str, data: bytes) -> None:
        if key.startswith(ATTEMPT_LEASES):
            self.putting.add(key)
            if len(self.putting) == 2:
                self.both.set()
            await self.both.wait()
        await super().put(key, data)


async def test_a_start_puts_the_leases_of_all_that_was_announced_at_once(tmp_path: Path) -> None:
    """One after the other, those of many saves that wait for other ranks would take longer than a start waits."""
    root = LeasesTogether()
    spool = await with_two_left(root, held(tmp_path), announced=True)
    surviving = await spool.surviving()
    start = await starts.take(root, 1, surviving)
    async with asyncio.timeout(60.0):
        await spool.take_up(start.start)
        await root.both.wait()
    assert root.putting == set(map(attempt_lease_key, surviving))
    await spool.close()


async def test_a_start_puts_no_leases_of_what_only_waits_in_the_spool(tmp_path: Path) -> None:
    """Hundreds may wait, and each renewal is a request."""
    root = MemoryStore()
    spool = await with_two_left(root, held(tmp_path), announced=False)
    surviving = await spool.surviving()
    assert len(surviving) == 2
    await spool.take_up((await starts.take(root, 1, surviving)).start)
    for _ in range(20):
        await asyncio.sleep(0)
    assert await root.stat(attempt_lease_key(surviving[0])) is None, "the newer one is uploaded first"
    await spool.close()


def test_a_sidecar_has_the_spool_of_its_node(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="with a sidecar, the spool is the sidecar's"):
        Checkpointer(tmp_path / "root", sidecar=tmp_path / "socket", spool=tmp_path / "spool")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"keep": "some"}, "spool_keep is 'some'"),
        ({"bandwidth_bps": 0}, "spool_bandwidth_bps is 0"),
        ({"bytes_max": 0}, "spool_bytes_max is 0"),
        ({"timeout_s": 0}, "spool_timeout_s is 0"),
    ],
)
def test_the_settings_are_checked_by_name(settings: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=match):
        SpoolConfig(directory=str(tmp_path), **settings)


def test_files_go_through_the_spool_and_are_shown_at_the_commit(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run" / ".checkpointd", spool=tmp_path / "spool") as ckpt:
        files = example()
        shown = save(ckpt, files)
        assert sorted(path.name for path in shown.iterdir()) == sorted(files)
        assert ckpt.status().attempts[-1].bytes_uploaded > 0
        for name in files:
            torch.load(shown / name, weights_only=True)
