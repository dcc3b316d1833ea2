"""A Plug on an engine that stands in for DeepSpeed's: what needs no second rank."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")

from checkpointd.errors import AbortedError, ClosedError, DamagedError, StateError, StoreError
from checkpointd.store.posix.store import PosixStore
from checkpointd_client.integrations.deepspeed import files_adapter as plugs
from checkpointd_client.integrations.deepspeed.adapter_base import DirectoryError
from checkpointd_client.integrations.deepspeed.checkpoint_engine import write_whole
from checkpointd_client.integrations.deepspeed.files_adapter import FilesAdapter
from checkpointd_client.integrations.directories.targets import mount_fault
from tests.unit.client.integrations.deepspeed.deepspeed_engine import FILE, Engine


@pytest.fixture
def adapter() -> Iterator[FilesAdapter]:
    made = FilesAdapter(Engine(), {})
    made.connect()
    yield made
    made.close()


def test_a_universal_checkpoint_is_found_by_deepspeed(adapter: FilesAdapter, tmp_path: Path) -> None:
    adapter.save_checkpoint(str(tmp_path))
    assert adapter.load_checkpoint(str(tmp_path))[1] == "global_step1"
    adapter.engine.universal = True
    assert adapter.load_checkpoint(str(tmp_path))[1] is None, "which is then what latest_universal names"


def test_a_directory_on_another_file_system_is_refused_at_once(
    adapter: FilesAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mount_fault(str(tmp_path), str(tmp_path)) is None
    assert "another file system" in str(mount_fault(str(tmp_path), "/proc"))
    monkeypatch.setattr(plugs, "mount_fault", lambda *_: "it lies elsewhere")
    adapter.save_checkpoint(str(tmp_path))
    assert adapter.handle is not None
    with pytest.raises(StoreError, match="it lies elsewhere"):
        adapter.handle.wait(60)


def test_frozen_parameters_may_change_right_after_the_call(adapter: FilesAdapter, tmp_path: Path) -> None:
    """Such as an average of weights: no step of an optimizer changes it, so none can be waited for."""
    model = adapter.engine.module = torch.nn.Linear(3000, 3000)
    model.weight.requires_grad = False
    for tag in "abc":
        model.weight.data.fill_(1)  # by .data, which no version counter sees
        adapter.save_checkpoint(str(tmp_path), tag=tag)
        model.weight.data.fill_(2)
        adapter.wait(60)
        assert torch.load(tmp_path / tag / FILE)["module"]["weight"].eq(1).all()


def test_a_detached_engine_has_its_own_methods_whatever_the_last_save_did(
    adapter: FilesAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed() -> None:
        raise AbortedError("the last save failed")

    with monkeypatch.context() as patch:
        patch.setattr(adapter, "close", failed)
        with pytest.raises(AbortedError):
            adapter.detach()
    assert adapter.engine.save_checkpoint.__func__ is Engine.save_checkpoint
    assert adapter.engine.checkpoint_engine is None


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_others_may_read_what_the_umask_lets_them(adapter: FilesAdapter, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        adapter.save_checkpoint(str(tmp_path), tag="a")
        adapter.wait(60)
        write_whole(torch.ones(2), str(tmp_path / "weights.bin"))
    finally:
        os.umask(before)
    modes = {
        path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "latest", tmp_path / "weights.bin")
    }
    file = (tmp_path / "a" / FILE).stat()
    assert stat.S_IMODE(file.st_mode) == (0o444 if file.st_nlink > 1 else 0o666) & ~umask  # an object's second name, or a clone
    assert set(modes.values()) == {0o666 & ~umask, 0o777 & ~umask}
    assert modes[tmp_path / "a"] == 0o777 & ~umask


@pytest.mark.parametrize("universal", [False, True])
def test_what_an_engine_has_loaded_from_is_taken_up(adapter: FilesAdapter, tmp_path: Path, universal: bool) -> None:
    """Retention then counts what earlier jobs left there."""
    adapter.save_checkpoint(str(tmp_path))
    adapter.close()
    adapter.save_checkpoint(str(tmp_path))
    [checkpointer] = adapter._roots.checkpointers.values()
    assert checkpointer._saver._state.tidier.keeps_before == (2, 0)
    adapter.engine.universal = universal
    adapter.load_checkpoint(str(tmp_path))
    adapter.engine.global_steps += 1
    adapter.save_checkpoint(str(tmp_path))
    assert checkpointer._saver._state.tidier.keeps_before == (0, 0)


class Stubborn:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("it will not be pickled")


def test_a_client_state_is_refused_by_name_also_where_no_file_of_the_rank_has_it(adapter: FilesAdapter, tmp_path: Path) -> None:
    """As on all ranks but the first of ZeRO 2, whose own would come back on none of them."""
    with pytest.raises(StateError, match=r"client_state cannot be saved .*because of 'charm', a Stubborn"):
        adapter.save_checkpoint(str(tmp_path), client_state={"epoch": 3, "charm": Stubborn()})
    assert adapter.handle is not None
    with pytest.raises(StateError, match="'charm', a Stubborn: it will not be pickled"):
        adapter.handle.wait(60)
    adapter.save_checkpoint(str(tmp_path), client_state={"epoch": 3})
    adapter.handle.wait(60)


def test_a_file_that_cannot_be_pickled_is_refused_with_the_key_that_is_to_blame(adapter: FilesAdapter, tmp_path: Path) -> None:
    adapter.engine.module.state_dict = Stubborn
    with pytest.raises(StateError, match=f"{FILE} cannot be saved .*because of 'module', a Stubborn"):
        adapter.save_checkpoint(str(tmp_path))


def test_a_directory_that_cannot_be_made_is_told_as_such(adapter: FilesAdapter, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(DirectoryError, match=f"save_dir {directory} cannot be made: .*give the path of a directory"):
            adapter.save_checkpoint(str(directory))
    assert adapter.handle is None


def test_a_detached_engine_says_where_the_handle_is(adapter: FilesAdapter, tmp_path: Path) -> None:
    adapter.save_checkpoint(str(tmp_path))
    assert adapter.engine.checkpoint_handle() is adapter.handle
    adapter.detach()
    with pytest.raises(ClosedError, match=r"after detach.*plug.handle"):
        adapter.engine.checkpoint_handle()
    adapter.connect()
    assert adapter.engine.checkpoint_handle() is adapter.handle


class Loading(Engine):
    """Asks for its file twice, as DeepSpeed does, with the tensors where they are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(1500, 1500)
        self.loaded: list[Any] = []

    def load_checkpoint(self, load_dir: str, tag: str | None, *_: Any) -> tuple[str, str | None]:
        path = os.path.join(load_dir, str(tag), FILE)
        self.loaded += [self.checkpoint_engine.load(path, map_location=lambda storage, _: storage) for _ in range(2)]
        return load_dir, tag


