"""The candidates of a load, newest first, and those that were passed over because they are damaged.

Invariants
  CANDIDATE-1  A checkpoint that may be newer than the candidate and is damaged is named, never left out in silence.
      So is the newest one where it is gone while `latest` still names it, unless a mark says that it was removed on purpose.
      It is not gone where a symbolic link stands at its tag: LinkError is raised, since what the link leads to may be it.
  CANDIDATE-2  Nothing that may be newer is passed over because it cannot be read now, or because one look did not find it: it
      is looked at again, and UnreadableError is raised where that does not help.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from checkpointd.commands import command
from checkpointd.commit.facts import Order
from checkpointd.errors import DamagedError, NotFoundError, UnreadableError
from checkpointd.layout.keys import LATEST, OUTCOME, PASSED_OVER, vote_name
from checkpointd.layout.manifest import PassedOver, encode
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog import AttemptView, Checkpoint
from checkpointd.pipeline.root.identity import writer
from checkpointd.pipeline.root.marks import removed_by_hand
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience

log = logging.getLogger("checkpointd")


@dataclass(frozen=True, slots=True)
class Passed:
    """Something that cannot be loaded, and the attempt that it is about; none where a pointer names what is not there."""

    error: DamagedError
    prefix: str | None


@dataclass(frozen=True, slots=True)
class Candidates:
    """The checkpoints that asked for `latest`, newest first, and the damage met on the way to them.

    What is `passed_over` may be newer than all of them; `other` is what is wrong with older ones, or a pointer to
    what was removed on purpose.
    `known` are all checkpoints, also those that did not ask.
    """

    checkpoints: tuple[Checkpoint, ...]
    known: tuple[Checkpoint, ...]
    passed_over: tuple[Passed, ...]
    other: tuple[DamagedError | UnreadableError, ...]


@dataclass(frozen=True, slots=True)
class _CatalogLook:
    found: Candidates
    absent: str = ""
    """What should be there and was not seen by this look."""
    lost: DamagedError | None = None
    """The same where nobody has removed it on purpose."""


async def candidates(store: Store, patience: Patience) -> Candidates:
    """What there is to load at `store` without naming a tag. UnreadableError where that cannot be told now, LinkError where a
    link stands at the tag that `latest` names.
    """
    with patience.looks() as looks:
        while True:
            try:
                look = await _look(store)
                if not look.absent or await looks.is_lost(look.absent):
                    return look.found
            except UnreadableError as error:
                await looks.unreadable(error)


async def lost_newest(store: Store, patience: Patience) -> DamagedError | None:
    """What says that the checkpoint which `latest` names is gone; None where it is there, or was removed on purpose."""
    with patience.looks() as looks:
        while True:
            look = await _look(store)
            if not look.absent or await looks.is_lost(look.absent):
                return look.lost


async def listed(store: Store, patience: Patience) -> list[Checkpoint]:
    """All checkpoints, newest first; what is damaged and may be newer is logged (CANDIDATE-1)."""
    found = await candidates(store, patience)
    for passed in found.passed_over:
        log.error("%s. It may be newer than all that is listed", passed.error)
    return [*found.known]


async def find(store: Store, tag: str, patience: Patience) -> Checkpoint:
    """The same for one tag, which somebody named: `catalog.find`, looked at again where it cannot be told."""
    with patience.looks() as looks:
        while True:
            try:
                return await catalog.find(store, tag)
            except UnreadableError as error:
                await looks.unreadable(error)
            except NotFoundError as error:
                if await looks.is_lost(str(error)):
                    raise


async def _look(store: Store) -> _CatalogLook:
    # First: what it names was committed before, so the scan must find it.
    pointer = await _pointer(store)
    attempts = await catalog.scan(store)
    known = catalog.checkpoints_of(attempts)
    # What the pointer names counts, too, where its tag was saved again without asking for it. What a tag held before that is
    # still there, since it alone was verified, comes after what has replaced it.
    found = tuple(c for c in catalog.commits_of(attempts) if c.outcome.save_latest or (c.tag == pointer and c in known))
    over: list[Passed] = []
    other: list[DamagedError | UnreadableError] = []
    for attempt in attempts:
        fault = catalog.fault_of(attempt)
        if fault is None:
            continue
        older = found and await _order_at_most(store, attempt) < found[0].outcome.order
        if older:
            other.append(fault)
        elif isinstance(fault, DamagedError):
            over.append(Passed(fault, attempt.prefix))
        else:
            raise fault
    lost = None if pointer is None or pointer in {c.tag for c in known} else await _missing(store, pointer, attempts)
    if lost is not None and await _pointer(store) != pointer:
        return await _look(store)  # it has moved on, and what it named has gone since
    is_removed = lost is not None and await removed_by_hand(store, [a for a in attempts if a.tag == pointer])
    if lost is not None and is_removed:
        other.append(lost)
    elif lost is not None:
        over.append(Passed(lost, None))
    there = Candidates(found, tuple(known), tuple(over), tuple(other))
    return _CatalogLook(there, str(lost or ""), None if is_removed else lost)


async def _pointer(store: Store) -> str | None:
    try:
        return await catalog.latest(store)
    except DamagedError:
        return None  # nothing is loaded by it, and the next start sets it right


async def _order_at_most(store: Store, attempt: AttemptView) -> Order:
    """The order of an attempt whose outcome is not known: rank 0's vote knows it; without, the last of its epoch."""
    try:
        vote = await catalog.read_vote(store, f"{attempt.prefix}/{vote_name(0)}")
    except (NotFoundError, DamagedError, UnreadableError):
        return (attempt.attempt.epoch, sys.maxsize)
    return (attempt.attempt.epoch, vote.n)


async def _missing(store: Store, tag: str, attempts: Sequence[AttemptView]) -> DamagedError | None:
    """What says that the checkpoint `tag`, which `latest` names, is not there; None where its damage is named already."""
    named = [attempt for attempt in attempts if attempt.tag == tag]
    if any(attempt.state == "damaged" for attempt in named):
        return None
    why = f"it is gone: somebody removed {tag}, or the storage has lost it, or latest is damaged"
    if not named:
        await store.list(tag)  # raises LinkError where a link stands there, which the listing of the root left out
    else:
        try:
            why = f"{(await catalog.find(store, tag)).prefix} was committed only now"
        except (NotFoundError, DamagedError) as error:
            why = str(error)
    return DamagedError(
        f"latest names {tag}, which cannot be loaded: {why}. Bring it back from a copy of the root, or accept the loss: "
        f"{command('recover', store.url)} lets latest name the newest that is left, and removes it where none is",
        key=LATEST,
    )


async def note_passed_over(store: Store, prefix: str, why: str) -> None:
    """Leave a record in the attempt at `prefix` that load() went past it, so that retention and gc never remove it.

    The first record stands. Nothing is put where the attempt has no outcome any more, as after somebody removed it.
    """
    if any(entry.name == OUTCOME for entry in await store.list(prefix)):
        await store.put_if_absent(f"{prefix}/{PASSED_OVER}", encode(PassedOver(why=why, writer=writer())))


async def note_tag_passed_over(store: Store, tag: str, why: str) -> None:
    """The same for the attempt that a load of `tag` by name would take."""
    attempts = [a for a in await catalog.attempts_of(store, tag) if a.state in ("committed", "damaged")]
    if attempts:
        await note_passed_over(store, attempts[-1].prefix, why)
