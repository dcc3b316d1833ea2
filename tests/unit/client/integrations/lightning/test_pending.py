"""When old checkpoints go and links are set: PENDING-1 to PENDING-3."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.errors import StoreError
from checkpointd.pipeline.shard import ShardProgress
from checkpointd_client.integrations.lightning.pending import Pending
from checkpointd_client.saves.handle import OwnHandle


class Job:
    """Saves whose ends the test decides. `gone`: the paths that were removed."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.refused: set[str] = set()
        self.handles: dict[str, OwnHandle] = {}
        self.pending = Pending(self._remove)

    def _remove(self, path: str) -> bool:
        if path in self.refused:
            return False
        self.gone.append(path)
        return True

    def save(self, path: str) -> None:
        self.handles[path] = OwnHandle(path, "1-0", 1, ShardProgress())
        self.pending.begin(path, self.handles[path])

    def end(self, path: str, *, well: bool = True) -> None:
        if well:
            self.handles[path].advance(Phase.COMMITTED)
        else:
            self.handles[path].advance(Phase.FAILED, StoreError("the disk is full"))
        for thread in threading.enumerate():
            if thread.name == "checkpointd-pending":
                thread.join()


def test_an_old_checkpoint_goes_when_the_new_one_has_committed_and_not_before() -> None:
    job = Job()
    job.save("old")
    job.end("old")
    job.save("new")
    job.pending.remove("old")
    assert job.gone == []
    job.end("new")
    assert job.gone == ["old"]


def test_a_save_that_fails_keeps_the_old_one_until_a_later_save_commits() -> None:
    job = Job()
    job.save("new")
    job.pending.remove("old")
    job.end("new", well=False)
    job.pending.settle()
    job.pending.remove("older")
    assert job.gone == []
    job.save("newer")
    job.end("newer")
    assert sorted(job.gone) == ["old", "older"]


def test_the_commit_of_an_earlier_save_removes_nothing_and_one_in_flight_is_waited_for() -> None:
    job = Job()
    job.save("a")
    job.save("b")
    job.pending.remove("old")
    job.save("c")
    job.end("a")
    assert job.gone == []
    job.end("c")  # "b", for which "old" was to go, may still commit or fail
    assert job.gone == []
    job.end("b", well=False)
    job.pending.settle()
    assert job.gone == ["old"]


def test_where_no_save_has_begun_it_goes_at_once_and_if_it_may_not_go_it_is_tried_again() -> None:
    job = Job()
    job.pending.remove("old")
    assert job.gone == ["old"]
    job.refused.add("older")
    job.pending.remove("older")
    job.refused.clear()
    job.pending.settle()
    assert job.gone == ["old", "older"]


def test_settle_ends_the_threads() -> None:
    before = set(threading.enumerate())
    job, removing, may_end = Job(), threading.Event(), threading.Event()
    job.pending = Pending(lambda _: removing.set() or may_end.wait(30))
    job.save("new")
    job.pending.remove("old")
    job.handles["new"].advance(Phase.COMMITTED)
    assert removing.wait(30)
    threading.Timer(0, may_end.set).start()
    job.pending.settle()
    assert not {thread.name for thread in set(threading.enumerate()) - before} & {"checkpointd-pending"}


def test_what_is_saved_again_does_not_go() -> None:
    """PENDING-2"""
    job = Job()
    job.save("last")
    job.pending.remove("last")
    job.save("last")
    job.end("last")
    assert job.gone == []


def test_a_link_is_set_at_the_commit_before_the_old_target_goes(tmp_path: Path) -> None:
    """PENDING-3: at no moment does the link lead nowhere."""
    old, new, last = (str(tmp_path / name) for name in ("old.ckpt", "new.ckpt", "last.ckpt"))
    Path(old).write_bytes(b"old")
    job = Job()
    job.save(old)
    job.pending.link(last, old)
    assert not os.path.lexists(last)
    job.end(old)
    assert os.readlink(last) == "old.ckpt"
    seen: list[str] = []
    job.pending = Pending(lambda _: bool(seen.append(os.readlink(last))) or True)
    job.save(new)
    job.pending.remove(old)
    job.pending.link(last, new)
    assert os.readlink(last) == "old.ckpt"
    Path(new).write_bytes(b"new")
    job.end(new)
    assert seen == ["new.ckpt"]
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "new.ckpt", "old.ckpt"]


def test_a_link_to_a_save_that_fails_stays_where_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    last, new = str(tmp_path / "last.ckpt"), str(tmp_path / "new.ckpt")
    os.symlink("old.ckpt", last)
    job = Job()
    job.save(new)
    job.pending.link(last, new)
    job.end(new, well=False)
    job.pending.settle()
    assert os.readlink(last) == "old.ckpt"
    assert "still leads to the older checkpoint" in caplog.text


def test_a_link_takes_the_place_of_a_directory_and_an_error_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / "shard").write_bytes(b"")
    job = Job()
    job.pending.link(str(tmp_path / "last.ckpt"), str(tmp_path / "new.ckpt"))
    assert os.readlink(tmp_path / "last.ckpt") == "new.ckpt"
    job.pending.link(str(tmp_path / "gone" / "last.ckpt"), str(tmp_path / "new.ckpt"))
    assert "cannot be linked" in caplog.text


def test_what_will_be_there_when_all_is_done() -> None:
    job = Job()
    assert job.pending.will_exist("new") is None
    job.save("new")
    job.pending.remove("old")
    assert job.pending.will_exist("new") is True
    assert job.pending.will_exist("old") is False
    job.save("old")
    assert job.pending.will_exist("old") is True
    job.end("new")
    job.end("old", well=False)
    assert job.pending.will_exist("new") is None
    assert job.pending.will_exist("old") is None
