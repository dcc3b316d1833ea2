"""What a training script says of its checkpoints: which stay, by which metric, and what is not written twice."""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointd.admin import gc
from checkpointd.cli import run as cli
from checkpointd.daemon.protocol import wire
from checkpointd.errors import NoProgressError, SidecarError, StoreFullError, UsageError
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.gc import tidying
from checkpointd.pipeline.read import readback
from checkpointd.pipeline.read.readback import BackgroundReadBack
from checkpointd.pipeline.root.log import RootLog
from checkpointd.report.inspection import inspection
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer, Retention, consolidate
from checkpointd_client.checkpointer import core_of
from tests.builders import attempts_at
from tests.unit.client.scripted_sidecar import LIMIT_S, ScriptedSidecar


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 64), float(value))}


def tags(ckpt: Checkpointer) -> list[str]:
    return [checkpoint.tag for checkpoint in ckpt.list()]


def logged(root: Path) -> list[LoggedAttempt]:
    async def look() -> list[LoggedAttempt]:
        async with PosixStore(root) as store:
            return await attempts_at(store)

    return asyncio.run(look())


def committed(root: Path, tag: str) -> set[str]:
    """The attempts at `tag` that are checkpoints, whether or not the tag was saved again."""
    return {str(one.id) for one in logged(root) if one.tag == tag and one.status == "checkpoint"}


def test_the_last_ones_and_the_best_stay(tmp_path: Path) -> None:
    rules = Retention(keep_last=1, best=1, metric="accuracy", mode="max")
    for step, accuracy in enumerate((0.1, 0.9, 0.5, 0.2)):
        with Checkpointer(tmp_path, retention=rules, read_back=False) as ckpt:  # its end waits until what may go is gone
            ckpt.load(state(-1.0))
            ckpt.save(step, state(step), metrics={"accuracy": accuracy}).wait()
    with Checkpointer(tmp_path) as ckpt:
        assert tags(ckpt) == ["global_step3", "global_step1"]
        target = state(-1.0)
        assert ckpt.load(target, "global_step1") is not None
    assert torch.equal(target["w"], state(1.0)["w"])


def test_what_was_saved_is_read_back_and_the_list_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, done = BackgroundReadBack._read, threading.Event()

    async def telling(self: BackgroundReadBack, checkpoint: LoggedAttempt, rank: int) -> None:
        await read(self, checkpoint, rank)
        done.set()

    monkeypatch.setattr(readback, "QUIET_S", 0.0)
    monkeypatch.setattr(BackgroundReadBack, "_read", telling)
    with Checkpointer(tmp_path) as ckpt:
        handle = ckpt.save(1, state(1.0)).wait()
        assert done.wait(LIMIT_S)
        assert ckpt.list()[0].read_back == "whole"
        assert [one.prefix for one in logged(tmp_path) if one.verified] == [f"{handle.tag}/{handle.attempt}"]


def test_metrics_may_be_tensors_and_what_is_not_finite_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path) as ckpt, caplog.at_level(logging.WARNING, "checkpointd"):
        ckpt.save(1, state(1.0), metrics={"loss": torch.tensor(0.5), "bad": math.nan, "worse": math.inf}).wait()
        [found] = core_of(ckpt).checkpoints()
    assert found.commit.metrics == {"loss": 0.5}
    assert "bad, worse" in caplog.text


@pytest.mark.parametrize(
    "metrics",
    [{"loss": "low"}, {"loss": None}, {"": 1.0}, {"x" * 300: 1.0}, {f"m{n}": 1.0 for n in range(300)}, {"loss": 10**400}],
)
def test_metrics_that_cannot_be_are_refused(tmp_path: Path, metrics: dict[str, float]) -> None:
    with Checkpointer(tmp_path) as ckpt, pytest.raises(UsageError, match="metric"):
        ckpt.save(1, state(1.0), metrics=metrics)


