"""Objects that were damaged, or that hold another program's data, run nothing. A load that verifies first changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from checkpointd.errors import (
    CheckpointdError,
    DamagedError,
    MismatchError,
    PartlyLoadedError,
)
from checkpointd.layout import tree
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer
from tests.builders import save_checkpoint
from tests.uniform_weights import load_uniform_weights, uniform_weights


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "root")


@pytest.fixture
def overwritten(tmp_path: Path) -> Path:
    """A root whose newer checkpoint has other bytes in the middle of its tensor."""
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, uniform_weights(1.0)).wait()
        ckpt.save(2, uniform_weights(2.0)).wait()
    with next(tmp_path.glob("global_step2/*/*.chunks")).open("r+b") as file:
        file.seek(8192)
        file.write(b"\x00" * 4096)
    return tmp_path


def test_overwritten_bytes_are_found_before_they_reach_a_tensor(overwritten: Path) -> None:
    target = uniform_weights(-1.0)
    with Checkpointer(overwritten) as ckpt:
        with pytest.raises(DamagedError, match=r"00000-0\.chunks.*rank 0, w"):
            ckpt.load(target, tag="global_step2", verify_first=True)
        assert bool((target["w"] == -1.0).all())
    assert load_uniform_weights(overwritten) == (1, 1.0)


def test_overwritten_bytes_that_reached_a_tensor_are_told_as_a_mixture_or_overwritten(overwritten: Path) -> None:
    with Checkpointer(overwritten) as ckpt:
        target = uniform_weights(-1.0)
        with pytest.raises(PartlyLoadedError, match=r"00000-0\.chunks.*rank 0, w"):
            ckpt.load(target, tag="global_step2")
        loaded = ckpt.load(target)
        assert loaded is not None
        assert loaded.tag == "global_step1"
        assert bool((target["w"] == 1.0).all())


async def test_per_rank_values_of_two_ranks_are_not_half_loaded_by_one(store: PosixStore, tmp_path: Path) -> None:
    values = {"state": tree.Dict("dict", (("w", tree.Tensor("model.weight")),)), "client_state": None}
    await save_checkpoint(store, tag="global_step1", world_size=2, values=values)
    target = {"w": torch.full((64, 48), -1.0)}

    def load() -> None:
        with Checkpointer(tmp_path / "root") as ckpt:
            ckpt.load(target)

    with pytest.raises(MismatchError, match="w: the ranks that saved it had different values"):
        await asyncio.to_thread(load)
    assert bool((target["w"] == -1.0).all())


class _Bomb:
    fired = False

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (setattr, (_Bomb, "fired", True))


def test_nothing_is_unpickled_whatever_lies_at_the_root(tmp_path: Path) -> None:
    bomb = pickle.dumps(_Bomb())
    saved = tmp_path / "saved"
    with Checkpointer(saved) as ckpt:
        ckpt.save(1, uniform_weights(1.0)).wait()
    objects = [path.relative_to(saved) for path in saved.rglob("*") if path.is_file() and path.name != "lock"]
    assert len(objects) >= 7
    for number, name in enumerate(objects):
        copy = tmp_path / str(number)
        shutil.copytree(saved, copy)
        (copy / name).write_bytes(bomb)
        with contextlib.suppress(CheckpointdError), Checkpointer(copy) as ckpt:
            ckpt.load(uniform_weights(0.0))
    assert not _Bomb.fired
