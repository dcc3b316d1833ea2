"""What stands in the way of a save or a load is named at once, in one message of the class that it has."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from checkpointd.errors import AbortedError, StagingError, StoreError, StoreFullError, UnreadableError, UsageError
from checkpointd.pipeline import attempt as attempt_module
from checkpointd.pipeline.write.job import PersistJob
from checkpointd_client import Checkpointer, open_checkpoint
from tests.faults import mounts
from tests.unit.other_user import STRANGER

LONG_S = 3600.0
"""A deadline that no test lives to see."""


def state(value: float = 1.0) -> dict[str, object]:
    return {"w": torch.full((2048,), value)}


@pytest.mark.parametrize(
    ("call", "number", "words"),
    [
        ("memfd_create", errno.ENOSYS, "may not make a memfd"),
        ("memfd_create", errno.EPERM, "may not make a memfd"),
        ("memfd_create", errno.ENFILE, "fs.file-max"),
        ("ftruncate", errno.EFBIG, r"`ulimit -f` is 4.0 KiB.*also counts for the memory of a snapshot"),
        ("ftruncate", errno.ENOMEM, "the kernel has no memory"),
        ("fchmod", errno.EPERM, "may not make a memfd"),
    ],
)
def test_memory_that_the_system_refuses_is_named(
    tmp_path: Path, call: str, number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    with Checkpointer(tmp_path, commit_timeout_s=LONG_S) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            patch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
            handle = ckpt.save(1, state())
            with pytest.raises(StagingError, match=rf"(?s)12\.0 KiB for a snapshot: \[{errno.errorcode[number]}\].*{words}"):
                handle.wait()
        assert ckpt.save(2, state()).wait().phase == "committed"


@pytest.mark.root
@pytest.mark.xdist_group("mounts")
def test_inodes_that_run_out_end_each_save_at_once_and_are_named() -> None:
    errors: list[BaseException | None] = []
    with mounts.tmpfs(64 * mounts.MIB, "nr_inodes=64") as path, Checkpointer(path / "root", commit_timeout_s=LONG_S) as ckpt:
        for step in range(64):
            handle = ckpt.save(step, state(float(step)))
            if handle.ended_within(None) and handle.phase != "committed":
                errors.append(handle.exception())
            if len(errors) == 3:
                break
        loaded = ckpt.load(target := state(-1.0))
        assert loaded is not None
        assert torch.equal(target["w"], torch.full((2048,), float(loaded.step)))
    assert len(errors) == 3
    for one in errors:
        assert isinstance(one, StoreFullError)
        assert "no inodes for more files" in str(one)


def test_close_prints_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(job: PersistJob) -> object:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise StoreFullError("no space for the chunks: free some") from error

    monkeypatch.setattr(attempt_module, "persist", full)
    ckpt = Checkpointer(tmp_path)
    ckpt.save(1, state())
    with pytest.raises(StoreFullError, match="rank 0 failed while persisting: no space for the chunks") as raised:
        ckpt.close()
    printed = "".join(traceback.format_exception(raised.value))
    assert printed.count("Traceback") == printed.count("no space for the chunks") == 1
    assert "During handling" not in printed
    abort = raised.value.__context__
    assert isinstance(abort, AbortedError)
    assert abort.ranks == raised.value.ranks == (0,)
    assert isinstance(abort.__context__, StoreFullError)  # with the error of the system, for whoever looks


# --- what this user may not do -----------------------------------------------------------------------------------


@pytest.fixture
def root() -> Iterator[Path]:
    """A root of this user's with a checkpoint, in a directory that everybody may enter."""
    above = Path(tempfile.mkdtemp(prefix="checkpointd-obstacles-"))
    above.chmod(0o755)
    with Checkpointer(above / "root") as ckpt:
        ckpt.save(1, state()).wait()
    yield above / "root"
    shutil.rmtree(above)


@contextmanager
def as_stranger() -> Iterator[None]:
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.root
@pytest.mark.parametrize(
    ("tag", "closed"),
    [
        *((None, closed) for closed in ("..", ".", "log", "global_step1")),
        *(("latest", closed) for closed in ("..", ".", "log", "global_step1")),
        *(("global_step1", closed) for closed in ("..", ".", "log", "global_step1")),
    ],
)
def test_a_root_that_may_not_be_read_is_said_at_once(root: Path, closed: str, tag: str | None) -> None:
    (root / closed).chmod(0o000)
    with as_stranger(), pytest.raises(UnreadableError, match="permission is missing: let the user of this process read there"):
        open_checkpoint(root, tag, timeout_s=LONG_S)


@pytest.mark.root
def test_a_root_that_may_not_be_written_is_said_at_once(root: Path) -> None:
    with as_stranger(), pytest.raises(StoreError, match=r"permission is missing.*open_checkpoint"):
        Checkpointer(root, commit_timeout_s=LONG_S)


@pytest.mark.parametrize("top", ["/", "//", "/./", "file:///"])
def test_the_top_of_the_file_system_is_refused(top: str) -> None:
    with pytest.raises(UsageError, match="a directory of their own"):
        Checkpointer(top)
    with pytest.raises(UsageError, match="a directory of their own"):
        open_checkpoint(top)
