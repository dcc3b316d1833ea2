"""Branches: which checkpoints are left behind when training goes on from an older one, and which checkpoint is the newest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from checkpointd.layout.files import training_of
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt, LogState


@dataclass(frozen=True, slots=True)
class BranchChange:
    """The checkpoints (`<tag>/<attempt>`) that are left behind from now on, and those that are no longer, newest first."""

    left: tuple[str, ...] = ()
    current: tuple[str, ...] = ()


def training(commit: CommitRecord) -> str:
    """The training of the checkpoint: those that share a root each have branches of their own."""
    return training_of(commit.shown_at, commit.unfinished)


def change_of(attempts: Iterable[LoggedAttempt], head: LoggedAttempt, *, beyond: bool) -> BranchChange:
    """What changes if the checkpoint `head` is the newest of the current branch. `beyond`: what came after `head` is left
    behind as well; otherwise nothing is said of it, since it goes on from there.

    If training goes on from a checkpoint of a branch that was left, that one and those before it are current again.
    """
    order, gaps = head.order, head.commit.left
    base = order if beyond or not gaps else gaps[-1][0]
    alike = [one for one in attempts if one.committed and training(one.commit) == training(head.commit)]
    alike.sort(key=attrgetter("order"), reverse=True)
    regains = any(one.left_behind and one.order == base for one in alike)  # it may have been removed since
    left, current = list[str](), list[str]()
    for one in alike:
        if one.status != "checkpoint":
            continue
        at = one.order
        if at > order and not beyond:
            continue
        is_left = at != order and (at > order or any(since < at < until for since, until in gaps))
        if is_left and not one.left_behind:
            left.append(one.prefix)
        elif one.left_behind and not is_left and regains and at <= base:
            current.append(one.prefix)
    return BranchChange(tuple(left), tuple(current))


def newest_of(state: LogState) -> LoggedAttempt | None:
    """The checkpoint that `latest` should name: the newest whose save asked for it, and of no branch that was left."""
    newest = _newest_head(state)
    if newest is None or newest.may_be_latest:
        return newest
    return max((one for one in state.attempts.values() if one.may_be_latest), key=attrgetter("order"), default=None)


def base_in(state: LogState) -> str:
    """The checkpoint (`<tag>/<attempt>`) to which a save refers that is announced now: the newest without damage, and of no
    branch that was left. Empty if there is none.
    """
    newest = _newest_head(state)
    if newest is not None and newest.damaged:
        current = (
            one for one in state.attempts.values() if one.status == "checkpoint" and not (one.damaged or one.left_behind)
        )
        newest = max(current, key=attrgetter("order"), default=None)
    return "" if newest is None else newest.prefix


def _newest_head(state: LogState) -> LoggedAttempt | None:
    """The newest checkpoint of no branch that was left. It is found without a look at all attempts of a long history."""
    return max((state.attempts[name] for name in state.heads.values()), key=attrgetter("order"), default=None)


def commits_of(attempts: Iterable[LoggedAttempt]) -> list[LoggedAttempt]:
    """All checkpoints among `attempts`, newest first, and those of branches that were left after all others. A tag that was
    saved again may have several.
    """
    found = sorted((one for one in attempts if one.status == "checkpoint"), key=attrgetter("order"), reverse=True)
    found.sort(key=attrgetter("left_behind"))
    return found
