"""A checkpointd root behind dcp.save and dcp.load, in one process."""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.storage import StorageReader

from checkpointd.errors import (
    CheckpointdError,
    FencedError,
    FormatError,
    NotFoundError,
    RootInUseError,
    StateError,
    UnreadableError,
    UsageError,
)
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.gc.tidying import Tidier
from checkpointd.pipeline.root import starts
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer, Retention, open_checkpoint
from checkpointd_client.errors import UnsafeObjectError
from checkpointd_client.integrations.dcp import CheckpointdReader, CheckpointdWriter, export_dcp, import_dcp
from checkpointd_client.integrations.dcp.session import _sessions
from checkpointd_client.integrations.dcp.writer import PlanRequest
from tests.builders import attempts_at
from tests.job_elsewhere import ELSEWHERE, live_job
from tests.unit.client.unpickling import zips

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]
ALONE: dict[str, Any] = {"no_dist": True}


class Odd:
    """No plain value."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Odd

    __hash__ = None  # type: ignore[assignment]


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "model": {"w": torch.randn(7, 5), "b": torch.randn(3).bfloat16(), "t": torch.arange(12.0).reshape(3, 4).t()},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "fused": None}],
        },
        "list": [torch.ones(2), {"x": 1}],
        "odd.key": {"a.b": 5},
        "none": torch.zeros(0, 3),
        "epoch": 3,
        "names": ["a", "b"],
    }


def zeros(value: Any) -> Any:
    match value:
        case torch.Tensor():
            return torch.zeros_like(value)
        case dict():
            return {key: zeros(child) for key, child in value.items()}
        case list():
            return [zeros(child) for child in value]
    return None


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.equal(two)
    if isinstance(one, dict):
        return {str(key) for key in one} == {str(key) for key in two} and all(
            same(child, two[key if key in two else str(key)]) for key, child in one.items()
        )
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and bool(one == two)


def everything(reader: StorageReader) -> dict[str, Any]:
    return _load_state_dict_from_keys(storage_reader=reader)


def attempts(root: Path) -> list[LoggedAttempt]:
    async def look() -> list[LoggedAttempt]:
        async with PosixStore(root) as store:
            return await attempts_at(store)

    return asyncio.run(look())


def failure(error: pytest.ExceptionInfo[CheckpointException], rank: int = 0) -> BaseException:
    return error.value.failures[rank][0]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A root with `a1`, saved by dcp.save."""
    place = tmp_path_factory.mktemp("dcp") / "root"
    dcp.save(state(), storage_writer=CheckpointdWriter(place, "a1"), **ALONE)
    return place


def test_what_is_saved_is_loaded(root: Path) -> None:
    saved = state()
    target = zeros(saved)
    dcp.load(target, storage_reader=CheckpointdReader(root), **ALONE)
    assert same(saved, target)
    assert attempts(root)[0].committed


def test_the_metadata_is_that_of_dcps_own_storage(root: Path, tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path / "stock"), **ALONE)
    stock = FileSystemReader(tmp_path / "stock").read_metadata()
    ours = CheckpointdReader(root, "a1").read_metadata()
    assert ours.state_dict_metadata == stock.state_dict_metadata
    assert ours.planner_data == stock.planner_data


def test_the_tag_may_be_the_checkpoint_id_and_the_step_is_its_number(root: Path) -> None:
    writer = CheckpointdWriter(root)
    dcp.save({"x": 1}, checkpoint_id="run-12-end", storage_writer=writer, **ALONE)
    dcp.save({"x": 2}, checkpoint_id="run-13", storage_writer=writer, **ALONE)
    for tag, step, x in (("run-12-end", 12, 1), ("run-13", 13, 2)):
        target = {"x": 0}
        dcp.load(target, checkpoint_id=tag, storage_reader=CheckpointdReader(root), **ALONE)
        (found,) = [attempt for attempt in attempts(root) if attempt.tag == tag]
        assert (target["x"], found.commit.step) == (x, step)