def test_frozen_layers_are_written_once(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300).requires_grad_(False), torch.nn.Linear(300, 100))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with Checkpointer(tmp_path, chunk_bytes=65536) as ckpt:
        for step in range(3):
            model(torch.randn(4, 300)).sum().backward()
            optimizer.step()
            handle = ckpt.save(step, {"model": model}).wait()
            assert not handle.no_progress
    sizes = [sum(p.stat().st_size for p in tmp_path.glob(f"global_step{step}/*/*.chunks")) for step in range(3)]
    assert sizes[1] < sizes[0] / 3
    assert sizes[2] < sizes[0] / 3
    target = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 100))
    with Checkpointer(tmp_path) as ckpt:
        assert ckpt.load({"model": target}) is not None
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), target.state_dict().values(), strict=True))


def test_a_restarted_job_refers_to_what_the_one_before_has_saved(tmp_path: Path) -> None:
    frozen = torch.randn(300, 300)
    for step in (1, 2):
        with Checkpointer(tmp_path) as ckpt:
            ckpt.save(step, {"frozen": frozen, "moving": torch.randn(100, 300)}).wait()
    assert sum(p.stat().st_size for p in tmp_path.glob("global_step2/*/*.chunks")) < 200_000


def test_without_dedup_every_checkpoint_stands_alone(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, dedup=False) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(1.0)).wait()
    assert len(list(tmp_path.glob("global_step2/*/*.chunks"))) == 1


def nearly_equal(step: int) -> dict[str, torch.Tensor]:
    """bf16 weights that move a little with each step."""
    before = torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * 0.02
    return {"w": (before + step * 1e-5 * torch.randn(200_000, generator=torch.Generator().manual_seed(1))).bfloat16()}


@pytest.mark.parametrize("retention", [None, 1])
def test_between_two_checkpoints_in_full_differences_are_stored_across_a_restart(tmp_path: Path, retention: int | None) -> None:
    for steps in ((1, 2), (3, 4)):
        with Checkpointer(tmp_path, full_every=3, retention=retention, compression="planes") as ckpt:
            ckpt.load(nearly_equal(0))
            for step in steps:
                ckpt.save(step, nearly_equal(step)).wait()
    root = PosixStore(tmp_path)
    reports = {step: asyncio.run(inspection(root, f"global_step{step}")) for step in ([4] if retention else [1, 2, 3, 4])}
    stored = {step: {total.codec for total in report.contents.codecs} for step, report in reports.items()}
    assert stored == ({4: {"planes"}} if retention else {1: {"planes"}, 2: {"delta"}, 3: {"delta"}, 4: {"planes"}})
    with Checkpointer(tmp_path) as ckpt:
        for step in reports:
            target = {"w": torch.zeros_like(nearly_equal(0)["w"])}
            assert ckpt.load(target, f"global_step{step}") is not None
            assert torch.equal(target["w"], nearly_equal(step)["w"])
            consolidate(tmp_path, tmp_path.parent / f"{step}.pt", tag=f"global_step{step}", format="torch", force=True)
            assert torch.equal(torch.load(tmp_path.parent / f"{step}.pt", weights_only=True)["w"], nearly_equal(step)["w"])


def test_a_save_without_progress_shows_in_handle_and_status(tmp_path: Path) -> None:
    model = torch.nn.Linear(100, 100)
    with Checkpointer(tmp_path) as ckpt:
        first = ckpt.save(1, {"model": model}).wait()
        second = ckpt.save(2, {"model": model}).wait()
        assert (first.no_progress, second.no_progress) == (False, True)
        assert [attempt.no_progress for attempt in ckpt.status().attempts] == [False, True]


def test_a_save_without_progress_is_aborted_on_request(tmp_path: Path) -> None:
    model = torch.nn.Linear(100, 100)
    with Checkpointer(tmp_path, on_no_progress="abort") as ckpt:
        ckpt.save(1, {"model": model}).wait()
        with pytest.raises(NoProgressError, match="learning rate"):
            ckpt.save(2, {"model": model}).wait()
        assert tags(ckpt) == ["global_step1"]


def test_what_to_do_without_progress_is_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="on_no_progress"):
        Checkpointer(tmp_path, on_no_progress="shout")  # type: ignore[arg-type]  # what is tested


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ScriptedSidecar]:
    with ScriptedSidecar(tmp_path) as made:
        yield made


