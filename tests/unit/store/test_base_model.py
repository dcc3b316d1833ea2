"""Whatever is done to them, the POSIX store and the memory store show the same (STORE-1 to STORE-6)."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable

from hypothesis import given
from hypothesis import strategies as st

from checkpointd.errors import CheckpointdError
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore

# No key is the beginning of another: what a file system cannot have is not in the contract.
KEYS = [
    "latest",
    "a/outcome",
    "a/vote",
    "b/c/outcome",
    "b/c/vote",
    "b/latest",
    ".checkpointd/starts/1",
    ".checkpointd/starts/2",
]
PREFIXES = ["", "a", "b", "b/c", "b/c/d", ".checkpointd", ".checkpointd/starts", "none"]

keys = st.sampled_from(KEYS)
bodies = st.binary(max_size=6)
Step = Callable[[Store], Awaitable[object]]


async def _write_large(store: Store, key: str, body: bytes, finish: bool) -> int:
    writer = await store.open_writer(key, size_hint=len(body) + 1)
    await writer.write_at(0, body)
    if finish:
        await writer.finish(len(body))
    await writer.discard()
    return len(body)


async def _get_range(store: Store, key: str, offset: int, size: int) -> bytes:
    out = bytearray(size)
    await store.get_range(key, offset, memoryview(out))
    return bytes(out)


def _step(name: str, call: Callable[..., Awaitable[object]], *arguments: st.SearchStrategy[object]) -> st.SearchStrategy[Step]:
    class Named:
        def __init__(self, values: tuple[object, ...]) -> None:
            self._values = values

        def __call__(self, store: Store) -> Awaitable[object]:
            return call(store, *self._values)

        def __repr__(self) -> str:
            return f"{name}{self._values}"

    return st.tuples(*arguments).map(Named)


steps = st.one_of(
    _step("put_if_absent", lambda s, k, b: s.put_if_absent(k, b), keys, bodies),
    _step("put", lambda s, k, b: s.put(k, b), keys, bodies),
    _step("put_if_match", lambda s, k, e, b: s.put_if_match(k, e, b), keys, st.none() | bodies, bodies),
    _step("write_large", _write_large, keys, bodies, st.booleans()),
    _step("get", lambda s, k, n: s.get(k, size_max=n), keys, st.integers(0, 6)),
    _step("get_range", _get_range, keys, st.integers(0, 6), st.integers(0, 4)),
    _step("delete", lambda s, k: s.delete(k), keys),
    _step("settle", lambda s, k: s.settle(k), keys),
    _step("sweep", lambda s: s.sweep()),
)


@given(st.lists(steps, max_size=25))
def test_both_stores_answer_alike(steps: list[Step]) -> None:
    asyncio.run(_compare(steps))


async def _compare(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with PosixStore(directory) as posix, MemoryStore() as memory:
            for step in steps:
                assert await _answer(posix, step) == await _answer(memory, step), step
            for key in KEYS:
                assert await posix.stat(key) == await memory.stat(key)
            for prefix in PREFIXES:
                listed = await posix.list(prefix)
                # A prefix may be listed although nothing lies under it any more.
                assert [e for e in listed if not e.is_prefix or await memory.list(_join(prefix, e.name))] == await memory.list(
                    prefix
                )


async def _answer(store: Store, step: Step) -> object:
    try:
        return await step(store)
    except CheckpointdError as error:
        return error.code


def _join(prefix: str, name: str) -> str:
    return f"{prefix}/{name}" if prefix else name
