"""Checkpoints as plain files: every byte in its place, whole or not at all, and nothing left behind."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from checkpointd.errors import DamagedError, NotFoundError, StoreError, StoreFullError, UsageError
from checkpointd.export import output as outputs
from checkpointd.export.consolidate import MEMORY_BYTES_MIN, Consolidation, ExportRequest, Safetensors, consolidate
from checkpointd.export.output import Output, reserve
from checkpointd.layout.boxes import Box
from checkpointd.layout.indexes import Alias
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer
from tests.builders import Piece, objects, save_checkpoint
from tests.faults import mounts

RANDOM = np.random.default_rng(0)
WEIGHT = RANDOM.standard_normal((10, 6)).astype(np.float32)
HALF = RANDOM.integers(0, 1 << 16, (7,), dtype=np.uint16)
ALIASES = (Alias("model.head", "model.weight", (10, 6), (6, 1), 0), Alias("model.turned", "model.weight", (6, 10), (1, 6), 0))


def pieces(rank: int) -> Sequence[Piece]:
    """Two ranks: a weight by columns, a bfloat16 vector by rows, and an optimizer's tensor."""
    return [
        Piece.part("model.weight", WEIGHT, Box((0, 4 * rank), (10, 4 - 2 * rank))),
        Piece.part("model.half", HALF, Box((3 * rank,), (3 + rank,)), "bfloat16"),
        Piece.part("optimizer.moment", WEIGHT * 2, Box((5 * rank, 0), (5, 6))),
    ]


def own(rank: int) -> dict[str, Any]:
    return {"model.count": np.array(7), "model.none": np.zeros((0, 3), np.float32), "rng.state": np.full(5, rank, np.uint8)}


async def saved(root: Path) -> PosixStore:
    store = PosixStore(root)
    if not (root / "latest").exists():
        await save_checkpoint(store, pieces=pieces, tensors=own, aliases=ALIASES)
    return store


async def exported(root: Path, out: Path, *, most: int | None = None, **options: Any) -> Consolidation:
    async with await saved(root) as store:
        return await consolidate(store, out, Safetensors(out, most), ExportRequest(**{"only": "model", **options}))


EXPECTED = {
    "weight": torch.from_numpy(WEIGHT),
    "half": torch.from_numpy(HALF.view(np.int16)).view(torch.bfloat16),
    "count": torch.tensor(7),
    "none": torch.zeros((0, 3)),
    "turned": torch.from_numpy(WEIGHT.T.copy()),
}


def equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    """Bit for bit: half holds NaN."""
    same = (
        (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        and found[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
        for name, tensor in expected.items()
    )
    return found.keys() == expected.keys() and all(same)


# --- what arrives ------------------------------------------------------------------------------------------------------


async def test_a_directory_of_one_file(tmp_path: Path) -> None:
    done = await exported(tmp_path / "root", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    assert equal(load_file(tmp_path / "out" / "model.safetensors"), EXPECTED)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "head": "weight"}
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert [(file.name, file.size) for file in done.files] == [("model.safetensors", size)]
    assert (done.tag, done.step, done.tensors, done.tied) == ("global_step1", 1, 6, {"head": "weight"})
    assert done.bytes == sum(tensor.numel() * tensor.itemsize for tensor in EXPECTED.values())


async def test_one_file_where_its_name_says_so(tmp_path: Path) -> None:
    done = await exported(tmp_path / "root", tmp_path / "small.safetensors", most=1)
    assert equal(load_file(tmp_path / "small.safetensors"), EXPECTED)
    assert [file.name for file in done.files] == ["small.safetensors"]
    assert sorted(os.listdir(tmp_path)) == ["root", "small.safetensors"]


async def test_several_files_with_an_index_as_hugging_face_reads_them(tmp_path: Path) -> None:
    done = await exported(tmp_path / "root", tmp_path / "out", most=250)
    names = sorted(os.listdir(tmp_path / "out"))
    assert names == [*(f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)), "model.safetensors.index.json"]
    assert [file.name for file in done.files] == names
    index = json.loads((tmp_path / "out" / names[-1]).read_text())
    assert index["metadata"] == {"total_size": done.bytes}
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, framework="pt") as shard:
            assert (shard.metadata() or {})["format"] == "pt"
            found[name] = shard.get_tensor(name)
    assert equal(found, EXPECTED)