def test_a_save_returns_once_it_is_committed_whatever_is_removed_then(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to stay may have to be read back first, and the other ranks wait in a collective call meanwhile."""
    removing, saved = threading.Event(), threading.Event()

    async def slow(*_: object) -> None:
        removing.set()
        while not saved.is_set():
            await asyncio.sleep(0.01)

    async def room(*_: object) -> None:
        return None

    monkeypatch.setattr(Tidier, "_remove", slow)
    monkeypatch.setattr(Tidier, "room_for", room)

    def save() -> None:
        dcp.save({"x": 1}, storage_writer=CheckpointdWriter(root, "one"), **ALONE)

    saving = threading.Thread(target=save)
    saving.start()
    saving.join(60)
    returned = not saving.is_alive()
    assert removing.wait(60)
    saved.set()
    saving.join()
    assert returned


def test_a_tag_is_saved_again_unless_overwrite_says_no(root: Path) -> None:
    for x in (1, 2):
        dcp.save({"x": x}, storage_writer=CheckpointdWriter(root, "again", overwrite=x == 2), **ALONE)
    with pytest.raises(CheckpointException, match="Checkpoint already exists: again") as error:
        dcp.save({"x": 3}, storage_writer=CheckpointdWriter(root, "again", overwrite=False), **ALONE)
    assert isinstance(failure(error), UsageError)
    target = {"x": 0}
    dcp.load(target, storage_reader=CheckpointdReader(root, "again"), **ALONE)
    assert target["x"] == 2


def test_one_dtype_loads_into_another_as_dcp_has_it(root: Path) -> None:
    target = {"model": {"w": torch.zeros(7, 5, dtype=torch.float64)}}
    dcp.load(target, storage_reader=CheckpointdReader(root, "a1"), **ALONE)
    assert target["model"]["w"].equal(state()["model"]["w"].double())


def test_async_save(root: Path) -> None:
    dcp.async_save({"w": torch.ones(3)}, storage_writer=CheckpointdWriter(root, "async"), **ALONE).result()  # type: ignore[union-attr]
    target = {"w": torch.zeros(3)}
    dcp.load(target, storage_reader=CheckpointdReader(root, "async"), **ALONE)
    assert target["w"].equal(torch.ones(3))


def test_an_object_is_loaded_only_where_that_is_asked_for(root: Path) -> None:
    dcp.save({"odd": Odd(), "x": 1}, storage_writer=CheckpointdWriter(root, "odd"), **ALONE)
    with pytest.raises(CheckpointException) as refused:
        dcp.load({"odd": None}, storage_reader=CheckpointdReader(root, "odd"), **ALONE)
    assert isinstance(failure(refused), UnsafeObjectError)
    assert "odd is an object" in str(failure(refused))
    assert "test_dcp.Odd" in str(failure(refused))
    target: dict[str, Any] = {"odd": None}
    dcp.load(target, storage_reader=CheckpointdReader(root, "odd", weights_only=False), **ALONE)
    assert target["odd"] == Odd()


TWICE_BUILT = (
    b"\x80\x02ccollections\nOrderedDict\n)R}X\x0c\0\0\0__setstate__ccollections\nCounter\nsb}X\1\0\0\0xK\x07sb"
    b"ctorch\ndevice\nX\3\0\0\0cpu\x85R\x86."
)
"""torch.load sets the attribute `x` of an OrderedDict with weights_only=True, and calls Counter with weights_only=False."""


def test_dcpread_1_the_planner_unpickles_what_was_checked_and_nothing_that_is_stored(tmp_path: Path) -> None:
    dcp.save({"odd": Odd()}, storage_writer=FileSystemWriter(tmp_path / "d"), **ALONE)
    file = io.BytesIO()
    torch.save({}, file)
    data = zips.zipped(
        {name: TWICE_BUILT if name.endswith(".pkl") else one for name, one in zips.members(file.getvalue()).items()}
    )
    metadata = FileSystemReader(tmp_path / "d").read_metadata()
    [place] = metadata.storage_data.values()
    (tmp_path / "d" / place.relative_path).write_bytes(data)
    place.offset, place.length = 0, len(data)
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert import_dcp(tmp_path / "d", tmp_path / "root").pickled == ("odd",)
    target: dict[str, Any] = {"odd": None}
    dcp.load(target, storage_reader=CheckpointdReader(tmp_path / "root"), **ALONE)
    kept, device = target["odd"]
    assert (kept.x, device) == (7, torch.device("cpu"))


def test_a_checkpointer_and_dcp_read_each_other(root: Path) -> None:
    saved = state()
    with Checkpointer(root) as ckpt:
        target = {"model": zeros(saved["model"]), "epoch": 0}
        loaded = ckpt.load(target, "a1", strict=False)
        assert loaded is not None
        assert same(target["model"], saved["model"])
        assert target["epoch"] == 3
        layer = torch.nn.Linear(3, 2)
        tied = torch.nn.ModuleDict({"one": layer, "two": layer})
        ckpt.save(9, {"model": tied, "epoch": 4}).wait()
    module = {"model": zeros(dict(tied.state_dict())), "epoch": 0}
    dcp.load(module, storage_reader=CheckpointdReader(root, "global_step9"), **ALONE)
    assert module["epoch"] == 4
    assert same(module["model"], dict(tied.state_dict()))


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_damage_is_an_error_with_the_fqn(tmp_path: Path) -> None:
    dcp.save({"w": torch.randn(4096)}, storage_writer=CheckpointdWriter(tmp_path, "t", compression="none"), **ALONE)
    (chunks,) = tmp_path.glob("t/*/*.chunks")
    with chunks.open("r+b") as file:
        file.seek(100)
        file.write(b"damaged!")
    with pytest.raises(CheckpointException) as error:
        dcp.load({"w": torch.zeros(4096)}, storage_reader=CheckpointdReader(tmp_path), **ALONE)
    assert isinstance(failure(error), CheckpointdError)
    assert "w" in str(failure(error))


def test_what_cannot_be_stored_aborts_with_its_fqn(root: Path) -> None:
    with pytest.raises(CheckpointException) as error:
        dcp.save({"w": torch.ones(3).to_sparse()}, storage_writer=CheckpointdWriter(root, "sparse"), **ALONE)
    assert isinstance(failure(error), StateError)
    assert str(failure(error)).startswith("w: ")
    assert [attempt.status for attempt in attempts(root) if attempt.tag == "sparse"] == ["aborted"]


@pytest.mark.parametrize(
    ("options", "words"), [({"use_collectives": False}, "use_collectives"), ({"storage_writer": None}, "which tag")]
)
def test_calls_that_cannot_work(root: Path, options: dict[str, Any], words: str) -> None:
    writer = CheckpointdWriter(root) if "storage_writer" in options else CheckpointdWriter(root, "t")
    with pytest.raises((CheckpointException, UsageError), match=words):
        dcp.save({"x": 1}, **{**ALONE, **options, "storage_writer": writer})


def test_a_checkpointer_that_uses_the_root_is_not_fenced(root: Path) -> None:
    with Checkpointer(root) as ckpt:
        with pytest.raises(CheckpointException, match="another Checkpointer"):
            dcp.save({"x": 1}, storage_writer=CheckpointdWriter(root, "t"), **ALONE)
        ckpt.save(20, {"x": 1}).wait()


def _begin_elsewhere(root: Path, monkeypatch: pytest.MonkeyPatch, job: str = "") -> None:
    """Another process begins the next start."""

    async def begin() -> None:
        async with PosixStore(root) as store:
            begun = starts.new(store, await starts.newest(store) + 1, 1)
            assert await starts.begin(store, msgspec.structs.replace(begun, job=job))

    with monkeypatch.context() as patch:
        patch.setattr(starts, "new_writer", lambda: ELSEWHERE)
        asyncio.run(begin())


def test_dcpsession_1_a_session_is_fenced_and_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older job's next save would be newer than all that the newer job has saved."""
    dcp.save({"x": 1}, storage_writer=CheckpointdWriter(tmp_path, "old_step10"), **ALONE)
    _begin_elsewhere(tmp_path, monkeypatch)
    for take_over in (False, True):
        writer = (
            CheckpointdWriter(tmp_path, "old_step11", take_over=take_over)
            if take_over
            else CheckpointdWriter(tmp_path, "old_step11")
        )
        with pytest.raises(CheckpointException) as fenced:
            dcp.save({"x": 2}, storage_writer=writer, **ALONE)
        assert isinstance(failure(fenced), FencedError)
    assert [a.tag for a in attempts(tmp_path) if a.tag == "old_step11"] == []


def test_dcpsession_2_a_session_that_nobody_uses_ends_and_its_root_stays_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"

    def threads() -> int:
        return sum(thread.name.startswith("checkpointd") for thread in threading.enumerate())

    dcp.save({"x": 1}, storage_writer=CheckpointdWriter(one, "step1"), **ALONE)
    wait(set(_sessions[os.getpid(), str(one)]._running))  # a save returns when it is decided, before the rest of its attempt
    at_first = threads()
    dcp.save({"x": 1}, storage_writer=CheckpointdWriter(other, "step1"), **ALONE)
    assert threads() <= at_first
    dcp.save({"x": 2}, storage_writer=CheckpointdWriter(one, "step2"), **ALONE)  # goes on at a root that it has left
    assert {a.tag for a in attempts(one)} == {"step1", "step2"}
    dcp.save({"x": 2}, storage_writer=CheckpointdWriter(other, "step2"), **ALONE)
    _begin_elsewhere(one, monkeypatch)
    with pytest.raises(CheckpointException) as fenced:
        dcp.save({"x": 3}, storage_writer=CheckpointdWriter(one, "step3"), **ALONE)
    assert isinstance(failure(fenced), FencedError)


def test_dcpsession_1_a_session_goes_on_where_its_own_job_has_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"x": 1}, storage_writer=CheckpointdWriter(tmp_path, "one", job="train"), **ALONE)
    _begin_elsewhere(tmp_path, monkeypatch, "train")
    dcp.save({"x": 2}, storage_writer=CheckpointdWriter(tmp_path, "two", job="train"), **ALONE)
    assert [a.id.start for a in attempts(tmp_path) if a.tag == "two"] == [max(a.id.start for a in attempts(tmp_path))]


