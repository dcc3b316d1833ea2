"""The store contract as a pytest suite: `checkpointd.store.base` says what, this checks it.

A back end's test module holds no more than this:

    class TestMyStore(StoreContract):
        @pytest.fixture
        async def store(self) -> AsyncIterator[Store]:
            async with MyStore(...) as store:
                yield store

The store is empty at the start of every test. Each test names the invariants it checks. Durability shows only in a power cut:
that is for each back end to test. Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from checkpointd.errors import ClosedError, NotFoundError, UsageError
from checkpointd.store.base import Entry, Store
from checkpointd.testing.contract_bytes import BytesContract

RACERS = 32

ODD_KEYS = (
    "with space/and  two",
    "tab\there",
    "line\nbreak",
    "back\\slash",
    "quote'and\"quote",
    "per%20cent/%2e%2e",
    "…/多字节/ключ/🜁",
    "a..b/..c/d..",
    ".hidden/.file",
    "-rf",
    "*?[x]",
    "UPPER/upper",
    "upper/UPPER",
    "n" * 200 + "/" + "m" * 200,
)
BAD_KEYS = ("", "/", "/absolute", "a//b", "a/", "..", "../up", "a/../b", "a/..", "./a", "a/./b", "a\0b", "\ud800")


class StoreContract(BytesContract):
    """Subclass this, and override `store`."""

    pytestmark = pytest.mark.asyncio

    @pytest.fixture
    async def store(self) -> Store:
        """An empty store of the back end under test."""
        raise NotImplementedError("override the fixture `store`")

    # --- S1: one winner ---

    async def test_s1_first_create_wins_and_later_ones_change_nothing(self, store: Store) -> None:
        assert await store.put_if_absent("tag/attempt/outcome", b"first") is True
        assert await store.put_if_absent("tag/attempt/outcome", b"second, longer") is False
        assert await store.put_if_absent("tag/attempt/outcome", b"first") is False
        assert await store.get("tag/attempt/outcome") == b"first"

    async def test_s1_one_of_many_racing_creators_wins_whole(self, store: Store) -> None:
        bodies = [bytes([n]) * (1000 + 37 * n) for n in range(RACERS)]
        won = await asyncio.gather(*(store.put_if_absent("race/new/outcome", body) for body in bodies))
        assert won.count(True) == 1
        assert await store.get("race/new/outcome") == bodies[won.index(True)]

    async def test_s1_a_reader_sees_a_created_object_whole_or_not_at_all(self, store: Store) -> None:
        bodies = [bytes([n]) * (200_000 + n) for n in range(4)]
        seen = _watching(store, "race/outcome")
        await asyncio.gather(*(store.put_if_absent("race/outcome", body) for body in bodies))
        assert await seen() <= {None, *bodies}

    async def test_s1_an_empty_object_is_an_object(self, store: Store) -> None:
        assert await store.put_if_absent("empty", b"") is True
        assert await store.put_if_absent("empty", b"x") is False
        assert await store.get("empty") == b""
        assert await store.stat("empty") == 0

    # --- S2: replaced whole ---

    async def test_s2_put_creates_and_replaces(self, store: Store) -> None:
        for body in (b"one", b"", b"three and longer", b"4"):
            await store.put("latest", body)
            assert await store.get("latest") == body

    async def test_s2_a_reader_sees_the_old_bytes_or_the_new(self, store: Store) -> None:
        bodies = [bytes([n]) * (100_000 + 4096 * (n % 3) + n) for n in range(20)]
        await store.put("latest", bodies[0])
        seen = _watching(store, "latest")
        for body in bodies:
            await store.put("latest", body)
        assert await seen() <= set(bodies)
        assert await store.get("latest") == bodies[-1]

    async def test_s2_racing_puts_leave_one_of_them_whole(self, store: Store) -> None:
        bodies = [bytes([n]) * (5000 + n) for n in range(RACERS)]
        await asyncio.gather(*(store.put("p/latest", body) for body in bodies))
        assert await store.get("p/latest") in bodies

    @pytest.mark.parametrize(
        "other", [b"", b"ol", b"olD", b"old+", b"o" * 100_000], ids=["empty", "less", "as long", "more", "much"]
    )
    async def test_s2_put_if_match_compares_the_whole_content(self, store: Store, other: bytes) -> None:
        await store.put("latest", b"old")
        assert await store.put_if_match("latest", other, b"new") is False
        assert await store.get("latest") == b"old"
        assert await store.put_if_match("latest", b"old", b"new") is True
        assert await store.get("latest") == b"new"

    async def test_s2_put_if_match_tells_absent_from_empty(self, store: Store) -> None:
        assert await store.put_if_match("a/latest", b"", b"x") is False
        assert await store.stat("a/latest") is None
        assert await store.put_if_match("a/latest", None, b"") is True
        assert await store.put_if_match("a/latest", None, b"x") is False
        assert await store.put_if_match("a/latest", b"", b"x") is True

    async def test_s2_no_update_is_lost_between_racing_put_if_match(self, store: Store) -> None:
        rounds = 5

        async def count_up() -> None:
            for _ in range(rounds):
                while True:
                    seen = await store.get("counter")
                    if await store.put_if_match("counter", seen, str(int(seen) + 1).encode()):
                        break

        await store.put("counter", b"0")
        await asyncio.gather(*(count_up() for _ in range(8)))
        assert await store.get("counter") == str(8 * rounds).encode()

    async def test_s1_s2_creating_by_both_ways_has_one_winner(self, store: Store) -> None:
        for turn in range(10):
            key = f"both/{turn}"
            won = await asyncio.gather(store.put_if_absent(key, b"a"), store.put_if_match(key, None, b"b"))
            assert sorted(won) == [False, True]
            assert await store.get(key) == (b"a" if won[0] else b"b")

    # --- S4: settle ---

    async def test_s4_settle_of_what_is_there_and_what_is_not(self, store: Store) -> None:
        await store.put_if_absent("t/a/outcome", b"commit")
        await store.settle("t/a/outcome")
        assert await store.get("t/a/outcome") == b"commit"
        for key in ("t/a/vote", "t/a", "other"):
            with pytest.raises(NotFoundError, match=key):
                await store.settle(key)

    # --- S5: delete ---

    async def test_s5_delete_removes_one_object_and_no_other(self, store: Store) -> None:
        for name in ("a", "b", "c/d"):
            await store.put(f"tag/{name}", name.encode())
        await store.delete("tag/a")
        assert await store.stat("tag/a") is None
        assert await store.get("tag/b") == b"b"
        assert await store.get("tag/c/d") == b"c/d"
        await store.delete("tag/c/d")
        assert await store.get("tag/b") == b"b"

    async def test_s5_delete_of_nothing_succeeds(self, store: Store) -> None:
        await store.put("tag/a", b"x")
        for key in ("tag/b", "none/at/all", "tag", "tag/a/below"):
            await store.delete(key)
        assert await store.get("tag/a") == b"x"

    async def test_s5_a_deleted_key_can_be_created_again(self, store: Store) -> None:
        for turn in range(3):
            assert await store.put_if_absent("t/a/outcome", bytes([turn])) is True
            await store.delete("t/a/outcome")
        assert await store.list("t/a") == []

    async def test_s5_creators_and_deleters_share_a_prefix(self, store: Store) -> None:
        """Removing what is emptied never takes a new object's place away."""

        async def come_and_go(name: str) -> None:
            for turn in range(10):
                assert await store.put_if_absent(f"deep/er/{name}", bytes([turn]))
                assert await store.get(f"deep/er/{name}") == bytes([turn])
                await store.delete(f"deep/er/{name}")
                writer = await store.open_writer(f"deep/est/{name}")
                await writer.finish(0)
                await store.delete(f"deep/est/{name}")

        await asyncio.gather(*(come_and_go(str(n)) for n in range(8)))
        assert await store.list("deep/er") == []
        assert await store.put_if_absent("deep/er/last", b"")

    async def test_s5_sweep_removes_no_object(self, store: Store) -> None:
        await store.put("t/a/outcome", b"commit")
        await store.put(".checkpointd/epochs/00000001", b"me")
        assert await store.sweep() == 0
        assert await store.get("t/a/outcome") == b"commit"
        assert await store.get(".checkpointd/epochs/00000001") == b"me"

    # --- names ---

    async def test_list_shows_the_children_of_one_prefix_in_order(self, store: Store) -> None:
        for key in ("b/2", "b/1/x", "b/1/y", "b/10", "bb/3", "a", "c/d/e/f"):
            await store.put(key, key.encode())
        assert await store.list("") == [_prefix(n) if n != "a" else _object("a", 1) for n in ("a", "b", "bb", "c")]
        assert await store.list("b") == [_prefix("1"), _object("10", 4), _object("2", 3)]
        assert await store.list("b/1") == [_object("x", 5), _object("y", 5)]
        assert await store.list("c/d") == [_prefix("e")]

    async def test_list_of_nothing_is_empty(self, store: Store) -> None:
        assert await store.list("") == []
        assert await store.list("missing/prefix") == []
        await store.put("object", b"x")
        assert await store.list("object") == []
        assert await store.list("obj") == []
        assert await store.list("object/below") == []

    async def test_list_shows_objects_and_nothing_of_the_stores_own(self, store: Store) -> None:
        await store.put_if_match("t/latest", None, b"1")
        writer = await store.open_writer("t/large")
        await writer.finish(0)
        assert [entry.name for entry in await store.list("")] == ["t"]
        assert [entry.name for entry in await store.list("t")] == ["large", "latest"]
        await store.put(".checkpointd/epochs/00000001", b"me")
        assert [entry.name for entry in await store.list("")] == [".checkpointd", "t"]
        assert await store.list(".checkpointd") == [_prefix("epochs")]

    async def test_odd_keys_name_objects_like_any_other(self, store: Store) -> None:
        for number, key in enumerate(ODD_KEYS):
            assert await store.put_if_absent(key, str(number).encode()) is True
        for number, key in enumerate(ODD_KEYS):
            assert await store.get(key) == str(number).encode()
            parent, _, name = key.rpartition("/")
            assert name in [entry.name for entry in await store.list(parent)]
        for key in ODD_KEYS:
            await store.delete(key)
        assert [await store.stat(key) for key in ODD_KEYS] == [None] * len(ODD_KEYS)

    @pytest.mark.parametrize("key", BAD_KEYS)
    async def test_bad_keys_are_refused_by_every_call(self, store: Store, key: str) -> None:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.put_if_absent(key, b""),
            lambda: store.put(key, b""),
            lambda: store.put_if_match(key, None, b""),
            lambda: store.open_writer(key),
            lambda: store.get(key),
            lambda: store.get_range(key, 0, memoryview(bytearray(1))),
            lambda: store.stat(key),
            lambda: store.delete(key),
            lambda: store.settle(key),
        ]
        if key:
            calls.append(lambda: store.list(key))
        for call in calls:
            with pytest.raises(UsageError):
                await call()
        assert await store.list("") == []

    # --- the store itself ---

    async def test_it_says_where_it_is_and_what_it_can_do(self, store: Store) -> None:
        assert store.url
        assert store.capabilities.alignment >= 1

    async def test_a_closed_store_refuses_every_call(self, store: Store) -> None:
        await store.put("object", b"x")
        await store.close()
        await store.close()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.put("object", b""),
            lambda: store.get("object"),
            lambda: store.list(""),
            lambda: store.sweep(),
        ]
        for call in calls:
            with pytest.raises(ClosedError, match="closed"):
                await call()


def _object(name: str, size: int) -> Entry:
    return Entry(name, size, False)


def _prefix(name: str) -> Entry:
    return Entry(name, 0, True)


def _watching(store: Store, key: str) -> Callable[[], Awaitable[set[bytes | None]]]:
    """Read `key` over and over from now on; the function returned ends that and says what was seen (None: absent)."""
    seen: set[bytes | None] = set()
    ended = asyncio.Event()

    async def watch() -> None:
        while not ended.is_set():
            seen.add(await _get_or_none(store, key))
            await asyncio.sleep(0)

    task = asyncio.create_task(watch())

    async def end() -> set[bytes | None]:
        ended.set()
        await task
        return seen

    return end


async def _get_or_none(store: Store, key: str) -> bytes | None:
    try:
        return await store.get(key)
    except NotFoundError:
        return None
