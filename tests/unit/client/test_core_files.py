"""Files of torch.save through the whole of a save: what is shown is what torch would have written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointd.cli import run
from checkpointd.commit.retention import Retention
from checkpointd.errors import CheckpointdError, StateError, StoreError, UnreadableError, UsageError
from checkpointd.layout.keys import holds_bytes
from checkpointd.pipeline.gc.retire import retire
from checkpointd.pipeline.root import root_view, tag_directories
from checkpointd.store.posix.disk import FileStatus
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd.store.posix.plain import PlainFiles
from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from tests import format_reader
from tests.builders import attempts_at
from tests.unit.client.shown_files import ABSENCE_S, beside, delete, example, save

pytestmark = pytest.mark.usefixtures("short_looks")


@pytest.fixture
def ckpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpointer]:
    monkeypatch.setattr(tag_directories, "ABSENCE_S", ABSENCE_S)
    with Checkpointer(tmp_path / "run" / ".checkpointd", absence_s=ABSENCE_S) as made:
        yield made


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride() and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return type(one) is type(other) and list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_what_is_shown(ckpt: Checkpointer, mmap: bool) -> None:
    files = example()
    shown = save(ckpt, files)
    assert sorted(path.name for path in shown.iterdir()) == sorted(files)
    for name, content in files.items():
        assert equal(content, torch.load(shown / name, mmap=mmap, weights_only=True)), name
    assert (shown.parent / "latest").read_text() == "global_step7"


def test_a_reader_made_from_the_page_finds_them(ckpt: Checkpointer) -> None:
    shown = save(ckpt, example())
    found = format_reader.files(Path(ckpt.status().root), "global_step7")
    assert found == {path.name: path.read_bytes() for path in shown.iterdir()}


def test_every_zip_reader_finds_its_sums_right(ckpt: Checkpointer) -> None:
    shown = save(ckpt, example())
    for path in shown.iterdir():
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None


def test_storages_that_are_shared_stay_shared(ckpt: Checkpointer) -> None:
    shown = save(ckpt, example())
    module = torch.load(shown / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    assert module["weight"].untyped_storage().data_ptr() == module["bias"].untyped_storage().data_ptr()
    assert (shown / "mp_rank_00_model_states.pt").stat().st_size < 16_000  # one storage of 10,000 bytes, not two


def test_what_changes_after_the_call_is_not_in_it(ckpt: Checkpointer) -> None:
    tensor, counter = torch.ones(1_000_000), {"step": 1}
    handle = core_of(ckpt).save_files(1, {"a.pt": {"tensor": tensor, "counter": counter}})
    tensor.zero_()
    counter["step"] = 2
    handle.wait(60)
    found = torch.load(Path(ckpt.status().root).parent / "global_step1" / "a.pt", weights_only=True)
    assert bool((found["tensor"] == 1).all())
    assert found["counter"] == {"step": 1}


def test_saving_a_tag_again_replaces_all_of_it_and_leaves_what_is_not_its_own(ckpt: Checkpointer) -> None:
    shown = save(ckpt, example())
    (shown / "tokenizer.json").write_text("{}")
    (shown / "zero_pp_rank_5_mp_rank_00_optim_states.pt").write_bytes(b"of a larger job")
    (shown / "notes").mkdir()
    (shown / "notes" / "run.txt").write_text("mine")
    save(ckpt, {"mp_rank_00_model_states.pt": {"new": torch.ones(3)}})
    assert sorted(path.name for path in shown.iterdir()) == ["mp_rank_00_model_states.pt", "notes", "tokenizer.json"]
    assert (shown / "notes" / "run.txt").read_text() == "mine"
    assert list(torch.load(shown / "mp_rank_00_model_states.pt")) == ["new"]


def test_files_that_are_not_numbered_like_those_of_a_save_stay(ckpt: Checkpointer) -> None:
    shown = save(ckpt, {"a.pt": 1})
    (shown / "zero_pp_rank_5_mp_rank_00_optim_states.pt").write_bytes(b"mine")
    save(ckpt, {"a.pt": 2})
    assert sorted(path.name for path in shown.iterdir()) == ["a.pt", "zero_pp_rank_5_mp_rank_00_optim_states.pt"]


def test_save_latest_off_leaves_latest_where_it_was(ckpt: Checkpointer) -> None:
    shown = save(ckpt, example())
    save(ckpt, example(), tag="best", save_latest=False)
    assert (shown.parent / "latest").read_text() == "global_step7"
    assert (shown.parent / "best").is_dir()


def test_what_cannot_be_pickled_is_refused_by_name_and_shows_nothing(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path / ".checkpointd")
    with pytest.raises(StateError, match=r"a\.pt cannot be saved"):
        core_of(ckpt).save_files(1, {"a.pt": {"function": lambda: None}})
    ckpt.close()  # which does not raise it again
    assert os.listdir(tmp_path) == [".checkpointd"]


@pytest.mark.parametrize("name", ["../a.pt", "a/../b.pt", "a//b.pt", "/a.pt", "a/.hidden/b.pt", ".hidden", ""])
def test_no_name_leads_out_of_the_directory(ckpt: Checkpointer, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a file"):
        core_of(ckpt).save_files(1, {name: {"a": 1}})
    assert os.listdir(Path(ckpt.status().root).parent) == [".checkpointd"]


def test_a_root_of_another_name_says_what_is_wrong(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as ckpt, pytest.raises(UsageError, match=r"a directory named \.checkpointd"):
        core_of(ckpt).save_files(1, {"a.pt": {}})


# --- where they are shown, and how they go ----------------------------------------------------------------------


def test_they_are_shown_in_a_directory_below_which_has_a_latest_of_its_own(ckpt: Checkpointer) -> None:
    save(ckpt, example(), tag="run--5", at="checkpoint-5/global_step5")
    save(ckpt, example(), tag="run--6", at="checkpoint-6/global_step6")
    for step in (5, 6):
        folder = beside(ckpt) / f"checkpoint-{step}"
        assert (folder / "latest").read_text() == f"global_step{step}"
        assert len(list((folder / f"global_step{step}").iterdir())) == 2


@pytest.mark.parametrize("at", ["../out", "/tmp/out", "a//b", ".hidden/a", "a/../b", ""])
def test_no_directory_leads_out(ckpt: Checkpointer, at: str) -> None:
    with pytest.raises(UsageError, match="cannot be the directory of a checkpoint"):
        core_of(ckpt).save_files(1, {"a.pt": {"a": 1}}, at=at)
    assert os.listdir(beside(ckpt)) == [".checkpointd"]


def test_what_is_deleted_is_shown_no_more_and_latest_names_what_is_left(ckpt: Checkpointer) -> None:
    first, second = save(ckpt, example(), tag="global_step1"), save(ckpt, example(), tag="global_step2")
    delete(ckpt, "global_step2")
    assert not second.exists()
    assert (first.parent / "latest").read_text() == "global_step1"
    delete(ckpt, "global_step1")
    assert os.listdir(first.parent) == [".checkpointd"]
    assert os.listdir(first.parent / ".checkpointd/.checkpointd/shown") == [], "a record"


def test_a_directory_that_cannot_be_hidden_keeps_no_other_checkpoint_from_going(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that somebody has made immutable."""
    withdraw, stuck = PlainFiles.withdraw, ["global_step1"]

    async def withdrawn(self: PlainFiles, name: str, folder: str) -> None:
        if folder in stuck:
            raise StoreError(f"hiding {folder} failed: Operation not permitted")
        await withdraw(self, name, folder)

    monkeypatch.setattr(PlainFiles, "withdraw", withdrawn)
    shown = [save(ckpt, example(), tag=f"global_step{number}") for number in range(1, 6)]
    assert retained(ckpt) == ["global_step1", "global_step5"]
    assert "hiding global_step1 failed" in caplog.text
    assert [path.exists() for path in shown] == [True, False, False, False, True]
    stuck.clear()
    assert retained(ckpt) == ["global_step5"]
    assert not shown[0].exists()


