"""The memory tier: what is held, what makes room for what, and in which order slots come free (TIER-1 to TIER-3)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from checkpointd.codec.checksum import xxh3_128
from checkpointd.daemon.accounts import Account, Charge
from checkpointd.daemon.memory import tier as tier_module
from checkpointd.daemon.memory.mapped import SlotMappings, SlotMemory
from checkpointd.daemon.memory.tier import Kept, Tier
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline.shard import AttemptInfo, Shard
from tests.builders import make_shard, rank_arrays
from tests.unit.daemon.conftest import sealed_memfd, until

SHARD = make_shard(rank_arrays(0))
SIZE = len(SHARD.buffer)
ME, OTHER = 1000, 1001


class Slots:
    """Slots of one client; `free` are those that became free, in order."""

    def __init__(self) -> None:
        self.memory = SlotMappings()
        self.account = Account(1 << 30)
        self.free: list[int] = []
        self.watch: Callable[[], None] = lambda: None

    def slot(self, number: int) -> SlotMemory:
        return self.memory.map(sealed_memfd(SHARD.buffer.data), SIZE, self.account, (self, number), lambda: self._freed(number))

    def _freed(self, number: int) -> None:
        self.free.append(number)
        self.watch()


@pytest.fixture
def slots() -> Iterator[Slots]:
    slots = Slots()
    yield slots
    for slot in list(slots.memory._slots.values()):
        for owner in list(slot._owners):
            slot.disown(owner)


def info(n: int, *, start: int = 1, rank: int = 0) -> AttemptInfo:
    return AttemptInfo(tag=f"t{n}", attempt=AttemptId(start, 0), rank=rank, world_size=2, step=n, n=n)


def offer(tier: Tier, slot: SlotMemory, about: AttemptInfo, root: str = "/r", uid: int = ME) -> Kept | None:
    buffer = slot.buffer[:SIZE]
    shard = Shard(buffer=buffer, tensors=SHARD.tensors, tree=SHARD.tree)
    return tier.offer(root, about, slot, shard, Charge(Account(1 << 20)), nonce="n", uid=uid)


def held(tier: Tier) -> list[str]:
    return sorted(f"{kept.root} {kept.info.rank} {kept.info.tag}" for kept in tier)


async def test_the_newest_takes_the_place_of_the_older_one(slots: Slots) -> None:
    """TIER-1, TIER-3: the old slot comes free once the new one is held, not before."""
    tier, seen = Tier(10 * SIZE), []
    old, new = slots.slot(0), slots.slot(1)
    assert offer(tier, old, info(1))
    kept = tier.of("/r", ME, 0)
    slots.watch = lambda: seen.append(held(tier))
    assert offer(tier, new, info(2))
    assert slots.free == [0]
    assert seen == [["/r 0 t2"]], "at no moment was there none, and none was held twice"
    assert new.in_use
    assert not old.in_use
    assert kept is not None
    assert kept.digests.cancelled() or kept.digests.done()
    tier.drop(tier.of("/r", ME, 0))  # type: ignore[arg-type]  # there is one


async def test_what_is_older_is_not_held(slots: Slots) -> None:
    """TIER-1: by start first, then by the count of saves."""
    tier, slot = Tier(10 * SIZE), slots.slot(0)
    assert offer(tier, slot, info(1, start=2))
    other = slots.slot(1)
    assert offer(tier, other, info(9, start=1)) is None
    assert offer(tier, other, info(1, start=2)) is None
    assert not other.in_use
    assert held(tier) == ["/r 0 t1"]
    assert offer(tier, other, info(0, start=3))
    assert held(tier) == ["/r 0 t0"]


async def test_each_rank_of_each_root_has_its_own(slots: Slots) -> None:
    tier = Tier(10 * SIZE)
    offer(tier, slots.slot(0), info(1))
    offer(tier, slots.slot(1), info(1, rank=1))
    offer(tier, slots.slot(2), info(1), "/other")
    assert held(tier) == ["/other 0 t1", "/r 0 t1", "/r 1 t1"]
    assert tier.nbytes == 3 * SIZE


async def test_each_user_of_a_root_has_its_own(slots: Slots) -> None:
    """TIER-1: neither a newer one of another user nor an older one changes anything."""
    tier = Tier(10 * SIZE)
    mine = offer(tier, slots.slot(0), info(2))
    assert offer(tier, slots.slot(1), info(3), uid=OTHER)
    assert offer(tier, slots.slot(2), info(1), uid=OTHER + 1)
    assert tier.of("/r", ME, 0) is mine
    assert [kept.info.n for kept in tier.at("/r", OTHER)] == [3]
    assert slots.free == []
    tier.drop(next(tier.at("/r", OTHER)))
    assert (tier.of("/r", ME, 0), slots.free) == (mine, [1])


async def test_the_budget(slots: Slots) -> None:
    """TIER-2"""
    tier = Tier(2 * SIZE)
    assert offer(tier, slots.slot(0), info(1))
    assert offer(tier, slots.slot(1), info(1, rank=1))
    third = slots.slot(2)
    assert offer(tier, third, info(1, rank=2)) is None
    assert not third.in_use
    assert tier.nbytes == 2 * SIZE
    assert offer(tier, third, info(2)), "what it replaces makes the room for it"
    assert tier.nbytes == 2 * SIZE


async def test_what_does_not_fit_leaves_nothing_stale_behind(slots: Slots) -> None:
    """TIER-1, TIER-2: the older one would keep its slot from the client for nothing."""
    tier = Tier(SIZE)
    assert offer(tier, slots.slot(0), info(1))
    tier.held_bytes_max = SIZE - 1
    assert offer(tier, slots.slot(1), info(2)) is None
    assert held(tier) == []
    assert slots.free == [0]


async def test_nothing_is_held_without_a_budget(slots: Slots) -> None:
    tier, slot = Tier(0), slots.slot(0)
    assert offer(tier, slot, info(1)) is None
    assert not slot.in_use


async def test_the_digests_are_those_of_the_tensors(slots: Slots) -> None:
    tier = Tier(10 * SIZE)
    kept = offer(tier, slots.slot(0), info(1))
    assert kept is not None
    digests = await kept.digests
    assert digests == tuple(xxh3_128(SHARD.buffer[t.offset : t.offset + t.nbytes].copy()) for t in SHARD.tensors)
    assert len(set(digests)) == len(SHARD.tensors)


async def test_dropping_what_is_not_held_any_more_changes_nothing(slots: Slots) -> None:
    tier = Tier(10 * SIZE)
    old = offer(tier, slots.slot(0), info(1))
    offer(tier, slots.slot(1), info(2))
    assert old is not None
    tier.drop(old)
    assert held(tier) == ["/r 0 t2"]
    assert slots.free == [0]


async def test_it_is_dropped_some_time_after_its_trainer_has_gone(slots: Slots) -> None:
    tier = Tier(10 * SIZE)
    kept = offer(tier, slots.slot(0), info(1))
    assert kept is not None
    tier.drop_after(kept, 0.0)
    await until(lambda: not held(tier))
    assert slots.free == [0]


async def test_it_stays_where_the_trainer_comes_back_in_time(slots: Slots) -> None:
    tier = Tier(10 * SIZE)
    kept = offer(tier, slots.slot(0), info(1))
    assert kept is not None
    tier.drop_after(kept, 0.0)
    timer = kept.timer
    tier.wanted(kept)
    assert timer is not None
    assert timer.cancelled()
    assert held(tier) == ["/r 0 t1"]


async def test_leaving_twice_sets_one_timer(slots: Slots) -> None:
    tier = Tier(10 * SIZE)
    kept = offer(tier, slots.slot(0), info(1))
    assert kept is not None
    tier.drop_after(kept, 1000.0)
    first = kept.timer
    tier.drop_after(kept, 1000.0)
    assert first is not None
    assert first.cancelled()
    tier.drop(kept)
    assert kept.timer is None


async def test_a_replaced_one_drops_nothing_when_its_time_comes(slots: Slots) -> None:
    tier = Tier(10 * SIZE)
    old = offer(tier, slots.slot(0), info(1))
    assert old is not None
    tier.drop_after(old, 1000.0)
    timer = old.timer
    offer(tier, slots.slot(1), info(2))
    assert timer is not None
    assert timer.cancelled()
    assert held(tier) == ["/r 0 t2"]


async def test_it_describes_itself(slots: Slots) -> None:
    tier = Tier(10 * SIZE)
    kept = offer(tier, slots.slot(0), info(7, start=3))
    assert kept is not None
    kept.phase = "committed"
    described = kept.described()
    assert (described.tag, described.attempt, described.step, described.order) == ("t7", "00000003-0", 7, (3, 7))
    assert (described.world_size, described.nbytes, described.phase, described.nonce) == (2, SIZE, "committed", "n")


async def test_hashing_runs_beside_the_loop(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of many GiB takes seconds: a save must not wait for them."""
    go, threads = threading.Event(), []

    def slow(*arguments: object) -> tuple[bytes, ...]:
        threads.append(threading.current_thread())
        go.wait()
        return (b"digest",)

    monkeypatch.setattr(tier_module, "digests_of", slow)
    kept = offer(Tier(10 * SIZE), slots.slot(0), info(1))
    assert kept is not None
    await until(lambda: bool(threads))
    assert threads != [threading.main_thread()]
    assert not kept.digests.done()
    go.set()
    assert await kept.digests == (b"digest",)
