from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from checkpointd.admin.gc import deletion
from checkpointd.layout.keys import attempt_lease_key
from checkpointd.layout.manifest import Lease, encode
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root import starts
from checkpointd.store.base import Store
from checkpointd.store.writers import new_writer
from tests.builders import break_file, leave_in_doubt, load_arrays, objects, rank_arrays, save_checkpoint
from tests.job_elsewhere import live_job
from tests.unit.cli.conftest import Cli, With, contents


async def died(store: Store) -> None:
    """A job that was killed with one save whole, one half voted for, and a commit that latest does not name yet."""
    await save_checkpoint(store, tag="global_step1")
    await leave_in_doubt(store, tag="global_step2", voting=(0, 1))
    await leave_in_doubt(store, tag="global_step3", voting=(1,))


@pytest.mark.usefixtures("job_ended")
def test_decides_what_was_left_in_doubt_and_moves_latest(root: Path, at: With, cli: Cli) -> None:
    at(died)
    answer = cli("recover", root, "--json")
    assert answer.code == 0
    found = answer.json
    assert (found["dry_run"], found["start"], found["holder"]["start"]) == (False, 2, 1)
    assert {d["tag"]: d["state"] for d in found["decided"]} == {"global_step2": "committed", "global_step3": "aborted"}
    assert (found["latest_moved_to"], found["swept"]) == ("global_step2", 1)
    assert (root / "latest").read_text() == "global_step2\n"
    assert not list((root / "global_step3").rglob("*.chunks"))
    arrays = at(lambda store: load_arrays(store, "global_step2", 1))
    assert arrays == {fqn: array.tobytes() for fqn, array in rank_arrays(1).items()}
    assert cli("verify", root).code == 0


@pytest.mark.usefixtures("job_ended")
def test_a_dry_run_says_the_same_and_writes_nothing(root: Path, at: With, cli: Cli) -> None:
    at(died)
    before = contents(root)
    planned = cli("recover", root, "--dry-run", "--json").json
    assert contents(root) == before
    assert (planned["dry_run"], planned["start"], planned["strays"], planned["refused"]) == (True, None, None, "")
    done = cli("recover", root, "--json").json
    decided = [[(d["tag"], d["state"]) for d in report["decided"]] for report in (planned, done)]
    assert decided[0] == decided[1]
    assert [planned[f] for f in ("latest_moved_to", "swept")] == [done[f] for f in ("latest_moved_to", "swept")]


@pytest.mark.usefixtures("job_ended")
def test_the_text_tells_each_decision(root: Path, at: With, cli: Cli) -> None:
    at(died)
    dry = cli("recover", root, "--dry-run")
    assert "latest: would move to global_step2" in dry.lines
    answer = cli("recover", root)
    assert "taken: start 2" in answer.lines
    assert "latest: moved to global_step2" in answer.lines
    rows = {line.split()[0]: line.split()[1:3] for line in answer.lines if line.startswith("global_step")}
    assert rows == {"global_step2": ["00000001-0", "committed"], "global_step3": ["00000001-0", "aborted"]}


@pytest.mark.usefixtures("job_ended")
def test_a_second_recovery_finds_nothing_left_to_do(root: Path, at: With, cli: Cli) -> None:
    at(died)
    assert cli("recover", root).code == 0
    found = cli("recover", root, "--json").json
    assert (found["decided"], found["latest_moved_to"], found["swept"]) == ([], None, 0)
    assert "job: none: start 3 was taken by a recovery" in cli("status", root).out


@pytest.mark.usefixtures("job_ended")
def test_the_old_jobs_start_is_fenced_by_one_without_ranks(root: Path, at: With, cli: Cli) -> None:
    at(died)
    cli("recover", root)
    start = at(lambda store: starts.read(store, 2))
    assert (start.world_size, start.writer.pid) == (0, os.getpid())


def test_a_living_job_is_left_alone_unless_it_is_to_be_taken_over(root: Path, at: With, cli: Cli) -> None:
    at(died)
    with live_job(root, "train"):
        newest = at(starts.newest)
        answer = cli("recover", root)
        assert (answer.code, answer.out) == (16, "")
        assert "runs job 'train' there since" in answer.err
        assert f"checkpointd recover {root} --take-over" in answer.err
        dry = cli("recover", root, "--dry-run")
        assert dry.code == 0
        assert "without --dry-run this is refused" in dry.err
        assert at(starts.newest) == newest
        assert (root / "latest").read_text() == "global_step1\n"
        assert cli("recover", root, "--take-over").code == 0
    assert (root / "latest").read_text() == "global_step2\n"


