from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpointd.admin.recovery import recovery
from checkpointd.errors import StoreFullError
from checkpointd.layout.keys import attempt_lease_key, job_lease_key
from checkpointd.layout.manifest import Inline, Lease, encode
from checkpointd.pipeline.identity import writer
from checkpointd.store.base import Store
from tests.builders import begin_start, leave_in_doubt, save_checkpoint
from tests.job_elsewhere import ELSEWHERE
from tests.unit.cli.conftest import Cli, With


def only_attempt(cli: Cli, root: Path, tag: str) -> Any:
    [attempt] = cli("explain", root, tag, "--json").json["attempts"]
    return attempt


def test_committed(root: Path, at: With, cli: Cli) -> None:
    at(save_checkpoint)
    answer = cli("explain", root, "global_step1")
    assert answer.code == 0
    assert answer.lines[0] == "global_step1 is a checkpoint; latest names global_step1: a restart loads it."
    assert "why: every rank voted yes, and the coordinator (rank 0) committed it" in answer.lines
    attempt = only_attempt(cli, root, "global_step1")
    assert attempt["state"] == "committed"
    assert [(r["rank"], r["vote"]) for r in attempt["ranks"]] == [(0, "yes"), (1, "yes")]
    assert all(r["writer"]["pid"] and r["writer"]["host"] and r["writer"]["time"] for r in attempt["ranks"])


def test_what_each_rank_took_for_what(root: Path, at: With, cli: Cli) -> None:
    at(save_checkpoint)
    told = [r["seconds"] for r in only_attempt(cli, root, "global_step1")["ranks"]]
    assert [set(seconds) for seconds in told] == 2 * [{"staging", "persisting", "hash", "codec", "disk", "waiting"}]
    titles = [line.split() for line in cli("explain", root, "global_step1").lines]
    assert ["RANK", "STAGING", "PERSISTING", "HASH", "CODEC", "DISK", "WAITING"] in titles


def test_which_ranks_persisted_their_part_themselves_and_why(root: Path, at: With, cli: Cli) -> None:
    at(save_checkpoint)
    assert "INLINE" not in cli("explain", root, "global_step1").out
    at(lambda store: save_checkpoint(store, tag="global_step2", inline={1: Inline(reason="refused", why="it has no room")}))
    answer = cli("explain", root, "global_step2")
    [titles] = [line for line in answer.lines if line.startswith("RANK  VOTE")]
    assert titles.endswith("INLINE")
    assert answer.lines[-2].endswith("-")
    assert "refused" not in answer.lines[-1]
    assert answer.lines[-1].endswith(" it has no room")
    told = [rank["inline"] for rank in only_attempt(cli, root, "global_step2")["ranks"]]
    assert told == [None, {"reason": "refused", "why": "it has no room"}]


def test_why_a_checkpoint_is_not_latest(root: Path, at: With, cli: Cli) -> None:
    async def saves(store: Store) -> None:
        await save_checkpoint(store, tag="global_step1")
        await save_checkpoint(store, tag="global_step2")
        await save_checkpoint(store, tag="aside", n=3, save_latest=False)

    at(saves)
    assert "a restart loads global_step2, which was committed after global_step1" in cli("explain", root, "global_step1").out
    assert "aside was saved with save_latest=False" in cli("explain", root, "aside").out
    (root / "latest").write_text("global_step1\n")
    assert "latest names global_step1, although loads take global_step2" in cli("explain", root, "global_step2").out


def test_a_pointer_of_another_program_is_named_as_that(root: Path, at: With, cli: Cli) -> None:
    """DeepSpeed writes `latest` without a newline, and files into the directory that it names."""
    at(save_checkpoint)
    (root / "other").mkdir()
    (root / "other/mp_rank_00_model_states.pt").write_bytes(b"x")
    (root / "latest").write_text("other")
    first = cli("explain", root, "global_step1").lines[0]
    assert first == "global_step1 is a checkpoint; a restart loads it, although another program has written latest."


def test_an_abort_names_the_rank_the_error_and_what_to_do(root: Path, at: With, cli: Cli) -> None:
    async def failed(store: Store) -> None:
        await save_checkpoint(store, failing={1: StoreFullError("no space left on device")})

    at(failed)
    answer = cli("explain", root, "global_step1")
    assert answer.lines[0] == "global_step1 is not a checkpoint; a restart finds no checkpoint."
    assert "next: Free some space, or raise the quota, where rank 1 writes." in answer.out
    attempt = only_attempt(cli, root, "global_step1")
    assert attempt["state"] == "aborted"
    assert "rank 1 failed while staging: no space left on device" in attempt["why"]
    assert "(at fault: rank 1)" in attempt["why"]
    assert attempt["brief"] == "StoreFullError, rank 1"
    assert attempt["ranks"] == [], "the votes went with the objects"


def test_a_deadline_names_the_rank_that_never_saved(root: Path, at: With, cli: Cli) -> None:
    async def alone(store: Store) -> None:
        await save_checkpoint(store, world_size=3, absent=frozenset({1, 2}))

    at(alone)
    attempt = only_attempt(cli, root, "global_step1")
    assert attempt["brief"] == "DeadlineError, ranks 1-2"
    assert "Look at the log of ranks 1-2: it did not call save()" in attempt["next"]
    assert "(at fault: ranks 1-2)" in attempt["why"]


def test_in_flight_while_the_job_lives(root: Path, at: With, cli: Cli) -> None:
    async def begun(store: Store) -> None:
        await leave_in_doubt(store, voting=(1,))

    at(begun)
    attempt = only_attempt(cli, root, "global_step1")
    assert (attempt["state"], attempt["job"]["life"]) == ("in-doubt", "running")
    assert attempt["why"] == "it is not decided, and there is no vote of rank 0"
    assert attempt["next"].startswith("Wait: the save is in flight")