def test_the_sidecar_hears_of_all_of_it(tmp_path: Path, sidecar: ScriptedSidecar) -> None:
    rules = Retention(keep_last=3, every_steps=100)
    with Checkpointer(
        tmp_path / "root",
        sidecar=sidecar.path,
        retention=rules,
        on_no_progress="ignore",
        dedup=False,
        on_sidecar_loss="inline",
    ) as ckpt:
        begin = sidecar.expect(wire.Begin)
        assert (begin.dedup, begin.on_no_progress, begin.read_back) == (False, "ignore", True)
        assert begin.retention is not None
        assert begin.retention.checked() == rules
        handle = ckpt.save(1, state(1.0), metrics={"loss": 2.0})
        assert sidecar.expect(wire.Save).metrics == {"loss": 2.0}
        sidecar.stop_listening()
        sidecar.hang_up()
        with pytest.raises(SidecarError, match="was lost while this save"):
            handle.wait(LIMIT_S)


def test_rules_over_the_wire_are_checked() -> None:
    with pytest.raises(UsageError, match="keep_last"):
        wire.Rules(keep_last=0).checked()


# --- what earlier jobs left, and metrics that are not there ---------------------------------------------------------


@pytest.fixture
def left_by_another(tmp_path: Path) -> Path:
    """A root where an earlier job has saved steps 1 to 3, and `best`."""
    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step)).wait()
        ckpt.save(4, state(4.0), tag="best").wait()
    return tmp_path


def save_two(root: Path, *, load: bool = False, **options: Any) -> set[str]:
    """Saves of a later job that keeps one, the second of a tag that was there; all commits that are left, as tag and step."""
    with Checkpointer(root, retention=Retention(keep_last=1), **options) as ckpt:
        if load:
            assert ckpt.load({"w": torch.zeros(64, 64)}) is not None
        for step, tag in ((100, None), (101, "best")):
            ckpt.save(step, state(step), tag=tag).wait()
    return {f"{path.parent.parent.name} {path.parent.name}" for path in root.glob("[!.]*/*/*.index")}


OTHERS = {"global_step1 00000001-0", "global_step2 00000001-0", "global_step3 00000001-0", "best 00000001-0"}