def test_a_session_does_not_begin_beside_a_living_job(tmp_path: Path) -> None:
    with live_job(tmp_path, "train"):
        with pytest.raises(CheckpointException) as refused:
            dcp.save({"x": 1}, storage_writer=CheckpointdWriter(tmp_path, "t"), **ALONE)
        assert isinstance(failure(refused), RootInUseError)
        dcp.save({"x": 1}, storage_writer=CheckpointdWriter(tmp_path, "t", take_over=True), **ALONE)


def test_an_import_leaves_a_living_job_alone(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(1)}, storage_writer=FileSystemWriter(tmp_path / "d"), **ALONE)
    root = tmp_path / "root"
    with live_job(root):
        for force in (False, True):
            with pytest.raises(RootInUseError, match="import into a root of its own"):
                import_dcp(tmp_path / "d", root, force=force)
    assert import_dcp(tmp_path / "d", root).tag == "d"
    assert list((root / ".checkpointd" / "leases").iterdir()) == []


def test_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CheckpointException, match="metadata is None"):
        dcp.load({"x": 1}, storage_reader=CheckpointdReader(tmp_path), **ALONE)
    assert any("there is no latest" in record.message for record in caplog.records if record.name == "checkpointd")


def test_dcpwrite_1_dcpwrite_2_nothing_is_committed_before_finish_and_what_is_never_finished_is_aborted(tmp_path: Path) -> None:
    writer, planner = CheckpointdWriter(tmp_path, "t"), DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(3)}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, _ = planner.create_global_plan([plan, replace(plan, items=[], storage_data=PlanRequest("other", "t"))])
    mine, _ = writer.prepare_global_plan(plans)
    writer.write_data(mine, planner)
    (before,) = attempts(tmp_path)
    assert before.status == "undecided"
    run = writer._run
    writer.reset()
    assert run is not None
    run._ended.result(60)
    (after,) = attempts(tmp_path)
    assert after.abort is not None
    assert "never finished" in after.abort.error.message


