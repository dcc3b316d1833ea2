"""open_checkpoint: a checkpoint read without a start, a process group, or a byte written. Invariants OPEN-1 and OPEN-2."""

from __future__ import annotations

import asyncio
import enum
import gc
import logging
import math
import os
import threading
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from checkpointd import waits
from checkpointd.admin.gc import deletion
from checkpointd.errors import (
    ClosedError,
    DamagedError,
    MismatchError,
    NotFoundError,
    PartlyLoadedError,
    StateError,
    UnreadableError,
    UsageError,
)
from checkpointd.store import open_store
from checkpointd.store.base import Entry
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer, RngState, StoredMember, open_checkpoint
from checkpointd_client.errors import UnsafeObjectError
from checkpointd_client.restore.store_source import StoredSource
from tests.builders import break_file, objects
from tests.unit.client.composite_tensors import OWN, Halves, halves
from tests.unit.client.tied_model import TiedModel, same


def state(value: float) -> dict[str, Any]:
    torch.manual_seed(int(value))
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "extra": {"w": torch.full((3,), value)}, "epoch": int(value)}


def save(root: Path, step: int, **options: Any) -> dict[str, Any]:
    saved = state(step)
    with Checkpointer(root, afresh=True) as ckpt:
        ckpt.save(step, saved, client_state={"tokens": step * 10}, metrics={"loss": 1 / step}, **options).wait()
    return saved


def delete(root: Path, tag: str) -> None:
    async def act() -> None:
        async with open_store(root) as store:
            await deletion(store, tag, force=True, dry_run=False)

    thread = threading.Thread(target=lambda: asyncio.run(act()))  # the caller may be inside a loop
    thread.start()
    thread.join()


def everything_below(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every name with its inode, its time of change and its content."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.stat()
        found[str(path)] = (status.st_ino, status.st_ctime_ns, b"" if path.is_dir() else path.read_bytes())
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path / "root", 3)
    save(tmp_path / "root", 4)
    return tmp_path / "root"


# --- what it is ---------------------------------------------------------------------------------------------------------


def test_it_tells_what_was_saved(root: Path) -> None:
    with open_checkpoint(root) as opened:
        assert (opened.tag, opened.step, opened.world_size, opened.passed_over) == ("global_step4", 4, 1, ())
        assert (opened.client_state, opened.metrics) == ({"tokens": 40}, {"loss": 0.25})
        assert opened.committed_at is not None
        assert 0 <= time.time() - opened.committed_at < 3600
        assert opened.root == str(root)
    with open_checkpoint(root, "global_step3") as opened:
        assert (opened.step, opened.client_state) == (3, {"tokens": 30})
        attempt = opened.attempt
    with open_checkpoint(root, "global_step3", attempt=attempt) as opened:
        assert opened.step == 3
    with open_checkpoint(root, "latest") as opened:
        assert opened.step == 4


def test_open_1_nothing_below_the_root_is_touched(root: Path) -> None:
    before = everything_below(root)
    fresh = state(9)
    with open_checkpoint(root) as opened:
        opened.load(fresh)
        assert len(dict(opened.tensors())) > 5
        assert opened.client_state == {"tokens": 40}
    assert everything_below(root) == before