@pytest.fixture
def loading(tmp_path: Path) -> Iterator[FilesAdapter]:
    """Attached, with two saves, `one` and `two`."""
    made = FilesAdapter(Loading(), {"chunk_bytes": 1 << 20})
    made.connect()
    for tag in ("one", "two"):
        made.save_checkpoint(str(tmp_path), tag=tag)
        made.wait(60)
    yield made
    made.close()


def test_a_load_reads_every_byte_of_a_file_once(loading: FilesAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verified and loaded in one go: torch.load opens no file itself, the shown one neither."""
    read: list[tuple[str, int, int]] = []
    opened: list[object] = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda file, **options: (opened.append(file), load(file, **options))[1])
    get_range, get_parts = PosixStore.get_range, PosixStore.get_parts

    async def counted(store: PosixStore, key: str, offset: int, out: memoryview) -> None:
        read.append((key, offset, offset + len(out)))
        await get_range(store, key, offset, out)

    async def counted_parts(store: PosixStore, key: str, offset: int, parts: Sequence[memoryview], then: Any) -> Any:
        read.append((key, offset, offset + sum(map(len, parts))))
        return await get_parts(store, key, offset, parts, then)

    monkeypatch.setattr(PosixStore, "get_range", counted)
    monkeypatch.setattr(PosixStore, "get_parts", counted_parts)
    (tmp_path / "two" / FILE).rename(tmp_path / "elsewhere")  # it is shown again, and not read
    assert loading.load_checkpoint(str(tmp_path)) == (str(tmp_path), "two")
    ends = [0]
    for key, start, stop in sorted(read):
        assert key.startswith("two/")
        if "/ballot-" in key:  # of which a rank reads its own line
            continue
        assert key.endswith(".file")
        assert start == ends[-1], "a byte is read twice, or not at all"
        ends.append(stop)
    assert ends[-1] == (tmp_path / "two" / FILE).stat().st_size
    assert opened
    assert not [file for file in opened if isinstance(file, str | os.PathLike)]
    for found in loading.engine.loaded:
        assert torch.equal(found["module"]["weight"], loading.engine.module.weight)


def test_a_flipped_bit_is_found_before_anything_reaches_the_engine(loading: FilesAdapter, tmp_path: Path) -> None:
    [stored] = (tmp_path / ".checkpointd" / "two").glob("*/*.file")
    data = bytearray(stored.read_bytes())
    data[len(data) // 2] ^= 1
    stored.chmod(0o644)
    stored.write_bytes(data)
    with pytest.raises(DamagedError, match="damaged"):
        loading.load_checkpoint(str(tmp_path), "two")
    assert not loading.engine.loaded


def test_a_directory_that_somebody_removed_is_said_to_be_removed(
    adapter: FilesAdapter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for tag in "ab":
        adapter.save_checkpoint(str(tmp_path), tag=tag)
        adapter.wait(60)
    shutil.rmtree(tmp_path / "b")
    assert adapter.load_checkpoint(str(tmp_path))[1] == "a"
    assert "b/00000001-0 in " in caplog.text
    assert "was removed" in caplog.text
    assert "damaged" not in caplog.text
