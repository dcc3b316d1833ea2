"""Verifies one tag or a whole root, and reports the result tag by tag. Compares the tree with the log, and checks the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError, StoreError, UsageError
from checkpointd.layout.keys import LOG, attempt_prefix
from checkpointd.layout.log_records import LoggedAttempt, LogState
from checkpointd.pipeline.gc.collect import survey
from checkpointd.pipeline.read.verify import Damage, record_verdict, verify, verify_proved
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.wholeness import Lost, is_removed, seen_at_a_glance, seen_lost
from checkpointd.pipeline.root_id import read_id
from checkpointd.report.latest import Pointer, pointer
from checkpointd.report.log import look
from checkpointd.report.log_check import LogCheck, check_log
from checkpointd.store.base import Store, each

PATIENCE = LoadConfig(retry_s=3.0)
"""Reads that fail are tried again for a short time only, because a person waits for the answer."""


class TagVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one checkpoint. `removed`: it was removed while it was read, or while its root was copied, or somebody
    removed the directory that showed its files. `unreadable`: no damage was found, but some objects could not be read, so
    nobody knows whether it is whole.
    """

    tag: str
    attempt: str
    state: Literal["whole", "damaged", "unreadable", "removed"]
    bytes_read: int
    damage: tuple[Damage, ...] = ()
    unreadable: tuple[Damage, ...] = ()
    lost: tuple[Lost, ...] = ()
    """What is missing: objects, which cause some of the damage, or the directory of a checkpoint that was removed by hand."""
    recorded: bool = False
    """Whether the result was recorded in the log."""
    record_error: str = ""
    """Why the log did not take the record that was asked for."""


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """What lies at a root beside its checkpoints. Nothing of it is damage."""

    unknown: tuple[str, ...] = ()
    """Directories of attempts (`<tag>/<attempt>`) that the log does not know. No command removes them. A start takes those that
    came after the end of the log, if they are whole.
    """
    leftovers: tuple[str, ...] = ()
    """Attempts that were aborted or removed, and of which objects are left that nobody needs."""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Every checkpoint that was read, newest first. `latest` and `beside` are None if only one tag was asked for,
    `beside` also if the log could not be read to its end.
    """

    root: str
    checkpoints: tuple[TagVerdict, ...]
    log: LogCheck = LogCheck()
    log_damage: str = ""
    """Why the log could not be read to its end, so that newer checkpoints may be missing here; empty if it could."""
    latest: Pointer | None = None
    beside: Beside | None = None

    @property
    def damage(self) -> list[Damage]:
        """All damage, including that of the log."""
        found = [*self.log.damage, *(damage for verdict in self.checkpoints for damage in verdict.damage)]
        if self.log_damage and not found and not self.unreadable:
            found.append(Damage(code="DamagedError", message=self.log_damage))
        return found

    @property
    def unreadable(self) -> list[Damage]:
        """All failures to read, including those of the log."""
        return [*self.log.unreadable, *(one for verdict in self.checkpoints for one in verdict.unreadable)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One checkpoint to verify and about how many bytes it has."""

    checkpoint: LoggedAttempt
    nbytes: int

    @property
    def tag(self) -> str:
        return self.checkpoint.tag


async def tasks(store: Store, tag: str | None) -> list[Task]:
    """The checkpoints to verify, in the order in which loads try them: all, or the newest of `tag`. NotFoundError if `tag` has
    none.
    """
    views = (await root_view.state_of(store)).attempts.values()
    found = root_view.commits_of(views) if tag is None else [await root_view.find(store, tag)]
    return [Task(checkpoint=one, nbytes=one.commit.cost.stored_bytes if one.commit.cost else 0) for one in found]