@pytest.mark.usefixtures("job_ended")
@pytest.mark.parametrize(("voting", "fate"), [((0, 1), "keep it as a checkpoint"), ((0,), "abort it")])
def test_in_doubt_after_the_job_ended_says_what_recovery_would_do(
    root: Path, at: With, cli: Cli, voting: tuple[int, ...], fate: str
) -> None:
    async def begun(store: Store) -> None:
        await leave_in_doubt(store, voting=voting)

    at(begun)
    attempt = only_attempt(cli, root, "global_step1")
    assert attempt["job"]["life"] == "ended"
    assert attempt["next"] == f"Its job has ended: the next start of the job, or `checkpointd recover {root}`, would {fate}."


@pytest.mark.usefixtures("job_elsewhere")
def test_in_doubt_when_the_job_is_out_of_sight(root: Path, at: With, cli: Cli) -> None:
    async def begun(store: Store) -> None:
        await leave_in_doubt(store, voting=())
        await leave_in_doubt(store, tag="global_step2", voting=(0,))
        await store.put(job_lease_key(1), encode(Lease(process=ELSEWHERE, count=1, length_s=30.0, writer=writer())))

    at(begun)
    attempt = only_attempt(cli, root, "global_step2")
    assert attempt["job"]["life"] == "unknown"
    assert attempt["next"].startswith("If its job (process ")
    assert "which cannot be checked from here" in cli("explain", root, "global_step2").out


@pytest.mark.usefixtures("job_ended")
def test_in_doubt_while_a_daemon_works_at_it(root: Path, at: With, cli: Cli) -> None:
    async def begun(store: Store) -> None:
        save = await leave_in_doubt(store, voting=(1,))
        key = attempt_lease_key(save.info(0).prefix)
        await store.put(key, encode(Lease(process=ELSEWHERE, count=1, length_s=30.0, writer=writer())))

    at(begun)
    assert only_attempt(cli, root, "global_step1")["next"].startswith("Wait: the daemon (process ")
    [flight] = cli("status", root, "--json").json["flights"]
    assert not flight["orphaned"]


@pytest.mark.usefixtures("job_ended")
def test_recovery_is_named_as_the_one_who_decided(root: Path, at: With, cli: Cli) -> None:
    async def died(store: Store) -> None:
        await leave_in_doubt(store, tag="global_step1", voting=(0, 1))
        await leave_in_doubt(store, tag="global_step2", voting=(1,))
        await recovery(store)

    at(died)
    kept = only_attempt(cli, root, "global_step1")
    assert kept["why"] == "every rank voted yes, and a later start, a daemon or a command committed it"
    lost = only_attempt(cli, root, "global_step2")
    assert lost["why"].startswith("a later start, a daemon or a command aborted it (at fault: rank 0): start 2 has begun")
    assert lost["why"].endswith("rank 0 had not voted")
    assert "If that job had ended, nothing is to be done." in lost["next"]


def test_every_attempt_of_a_tag_newest_first_and_the_removed_one_with_its_reason(root: Path, at: With, cli: Cli) -> None:
    async def again(store: Store) -> None:
        await save_checkpoint(store, tag="best", k=0, n=0)
        await save_checkpoint(store, tag="best", k=1, n=1, failing={0: RuntimeError("boom")})
        await save_checkpoint(store, tag="best", k=2, n=2)

    at(again)
    found = cli("explain", root, "best", "--json").json
    assert found["is_checkpoint"]
    assert [(a["attempt"], a["state"]) for a in found["attempts"]] == [
        ("00000001-2", "committed"),
        ("00000001-1", "aborted"),
        ("00000001-0", "deleted"),
    ]
    assert "removed it at" in found["attempts"][2]["why"]
    assert "the tag was saved again since" in found["attempts"][2]["why"]


def test_a_vote_that_changed_since_the_commit_is_unreadable(root: Path, at: With, cli: Cli) -> None:
    at(save_checkpoint)
    [ballot] = (root / "global_step1/00000001-0").glob("ballot-*")
    data = bytearray(ballot.read_bytes())
    data[-1] ^= 1
    ballot.write_bytes(data)
    attempt = only_attempt(cli, root, "global_step1")
    assert [r["vote"] for r in attempt["ranks"]] == ["yes", "unreadable"]
    assert "the vote of rank 1 is gone or changed since: it does not load" in attempt["why"]


def test_no_such_tag_names_what_is_like_it(root: Path, at: With, cli: Cli) -> None:
    async def saves(store: Store) -> None:
        await save_checkpoint(store, tag="global_step100")
        await save_checkpoint(store, tag="best")

    at(saves)
    answer = cli("explain", root, "global_step10")
    assert (answer.code, answer.out) == (4, "")
    assert "did you mean global_step100?" in answer.err
    assert "checkpoints are: global_step100, best" in cli("explain", root, "zzz").err


def test_only_explain_suggests_a_tag_that_is_no_checkpoint(root: Path, at: With, cli: Cli) -> None:
    async def saves(store: Store) -> None:
        await save_checkpoint(store, tag="global_step1")
        await save_checkpoint(store, tag="best")

    at(saves)
    assert cli("delete", root, "global_step1", "--yes", "--force").code == 0
    assert "did you mean global_step1?" in cli("explain", root, "global_step2").err
    assert "did you mean" not in cli("verify", root, "global_step2").err


def test_no_tag_at_all(root: Path, at: With, cli: Cli) -> None:
    at(begin_start)
    assert "checkpoints are: none" in cli("explain", root, "global_step1").err
    answer = cli("explain", root, "latest")
    assert answer.code == 4
    assert "there is no latest" in answer.err
