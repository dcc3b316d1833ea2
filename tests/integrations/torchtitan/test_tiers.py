"""CheckpointdManager with a sidecar, with a spool, and with its folder in a bucket; in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="needs torchtitan: make test-all installs it")

from checkpointd.errors import UsageError
from checkpointd_client.integrations.torchtitan import CheckpointdManager, TorchFTCheckpointdManager
from tests.faults.daemons import Daemon, OwnDaemons
from tests.integrations.torchtitan.test_fault_tolerance import replica
from tests.integrations.torchtitan.titan_job import Job, assert_equal
from tests.servers.fixtures import Place, root_at

pytestmark = [
    pytest.mark.usefixtures("group"),
    pytest.mark.xdist_group("torchtitan"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture
def own_daemons(monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnDaemons]:
    with OwnDaemons(monkeypatch) as daemons:
        yield daemons


def test_the_sidecar_persists_the_saves_and_keeps_the_newest_in_memory(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        job = Job()
        manager = job.manager(tmp_path, sidecar=str(daemon.socket))
        assert manager.load() is False
        job.train(manager, 3)
        assert manager._begun(manager.folder).status().sidecar_connected
        manager.close()
        other = Job(seed=1)
        manager = other.manager(tmp_path, sidecar=str(daemon.socket))
        assert manager.load() is True
        assert_equal(other.everything(), job.everything())
        manager.close()


def test_saves_lie_in_the_spool_before_they_are_in_the_folder(tmp_path: Path, own_daemons: OwnDaemons) -> None:
    job = Job()
    manager = job.manager(tmp_path, spool=str(tmp_path / "spool"))
    job.train(manager, 2)
    manager.maybe_wait_for_saving()
    assert manager._begun(manager.folder).status().attempts[-1].bytes_uploaded > 0
    assert own_daemons.the_one()
    manager.close()
    other = Job(seed=1)
    manager = other.manager(tmp_path)
    assert manager.load() is True
    assert_equal(other.everything(), job.everything())
    manager.close()


def test_a_spool_beside_a_sidecar_is_refused_in_the_config() -> None:
    with pytest.raises(UsageError, match="the spool is the sidecar's"):
        CheckpointdManager.Config(sidecar="/run/checkpointd.sock", spool="/mnt/spool")


@pytest.fixture
def bucket(moto_place: Place, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a folder in a bucket, with the options that reach it."""
    return root_at(Place(moto_place.server, moto_place.bucket, "run/"), monkeypatch)


def test_the_folder_may_be_in_a_bucket(bucket: str, tmp_path: Path) -> None:
    job = Job()
    manager = job.manager(tmp_path, folder=bucket, keep_latest_k=2)
    assert manager.load() is False
    with pytest.raises(FileNotFoundError, match="load_step=7"):
        manager.load(7)
    job.train(manager, 3)
    expected = job.everything()
    job.train(manager)
    manager.close()
    other = Job(seed=1)
    manager = other.manager(tmp_path, folder=bucket, load_only=True)
    assert manager._find_load_step() == 4
    assert manager.load(3) is True
    assert_equal(other.everything(), expected)
    manager.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_begins_from_a_checkpoint_in_a_bucket(bucket: str, tmp_path: Path) -> None:
    job = Job()
    manager = job.manager(tmp_path, folder=bucket)
    job.train(manager, 2)
    manager.close()
    other = Job(seed=1)
    first = bucket.replace("run/?", "run/step-1?")
    manager = other.manager(tmp_path, initial_load_path=first, initial_load_model_only=False)
    assert manager.load() is True
    assert other.step == 1
    other.train(manager)
    assert_equal(other.everything(), job.everything())
    manager.close()
    again = Job(seed=2)
    manager = again.manager(tmp_path, initial_load_path=first, initial_load_model_only=False)
    assert manager.load() is True
    assert again.step == 2  # its own checkpoint comes first
    manager.close()


def test_replica_groups_may_share_a_bucket(bucket: str, tmp_path: Path) -> None:
    first = replica(tmp_path, 0, rank=0, folder=bucket)
    assert first.manager.load() is False
    first.job.train(first.manager, 2)
    first.manager.close()
    again = replica(tmp_path, 0, rank=0, folder=bucket)
    assert isinstance(again.manager, TorchFTCheckpointdManager)
    assert again.manager.load() is True
    assert_equal(again.job.everything(), first.job.everything())
    again.manager.close()