def test_the_newest_is_what_load_would_take(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save(tmp_path, 2)
    save(tmp_path, 9, save_latest=False)
    with open_checkpoint(tmp_path) as opened, Checkpointer(tmp_path) as ckpt:
        loaded = ckpt.load(state(7))
        assert loaded is not None
        assert opened.tag == loaded.tag == "global_step2"


# --- loading ------------------------------------------------------------------------------------------------------------


def test_all_of_it_into_a_state(root: Path) -> None:
    saved, fresh = state(4), state(8)
    with open_checkpoint(root) as opened:
        loaded = opened.load(fresh)
    assert (loaded.tag, loaded.step, loaded.client_state, loaded.source) == ("global_step4", 4, {"tokens": 40}, "store")
    assert same(dict(fresh["model"].state_dict()), saved["model"])
    kept = saved["optimizer"].state_dict()["state"][0]
    assert all(torch.equal(fresh["optimizer"].state_dict()["state"][0][key], kept[key]) for key in kept)
    assert (fresh["extra"]["w"][0], fresh["epoch"]) == (4.0, 4)


def test_only_a_part_of_it(root: Path) -> None:
    fresh = state(8)
    kept = fresh["extra"]["w"].clone()
    with open_checkpoint(root) as opened:
        loaded = opened.load({"model": fresh["model"]}, only="model")
        assert (loaded.client_state, loaded.unexpected, loaded.missing) == ({}, (), ())
        opened.load(fresh, only=["epoch"])
    assert same(dict(fresh["model"].state_dict()), state(4)["model"])
    assert torch.equal(fresh["extra"]["w"], kept)
    assert fresh["epoch"] == 4


def test_a_part_into_an_empty_dict(root: Path) -> None:
    made: dict[str, Any] = {}
    with open_checkpoint(root) as opened:
        opened.load(made, only=["model", "epoch"])
    assert made.keys() == {"model", "epoch"}
    assert same(made["model"], state(4)["model"])


def test_what_is_asked_for_must_be_there_and_the_rest_is_not_looked_at(root: Path) -> None:
    wider = torch.nn.Linear(9, 4)
    with open_checkpoint(root) as opened:
        with pytest.raises(MismatchError, match=r"model\.weight: shape \(4, 8\) is stored") as caught:
            opened.load({"model": wider, "extra": {}}, only="model")
        assert len(caught.value.mismatches) == 1
        with pytest.raises(MismatchError, match="ema: missing from the checkpoint"):
            opened.load({"ema": torch.nn.Linear(8, 4)}, only="ema")
        with pytest.raises(UsageError, match="only='modle' names no part of the objects to load into: 'model'"):
            opened.load({"model": wider}, only="modle")
        with pytest.raises(MismatchError, match="extra: in the checkpoint, and nowhere in the objects"):
            opened.load({"model": torch.nn.Linear(8, 4)})


def test_a_pickle_in_client_state_keeps_nobody_from_the_model(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, pickle_client_state=True) as ckpt:
        ckpt.save(1, {"model": torch.nn.Linear(8, 4)}, client_state={"seen": UserDict(a=1)}).wait()
    with open_checkpoint(tmp_path) as opened:
        opened.load({"model": torch.nn.Linear(8, 4)}, only="model")
        with pytest.raises(UnsafeObjectError, match="pickle_client_state=True"):
            _ = opened.client_state
    with open_checkpoint(tmp_path, pickle_client_state=True) as opened:
        assert opened.client_state == {"seen": UserDict(a=1)}


def test_a_tensor_of_an_allowed_class_in_client_state_is_not_pickled(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, pickle_client_state=True, tensor_classes=OWN) as ckpt:
        ckpt.save(1, {"model": torch.nn.Linear(8, 4)}, client_state={"seen": halves()}).wait()
    with open_checkpoint(tmp_path, tensor_classes=OWN) as opened:
        assert type(opened.client_state["seen"]) is Halves


class Phase(enum.Enum):
    WARMUP = 1


class Window(NamedTuple):
    first: int
    last: int


def test_client_state_needs_no_class_of_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {
        "phase": Phase.WARMUP,
        "by phase": {Phase.WARMUP: Window(1, 2)},
        "out": Path("a/b"),
        "ended": datetime(2026, 1, 1, tzinfo=UTC),
    }
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"w": torch.zeros(1)}, client_state=kept).wait()
    with open_checkpoint(tmp_path) as opened:
        assert opened.client_state == kept
    for name in ("Phase", "Window"):
        monkeypatch.delitem(globals(), name)
    member = StoredMember(f"{__name__}.Phase", "WARMUP", 1)
    with open_checkpoint(tmp_path) as opened:
        assert opened.client_state == {**kept, "phase": member, "by phase": {member: {"first": 1, "last": 2}}}
    with (
        Checkpointer(tmp_path) as ckpt,
        pytest.raises(StateError, match=r"Phase is stored, and this process does not have the class"),
    ):
        ckpt.load({"w": torch.ones(1)})


# --- tensors ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> TiedModel:
    torch.manual_seed(0)
    return TiedModel()


@pytest.fixture
def tied(tmp_path: Path, model: TiedModel) -> Path:
    with Checkpointer(tmp_path / "tied") as ckpt:
        ckpt.save(4, {"model": model, "other": {"w": torch.ones(3)}}).wait()
    return tmp_path / "tied"


def test_single_tensors(tied: Path, model: TiedModel) -> None:
    with open_checkpoint(tied) as opened:
        assert torch.equal(opened.tensor("other.w"), torch.ones(3))
        assert torch.equal(opened.tensor("model.head.weight"), model.head.weight)
        with pytest.raises(NotFoundError, match=r"no tensor 'body\.weight'; did you mean model\.body\.weight\?"):
            opened.tensor("body.weight")


