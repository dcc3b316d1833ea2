"""Verifies one tag or a whole root, and reports the result tag by tag. Compares the tree with the log, and checks the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from checkpointd.commit.branches import commits_of
from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError, StoreError, UsageError
from checkpointd.layout.keys import LOG, attempt_prefix
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.gc.collect import survey
from checkpointd.pipeline.read.verify import CheckpointVerdict, Damage, record_verdict, verify, verify_proved
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.wholeness import missing, missing_of
from checkpointd.pipeline.root_id import read_id
from checkpointd.report.latest import Pointer, pointer
from checkpointd.report.log import cut_off, look
from checkpointd.report.log_check import LogCheck, check_log
from checkpointd.store.base import Store, each

PATIENCE = LoadConfig(retry_s=3.0)
"""Reads that fail are tried again for a short time only, because a person waits for the answer."""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Every checkpoint that was read, newest first, and if no tag was asked for, what else lies at the root."""

    root: str
    checkpoints: tuple[CheckpointVerdict, ...]
    log: LogCheck = LogCheck()
    log_damage: str = ""
    """Why the log could not be read to its end, so that newer checkpoints may be missing here; empty if it could."""
    latest: Pointer | None = None
    unknown: tuple[str, ...] = ()
    """Directories of attempts (`<tag>/<attempt>`) that the log does not know. No command removes them. A start takes those that
    came after the end of the log, if they are whole.
    """
    leftovers: tuple[str, ...] = ()
    """Attempts that were aborted or removed, and of which objects are left that nobody needs."""

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


async def to_verify(store: Store, tag: str | None) -> list[LoggedAttempt]:
    """The checkpoints to verify, in the order in which loads try them: all, or the newest of `tag`. NotFoundError if `tag` has
    none.
    """
    state = await root_view.state_of(store)
    return commits_of(state.attempts.values()) if tag is None else [root_view.found_in(state, tag, store.url)]


async def verified(
    store: Store,
    todo: Sequence[LoggedAttempt],
    *,
    record: bool = False,
    config: LoadConfig | None = None,
    on_begin: Callable[[LoggedAttempt], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[CheckpointVerdict]:
    """Read the checkpoints of `todo` from the storage itself, one after the other. `record`: record each verdict in the log."""
    verdicts = []
    losses = await missing(store, todo)
    for one in todo:
        on_begin(one)
        lost = losses.get(one.prefix)
        if lost is not None and lost.is_removed:
            verdicts.append(CheckpointVerdict(one.tag, str(one.id), state="removed", missing=lost))
        else:
            verdicts.append(await _verdict(store, one, config or PATIENCE, on_bytes, record=record))
    return verdicts


async def _verdict(
    store: Store, checkpoint: LoggedAttempt, config: LoadConfig, on_bytes: Callable[[int], None], *, record: bool
) -> CheckpointVerdict:
    if record:
        found = await verify_proved(store, checkpoint, config, on_bytes)
        await record_verdict(store, checkpoint, found)
    else:
        found = await verify(store.uncached, checkpoint, config, on_bytes)
    if not found.whole and not await root_view.is_checkpoint(store, checkpoint.prefix):
        return _as_removed(found)
    if found.damage:
        with suppress(StoreError):  # then it is noted as unreadable
            found.missing = await missing_of(store, checkpoint)
    found.state = "damaged" if found.damage else "unreadable" if found.unreadable else "whole"
    return found


def _as_removed(verdict: CheckpointVerdict) -> CheckpointVerdict:
    return CheckpointVerdict(verdict.tag, verdict.attempt, verdict.bytes_read, state="removed")


async def of_copy(copy: Store, origin: Store, verdicts: Sequence[CheckpointVerdict]) -> list[CheckpointVerdict]:
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

    def is_gone(verdict: CheckpointVerdict) -> bool:
        known = state.attempts.get(f"{verdict.tag}/{verdict.attempt}")
        return verdict.state == "damaged" and (known is None or known.status == "removed")

    return [_as_removed(one) if is_gone(one) else one for one in verdicts]


async def verification(store: Store, verdicts: Sequence[CheckpointVerdict], *, of_all: bool) -> Verification:
    """The report with these verdicts, and with what is found out about the log; about the rest of the root if `of_all`."""
    # The tree comes first: an attempt is announced before its first object (LOG-8).
    there = [attempt_prefix(*at) for at in await root_view.directories(store)] if of_all else []
    state, log_damage = await look(store)
    strange = [one for one in there if one not in state.attempts or state.attempts[one].swept] if not log_damage else []
    objects = await each(lambda one: root_view.objects_of(store, one), strange)
    left = await survey(store, state) if of_all and not log_damage else []
    log_damage = log_damage or await cut_off(store)
    return Verification(
        root=store.url,
        checkpoints=tuple(verdicts),
        log=await check_log(store),
        log_damage=log_damage,
        latest=await pointer(store, state, log_damage) if of_all else None,
        unknown=tuple(one for one, found in zip(strange, objects, strict=True) if found),
        leftovers=tuple(f"{removal.tag}/{removal.attempt}" for removal in left),
    )
