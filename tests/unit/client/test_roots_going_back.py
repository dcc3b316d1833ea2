"""Going back to an older checkpoint: loads, readers, listings and later starts agree, and nothing is lost."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpointd.admin import rollback as admin
from checkpointd.admin.rollback import RollbackReport
from checkpointd.commit.log_access import Wanted
from checkpointd.errors import DamagedError, NotFoundError, RootInUseError, StoreError, UsageError
from checkpointd.layout.log_records import LogState, RollbackRecord
from checkpointd.mirror.mirroring import Mirroring, run_once
from checkpointd.pipeline.root.log import RootLog
from checkpointd.report.listing import listing
from checkpointd.report.status import standing
from checkpointd.store import open_store
from checkpointd.store.base import Store
from checkpointd_client import Checkpointer, consolidate, open_checkpoint, rollback
from tests.job_elsewhere import live_job

pytestmark = pytest.mark.usefixtures("short_looks")


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8, 8), float(value))}


def run(root: Path, *steps: int, load: str | None = None, offset: float = 0.0, retention: int | None = None) -> str | None:
    """One start of the job: load, and save `steps`. Returns the tag that was loaded."""
    with Checkpointer(root, retention=retention) as ckpt:
        loaded = ckpt.load(state(-1), load)
        for step in steps:
            ckpt.save(step, state(step + offset)).wait()
        return None if loaded is None else loaded.tag


def states(root: Path) -> dict[str, str]:
    """The rows of a listing: the state of each attempt, by tag, with its start if that is not the first."""
    found = asyncio.run(_ask(root, listing))
    assert not found.latest.note, found.latest.note
    return {f"{row.tag}/{int(row.attempt[:8])}".removesuffix("/1"): row.state for row in found.rows}


async def _ask(root: Path, question: Callable) -> object:  # type: ignore[type-arg]  # of any answer
    async with open_store(root) as store:
        return await question(store)


def taken_by_all(root: Path, out: Path) -> set[str]:
    """What each way to the newest checkpoint takes."""
    found = {(root / "latest").read_text().strip()}
    for tag in (None, "latest"):
        with open_checkpoint(root, tag) as opened:
            found.add(opened.tag)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    found |= {consolidate(root, out / str(tag), tag).tag for tag in (None, "latest")}
    with Checkpointer(root) as ckpt:
        found |= {loaded.tag for tag in (None, "latest") if (loaded := ckpt.load(state(-1), tag)) is not None}
        found.add(str(ckpt.latest()))
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 to 5."""
    run(tmp_path / "root", 1, 2, 3, 4, 5)
    return tmp_path / "root"


def test_it_is_a_function_however_often_it_is_imported() -> None:
    import checkpointd_client

    assert [callable(checkpointd_client.rollback) for _ in range(2)] == [True, True]


LEFT = {"global_step5": "left-behind", "global_step4": "left-behind", "global_step3": "left-behind"}
BEFORE = {"global_step2": "committed", "global_step1": "committed"}


def test_all_go_on_from_there_and_what_came_after_stays(root: Path, tmp_path: Path) -> None:
    report = rollback(root, "global_step2")
    assert [prefix.split("/")[0] for prefix in report.left_behind] == list(LEFT)
    assert taken_by_all(root, tmp_path / "out") == {"global_step2"}
    assert states(root) == LEFT | BEFORE
    assert asyncio.run(_ask(root, standing)).left_behind == tuple(LEFT)  # type: ignore[attr-defined]
    assert run(root, 6) == "global_step2"
    assert taken_by_all(root, tmp_path / "out") == {"global_step6"}
    assert run(root, load="global_step5") == "global_step5", "by name, it can be loaded still"


def test_the_same_steps_saved_again_remove_nothing_of_the_branch_that_was_left(root: Path) -> None:
    rollback(root, "global_step2")
    run(root, 3, 4, offset=0.5)
    again = {name: kind for name, kind in states(root).items() if name.startswith(("global_step3", "global_step4"))}
    assert sorted(again.values()) == ["committed", "committed", "left-behind", "left-behind"]
    with open_checkpoint(root, "global_step3") as opened:
        assert opened.tensor("w")[0, 0] == 3.5
    rollback(root, "global_step4", attempt="00000001-0")
    with open_checkpoint(root) as opened:
        assert (opened.tag, float(opened.tensor("w")[0, 0])) == ("global_step4", 4.0)


