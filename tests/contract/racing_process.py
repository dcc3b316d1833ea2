"""A process of its own for tests/contract/test_posix.py: does to a store what each line on its standard input says.

A line is a JSON list: the name of a step below and its arguments. The answer is one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

import uvloop

from checkpointd.errors import NotFoundError
from checkpointd.store.posix.store import PosixStore


async def create(store: PosixStore, key: str, mine: str) -> bool:
    return await store.put_if_absent(key, mine.encode())


async def replace(store: PosixStore, key: str, seen: str | None, mine: str) -> bool:
    return await store.put_if_match(key, None if seen is None else seen.encode(), mine.encode())


async def count_up(store: PosixStore, key: str, times: int) -> int:
    """Add 1 to the number in `key`, `times` times; how many tries lost a race."""
    lost = 0
    for _ in range(times):
        while True:
            seen = await store.get(key)
            if await store.put_if_match(key, seen, str(int(seen) + 1).encode()):
                break
            lost += 1
    return lost


async def come_and_go(store: PosixStore, prefix: str, name: str, times: int) -> int:
    """Create, check and delete `<prefix>/<name>`; how many creates took effect."""
    made = 0
    for turn in range(times):
        made += await store.put_if_absent(f"{prefix}/{name}", str(turn).encode())
        assert await store.get(f"{prefix}/{name}") == str(turn).encode()
        await store.delete(f"{prefix}/{name}")
    return made


async def watch(store: PosixStore, key: str, end: str) -> list[str]:
    """Every content of `key` that can be seen until the key `end` exists; at least one."""
    seen: set[bytes] = set()
    while not seen or await store.stat(end) is None:
        try:
            seen.add(await store.get(key))
        except NotFoundError:
            continue
    return sorted(body.decode() for body in seen)


STEPS: dict[str, Callable[..., Awaitable[object]]] = {
    "create": create,
    "replace": replace,
    "count_up": count_up,
    "come_and_go": come_and_go,
    "watch": watch,
}


async def main(root: str) -> None:
    async with PosixStore(root) as store:
        print(json.dumps("ready"), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            step, *arguments = json.loads(line)
            print(json.dumps(await STEPS[step](store, *arguments)), flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
