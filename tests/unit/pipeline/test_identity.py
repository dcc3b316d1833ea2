"""Deletions say which user removed a checkpoint: in the mark, in `explain`, and in the log."""

from __future__ import annotations

import asyncio
import contextvars
import os
import pwd

from checkpointd.layout.keys import DELETED
from checkpointd.layout.manifest import Deleted, decode
from checkpointd.pipeline import identity
from checkpointd.pipeline.root import marks
from checkpointd.report.explanation import explanation
from checkpointd.store.memory import MemoryStore
from tests.builders import save_checkpoint

PREFIX = "global_step1/00000001-0"


async def removed_by(uid: int | None) -> tuple[Deleted, str]:
    """The mark of a checkpoint that was removed on behalf of `uid`, and how it is explained."""
    store = MemoryStore()
    await save_checkpoint(store)
    if uid is not None:
        identity.acts_for(uid)
    await marks.condemn(store, PREFIX, "to make room", ())
    key = f"{PREFIX}/{DELETED}"
    return decode(await store.get(key), Deleted, key), (await explanation(store, "global_step1")).attempts[0].why


def test_a_deletion_names_the_user_of_this_process() -> None:
    mark, why = contextvars.copy_context().run(asyncio.run, removed_by(None))
    assert mark.user == f"{pwd.getpwuid(os.geteuid()).pw_name} ({os.geteuid()})"
    assert f"user {mark.user}, with process" in why


def test_a_deletion_of_a_daemon_names_the_user_of_the_job() -> None:
    mark, _ = contextvars.copy_context().run(asyncio.run, removed_by(54321))
    assert mark.user == "54321"  # who has no name on this machine