# --- conversion -----------------------------------------------------------------------------------------------------


def test_a_directory_comes_in_and_leaves_bit_by_bit(tmp_path: Path) -> None:
    saved = {**state(), "odd": Odd(), "double": torch.randn(3, dtype=torch.complex128)}
    dcp.save(saved, storage_writer=FileSystemWriter(tmp_path / "step5", thread_count=2, single_file_per_rank=False), **ALONE)
    done = import_dcp(tmp_path / "step5", tmp_path / "root")
    assert (done.tag, done.step, done.pickled) == ("step5", 5, ("odd",))
    export_dcp(tmp_path / "root", tmp_path / "out")
    stock = everything(FileSystemReader(tmp_path / "step5"))
    assert same(everything(FileSystemReader(tmp_path / "out")), stock)
    assert same(everything(CheckpointdReader(tmp_path / "root", weights_only=False)), stock)
    with pytest.raises(UsageError, match="has a step5 already"):
        import_dcp(tmp_path / "step5", tmp_path / "root")


def test_a_large_tensor_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpointd_client.integrations.dcp.importing.MEMORY_BYTES_MIN", 1)
    saved = {"w": torch.randn(1000, 3), "t": torch.randn(8, 9).t(), "s": torch.tensor(2)}
    dcp.save(saved, storage_writer=FileSystemWriter(tmp_path / "d"), **ALONE)
    done = import_dcp(tmp_path / "d", tmp_path / "root", memory=2048)
    assert done.parts == 13
    target = zeros(saved)
    dcp.load(target, storage_reader=CheckpointdReader(tmp_path / "root"), **ALONE)
    assert same(saved, target)
    with Checkpointer(tmp_path / "root") as ckpt:
        again = zeros(saved)
        ckpt.load(again, "d")
        assert same(saved, again)


