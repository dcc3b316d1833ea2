"""Where `latest` goes when what it named was removed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from checkpointd.commit.facts import Order
from checkpointd.errors import DamagedError, LinkError, StoreError, UnreadableError
from checkpointd.layout.keys import LATEST
from checkpointd.pipeline.root import catalog, latest
from checkpointd.pipeline.root.candidates import candidates
from checkpointd.pipeline.root.catalog import Checkpoint
from checkpointd.pipeline.root.latest import move_latest, move_latest_away
from checkpointd.pipeline.root.marks import condemn
from checkpointd.store.base import Entry
from checkpointd.store.memory import MemoryStore
from checkpointd.store.patient import Patience
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing import simloop
from tests.builders import begin_start, save_checkpoint


async def test_latest_names_what_is_committed_while_the_last_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job beside the command that removes: its commit comes after the look for what is left, and before `latest` goes."""
    store = MemoryStore()
    await save_checkpoint(store, tag="removed", start=await begin_start(store))
    delete = store.delete

    async def commits_first(key: str) -> None:
        if key == LATEST:
            await save_checkpoint(store, tag="new", start=await begin_start(store))
        await delete(key)

    for entry in await catalog.attempts_of(store, "removed"):
        for name in entry.sizes:
            await delete(f"{entry.prefix}/{name}")
    monkeypatch.setattr(store, "delete", commits_first)
    assert await move_latest_away(store, "removed") == "new"
    assert await catalog.latest(store) == "new"


async def test_a_first_commit_between_reading_latest_and_listing_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    listing = store.list

    async def commits_first(prefix: str) -> list[Entry]:
        monkeypatch.setattr(store, "list", listing)
        await save_checkpoint(store, tag="first", start=await begin_start(store))
        return await listing(prefix)

    monkeypatch.setattr(store, "list", commits_first)
    assert await catalog.latest(store) == "first"


async def test_a_pointer_that_is_listed_and_cannot_be_opened_is_not_taken_for_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    async def lags(prefix: str) -> list[Entry]:
        return [Entry(LATEST, 8, False)]

    monkeypatch.setattr(store, "list", lags)
    with pytest.raises(UnreadableError, match="although it is listed"):
        await catalog.latest(store)


@pytest.mark.parametrize(
    ("file", "pointer", "is_theirs"),
    [
        ("mp_rank_00_model_states.pt", "theirs", True),
        ("weights.bin", "theirs", True),  # of any program: no name is known here
        (".nfs0001", "theirs", False),
        ("weights.bin", "theirs\n", False),
        (None, "theirs", False),
    ],
)
async def test_a_pointer_of_another_program_is_told_by_what_it_names(
    tmp_path: Path, file: str | None, pointer: str, is_theirs: bool
) -> None:
    async with PosixStore(tmp_path) as store:
        await save_checkpoint(store, tag="ours", start=await begin_start(store))
        (tmp_path / "theirs").mkdir()
        if file is not None:
            (tmp_path / "theirs" / file).touch()
        (tmp_path / LATEST).write_text(pointer)
        assert await catalog.latest(store) == (None if is_theirs else "theirs")
        [ours] = await catalog.checkpoints(store)
        assert await move_latest(store, ours.tag, ours.outcome.order, is_start=True) is not is_theirs
        assert (tmp_path / LATEST).read_text() == (pointer if is_theirs else "ours\n")


