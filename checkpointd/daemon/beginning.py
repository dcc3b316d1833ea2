"""What the saves of one epoch are made with, once the store has shown that the epoch began at this root.

A client may be wrong about that: the daemon may have another file system at the same path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from checkpointd.config import ServeConfig
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.settings import commit_config, persist_config
from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, RootGoneError, StoreError
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.root import epochs
from checkpointd.pipeline.root.own_root import ANSWER_S
from checkpointd.pipeline.workers import answered
from checkpointd.store.base import Store

_PUT_RIGHT = ". Give the daemon the trainer's file system: the same node, mount namespace or volume"
Known = tuple[int, str]
"""An epoch that the daemon knows of, with its nonce."""


async def begun(
    asked: wire.Begin, store: Store, ours: ServeConfig, known: Collection[Known], say: Callable[[str, object, object], None]
) -> tuple[WriterState, set[str]]:
    """The writer for what `asked` says, with the store of the client's user; and the nonces of the `known` epochs
    whose root was removed.

    Raises CheckpointdError where the store shows no such epoch, or that user may not read its record, and FencedError where
    it shows that another job has taken over. A storage that does not tell now refuses nobody: `say` is told, and each save
    looks before its vote.
    """
    state = WriterState(store=store, persist=persist_config(asked, ours), commit=commit_config(asked))
    unseen: CheckpointdError | None
    try:
        unseen = await state.own_root.confirm(asked.epoch, asked.nonce)
    except CheckpointdError as error:
        message = (
            f"this daemon, which must have the trainer's file system at {store.url}, does not see that the job began there: "
        )
        raise type(error)(f"{message}{error}{_PUT_RIGHT if isinstance(error, RootGoneError) else ''}") from error
    removed: set[str] = set()
    if unseen is None:
        try:
            removed = await answered(_removed(asked, store, known), ANSWER_S)
        except (StoreError, NotFoundError, DamagedError) as error:
            unseen = error
    if unseen is not None:
        say("whether epoch %d began here cannot be seen now (%s); its saves look again", asked.epoch, unseen)
    return state, removed


async def _removed(asked: wire.Begin, store: Store, known: Collection[Known]) -> set[str]:
    """Which of the `known` epochs, no older than the one `asked` for, began at a root that was there before this one."""
    await epochs.check_not_over(store, asked.epoch)
    others = [epoch for epoch in known if epoch[0] >= asked.epoch and epoch[1] not in ("", asked.nonce)]
    are_here = await asyncio.gather(*(epochs.is_of_root(store, *epoch) for epoch in others))
    return {nonce for (_, nonce), is_here in zip(others, are_here, strict=True) if not is_here}