def test_a_cut_file_imports_nothing(tmp_path: Path) -> None:
    dcp.save({"w": torch.randn(1000)}, storage_writer=FileSystemWriter(tmp_path / "d"), **ALONE)
    (file,) = (tmp_path / "d").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(FormatError, match="w"):
        import_dcp(tmp_path / "d", tmp_path / "root")
    assert [attempt.status for attempt in attempts(tmp_path / "root")] == ["aborted"]


@pytest.mark.parametrize("where", ["the directory", "the metadata", "a file"])
def test_something_else_in_the_place_of_a_directory_or_file_is_named(tmp_path: Path, where: str) -> None:
    dcp.save({"w": torch.randn(10)}, storage_writer=FileSystemWriter(tmp_path / "d"), **ALONE)
    (data,) = (tmp_path / "d").glob("*.distcp")
    place = {"the directory": tmp_path / "d", "the metadata": tmp_path / "d" / ".metadata", "a file": data}[where]
    place.rename(tmp_path / "elsewhere")
    if where == "the directory":
        place.touch()
    else:
        place.mkdir()
    with pytest.raises(UnreadableError, match=str(place)):
        import_dcp(tmp_path / "d", tmp_path / "root")


def test_latest_is_a_tag_in_each_call(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=CheckpointdWriter(tmp_path, step=1), **ALONE)
    target = {"w": torch.zeros(3)}
    dcp.load(target, checkpoint_id="latest", storage_reader=CheckpointdReader(tmp_path), **ALONE)
    assert target["w"].tolist() == [1.0] * 3


def test_no_metadata(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"\.metadata"):
        import_dcp(tmp_path, tmp_path / "root")


