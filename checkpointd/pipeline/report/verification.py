"""Verify one tag or a whole root, and say what was found tag by tag."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError
from checkpointd.layout.keys import LATEST, OUTCOME
from checkpointd.pipeline import catalog
from checkpointd.pipeline.catalog import AttemptView, Checkpoint
from checkpointd.pipeline.report.pointer import Pointer, pointer
from checkpointd.pipeline.report.ranks import rank_words
from checkpointd.pipeline.verify import Damage, record_verdict, verify
from checkpointd.store.base import Store


class TagVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one checkpoint; `removed`: it was replaced and collected while it was being read."""

    tag: str
    attempt: str
    state: Literal["whole", "damaged", "removed"]
    bytes_read: int
    damage: tuple[Damage, ...] = ()


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Every checkpoint that was read, newest first. `latest` is None where only one tag was asked for."""

    root: str
    checkpoints: tuple[TagVerdict, ...]
    latest: Pointer | None = None

    @property
    def damage(self) -> list[Damage]:
        """All of it, `latest` included."""
        found = [damage for verdict in self.checkpoints for damage in verdict.damage]
        if self.latest and self.latest.damage:
            found.append(Damage(code=DamagedError.__name__, message=self.latest.damage, key=LATEST))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One checkpoint to verify and about how many bytes that is; no `checkpoint` where its outcome cannot be read."""

    view: AttemptView
    checkpoint: Checkpoint | None
    nbytes: int

    @property
    def tag(self) -> str:
        return self.view.tag


async def tasks(store: Store, tag: str | None) -> list[Task]:
    """What there is to verify, newest first: all checkpoints, or that of `tag`. NotFoundError where `tag` has none."""
    if tag is None:
        attempts = await catalog.scan(store)
    else:
        attempts = await catalog.attempts_of(store, tag)
        if not any(attempt.state == "damaged" for attempt in attempts):
            await catalog.find(store, tag)
    found = [Task(view=a, checkpoint=None, nbytes=0) for a in attempts if a.state == "damaged"]
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
    on_task: Callable[[Task], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
    on_verdict: Callable[[TagVerdict], None] = lambda _: None,
) -> list[TagVerdict]:
    """Read all of `todo`, one checkpoint after the other; `record`: leave a record in each that is whole, for retention."""
    verdicts = []
    for task in todo:
        on_task(task)
        verdicts.append(await _verdict(store, task, on_bytes, record=record))
        on_verdict(verdicts[-1])
    return verdicts


async def _verdict(store: Store, task: Task, on_bytes: Callable[[int], None], *, record: bool) -> TagVerdict:
    view = task.view
    if task.checkpoint is None:
        damage = Damage(code=DamagedError.__name__, message=view.damage or "", key=f"{view.prefix}/{OUTCOME}")
        return TagVerdict(tag=view.tag, attempt=str(view.attempt), state="damaged", bytes_read=0, damage=(damage,))
    verdict = await verify(store, task.checkpoint, LoadConfig(), on_bytes)
    if record and (await catalog.view(store, view.tag, view.attempt)).state == "committed":
        await record_verdict(store, task.checkpoint, verdict)
    gone = not verdict.whole and await _is_gone(store, view)
    return TagVerdict(
        tag=view.tag,
        attempt=str(view.attempt),
        state="whole" if verdict.whole else "removed" if gone else "damaged",
        bytes_read=verdict.bytes_read,
        damage=() if gone else tuple(verdict.damage),
    )


async def _is_gone(store: Store, attempt: AttemptView) -> bool:
    now = await catalog.view(store, attempt.tag, attempt.attempt)
    return now.state == "deleted" or not now.sizes


async def pointer_now(store: Store) -> Pointer:
    """`latest` as it stands, judged by the checkpoints there are now."""
    return await pointer(store, await catalog.checkpoints(store))
