"""Jobs in which one rank is missing, dead, failing, fenced, on another root, or preempted.

The deadline for the commit is one that no test lives to see (jobs.NEVER_S): the answer came for another reason, or the test has
let the deadline pass, once the ranks were as far as they could come.
"""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
import torch

from checkpointd.layout.log_records import entry_key
from checkpointd_client import Checkpointer
from tests.builders import objects
from tests.faults import strace_faults
from tests.faults.jobs import NEVER_S, End, Job, Rank, RankError, wait_until
from tests.logged_roots import attempts, log_state

pytestmark = pytest.mark.e2e

SOON_S = 1.5
"""How long ranks wait for each other where a test waits for the end of that; nothing has to happen before it."""
REPORT_S = 0.1


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def attempt(root: Path, step: int, name: str = "00000001-0") -> Path:
    return root / f"global_step{step}" / name


def alike(ends: list[End], phase: str, code: str) -> str:
    """The message of ends that all say the same."""
    assert {(end.phase, end.code) for end in ends} == {(phase, code)}, ends
    assert len({end.message for end in ends}) == 1, ends
    return ends[0].message


def end_without_the_others(rank: Rank, step: int) -> End:
    """How the save of `step` ends where other ranks are silent after the vote of `rank`, until the deadline."""
    rank.do("end", step=step, until="prepared")
    rank.do("expire", step=step)
    return rank.end(step)


# --- a rank that is missing ---


def test_a_rank_that_never_calls_save_is_named_and_the_next_save_works(pair: Job, root: Path) -> None:
    pair.open(root)
    pair.must_commit(1)
    pair.ranks[0].do("save", step=2)
    end = end_without_the_others(pair.ranks[0], 2)
    assert (end.phase, end.code, end.ranks) == ("aborted", "DeadlineError", [1])
    assert "no vote from rank 1 (had written nothing)" in end.message
    assert "every rank must call save()" in end.message
    pair.must_commit(3)
    pair.ranks[1].do("save", step=2)  # far too late: it learns what the others learnt
    assert pair.ranks[1].end(2) == end
    folder = root / "global_step2"
    wait_until(lambda: not (objects(folder, ".chunks") + objects(folder, ".index")), "the pieces of the aborted attempt go")
    pair.must_load(3)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_makes_no_checkpointer_is_named(pair: Job, root: Path, absent: int) -> None:
    came = pair.ranks[1 - absent]
    came.do("be_impatient", start_s=SOON_S)
    try:
        with pytest.raises(RankError, match=rf"DeadlineError: rank {absent} .* Checkpointer\(...\) on every rank"):
            came.do("open", **pair.opening(root), commit_timeout_s=SOON_S)
        assert not root.exists()  # no start was begun
        came.do("be_impatient", report_s=REPORT_S)
        before = came.said()
        came.tell("open", **pair.opening(root), commit_timeout_s=NEVER_S)
        words = f"rank {absent} has not come yet"
        wait_until(lambda: came.said().removeprefix(before).count(words) > 1, "it says so, at growing intervals")
        pair.ranks[absent].do("open", **pair.opening(root), commit_timeout_s=NEVER_S)
        came.answer()
    finally:
        came.do("be_impatient")
    pair.must_commit(1)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_call_load_is_named(pair: Job, root: Path, absent: int) -> None:
    pair.open(root)
    pair.must_commit(1)
    rank = pair.ranks[1 - absent]
    rank.do("load_impatiently", seconds=SOON_S)
    rank.tell("load")
    with pytest.raises(Exception, match=rf"DeadlineError: rank {absent} did not answer .* calling load\(\)"):
        rank.answer()


# --- a rank that fails ---


def test_a_state_that_one_rank_cannot_store_aborts_all_at_once(pair: Job, root: Path) -> None:
    pair.open(root)
    pair.ranks[0].tell("save", step=1)
    with pytest.raises(Exception, match="StateError: socket: "):
        pair.ranks[1].do("save_unsafe", step=1)
    end = pair.ranks[0].end(1)
    assert (end.phase, end.ranks) == ("aborted", [1])
    assert "rank 1 failed while staging: socket: " in end.message
    pair.must_commit(2)


# --- a rank that is gone ---


def test_a_dead_coordinator_leaves_the_others_with_an_answer(pair: Job, root: Path, tmp_path: Path) -> None:
    """Rank 0 is the host of torch.distributed's store as well: that is gone, too."""
    with Job(folder=tmp_path) as job:
        job.open(root)
        job.must_commit(1)
        job.ranks[0].kill()
        job.ranks[1].do("save", step=2)
        end = end_without_the_others(job.ranks[1], 2)
        assert (end.code, end.ranks) == ("DeadlineError", [0])
        job.ranks[1].do("close")
    restart(pair, root, loads=1)


def test_a_coordinator_that_dies_at_the_commit_is_named_and_the_next_start_agrees(
    pair: Job, root: Path, tmp_path: Path
) -> None:
    """Rank 0 is killed as it gives the entry with the commit of step 2 its name."""
    with Job(folder=tmp_path) as job:
        job.open(root)
        job.must_commit(1)
        log, last = tmp_path / "strace", log_state(root).number
        commit = root / entry_key(last + 2)  # after the announcement
        with strace_faults.attached(job.ranks[0].pid, calls="link,linkat", on=[commit], fault="signal=KILL", log=log):
            job.tell("save", step=2)
            assert job.ranks[0].process.wait() != 0
            end = end_without_the_others(job.ranks[1], 2)
    if end.phase == "committed":  # the name was given before the signal came
        restart(pair, root, loads=2)
        return
    assert (end.phase, end.code, end.ranks) == ("aborted", "DeadlineError", [0])
    assert "all ranks have voted, but it put no outcome" in end.message
    restart(pair, root, loads=1)