def test_a_process_that_has_not_loaded_removes_nothing_of_an_earlier_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": torch.ones(5)}).wait()

    def save(step: int, **options: Any) -> set[str]:
        writer = CheckpointdWriter(tmp_path, step=step, retention=Retention(keep_last=1), **options)
        dcp.save({"w": torch.full((5,), float(step))}, storage_writer=writer, **ALONE)
        session, state = writer._ready()
        wait(set(session._running), 30)  # the coordinator asks for the removal after the commit, when dcp.save() may be over
        session.writer.call(state.tidier.rest(), 30)
        return {attempt.tag for attempt in attempts(tmp_path) if attempt.status == "checkpoint"}

    assert save(10) >= {"global_step1", "global_step2", "global_step10"}
    assert save(11) >= {"global_step1", "global_step2", "global_step11"}
    assert len([record for record in caplog.records if "has not loaded" in record.getMessage()]) == 1
    copy = CheckpointdWriter(tmp_path, step=12)
    assert not copy.__getstate__()["_afresh"]
    dcp.load({"w": torch.zeros(5)}, storage_reader=CheckpointdReader(tmp_path, "global_step2"), **ALONE)
    assert copy.__getstate__()["_afresh"]
    assert not {"global_step1", "global_step2"} & save(13)


# --- the step, and what else DCP has no place for --------------------------------------------------------------------


def exported(tmp_path: Path, **options: Any) -> Path:
    with Checkpointer(tmp_path / "root") as ckpt:
        ckpt.save(1234, {"model": {"w": torch.ones(3)}}, tag="final", metrics={"loss": 0.5}, **options).wait()
    export_dcp(tmp_path / "root", tmp_path / "out")
    return tmp_path / "out"


def test_step_metrics_and_client_state_go_out_and_come_in(tmp_path: Path) -> None:
    told = {"tokens": 7, "mix": [("web", 0.5), None], b"x".hex(): b"\x00"}
    out = exported(tmp_path, client_state=told)
    done = import_dcp(out, tmp_path / "again")
    assert (done.tag, done.step) == ("out", 1234)
    with open_checkpoint(tmp_path / "again") as opened:
        assert (opened.step, opened.metrics, opened.client_state) == (1234, {"loss": 0.5}, told)
        assert torch.equal(opened.tensor("model.w"), torch.ones(3))
    export_dcp(tmp_path / "again", tmp_path / "out2")
    assert import_dcp(tmp_path / "out2", tmp_path / "third").step == 1234
    assert everything(FileSystemReader(out)).keys() == {"model"}, "DCP's own reader sees what it saw"
    assert import_dcp(out, tmp_path / "other", "t7", step=8).step == 8


def test_client_state_beside_what_dcp_pickled(tmp_path: Path) -> None:
    """Both lie in the client state of a checkpoint; a reader tells them apart."""
    out = exported(tmp_path, client_state={"tokens": 7, "seen": torch.ones(2), "n": 1})
    dcp.save({"odd": Odd(), "x": 1}, storage_writer=FileSystemWriter(tmp_path / "odd"), **ALONE)
    import_dcp(tmp_path / "odd", tmp_path / "pickled")
    done = export_dcp(tmp_path / "pickled", tmp_path / "odd2")
    assert done.left_out == ()
    assert everything(FileSystemReader(tmp_path / "odd2"))["odd"] == Odd()
    left = export_dcp(tmp_path / "root", tmp_path / "out2").left_out
    assert left == ("client_state.seen",)
    import_dcp(out, tmp_path / "again")
    with open_checkpoint(tmp_path / "again") as opened:
        assert opened.client_state == {"tokens": 7, "n": 1}


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_a_directory_that_dcp_saved_to_again_says_nothing_of_the_old_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = exported(tmp_path)
    dcp.save({"model": {"w": torch.zeros(3)}}, storage_writer=FileSystemWriter(out, overwrite=True), **ALONE)
    done = import_dcp(out, tmp_path / "again", "step77")
    assert done.step == 77
    assert "checkpointd.json is ignored: it describes an earlier checkpoint" in caplog.text
    with open_checkpoint(tmp_path / "again") as opened:
        assert opened.metrics == {}


@pytest.mark.parametrize("damage", [b'"step":1235', b'"step":"x"', b"}}}"])
def test_a_damaged_step_is_refused_and_not_taken(tmp_path: Path, damage: bytes) -> None:
    path = exported(tmp_path) / "checkpointd.json"
    path.write_bytes(path.read_bytes().replace(b'"step":1234', damage))
    with pytest.raises(FormatError, match=r"checkpointd\.json is damaged"):
        import_dcp(path.parent, tmp_path / "again")


