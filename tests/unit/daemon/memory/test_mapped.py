"""Slots: what is mapped and what is refused, who keeps a mapping alive, and that its memory goes with the last
(SLOTMAP-1 to SLOTMAP-4).
"""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpointd.daemon.accounts import Account
from checkpointd.daemon.memory.mapped import SlotMappings, SlotMemory
from checkpointd.errors import SidecarFullError, UsageError
from tests.unit.daemon.conftest import (
    ADD_SEALS,
    SEAL_FUTURE_WRITE,
    SEAL_GROW,
    SEAL_SHRINK,
    SEALS,
    empty_memfd,
    sealed_memfd,
    slots_mapped,
    slots_open,
)

PAGE = mmap.PAGESIZE
CONTENT = bytes(range(256)) * (2 * PAGE // 256)


class Room(SlotMappings):
    """Slots of one user, who may have `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.account = Account(limit)


@pytest.fixture
def memory() -> Iterator[Room]:
    """Room for four slots of two pages; nothing of them may be left at the end."""
    memory = Room(4 * len(CONTENT))
    yield memory
    assert memory.release_lingering() == 0
    assert memory.account.used == 0
    assert len(memory) == 0
    assert (slots_open(), slots_mapped()) == (0, 0)


class Owner:
    """A client: it counts how often it heard that a slot is free."""

    def __init__(self) -> None:
        self.free = 0

    def on_idle(self) -> None:
        self.free += 1


def mapped(memory: Room, owner: Owner, descriptor: int | None = None) -> SlotMemory:
    given = sealed_memfd(CONTENT) if descriptor is None else descriptor
    return memory.map(given, len(CONTENT), memory.account, owner, owner.on_idle)


def refused(memory: Room, descriptor: int, nbytes: int, why: str) -> None:
    """The descriptor is taken all the same: the fixture sees that it was closed."""
    with pytest.raises((UsageError, SidecarFullError), match=why):
        memory.map(descriptor, nbytes, memory.account, object(), lambda: None)


def test_a_slot_is_what_the_client_wrote_and_cannot_be_written_here(memory: Room) -> None:
    owner = Owner()
    slot = mapped(memory, owner)
    assert slot.buffer.tobytes() == CONTENT
    assert not slot.buffer.flags.writeable
    slot.disown(owner)


def test_what_the_client_writes_later_is_seen(memory: Room) -> None:
    owner, descriptor = Owner(), sealed_memfd(CONTENT, seals=0)
    with mmap.mmap(descriptor, len(CONTENT)) as written:
        fcntl.fcntl(descriptor, ADD_SEALS, SEALS)
        slot = mapped(memory, owner, os.dup(descriptor))
        written[5:8] = b"new"
    assert slot.buffer[5:8].tobytes() == b"new"
    os.close(descriptor)
    slot.disown(owner)


@pytest.mark.parametrize("missing", [SEALS, SEAL_GROW, SEAL_SHRINK, SEAL_FUTURE_WRITE])
def test_memory_that_could_shrink_or_grow_or_get_holes(memory: Room, missing: int) -> None:
    """SLOTMAP-1"""
    refused(
        memory,
        sealed_memfd(CONTENT, SEALS & ~missing),
        len(CONTENT),
        "must be sealed: F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_FUTURE_WRITE",
    )


def test_no_hole_is_punched_into_what_was_looked_at(memory: Room) -> None:
    """SLOTMAP-1, SLOTMAP-5: not even through a mapping that the client had before the seal."""
    owner, descriptor = Owner(), sealed_memfd(CONTENT, seals=0)
    with mmap.mmap(descriptor, len(CONTENT)) as written:
        fcntl.fcntl(descriptor, ADD_SEALS, SEALS)
        slot = mapped(memory, owner, os.dup(descriptor))
        slot.check_whole(len(CONTENT))
        with pytest.raises(PermissionError):
            written.madvise(mmap.MADV_REMOVE)
    slot.check_whole(len(CONTENT))
    assert slot.buffer.tobytes() == CONTENT
    os.close(descriptor)
    slot.disown(owner)


def test_a_file_that_is_no_memfd(memory: Room, tmp_path: Path) -> None:
    """SLOTMAP-1"""
    (tmp_path / "file").write_bytes(CONTENT)
    refused(memory, os.open(tmp_path / "file", os.O_RDWR), len(CONTENT), "must be a memfd|sealed")
    refused(memory, os.open("/dev/zero", os.O_RDWR), PAGE, "must be a memfd")
    reading, writing = os.pipe()
    os.close(writing)
    refused(memory, reading, PAGE, "must be a memfd")
    refused(memory, os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR), PAGE, "sealed")


def test_memory_of_huge_pages(memory: Room) -> None:
    """SLOTMAP-1: a hole in it can end a read in SIGBUS."""
    try:
        descriptor = empty_memfd(os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"this kernel has no huge pages: {error}")
    os.ftruncate(descriptor, 2 << 20)
    fcntl.fcntl(descriptor, ADD_SEALS, SEALS)
    refused(memory, descriptor, 2 << 20, "not of huge ones")


@pytest.mark.parametrize("nbytes", [PAGE, 3 * PAGE, len(CONTENT) - 1, 0, -1, 1 << 62])
def test_another_size_than_was_announced(memory: Room, nbytes: int) -> None:
    refused(memory, sealed_memfd(CONTENT), nbytes, "were announced")


@pytest.mark.parametrize("nbytes", [0, 100])
def test_no_whole_number_of_pages(memory: Room, nbytes: int) -> None:
    refused(memory, sealed_memfd(CONTENT[:nbytes]), nbytes, "a whole number of pages")


def test_a_descriptor_that_cannot_be_read(memory: Room) -> None:
    descriptor = sealed_memfd(CONTENT)
    write_only = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY)
    os.close(descriptor)
    refused(memory, write_only, len(CONTENT), "cannot be mapped")


def test_more_than_there_is_room_for(memory: Room) -> None:
    """SLOTMAP-3"""
    owner = Owner()
    slots = [mapped(memory, owner) for _ in range(4)]
    assert memory.account.used == 4 * len(CONTENT)
    refused(memory, sealed_memfd(CONTENT), len(CONTENT), "may use 32.0 KiB, of which 32.0 KiB is in use")
    slots.pop().disown(owner)
    slots.append(mapped(memory, owner))
    for slot in slots:
        slot.disown(owner)


def test_a_client_hears_when_its_last_user_has_gone(memory: Room) -> None:
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


def test_a_slot_outlives_its_client_while_it_is_used(memory: Room) -> None:
    """SLOTMAP-2"""
    owner = Owner()
    slot = mapped(memory, owner)
    slot.use("job")
    slot.disown(owner)
    assert slot.buffer.tobytes() == CONTENT
    assert memory.account.used == len(CONTENT)
    slot.leave("job")
    assert slot._buffer is None
    assert owner.free == 0


def test_a_view_keeps_the_mapping_and_nothing_else(memory: Room) -> None:
    """SLOTMAP-2, SLOTMAP-3: a thread that still reads is not cut off, and what it keeps is still charged."""
    owner = Owner()
    slot = mapped(memory, owner)
    view = slot.buffer[:10]
    slot.disown(owner)
    assert view.tobytes() == CONTENT[:10]
    assert memory.account.used == len(CONTENT)
    del view
    memory.settle()
    assert memory.account.used == 0


@pytest.mark.nightly
def test_what_only_a_cycle_holds_is_unmapped_when_room_is_short_and_when_asked(memory: Room) -> None:
    """As an error does, with the frames that it came through; the garbage collector may not run for hours."""

    def gone() -> None:
        owner, slot = Owner(), None
        slot = mapped(memory, owner)
        cycle: list[object] = [slot.buffer]
        cycle.append(cycle)
        slot.disown(owner)

    gc.disable()
    try:
        gone()
        assert slots_mapped() == 1
        assert memory.release_lingering() == 0
        assert slots_mapped() == 0
        for _ in range(5):  # there is room for four
            gone()
        assert slots_mapped() == 1
        memory.release_lingering()
    finally:
        gc.enable()


def test_one_memfd_is_one_slot_however_often_it_comes(memory: Room) -> None:
    """SLOTMAP-4"""
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


def test_a_slot_of_another_user(memory: Room) -> None:
    """SLOTMAP-4: it would be charged to the one, and kept by the other."""
    owner, descriptor = Owner(), sealed_memfd(CONTENT)
    slot = mapped(memory, owner, os.dup(descriptor))
    with pytest.raises(UsageError, match="another user"):
        memory.map(descriptor, len(CONTENT), Account(1 << 30), object(), lambda: None)
    slot.disown(owner)


def test_what_was_never_written_is_not_read(memory: Room) -> None:
    """SLOTMAP-5: a read of it would allocate memory here, while it costs its client nothing."""
    owner = Owner()
    descriptor = empty_memfd()
    os.ftruncate(descriptor, len(CONTENT))
    with mmap.mmap(descriptor, len(CONTENT)) as written:
        fcntl.fcntl(descriptor, ADD_SEALS, SEALS)
        slot = mapped(memory, owner, os.dup(descriptor))
        with pytest.raises(UsageError, match="hole at byte 0"):
            slot.check_whole(PAGE)
        written[0] = 1
        slot.check_whole(PAGE)
        with pytest.raises(UsageError, match=f"hole at byte {PAGE}"):
            slot.check_whole(2 * PAGE)
        written[:] = CONTENT
    slot.check_whole(2 * PAGE)
    assert os.fstat(descriptor).st_blocks * 512 == len(CONTENT)
    os.close(descriptor)
    slot.disown(owner)


def test_two_memfds_are_two_slots(memory: Room) -> None:
    """SLOTMAP-4"""
    owner = Owner()
    one, other = mapped(memory, owner), mapped(memory, owner)
    assert one is not other
    one.disown(owner)
    other.disown(owner)


def test_a_memfd_that_was_forgotten_can_come_again(memory: Room) -> None:
    owner, descriptor = Owner(), sealed_memfd(CONTENT)
    mapped(memory, owner, os.dup(descriptor)).disown(owner)
    slot = mapped(memory, owner, descriptor)
    assert slot.buffer.tobytes() == CONTENT
    slot.disown(owner)