def restart(job: Job, root: Path, *, loads: int) -> None:
    """The next start, here `job`, finds `loads`, and what it saves then is found again."""
    job.open(root)
    job.must_load(loads)
    job.must_commit(3)
    job.must_load(3)


def test_ranks_that_leave_right_after_save_have_committed(pair: Job, root: Path, tmp_path: Path) -> None:
    with Job(folder=tmp_path, nbytes=16 << 20) as job:
        job.open(root)
        job.all("save", step=1)
        job.tell("leave")
        assert [rank.process.wait() for rank in job.ranks] == [0, 0], [rank.said() for rank in job.ranks]
        assert (root / "latest").read_text() == "global_step1\n"
        assert [one.step for one in attempts(root, "checkpoint")] == [1]
    pair.open(root, nbytes=16 << 20)
    pair.must_load(1)


# --- another job, another place, another size ---


def test_a_second_job_is_refused_on_all_its_ranks_and_the_first_goes_on(pair: Job, root: Path, tmp_path: Path) -> None:
    pair.open(root)
    pair.must_commit(1)
    first = pair.ranks[0]
    with Job(folder=tmp_path) as second:
        for error in second.errors_of("open", **second.opening(root)):
            assert error.code == "RootInUseError"
            assert f"process {first.pid} on {socket.gethostname()} runs a job without a name there since" in error.message
        pair.must_commit(2)
        second.open(root, take_over=True)
        second.must_load(2)
        alike(pair.save(3), "fenced", "FencedError")


def test_a_second_job_that_takes_over_fences_the_first_and_both_say_so(
    pair: Job, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = pair.ranks[0]
    pair.open(root)
    pair.must_commit(1)
    with Checkpointer(root, take_over=True) as second:
        [about_the_first] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert f"process {first.pid} on {socket.gethostname()}" in about_the_first
        assert time_of(root, start=1) in about_the_first

        message = alike(pair.save(2), "fenced", "FencedError")
        assert f"start 2, by process {os.getpid()} on {socket.gethostname()} at {time_of(root, start=2)}" in message
        assert "give each its own root" in message
        assert message in first.logged("ERROR")

        second.save(4, {"w": torch.ones(4)}).wait()
        assert second.latest() == "global_step4"
    assert (root / "latest").read_text() == "global_step4\n"


def time_of(root: Path, *, start: int) -> str:
    [begin] = [one for one in log_state(root).begins if one.start == start]
    return begin.writer.time


def test_ranks_with_different_roots_are_told_at_the_start(pair: Job, tmp_path: Path) -> None:
    for rank in pair.ranks:
        rank.tell("open", root=str(tmp_path / f"node-{rank.rank}"), seed=1, nbytes=4096)
    for rank in pair.ranks:
        with pytest.raises(Exception, match=r"RootNotSharedError: the ranks do not share .*rank 1: .* does not have start 1"):
            rank.answer()
    pair.open(tmp_path / "shared")
    pair.must_commit(1)


def test_a_node_that_has_an_older_root_of_its_own_is_told_at_the_start(pair: Job, tmp_path: Path) -> None:
    """Both see a start 1, each its own one."""
    with Checkpointer(tmp_path / "node-1"):
        pass
    for rank in pair.ranks:
        rank.tell("open", root=str(tmp_path / f"node-{rank.rank}"), seed=1, nbytes=4096)
    for rank in pair.ranks:
        with pytest.raises(
            Exception, match=rf"RootNotSharedError: .*rank 1: .*another start 1, taken by process {os.getpid()}"
        ):
            rank.answer()


# --- preemption ---


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_the_last_save_commits(
    pair: Job, root: Path, signalled: int
) -> None:
    pair.open(root, preempt_signals=int(signal.SIGTERM))
    pair.must_commit(0)
    pair.tell("train_until_preempted", steps=1_000_000)
    pair.ranks[signalled].send(signal.SIGTERM)
    steps = [rank.answer() for rank in pair.ranks]
    assert steps[0] == steps[1] is not None
    pair.all("close")
    pair.open(root)
    pair.must_load(steps[0])


@pytest.mark.parametrize("damaged", [0, 1])
def test_damage_that_one_rank_finds_sends_all_ranks_to_the_checkpoint_before(pair: Job, root: Path, damaged: int) -> None:
    pair.open(root)
    pair.must_commit(1)
    pair.must_commit(2)
    chunks = attempt(root, 2) / f"{damaged:05d}-0.chunks"
    data = bytearray(chunks.read_bytes())
    data[5000] ^= 1
    chunks.write_bytes(data)
    found = pair.load()
    assert [(loaded.step, loaded.wrong) for loaded in found if loaded] == [(1, []), (1, [])]
    for rank in pair.ranks:
        assert f"{chunks.relative_to(root)} is damaged" in rank.logged("ERROR")
    for options in ({"tag": "global_step2"}, {"fallback": False}):
        for error in pair.errors_of("load", **options):
            assert error.code == "PartlyLoadedError"
            assert f"(rank {damaged}, model." in error.message
        for error in pair.errors_of("load", **options, verify_first=True):
            assert error.code == "DamagedError"
            assert f"(rank {damaged}, model." in error.message
