"""One end of a connection: messages and their descriptors in order, and nothing held back, leaked or starved
(CHANNEL-1 to CHANNEL-3).
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.channel import Channel, Received, connect
from checkpointd.daemon.protocol.wire import encode
from checkpointd.errors import WireError
from tests.unit.daemon.conftest import open_descriptors, until

PING, SLOT = wire.Ping(), wire.Slot(slot=0, nbytes=4096)


LONG = 60 << 10
"""Characters of nearly the longest message that there may be."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def theirs(ends: tuple[socket.socket, socket.socket]) -> socket.socket:
    """The other end, raw."""
    return ends[1]


@pytest.fixture
async def channel(ends: tuple[socket.socket, socket.socket]) -> AsyncIterator[Channel]:
    channel = Channel(ends[0])
    channel.allow_frames(wire.FRAME_BYTES_MAX)
    yield channel
    channel.close()


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.open("/dev/null", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def send_with(connection: socket.socket, data: bytes, *descriptors: int) -> None:
    connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])


def same_file(one: int, other: int) -> bool:
    return os.path.sameopenfile(one, other)


@pytest.fixture
def zero() -> Iterator[int]:
    descriptor = os.open("/dev/zero", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


async def test_messages_come_in_order_with_their_descriptors(
    channel: Channel, theirs: socket.socket, file: int, zero: int
) -> None:
    """CHANNEL-1"""
    send_with(theirs, encode(SLOT, 1), file)
    theirs.sendall(encode(PING))
    send_with(theirs, encode(wire.Slot(slot=1, nbytes=4096), 1), zero)
    first, second, third = [await channel.receive() for _ in range(3)]
    assert first is not None
    assert second == Received(PING)
    assert third is not None
    assert first.descriptor is not None
    assert third.descriptor is not None
    assert same_file(first.descriptor, file)
    assert same_file(third.descriptor, zero)
    os.close(first.descriptor)
    os.close(third.descriptor)


async def test_a_descriptor_that_arrives_is_not_inherited(channel: Channel, theirs: socket.socket, file: int) -> None:
    send_with(theirs, encode(SLOT, 1), file)
    received = await channel.receive()
    assert received is not None
    assert received.descriptor is not None
    assert not os.get_inheritable(received.descriptor)
    os.close(received.descriptor)


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 20])
async def test_a_frame_in_two_pieces_with_its_descriptor_on_the_first(
    channel: Channel, theirs: socket.socket, file: int, cut: int
) -> None:
    """CHANNEL-1"""
    frame = encode(SLOT, 1)
    receiving = asyncio.create_task(channel.receive())
    send_with(theirs, frame[:cut], file)
    await until(lambda: channel._decoder.buffered == cut)
    theirs.sendall(frame[cut:])
    received = await receiving
    assert received is not None
    assert received.descriptor is not None
    assert same_file(received.descriptor, file)
    os.close(received.descriptor)


async def test_a_descriptor_that_nothing_announces_ends_the_connection(
    channel: Channel, theirs: socket.socket, file: int
) -> None:
    """CHANNEL-1: it must not become the descriptor of a later message."""
    send_with(theirs, encode(PING), file)
    with pytest.raises(WireError, match="no message announced"):
        await channel.receive()


async def test_a_descriptor_on_half_a_frame_that_announces_none(channel: Channel, theirs: socket.socket, file: int) -> None:
    """CHANNEL-1"""
    send_with(theirs, encode(PING)[:-1], file)
    with pytest.raises(WireError, match="no message announced"):
        await channel.receive()


async def test_an_announced_descriptor_that_does_not_come(channel: Channel, theirs: socket.socket) -> None:
    theirs.sendall(encode(SLOT, 1))
    with pytest.raises(WireError, match="a Slot message came without the descriptor"):
        await channel.receive()


@pytest.mark.parametrize("count", [2, 3, 100, 253])
async def test_many_descriptors_at_once(channel: Channel, theirs: socket.socket, file: int, count: int) -> None:
    send_with(theirs, encode(SLOT, 1), *[file] * count)
    with pytest.raises(WireError, match="descriptor"):
        await channel.receive()


async def test_no_descriptor_is_left_open(ends: tuple[socket.socket, socket.socket], file: int) -> None:
    """CHANNEL-1: whatever was not handed out goes with the channel."""
    before = open_descriptors()
    channel = Channel(ends[0].dup())
    send_with(ends[1], encode(SLOT, 1) + encode(SLOT, 1)[:8], file)
    ends[1].sendall(encode(PING))
    send_with(ends[1], encode(PING), *[file] * 40)
    received = await channel.receive()
    assert received is not None
    assert received.descriptor is not None
    os.close(received.descriptor)
    with pytest.raises(WireError):
        await channel.receive()
    channel.close()
    assert open_descriptors() <= before


async def test_the_end_of_the_stream(channel: Channel, theirs: socket.socket) -> None:
    theirs.sendall(encode(PING))
    theirs.close()
    assert await channel.receive() == Received(PING)
    assert await channel.receive() is None


async def test_half_a_frame_and_then_the_end(channel: Channel, theirs: socket.socket) -> None:
    theirs.sendall(encode(PING)[:-1])
    theirs.close()
    assert await channel.receive() is None


