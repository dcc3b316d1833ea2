"""Which checkpoints are left behind, and which are current again, when training goes on from an older one."""

from __future__ import annotations

from checkpointd.commit.branches import BranchChange, change_of, training
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.layout.manifest import Branches
from tests.unit.commit.log_histories import commit


def logged(
    start: int, k: int, *, left: Branches = (), left_behind: bool = False, removed: bool = False, training: str = ""
) -> LoggedAttempt:
    attempt = f"tag{start}-{k}/{start:08d}-{k}"
    return LoggedAttempt(
        prefix=attempt,
        n=k,
        status="removed" if removed else "checkpoint",
        committed=commit(attempt, left=left, shown_at=training and f"{training}checkpoint-{start}-{k}"),
        left_behind=left_behind,
    )


def test_what_is_left_is_told_newest_first() -> None:
    views = [logged(1, k) for k in range(4)]
    assert change_of(views, views[1], beyond=True) == BranchChange((views[3].prefix, views[2].prefix))
    assert change_of(views, views[1], beyond=False) == BranchChange()


def test_a_branch_that_was_left_is_current_again_when_training_goes_on_from_it() -> None:
    views = [
        logged(1, 0),
        logged(1, 1, left_behind=True),
        logged(1, 2, left_behind=True),
        logged(2, 0, left=(((1, 0), (2, 0)),)),
    ]
    head = logged(3, 0, left=(((1, 2), (3, 0)),))
    assert change_of([*views, head], head, beyond=False) == BranchChange(
        left=(views[3].prefix,), current=(views[2].prefix, views[1].prefix)
    )


def test_it_is_current_again_also_if_the_checkpoint_from_which_training_goes_on_was_removed_since() -> None:
    views = [logged(1, 0), logged(1, 1, left_behind=True), logged(1, 2, left_behind=True, removed=True)]
    head = logged(3, 0, left=(((1, 2), (3, 0)),))
    assert change_of([*views, head], head, beyond=False) == BranchChange(current=(views[1].prefix,))


def test_trainings_that_share_a_root_do_not_leave_each_others_checkpoints() -> None:
    views = [logged(1, 0, training="runs/a/"), logged(2, 0, training="runs/b/"), logged(3, 0)]
    assert change_of(views, views[0], beyond=True) == BranchChange()
    assert [training(one.commit) for one in views if one.committed] == ["runs/a", "runs/b", ""]


def test_what_was_left_stays_so_if_training_goes_on_from_a_checkpoint_that_was_not() -> None:
    views = [logged(1, 0), logged(1, 1, left_behind=True), logged(2, 0, left=(((1, 0), (2, 0)),))]
    assert change_of(views, views[2], beyond=False) == BranchChange()
    head = logged(2, 1)
    assert change_of([*views, head], head, beyond=False) == BranchChange()
