"""The log of a root, as reports answer from it."""

from __future__ import annotations

from checkpointd.commands import command
from checkpointd.errors import DamagedError
from checkpointd.layout.keys import LOG
from checkpointd.layout.log_records import LogState
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Store


async def look(store: Store) -> tuple[LogState, str]:
    """The state at the end of the root's log, and what is wrong with the log, in words. If something is, the state is what can
    be proved.
    """
    state = await root_view.state_of(store)
    if RootLog.of(store).fault:
        return state, RootLog.of(store).unreadable
    if await root_view.is_log_gone(store, state):
        return state, (
            f"the log of {store.url} is gone, although directories of saves are there: bring {store.url}/{LOG} back from a "
            f"copy, or have it made again from these directories: {command('recover', store.url)}"
        )
    return state, ""


async def sound_state(store: Store) -> LogState:
    """The state at the end of the root's log, for a command that changes the root. Raises DamagedError if it cannot be told."""
    state, damage = await look(store)
    if damage:
        raise DamagedError(f"nothing was changed: {damage}", key=LOG)
    return state
