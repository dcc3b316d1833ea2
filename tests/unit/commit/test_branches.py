"""Which checkpoints are left behind: as the rule says that decided it from the objects of a root."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from checkpointd.commit.branches import BranchChange, change_of, training
from checkpointd.commit.facts import Order
from checkpointd.layout.files import training_of
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt, LogState
from checkpointd.layout.manifest import Branches
from tests.unit.commit.log_histories import after, begin, commit, remove, rollback, saved

TRAININGS = ("", "runs/a/", "runs/b/")


def logged(
    start: int, k: int, *, left: Branches = (), left_behind: bool = False, removed: bool = False, training: str = ""
) -> LoggedAttempt:
    attempt = f"tag{start}-{k}/{start:08d}-{k}"
    return LoggedAttempt(
        attempt=attempt,
        n=k,
        status="removed" if removed else "checkpoint",
        commit=commit(attempt, left=left, shown_at=training and f"{training}checkpoint-{start}-{k}"),
        left_behind=left_behind,
    )


def order_of(one: LoggedAttempt) -> Order:
    return one.id.start, one.id.k


def by_the_objects(views: Iterable[LoggedAttempt], head: LoggedAttempt, *, beyond: bool) -> BranchChange:
    """The rule as it was written for the objects of attempts, of which each tells its own outcome and whether it is left."""

    def training_at(one: LoggedAttempt) -> str:
        return "" if one.commit is None else training_of(one.commit.shown_at, one.commit.unfinished)

    views, gaps = list(views), () if head.commit is None else head.commit.left
    base = order_of(head) if beyond or not gaps else gaps[-1][0]
    regains = any(view.left_behind and view.commit is not None and order_of(view) == base for view in views)
    own = ((order_of(view), view) for view in views if view.status == "checkpoint" and training_at(view) == training_at(head))
    left, current = list[str](), list[str]()
    for order, view in sorted(own, key=lambda pair: pair[0], reverse=True):
        is_head = view.attempt == head.attempt
        if order > order_of(head) and not beyond and not is_head:
            continue
        is_left = not is_head and (order > order_of(head) or any(since < order < until for since, until in gaps))
        if is_left and not view.left_behind:
            left.append(view.attempt)
        elif view.left_behind and not is_left and regains and order <= base:
            current.append(view.attempt)
    return BranchChange(tuple(left), tuple(current))


orders = st.tuples(st.integers(1, 3), st.integers(0, 4))


@st.composite
def attempts(draw: st.DrawFn) -> list[LoggedAttempt]:
    """Attempts with any gaps, of up to three trainings, in any order; each order of a commit is there once."""
    found = list[LoggedAttempt]()
    for start, k in draw(st.permutations(draw(st.lists(orders, min_size=2, max_size=12, unique=True)))):
        gaps = draw(st.lists(st.tuples(orders, orders), max_size=2).map(tuple))
        left_behind, removed = draw(st.booleans()), draw(st.integers(0, 3)) == 0
        own = draw(st.sampled_from(TRAININGS)) if draw(st.booleans()) else ""
        found.append(logged(start, k, left=gaps, left_behind=left_behind, removed=removed, training=own))
    return found


@given(attempts(), st.integers(0, 11), st.booleans())
def test_the_log_decides_as_the_objects_did(views: list[LoggedAttempt], number: int, beyond: bool) -> None:
    for one in views:
        assert change_of(views, one, beyond=beyond) == by_the_objects(views, one, beyond=beyond)
    undecided = LoggedAttempt(attempt="x/00000002-9", status="undecided")
    head = views[number % len(views)]
    assert change_of([*views, undecided], head, beyond=beyond) == by_the_objects(views, head, beyond=beyond)


def test_what_is_left_is_told_newest_first() -> None:
    views = [logged(1, k) for k in range(4)]
    assert change_of(views, views[1], beyond=True) == BranchChange((views[3].attempt, views[2].attempt))
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
        left=(views[3].attempt,), current=(views[2].attempt, views[1].attempt)
    )


def test_it_is_current_again_also_if_the_checkpoint_from_which_training_goes_on_was_removed_since() -> None:
    views = [logged(1, 0), logged(1, 1, left_behind=True), logged(1, 2, left_behind=True, removed=True)]
    head = logged(3, 0, left=(((1, 2), (3, 0)),))
    assert change_of([*views, head], head, beyond=False) == BranchChange(current=(views[1].attempt,))


def test_trainings_that_share_a_root_do_not_leave_each_others_checkpoints() -> None:
    views = [logged(1, 0, training="runs/a/"), logged(2, 0, training="runs/b/"), logged(3, 0)]
    assert change_of(views, views[0], beyond=True) == BranchChange()
    assert [training(one.commit) for one in views if one.commit is not None] == ["runs/a", "runs/b", ""]


# --- the history of a log ---------------------------------------------------------------------------------------------


class ByTheObjects:
    """A root whose records say what is left behind: each commit and each rollback changes them, as the rule says."""

    def __init__(self) -> None:
        self.views: dict[str, LoggedAttempt] = {}

    def leave(self, head: LoggedAttempt, *, beyond: bool) -> None:
        change = by_the_objects(self.views.values(), head, beyond=beyond)
        for names, is_left in ((change.left, True), (change.current, False)):
            for name in names:
                known = self.views[name]
                self.views[name] = LoggedAttempt(attempt=name, status=known.status, commit=known.commit, left_behind=is_left)

    def commits(self, record: CommitRecord) -> None:
        head = LoggedAttempt(attempt=record.attempt, status="checkpoint", commit=record)
        self.views[record.attempt] = head
        self.leave(head, beyond=False)

    def removes(self, name: str) -> None:
        known = self.views[name]
        self.views[name] = LoggedAttempt(attempt=name, status="removed", commit=known.commit, left_behind=known.left_behind)

    @property
    def left_behind(self) -> set[str]:
        return {name for name, one in self.views.items() if one.left_behind}


steps = st.lists(
    st.tuples(st.sampled_from(["save", "save", "save", "go back", "roll back", "remove"]), st.integers(0, 9)), max_size=30
)


@given(steps)
def test_a_job_that_goes_back_leaves_what_the_objects_said(chosen: list[tuple[str, int]]) -> None:
    """One training saves, goes on from an older checkpoint in a new start, rolls back, and removes."""
    state, objects = after(LogState(), begin(1)), ByTheObjects()
    k, gaps = 0, ()
    for step, number in chosen:
        checkpoints = [one for one in state.attempts.values() if one.status == "checkpoint"]
        if step == "save":
            name = f"tag/{state.start:08d}-{k}"
            record = commit(name, left=gaps)
            state, k = after(state, saved(name, left=gaps)), k + 1
            objects.commits(record)
        elif checkpoints:
            one = checkpoints[number % len(checkpoints)]
            if step == "remove":
                state = after(state, remove(one.attempt))
                objects.removes(one.attempt)
                continue
            if step == "roll back":
                state = after(state, rollback(one.attempt))
                objects.leave(objects.views[one.attempt], beyond=True)
            state, k = after(state, begin(state.start + 1)), 0
            assert one.commit is not None
            gaps = (*one.commit.left, (order_of(one), (state.start, 0)))
        assert {name for name, one in state.attempts.items() if one.left_behind} == objects.left_behind
