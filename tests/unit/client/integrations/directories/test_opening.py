"""Roots that an engine loads from and does not save at: other jobs may use them, or nothing may be written there."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")

from checkpointd.config import Ranks
from checkpointd.errors import DamagedError, RootInUseError
from checkpointd_client import Checkpointer, onlooker
from checkpointd_client.core import Core
from checkpointd_client.integrations.deepspeed import adapter_base, tensor_adapter
from checkpointd_client.integrations.deepspeed.adapter_base import Adapter
from checkpointd_client.integrations.deepspeed.files_adapter import FilesAdapter
from checkpointd_client.integrations.deepspeed.tensor_adapter import TensorAdapter
from checkpointd_client.integrations.directories import agreement, opening
from checkpointd_client.ranks.board import StoreBoard
from checkpointd_client.ranks.convening import Assembly
from tests.job_elsewhere import live_job
from tests.logged_roots import log_state
from tests.unit.client.integrations.deepspeed.deepspeed_engine import FILE, Engine
from tests.unit.client.integrations.deepspeed.test_tensor_choice import Nowhere, save_boxes

WORLD = 2


@contextmanager
def attached(kind: type[FilesAdapter] = FilesAdapter, **settings: Any) -> Iterator[FilesAdapter]:
    plug = kind(Engine(), settings)
    Adapter.connect(plug)
    try:
        yield plug
    finally:
        plug.detach()


def save(plug: FilesAdapter, root: Path, tag: str = "one") -> None:
    plug.save_checkpoint(str(root), tag=tag)
    plug.wait(60)


def saved(root: Path, *tags: str) -> Path:
    """`root`, at which a job that has ended has saved."""
    with attached() as plug:
        for tag in tags or ("one",):
            save(plug, root, tag)
    return root


def leases(root: Path) -> list[str]:
    """What is below `leases` of the store of a root."""
    return sorted(os.listdir(root / ".checkpointd" / ".checkpointd" / "leases"))


def keeps_all_before(plug: FilesAdapter, root: Path) -> int:
    """The start before which nothing is removed at a root; 0 where all may be."""
    return plug._roots.checkpointers[str(root)]._saver._state.tidier.keeps_before[0]


# --- a root that was only loaded from --------------------------------------------------------------------------------


def test_a_root_that_was_only_loaded_from_is_free_after_the_first_save_elsewhere(tmp_path: Path) -> None:
    first = saved(tmp_path / "first")
    with attached() as plug:
        assert plug.load_checkpoint(str(first))[1] == "one"
        assert leases(first) == ["00000002"], "until it is known that this job does not save there"
        save(plug, tmp_path / "second")
        assert leases(first) == []
        with Checkpointer(first / ".checkpointd"):
            assert leases(first) == ["00000003"], "another job has begun"
        assert plug.load_checkpoint(str(tmp_path / "second"))[1] == "one", "where was saved is kept"
        assert leases(tmp_path / "second") == ["00000001"]


@pytest.mark.parametrize("others", [0, 1])
def test_what_is_used_again_is_known_unless_another_job_has_been_there(tmp_path: Path, others: int) -> None:
    first = saved(tmp_path / "first")
    with attached() as plug:
        plug.load_checkpoint(str(first))
        save(plug, tmp_path / "second")
        for _ in range(others):
            Checkpointer(first / ".checkpointd").close()
        save(plug, first, "two")
        assert (keeps_all_before(plug, first) == 0) is (others == 0)
        assert leases(tmp_path / "second") == ["00000001"], "both are saved at now"


def test_another_engine_of_the_process_keeps_the_root_that_both_have_loaded_from(tmp_path: Path) -> None:
    first = saved(tmp_path / "first")
    with attached() as one, attached() as other:
        for plug in (one, other):
            plug.load_checkpoint(str(first))
        save(one, tmp_path / "second")
        assert leases(first) == ["00000002"]
        other.engine.global_steps += 1
        save(other, first, "two")
        assert keeps_all_before(other, first) == 0


def test_a_load_into_named_tensors_waits_for_the_saves_at_other_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes to the tensors that these may still be copying."""
    waited_for: list[str] = []
    monkeypatch.setattr(tensor_adapter, "EngineTargets", Nowhere)
    save_boxes(tmp_path / "first", "one", 1)
    with attached(TensorAdapter) as plug:
        plug._roots.to_save(str(tmp_path / "second"))
        with monkeypatch.context() as patch:
            patch.setattr(Core, "settle", lambda self: waited_for.append(Path(self.status().root).name))
            plug.load_checkpoint(str(tmp_path / "first"))
    assert waited_for[0] == "second"


# --- a root at which this job cannot begin ---------------------------------------------------------------------------


def loads(plug: FilesAdapter, root: Path) -> str:
    found = plug.load_checkpoint(str(root))
    return str(found[1] if isinstance(found[1], str) else os.path.basename(found[0]))


