"""DeepSpeed engines whose ranks die or fail, or differ: what DeepSpeed's own saving loses, and this does not."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.jobs import Job, RankError, wait_until
from tests.faults.rank_forker import RankForker
from tests.logged_roots import attempts

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: pip install '.[deepspeed]'"),
]

LAYOUTS = ("deepspeed", "checkpointd")
COMMITTED = [["committed", ""]] * 2


@pytest.fixture(scope="module")
def rank_forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankForker]:
    with RankForker(tmp_path_factory.mktemp("rank_forker"), "tests.faults.deepspeed_rank", DS_ACCELERATOR="cpu") as started:
        yield started


@pytest.fixture(scope="module")
def job(rank_forker: RankForker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two ranks that outlive the tests which share them."""
    with Job(folder=tmp_path_factory.mktemp("job"), rank_forker=rank_forker) as started:
        yield started


@pytest.fixture
def job_to_kill(rank_forker: RankForker, tmp_path: Path) -> Iterator[Job]:
    """Two ranks that the test may kill."""
    with Job(folder=tmp_path, rank_forker=rank_forker) as started:
        yield started


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def attached(job: Job, layout: str, tmp_path: Path) -> Job:
    """The shared ones, with an engine of ZeRO 1 that has taken a step and saved it under `first`."""
    return with_engine(job, layout, tmp_path)


def with_engine(job: Job, layout: str, folder: Path) -> Job:
    job.all("open", stage=1, seed=0, layout=layout)
    job.all("train", first=0, last=1)
    save(job, folder / "root", "first")
    assert job.all("end") == COMMITTED
    return job


def save(job: Job, root: Path, tag: str) -> None:
    assert job.all("save", root=str(root), tag=tag) == [True, True]


def latest(root: Path) -> str:
    try:
        return (root / "latest").read_text().strip()
    except FileNotFoundError:
        return ""


def is_checkpoint(root: Path, tag: str, layout: str) -> bool:
    """Whether the tag is one that a job would find."""
    if layout == "deepspeed":
        return (root / tag).exists()
    return tag in {one.tag for one in attempts(root, "checkpoint")}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- ranks that die ---------------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_in_the_middle_of_saves(job_to_kill: Job, job: Job, layout: str, tmp_path: Path) -> None:
    """After its files, and before its vote: nothing has changed, and the next job goes on from the save before."""
    root = tmp_path / "root"
    with_engine(job_to_kill, layout, tmp_path)
    job_to_kill.all("train", first=1, last=2)
    save(job_to_kill, root, "best")
    assert job_to_kill.all("end") == COMMITTED
    before = contents(root / "best") if layout == "deepspeed" else {}
    losses = job_to_kill.all("train", first=2, last=4)
    job_to_kill.ranks[1].do("hold")
    save(job_to_kill, root, "best")  # the same tag once more
    job_to_kill.all("train", first=4, last=5)
    save(job_to_kill, root, "next")
    wait_until(lambda: job_to_kill.ranks[1].do("is_held"), "rank 1 has written its files")
    for rank in reversed(job_to_kill.ranks):
        rank.kill()
    assert latest(root) == "best"
    assert not is_checkpoint(root, "next", layout)
    if layout == "deepspeed":
        assert contents(root / "best") == before
    job.all("open", stage=1, seed=1, layout=layout)
    assert job.all("load", root=str(root)) == [["best", 2]] * 2
    assert job.all("train", first=2, last=4) == losses


# --- storage that fails -----------------------------------------------------------------------------------------------


def test_a_no_vote_aborts_on_all_ranks(attached: Job, layout: str, tmp_path: Path) -> None:
    """DeepSpeed does not look at what its engine's commit() returns."""
    root = tmp_path / "root"
    attached.ranks[1].do("fail")
    save(attached, root, "second")
    ends = attached.all("end")
    assert [phase for phase, _ in ends] == ["aborted", "failed"]
    assert all("the disk of one rank gave up" in why for _, why in ends)
    assert [latest(root), is_checkpoint(root, "second", layout)] == ["first", False]
    attached.ranks[1].do("work_again")
    save(attached, root, "second")
    assert attached.all("end") == COMMITTED
    assert latest(root) == "second"


# --- calls that are not alike -----------------------------------------------------------------------------------------


def test_tags_that_differ_in_this_projects_format(job: Job, tmp_path: Path) -> None:
    """The other layout: tests/e2e/deepspeed_ranks.py."""
    root = tmp_path / "root"
    with_engine(job, "checkpointd", tmp_path)
    for rank in job.ranks:
        rank.tell("save", root=str(root), tag=f"mine-{rank.rank}")
    assert [rank.answer() for rank in job.ranks] == [True, True]
    assert job.all("end") == COMMITTED
    assert [latest(root), sorted(path.name for path in root.glob("mine*"))] == ["mine-0", ["mine-0"]]
    job.all("validate_tags")
    for rank in job.ranks:
        rank.tell("save", root=str(root), tag=f"other-{rank.rank}")
    for rank in job.ranks:
        with pytest.raises(RankError, match="rank 1 under 'other-1'; give one tag on all ranks"):
            rank.answer()
    assert not list(root.glob("other*"))


# --- what is in the way -----------------------------------------------------------------------------------------------


def test_what_a_larger_job_left_in_the_directory_goes(job: Job, tmp_path: Path) -> None:
    """DeepSpeed's zero_to_fp32 counts the files, and refuses where there are too many."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    root = tmp_path / "root"
    with_engine(job, "deepspeed", tmp_path)
    (root / "tag").mkdir()
    for name in ("zero_pp_rank_2_mp_rank_00_optim_states.pt", "notes.txt"):
        (root / "tag" / name).write_bytes(b"left over")
    save(job, root, "tag")
    assert job.all("end") == COMMITTED
    assert not (root / "tag" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").exists()
    assert (root / "tag" / "notes.txt").read_bytes() == b"left over"
    assert "hidden.weight" in get_fp32_state_dict_from_zero_checkpoint(str(root), "tag")
