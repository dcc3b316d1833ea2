"""The log of a root, as reports answer from it."""

from __future__ import annotations

from checkpointd.commands import command
from checkpointd.errors import DamagedError, StoreError
from checkpointd.layout.keys import LATEST, LOG
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


async def cut_off(store: Store) -> str:
    """Why the end of the log must be missing, although all of it can be read; empty if nothing says so.

    `latest` moves only after its commit is durable in the log. It is read first, since jobs go on.
    """
    try:
        tag = await root_view.latest(store)
    except (DamagedError, StoreError):
        return ""  # `report/latest.py` says it
    state, damage = await look(store)
    known = (one.tag == tag and one.status in ("checkpoint", "removed") for one in state.attempts.values())
    if tag is None or damage or state.number == 0 or any(known):
        return ""
    return (
        f"the end of the log of {store.url} is missing, or {LATEST} was edited: {LATEST} names {tag}, and the log has no "
        f"checkpoint of it. The next start takes what is whole, or: {command('recover', store.url)}"
    )