def retained(ckpt: Checkpointer) -> list[str]:
    """The tags that have bytes after retention keeps the newest alone."""

    async def look() -> list[str]:
        store = core_of(ckpt)._store
        await retire(store, await attempts_at(store), Retention(keep_last=1))
        found = await root_view.directories(store)
        sizes = [(tag, await root_view.sizes_of(store, f"{tag}/{attempt}")) for tag, attempt in found]
        return sorted(tag for tag, names in sizes if any(map(holds_bytes, names)))

    return core_of(ckpt)._writer.call(look(), 60)


def test_what_else_lies_in_a_deleted_directory_stays(ckpt: Checkpointer) -> None:
    shown = save(ckpt, example())
    (shown / "tokenizer.json").write_text("{}")
    (shown / "notes").mkdir()
    delete(ckpt, "global_step7")
    assert sorted(os.listdir(shown)) == ["notes", "tokenizer.json"]


def test_who_removes_a_directory_removes_the_checkpoint(ckpt: Checkpointer) -> None:
    first = save(ckpt, example(), tag="global_step1")
    shutil.rmtree(first)
    save(ckpt, example(), tag="global_step2")
    ckpt.close()  # tidies up
    root = Path(ckpt.status().root)
    assert not list(root.glob("global_step1/*/*.file"))
    assert list(root.glob("global_step2/*/*.file"))


