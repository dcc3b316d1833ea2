"""Makes the writer for a start's saves, after it has checked in the store that this start is of this root.

The client's path alone proves nothing: the daemon may see another file system at the same path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from checkpointd.config import ServeConfig
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.settings import commit_config, persist_config
from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, RootGoneError, StoreError
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.root.own_root import ANSWER_S
from checkpointd.pipeline.workers import answered
from checkpointd.store.base import Store

_PUT_RIGHT = ". Give the daemon the trainer's file system: the same node, mount namespace or volume"
Known = tuple[int, str]
"""A start that the daemon knows, with its nonce."""


async def begun(
    asked: wire.Begin, store: Store, ours: ServeConfig, known: Collection[Known], say: Callable[[str, object, object], None]
) -> tuple[WriterState, set[str]]:
    """The writer for `asked`, with the store of the client's user, and the nonces of the `known` starts whose root was removed.

    Raises CheckpointdError if the store has no such start or the user may not read its record, and FencedError if another job
    has taken over. If the storage does not answer now, the client is not refused: `say` is called, and each save checks again
    before its vote.
    """
    state = WriterState(store=store, persist=persist_config(asked, ours), commit=commit_config(asked))
    unseen: CheckpointdError | None
    message = f"this daemon, which must have the trainer's file system at {store.url}, does not see that the job began there: "
    try:
        unseen = await state.own_root.confirm(asked.start, asked.nonce)
    except RootGoneError as error:
        raise RootGoneError(f"{message}no root there has start {asked.start} of this job{_PUT_RIGHT}") from error
    except CheckpointdError as error:
        raise type(error)(f"{message}{error}") from error
    removed: set[str] = set()
    if unseen is None:
        try:
            removed = await answered(_removed(asked, store, known), ANSWER_S)
        except (StoreError, NotFoundError, DamagedError) as error:
            unseen = error
    if unseen is not None:
        say("whether start %d is of this root cannot be seen now (%s); its saves look again", asked.start, unseen)
    return state, removed


async def _removed(asked: wire.Begin, store: Store, known: Collection[Known]) -> set[str]:
    """The nonces of the `known` starts, not older than the `asked` one, that were taken at an earlier root of the same path."""
    await starts.check_not_over(store, asked.start)
    others = [start for start in known if start[0] >= asked.start and start[1] not in ("", asked.nonce)]
    are_here = await asyncio.gather(*(starts.is_of_root(store, *start) for start in others))
    return {nonce for (_, nonce), is_here in zip(others, are_here, strict=True) if not is_here}
