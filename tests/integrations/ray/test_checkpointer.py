"""RAY-1 and RAY-2 with Ray's own file systems and checkpoints, and a scripted context in place of a worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs ray: make test-all installs it")

import torch
from pyarrow import fs
from ray import train

from checkpointd.errors import NotFoundError, StoreError, StoreFullError, UsageError
from checkpointd_client.checkpointer import core_of
from checkpointd_client.integrations.ray import RayCheckpointer, checkpointer, open_reported
from checkpointd_client.integrations.ray.storage import root_of
from tests.servers.fixtures import Place, root_at
from tests.servers.s3_requests import REGION

Patch = pytest.MonkeyPatch


class Storage:
    """What a worker's context says of the storage of its run."""

    def __init__(self, experiment: Path | str, filesystem: fs.FileSystem | None = None) -> None:
        self.storage_filesystem = filesystem or fs.LocalFileSystem()
        self.experiment_fs_path = str(experiment)

    def build_checkpoint_path_from_name(self, name: str) -> str:
        return f"{self.experiment_fs_path}/{name}"


class Worker:
    """A worker's context, and what it has reported: uploads run when `upload` says so, as on Ray's own thread."""

    def __init__(self, experiment: Path) -> None:
        self.storage = Storage(experiment)
        self.reported: list[tuple[dict[str, Any], Any]] = []
        self._uploads: list[Any] = []

    def get_storage(self) -> Storage:
        return self.storage

    def get_experiment_name(self) -> str:
        return "run1"

    def report(self, metrics: dict[str, Any], checkpoint: Any = None, **options: Any) -> None:
        name = options.get("checkpoint_dir_name") or f"checkpoint_{len(self.reported) + len(self._uploads):02}"
        upload = options.get("checkpoint_upload_fn")
        self._uploads.append(lambda: (metrics, upload(checkpoint, name) if checkpoint else None))

    def upload(self) -> list[Any]:
        """Upload what was reported; the checkpoints so far."""
        while self._uploads:
            self.reported.append(self._uploads.pop(0)())
        return [checkpoint for _, checkpoint in self.reported]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: Patch) -> Iterator[Worker]:
    worker = Worker(tmp_path / "run1")
    (tmp_path / "run1").mkdir()
    monkeypatch.setattr(train, "get_context", lambda: worker)
    monkeypatch.setattr(train, "report", worker.report)
    yield worker
    worker.upload()


def state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((4,), value)}


def value_of(checkpoint: Any) -> float:
    with open_reported(checkpoint) as found:
        return float(found.tensor("weight")[0])


async def full(*_: object, **__: object) -> Any:
    raise StoreFullError("the disk is full")


def test_a_save_is_reported_once_it_has_committed(worker: Worker) -> None:
    with RayCheckpointer() as ckpt:
        handle = ckpt.report({"loss": 2.0, "name": "a"}, 1, state(1.0))
        assert handle is not None
        assert worker.reported == []
        (checkpoint,) = worker.upload()
        assert handle.phase == "committed"
    assert value_of(checkpoint) == 1.0
    assert worker.reported[0][0] == {"loss": 2.0, "name": "a"}


def test_metrics_alone_report_no_checkpoint(worker: Worker) -> None:
    with RayCheckpointer() as ckpt:
        assert ckpt.report({"loss": 2.0}) is None
        assert worker.upload() == [None]


def test_step_without_state_is_refused(worker: Worker) -> None:
    with RayCheckpointer() as ckpt, pytest.raises(UsageError, match="give both step and state, or none"):
        ckpt.report({}, 1)


