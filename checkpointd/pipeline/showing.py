"""Files of checkpoints as plain files, where other tools look for them: `<tag>/<file>` and `latest`, beside the root.

Invariants
  Y1  What is shown at a tag is one commit's files, all of them; a newer one replaces an older one, never the reverse.
  Y2  The plain `latest` names a tag that is shown. It follows the store's own, which moved first (C3 in `publish.py`).
  Y3  An attempt is called committed on any rank only when it is shown; where that failed, the next start shows it.
  Y4  What is hidden was removed: its mark is durable before its files go.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, StoreError
from checkpointd.layout.keys import AttemptId, attempt_prefix, file_name, is_tag, object_hand, shown_key, vote_name
from checkpointd.layout.manifest import Outcome, Shown, decode, encode
from checkpointd.pipeline import catalog
from checkpointd.store.base import Store
from checkpointd.store.plain import PlainFiles

log = logging.getLogger("checkpointd")

PATIENCE_S = 30.0
LOOK_S = 0.05
_SHOWN = shown_key("")[:-1]

_STALE = re.compile(r".*_states\.pt\Z|.*-model_states\.pt\Z")
"""What DeepSpeed writes to a tag's directory: its tools count these files, so none may be left over from another save."""


def is_stale_name(name: str) -> bool:
    """Whether a file that is not of the checkpoint must not stay among its files."""
    return _STALE.match(name) is not None


async def show(store: Store, outcome: Outcome, *, wait_s: float = 0.0) -> None:
    """Show the files of the commit `outcome`, unless a newer one's are there; return when they are shown, durably.

    `wait_s`: how long somebody else, who shows the same, is waited for first. StoreError where it cannot be done.
    """
    if outcome.outcome != "commit" or not outcome.files:
        return
    plain, deadline = _plain(store), asyncio.get_running_loop().time() + wait_s
    while not await _is_shown(store, outcome):
        if asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(LOOK_S)
            continue
        async with _alone(store, plain):
            if not await _is_shown(store, outcome):
                await _show(store, plain, outcome)


async def _show(store: Store, plain: PlainFiles, outcome: Outcome) -> None:
    files = await files_of(store, outcome)
    await plain.show(outcome.tag, files, is_stale_name)
    record = Shown(attempt=outcome.attempt, order=outcome.order, files=tuple(sorted(files)))
    await store.put(shown_key(outcome.tag), encode(record))


async def files_of(store: Store, outcome: Outcome) -> dict[str, str]:
    """The keys of a commit's files, by the names under which they are shown."""
    attempt = AttemptId.parse(outcome.attempt)
    assert attempt is not None
    prefix = attempt_prefix(outcome.tag, attempt)
    found: dict[str, str] = {}
    for rank, ref in outcome.votes.items():
        vote = await catalog.read_vote(store, f"{prefix}/{vote_name(int(rank))}", ref.digest)
        hand = object_hand(vote.index.name) if vote.index is not None else None
        for number, name in enumerate(vote.files or ()):
            found[name] = f"{prefix}/{file_name(int(rank), number, hand or 0)}"
    return found


async def point(store: Store) -> None:
    """Let the plain `latest` say what the store's own says, as far as that is shown."""
    plain = store.plain_files
    if plain is None:
        return
    async with _alone(store, plain):
        try:
            tag = await catalog.latest(store)
        except DamagedError:
            return  # the next start repairs it
        if tag is None or await _record(store, tag) is not None:
            await plain.point(tag)


async def hide(store: Store, tag: str, attempt: str) -> None:
    """Take away what is shown of a removed attempt; nothing where another one is shown at its tag."""
    plain = store.plain_files
    if plain is None:
        return
    async with _alone(store, plain):
        record = await _record(store, tag)
        if record is not None and record.attempt == attempt:
            await plain.hide(tag, record.files)
            await store.delete(shown_key(tag))


async def mend(store: Store) -> None:
    """Show what is committed and not shown, hide what was removed, and set `latest` right: what a start does."""
    if store.plain_files is None:
        return
    committed = {checkpoint.tag: checkpoint.outcome for checkpoint in await catalog.checkpoints(store)}
    for outcome in committed.values():
        try:
            await show(store, outcome)
        except CheckpointdError as error:
            log.error("%s/%s is committed, and cannot be shown: %s", outcome.tag, outcome.attempt, error)
    for entry in await store.list(_SHOWN):
        record = await _record(store, entry.name) if is_tag(entry.name) else None
        if record is not None and entry.name not in committed:
            await hide(store, entry.name, record.attempt)
    await point(store)


@asynccontextmanager
async def _alone(store: Store, plain: PlainFiles) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(PATIENCE_S), plain.alone():
            yield
    except TimeoutError as error:
        raise StoreError(
            f"another process has held the lock of {store.url} for {PATIENCE_S:g} s; is one stopped there?"
        ) from error


def _plain(store: Store) -> PlainFiles:
    plain = store.plain_files
    if plain is None:
        raise StoreError(f"{store.url} cannot show files beside it: the root of such a job is a directory named .checkpointd")
    return plain


async def _is_shown(store: Store, outcome: Outcome) -> bool:
    record = await _record(store, outcome.tag)
    return record is not None and record.order >= outcome.order


async def _record(store: Store, tag: str) -> Shown | None:
    """The record of what is shown at `tag`; None where there is none, or it cannot be read."""
    key = shown_key(tag)
    try:
        return decode(await store.get(key), Shown, key)
    except NotFoundError:
        return None
    except DamagedError as error:
        log.error("%s; what is shown there is shown anew", error)
        return None