@pytest.mark.usefixtures("job_elsewhere")
def test_a_job_on_another_machine_that_has_left_no_lease_has_ended(root: Path, at: With, cli: Cli) -> None:
    at(died)
    assert "which has ended" in cli("status", root).out
    assert cli("recover", root).code == 0
    assert (root / "latest").read_text() == "global_step2\n"


def test_what_a_daemon_works_at_is_left_to_it(root: Path, at: With, cli: Cli) -> None:
    at(died)
    prefix = "global_step3/00000001-0"
    lease = Lease(process=new_writer(), count=1, length_s=30.0, writer=writer())
    at(lambda store: store.put(attempt_lease_key(prefix), encode(lease)))
    planned = cli("recover", root, "--dry-run", "--json").json
    found = cli("recover", root, "--json").json
    for report in (planned, found):
        assert report["surviving"] == [prefix]
        assert [d["tag"] for d in report["decided"]] == ["global_step2"]
    assert at(lambda store: starts.read(store, 2)).spared == (prefix,)
    assert f"surviving: {prefix}: a daemon works at it" in cli("recover", root).lines
    at(lambda store: store.delete(attempt_lease_key(prefix)))
    assert [d["tag"] for d in cli("recover", root, "--json").json["decided"]] == ["global_step3"]


def test_a_root_where_nothing_ever_ran(root: Path, cli: Cli) -> None:
    answer = cli("recover", root)
    assert (answer.code, answer.out) == (4, "")
    assert f"{root} is not a root (no job ever saved there)" in answer.err
    assert list(root.iterdir()) == [], "it has become a root"


def test_a_log_that_cannot_be_read_is_made_again(root: Path, at: With, cli: Cli) -> None:
    async def saves(store: Store) -> None:
        for step in (1, 2, 3):
            await save_checkpoint(store, tag=f"global_step{step}")
        await deletion(store, "global_step1", force=False, dry_run=False)

    at(saves)
    break_file(sorted((root / "log").glob("*.json"))[4], "flip")
    for looks in ("list", "status"):
        answer = cli(looks, root)
        assert (answer.code, "cannot be read to its end" in answer.out + answer.err) == (0, True)
    assert "cannot be read to its end" in cli("list", root, "--json").json["log_damage"]
    assert cli("verify", root).code == 5
    planned = cli("recover", root, "--dry-run", "--json").json
    assert "cannot be read to its end" in planned["log_damage"]
    answer = cli("recover", root)
    assert answer.code == 0
    assert "made again: the log: " in answer.out
    assert "The next start makes it again" not in answer.out + answer.err
    assert [row["tag"] for row in cli("list", root, "--json").json["rows"]] == ["global_step3", "global_step2"]
    assert cli("verify", root).code == 0
    assert cli("recover", root, "--json").json["log_damage"] == ""


def test_a_log_that_is_gone_is_made_again_from_the_directories(root: Path, at: With, cli: Cli) -> None:
    at(died)
    shutil.rmtree(root / "log")
    assert "the log of" in cli("list", root).err
    assert cli("inspect", root, "global_step1").code == 5
    assert cli("recover", root).code == 0
    assert [row["tag"] for row in cli("list", root, "--json").json["rows"]] == ["global_step2", "global_step1"]
    assert "found whole when the log was made again" in cli("explain", root, "global_step1").out
    assert (root / "latest").read_text() == "global_step2\n"
    assert cli("verify", root, "global_step2").code == 0


def test_the_newest_checkpoint_of_which_objects_are_gone_is_recorded_as_damaged(root: Path, at: With, cli: Cli) -> None:
    async def saves(store: Store) -> None:
        for step in (1, 2, 3):
            await save_checkpoint(store, tag=f"global_step{step}")

    at(saves)
    for step in (1, 3):
        [lost] = objects(root / f"global_step{step}", "00000-0.chunks")
        lost.unlink()
    planned = cli("recover", root, "--dry-run", "--json").json
    found = cli("recover", root, "--json").json
    assert planned["damaged"] == found["damaged"] == ["global_step3/00000001-0"]
    assert [row["read_back"] for row in cli("list", root, "--json").json["rows"]] == ["damaged", "no", "no"]
    assert cli("status", root, "--json").json["damaged"] == ["global_step3/00000001-0"]
    assert "00000-0.chunks, which is gone" in cli("explain", root, "global_step3").out
    assert cli("recover", root, "--json").json["damaged"] == []