def test_every_name_is_there_and_read_on_access(tied: Path, model: TiedModel) -> None:
    with open_checkpoint(tied) as opened:
        found = opened.tensors("model")
        assert (found.tag, found.step) == ("global_step4", 4)
        assert found.keys() == model.state_dict().keys()
        assert found.shape("body.weight") == (16, 16)
        assert found.dtype("body.weight") == torch.bfloat16
        assert same(dict(found), model)
        fresh = TiedModel()
        fresh.load_state_dict(dict(found))
        assert same(fresh.state_dict(), model)


def test_nothing_is_read_before_it_is_asked_for(tied: Path) -> None:
    with open_checkpoint(tied, absence_s=0.1) as opened:
        found = opened.tensors()
        for chunks in objects(tied, ".chunks"):
            chunks.unlink()
        assert found["model.empty"].shape == (0, 4)
        with pytest.raises(DamagedError) as caught:
            found["other.w"]
    assert (caught.value.fqn, caught.value.rank) == ("other.w", 0)


def test_names_that_shared_memory_share_it_while_one_is_in_use(tied: Path) -> None:
    with open_checkpoint(tied) as opened:
        found = opened.tensors("model")
        head = found["head.weight"]
        embed, window = found["embed.weight"], found["window"]
        assert head.data_ptr() == embed.data_ptr()
        assert window.untyped_storage().data_ptr() == embed.untyped_storage().data_ptr()
        address = embed.data_ptr()
        del embed, head
        gc.collect()
        assert found["embed.weight"].data_ptr() == address, "the window keeps it"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"into": torch.nn.Linear(1, 1)}, r"must map names to objects, not be a .*Linear: pass \{'model': model, ...\}"),
        ({"into": {}, "strict": 1}, "strict is 1"),
        ({"into": {}, "cast": "yes"}, "cast is 'yes'"),
        ({"into": {}, "only": 5}, "^only is 5; it must be the name of a part"),
        ({"into": {}, "only": [5]}, "^only is .5.;"),
        ({"into": {}, "only": b"model"}, "^only is b'model';"),
        ({"into": {}, "only": []}, "^only is ..;"),
    ],
)
def test_arguments_of_load_are_checked_by_name(tied: Path, arguments: dict[str, Any], words: str) -> None:
    with open_checkpoint(tied) as opened, pytest.raises(UsageError, match=words):
        opened.load(**arguments)