async def verified(
    store: Store,
    todo: Sequence[Task],
    *,
    record: bool = False,
    config: LoadConfig | None = None,
    on_task: Callable[[Task], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
    on_verdict: Callable[[TagVerdict], None] = lambda _: None,
) -> list[TagVerdict]:
    """Read the checkpoints of `todo` from the storage itself, one after the other. `record`: record each verdict in the log."""
    verdicts = []
    missing = await seen_at_a_glance(store, [task.checkpoint for task in todo])
    for task in todo:
        on_task(task)
        one = task.checkpoint
        if is_removed(lost := missing.get(one.prefix, ())):
            verdicts.append(TagVerdict(tag=one.tag, attempt=str(one.id), state="removed", bytes_read=0, lost=lost))
        else:
            verdicts.append(await _verdict(store, task.checkpoint, config or PATIENCE, on_bytes, record=record))
        on_verdict(verdicts[-1])
    return verdicts


async def _verdict(
    store: Store, checkpoint: LoggedAttempt, config: LoadConfig, on_bytes: Callable[[int], None], *, record: bool
) -> TagVerdict:
    unrecorded: StoreError | None = None
    if record:
        verdict = await verify_proved(store, checkpoint, config, on_bytes)
        unrecorded = await record_verdict(store, checkpoint, verdict)
    else:
        verdict = await verify(store.uncached, checkpoint, config, on_bytes)
    one = None if verdict.whole else await root_view.logged(store, checkpoint.prefix)
    gone = not verdict.whole and (one is None or one.status != "checkpoint")
    return TagVerdict(
        tag=checkpoint.tag,
        attempt=str(checkpoint.id),
        state="whole" if verdict.whole else "removed" if gone else "damaged" if verdict.damage else "unreadable",
        bytes_read=verdict.bytes_read,
        damage=() if gone else tuple(verdict.damage),
        unreadable=() if gone else tuple(verdict.unreadable),
        lost=() if one is None else await seen_lost(store, one),
        recorded=record and unrecorded is None and not gone and (verdict.whole or bool(verdict.damage)),
        record_error="" if unrecorded is None or gone else str(unrecorded),
    )


async def of_copy(copy: Store, origin: Store, verdicts: Sequence[TagVerdict]) -> list[TagVerdict]:
    """The verdicts on a copy of `origin`, newest first. If the newest checkpoint is whole, an older one is removed, and not
    damaged, if `origin` has removed it since its log was copied. Raises UsageError if `copy` is no copy of `origin`, and
    DamagedError if the log of `origin` cannot be read to its end.
    """
    state, damage = await look(origin)
    if damage:
        raise DamagedError(damage, key=LOG)
    if await read_id(copy) != await read_id(origin) or state.number < (await root_view.state_of(copy)).number:
        raise UsageError(f"{copy.url} is not a copy of {origin.url}, or its log is newer")
    if not verdicts or verdicts[0].state != "whole":
        return [*verdicts]

    def is_gone(verdict: TagVerdict) -> bool:
        known = state.attempts.get(f"{verdict.tag}/{verdict.attempt}")
        return verdict.state == "damaged" and (known is None or known.status == "removed")

    removed = {"state": "removed", "damage": (), "unreadable": (), "lost": ()}
    return [msgspec.structs.replace(one, **removed) if is_gone(one) else one for one in verdicts]


async def verification(store: Store, verdicts: Sequence[TagVerdict], *, of_all: bool) -> Verification:
    """The report with these verdicts, and with what is found out about the log; about the rest of the root if `of_all`."""
    # The tree comes first: an attempt is announced before its first object (LOG-8).
    there = [attempt_prefix(*at) for at in await root_view.directories(store)] if of_all else []
    state, log_damage = await look(store)
    return Verification(
        root=store.url,
        checkpoints=tuple(verdicts),
        log=await check_log(store),
        log_damage=log_damage,
        latest=await pointer(store, state, log_damage) if of_all else None,
        beside=await _beside(store, state, there) if of_all and not log_damage else None,
    )


async def _beside(store: Store, state: LogState, there: Sequence[str]) -> Beside:
    strange = [one for one in there if one not in state.attempts or state.attempts[one].swept]
    objects = await each(lambda one: root_view.objects_of(store, one), strange)
    return Beside(
        unknown=tuple(one for one, found in zip(strange, objects, strict=True) if found),
        leftovers=tuple(f"{removal.tag}/{removal.attempt}" for removal in await survey(store, state)),
    )
