"""The limit that the roots of one daemon share."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd.daemon.served_roots import ServedRoots
from checkpointd.store.limited import LimitedStore
from checkpointd.store.posix.store import PosixStore


async def test_without_a_limit_stores_are_not_wrapped(tmp_path: Path) -> None:
    roots = ServedRoots([str(tmp_path)])
    assert isinstance(roots.store(str(tmp_path)), PosixStore)
    roots.lift_limit()
    await roots.close()


async def test_all_roots_share_one_limit(tmp_path: Path) -> None:
    roots = ServedRoots([str(tmp_path)], 8 << 20)
    stores = [roots.store(str(tmp_path / name)) for name in ("a", "b")]
    assert all(isinstance(store, LimitedStore) for store in stores)
    buckets = {id(store._bucket) for store in stores if isinstance(store, LimitedStore)}
    assert len(buckets) == 1
    await roots.close()


async def test_a_daemon_that_leaves_writes_what_is_in_flight_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(seconds: float) -> None:
        raise AssertionError(f"waited {seconds} s for the limit")

    roots = ServedRoots([str(tmp_path)], 1 << 20)
    store = roots.store(str(tmp_path))
    assert isinstance(store, LimitedStore)
    monkeypatch.setattr(store._bucket, "_sleep", never)
    writer = await store.open_writer("tag/1/object")
    with pytest.raises(AssertionError, match="for the limit"):
        await writer.write_at(0, bytes(4 << 20))
    roots.lift_limit()
    await writer.write_at(0, bytes(4 << 20))
    await writer.finish(4 << 20)
    await roots.close()