def test_nothing_is_removed_where_everything_is_gone_for_a_moment(ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a file system that is not mounted."""
    save(ckpt, example(), tag="one")
    gone = beside(ckpt) / "two"  # that one alone is
    save(ckpt, example(), tag="two", save_latest=False)
    shutil.rmtree(gone)
    looked = tag_directories.abandoned(ckpt._core._store)
    assert {prefix.partition("/")[0] for prefix in ckpt._core._writer.call(looked, 60)} == {"two"}

    async def unmounted(*_: object) -> bool:
        return False

    monkeypatch.setattr(PlainFiles, "is_there", unmounted)
    assert ckpt._core._writer.call(tag_directories.abandoned(ckpt._core._store), 60) == set()


def test_a_link_in_the_place_of_a_directory_keeps_no_other_from_being_removed(ckpt: Checkpointer) -> None:
    """TAGDIR-4. Lightning's last.ckpt may become a link, and a user may move a directory and leave a link."""
    for tag in ("one", "two", "three"):
        save(ckpt, example(), tag=tag)
    (beside(ckpt) / "one").rename(beside(ckpt) / "moved")
    (beside(ckpt) / "one").symlink_to("moved")
    shutil.rmtree(beside(ckpt) / "two")
    looked = tag_directories.abandoned(ckpt._core._store)
    assert {prefix.partition("/")[0] for prefix in ckpt._core._writer.call(looked, 60)} == {"two"}


@pytest.mark.parametrize("looks", [1, 3])
def test_a_directory_that_is_out_of_sight_for_a_moment_was_not_removed(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """As on NFS, where a client may lag behind."""
    save(ckpt, example(), tag="one")
    shown, status, left = str(beside(ckpt) / "one"), OsDisk.status, looks

    async def lagging(disk: OsDisk, path: str) -> FileStatus:
        nonlocal left
        if path == shown and left > 0:
            left -= 1
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return await status(disk, path)

    monkeypatch.setattr(OsDisk, "status", lagging)
    assert ckpt._core._writer.call(tag_directories.abandoned(ckpt._core._store), 60) == set()
    assert left == 0
    left = looks
    (found,) = core_of(ckpt).checkpoints()
    assert core_of(ckpt).damage(found, [0]) == ()
    assert left == 0


def test_a_directory_whose_replacing_was_cut_off_was_not_removed(ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system cannot exchange two names, between the two renames."""
    shown, rename = save(ckpt, {"a.pt": 1}, tag="one"), OsDisk.rename

    async def unexchanged(*_: object) -> bool:
        return False

    async def refused(disk: OsDisk, source: str, target: str) -> None:
        if "unfinished" in source:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), source)
        await rename(disk, source, target)

    looked = tag_directories.abandoned
    with monkeypatch.context() as patch:
        patch.setattr(OsDisk, "exchange", unexchanged)
        patch.setattr(OsDisk, "rename", refused)
        save(ckpt, {"a.pt": 2}, tag="one")
        assert not shown.exists()
        (found,) = core_of(ckpt).checkpoints()
        assert ckpt._core._writer.call(looked(ckpt._core._store), 60) == set()
        with pytest.raises(UnreadableError, match="cannot be shown"):
            core_of(ckpt).damage(found, [0])
    assert ckpt._core._writer.call(looked(ckpt._core._store), 60) == set()
    assert core_of(ckpt).damage(found, [0]) == ()
    assert torch.load(shown / "a.pt") == 2


@pytest.mark.parametrize("lost", ["all", "directory", "latest"])
def test_a_start_shows_what_was_committed_and_not_shown(tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a crash between the commit and the showing."""

    async def crashed(*_: object, **__: object) -> None:
        raise StoreError("crashed here")

    root = tmp_path / ".checkpointd"
    with monkeypatch.context() as patch, Checkpointer(root) as ckpt:
        patch.setattr(tag_directories if lost == "all" else PlainFiles, _STEP[lost], crashed)
        core_of(ckpt).save_files(1, example()).wait(60)
    with Checkpointer(root):
        assert (tmp_path / "latest").read_text() == "global_step1"
        assert sorted(os.listdir(tmp_path / "global_step1")) == sorted(example())


_STEP = {"all": "_show", "directory": "publish", "latest": "point"}


@pytest.mark.parametrize("is_filled", [False, True])
def test_a_start_shows_nothing_over_what_was_saved_since_without_checkpointd(
    tmp_path: Path, is_filled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A commit that was never shown, and then a job that saved the same step in the same place by itself."""

    async def crashed(*_: object, **__: object) -> None:
        raise StoreError("crashed here")

    root, folder = tmp_path / ".checkpointd", tmp_path / "checkpoint-8"
    with monkeypatch.context() as patch, Checkpointer(root) as ckpt:
        patch.setattr(tag_directories, "_show", crashed)
        given = core_of(ckpt).fill("checkpoint-8")
        Path(given.path).mkdir(parents=True)
        (Path(given.path) / "state.json").write_text("ours")
        named = {"unfinished": given.name} if is_filled else {}
        core_of(ckpt).save_files(8, example(), at="checkpoint-8/s", tag="c8--s", **named).wait(60)
    (folder / "s").mkdir(parents=True)
    for name in ("latest", "state.json", "s/mp_rank_00_model_states.pt"):
        (folder / name).write_text("s" if name == "latest" else "theirs")
    with Checkpointer(root) as ckpt:
        assert (folder / "state.json").read_text() == (folder / "s" / "mp_rank_00_model_states.pt").read_text() == "theirs"
        assert "another program has saved in" in caplog.text
        shutil.rmtree(folder if is_filled else folder / "s")
        ckpt._core._writer.call(tag_directories.settle(ckpt._core._store), 60)
        assert torch.load(folder / "s" / "mp_rank_00_model_states.pt")["lr"] == 0.1
        assert (folder / "state.json").read_text() == ("ours" if is_filled else "theirs")


def test_a_start_shows_over_what_was_shown_before_whenever_latest_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commits of one tag, of which the first is shown by the start that shows the second."""

    async def crashed(*_: object, **__: object) -> None:
        raise StoreError("crashed here")

    with monkeypatch.context() as patch, Checkpointer(tmp_path / ".checkpointd") as ckpt:
        patch.setattr(tag_directories, "_show", crashed)
        for value in (1, 2):
            core_of(ckpt).save_files(value, {"a.pt": value}, tag="best").wait(60)
    with Checkpointer(tmp_path / ".checkpointd"):
        assert torch.load(tmp_path / "best" / "a.pt") == 2


def test_a_start_hides_nothing_because_it_cannot_be_read(tmp_path: Path) -> None:
    """A sector of the log is bad: the files themselves are whole."""
    with Checkpointer(tmp_path / ".checkpointd") as ckpt:
        save(ckpt, example(), tag="global_step1")
    for entry in (tmp_path / ".checkpointd" / "log").glob("*.json"):
        if b'"kind": "commit"' in entry.read_bytes():
            entry.write_bytes(b"unreadable")
    with Checkpointer(tmp_path / ".checkpointd"):
        assert sorted(os.listdir(tmp_path / "global_step1")) == sorted(example())
        assert (tmp_path / "latest").read_text() == "global_step1"


def test_the_old_files_stay_until_those_of_the_newer_commit_can_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def crashed(*_: object, **__: object) -> None:
        raise StoreError("no space is left for a directory")

    with Checkpointer(tmp_path / ".checkpointd") as ckpt:
        save(ckpt, {"a.pt": 1}, tag="best")
        with monkeypatch.context() as patch:
            patch.setattr(PlainFiles, "publish", crashed)
            save(ckpt, {"a.pt": 2}, tag="best")
            save(ckpt, {"a.pt": 3}, tag="other", save_latest=False)  # the one before has been tidied up by now
            assert torch.load(tmp_path / "best" / "a.pt") == 1
            assert (tmp_path / "latest").read_text() == "best"
    with Checkpointer(tmp_path / ".checkpointd"):
        assert torch.load(tmp_path / "best" / "a.pt") == 2


def test_a_link_in_a_shown_directory_keeps_nothing_from_being_shown(ckpt: Checkpointer) -> None:
    shown = save(ckpt, {"a.pt": 1}, tag="best")
    (beside(ckpt) / "exports").mkdir()
    (shown / "hf").symlink_to("../exports")
    for value, tag in ((2, "best"), (3, "best"), (4, "other")):
        save(ckpt, {"a.pt": value}, tag=tag)
        assert torch.load(beside(ckpt) / tag / "a.pt") == value
    assert os.readlink(shown / "hf") == "../exports"
    assert [core_of(ckpt).damage(found, [0]) for found in core_of(ckpt).checkpoints()] == [(), ()]


def test_what_is_not_where_it_is_to_be_shown_is_not_whole(ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed would load other files than those that were verified, or none."""

    async def crashed(*_: object, **__: object) -> None:
        raise StoreError("no space is left for a directory")

    with monkeypatch.context() as patch:
        patch.setattr(PlainFiles, "publish", crashed)
        save(ckpt, example(), tag="one")
        (found,) = core_of(ckpt).checkpoints()
        with pytest.raises(UnreadableError, match="no space is left"):  # no proof of damage
            core_of(ckpt).damage(found, [0])
    assert core_of(ckpt).damage(found, [0]) == ()
    assert torch.load(beside(ckpt) / "one" / "mp_rank_00_model_states.pt")["lr"] == 0.1
    shutil.rmtree(beside(ckpt) / "one")
    assert "has been removed" in core_of(ckpt).damage(found, [0])[0]


def test_a_directory_that_somebody_removed_is_removed_and_not_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / ".checkpointd"
    with Checkpointer(root) as ckpt:
        for tag in ("one", "two"):
            save(ckpt, example(), tag=tag)
        assert core_of(ckpt).removed() == frozenset()
    shutil.rmtree(tmp_path / "two")
    capsys.readouterr()
    assert run(["verify", str(root), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(one["tag"], one["state"]) for one in found] == [("two", "removed"), ("one", "whole")]
    with Checkpointer(root) as ckpt:
        (newest, _) = core_of(ckpt).checkpoints()
        assert core_of(ckpt).removed() == {newest.prefix}

        async def retired() -> None:
            await retire(ckpt._core._store, await attempts_at(ckpt._core._store), Retention())

        ckpt._core._writer.call(retired(), 60)
        assert ([one.tag for one in ckpt.list()], ckpt.latest()) == (["one"], "one")
    assert run(["verify", str(root)]) == 0


def test_one_that_cannot_be_shown_is_shown_before_the_next(ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, real = [], PlainFiles.publish

    async def failing_once(plain: PlainFiles, name: str, folder: str, *arguments: Any) -> None:
        shown.append(folder)
        if shown == ["one"]:
            raise StoreError("no space is left for a directory")
        await real(plain, name, folder, *arguments)

    monkeypatch.setattr(PlainFiles, "publish", failing_once)
    for tag in ("one", "two"):
        core_of(ckpt).save_files(1, example(), tag=tag).wait(60)
    assert shown == ["one", "one", "two"]


def test_a_latest_that_names_what_others_saved_stays(ckpt: Checkpointer) -> None:
    beside(ckpt).mkdir(exist_ok=True)
    (beside(ckpt) / "latest").write_text("theirs")
    save(ckpt, example(), tag="best", save_latest=False)
    assert (beside(ckpt) / "latest").read_text() == "theirs"
    for tag in ("one", "two"):
        save(ckpt, example(), tag=tag)
    (beside(ckpt) / "latest").write_text("theirs")
    delete(ckpt, "one")
    assert (beside(ckpt) / "latest").read_text() == "theirs"


def test_verify_reads_every_byte_of_every_file(ckpt: Checkpointer) -> None:
    shown = save(ckpt, example())
    path = shown / "mp_rank_00_model_states.pt"
    assert run(["verify", ckpt.status().root]) == 0
    whole = path.read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 1):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([whole[at] ^ 1]))
        assert run(["verify", ckpt.status().root]) != 0, at
        path.write_bytes(whole)


def test_load_says_what_the_checkpoint_is(ckpt: Checkpointer) -> None:
    save(ckpt, example())
    with pytest.raises(CheckpointdError, match="describes files, not a state"):
        ckpt.load({"model": torch.nn.Linear(2, 2)}, "global_step7")


def test_a_directory_that_is_removed_before_the_commit_is_not_made_again(ckpt: Checkpointer) -> None:
    core_of(ckpt).save_files(1, example(), tag="run-1--s", at="run-1/s").wait(60)
    save(ckpt, example(), tag="run-2--s", at="run-2/s")
    ckpt.close()
    assert sorted(os.listdir(beside(ckpt))) == [".checkpointd", "run-2"]
    assert {path.parts[-3] for path in Path(ckpt.status().root).glob("*/*/*.file")} == {"run-2--s"}


def test_who_removes_a_directory_above_removes_the_checkpoints_in_it(ckpt: Checkpointer) -> None:
    for step in (1, 2):
        save(ckpt, example(), tag=f"run-{step}--s", at=f"run-{step}/s")
    shutil.rmtree(beside(ckpt) / "run-1")
    save(ckpt, example(), tag="run-3--s", at="run-3/s")
    ckpt.close()
    root = Path(ckpt.status().root)
    assert {path.parts[-3] for path in root.glob("*/*/*.file")} == {"run-2--s", "run-3--s"}


def test_a_directory_is_of_one_layout(tmp_path: Path) -> None:
    """Both would move one `latest`, and put their tags in each other's way."""
    files, states = tmp_path / "files", tmp_path / "states"
    with Checkpointer(files / ".checkpointd") as ckpt:
        core_of(ckpt).save_files(1, example()).wait(60)
    with pytest.raises(
        UsageError, match=r"files shows the files of checkpoints .*layout='deepspeed'.*Save in another directory"
    ):
        Checkpointer(files)
    with Checkpointer(states) as ckpt:
        ckpt.save(1, {"w": torch.ones(2)}).wait(60)
    with pytest.raises(
        UsageError, match=r"states is a root of checkpoints .*layout='checkpointd'.*save files in another directory"
    ):
        Checkpointer(states / ".checkpointd")
    for root in (files / ".checkpointd", states):
        with Checkpointer(root) as ckpt:
            assert [found.tag for found in ckpt.list()] == ["global_step1"]


def test_a_file_with_the_name_of_its_place_is_shown_as_that_place_and_latest_names_no_lone_file(ckpt: Checkpointer) -> None:
    for value in (1, 2):
        lone = save(ckpt, {"last.ckpt": {"value": torch.full((3,), value)}}, tag="last.ckpt")
        assert torch.load(lone)["value"].tolist() == [value] * 3
    assert ckpt.latest() == "last.ckpt"
    save(ckpt, {"best.ckpt": {"value": torch.ones(3)}}, tag="deep--best.ckpt", at="deep/best.ckpt")
    assert sorted(path.name for path in lone.parent.iterdir()) == [".checkpointd", "deep", "last.ckpt"]
    assert run(["verify", ckpt.status().root]) == 0
    shown = save(ckpt, example())
    delete(ckpt, "global_step7")
    assert not shown.exists()
    assert not (lone.parent / "latest").exists()
    delete(ckpt, "deep--best.ckpt")
    assert list((lone.parent / "deep").iterdir()) == []
    lone.unlink()
    assert core_of(ckpt).removed() == {checkpoint.prefix for checkpoint in core_of(ckpt).checkpoints()}


def test_a_state_can_be_shown_as_an_empty_directory(ckpt: Checkpointer) -> None:
    place = beside(ckpt) / "start=0.ckpt"
    for value in (1, 2):
        state = {"weights": torch.full((3,), value)}
        core_of(ckpt).save(value, state, tag="start=0.ckpt", shown_at="start=0.ckpt").wait(60)
        assert list(place.iterdir()) == []
    assert not (beside(ckpt) / "latest").exists()
    found = {"weights": torch.zeros(3, dtype=torch.int64)}
    loaded = ckpt.load(found)
    assert loaded is not None
    assert found["weights"].tolist() == [2, 2, 2]
    assert run(["verify", ckpt.status().root]) == 0
    (place / "notes").write_text("mine")
    delete(ckpt, "start=0.ckpt")
    assert (place / "notes").read_text() == "mine"
    core_of(ckpt).save(3, {"weights": torch.ones(3)}, tag="other", shown_at="other").wait(60)
    delete(ckpt, "other")
    assert not (beside(ckpt) / "other").exists()


def test_only_a_root_with_something_beside_it_shows_states(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "plain") as plain, pytest.raises(UsageError, match="beside the root"):
        core_of(plain).save(1, {"a": 1}, shown_at="a")