def test_a_failed_save_reports_the_newest_one_before_it(
    worker: Worker, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    with RayCheckpointer() as ckpt:
        ckpt.report({}, 1, state(1.0))
        worker.upload()
        with monkeypatch.context() as failing:
            failing.setattr(core_of(ckpt)._store.__class__, "open_writer", full)
            ckpt.report({}, 2, state(2.0))
            _, checkpoint = worker.upload()
        assert value_of(checkpoint) == 1.0
        assert "global_step2 failed; Ray gets global_step1 in its place" in caplog.text
        ckpt.report({}, 3, state(3.0))
        assert value_of(worker.upload()[-1]) == 3.0


def test_what_ray_registers_after_an_error_of_the_training_function_blames_nothing_else(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    def train_function() -> None:
        with RayCheckpointer() as ckpt:
            ckpt.report({}, 1, state(1.0))
            raise ValueError("a mistake in the training function")

    with pytest.raises(ValueError, match="a mistake"):
        train_function()
    (checkpoint,) = worker.upload()
    assert value_of(checkpoint) == 1.0
    assert caplog.text == ""


def test_a_failed_first_save_reports_that_there_is_none(worker: Worker, monkeypatch: Patch) -> None:
    with RayCheckpointer() as ckpt, monkeypatch.context() as failing:
        failing.setattr(core_of(ckpt)._store.__class__, "open_writer", full)
        ckpt.report({}, 1, state(1.0))
        (checkpoint,) = worker.upload()
    with pytest.raises(NotFoundError, match=r"failed, and there was no earlier one: .*the disk is full"):
        open_reported(checkpoint)


def test_what_ray_removes_is_removed_at_the_root(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with RayCheckpointer(staging="eager") as ckpt:
        for step in (1, 2):
            ckpt.report({}, step, state(step))
        first, second = worker.upload()
        wait_until_read_back(ckpt, "global_step2")
        fs.LocalFileSystem().delete_dir(first.path)
        ckpt.report({}, 3, state(3.0))
        worker.upload()
        assert [each.tag for each in ckpt.list()] == ["global_step3", "global_step2"]
        assert value_of(second) == 2.0
    assert "stay" not in caplog.text


def test_what_ray_removes_stays_until_a_newer_one_was_read_back(worker: Worker) -> None:
    with RayCheckpointer(staging="eager", read_back=False) as ckpt:
        ckpt.report({}, 1, state(1.0))
        (first,) = worker.upload()
        fs.LocalFileSystem().delete_dir(first.path)
        ckpt.report({}, 2, state(2.0))
        worker.upload()
        assert [each.tag for each in ckpt.list()] == ["global_step2", "global_step1"]


def test_checkpoints_of_others_at_a_root_elsewhere_stay(worker: Worker, tmp_path: Path) -> None:
    root = tmp_path / "elsewhere"
    with RayCheckpointer(root) as ckpt:
        ckpt.save(1, state(1.0)).wait()  # reported by nobody
        for step in (2, 3):
            ckpt.report({}, step, state(step))
        second, _ = worker.upload()
        wait_until_read_back(ckpt, "global_step3")
        fs.LocalFileSystem().delete_dir(second.path)
        ckpt.report({}, 4, state(4.0))
        worker.upload()
        assert [each.tag for each in ckpt.list()] == ["global_step4", "global_step3", "global_step1"]


def test_what_the_training_function_saves_by_itself_stays(worker: Worker) -> None:
    with RayCheckpointer(staging="eager") as ckpt:
        ckpt.save(1, state(1.0), tag="mine").wait()
        for step in (2, 3):
            ckpt.report({}, step, state(step))
            worker.upload()
            wait_until_read_back(ckpt, f"global_step{step}")
        ckpt.report({}, 4, state(4.0))
        worker.upload()
        assert [each.tag for each in ckpt.list()] == ["global_step4", "global_step3", "global_step2", "mine"]


def test_a_directory_that_is_reported_again_names_the_newer_checkpoint(worker: Worker) -> None:
    with RayCheckpointer(staging="eager") as ckpt:
        for step, name in ((1, "last"), (2, "last"), (3, None), (4, None)):
            ckpt.report({}, step, state(step), checkpoint_dir_name=name)
            found = worker.upload()[1:2]
            wait_until_read_back(ckpt, f"global_step{step}")
        assert value_of(found[0]) == 2.0
        assert [each.tag for each in ckpt.list()] == ["global_step4", "global_step3", "global_step2"]


def test_a_reference_that_a_killed_worker_left_unfinished_keeps_nothing_at_the_root(worker: Worker, tmp_path: Path) -> None:
    half = tmp_path / "run1" / "checkpoint_half"
    half.mkdir()
    (half / "checkpointd.json").write_text('{"root": "../ch')
    with RayCheckpointer(staging="eager") as ckpt:
        for step in (1, 2):
            ckpt.report({}, step, state(step))
        first, _ = worker.upload()
        wait_until_read_back(ckpt, "global_step2")
        fs.LocalFileSystem().delete_dir(first.path)
        ckpt.report({}, 3, state(3.0))
        worker.upload()
        assert [each.tag for each in ckpt.list()] == ["global_step3", "global_step2"]


def test_metrics_that_only_ray_can_keep_do_not_end_training(worker: Worker) -> None:
    metrics: dict[str, Any] = {f"metric{number}": number for number in range(2000)}
    with RayCheckpointer() as ckpt:
        handle = ckpt.report({**metrics, "x" * 2000: 1.0, "large": 10**400, "": 0.0}, 1, state(1.0))
        worker.upload()
    assert handle is not None
    assert handle.phase == "committed"


@pytest.mark.parametrize("raises", [False, True], ids=["skipped", "refused"])
def test_a_report_that_ray_does_not_take_keeps_nobody_waiting(worker: Worker, monkeypatch: Patch, raises: bool) -> None:
    """Ray skips a report when another worker has failed meanwhile, and refuses metrics with tensors."""

    def report(*_: object, **__: object) -> None:
        if raises:
            raise ValueError("metrics with tensors")

    monkeypatch.setattr(train, "report", report)
    with RayCheckpointer() as ckpt:
        with suppress(ValueError):
            ckpt.report({}, 1, state(1.0))
        assert all(done.is_set() for done in ckpt._reporting)  # close() waits for these
    with RayCheckpointer() as again:
        assert again.latest() == "global_step1"


def test_a_report_that_rays_storage_does_not_take_names_the_storage_and_the_checkpoint(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "run1" / "taken").touch()
    with RayCheckpointer() as ckpt:
        ckpt.report({}, 1, state(1.0), checkpoint_dir_name="taken")
        words = (
            rf"Ray's storage does not take the report of global_step1: {tmp_path}/run1/taken cannot be written .*is committed"
        )
        with pytest.raises(StoreError, match=words):
            worker.upload()
    with RayCheckpointer() as again:
        assert again.latest() == "global_step1"


def test_a_storage_of_rays_that_does_not_answer_does_not_keep_close_for_ever(
    worker: Worker, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpointer, "REGISTER_S", 0.05)
    with RayCheckpointer() as ckpt:
        ckpt.report({}, 1, state(1.0))
    assert "global_step1 is not registered with Ray 0.05 s after its save has ended" in caplog.text
    (checkpoint,) = worker.upload()  # it answers again
    assert value_of(checkpoint) == 1.0


def test_a_run_that_was_moved_refers_to_its_own_checkpoints(worker: Worker, tmp_path: Path) -> None:
    with RayCheckpointer() as ckpt:
        ckpt.report({}, 1, state(1.0))
        (checkpoint,) = worker.upload()
    (tmp_path / "run1").rename(tmp_path / "moved")
    assert value_of(train.Checkpoint(checkpoint.path.replace("/run1/", "/moved/"))) == 1.0


def test_a_run_in_a_bucket_has_its_root_beside_its_references(worker: Worker, moto_place: Place, monkeypatch: Patch) -> None:
    root_at(moto_place, monkeypatch)  # the credentials
    storage, uri = moto_place.server.endpoint.removeprefix("http://"), f"{moto_place.bucket}/ray"
    filesystem, path = fs.FileSystem.from_uri(f"s3://{uri}?scheme=http&endpoint_override={storage}&region={REGION}")
    worker.storage = Storage(f"{path}/run1", filesystem)
    with RayCheckpointer() as ckpt:
        ckpt.report({}, 1, state(1.0))
        ckpt.report({}, 2, state(2.0))
        first, second = worker.upload()
    assert (value_of(first), value_of(second)) == (1.0, 2.0)
    names = {entry.base_name for entry in filesystem.get_file_info(fs.FileSelector(f"{path}/run1"))}
    assert names == {"checkpointd", "checkpoint_00", "checkpoint_01"}


def test_another_checkpoint_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no checkpointd.json: RayCheckpointer.report\(\) has not reported"):
        open_reported(train.Checkpoint(str(tmp_path)))


def test_outside_a_training_function_the_error_says_so() -> None:
    with pytest.raises(UsageError, match="works in the training function"):
        RayCheckpointer()


@pytest.mark.parametrize(
    ("filesystem", "root"),
    [
        (fs.LocalFileSystem(), "/mnt/ray/run1/checkpointd"),
        (
            fs.S3FileSystem(endpoint_override="127.0.0.1:9000", scheme="http", region="eu-west-1", anonymous=True),
            "s3:///mnt/ray/run1/checkpointd?endpoint=http%3A%2F%2F127.0.0.1%3A9000&region=eu-west-1&anonymous=true",
        ),
    ],
)
def test_the_root_lies_in_the_directory_of_the_run(filesystem: fs.FileSystem, root: str) -> None:
    assert root_of(filesystem, "/mnt/ray/run1") == root


def test_an_unknown_file_system_needs_a_root() -> None:
    with pytest.raises(UsageError, match="name a root"):
        root_of(fs.SubTreeFileSystem("/mnt", fs.LocalFileSystem()), "/mnt/ray/run1")


def wait_until_read_back(ckpt: RayCheckpointer, tag: str) -> None:
    while not any(each.read_back == "whole" for each in ckpt.list() if each.tag == tag):
        pass
