"""Deletions say which user removed a checkpoint: in the mark, in `explain`, and in the log."""

from __future__ import annotations

import asyncio
import contextvars
import os
import pwd

from checkpointd.layout.log_records import RemoveRecord
from checkpointd.pipeline import identity
from checkpointd.pipeline.gc.collect import remove
from checkpointd.pipeline.root import root_view
from checkpointd.store.memory import MemoryStore
from tests.builders import save_checkpoint

PREFIX = "global_step1/00000001-0"


async def removed_by(uid: int | None) -> RemoveRecord:
    """The record of the removal of a checkpoint on behalf of `uid`."""
    store = MemoryStore()
    await save_checkpoint(store)
    if uid is not None:
        identity.acts_for(uid)
    assert await remove(store, {"to make room": [PREFIX]}) == ""
    removal = (await root_view.state_of(store)).attempts[PREFIX].removal
    assert removal is not None
    return removal


def test_a_deletion_names_the_user_of_this_process() -> None:
    removal = contextvars.copy_context().run(asyncio.run, removed_by(None))
    assert removal.user == f"{pwd.getpwuid(os.geteuid()).pw_name} ({os.geteuid()})"


def test_a_deletion_of_a_daemon_names_the_user_of_the_job() -> None:
    removal = contextvars.copy_context().run(asyncio.run, removed_by(54321))
    assert removal.user == "54321"  # who has no name on this machine