@pytest.mark.parametrize("kind", [FilesAdapter, TensorAdapter])
def test_the_root_of_a_living_job_is_read_and_left_alone(
    tmp_path: Path, kind: type[FilesAdapter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tensor_adapter, "EngineTargets", Nowhere)
    root = tmp_path / "run"
    saved(root) if kind is FilesAdapter else save_boxes(root, "one", 1)
    store = Path(kind._store_of(str(root)))
    with live_job(store, "train"), attached(kind) as plug:
        lease = store / ".checkpointd" / "leases"
        assert loads(plug, root) == "one"
        assert "is opened read-only, since another job is alive there" in caplog.text
        assert os.listdir(lease) == ["00000002"]
        assert log_state(store).start == 2
        if kind is FilesAdapter:
            save(plug, tmp_path / "own")
            with pytest.raises(RootInUseError):
                plug.save_checkpoint(str(root), tag="two")
    if kind is FilesAdapter:
        with attached() as plug:
            save(plug, root, "two")
            assert keeps_all_before(plug, root) == 3, "what was only read does not count as loaded from"


def test_the_one_root_of_an_engine_must_be_its_own_to_load(tmp_path: Path) -> None:
    """All its saves go there: it is told now, and not after the first hours of training."""
    saved(tmp_path)
    with live_job(tmp_path / ".checkpointd", "train"), attached(root=str(tmp_path)) as plug, pytest.raises(RootInUseError):
        plug.load_checkpoint(str(tmp_path))


@contextmanager
def as_another_user() -> Iterator[None]:
    """Effective rights of nobody where the tests run as root: root may do everything."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user reaches: pytest's own are for their owner alone."""
    made = Path(tempfile.mkdtemp(prefix="checkpointd-test-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    for path in made.rglob("*/"):
        path.chmod(0o755)
    shutil.rmtree(made)


@pytest.mark.parametrize("kind", [FilesAdapter, TensorAdapter])
def test_a_root_where_nothing_may_be_written_is_read(
    shared: Path, kind: type[FilesAdapter], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tensor_adapter, "EngineTargets", Nowhere)
    root = shared / "run"
    saved(root) if kind is FilesAdapter else save_boxes(root, "one", 1)
    for path in [*root.rglob("*/"), root]:
        path.chmod(0o555)
    before = sorted(root.rglob("*"))
    with as_another_user(), attached(kind) as plug:
        assert loads(plug, root) == "one"
        assert not plug._roots.checkpointers
    assert "is opened read-only, since it may not be written to" in caplog.text
    assert sorted(root.rglob("*")) == before


def nothing_may_be_written(_: str) -> opening.Said:
    return False, os.urandom(8).hex()


@pytest.mark.nightly
def test_what_is_only_read_is_verified_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory of the newest is gone, the file of the next one is not what was stored, and that of the next is damaged."""
    saved(tmp_path, *"abcd")
    shutil.rmtree(tmp_path / "d")
    for path in (tmp_path / "c" / FILE, *(tmp_path / ".checkpointd" / "b").glob("*/*.file")):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        if path.name == FILE:
            path.unlink()  # another file by its name
        else:
            path.chmod(0o644)
        path.write_bytes(data)
        os.utime(path, ns=(0, 0))  # not written later than the commit, as if somebody had saved over it
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(adapter_base, "said_of", nothing_may_be_written)
    with attached(absence_s=0.0) as plug:
        assert loads(plug, tmp_path) == "a"
        for tag in "bc":
            with pytest.raises(DamagedError, match=f"{tag} is damaged"):
                plug.load_checkpoint(str(tmp_path), tag)
    assert "d/00000001-0 in " in caplog.text
    assert "was removed: its directory is gone" in caplog.text
    assert f"c does not show what was committed: {FILE} (changed)" in caplog.text
    assert sorted(tmp_path.rglob("*")) == before


def test_all_ranks_only_read_where_rank_0_may_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1, a thread as rank 0 is, could write: a Checkpointer that it made alone would wait for the other."""
    saved(tmp_path)
    store, here = HashStore(), threading.local()

    def board(ranks: Ranks, nonce: str) -> StoreBoard:
        return StoreBoard(PrefixStore(nonce, store), ranks)

    ranks = [Ranks(rank=rank, world_size=WORLD) for rank in range(WORLD)]
    assemblies = [Assembly(one, lambda: store, board) for one in ranks]
    monkeypatch.setattr(agreement, "convene", lambda *said: assemblies[here.rank].meet(*said))
    monkeypatch.setattr(onlooker, "find_ranks", lambda: ranks[here.rank])
    monkeypatch.setattr(onlooker, "open_board", board)
    monkeypatch.setattr(adapter_base, "said_of", lambda _: (here.rank != 0, f"nonce of {here.rank}"))

    def load(rank: int) -> tuple[str, torch.Tensor]:
        here.rank = rank
        plug = FilesAdapter(Keeping(), {"commit_timeout_s": 30.0})
        plug.engine.global_rank, plug.engine.world_size = rank, WORLD
        plug.connect()
        tag = loads(plug, tmp_path)
        return tag, plug.engine.weight

    with ThreadPoolExecutor(WORLD) as pool:
        found = list(pool.map(load, range(WORLD)))
    assert [tag for tag, _ in found] == ["one"] * WORLD
    assert torch.equal(found[0][1], found[1][1])
    assert log_state(tmp_path / ".checkpointd").start == 1


class Keeping(Engine):
    """Keeps what it has loaded."""

    weight: torch.Tensor

    def load_checkpoint(self, load_dir: str, tag: str | None, *_: Any) -> tuple[str, str | None]:
        content = self.checkpoint_engine.load(os.path.join(load_dir, str(tag), FILE), map_location="cpu")
        self.weight = content["module"]["weight"]
        return load_dir, tag
