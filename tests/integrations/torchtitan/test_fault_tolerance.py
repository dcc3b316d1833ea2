"""TorchFTCheckpointdManager with a scripted stand-in for torchft's manager, in one process: each replica group is a Job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="needs torchtitan: make test-all installs it")
pytest.importorskip("torchft", reason="needs torchft: make test-all installs it")

from checkpointd.errors import StoreError
from checkpointd.store.posix.store import PosixStore
from checkpointd_client.integrations.torchtitan import TorchFTCheckpointdManager
from tests.integrations.torchtitan.titan_job import Job, assert_equal

pytestmark = [
    pytest.mark.usefixtures("group"),
    pytest.mark.xdist_group("torchtitan"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


@dataclass
class Scripted:
    """Torchft's manager as torchtitan's checkpoints use it: the rank among the groups that take part, by order of the test."""

    rank: int
    state_dict_fns: tuple[Callable[[Any], None], Callable[[], Any]] | None = field(default=None)

    def participating_rank(self) -> int:
        return self.rank

    def set_state_dict_fns(self, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        self.state_dict_fns = load, save


@dataclass
class Group:
    """A replica group: its job, its manager, and torchft's."""

    job: Job
    manager: Any
    ft: Scripted


def replica(dump: Path, number: int, rank: int, **options: Any) -> Group:
    job, ft = Job(seed=number), Scripted(rank)
    of_titan = SimpleNamespace(enabled=True, manager=ft, replica_id=number)
    return Group(job, job.manager(dump, TorchFTCheckpointdManager, parts={"ft_manager": of_titan}, **options), ft)


def test_only_the_first_group_saves_the_model_and_each_saves_its_data_loader(tmp_path: Path) -> None:
    first, second = replica(tmp_path, 0, rank=0), replica(tmp_path, 1, rank=1)
    assert (first.manager.load(), second.manager.load()) == (False, False)
    first.job.train(first.manager, 2)
    second.job.loader.position = 40
    second.job.train(second.manager, 2)
    first.manager.close()
    second.manager.close()
    folder = tmp_path / "checkpoint"
    assert (folder / "latest").read_text().strip() == "step-2"
    assert (folder / "ft-replicat-0" / "latest").read_text().strip() == "step-2"
    assert (folder / "ft-replicat-1" / "latest").read_text().strip() == "step-2"

    again, other = replica(tmp_path, 0, rank=0), replica(tmp_path, 1, rank=1)
    assert (again.manager.load(), other.manager.load()) == (True, True)
    expected = first.job.everything()
    assert_equal(again.job.everything(), expected)
    assert_equal(other.job.everything(), {**expected, "data": 42})
    again.manager.close()
    other.manager.close()


def test_a_group_that_becomes_the_first_takes_the_folder_over(tmp_path: Path) -> None:
    first, second = replica(tmp_path, 0, rank=0), replica(tmp_path, 1, rank=1)
    first.job.train(first.manager, 1)
    first.ft.rank, second.ft.rank = 1, 0
    first.job.train(first.manager, 1)
    for _ in range(3):
        second.job.train(second.manager, 1)
        second.manager.maybe_wait_for_saving()  # else a save is skipped where two are in flight
    first.manager.close()
    second.manager.close()
    again = replica(tmp_path, 2, rank=0)
    assert again.manager.load() is True
    assert_equal(again.job.everything(), {**second.job.everything(), "data": 0})  # it has no data loader's checkpoint yet
    again.manager.close()


def test_a_group_that_hands_the_folder_over_trains_on_though_its_last_save_there_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any, **__: Any) -> Any:
        raise StoreError("no space is left on this disk")

    group = replica(tmp_path, 0, rank=0)
    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "open_writer", fails)
        group.job.train(group.manager, 1)
        group.manager.maybe_wait_for_saving()
    group.ft.rank = 1
    group.job.train(group.manager, 1)
    group.manager.close()
    assert not (tmp_path / "checkpoint" / "latest").exists()
    assert (tmp_path / "checkpoint" / "ft-replicat-0" / "latest").read_text().strip() == "step-2"


def test_the_state_for_other_groups_is_handed_to_torchft(tmp_path: Path) -> None:
    one, two = replica(tmp_path, 0, rank=0), replica(tmp_path, 1, rank=1)
    one.job.train(steps=2)
    assert one.ft.state_dict_fns is not None
    assert two.ft.state_dict_fns is not None
    two.ft.state_dict_fns[0](one.ft.state_dict_fns[1]())
    assert two.job.step == 2
    assert torch.equal(two.job.parts[0][0].weight, one.job.parts[0][0].weight)
    one.manager.close()
    two.manager.close()


def test_without_torchft_it_saves_as_the_other_manager(tmp_path: Path) -> None:
    job = Job()
    manager = job.manager(tmp_path, TorchFTCheckpointdManager)
    assert manager.load() is False
    job.train(manager, 2)
    manager.close()
    other = Job(seed=1)
    manager = other.manager(tmp_path, TorchFTCheckpointdManager)
    assert manager.load() is True
    assert_equal(other.everything(), job.everything())
    manager.close()