def test_a_job_that_forgot_to_load_removes_nothing_of_an_earlier_one_and_says_so_once(
    left_by_another: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert save_two(left_by_another) >= OTHERS | {"best 00000002-0"}
    said = [record for record in caplog.records if "has not loaded" in record.getMessage()]
    assert [record.levelname for record in said] == ["ERROR"]
    assert "(4, latest: " in said[0].getMessage()
    assert "afresh=True" in said[0].getMessage()


def test_it_can_go_back_to_the_earlier_job_as_the_log_says(
    left_by_another: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Although its newest tag was saved again, and `explain` says the same of each of its checkpoints that were."""
    save_two(left_by_another)
    back = f"`checkpointd rollback {left_by_another} best --attempt 00000001-0`"
    [said] = [record.getMessage() for record in caplog.records if "has not loaded" in record.getMessage()]
    assert f"To go on from them, end this job, go back with {back} (or the next load takes" in said
    assert cli(["explain", str(left_by_another), "best"]) == 0
    assert f"Until then, {back} goes back to it." in capsys.readouterr().out
    assert cli(["rollback", str(left_by_another), "best", "--attempt", "00000001-0"]) == 0
    with Checkpointer(left_by_another) as ckpt:
        loaded = ckpt.load({"w": torch.zeros(64, 64)})
    assert loaded is not None
    assert loaded.step == 4


@pytest.mark.parametrize("options", [{"load": True}, {"afresh": True}])
def test_a_job_that_has_loaded_or_begins_afresh_goes_on_by_its_rules(
    left_by_another: Path, options: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    """One that was read back may stay beside the newest: it alone is known to be whole."""
    left = save_two(left_by_another, **options)
    assert "best 00000002-0" in left
    assert len(left) <= 2
    assert "has not loaded" not in caplog.text


def test_a_load_that_found_nothing_counts(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, retention=Retention(keep_last=1)) as ckpt:
        assert ckpt.load({"w": torch.zeros(64, 64)}) is None
        assert ckpt._core._saver._state.tidier.keeps_before == (0, 0)


def warned_of_old_steps(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "does the loop begin again" in r.getMessage()
    ]


@pytest.mark.parametrize("restarts", [True, False])
def test_a_loop_that_begins_again_at_step_0_is_said_once_and_removes_nothing_that_was_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, restarts: bool
) -> None:
    """Both after a start of the process and, as in a notebook, in the same one."""
    ckpt = Checkpointer(tmp_path, retention=2)
    ckpt.load(state(-1))
    for step in range(5):
        ckpt.save(step, state(step)).wait()
    if restarts:
        ckpt.close()
        ckpt = Checkpointer(tmp_path, retention=2)
    ckpt.wait()
    ckpt._core._writer.call(ckpt._core._saver._state.tidier.rest(), 60)
    before = {name: committed(tmp_path, name) for name in tags(ckpt)}
    assert {"global_step3", "global_step4"} <= before.keys()
    loaded = ckpt.load(state(-1))
    assert loaded is not None
    assert loaded.step == 4
    for step in range(6):
        ckpt.save(step, state(10 + step), tag=f"again{step}").wait()
    ckpt.save(4, state(20)).wait()  # nor for a newer commit of its tag
    ckpt.close()
    assert all(committed(tmp_path, name) >= attempts for name, attempts in before.items())
    assert len(warned_of_old_steps(caplog)) == 1
    assert "again0 is step 0, but load() returned step 4" in warned_of_old_steps(caplog)[0]


def test_after_the_next_load_the_rules_count_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path, retention=1) as ckpt:
        ckpt.load(state(-1))
        for step in (0, 1, 2):
            ckpt.save(step, state(step)).wait()
            ckpt.load(state(-1))
        assert not warned_of_old_steps(caplog)
        ckpt.save(2, state(7), tag="same").wait()
        assert len(warned_of_old_steps(caplog)) == 1
        tidier = ckpt._core._saver._state.tidier
        core_of(ckpt).take_up()  # as integrations call it: it does not undo the protection
        assert tidier.keeps_before == (1, 3)
        ckpt.load(state(-1))
        assert tidier.keeps_before == (0, 0)
        ckpt.save(1, state(8), tag="less").wait()
        assert len(warned_of_old_steps(caplog)) == 2


def test_a_load_that_goes_back_on_purpose_is_no_loop_that_begins_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path) as ckpt:
        for step in range(4):
            ckpt.save(step, state(step)).wait()
        ckpt.load(state(-1), "global_step1")
        ckpt.save(2, state(12), tag="other2").wait()
    assert not warned_of_old_steps(caplog)


def test_the_sidecar_hears_that_old_steps_are_saved(tmp_path: Path, sidecar: ScriptedSidecar) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(10, state(1)).wait()
    with Checkpointer(tmp_path, sidecar=sidecar.path, on_sidecar_loss="inline") as ckpt:
        ckpt.load(state(0))
        saves = []
        for step, keeps in ((11, (0, 0)), (3, (2, 1))):
            saves.append(ckpt.save(step, state(1)))
            assert sidecar.expect(wire.Save).keeps_before == keeps
        sidecar.stop_listening()
        sidecar.hang_up()
        for one in saves:
            with pytest.raises(SidecarError, match="was lost while this save"):
                one.wait(LIMIT_S)


def test_the_sidecar_hears_whether_the_job_has_loaded(left_by_another: Path, sidecar: ScriptedSidecar) -> None:
    with Checkpointer(left_by_another, sidecar=sidecar.path, on_sidecar_loss="inline") as ckpt:
        first = ckpt.save(10, state(1))
        assert sidecar.expect(wire.Save).keeps_before == (2, 0)
        core_of(ckpt).take_up()
        second = ckpt.save(11, state(1))
        assert sidecar.expect(wire.Save).keeps_before == (0, 0)
        sidecar.stop_listening()
        sidecar.hang_up()
        for one in (first, second):
            with pytest.raises(SidecarError, match="was lost while this save"):
                one.wait(LIMIT_S)


def test_a_save_without_the_metric_of_the_rules_is_said_once_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path, retention=Retention(best=1, metric="val_loss")) as ckpt:
        for step in range(4):
            ckpt.save(step, state(step), metrics={"val_loss": float(step)} if step % 2 else None).wait()
        assert set(tags(ckpt)) >= {"global_step0", "global_step1", "global_step2"}
    assert len([r for r in caplog.records if "without the metric 'val_loss'" in r.getMessage()]) == 1


def test_a_mistyped_metric_removes_nothing_and_is_said_with_those_that_exist(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = Retention(keep_last=1, best=1, metric="los")
    with Checkpointer(tmp_path, retention=rules) as ckpt:
        for step in range(4):
            ckpt.save(step, state(step), metrics={"loss": float(step), "accuracy": 0.5}).wait()
    with Checkpointer(tmp_path) as ckpt:
        assert len(tags(ckpt)) == 4
    said = [record for record in caplog.records if "removes nothing" in record.getMessage()]
    assert [record.levelname for record in said] == ["ERROR"]
    assert "'los'" in said[0].getMessage()
    assert "accuracy, loss" in said[0].getMessage()


def test_a_deletion_that_fills_the_disk_half_way_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record fits, and `latest` does not: with the space of the ballast it moves all the same."""
    full = [StoreFullError("the disk is full")]
    move = gc.move_latest

    async def moved(root_log: RootLog) -> str | None:
        if full:
            raise full.pop()
        return await move(root_log)

    monkeypatch.setattr(gc, "move_latest", moved)
    with Checkpointer(tmp_path) as ckpt:
        for step in range(2):
            ckpt.save(step, {"weight": torch.full((4,), float(step))}).wait()
        ckpt.delete("global_step1", force=True)
        assert (ckpt.latest(), full) == ("global_step0", [])


def test_close_leaves_what_the_rules_keep_and_no_empty_directories(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with Checkpointer(tmp_path, retention=3) as ckpt:
        for step in range(6):
            ckpt.save(step, state(step)).wait()
    there = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("global_step"))
    assert there == ["global_step3", "global_step4", "global_step5"]
    assert cli(["explain", str(tmp_path), "global_step0"]) == 0
    assert "it was a checkpoint, and retention of start 1 removed it" in (said := capsys.readouterr().out)
    assert "retention keeps the last 3" in said
    with Checkpointer(tmp_path) as ckpt:
        assert tags(ckpt) == ["global_step5", "global_step4", "global_step3"]
    assert "removed" not in caplog.text


def test_close_does_not_wait_for_the_pause_between_removals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run would end with a warning that checkpoints are left."""
    monkeypatch.setattr(tidying, "PAUSE_S_MAX", 1e6)
    monkeypatch.setattr(tidying, "SHARE", 1e-9)
    with Checkpointer(tmp_path, retention=1) as ckpt:
        for step in range(4):
            ckpt.save(step, state(step)).wait()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("global_step")] == ["global_step3"]


def test_a_save_that_misses_what_it_would_refer_to_names_the_command_that_shows_the_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frozen = torch.randn(100, 1000)
    with Checkpointer(tmp_path) as ckpt:
        for step in range(2):
            ckpt.save(step, {"frozen": frozen, "w": torch.full((9,), float(step))}).wait()
        shutil.rmtree(tmp_path / "global_step0")
        ckpt.save(2, {"frozen": frozen, "w": torch.full((9,), 2.0)}).wait()
    assert "writes everything anew" in caplog.text
    assert f"`checkpointd list {tmp_path}` shows which" in caplog.text
    with Checkpointer(tmp_path) as ckpt:
        assert "2 checkpoints are not whole" in caplog.text
        assert "global_step1: it needs" in caplog.text
        loaded = ckpt.load({"frozen": torch.empty(100, 1000), "w": torch.empty(9)})
        assert loaded is not None
        assert loaded.tag == "global_step2"
