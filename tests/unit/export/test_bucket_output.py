"""Exports in a bucket: the order of the objects, what is refused, and what a failure leaves. Kills: tests/simulation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typing_extensions import Buffer

from checkpointd.errors import StoreFullError, UsageError
from checkpointd.export.bucket_output import BucketOutput, record_at
from checkpointd.export.consolidate import Consolidation, ExportRequest, Safetensors, consolidate, export_checkpoint
from checkpointd.pipeline.root import root_view
from checkpointd.store import open_store
from checkpointd.store.base import ObjectWriter, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.passing import PassingStore
from checkpointd.store.posix.store import PosixStore
from tests.unit.export.exported_roots import CONFIG, files_at, is_model_of, save, weights_in

BESIDE = {"config.json": CONFIG, "vocab.json": b"{}"}


class Watched(PassingStore):
    """Notes what is put and removed. The write of the object `full` fails."""

    def __init__(self, store: Store, full: str = "") -> None:
        super().__init__(store)
        self.done: list[str] = []
        self._full = full

    async def put(self, key: str, data: bytes) -> None:
        complete = b'"complete": true' in data
        self.done.append(f"put {key.rpartition('/')[2]}" + (" complete" if complete else ""))
        if key.endswith("/" + self._full):
            raise StoreFullError("the bucket is full")
        await self._store.put(key, data)

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        self.done.append(f"write {key.rpartition('/')[2]}")
        writer = await self._store.open_writer(key, size_hint=size_hint, size_max=size_max)
        return FullWriter(writer) if key.endswith("/" + self._full) else writer

    async def delete(self, key: str, *, durable: bool = True) -> None:
        self.done.append(f"delete {key.rpartition('/')[2]}")
        await self._store.delete(key, durable=durable)

    async def delete_each(self, keys: list[str]) -> None:  # type: ignore[override]
        self.done += [f"delete {key.rpartition('/')[2]}" for key in sorted(keys)]
        await self._store.delete_each(keys)


class FullWriter:
    """A writer for which there is no room."""

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer

    async def write_at(self, offset: int, data: Buffer) -> None:
        if offset:
            raise StoreFullError("the bucket is full")
        await self._writer.write_at(offset, data)

    async def finish(self, size: int) -> None:
        await self._writer.finish(size)

    async def discard(self) -> None:
        await self._writer.discard()


async def export(to: Store, *, most: int | None = 1500, force: bool = False, step: int = 1) -> Consolidation:
    root = MemoryStore("root")
    await save(root, step)
    request = ExportRequest(only="model", force=force, beside=BESIDE)
    async with BucketOutput(to, "out", force=force) as output:
        checkpoint = await root_view.find(root, f"global_step{step}")
        return await export_checkpoint(root, checkpoint, output, Safetensors("", most), request)


async def test_bucketout_1_the_files_by_which_programs_find_the_others_come_last() -> None:
    to = Watched(MemoryStore("to"))
    done = await export(to)
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert to.done == [
        "put checkpointd.json",
        *(f"write {name}" for name in shards),
        "put vocab.json",
        "put model.safetensors.index.json",
        "put config.json",
        "put checkpointd.json complete",
    ]
    names = ["checkpointd.json", "config.json", *shards, "model.safetensors.index.json", "vocab.json"]
    assert [file.name for file in done.files] == names
    assert {file.name: file.size for file in done.files} == {entry.name: entry.size for entry in await to.list("out")}
    to.done.clear()
    await export(to, most=None, force=True, step=2)
    at = to.done.index("write model.safetensors")
    assert to.done[:3] == ["put checkpointd.json", "delete config.json", "delete model.safetensors.index.json"]
    assert sorted(to.done[3:at]) == [*(f"delete {name}" for name in shards), "delete vocab.json"]
    assert to.done[at + 1 :] == ["put vocab.json", "put config.json", "put checkpointd.json complete"]
    found = weights_in(await files_at(to, "out"))
    assert found is not None
    assert is_model_of(2, found)


async def test_bucketout_2_only_exports_are_replaced() -> None:
    to = MemoryStore("to")
    await export(to)
    with pytest.raises(UsageError, match="memory://to/out holds an export and is not overwritten"):
        await export(to)
    await to.put("out/precious", b"mine")
    with pytest.raises(UsageError, match="holds 'precious', which no export made"):
        await export(to, force=True)
    assert await to.get("out/precious") == b"mine"
    found = await record_at(to, "out")
    assert found is not None
    assert found.complete


@pytest.mark.parametrize("full", ["model-00002-of-00003.safetensors", "vocab.json", "config.json"])
async def test_bucketout_3_a_failure_leaves_nothing(full: str) -> None:
    to = MemoryStore("to")
    with pytest.raises(StoreFullError, match="the bucket is full"):
        await export(Watched(to, full))
    assert await to.list("out") == []
    await export(to)


async def test_the_command_writes_to_a_bucket_what_it_writes_to_a_directory(s3_root: str, tmp_path: Path) -> None:
    place = s3_root.replace("?", "/models?", 1)
    async with PosixStore(tmp_path / "root") as root:
        await save(root, 1)
        request = ExportRequest(only="model", beside=BESIDE)
        here = await consolidate(root, tmp_path / "out", Safetensors(tmp_path / "out", 1500), request)
        there = await consolidate(root, place, Safetensors(place, 1500), request)
        assert [file.name for file in there.files] == [file.name for file in here.files]
    async with open_store(place) as to:
        for name in os.listdir(tmp_path / "out"):
            if name != "checkpointd.json":
                assert await to.get(name) == (tmp_path / "out" / name).read_bytes()


async def test_one_file_is_not_written_to_a_bucket() -> None:
    one = "s3://bucket/model.safetensors"
    with pytest.raises(UsageError, match="only a directory of safetensors can be written to a bucket"):
        await consolidate(MemoryStore("root"), one, Safetensors(one, None), ExportRequest())


async def test_a_place_in_the_root_is_refused() -> None:
    class InBucket(MemoryStore):
        url = "s3://bucket/run1"

    with pytest.raises(UsageError, match="lies inside the root s3://bucket/run1"):
        await consolidate(InBucket("root"), "s3://bucket/run1/out", Safetensors("", None), ExportRequest())
