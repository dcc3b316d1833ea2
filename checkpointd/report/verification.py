"""Verifies one tag or a whole root, and reports the result tag by tag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError, StoreError, UnreadableError
from checkpointd.layout.keys import LATEST, OUTCOME
from checkpointd.layout.manifest import Outcome
from checkpointd.pipeline.read.verify import Damage, record_verdict, verify, verify_proved
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog import AttemptView, Checkpoint
from checkpointd.pipeline.root.wholeness import Lost, Wholeness, directory_of
from checkpointd.report.latest import Pointer
from checkpointd.report.votes import rank_words, votes_of
from checkpointd.store.base import Store

PATIENCE = LoadConfig(retry_s=3.0)
"""Reads that fail are tried again for a short time only, because a person waits for the answer."""


class TagVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one checkpoint. `removed`: it was removed while it was read, or somebody removed the directory that showed
    its files. `unreadable`: no damage was found, but some objects could not be read, so nobody knows whether it is whole.
    """

    tag: str
    attempt: str
    state: Literal["whole", "damaged", "unreadable", "removed", "copied"]
    bytes_read: int
    damage: tuple[Damage, ...] = ()
    unreadable: tuple[Damage, ...] = ()
    lost: tuple[Lost, ...] = ()
    """What is missing: objects, which cause some of the damage, or the directory of a checkpoint that was removed by hand."""
    copy: str = ""
    """What it is a copy of, and what to do, if somebody copied or renamed the directory of a tag."""
    recorded: bool = False
    """Whether the result was recorded beside the checkpoint."""
    record_error: str = ""
    """Why the storage did not take the record that was asked for."""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Every checkpoint that was read, newest first. `latest` is None if only one tag was asked for."""

    root: str
    checkpoints: tuple[TagVerdict, ...]
    latest: Pointer | None = None

    @property
    def damage(self) -> list[Damage]:
        """All damage, including that of `latest`."""
        found = [damage for verdict in self.checkpoints for damage in verdict.damage]
        if self.latest and self.latest.damage:
            found.append(Damage(code=DamagedError.__name__, message=self.latest.damage, key=LATEST))
        return found

    @property
    def unreadable(self) -> list[Damage]:
        """All failures to read, including that of `latest`."""
        found = [one for verdict in self.checkpoints for one in verdict.unreadable]
        if self.latest and self.latest.unreadable:
            found.append(Damage(code=UnreadableError.__name__, message=self.latest.unreadable, key=LATEST))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One checkpoint to verify and about how many bytes it has. `checkpoint` is None if its outcome cannot be read."""

    view: AttemptView
    checkpoint: Checkpoint | None
    nbytes: int

    @property
    def tag(self) -> str:
        return self.view.tag


async def tasks(store: Store, tag: str | None) -> list[Task]:
    """The checkpoints to verify, newest first: all, or only that of `tag`. NotFoundError if `tag` has none."""
    if tag is None:
        attempts = await catalog.look_everywhere(store)
        vanished = await catalog.vanished(store)
    else:
        vanished = []
        attempts = await catalog.attempts_of(store, tag)
        if not any(catalog.fault_of(attempt) for attempt in attempts if not attempt.is_copy):
            await catalog.find(store, tag)
    found = [Task(view=a, checkpoint=None, nbytes=0) for a in attempts if catalog.fault_of(a)]
    found += [Task(view=v, checkpoint=c, nbytes=0) for v, c in zip(vanished, catalog.commits_of(vanished), strict=True)]
    views = {(a.tag, a.attempt): a for a in attempts}
    for checkpoint in catalog.checkpoints_of(attempts):
        view = views[checkpoint.tag, checkpoint.attempt]
        words = await rank_words(store, view)
        found.append(Task(view=view, checkpoint=checkpoint, nbytes=words.stored_bytes() or 0))
    return found


async def verified(
    store: Store,
    todo: list[Task],
    *,
    record: bool = False,
    config: LoadConfig | None = None,
    on_task: Callable[[Task], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
    on_verdict: Callable[[TagVerdict], None] = lambda _: None,
) -> list[TagVerdict]:
    """Read the checkpoints of `todo` from the storage itself, one after the other. `record`: write each verdict beside it."""
    verdicts = []
    gone = await Wholeness(store).seen_abandoned()
    for task in todo:
        on_task(task)
        if task.checkpoint is not None and (task.view.prefix in gone or task.view.entry is not None):
            verdicts.append(_removed(task.view, task.checkpoint.outcome))
        else:
            verdicts.append(await _verdict(store, task, config or PATIENCE, on_bytes, record=record))
        on_verdict(verdicts[-1])
    return verdicts


def _removed(view: AttemptView, outcome: Outcome) -> TagVerdict:
    lost = (directory_of(outcome.shown_at or view.tag),)
    return TagVerdict(tag=view.tag, attempt=str(view.attempt), state="removed", bytes_read=0, lost=lost)


async def _verdict(
    store: Store, task: Task, config: LoadConfig, on_bytes: Callable[[int], None], *, record: bool
) -> TagVerdict:
    view = task.view
    if task.checkpoint is None:
        return _without_outcome(view)
    unrecorded: StoreError | None = None
    if record:
        verdict = await verify_proved(store, task.checkpoint, config, on_bytes)
        unrecorded = await record_verdict(store, task.checkpoint, verdict)
    else:
        verdict = await verify(store.uncached, task.checkpoint, config, on_bytes)
    gone = not verdict.whole and await _is_gone(store, view)
    lost = () if verdict.whole or gone else await Wholeness(store, [view]).lost(view, await votes_of(store, view))
    return TagVerdict(
        tag=view.tag,
        attempt=str(view.attempt),
        state="whole" if verdict.whole else "removed" if gone else "damaged" if verdict.damage else "unreadable",
        bytes_read=verdict.bytes_read,
        damage=() if gone else tuple(verdict.damage),
        unreadable=() if gone else tuple(verdict.unreadable),
        lost=lost,
        recorded=record and unrecorded is None and not gone and (verdict.whole or bool(verdict.damage)),
        record_error="" if unrecorded is None or gone else str(unrecorded),
    )


def _without_outcome(view: AttemptView) -> TagVerdict:
    if view.is_copy:
        return TagVerdict(tag=view.tag, attempt=str(view.attempt), state="copied", bytes_read=0, copy=view.damage or "")
    key = f"{view.prefix}/{OUTCOME}"
    damage = (Damage(code=DamagedError.__name__, message=view.damage, key=key),) if view.damage else ()
    unreadable = (Damage(code=UnreadableError.__name__, message=str(view.unreadable), key=key),) if view.unreadable else ()
    state: Literal["damaged", "unreadable"] = "damaged" if damage else "unreadable"
    return TagVerdict(tag=view.tag, attempt=str(view.attempt), state=state, bytes_read=0, damage=damage, unreadable=unreadable)


async def _is_gone(store: Store, attempt: AttemptView) -> bool:
    now = await catalog.view(store, attempt.tag, attempt.attempt)
    return now.state == "deleted" or not now.sizes