@pytest.mark.parametrize(("dtype", "wanted"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
async def test_floats_are_converted_and_nothing_else(tmp_path: Path, dtype: str, wanted: torch.dtype) -> None:
    await exported(tmp_path / "root", tmp_path / "out", dtype=dtype)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["count"].dtype == torch.int64
    for name, tensor in EXPECTED.items():
        if tensor.is_floating_point():
            expected = tensor.to(wanted)
            assert found[name].dtype == wanted
            assert torch.equal(found[name].isnan(), expected.isnan())
            assert torch.equal(found[name].nan_to_num(), expected.nan_to_num())


async def test_fp32_is_that_of_the_masters_where_mixed_precision_keeps_some(tmp_path: Path) -> None:
    masters = {"w": torch.randn(6, 4), "other": torch.randn(3)}
    half = masters["w"].bfloat16()
    model = {"head": half, "w": half, "frozen": torch.randn(5).bfloat16(), "other": torch.randn(4).bfloat16()}
    with Checkpointer(tmp_path / "root") as ckpt:
        ckpt.save(1, {"model": model, "master": masters}).wait(60)
    found = {}
    async with PosixStore(tmp_path / "root") as store:
        for dtype in ("fp32", "keep"):
            out = tmp_path / dtype
            await consolidate(store, out, Safetensors(out, None), ExportRequest(only="model", dtype=dtype))  # type: ignore[arg-type]
            found[dtype] = load_file(out / "model.safetensors")
    widened = {key: model[key].float() for key in ("frozen", "other")}  # whose master is of another shape, or not there
    assert equal(found["fp32"], {"head": masters["w"], **widened})
    assert equal(found["keep"], {"head": half, **{key: model[key] for key in widened}})


async def test_all_of_the_state_of_one_rank(tmp_path: Path) -> None:
    await exported(tmp_path / "root", tmp_path / "out", only=None, rank=1)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(found) == sorted([*(f"model.{name}" for name in EXPECTED), "optimizer.moment", "rng.state"])
    assert found["rng.state"].tolist() == [1] * 5
    assert torch.equal(found["optimizer.moment"], torch.from_numpy(WEIGHT * 2))


async def test_progress_goes_from_nothing_to_all(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    async with await saved(tmp_path / "root") as store:
        request = ExportRequest(only="model")
        place = tmp_path / "out"
        done = await consolidate(store, place, Safetensors(place, None), request, lambda *now: told.append(now))
    assert told[0] == (0, done.bytes)
    assert told[-1] == (done.bytes, done.bytes)
    assert told == sorted(told)


# --- whole or not at all -----------------------------------------------------------------------------------------------


def beside(place: Path) -> list[str]:
    """What lies beside an export, hidden or not."""
    return sorted(name for name in os.listdir(place.parent) if name not in ("root", place.name))


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
async def test_output_2_nothing_is_overwritten_unasked(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    await exported(tmp_path / "root", out)
    before = out.stat().st_ino
    with pytest.raises(UsageError, match=f"{name} exists and is not overwritten: give another place, or --force"):
        await exported(tmp_path / "root", out)
    assert out.stat().st_ino == before
    await exported(tmp_path / "root", out, force=True)
    assert out.stat().st_ino != before
    assert beside(out) == []


async def test_output_3_an_interruption_between_two_renames_leaves_the_old_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    await exported(tmp_path / "root", out)
    before, rename = out.stat().st_ino, os.rename

    def interrupted(source: str, target: str, **options: Any) -> None:
        if target == str(out) and not source.endswith(".replaced"):
            raise KeyboardInterrupt
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        await exported(tmp_path / "root", out, force=True)
    assert out.stat().st_ino == before
    assert beside(out) == []


async def test_output_3_an_old_export_that_cannot_be_removed_does_not_fail_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    await exported(tmp_path / "root", out)
    before, rmdir = out.stat().st_ino, os.rmdir

    def refused(path: str, **options: Any) -> None:
        if str(path).endswith(".replaced"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", refused)
    await exported(tmp_path / "root", out, force=True)
    assert out.stat().st_ino != before


async def test_output_2_an_empty_directory_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    await exported(tmp_path / "root", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


async def test_output_2_a_directory_that_holds_something_else_is_never_replaced(tmp_path: Path) -> None:
    await exported(tmp_path / "root", tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"holds 'config\.json', which no export made"):
        await exported(tmp_path / "root", tmp_path / "out", force=True)
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]


async def test_output_2_a_link_to_an_earlier_export_is_replaced_and_leaves_no_other_name(tmp_path: Path) -> None:
    """Somebody has put the export elsewhere: the link goes, and the files stay."""
    await exported(tmp_path / "root", tmp_path / "elsewhere")
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    await exported(tmp_path / "root", tmp_path / "out", force=True)
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "out", "root"]
    assert not (tmp_path / "out").is_symlink()
    assert os.listdir(tmp_path / "elsewhere") == os.listdir(tmp_path / "out") == ["model.safetensors"]


async def test_output_2_a_file_is_not_replaced_by_a_directory_nor_the_other_way_round(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(UsageError, match=r"the output must be a directory, but .* is a file"):
        await exported(tmp_path / "root", tmp_path / "file", force=True)
    with pytest.raises(UsageError, match=r"the output must be a file, but .* is a directory"):
        await exported(tmp_path / "root", tmp_path / "folder.safetensors", force=True)


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
async def test_output_2_what_appears_meanwhile_is_not_overwritten(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / name
    write = outputs.write_parts

    def late(*arguments: Any) -> None:
        if name == "out":
            out.mkdir()
            (out / "precious").touch()
        else:
            out.write_bytes(b"precious")
        monkeypatch.setattr(outputs, "write_parts", write)
        write(*arguments)

    monkeypatch.setattr(outputs, "write_parts", late)
    with pytest.raises(UsageError, match="exists and is not overwritten"):
        await exported(tmp_path / "root", out)
    assert os.listdir(out) == ["precious"] if name == "out" else out.read_bytes() == b"precious"
    assert beside(out) == []


async def test_a_place_inside_the_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lies inside the root"):
        await exported(tmp_path / "root", tmp_path / "root" / "out")
    assert sorted(os.listdir(tmp_path / "root")) == [".checkpointd", "global_step1", "latest", "log"]


async def test_a_place_without_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=f"there is no directory {tmp_path}/models to put out into"):
        await exported(tmp_path / "root", tmp_path / "models" / "out")


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
async def test_output_3_a_full_disk_leaves_nothing(
    tmp_path: Path, name: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await saved(tmp_path / "root")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    out = tmp_path / name
    with pytest.raises(StoreFullError, match=r"failed: \[ENOSPC\].*free some space or give a place on another file system"):
        await consolidate(store, out, Safetensors(out, None), ExportRequest(only="model"))
    assert sorted(os.listdir(tmp_path)) == ["root"]


def test_output_3_what_is_larger_than_the_space_takes_none_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _, __, size: asked.append(size))
    with open(tmp_path / "out", "wb") as file:
        reserve(file.fileno(), 4096)
        with pytest.raises(OSError, match="No space left"):
            reserve(file.fileno(), 1 << 60)
    assert asked == [4096]


async def test_a_file_system_that_reserves_nothing_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await saved(tmp_path / "root")

    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    out = tmp_path / "out"
    await consolidate(store, out, Safetensors(out, None), ExportRequest(only="model"))
    assert equal(load_file(out / "model.safetensors"), EXPECTED)


@pytest.mark.root
@pytest.mark.xdist_group("mounts")
async def test_output_3_a_disk_that_is_really_full_leaves_nothing(tmp_path: Path) -> None:
    big = np.zeros((1 << 20,), np.float32)
    store = PosixStore(tmp_path / "root")
    await save_checkpoint(store, world_size=1, tensors=lambda _: {"model.big": big})
    with mounts.tmpfs(2 << 20) as small:
        out = small / "out"
        with pytest.raises(StoreFullError, match="4194") as caught:
            await consolidate(store, out, Safetensors(out, None), ExportRequest())
        assert "bytes are needed for this file" in str(caught.value)
        assert os.listdir(small) == []


@pytest.mark.parametrize("fault", ["flip", "truncate", "remove"])
async def test_output_3_damage_is_named_and_leaves_nothing(tmp_path: Path, fault: str) -> None:
    store = await saved(tmp_path / "root")
    chunks = next(path for path in objects(tmp_path / "root", ".chunks") if path.stat().st_size)
    data = chunks.read_bytes()
    chunks.unlink()
    if fault != "remove":
        chunks.write_bytes(data[:10] if fault == "truncate" else bytes(byte ^ 1 for byte in data))
    out = tmp_path / "out"
    with pytest.raises(DamagedError) as caught:
        await consolidate(store, out, Safetensors(out, None), ExportRequest(only="model"))
    assert (caught.value.key, caught.value.rank) == (str(chunks.relative_to(tmp_path / "root")), 0)
    assert caught.value.fqn.startswith("model." if fault == "flip" else "")
    assert sorted(os.listdir(tmp_path)) == ["root"]


async def test_output_3_an_interruption_leaves_nothing_and_nobody_writes_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, begun, go = await saved(tmp_path / "root"), asyncio.Event(), asyncio.Event()
    loop, ended = asyncio.get_running_loop(), 0
    write = outputs.write_parts

    def held(*arguments: Any) -> None:
        nonlocal ended
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
        write(*arguments)
        ended += 1

    monkeypatch.setattr(outputs, "write_parts", held)
    out = tmp_path / "out"
    running = asyncio.ensure_future(consolidate(store, out, Safetensors(out, None), ExportRequest(only="model")))
    await begun.wait()
    running.cancel()
    loop.call_later(0.05, go.set)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == 1
    assert sorted(os.listdir(tmp_path)) == ["root"]


async def test_a_dtype_that_the_format_lacks_is_named_with_what_to_do(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "root")
    await save_checkpoint(store, world_size=1, tensors=lambda _: {"model.c": np.zeros(3, np.complex128)})
    out = tmp_path / "out"
    with pytest.raises(UsageError, match=r"c has the dtype complex128, which safetensors does not have: .* the format torch"):
        await consolidate(store, out, Safetensors(out, None), ExportRequest(only="model"))
    assert sorted(os.listdir(tmp_path)) == ["root"]


async def test_a_tag_that_is_not_there(tmp_path: Path) -> None:
    async with PosixStore(tmp_path / "root") as store:
        with pytest.raises(NotFoundError, match="there is no latest"):
            await consolidate(store, tmp_path / "out", Safetensors("out", None), ExportRequest())
        await save_checkpoint(store)
        with pytest.raises(NotFoundError, match="there is no tag 'x'"):
            await consolidate(store, tmp_path / "out", Safetensors("out", None), ExportRequest(tag="x"))


async def test_a_place_that_cannot_be_written_is_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await saved(tmp_path / "root")

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refused)
    with pytest.raises(StoreError, match=r"creating .*/out failed: \[EROFS\]"):
        await consolidate(store, tmp_path / "out", Safetensors("out", None), ExportRequest(only="model"))


@pytest.mark.parametrize("options", [{"dtype": "fp16"}, {"memory_bytes": MEMORY_BYTES_MIN - 1}])
def test_requests_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"dtype is 'fp16'|memory is"):
        ExportRequest(**options)


@pytest.mark.parametrize("out", ["s3://bucket/out", "gs:/bucket/out"])
def test_an_output_is_not_in_a_bucket(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    with pytest.raises(UsageError, match="an export goes to this machine: give the path"):
        Output(out, directory=True)
