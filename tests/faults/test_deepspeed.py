"""DeepSpeed engines whose ranks, writers and disks die: what DeepSpeed's own saving loses, and this does not."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults import mounts
from tests.faults.daemons import Daemon
from tests.faults.jobs import Job, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("mounts"),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: pip install checkpointd[deepspeed]"
    ),
]

SCRIPT = Path(__file__).with_name("deepspeed_driven.py")
MIB = 1 << 20
COMMITTED = [["committed", ""]] * 2


def start(folder: Path, name: str) -> Job:
    (folder / name).mkdir()
    return Job(folder=folder / name, script=SCRIPT)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two ranks that outlive the tests which share them."""
    with start(tmp_path_factory.mktemp("job"), "shared") as started:
        yield started


@pytest.fixture
def attached(job: Job, tmp_path: Path) -> Job:
    """The same, with an engine of ZeRO 1 that has taken a step and saved it under `first`."""
    job.all("open", stage=1, seed=0)
    job.all("train", first=0, last=1)
    save(job, tmp_path / "root", "first")
    assert job.all("end") == COMMITTED
    return job


def save(job: Job, root: Path, tag: str) -> None:
    assert job.all("save", root=str(root), tag=tag) == [True, True]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def steps_in(folder: Path) -> set[Any]:
    """The steps that the files of a tag hold: one, where they are of one save."""
    found = set()
    for path in folder.glob("*_states.pt"):
        held = torch.load(path, weights_only=False)
        state = held.get("optimizer_state_dict", {}).get("base_optimizer_state")
        found.add(held["global_steps"] if state is None else int(next(iter(state["state"].values()))["step"]))
    return found


def test_ranks_that_are_killed_in_the_middle_of_saves(tmp_path: Path) -> None:
    """First rank 1 before its vote, then rank 0 in the middle of the commit; each time the job is started again."""
    root = tmp_path / "root"
    best = root / "best"
    with start(tmp_path, "one") as job:
        job.all("open", stage=1, seed=0)
        job.all("train", first=0, last=2)
        save(job, root, "best")
        assert job.all("end") == COMMITTED
        before = contents(best)
        losses = job.all("train", first=2, last=4)
        job.ranks[1].do("hold")
        save(job, root, "best")  # the same tag once more
        job.all("train", first=4, last=5)
        save(job, root, "next")
        wait_until(lambda: job.ranks[1].do("is_held"), "rank 1 has written its files")
        job.ranks[1].kill()
    assert (root / "latest").read_text() == "best"
    assert contents(best) == before
    assert not (root / "next").exists()
    with start(tmp_path, "two") as job:
        job.all("open", stage=1, seed=1)
        assert job.all("load", root=str(root)) == [[str(best), 2]] * 2
        assert job.all("train", first=2, last=4) == losses
        job.ranks[0].do("die_when", call="show")
        job.ranks[1].do("die_when", call="show")  # which would do it instead
        job.tell("save", root=str(root), tag="best")
        for rank in job.ranks:
            assert rank.process.wait() == -signal.SIGKILL
    assert contents(best) == before, "not the old ones, and not yet the new ones either"
    with start(tmp_path, "three") as job:
        job.all("open", stage=1, seed=2)
        assert job.all("load", root=str(root)) == [[str(best), 4]] * 2
        assert steps_in(best) == {4}


def test_a_no_vote_aborts_on_all_ranks(attached: Job, tmp_path: Path) -> None:
    """DeepSpeed does not look at what its engine's commit() returns."""
    root = tmp_path / "root"
    attached.ranks[1].do("fail")
    save(attached, root, "second")
    ends = attached.all("end")
    assert [phase for phase, _ in ends] == ["aborted", "failed"]
    assert all("the disk of one rank gave up" in why for _, why in ends)
    assert (root / "latest").read_text() == "first"
    assert not (root / "second").exists()
    attached.ranks[1].do("work_again")
    save(attached, root, "second")
    assert attached.all("end") == COMMITTED
    assert (root / "latest").read_text() == "second"


@pytest.mark.root
def test_a_full_disk_fails_the_save_and_not_the_training(attached: Job) -> None:
    with mounts.tmpfs(4 * MIB) as small:
        root = small / "root"
        save(attached, root, "one")
        assert attached.all("end") == COMMITTED
        ballast = small / "ballast"
        mounts.fill(ballast)
        attached.all("train", first=1, last=2)
        save(attached, root, "two")
        assert all("no space is left" in why for _, why in attached.all("end"))
        assert [(root / "latest").read_text(), (root / "two").exists()] == ["one", False]
        ballast.unlink()
        save(attached, root, "two")
        assert attached.all("end") == COMMITTED
        assert steps_in(root / "two") == {2}
        attached.all("close")


def test_what_a_larger_job_left_in_the_directory_goes(attached: Job, tmp_path: Path) -> None:
    """DeepSpeed's zero_to_fp32 counts the files, and refuses where there are too many."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    root = tmp_path / "root"
    (root / "tag").mkdir()
    for name in ("zero_pp_rank_2_mp_rank_00_optim_states.pt", "notes.txt"):
        (root / "tag" / name).write_bytes(b"left over")
    save(attached, root, "tag")
    assert attached.all("end") == COMMITTED
    assert not (root / "tag" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").exists()
    assert (root / "tag" / "notes.txt").read_bytes() == b"left over"
    assert "hidden.weight" in get_fp32_state_dict_from_zero_checkpoint(str(root), "tag")


def test_a_sidecar_that_dies_is_noticed(job: Job, tmp_path: Path) -> None:
    """The process that writes: DeepSpeed's engines of that kind wait for theirs for ever."""
    root = tmp_path / "root"
    root.mkdir()
    with Daemon(tmp_path) as daemon:
        job.all("open", stage=3, seed=0, sidecar=str(daemon.socket))
        save(job, root, "one")
        assert job.all("end") == COMMITTED
        daemon.send(signal.SIGSTOP)
        job.tell("save", root=str(root), tag="two")
        daemon.kill()
        assert [rank.answer() for rank in job.ranks] == [True, True]
        ends = job.all("end")
        assert ends == COMMITTED, "each rank has written its own"
        job.all("train", first=0, last=1)
        save(job, root, "three")
        assert job.all("end") == COMMITTED
        assert (root / "latest").read_text() == "three"


def test_a_script_that_ends_right_after_a_save(attached: Job, tmp_path: Path) -> None:
    """The last of those that share the job: the interpreter's end waits for the commit."""
    root = tmp_path / "root"
    save(attached, root, "last")
    attached.tell("leave")
    for rank in attached.ranks:
        assert rank.process.wait() == 0, rank.said()
    assert (root / "latest").read_text() == "last"
    assert steps_in(root / "last") == {1}