async def test_half_a_frame_and_then_nothing(channel: Channel, theirs: socket.socket) -> None:
    theirs.sendall(encode(PING)[:-1])
    with pytest.raises(WireError, match="half a message came"):
        await channel.receive(stall_s=0.01)


async def test_a_silence_between_messages_may_last(channel: Channel, theirs: socket.socket) -> None:
    """The limit is for the rest of a message, not for the next one."""
    receiving = asyncio.create_task(channel.receive(stall_s=0.0))
    await until(lambda: bool(channel._waits))
    for _ in range(20):
        await asyncio.sleep(0)
    theirs.sendall(encode(PING))
    assert await receiving == Received(PING)


async def test_garbage(channel: Channel, theirs: socket.socket) -> None:
    theirs.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    with pytest.raises(WireError, match="not checkpointd's protocol"):
        await channel.receive()


async def test_messages_longer_than_the_socket_takes_at_once(channel: Channel, theirs: socket.socket) -> None:
    """CHANNEL-2"""
    other = Channel(theirs)
    other.allow_frames(wire.FRAME_BYTES_MAX)
    reports = [wire.Report(status=letter * LONG) for letter in "abcdefghij" * 4]
    sending = asyncio.gather(*(channel.send(report) for report in reports))
    received = [await other.receive() for _ in reports]
    await sending
    assert [one.message for one in received if one] == reports
    other.close()


async def test_a_long_message_brings_its_descriptor(channel: Channel, theirs: socket.socket, file: int) -> None:
    """CHANNEL-1"""
    other = Channel(theirs)
    other.allow_frames(wire.FRAME_BYTES_MAX)
    sending = asyncio.create_task(channel.send(wire.Report(status="x" * LONG), file))
    received = await other.receive()
    await sending
    assert received is not None
    assert received.descriptor is not None
    assert same_file(received.descriptor, file)
    os.close(received.descriptor)
    other.close()


async def test_a_message_that_was_cut_off_is_followed_by_no_other(channel: Channel, theirs: socket.socket) -> None:
    """CHANNEL-2"""
    channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sending = asyncio.create_task(channel.send(wire.Report(status="x" * LONG)))
    await until(lambda: bool(channel._waits))
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    with pytest.raises(ConnectionError):
        await channel.send(PING)
    theirs.sendall(encode(PING))
    assert await channel.receive() == Received(PING)


async def test_sending_to_nobody(channel: Channel, theirs: socket.socket) -> None:
    theirs.close()
    with pytest.raises(ConnectionError):
        await channel.send(PING)


async def test_what_the_other_end_said_before_it_died_is_received(channel: Channel, theirs: socket.socket, file: int) -> None:
    """CHANNEL-2: also where it cannot be answered any more."""
    send_with(theirs, encode(SLOT, 1), file)
    theirs.sendall(encode(PING))
    theirs.close()
    for _ in range(2):
        with pytest.raises(ConnectionError):
            await channel.send(PING)
    received = await channel.receive()
    assert received is not None
    assert received.descriptor is not None
    os.close(received.descriptor)
    assert await channel.receive() == Received(PING)
    assert await channel.receive() is None


async def test_closing_wakes_who_waits(channel: Channel, theirs: socket.socket) -> None:
    receiving = asyncio.create_task(channel.receive())
    await until(lambda: bool(channel._waits))
    channel.close()
    assert await receiving is None
    channel.close()


async def test_who_sends_without_a_pause_lets_others_have_their_turn(channel: Channel, theirs: socket.socket) -> None:
    """CHANNEL-3"""
    theirs.sendall(encode(PING) * 500)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.create_task(other())
    for _ in range(500):
        await channel.receive()
    assert turns >= 499
    task.cancel()


async def test_a_long_message_lets_others_have_their_turn(channel: Channel, theirs: socket.socket) -> None:
    """CHANNEL-3: between its pieces."""
    frame = encode(wire.Report(status="x" * LONG))
    receiving = asyncio.create_task(channel.receive())
    theirs.setblocking(False)
    turns, left = 0, memoryview(frame)
    while not receiving.done():
        turns += 1
        try:
            while left:  # as much as there is room for: there is always something to read
                left = left[theirs.send(left[: 64 << 10]) :]
        except BlockingIOError:
            pass
        await asyncio.sleep(0)
    assert turns >= 2
    assert not left


async def test_the_stream_ends_with_the_process_though_others_hold_it_open(channel: Channel, theirs: socket.socket) -> None:
    theirs.sendall(encode(PING) + encode(wire.Look()))
    channel.expect_no_more()
    assert await channel.receive() == Received(PING)
    assert await channel.receive() == Received(wire.Look())
    assert await channel.receive() is None


async def test_who_waits_already_hears_that_no_more_will_come(channel: Channel, theirs: socket.socket) -> None:
    receiving = asyncio.create_task(channel.receive())
    await until(lambda: bool(channel._waits))
    channel.expect_no_more()
    assert await receiving is None


async def test_the_peer_is_who_the_kernel_says(channel: Channel, theirs: socket.socket) -> None:
    assert (channel.peer.pid, channel.peer.uid, channel.peer.gid) == (os.getpid(), os.getuid(), os.getgid())


async def test_nobody_listens(tmp_path: Path) -> None:
    before = open_descriptors()
    with pytest.raises(FileNotFoundError):
        await connect(str(tmp_path / "none"))
    assert open_descriptors() <= before