@pytest.mark.parametrize("only", ["modle", ["model", "nope"]])
def test_parts_that_the_checkpoint_lacks_are_named_and_nothing_is_loaded(tied: Path, only: str | list[str]) -> None:
    state: dict[str, object] = {}
    with open_checkpoint(tied) as opened, pytest.raises(NotFoundError, match=r"no part '(modle|nope)'; its parts are: model"):
        opened.load(state, only=only)
    assert not state


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"root": value}, "^root is ") for value in (None, 3, b"path", "a\0b")]
    + [({"timeout_s": value}, "^timeout_s is ") for value in (None, "x", 10**400, -1, math.nan)]
    + [({"absence_s": value}, "^absence_s is ") for value in (None, "x", 10**400, -1)]
    + [({"pinned_bytes": value}, "^pinned_bytes is ") for value in (None, "x", 1.5, -1)]
    + [({"pickle_client_state": value}, "^pickle_client_state is ") for value in (None, "x", 1)]
    + [({"tag": "global_step4", "attempt": 5}, "^5 is not an attempt")],
)
def test_arguments_of_open_checkpoint_are_checked_by_name(tied: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        open_checkpoint(**{"root": tied, **arguments})


@pytest.mark.parametrize("wants", [None, [None], "model"])
def test_only_requests_can_be_read(tied: Path, wants: Any) -> None:
    with open_checkpoint(tied) as opened, pytest.raises(UsageError, match=r"^wants is .* must be a list of BoxRequest"):
        opened.read(wants)


def test_what_was_asked_for_must_be_there(tied: Path, tmp_path: Path) -> None:
    with open_checkpoint(tied) as opened:
        with pytest.raises(NotFoundError, match="its parts are: model, other"):
            opened.tensors("nothing")
        with pytest.raises(KeyError):
            opened.tensors()["nothing"]
    for place, tag, words in (
        (tied, "global_step5", "there is no tag"),
        (tied.parent / "elsewhere", None, "there is no directory"),
        (tmp_path, None, "there is no checkpoint"),
        (tmp_path, "latest", "there is no latest"),
    ):
        with pytest.raises(NotFoundError, match=words):
            open_checkpoint(place, tag, absence_s=0.1)
    for attempt, words in (("1-0", "not an attempt"), ("00000009-0", "not a checkpoint")):
        with pytest.raises((UsageError, NotFoundError), match=words):
            open_checkpoint(tied, "global_step4", attempt=attempt)
    with pytest.raises(UsageError, match="of which tag"):
        open_checkpoint(tied, attempt="00000001-0")
    with pytest.raises(UsageError, match="exists only in the process"):
        open_checkpoint("memory://run")


# --- damage -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["*.index", "ballot-*"])
def test_a_damaged_newest_one_is_passed_over_loudly_and_a_named_one_raises(
    root: Path, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (root / "global_step4").rglob(pattern):
        break_file(path, "flip")
    with caplog.at_level(logging.ERROR), open_checkpoint(root) as opened:
        assert opened.step == 3
        assert "global_step4" in opened.passed_over[0]
    assert "global_step4" in caplog.text
    with pytest.raises(DamagedError):
        open_checkpoint(root, "global_step4")


@pytest.mark.parametrize("verify_first", [True, False])
def test_damage_that_a_load_finds_is_passed_over_and_overwritten(
    root: Path, caplog: pytest.LogCaptureFixture, verify_first: bool
) -> None:
    for path in objects(root / "global_step4", ".chunks"):
        if path.stat().st_size:
            break_file(path, "flip")
    fresh = state(8)
    with caplog.at_level(logging.ERROR), open_checkpoint(root) as opened:
        loaded = opened.load(fresh, verify_first=verify_first)
        assert (loaded.tag, opened.step) == ("global_step3", 3)
    assert "global_step4" in loaded.fell_back_from[0]
    assert same(dict(fresh["model"].state_dict()), state(3)["model"])
    with open_checkpoint(root) as opened:
        assert opened.step == 4
        # It has told of that one.
        with pytest.raises(DamagedError if verify_first else PartlyLoadedError, match="damaged at byte"):
            opened.load(fresh, verify_first=verify_first)
        with pytest.raises(DamagedError):  # none of the user's memory was touched
            opened.load({})
    assert not verify_first or same(dict(fresh["model"].state_dict()), state(3)["model"])


def test_where_every_one_is_damaged_that_is_said(root: Path) -> None:
    for path in objects(root, ".index"):
        break_file(path, "truncate")
    with pytest.raises(DamagedError, match="no whole checkpoint is left"):
        open_checkpoint(root)


# --- removed meanwhile --------------------------------------------------------------------------------------------------


def before(step: str, patch: pytest.MonkeyPatch, act: Callable[[], None]) -> Iterator[None]:
    """Do `act` once, just before the next `step` of a load."""
    original = getattr(StoredSource, step)

    def hooked(self: StoredSource, *arguments: Any) -> Any:
        patch.setattr(StoredSource, step, original)
        act()
        return original(self, *arguments)

    patch.setattr(StoredSource, step, hooked)
    yield


@pytest.mark.parametrize(("step", "verify_first"), [("verify", True), ("fill", True), ("content", False), ("fill", False)])
def test_removed_while_it_is_loaded_the_next_one_is_taken(
    root: Path, step: str, verify_first: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh = state(8)
    with open_checkpoint(root) as opened:
        next(before(step, monkeypatch, lambda: delete(root, "global_step4")))
        loaded = opened.load(fresh, verify_first=verify_first)
        assert (loaded.tag, opened.step, loaded.fell_back_from) == ("global_step3", 3, ())
    assert same(dict(fresh["model"].state_dict()), state(3)["model"])
    assert "global_step4/00000002-0 was removed while it was being read" in caplog.text


@pytest.mark.parametrize(
    ("step", "verify_first", "kind"),
    [("verify", True, NotFoundError), ("content", False, NotFoundError), ("fill", False, PartlyLoadedError)],
)
def test_open_2_what_has_told_of_one_gives_of_no_other(
    root: Path, step: str, verify_first: bool, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_checkpoint(root) as opened:
        assert opened.step == 4
        next(before(step, monkeypatch, lambda: delete(root, "global_step4")))
        with pytest.raises(kind, match="global_step4/00000002-0 was removed"):
            opened.load(state(8), verify_first=verify_first)
        with pytest.raises(NotFoundError, match="global_step4/00000002-0 was removed"):
            opened.tensor("extra.w")


@pytest.mark.parametrize("verify_first", [True, False])
def test_a_named_one_that_was_removed_is_not_found(root: Path, verify_first: bool) -> None:
    fresh = state(8)
    with open_checkpoint(root, "global_step3") as opened:
        delete(root, "global_step3")
        with pytest.raises(NotFoundError, match="global_step3"):
            opened.load(fresh, verify_first=verify_first)
    assert same(dict(fresh["model"].state_dict()), state(8)["model"])


def test_the_look_whether_it_is_still_there_is_repeated(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing, failures = PosixStore.list, [UnreadableError("the network is gone")]

    async def fails_once(self: PosixStore, prefix: str) -> list[Entry]:
        if failures:
            raise failures.pop()
        return await listing(self, prefix)

    with open_checkpoint(root) as opened:
        monkeypatch.setattr(PosixStore, "list", fails_once)
        assert opened.load(state(8)).step == 4
    assert not failures


@pytest.mark.parametrize(("step", "verify_first"), [("verify", True), ("content", False), ("fill", False)])
def test_a_tag_that_was_saved_anew_is_read_anew(
    tmp_path: Path, step: str, verify_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 3, tag="best")
    fresh = state(8)
    with open_checkpoint(tmp_path, "best") as opened:
        next(before(step, monkeypatch, lambda: save(tmp_path, 5, tag="best") and None))
        assert opened.load(fresh, verify_first=verify_first).step == 5
    assert same(dict(fresh["model"].state_dict()), state(5)["model"])


def test_open_2_no_mixture_is_left_where_the_next_one_has_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, names in ((3, "a"), (4, "ab")):
        with Checkpointer(tmp_path) as ckpt:
            ckpt.save(step, {name: torch.full((4,), float(step)) for name in names}).wait()
    with open_checkpoint(tmp_path) as opened:
        next(before("fill", monkeypatch, lambda: delete(tmp_path, "global_step4")))
        with pytest.raises(PartlyLoadedError, match="lacks b, which was read from the checkpoint before it"):
            opened.load({"a": torch.zeros(4), "b": torch.zeros(4)}, strict=False)


# --- its life -----------------------------------------------------------------------------------------------------------


def test_it_works_where_a_loop_runs_already(root: Path) -> None:
    async def cell() -> int:
        with open_checkpoint(root) as opened:
            opened.load(state(8))
            return opened.step

    assert asyncio.run(cell()) == 4


def test_closed_it_gives_nothing_more(root: Path) -> None:
    opened = open_checkpoint(root)
    found = opened.tensors()
    opened.close()
    opened.close()
    for call in (opened.tensors, lambda: found["extra.w"], lambda: opened.load({}), lambda: opened.client_state):
        with pytest.raises(ClosedError):
            call()


def test_forgotten_it_ends_by_itself(root: Path) -> None:
    before = threading.enumerate()
    tensors = open_checkpoint(root).tensors()  # which keeps it
    assert torch.equal(tensors["extra.w"], torch.full((3,), 4.0))
    loops = [thread for thread in threading.enumerate() if thread not in before]
    assert loops
    del tensors
    gc.collect()
    for thread in loops:
        thread.join(60)
        assert not thread.is_alive()


def test_in_a_forked_process_it_says_so(root: Path) -> None:
    with open_checkpoint(root) as opened:
        child = os.fork()
        if not child:
            try:
                opened.tensors()
            except ClosedError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_each_rank_had_is_named_and_read_by_rank(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"model": torch.nn.Linear(2, 2), "rng": RngState()}).wait()
    with open_checkpoint(tmp_path) as opened:
        assert opened.tensors(rank=0).keys() >= {"model.weight", "model.bias"}
        with pytest.raises(UsageError, match="there is no rank 1"):
            opened.tensors(rank=1)


def test_a_long_wait_says_why_reads_fail(root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    said, listed = "reads fail, and are tried again: listing 'log' failed: permission is missing", PosixStore.list

    async def forbidden(self: PosixStore, prefix: str) -> list[Entry]:
        if said in caplog.text:
            return await listed(self, prefix)
        raise UnreadableError(f"listing {prefix!r} failed: permission is missing")

    monkeypatch.setattr(PosixStore, "list", forbidden)
    monkeypatch.setattr(waits, "FIRST_REPORT_S", 0.05)
    with open_checkpoint(root) as opened:
        assert opened.step == 4


def test_a_wait_in_vain_ends_with_the_error_of_the_reads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forbidden(self: PosixStore, prefix: str) -> list[Entry]:
        raise UnreadableError(f"listing {prefix!r} failed: permission is missing")

    monkeypatch.setattr(PosixStore, "list", forbidden)
    with pytest.raises(UnreadableError, match="permission is missing"):
        open_checkpoint(root, timeout_s=0.5)
