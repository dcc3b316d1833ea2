"""Slots: what is mapped and what is refused, who keeps a mapping alive, and that its memory goes with the last (E1 to E4)."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointd.daemon.memory import Memory, SlotMemory
from checkpointd.errors import UsageError
from tests.unit.daemon.conftest import ADD_SEALS, SEAL_GROW, SEAL_SHRINK, open_descriptors, sealed_memfd, slots_mapped

PAGE = mmap.PAGESIZE
CONTENT = bytes(range(256)) * (2 * PAGE // 256)


@pytest.fixture
def memory() -> Iterator[Memory]:
    """Room for four slots of two pages; nothing of them may be left at the end."""
    gc.collect()  # what other tests have left
    before = open_descriptors(), slots_mapped()
    memory = Memory(4 * len(CONTENT))
    yield memory
    assert memory.account.used == 0
    assert len(memory) == 0
    assert (open_descriptors(), slots_mapped()) == before


class Owner:
    """A client: it counts how often it heard that a slot is free."""

    def __init__(self) -> None:
        self.free = 0

    def on_idle(self) -> None:
        self.free += 1


def mapped(memory: Memory, owner: Owner, descriptor: int | None = None) -> SlotMemory:
    return memory.map(sealed_memfd(CONTENT) if descriptor is None else descriptor, len(CONTENT), owner, owner.on_idle)


def refused(memory: Memory, descriptor: int, nbytes: int, why: str) -> None:
    """The descriptor is taken all the same: the fixture sees that it was closed."""
    with pytest.raises(UsageError, match=why):
        memory.map(descriptor, nbytes, object(), lambda: None)


def test_a_slot_is_what_the_client_wrote_and_cannot_be_written_here(memory: Memory) -> None:
    owner = Owner()
    slot = mapped(memory, owner)
    assert slot.image.tobytes() == CONTENT
    assert not slot.image.flags.writeable
    slot.disown(owner)


def test_what_the_client_writes_later_is_seen(memory: Memory) -> None:
    owner, descriptor = Owner(), sealed_memfd(CONTENT)
    slot = mapped(memory, owner, os.dup(descriptor))
    os.pwrite(descriptor, b"new", 5)
    assert slot.image[5:8].tobytes() == b"new"
    os.close(descriptor)
    slot.disown(owner)


@pytest.mark.parametrize("seals", [0, SEAL_GROW, SEAL_SHRINK])
def test_memory_that_could_shrink_or_grow(memory: Memory, seals: int) -> None:
    """E1"""
    refused(memory, sealed_memfd(CONTENT, seals), len(CONTENT), "sealed against shrinking and growing")


def test_a_file_that_is_no_memfd(memory: Memory, tmp_path: Path) -> None:
    """E1"""
    (tmp_path / "file").write_bytes(CONTENT)
    refused(memory, os.open(tmp_path / "file", os.O_RDWR), len(CONTENT), "must be a memfd|sealed")
    refused(memory, os.open("/dev/zero", os.O_RDWR), PAGE, "must be a memfd")
    reading, writing = os.pipe()
    os.close(writing)
    refused(memory, reading, PAGE, "must be a memfd")
    refused(memory, os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR), PAGE, "sealed")


def test_memory_of_huge_pages(memory: Memory) -> None:
    """E1: a hole in it can end a read in SIGBUS."""
    try:
        descriptor = os.memfd_create("test-slot", os.MFD_HUGETLB | os.MFD_ALLOW_SEALING)
    except OSError as error:
        pytest.skip(f"this kernel has no huge pages: {error}")
    os.ftruncate(descriptor, 2 << 20)
    fcntl.fcntl(descriptor, ADD_SEALS, SEAL_SHRINK | SEAL_GROW)
    refused(memory, descriptor, 2 << 20, "not of huge ones")


@pytest.mark.parametrize("nbytes", [PAGE, 3 * PAGE, len(CONTENT) - 1, 0, -1, 1 << 62])
def test_another_size_than_was_announced(memory: Memory, nbytes: int) -> None:
    refused(memory, sealed_memfd(CONTENT), nbytes, "were announced")


@pytest.mark.parametrize("nbytes", [0, 100])
def test_no_whole_number_of_pages(memory: Memory, nbytes: int) -> None:
    refused(memory, sealed_memfd(CONTENT[:nbytes]), nbytes, "a whole number of pages")


def test_a_descriptor_that_cannot_be_read(memory: Memory) -> None:
    descriptor = sealed_memfd(CONTENT)
    write_only = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY)
    os.close(descriptor)
    refused(memory, write_only, len(CONTENT), "cannot be mapped")


def test_more_than_there_is_room_for(memory: Memory) -> None:
    """E3"""
    owner = Owner()
    slots = [mapped(memory, owner) for _ in range(4)]
    assert memory.account.used == 4 * len(CONTENT)
    refused(memory, sealed_memfd(CONTENT), len(CONTENT), "do not fit: 32768 of 32768 bytes are in use")
    slots.pop().disown(owner)
    slots.append(mapped(memory, owner))
    for slot in slots:
        slot.disown(owner)


def test_a_client_hears_when_its_last_user_has_gone(memory: Memory) -> None:
    owner = Owner()
    slot = mapped(memory, owner)
    slot.use("job")
    slot.use("tier")
    slot.leave("job")
    slot.leave("job")
    assert (owner.free, slot.in_use) == (0, True)
    slot.leave("tier")
    assert (owner.free, slot.in_use) == (1, False)
    slot.leave("tier")
    assert owner.free == 1
    slot.disown(owner)


def test_a_slot_outlives_its_client_while_it_is_used(memory: Memory) -> None:
    """E2"""
    owner = Owner()
    slot = mapped(memory, owner)
    slot.use("job")
    slot.disown(owner)
    assert slot.image.tobytes() == CONTENT
    assert memory.account.used == len(CONTENT)
    slot.leave("job")
    assert not slot.mapped
    assert owner.free == 0


def test_a_view_keeps_the_mapping_and_nothing_else(memory: Memory) -> None:
    """E2: a thread that still reads is not cut off."""
    owner = Owner()
    slot = mapped(memory, owner)
    view = slot.image[:10]
    slot.disown(owner)
    assert view.tobytes() == CONTENT[:10]
    assert memory.account.used == 0
    del view


def test_what_only_a_cycle_holds_is_unmapped_when_room_is_short_and_when_asked(memory: Memory) -> None:
    """As an error does, with the frames that it came through; the garbage collector may not run for hours."""

    def gone() -> None:
        owner, slot = Owner(), None
        slot = mapped(memory, owner)
        cycle: list[object] = [slot.image]
        cycle.append(cycle)
        slot.disown(owner)

    gc.disable()
    try:
        before = slots_mapped()
        gone()
        assert slots_mapped() == before + 1
        assert memory.release_lingering() == 0
        assert slots_mapped() == before
        for _ in range(5):  # there is room for four
            gone()
        assert slots_mapped() == before + 1
        memory.release_lingering()
    finally:
        gc.enable()


def test_one_memfd_is_one_slot_however_often_it_comes(memory: Memory) -> None:
    """E4"""
    before, after, descriptor = Owner(), Owner(), sealed_memfd(CONTENT)
    slot = mapped(memory, before, os.dup(descriptor))
    slot.use("job")
    slot.disown(before)  # its connection broke
    again = mapped(memory, after, os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR))
    os.close(descriptor)
    assert again is slot
    assert again.in_use
    assert memory.account.used == len(CONTENT)
    slot.leave("job")
    assert (before.free, after.free) == (0, 1)
    slot.disown(after)


def test_two_memfds_are_two_slots(memory: Memory) -> None:
    """E4"""
    owner = Owner()
    one, other = mapped(memory, owner), mapped(memory, owner)
    assert one is not other
    one.disown(owner)
    other.disown(owner)


def test_a_memfd_that_was_forgotten_can_come_again(memory: Memory) -> None:
    owner, descriptor = Owner(), sealed_memfd(CONTENT)
    mapped(memory, owner, os.dup(descriptor)).disown(owner)
    slot = mapped(memory, owner, descriptor)
    assert slot.image.tobytes() == CONTENT
    slot.disown(owner)
