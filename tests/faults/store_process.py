"""A process of its own for tests/faults/test_store_faults.py: `store_process.py ROOT STEP...` prints one line a step.

A line is a JSON list: what came back, or null; and the error's class and message, or null.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

import uvloop

from checkpointd.errors import CheckpointdError, StoreError
from checkpointd.store.posix.store import PosixStore

WRITER = "child"
SMALL = b"small " * 1000
LARGE = b"large part " * 100_000


async def create(store: PosixStore) -> object:
    return await store.put_if_absent("t/a/outcome", SMALL)


async def replace(store: PosixStore) -> object:
    await store.put("t/latest", SMALL)
    return None


async def write_large(store: PosixStore) -> object:
    """Also asks a finish that failed to try again, which must not be believed."""
    writer = await store.open_writer("t/a/00000-0.chunks")
    try:
        await asyncio.gather(writer.write_at(0, LARGE), writer.write_at(len(LARGE), LARGE))
        await writer.finish(2 * len(LARGE))
    except StoreError:
        try:
            await writer.finish(2 * len(LARGE))
        except StoreError:
            await writer.discard()
            raise
        return "the second finish succeeded"
    return None


STEPS: dict[str, Callable[[PosixStore], Awaitable[object]]] = {"create": create, "replace": replace, "write_large": write_large}


async def main(root: str, *steps: str) -> None:
    async with PosixStore(root, writer=WRITER) as store:
        for step in steps:
            try:
                line = [await STEPS[step](store), None]
            except CheckpointdError as error:
                line = [None, [error.code, str(error)]]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
