"""Branches that are left: what training does with the checkpoints after the one to which it goes back.

A checkpoint of a branch that was left has a record (`left-behind`), so every reader sees it without knowing the history. Each
outcome tells from which checkpoints its own does not descend (`Outcome.left`), so the records can be made again after a crash.

Invariants
  BRANCH-1  Going back leaves every checkpoint where it is: it puts and removes records, and moves `latest`.
  BRANCH-2  The newest checkpoints are left behind first, and the head of the current branch is the last that is current again.
      So a crash leaves a root at which a load finds a checkpoint of one branch, and the same can be done again.
  BRANCH-3  A save that goes on from an older checkpoint leaves the branch only by its commit: an attempt that aborts changes
      nothing. The coordinator puts the records before it reports the commit, and otherwise the next start does.
  BRANCH-4  If several trainings save in directories below one root, each has branches of its own (`training_of`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from checkpointd.commit.facts import Order
from checkpointd.errors import CheckpointdError, NotFoundError, UnreadableError
from checkpointd.layout.files import training_of
from checkpointd.layout.keys import LEFT_BEHIND, AttemptId
from checkpointd.layout.manifest import Branches, LeftBehind, Outcome, encode
from checkpointd.pipeline.identity import user, writer
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.candidates import order_at_most
from checkpointd.pipeline.root.catalog import AttemptView, Checkpoint
from checkpointd.pipeline.root.catalog_log import CatalogLog, record_of
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience, PatientStore

log = logging.getLogger("checkpointd")

_STATES = ("committed", "damaged", "unreadable")


@dataclass(frozen=True, slots=True)
class Branching:
    """The checkpoints (`<tag>/<attempt>`) that are left behind from now on, and those that are no longer, newest first."""

    left: tuple[str, ...] = ()
    current: tuple[str, ...] = ()


def planned(views: Collection[AttemptView], head: Outcome, *, beyond: bool) -> Branching:
    """What changes if `head` is the newest checkpoint of the current branch. Changes nothing. `beyond`: what came after `head`
    is left behind as well; otherwise nothing is said of it, since it goes on from there.

    If training goes on from a checkpoint of a branch that was left, that one and those before it are current again.
    """
    base = head.order if beyond or not head.left else head.left[-1][0]
    regains = any(v.left_behind and v.outcome is not None and v.outcome.order == base for v in views)
    training = training_of(head.shown_at, head.unfinished)
    own = ((_order(v), v) for v in views if v.state in _STATES and _training(v) == training)
    found = sorted(own, key=lambda pair: pair[0], reverse=True)
    left, current = list[str](), list[str]()
    for order, view in found:
        is_head = view.prefix == head.prefix
        if order > head.order and not beyond and not is_head:
            continue
        is_left = not is_head and (order > head.order or any(since < order < until for since, until in head.left))
        if is_left and not view.left_behind:
            left.append(view.prefix)
        elif view.left_behind and not is_left and regains and order <= base:
            current.append(view.prefix)
    return Branching(tuple(left), tuple(current))


def _order(view: AttemptView) -> Order:
    return (view.attempt.start, sys.maxsize) if view.outcome is None else view.outcome.order


def _training(view: AttemptView) -> str:
    return "" if view.outcome is None else training_of(view.outcome.shown_at, view.outcome.unfinished)


async def leave_behind(store: Store, head: Outcome, *, beyond: bool = False, known: CatalogLog | None = None) -> Branching:
    """Let the records say that `head` is the newest checkpoint of the current branch, as `planned`. Returns what has changed.
    Raises StoreError; then some records may have changed (BRANCH-2).
    """
    change = planned(await catalog.scan(store, known), head, beyond=beyond)
    if change.left:
        record = encode(LeftBehind(by=head.prefix, user=user(), writer=writer()))
        for prefix in change.left:
            await store.put_if_absent(f"{prefix}/{LEFT_BEHIND}", record)
    for prefix in reversed(change.current):
        try:
            await store.delete(f"{prefix}/{LEFT_BEHIND}")
        except NotFoundError:
            log.debug("%s has no record any more", prefix)
    records = [record_of("left-behind", *prefix.rsplit("/", 1)) for prefix in change.left]
    records += [record_of("current", *prefix.rsplit("/", 1)) for prefix in change.current]
    if records:
        await (known or CatalogLog(store)).append(*records)
        log.info(
            "%s is the newest checkpoint of the current branch at %s. Left behind: %d%s",
            head.tag,
            store.url,
            len(change.left),
            f". No longer left behind: {len(change.current)}" if change.current else "",
        )
    return change


def newest_of_trainings(newest_first: Iterable[Checkpoint]) -> list[Checkpoint]:
    """The newest checkpoint of each training (BRANCH-4)."""
    newest: dict[str, Checkpoint] = {}
    for one in newest_first:
        if one.may_be_latest:
            newest.setdefault(training_of(one.outcome.shown_at, one.outcome.unfinished), one)
    return list(newest.values())


async def leave_by_commit(store: Store, head: Outcome) -> None:
    """The same after the commit `head`. A failure is logged only, since the next start repairs it (BRANCH-3)."""
    try:
        await leave_behind(store, head)
    except CheckpointdError as error:
        log.error(
            "%s: which checkpoints its branch has left cannot be recorded: %s; the next start does it", head.prefix, error
        )


async def after(store: Store, patience: Patience, tag: str, attempt: AttemptId, begins: Order) -> tuple[str, Branches]:
    """The training of this checkpoint, and `Outcome.left` of the saves that go on from it. `begins`: the order of the first of
    them. Waits for an outcome that cannot be read only if it may be of a newer checkpoint, and the answer depends on it.
    """
    own = (await catalog.view(PatientStore(store, patience), tag, attempt)).outcome
    if own is None or own.outcome != "commit":
        return "", ()  # it lies in memory or in a spool, and is the newest
    training = training_of(own.shown_at, own.unfinished)
    with patience.looks() as looks:
        while True:
            try:
                is_back = await _is_any_between(store, own, begins, training)
                return training, (*own.left, (own.order, begins)) if is_back else own.left
            except UnreadableError as error:
                await looks.unreadable(error)


async def _is_any_between(store: Store, own: Outcome, until: Order, training: str) -> bool:
    """Whether a checkpoint of its `training` that asked for `latest` lies between `own` and the order `until`. Raises
    UnreadableError if that depends on an outcome that cannot be read now.
    """
    views = [view for view in await catalog.scan(store) if _training(view) == training]
    if any(c.outcome.save_latest and own.order < c.outcome.order < until for c in catalog.commits_of(views)):
        return True
    for view in views:
        fault = catalog.fault_of(view)
        if isinstance(fault, UnreadableError) and await order_at_most(store, view) > own.order:
            raise fault
    return False
