from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd.admin.gc import deletion
from checkpointd.admin.recovery import recovery
from checkpointd.cli.commands.status import changes
from checkpointd.layout.log_records import DamageRecord
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.root.log import RootLog
from checkpointd.report.status import RECENT, standing
from checkpointd.store.base import Store
from tests.builders import begin_start, break_file, leave_in_doubt, plan_save, save_checkpoint
from tests.unit.cli.conftest import Cli, With


def test_a_root_that_nobody_used(root: Path, cli: Cli) -> None:
    answer = cli("status", root)
    assert answer.code == 0
    assert answer.lines == [f"root: {root}", "job: none ever ran here", "latest: none", "checkpoints: 0", "in flight: 0"]


def test_who_runs_it_what_is_latest_in_flight_and_failed(root: Path, at: With, cli: Cli) -> None:
    async def busy(store: Store) -> None:
        await save_checkpoint(store, tag="global_step1")
        await save_checkpoint(store, tag="global_step2", failing={1: RuntimeError("boom")})
        await leave_in_doubt(store, tag="global_step3", voting=(1,))

    at(busy)
    found = cli("status", root, "--json").json
    assert (found["holder"]["start"], found["holder"]["world_size"], found["holder"]["life"]) == (1, 2, "running")
    assert (found["latest"]["tag"], found["checkpoints"]) == ("global_step1", 1)
    assert [(row["tag"], row["latest"]) for row in found["commits"]] == [("global_step1", True)]
    [flight] = found["flights"]
    assert (flight["tag"], flight["orphaned"], flight["world_size"]) == ("global_step3", False, 2)
    assert [(r["rank"], r["vote"], r["object_bytes"] > 0) for r in flight["ranks"]] == [(0, "missing", False), (1, "yes", True)]
    [failure] = found["failures"]
    assert (failure["tag"], failure["brief"]) == ("global_step2", "StagingError, rank 1")
    assert "rank 1 failed while staging: boom" in failure["why"]
    text = cli("status", root).out
    assert "start 1, 2 ranks: process" in text
    assert "which still runs" in text
    assert "latest: global_step1, step 1, committed 20" in text
    assert "global_step3 (attempt 00000001-0): in flight, 1 of 2 voted" in text


def test_a_save_that_a_newer_job_fenced_is_called_so(root: Path, at: With, cli: Cli) -> None:
    async def overtaken(store: Store) -> None:
        old = await begin_start(store)
        await (await plan_save(store, start=old)).announce()
        await begin_start(store)

    at(overtaken)
    [failure] = cli("status", root, "--json").json["failures"]
    assert failure["brief"] == "fenced"
    assert "global_step1: fenced, 20" in cli("status", root).out
    advice = cli("explain", root, "global_step1").out
    assert "this save and all later ones of its job cannot commit" in advice
    assert "The next save starts afresh" not in advice


@pytest.mark.usefixtures("job_ended")
def test_what_a_dead_job_left_is_in_doubt_not_in_flight(root: Path, at: With, cli: Cli) -> None:
    async def died(store: Store) -> None:
        await leave_in_doubt(store, tag="global_step3", voting=())
        await leave_in_doubt(store, tag="global_step4", voting=(0,))

    at(died)
    answer = cli("status", root)
    assert "in flight: 0" in answer.lines
    assert "which has ended" in answer.out
    assert "global_step4 (attempt 00000001-0): left in doubt by a job that has ended, 1 of 2 voted" in answer.out


def test_a_spared_attempt_at_which_nobody_works_is_in_doubt_while_the_new_job_runs(root: Path, at: With, cli: Cli) -> None:
    async def restarted(store: Store) -> None:
        save = await leave_in_doubt(store, tag="global_step3", voting=(0,))
        await starts.take(store, 4, [save.info(0).prefix])

    at(restarted)
    found = cli("status", root, "--json").json
    assert (found["holder"]["start"], found["holder"]["world_size"]) == (2, 4)
    assert [(f["orphaned"], f["world_size"]) for f in found["flights"]] == [(True, 2)]


def test_ranks_that_have_written_nothing_are_known_from_the_start(root: Path, at: With, cli: Cli) -> None:
    async def begun(store: Store) -> None:
        save = await plan_save(store, world_size=3)
        await save.announce()
        await store.put(save.info(1).key("00001-0.chunks"), b"half")

    at(begun)
    [flight] = cli("status", root, "--json").json["flights"]
    assert flight["world_size"] == 3
    assert [(r["vote"], r["object_bytes"]) for r in flight["ranks"]] == [("missing", 0), ("missing", 4), ("missing", 0)]


def test_of_a_large_job_only_the_ranks_that_are_waited_for_are_shown(root: Path, at: With, cli: Cli) -> None:
    async def large(store: Store) -> None:
        await leave_in_doubt(store, world_size=40, voting=tuple(r for r in range(40) if r not in (3, 17)))

    at(large)
    answer = cli("status", root)
    assert "38 ranks voted yes; 2 did not, the first of them:" in answer.lines
    assert [line.split()[:2] for line in answer.lines[-2:]] == [["3", "missing"], ["17", "missing"]]


def test_damage_is_shown_and_ends_nothing(root: Path, at: With, cli: Cli) -> None:
    at(save_checkpoint)
    at(lambda store: RootLog.of(store).add(DamageRecord(attempt="global_step1/00000001-0", why="a chunk is wrong")))
    break_file(sorted((root / "log").glob("*.json"))[-1], "flip")
    assert cli("status", root, "--json").json["damaged"] == []
    assert "cannot be read to its end" in cli("status", root).out
    at(recovery)
    at(lambda store: RootLog.of(store).add(DamageRecord(attempt="global_step1/00000001-0", why="a chunk is wrong")))
    answer = cli("status", root)
    assert answer.code == 0
    assert "global_step1/00000001-0 was read, and is damaged" in answer.out
    assert "it was read since, and is damaged: a chunk is wrong" in cli("explain", root, "global_step1").out


def test_changes_are_told_once_and_in_order(at: With) -> None:
    async def story(store: Store) -> list[list[str]]:
        looks = [await standing(store)]
        await begin_start(store)
        save = await plan_save(store, tag="global_step1")
        await save.vote(1)
        looks.append(await standing(store))
        looks.append(await standing(store))
        await save_checkpoint(store, tag="global_step2")
        await save_checkpoint(store, tag="global_step3", failing={0: RuntimeError("boom")})
        looks.append(await standing(store))
        return [list(changes(a, b)) for a, b in zip([None, *looks], looks, strict=False)]

    first, second, third, fourth = at(story)
    assert first == ["job: none ever ran here", "checkpoints: 0", "latest: none"]
    assert second[0].startswith("job: start 1, 2 ranks, process ")
    assert second[1].startswith("in flight: global_step1 (00000001-0): 1 of 2 voted, waiting for rank 0, ")
    assert third == []
    assert fourth[0].startswith("aborted: global_step3 (00000001-0): StagingError, rank 0: rank 0 failed")
    assert fourth[1:] == ["committed: global_step2 (00000001-0), step 2", "latest: global_step2"]


def test_an_old_commit_that_shows_up_again_is_no_news(at: With) -> None:
    async def story(store: Store) -> list[str]:
        for step in range(RECENT + 2):
            await save_checkpoint(store, tag=f"global_step{step}")
        before = await standing(store)
        await deletion(store, f"global_step{RECENT + 1}", force=True, dry_run=False)
        after = await standing(store)
        assert {c.tag for c in after.commits} - {c.tag for c in before.commits} == {"global_step1"}
        return list(changes(before, after))

    assert not any(line.startswith("committed") for line in at(story))