@pytest.mark.parametrize("link", ["to the tag", "to a file outside", "to nothing"])
async def test_pointer_1_a_link_at_latest_is_replaced_and_never_followed(tmp_path: Path, link: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "secret"
    root.mkdir()
    outside.write_text("secret")
    async with PosixStore(root) as store:
        await save_checkpoint(store, tag="one", start=await begin_start(store))
        (root / LATEST).unlink()
        (root / LATEST).symlink_to({"to the tag": "one", "to a file outside": str(outside), "to nothing": "gone"}[link])
        with pytest.raises(DamagedError, match="names nothing"):
            await catalog.latest(store)
        found = await candidates(store, Patience(0.0, 0.0))
        assert [checkpoint.tag for checkpoint in found.checkpoints] == ["one"]
        await save_checkpoint(store, tag="two", start=await begin_start(store))
        assert await catalog.latest(store) == "two"
    assert outside.read_text() == "secret"


async def test_a_link_at_the_tag_that_latest_names_gives_way_to_a_newer_commit_alone(tmp_path: Path) -> None:
    async with PosixStore(tmp_path / "root") as store:
        await save_checkpoint(store, tag="one", start=await begin_start(store))
        (tmp_path / "root" / "one").rename(tmp_path / "one")
        (tmp_path / "root" / "one").symlink_to(tmp_path / "one")
        with pytest.raises(LinkError):
            await move_latest(store, "older", (0, 0), is_start=True)
        await save_checkpoint(store, tag="two", start=await begin_start(store))
        assert await catalog.latest(store) == "two"


async def left_for_late() -> tuple[MemoryStore, Order]:
    """A store whose `latest` names "again", and the order of the newer commit of "late", to which `latest` is to move."""
    store = MemoryStore()
    await save_checkpoint(store, tag="again", start=await begin_start(store))
    await save_checkpoint(store, tag="late", start=await begin_start(store), save_latest=False)
    return store, (await catalog.find(store, "late")).outcome.order


async def test_pointer_2_a_tag_committed_again_while_latest_leaves_it_gets_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow coordinator moves `latest` off a tag; meanwhile a newer start commits that tag, which `latest` still names."""
    store, order = await left_for_late()
    put_if_match = store.put_if_match

    async def commits_first(key: str, expected: bytes | None, data: bytes) -> bool:
        monkeypatch.setattr(store, "put_if_match", put_if_match)
        await save_checkpoint(store, tag="again", start=await begin_start(store))
        return await put_if_match(key, expected, data)

    monkeypatch.setattr(store, "put_if_match", commits_first)
    assert not await move_latest(store, "late", order)
    assert (await catalog.find(store, "again")).outcome.order > order
    assert await catalog.latest(store) == "again"


@pytest.mark.parametrize("fault", ["stopped", "not answered"])
def test_pointer_2_a_mover_that_cannot_tell_whether_it_moved_latest_gives_it_back_too(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped for long just after its put, or the storage gave no answer. Meanwhile the tag was committed again."""

    async def main() -> None:
        store, order = await left_for_late()
        put_if_match = store.put_if_match

        async def moves_and_fails(key: str, expected: bytes | None, data: bytes) -> bool:
            monkeypatch.setattr(store, "put_if_match", put_if_match)
            await save_checkpoint(store, tag="again", start=await begin_start(store))
            assert await put_if_match(key, expected, data)
            if fault == "stopped":
                await asyncio.sleep(2 * latest.PATIENCE_S)
            raise StoreError("no answer")

        monkeypatch.setattr(store, "put_if_match", moves_and_fails)
        with pytest.raises(StoreError, match={"stopped": "this process was stopped", "not answered": "no answer"}[fault]):
            await move_latest(store, "late", order)
        assert await catalog.latest(store) == "again"

    simloop.run(1, main())


@pytest.mark.parametrize("moved", [False, True], ids=["not moved", "moved"])
async def test_pointer_2_latest_that_has_moved_on_is_not_taken_back_to_the_tag_that_it_left(
    moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer save has moved it meanwhile, and the tag was committed again by a save that did not ask for `latest`."""
    store, order = await left_for_late()
    put_if_match = store.put_if_match

    async def others_follow(key: str, expected: bytes | None, data: bytes) -> bool:
        monkeypatch.setattr(store, "put_if_match", put_if_match)
        if moved:
            assert await put_if_match(key, expected, data)
        await save_checkpoint(store, tag="newer", start=await begin_start(store))
        await save_checkpoint(store, tag="again", start=await begin_start(store), save_latest=False)
        raise StoreError("no answer")

    monkeypatch.setattr(store, "put_if_match", others_follow)
    with pytest.raises(StoreError, match="no answer"):
        await move_latest(store, "late", order)
    assert await catalog.latest(store) == "newer"


async def test_pointer_2_latest_that_has_moved_on_to_an_older_commit_too_moves_to_the_newer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two moves have read `latest` and wait for the lock while the tag is committed again."""
    store = MemoryStore()
    await save_checkpoint(store, tag="again", start=await begin_start(store))
    for tag in ("late", "later"):
        await save_checkpoint(store, tag=tag, start=await begin_start(store), save_latest=False)
    orders = {tag: (await catalog.find(store, tag)).outcome.order for tag in ("late", "later")}
    put_if_match, waiting = store.put_if_match, list[bytes]()
    lock, first, second = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def waits(key: str, expected: bytes | None, data: bytes) -> bool:
        waiting.append(data)
        await lock.wait()
        if data == b"later\n":
            await first.wait()
        moved = await put_if_match(key, expected, data)
        if data == b"late\n":
            first.set()
            await second.wait()  # before it looks at what it replaced
        elif moved:
            second.set()
        return moved

    monkeypatch.setattr(store, "put_if_match", waits)
    moves = [asyncio.create_task(move_latest(store, tag, order)) for tag, order in orders.items()]
    while len(waiting) < 2:
        await asyncio.sleep(0)
    monkeypatch.setattr(store, "put_if_match", put_if_match)
    await save_checkpoint(store, tag="again", start=await begin_start(store))
    assert await catalog.latest(store) == "again"
    monkeypatch.setattr(store, "put_if_match", waits)
    lock.set()
    await asyncio.gather(*moves)
    assert await catalog.latest(store) == "again"


async def test_pointer_2_both_tags_were_committed_again_and_the_newest_gets_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    store, order = await left_for_late()
    put_if_match = store.put_if_match

    async def both(key: str, expected: bytes | None, data: bytes) -> bool:
        monkeypatch.setattr(store, "put_if_match", put_if_match)
        await save_checkpoint(store, tag="again", start=await begin_start(store), save_latest=False)
        monkeypatch.setattr(store, "put_if_match", and_late)
        return await put_if_match(key, expected, data)

    async def and_late(key: str, expected: bytes | None, data: bytes) -> bool:
        monkeypatch.setattr(store, "put_if_match", put_if_match)
        await save_checkpoint(store, tag="late", start=await begin_start(store))
        return await put_if_match(key, expected, data)

    monkeypatch.setattr(store, "put_if_match", both)
    assert await move_latest(store, "late", order)
    assert await catalog.latest(store) == "late"


def test_a_look_at_what_latest_left_that_hangs_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        (store, order), find = await left_for_late(), catalog.find

        async def hangs_later(store: MemoryStore, tag: str) -> Checkpoint:
            if await catalog.latest(store) == "late":
                await asyncio.sleep(1000)
            return await find(store, tag)

        monkeypatch.setattr(catalog, "find", hangs_later)
        with pytest.raises(StoreError, match="the storage does not answer"):
            await move_latest(store, "late", order)
        assert asyncio.get_running_loop().time() < 1000

    simloop.run(1, main())


@pytest.mark.parametrize("tag", ["older", "newer"])
async def test_pointer_5_who_leaves_latest_where_it_is_makes_it_durable_first(tag: str) -> None:
    """Its writer, and that of the commit that keeps it there, may have died before they were."""
    store, settled = MemoryStore(), list[str]()
    await save_checkpoint(store, tag="older", start=await begin_start(store))
    await save_checkpoint(store, tag="newer", start=await begin_start(store))
    settle = store.settle

    async def noted(key: str) -> None:
        settled.append(key)
        await settle(key)

    store.settle = noted  # type: ignore[method-assign]
    assert not await move_latest(store, tag, (await catalog.find(store, tag)).outcome.order)
    assert settled == ["newer/00000002-0/outcome", LATEST][tag == "newer" :]


async def test_pointer_5_latest_is_given_back_to_a_durable_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    (store, order), done = await left_for_late(), list[str]()
    put_if_match, settle = store.put_if_match, store.settle

    async def commits_first(key: str, expected: bytes | None, data: bytes) -> bool:
        monkeypatch.setattr(store, "put_if_match", put_if_match)
        await save_checkpoint(store, tag="again", start=await begin_start(store))
        monkeypatch.setattr(store, "put_if_match", noted_put)
        done.clear()
        return await put_if_match(key, expected, data)

    async def noted(key: str) -> None:
        done.append(key)
        await settle(key)

    async def noted_put(key: str, expected: bytes | None, data: bytes) -> bool:
        done.append(f"{key} = {data.decode().strip()}")
        return await put_if_match(key, expected, data)

    monkeypatch.setattr(store, "put_if_match", commits_first)
    monkeypatch.setattr(store, "settle", noted)
    assert not await move_latest(store, "late", order)
    assert done == ["again/00000003-0/outcome", "latest = again"]


async def test_pointer_3_a_commit_does_not_move_latest_off_a_newer_one_that_was_removed() -> None:
    """Three saves at once: the move of the first comes after that of the second, which retention has removed meanwhile."""
    store = MemoryStore()
    for n in range(3):
        await save_checkpoint(store, tag=f"tag{n}", step=n, n=n, start=1, world_size=1)
    await store.put(LATEST, b"tag1\n")
    await condemn(store, "tag1/00000001-0", "the test", ())
    assert not await move_latest(store, "tag0", (1, 0))
    assert await store.get(LATEST) == b"tag1\n"
    assert await move_latest(store, "tag2", (1, 2))
    await store.put(LATEST, b"tag1\n")
    assert await move_latest_away(store, "tag1") == "tag2"
    await store.put(LATEST, b"tag1\n")
    assert await move_latest(store, "tag0", (1, 0), is_start=True)
