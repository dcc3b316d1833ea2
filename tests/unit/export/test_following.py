"""Exports by rule: which checkpoints, once, whole, and what is said of those that cannot be exported."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from checkpointd.commit.retention import Retention
from checkpointd.errors import StoreError, UsageError
from checkpointd.export.bucket_output import record_at
from checkpointd.export.following import Exporter
from checkpointd.export.record import encode
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline.gc.collect import remove, sweep
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.leases import Sight
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from tests.lease_builders import simulated
from tests.unit.export.exported_roots import CONFIG, check_exported, save, tags_at, to_bucket, to_directory, until


@pytest.fixture
def files(tmp_path: Path) -> str:
    place = tmp_path / "files"
    place.mkdir()
    (place / "config.json").write_bytes(CONFIG)
    (place / "tokenizer.json").write_text("{}")
    (place / "model.safetensors").write_text("the weights of another model")
    return str(place)


@pytest.fixture
def root() -> MemoryStore:
    return MemoryStore("root")


async def ended(exporter: Exporter) -> None:
    await exporter.close()


async def test_export_1_each_commit_is_exported_with_the_files_beside_it(root: Store, tmp_path: Path, files: str) -> None:
    await save(root, 1, 2)
    exporter = to_directory(root, tmp_path / "to", files=files, max_shard_size=1500)
    assert await exporter.round()
    async with PosixStore(tmp_path / "to") as to:
        assert await tags_at(to) == ["global_step1", "global_step2"]
        for step in (1, 2):
            record = await check_exported(to, step)
            assert (record.step, record.dtype, record.only) == (step, "keep", "model")
            assert record.files == (
                "config.json",
                *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)),
                "model.safetensors.index.json",
                "tokenizer.json",
            )
    shown = exporter.progress
    assert (shown.state, shown.exported, shown.due, shown.newest_tag, shown.newest_step) == (
        "up to date",
        2,
        0,
        "global_step2",
        2,
    )
    await save(root, 3)
    await exporter.round()
    assert exporter.progress.exported == 3
    await ended(exporter)
    assert sorted(os.listdir(tmp_path / "to")) == [".checkpointd", "global_step1", "global_step2", "global_step3"]
    again = to_directory(root, tmp_path / "to", files=files)
    await again.round()
    assert (again.progress.exported, again.progress.state) == (0, "up to date")
    await ended(again)


async def test_the_newest_checkpoint_comes_first_and_the_rule_chooses(root: Store, tmp_path: Path, files: str) -> None:
    await save(root, *range(1, 7))
    exporter, order = to_directory(root, tmp_path / "to", files=files, every_steps=2, keep_last=2), []
    output = exporter._target.output
    exporter._target.output = lambda tag, check: (order.append(tag), output(tag, check))[1]  # type: ignore[method-assign]
    await exporter.round()
    assert order == ["global_step6", "global_step4"]
    await save(root, 7, 8)
    await exporter.round()
    assert order[2:] == ["global_step8"]
    assert sorted(os.listdir(tmp_path / "to"))[1:] == ["global_step6", "global_step8"]
    await ended(exporter)


async def test_export_4_what_others_put_into_an_export_is_never_removed(
    root: Store, tmp_path: Path, files: str, caplog: pytest.LogCaptureFixture
) -> None:
    await save(root, 1)
    exporter = to_directory(root, tmp_path / "to", files=files, keep_last=1)
    await exporter.round()
    (tmp_path / "to" / "global_step1" / "scores.csv").touch()
    await save(root, 2)
    await exporter.round()
    await save(root, 3)
    await exporter.round()
    assert sorted(os.listdir(tmp_path / "to"))[1:] == ["global_step1", "global_step3"]
    assert sum("it holds files of other programs" in record.getMessage() for record in caplog.records) == 1
    await ended(exporter)


async def test_what_is_left_in_a_bucket_of_an_export_that_is_not_due_any_more_is_removed(root: Store, files: str) -> None:
    to = MemoryStore("to")
    await save(root, 1, 2)
    exporter = to_bucket(root, to, files=files)
    await exporter.round()
    whole = await record_at(to, "global_step1")
    assert whole is not None
    await to.put("global_step0/checkpointd.json", encode(msgspec.structs.replace(whole, tag="global_step0", complete=False)))
    await to.put("global_step0/model.safetensors", b"half")
    await exporter.round(again=True)
    await save(root, 3)
    await exporter.round()
    assert await tags_at(to) == ["global_step1", "global_step2", "global_step3"]
    await ended(exporter)


async def test_a_tag_that_is_saved_again_is_exported_again(root: Store, tmp_path: Path, files: str) -> None:
    for to in (tmp_path / "to", MemoryStore("to")):
        root = MemoryStore("root")
        exporter = to_directory(root, to, files=files) if isinstance(to, Path) else to_bucket(root, to, files=files)
        await save(root, 1, tag="best")
        await exporter.round()
        await save(root, 2, tag="best", k=1)
        await exporter.round()
        store = PosixStore(to) if isinstance(to, Path) else to
        record = await check_exported(store, 2, "best")
        assert AttemptId.parse(record.attempt) == AttemptId(1, 1)
        await ended(exporter)


async def test_a_converted_export_says_its_dtype(root: Store, tmp_path: Path, files: str) -> None:
    await save(root, 1)
    exporter = to_directory(root, tmp_path / "to", files=files, dtype="bf16")
    await exporter.round()
    config = json.loads((tmp_path / "to" / "global_step1" / "config.json").read_text())
    assert config == {"model_type": "llama", "dtype": "bfloat16"}
    await ended(exporter)


async def test_export_4_a_copy_of_an_export_at_the_place_is_not_taken_for_one(root: Store, tmp_path: Path, files: str) -> None:
    """A copy has the record of another directory, which must neither go in its place nor make way for it."""
    await save(root, 1, 2)
    exporter = to_directory(root, tmp_path / "to", files=files, keep_last=2)
    await exporter.round()
    shutil.copytree(tmp_path / "to" / "global_step2", tmp_path / "to" / "best")
    await exporter.round(again=True)
    await save(root, 3)
    await exporter.round(again=True)
    assert sorted(os.listdir(tmp_path / "to"))[1:] == ["best", "global_step2", "global_step3"]
    assert (exporter.progress.exported, exporter.progress.state) == (3, "up to date")
    await ended(exporter)


async def test_old_exports_go_before_the_next_one_needs_their_space(root: Store, tmp_path: Path, files: str) -> None:
    await save(root, 1)
    exporter, most = to_directory(root, tmp_path / "to", files=files, keep_last=1), 0
    await exporter.round()
    await save(root, 2)

    async def look(nbytes: int) -> None:
        nonlocal most
        most = max(most, len([name for name in os.listdir(tmp_path / "to") if not name.startswith(".")]))
        if exporter.progress.tag == "global_step2" and not nbytes:
            await save(root, 3)  # commits while another one is exported

    exporter._turn = look
    await exporter.round()
    assert most == 1
    assert sorted(os.listdir(tmp_path / "to"))[1:] == ["global_step3"]
    await ended(exporter)


async def test_a_root_that_was_made_anew_is_exported_beside_the_exports_of_the_one_before(tmp_path: Path, files: str) -> None:
    """The commits of the new root begin to count at 1, and those of the old exports are larger."""
    before, now = MemoryStore("root"), MemoryStore("root")
    await save(before, 10, 20, 30)
    first = to_directory(before, tmp_path / "to", files=files, keep_last=2)
    await first.round()
    await ended(first)
    await save(now, 1)
    exporter = to_directory(now, tmp_path / "to", files=files, keep_last=2)
    await exporter.round()
    assert exporter.progress.exported == 1
    assert sorted(os.listdir(tmp_path / "to"))[1:] == ["global_step1", "global_step20", "global_step30"]
    await ended(exporter)


# --- what retention leaves ----------------------------------------------------------------------------------------------

KEEP_ONE = Retention(keep_last=1)


@pytest.mark.parametrize("in_bucket", [False, True])
async def test_export_5_retention_leaves_what_is_being_exported(
    root: Store, tmp_path: Path, files: str, in_bucket: bool
) -> None:
    """Each save would otherwise remove the checkpoint before it, also while that is exported."""
    to: Store = MemoryStore("to") if in_bucket else PosixStore(tmp_path / "to")
    exporter = (to_bucket if in_bucket else to_directory)(
        root, to if in_bucket else tmp_path / "to", files=files, every_steps=2
    )
    newest = 2
    await save(root, 1, newest, dedup=False, retention=KEEP_ONE)

    async def save_more(nbytes: int) -> None:
        nonlocal newest
        if nbytes and newest < 8:
            newest += 1
            await save(root, newest, dedup=False, retention=KEEP_ONE)

    exporter._turn = save_more
    while newest < 8:
        await exporter.round()
        await save_more(1)
    await exporter.round()
    assert exporter.progress.left == {}
    assert await tags_at(to) == [f"global_step{step}" for step in (2, 4, 6, 8)]
    await save(root, 9, dedup=False, retention=KEEP_ONE)
    tags = [c.tag for c in await root_view.checkpoints(root)]
    assert tags == [
        "global_step9",
        "global_step2",
    ]  # the second was read back first, and is the newest one of which that is known
    await ended(exporter)
    assert await root.list(".checkpointd/exports") == []


async def test_export_3_what_was_due_and_is_removed_before_its_turn_is_named(
    root: Store, tmp_path: Path, files: str, caplog: pytest.LogCaptureFixture
) -> None:
    await save(root, 1, 2, 3, dedup=False)
    exporter = to_directory(root, tmp_path / "to", files=files)

    async def save_one_more(nbytes: int) -> None:
        if nbytes and exporter.progress.tag == "global_step3":
            await save(root, 4, dedup=False, retention=KEEP_ONE)

    exporter._turn = save_one_more
    await exporter.round()
    assert exporter.progress.left == {"removed": 2}
    assert sorted(os.listdir(tmp_path / "to"))[1:] == ["global_step3", "global_step4"]
    words = "was removed before its export had ended: keep more checkpoints at memory://root, or export fewer (every_steps)"
    assert [record.getMessage() for record in caplog.records if "was removed" in record.getMessage()] == [
        f"global_step{step} {words}" for step in (2, 1)
    ]
    await ended(exporter)


async def test_export_5_a_process_that_lost_the_place_leaves_the_lease_to_the_other(
    root: Store, tmp_path: Path, files: str
) -> None:
    await save(root, 1)
    one, two = (to_directory(root, tmp_path / "to", files=files, sight=elsewhere(name)) for name in ("one", "two"))
    await one.round()
    await one._hold.release()
    await two.round()
    await one.close()
    assert b'"process": "two' in await root.get((await leases_at(root))[0])
    await ended(two)
    assert await leases_at(root) == []


def test_export_5_a_process_that_stalls_does_not_touch_the_lease_of_the_one_that_takes_the_place() -> None:
    """Neither when it renews its own lease, nor when it ends."""

    async def main() -> None:
        root, to = MemoryStore("root"), MemoryStore("to")
        await save(root, 1)
        one, two = (to_bucket(root, to, every_steps=2, sight=elsewhere(name)) for name in ("one", "two"))
        await one.round()
        assert one._hold._renewing is not None
        one._hold._renewing.cancel()  # what a stall does to it; nobody asks yet whether the place is still held
        while not await two.round():
            await asyncio.sleep(1)
        (lease,) = await leases_at(root)
        for _ in range(55):  # between two renewals
            await asyncio.sleep(1)
            assert b'"process": "two' in await root.get(lease)
        await one.close()
        assert await leases_at(root) == [lease]
        await ended(two)

    simulated(main)


async def leases_at(root: Store) -> list[str]:
    return [f".checkpointd/exports/{entry.name}" for entry in await root.list(".checkpointd/exports")]


# --- what goes wrong ---------------------------------------------------------------------------------------------------


async def test_export_3_a_damaged_checkpoint_is_named_and_holds_up_no_other(tmp_path: Path, files: str) -> None:
    async with PosixStore(tmp_path / "root") as root:
        await save(root, 1, 2, dedup=False)
        chunks = next((tmp_path / "root" / "global_step2").rglob("00000-0.chunks"))
        chunks.write_bytes(bytes(chunks.stat().st_size))
        exporter = to_directory(root, tmp_path / "to", files=files)
        await exporter.round()
        shown = exporter.progress
        assert (shown.state, shown.exported, shown.left) == ("failing", 1, {"damaged": 1})
        assert shown.problem is not None
        assert "global_step2" in shown.problem.message
        assert sorted(os.listdir(tmp_path / "to")) == [".checkpointd", "global_step1"]
        await ended(exporter)


async def test_export_3_a_checkpoint_that_is_removed_meanwhile_is_left(root: Store, tmp_path: Path, files: str) -> None:
    await save(root, 1, 2, dedup=False)
    exporter = to_directory(root, tmp_path / "to", files=files)

    async def removed_meanwhile(_: int) -> None:
        if exporter.progress.tag != "global_step1":
            return
        assert await remove(root, {"the test removes it": ["global_step1/00000001-0"]}) == ""
        await sweep(root)

    exporter._turn = removed_meanwhile
    await exporter.round()
    assert exporter.progress.left == {"removed": 1}
    assert (exporter.progress.state, exporter.progress.problem) == ("up to date", None)
    assert sorted(os.listdir(tmp_path / "to")) == [".checkpointd", "global_step2"]
    await ended(exporter)


@pytest.mark.parametrize("in_bucket", [False, True])
async def test_target_1_what_no_export_made_is_not_replaced(root: Store, tmp_path: Path, files: str, in_bucket: bool) -> None:
    await save(root, 1, 2)
    to = MemoryStore("to") if in_bucket else PosixStore(tmp_path / "to")
    await to.put("global_step2/precious", b"mine")
    exporter = to_bucket(root, to, files=files) if in_bucket else to_directory(root, tmp_path / "to", files=files)
    await exporter.round()
    shown = exporter.progress
    assert (shown.state, shown.left, shown.exported) == ("failing", {"blocked": 1}, 1)
    assert shown.problem is not None
    assert "global_step2 is not an export of memory://root: move it" in shown.problem.message
    assert [entry.name for entry in await to.list("global_step2")] == ["precious"]
    await to.delete("global_step2/precious")
    await exporter.round(again=True)
    assert (shown.state, shown.problem, shown.exported) == ("up to date", None, 2)
    await ended(exporter)


async def test_a_part_that_is_not_there_is_named_with_those_that_are(root: Store, tmp_path: Path) -> None:
    await save(root, 1)
    exporter = to_directory(root, tmp_path / "to", only="net")
    await exporter.round()
    assert exporter.progress.problem is not None
    assert "holds no tensor below 'net'; its parts are: model, optimizer" in exporter.progress.problem.message
    await ended(exporter)


async def test_files_that_are_not_there_are_named_before_anything_is_due_and_awaited(root: Store, tmp_path: Path) -> None:
    exporter = to_directory(root, tmp_path / "to", files=str(tmp_path / "files"))
    task = asyncio.create_task(exporter.run())
    await until(lambda: exporter.progress.state == "failing")
    assert exporter.progress.problem is not None
    assert f"there is no directory {tmp_path}/files" in exporter.progress.problem.message
    await save(root, 1)
    (tmp_path / "files").mkdir()
    exporter.finish()
    await task
    assert (exporter.progress.state, exporter.progress.exported) == ("up to date", 1)


async def test_a_failing_storage_is_tried_again(root: Store, tmp_path: Path, files: str) -> None:
    await save(root, 1)
    exporter, failures = to_directory(root, tmp_path / "to", files=files), [StoreError("the storage is away")] * 2
    said: list[str] = []
    exporter._fails = lambda error: said.append(str(error))

    async def fail(_: int) -> None:
        if failures:
            raise failures.pop()

    exporter._turn = fail
    task = asyncio.create_task(exporter.run())
    await until(lambda: exporter.progress.state == "up to date")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert said == ["the storage is away"]
    async with PosixStore(tmp_path / "to") as to:
        await check_exported(to, 1)
        assert await to.list(".checkpointd/exports") == []


async def test_a_place_in_the_root_is_refused(tmp_path: Path) -> None:
    async with PosixStore(tmp_path / "root") as root:
        with pytest.raises(UsageError, match="lies inside the root"):
            to_directory(root, tmp_path / "root" / "to")


# --- one process at a time ------------------------------------------------------------------------------------------------


def elsewhere(name: str, length_s: float = 30.0) -> Sight:
    """A process of another machine, of which nobody knows whether it lives."""
    return Sight(process=f"{name}.0.0.1.1.{name}", life=lambda _: "unknown", length_s=length_s)


@pytest.mark.parametrize("in_bucket", [False, True])
async def test_export_2_one_process_exports_and_another_takes_over(
    root: Store, tmp_path: Path, files: str, in_bucket: bool
) -> None:
    await save(root, 1)
    to = MemoryStore("to")

    def exporter(name: str) -> Exporter:
        sight = elsewhere(name)
        return (
            to_bucket(root, to, files=files, sight=sight)
            if in_bucket
            else to_directory(root, tmp_path, files=files, sight=sight)
        )

    one, two = exporter("one"), exporter("two")
    assert await one.round()
    assert not await two.round()
    assert (two.progress.state, two.progress.holder) == ("waiting", f"process {os.getpid()} on {os.uname().nodename}")
    await one.close()
    await save(root, 2)
    assert await two.round()
    assert (two.progress.exported, two.progress.holder) == (1, "")
    await ended(two)


async def test_export_2_a_process_that_lost_its_lease_shows_nothing(
    root: Store, tmp_path: Path, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(root, 1)
    one = to_directory(root, tmp_path / "to", files=files, sight=elsewhere("one"))

    async def lose(nbytes: int) -> None:
        if nbytes:
            one._hold._held = None

    one._turn = lose
    with pytest.raises(StoreError, match=r"another process exports to .* by now"):
        await one.round()
    assert sorted(os.listdir(tmp_path / "to")) == [".checkpointd"]
    await ended(one)
