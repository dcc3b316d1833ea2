"""A question to a root."""

from __future__ import annotations

import asyncio
from pathlib import Path

from checkpointd.cli.asking import ask
from checkpointd.store.base import Store
from checkpointd.store.posix.store import PosixStore
from tests.builders import save_checkpoint


class Answer:
    def __repr__(self) -> str:
        raise AssertionError("an answer of millions of parts is written out")


def test_nobody_writes_out_the_answer(tmp_path: Path) -> None:
    """asyncio writes the repr of a task's result when its loop ends."""

    async def save() -> None:
        async with PosixStore(tmp_path / "root") as store:
            await save_checkpoint(store, tag="t")

    async def question(_: Store) -> Answer:
        return Answer()

    asyncio.run(save())
    assert isinstance(ask(str(tmp_path / "root"), question), Answer)