def test_candidate_3_a_fallback_takes_nothing_of_a_branch_that_was_left(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not at once, and not when the branch has saved since."""
    rollback(root, "global_step2")
    damage(root, "global_step2")
    assert run(root) == "global_step1"
    run(root, 6, load="global_step1")
    damage(root, "global_step6")
    assert run(root) == "global_step1"
    damage(root, "global_step1")
    with pytest.raises(DamagedError, match="no whole checkpoint is left"):
        run(root)
    with pytest.raises(DamagedError):
        open_checkpoint(root)


def damage(root: Path, tag: str) -> None:
    for path in (root / tag).rglob("*.index"):
        path.write_bytes(b"damaged")


def test_going_back_is_undone_by_going_back_again(root: Path, tmp_path: Path) -> None:
    rollback(root, "global_step2")
    run(root, 13)
    report = rollback(root, "global_step4")
    assert [prefix.split("/")[0] for prefix in report.left_behind] == ["global_step13"]
    assert [prefix.split("/")[0] for prefix in report.current] == ["global_step4", "global_step3"]
    assert taken_by_all(root, tmp_path / "out") == {"global_step4"}
    rollback(root, "global_step13")
    kinds = states(root)
    assert kinds.pop("global_step13/3") == "committed"
    assert kinds == LEFT | BEFORE


def test_branch_3_a_load_of_an_older_one_leaves_the_branch_at_its_first_commit(root: Path, tmp_path: Path) -> None:
    with Checkpointer(root) as ckpt:
        assert ckpt.load(state(-1), "global_step2") is not None
        assert {row.tag for row in ckpt.list()} == {*LEFT, *BEFORE}
        assert set(states(root).values()) == {"committed"}
        with pytest.raises(UsageError):
            ckpt.save(3, {"w": object()})
        assert set(states(root).values()) == {"committed"}, "a save that fails changes nothing"
        ckpt.save(6, state(6)).wait()
        ckpt.save(7, state(7)).wait()
        assert {name: kind for name, kind in states(root).items() if name in LEFT} == LEFT
    assert taken_by_all(root, tmp_path / "out") == {"global_step7"}
    damage(root, "global_step7")
    damage(root, "global_step6")
    assert run(root) == "global_step2"


def test_what_fails_at_the_record_changes_nothing_and_can_be_repeated(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(root)
    append = RootLog.append

    async def failing(self: RootLog, wanted: Wanted) -> LogState:
        if any(isinstance(record, RollbackRecord) for record in wanted(self.state)):
            raise StoreError("the storage is gone")
        return await append(self, wanted)

    with monkeypatch.context() as patch:
        patch.setattr(RootLog, "append", failing)
        with pytest.raises(StoreError):
            rollback(root, "global_step2")
    assert run(root) == "global_step5"
    rollback(root, "global_step2")
    assert states(root) == LEFT | BEFORE


def test_nothing_is_removed_by_going_back(root: Path) -> None:
    before = {path: path.read_bytes() for path in root.glob("global_step*/**/*") if path.is_file()}
    rollback(root, "global_step1")
    after = {path: path.read_bytes() for path in root.glob("global_step*/**/*") if path.is_file()}
    assert after == before


def test_retention_removes_by_its_rule_alone_and_keeps_the_current_branch(root: Path) -> None:
    rollback(root, "global_step2")
    run(root, 13, retention=3)
    kept = states(root)
    assert {"global_step13/3", "global_step2", "global_step1"} <= kept.keys(), "the last three of the branch"
    assert {"global_step5", "global_step4"} <= kept.keys(), "the last three of all"
    assert "global_step3" not in kept


def test_a_log_that_is_made_again_keeps_the_branches(root: Path) -> None:
    rollback(root, "global_step2")
    newest = max((root / "log").glob("*.json"))
    newest.with_name(f"{int(newest.stem) + 1:012d}.json").write_bytes(b"damaged")
    assert run(root) == "global_step2"
    assert states(root) == LEFT | BEFORE


def test_a_mirror_follows_both_ways(root: Path, tmp_path: Path) -> None:
    async def mirror() -> None:
        async with open_store(root) as origin, open_store(tmp_path / "mirror") as there:
            await run_once(Mirroring(origin, there), [])

    asyncio.run(mirror())
    rollback(root, "global_step2")
    asyncio.run(mirror())
    assert states(tmp_path / "mirror") == LEFT | BEFORE
    assert (tmp_path / "mirror" / "latest").read_text() == "global_step2\n"
    with open_checkpoint(tmp_path / "mirror") as opened:
        assert opened.tag == "global_step2"
    rollback(root, "global_step5")
    asyncio.run(mirror())
    assert set(states(tmp_path / "mirror").values()) == {"committed"}
    assert (tmp_path / "mirror" / "latest").read_text() == "global_step5\n"


def test_a_mirror_that_begins_later_takes_the_current_branch(root: Path, tmp_path: Path) -> None:
    rollback(root, "global_step2")

    async def mirror() -> None:
        async with open_store(root) as origin, open_store(tmp_path / "mirror") as there:
            await run_once(Mirroring(origin, there), [])

    asyncio.run(mirror())
    with open_checkpoint(tmp_path / "mirror") as opened:
        assert opened.tag == "global_step2" == (tmp_path / "mirror" / "latest").read_text().strip()


# --- an edit of `latest` ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["\n", ""])
def test_an_edit_of_latest_is_answered_and_all_take_the_newest(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    (root / "latest").write_text(f"global_step2{ending}")
    for tag in (None, "latest"):
        with open_checkpoint(root, tag) as opened:
            assert opened.tag == "global_step5"
    found = asyncio.run(_ask(root, listing)).latest  # type: ignore[attr-defined]
    assert "An edit of latest alone changes no load" in found.note
    assert f"checkpointd rollback {root} global_step2" in found.note
    caplog.set_level(logging.WARNING, "checkpointd")
    assert run(root) == "global_step5"
    said = [r.getMessage() for r in caplog.records if "latest named global_step2; it names global_step5 now" in r.getMessage()]
    assert len(said) == 1
    assert f"checkpointd rollback {root} global_step2" in said[0]
    assert taken_by_all(root, tmp_path / "out") == {"global_step5"}


def test_an_edit_that_names_what_was_left_is_answered_too(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    rollback(root, "global_step2")
    (root / "latest").write_text("global_step5\n")
    found = asyncio.run(_ask(root, listing)).latest  # type: ignore[attr-defined]
    assert "latest names global_step5, although loads take global_step2" in found.note
    with open_checkpoint(root, "latest") as opened:
        assert opened.tag == "global_step2"
    assert run(root) == "global_step2"
    assert (root / "latest").read_text() == "global_step2\n"


# --- refusals --------------------------------------------------------------------------------------------------------------


def test_it_is_refused_while_a_job_runs_and_for_what_is_no_checkpoint(root: Path) -> None:
    with Checkpointer(root), pytest.raises(UsageError, match="another Checkpointer of this process uses"):
        rollback(root, "global_step2")
    with live_job(root, "train"), pytest.raises(RootInUseError, match=r"checkpointd rollback .* global_step2 --take-over"):
        rollback(root, "global_step2")
    with pytest.raises(NotFoundError, match=r"global_step9 at .* is not a checkpoint"):
        rollback(root, "global_step9")
    with pytest.raises(UsageError, match="there is no attempt 'x'"):
        rollback(root, "global_step2", attempt="x")
    with pytest.raises(NotFoundError, match="is not a checkpoint"):
        rollback(root, "global_step2", attempt="00000007-0")
    assert set(states(root).values()) == {"committed"}


def test_what_is_planned_changes_nothing(root: Path) -> None:
    async def plan(store: Store) -> RollbackReport:
        return await admin.rollback(store, "global_step2", dry_run=True)

    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    planned = asyncio.run(_ask(root, plan))
    assert isinstance(planned, RollbackReport)
    assert [prefix.split("/")[0] for prefix in planned.left_behind] == list(LEFT)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