def test_the_reader_of_dcp_load_says_what_it_read(root: Path) -> None:
    dcp.save({"x": 1}, storage_writer=CheckpointdWriter(root, "told", step=4321), **ALONE)
    reader = CheckpointdReader(root, "told")
    dcp.load({"x": 0}, storage_reader=reader, **ALONE)
    assert (reader.checkpoint.tag, reader.checkpoint.step) == ("told", 4321)


def test_one_step_is_not_given_to_two_tags(root: Path) -> None:
    writer = CheckpointdWriter(root, step=50)
    dcp.save({"x": 1}, checkpoint_id="at-50", storage_writer=writer, **ALONE)
    with pytest.raises((CheckpointException, UsageError), match="step=50 was given for at-50"):
        dcp.save({"x": 2}, checkpoint_id="at-51", storage_writer=writer, **ALONE)
    assert [attempt.tag for attempt in attempts(root) if attempt.tag.startswith("at-")] == ["at-50"]


def test_a_module_that_was_saved_alone_loads_below_the_name_that_the_import_is_given(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    dcp.save({**model.state_dict(prefix="layers.0."), "step": 4}, checkpoint_id=tmp_path / "s4", no_dist=True)
    assert set(import_dcp(tmp_path / "s4", tmp_path / "flat").loose) == {"layers.0.weight", "layers.0.bias"}
    assert import_dcp(tmp_path / "s4", tmp_path / "root", module="model").loose == ()
    into = {"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([other])}), "step": 0}
    with Checkpointer(tmp_path / "root") as ckpt:
        ckpt.load(into)
    assert torch.equal(other.weight, model.weight)
    assert into["step"] == 4
    with pytest.raises(UsageError, match="the directory has a part 'step'"):
        import_dcp(tmp_path / "s4", tmp_path / "root", module="step", force=True)


def test_a_checkpoint_of_another_format_is_recognised_with_the_right_command(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    (tmp_path / "run/g7").mkdir(parents=True)
    (tmp_path / "run/g7/mp_rank_00_model_states.pt").touch()
    with pytest.raises(UsageError, match=r"file of torch\.save: load it as before"):
        import_dcp(tmp_path / "x.pt", tmp_path / "root")
    with pytest.raises(UsageError, match=r"--from deepspeed \S+/run \S+/root --tag g7` imports it"):
        import_dcp(tmp_path / "run", tmp_path / "root")
    with pytest.raises(NotFoundError, match=r"file of torch\.save"):
        open_checkpoint(tmp_path / "x.pt")
    with pytest.raises(NotFoundError, match="--from deepspeed"):
        open_checkpoint(tmp_path / "run")
    with pytest.raises(UsageError, match=r"is a file.*file of torch\.save"):
        Checkpointer(tmp_path / "x.pt")


def test_saves_after_a_load_of_an_older_tag_leave_what_came_after_it(tmp_path: Path) -> None:
    def save(step: int) -> None:
        dcp.save({"w": torch.full((3,), float(step))}, storage_writer=CheckpointdWriter(tmp_path / "run", step=step), **ALONE)

    def left() -> set[str]:
        with open_checkpoint(tmp_path / "run") as opened:
            newest = opened.tag
        return {newest, *(attempt.tag for attempt in attempts(tmp_path / "run") if attempt.left_behind)}

    for step in (1, 2, 3, 4):
        save(step)
    dcp.load({"w": torch.zeros(3)}, storage_reader=CheckpointdReader(tmp_path / "run", "global_step2"), **ALONE)
    assert left() == {"global_step4"}, "a load alone changes nothing"
    save(5)
    assert left() == {"global_step5", "global_step3", "global_step4"}
    dcp.save({"w": torch.zeros(3)}, storage_writer=CheckpointdWriter(tmp_path / "elsewhere", "first"), **ALONE)
    save(6)
    assert left() == {"global_step6", "global_step3", "global_step4"}, "of its own saves it leaves none"
    dcp.load({"w": torch.zeros(3)}, storage_reader=CheckpointdReader(tmp_path / "run"), **ALONE)
    save(7)
    assert left() == {"global_step7", "global_step3", "global_step4"}
