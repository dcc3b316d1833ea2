"""ARENA-1, ARENA-3 and ARENA-6 of arena.py: who has which slot, and that Ctrl-C loses none."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from types import CodeType

import pytest

from checkpointd_client.staging import arena as arena_module
from checkpointd_client.staging.arena import Arena, SlotHold
from tests.interruptions import Interruption

PAGE = 4096


def held(arena: Arena, nbytes: int = PAGE) -> SlotHold | None:
    """A hold on a free slot; None if there is none."""
    hold = SlotHold(arena)
    return hold if arena.acquire(hold, nbytes, 0) else None


def of_the_arena(code: CodeType) -> bool:
    return code.co_filename == arena_module.__file__


def test_two_slots_are_used_in_turn_and_a_third_hold_gets_none() -> None:
    arena = Arena()
    first, second = held(arena), held(arena)
    assert first is not None
    assert second is not None
    assert first.slot is not second.slot
    assert held(arena) is None
    first.release()
    third = held(arena)
    assert third is not None
    assert third.slot is first.slot
    first.release()  # a second time: the slot is another hold's now
    assert held(arena) is None


def test_a_slot_that_is_too_small_is_replaced_while_it_is_free() -> None:
    gone: list[int] = []
    arena = Arena(on_gone=gone.append)
    small = held(arena)
    assert small is not None
    small.release()
    large = held(arena, 3 * PAGE)
    assert large is not None
    assert gone == [small.slot.number]
    assert small.slot.is_released
    assert large.slot.capacity == 3 * PAGE
    large.release()
    fitting = held(arena)
    assert fitting is not None
    assert fitting.slot is large.slot
    assert held(arena) is not None
    assert held(arena) is None


def test_a_slot_that_may_still_be_read_is_never_used_again() -> None:
    arena = Arena()
    lost = held(arena)
    assert lost is not None
    lost.slot.lost = True
    lost.release()
    found = [held(arena), held(arena)]
    assert all(hold is not None and hold.slot is not lost.slot for hold in found)


def test_arena_5_a_slot_that_a_device_may_still_write_is_never_used_again_and_keeps_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = list[arena_module.Slot]()
    monkeypatch.setattr(arena_module, "_UNSAFE", kept)
    arena = Arena()
    unsafe = held(arena)
    assert unsafe is not None
    slot = unsafe.slot
    slot.still_written = True
    unsafe.release()
    found = [held(arena), held(arena)]
    assert all(hold is not None and hold.slot is not slot for hold in found)
    arena.close()
    assert kept == [slot]
    slot.memory.fill_(7)
    assert slot.buffer.min() == 7


def test_a_slot_that_cannot_be_made_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena()
    hold = SlotHold(arena)
    with monkeypatch.context() as patch:
        patch.setattr(arena_module, "page_up", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            arena.acquire(hold, PAGE, 0)
    hold.release()
    assert [held(arena), held(arena)].count(None) == 0


def test_a_closed_arena_gives_its_memory_back_when_it_is_free() -> None:
    arena = Arena()
    busy, free = held(arena), held(arena)
    assert busy is not None
    assert free is not None
    free.release()
    arena.close()
    assert free.slot.is_released
    assert not busy.slot.is_released
    busy.release()
    assert busy.slot.is_released
    assert held(arena) is None


class Hurry(threading.Event):
    """It is set while the third rest is waited for."""

    rests = 0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.rests += 1
        if self.rests == 3:
            self.set()
        return self.is_set()


def test_populating_gently_rests_after_each_piece_until_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(arena_module, "_PIECE", 4 * PAGE)
    populate, pieces, threads = arena_module._populate, list[int](), set[str]()

    def noted(address: int, some: Iterator[int], end: int) -> None:
        threads.add(threading.current_thread().name)
        populate(address, (pieces.append(start) or start for start in some), end)

    monkeypatch.setattr(arena_module, "_populate", noted)
    hold, hurried = held(Arena(), 102 * PAGE), Hurry()
    assert hold is not None
    hold.slot.populate_gently(10 * PAGE, hurried)
    assert (hurried.rests, len(threads)) == (3, 1)
    hold.slot.populate_gently(102 * PAGE, hurried)
    assert hurried.rests == 3
    assert len(threads) > 1
    assert sorted(pieces) == [0, 4 * PAGE, 8 * PAGE, *range(10 * PAGE, 102 * PAGE, 4 * PAGE)]
    assert os.fstat(hold.slot.fd).st_blocks * 512 == 102 * PAGE
    hold.release()


@pytest.mark.parametrize("threads", [1, 4])
def test_populating_allocates_every_page_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads share the pieces, and a second call has nothing to do."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(threads))
    monkeypatch.setattr(arena_module, "_PIECE", 4 * PAGE)
    populate, pieces = arena_module._populate, list[int]()

    def noted(address: int, some: Iterator[int], end: int) -> None:
        populate(address, (pieces.append(start) or start for start in some), end)

    monkeypatch.setattr(arena_module, "_populate", noted)
    hold = held(Arena(), 103 * PAGE)
    assert hold is not None
    before = os.fstat(hold.slot.fd).st_blocks
    hold.slot.populate(50 * PAGE)
    hold.slot.populate(102 * PAGE)
    hold.slot.populate(102 * PAGE)
    assert sorted(pieces) == [*range(0, 50 * PAGE, 4 * PAGE), *range(50 * PAGE, 102 * PAGE, 4 * PAGE)]
    assert before == 0
    assert os.fstat(hold.slot.fd).st_blocks * 512 == 102 * PAGE
    hold.release()


@pytest.mark.parametrize("grows", [False, True])
def test_ctrl_c_at_any_line_loses_no_slot(grows: bool) -> None:
    """Also where a slot is replaced by a larger one."""
    arena = Arena()
    for number in itertools.count(1):
        hold = SlotHold(arena)
        with Interruption(number, of_the_arena) as interruption:
            arena.acquire(hold, PAGE * (number if grows else 1), 0)
        hold.release()
        holds = [held(arena), held(arena), held(arena)]
        assert [one is None for one in holds] == [False, False, True], interruption.place
        for one in holds[:2]:
            assert one is not None
            assert not one.slot.is_released, interruption.place
            one.release()
        if not interruption.happened:
            break
    assert number > 10


def test_a_release_that_was_interrupted_can_be_called_again() -> None:
    arena = Arena()
    for number in itertools.count(1):
        hold = held(arena)
        assert hold is not None
        with Interruption(number, of_the_arena) as interruption:
            hold.release()
        hold.release()
        holds = [held(arena), held(arena), held(arena)]
        assert [one is None for one in holds] == [False, False, True], interruption.place
        for one in holds[:2]:
            assert one is not None
            one.release()
        if not interruption.happened:
            break
    assert number > 5
