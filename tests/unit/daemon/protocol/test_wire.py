"""Frames and messages: what a decoder gives back, what it refuses, and how little it holds (WIRE-1 to WIRE-3)."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.decoder import Decoder
from checkpointd.daemon.protocol.wire import HEAD, HELLO_BYTES_MAX, MAGIC, encode
from checkpointd.errors import WireError
from checkpointd.layout.boxes import whole
from checkpointd.layout.indexes import Alias
from checkpointd.layout.manifest import ErrorReport, Inline
from checkpointd.layout.save_timings import PhaseSeconds

HELD = wire.RetainedSnapshot(
    tag="t", attempt="00000001-0", step=1, order=(1, 0), world_size=2, nbytes=4096, phase="staged", nonce="n"
)
TENSOR = wire.WireTensor("w", "float32", (2, 3), whole((2, 3)), "rank", 0)
ERROR = ErrorReport(code="StagingError", message="torn", phase="staging")
EVERY: tuple[wire.Message, ...] = (
    wire.Hello(protocols=(1, 1), release="1", role="status"),
    wire.Welcome(protocol=1, release="1", pid=7, frame_bytes_max=1, slots_max=2, memory_bytes_max=3),
    wire.Refused(error=ERROR, save=3),
    wire.Join(root="/r", rank=1, world_size=2),
    wire.Look(),
    wire.Begin(start=3, nonce="n", compression="auto", chunk_bytes=4096, budget_bytes=1, commit_timeout_s=1.5),
    wire.Slot(slot=0, nbytes=4096),
    wire.DropSlot(slot=0),
    wire.Layout(layout=1, nbytes=4096, tensors=(TENSOR,)),
    wire.Save(save=1, tag="t", attempt="00000001-0", step=1, n=0, save_latest=True, left_s=1.0),
    wire.Contents(save=1, aliases=(Alias("a", "w", (2, 3), (3, 1), 0),), excluded=("x",), tree=b"{}"),
    wire.Announced(save=1, slot=0, layout=1, mark=3),
    wire.Staged(save=1, held_s=0.5),
    wire.Paced(save=1, share=0.5, left_s=30.0),
    wire.Spoiled(save=1, error=ERROR, held_s=0.5),
    wire.Inlined(
        tag="t",
        attempt="00000001-0",
        step=1,
        phase="committed",
        inline=Inline(reason="lost", why="no sidecar answers"),
        raw_total=8,
        stored=4,
        began_s=2.0,
        ended_s=1.0,
        seconds=PhaseSeconds(disk=0.5),
    ),
    wire.Fetch(attempt="00000001-0", tag="t"),
    wire.Fetch(attempt="00000001-0", tag="t", rank=3),
    wire.Leave(),
    wire.Ping(),
    wire.Joined(
        held=(HELD,),
        in_flight=(wire.InFlight(tag="t", attempt="00000001-0", rank=0, phase="staged", nonce="n"),),
        beside=(msgspec.structs.replace(HELD, rank=1),),
    ),
    wire.PhaseEntered(save=1, phase="committed", error=None, ranks=(1, 2)),
    wire.Progress(save=1, raw_total=4, raw_done=2, stored=1, votes_missing=(1,)),
    wire.Free(slot=0),
    wire.Snapshot(held=HELD, nbytes=4096, tensors=(TENSOR,), aliases=(), excluded=(), tree=b"", digests=(b"d" * 16,)),
    wire.Pong(),
    wire.Query(),
    wire.Report(status="{}"),
)


def decoded(data: bytes, frame_bytes_max: int = wire.FRAME_BYTES_MAX) -> list[tuple[wire.Message, int]]:
    return list(Decoder(frame_bytes_max).feed(data))


def frame(body: bytes, *, magic: int = MAGIC, descriptors: int = 0, zero: int = 0, length: int | None = None) -> bytes:
    return HEAD.pack(magic, descriptors, zero, len(body) if length is None else length) + body


def test_every_message_has_an_example() -> None:
    assert {type(message) for message in EVERY} == set(typing.get_args(wire.Message))


@pytest.mark.parametrize("message", EVERY, ids=lambda m: type(m).__name__)
def test_a_message_comes_back_as_it_was(message: wire.Message) -> None:
    assert decoded(encode(message, 1)) == [(message, 1)]


@given(st.lists(st.integers(1, 700), max_size=30))
def test_however_the_stream_is_cut(cuts: list[int]) -> None:
    data, decoder, found = b"".join(map(encode, EVERY)), Decoder(wire.FRAME_BYTES_MAX), []
    for cut in cuts:
        piece, data = data[:cut], data[cut:]
        found += [message for message, _ in decoder.feed(piece)]
    found += [message for message, _ in decoder.feed(data)]
    assert tuple(found) == EVERY
    assert (decoder.buffered, decoder.announced) == (0, 0)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "not checkpointd's protocol"),
        (frame(b"\x80", magic=0x4BC7), "not checkpointd's protocol"),
        (frame(b"\x80", zero=1), "not checkpointd's protocol"),
        (frame(b"\x80", descriptors=2), "announces 2 descriptors"),
        (frame(b"", length=HELLO_BYTES_MAX + 1), "announces 4097 bytes"),
        (frame(b"", length=0xFFFFFFFF), "announces 4294967295 bytes"),
        (frame(b""), "malformed"),
        (frame(b"\x80"), "malformed"),
        (frame(b"\xc1"), "malformed"),
        (frame(encode(wire.Ping())[HEAD.size :] + b"\x00"), "malformed"),
        (frame(b"\x81\xa4type\xa4pin"), "malformed"),
        (frame(msgspec.msgpack.encode({"type": "no-such"})), "malformed"),
        (frame(msgspec.msgpack.encode({"type": "free", "slot": "0"})), "malformed"),
        (frame(msgspec.msgpack.encode({"type": "free", "slot": -1})), "malformed"),
        (frame(msgspec.msgpack.encode({"type": "free", "slot": 1 << 60})), "malformed"),
        (frame(msgspec.msgpack.encode({"type": "free"})), "malformed"),
        (
            frame(msgspec.msgpack.encode({"type": "hello", "protocols": [1, 1], "release": "x" * 4000, "role": "root"})),
            "malformed",
        ),
        (frame(b"\x81\xa4type\xa4free\xff\xff"), "malformed"),
        (frame(b"\x82\xa4type\xa4ping\xa1x" + b"\x91" * 4000 + b"\xc0"), "malformed"),
        (frame(b"\x83\xa4type\xa5fetch\xa3tag\xa1t\xa7attempt\xa2\xff\xfe"), "malformed"),
    ],
)
def test_what_is_malformed_is_a_wire_error_and_ends_the_stream(data: bytes, why: str) -> None:
    """WIRE-2"""
    decoder = Decoder()
    with pytest.raises(WireError, match=why):
        list(decoder.feed(data))
    with pytest.raises(WireError, match="malformed before"):
        list(decoder.feed(encode(wire.Ping())))
    assert decoder.buffered == 0


def test_messages_before_the_malformed_one_are_given() -> None:
    found = Decoder().feed(encode(wire.Ping()) + encode(wire.Look()) + b"garbage!")
    assert [next(found)[0], next(found)[0]] == [wire.Ping(), wire.Look()]
    with pytest.raises(WireError):
        next(found)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e9])
def test_times_that_no_deadline_can_be_made_of(seconds: float) -> None:
    save = msgspec.to_builtins(EVERY[9]) | {"left_s": seconds}
    with pytest.raises(WireError, match="left_s"):
        decoded(frame(msgspec.msgpack.encode(save)))


def test_unknown_fields_are_ignored() -> None:
    """WIRE-3"""
    assert decoded(frame(msgspec.msgpack.encode({"type": "free", "slot": 3, "new": [1]}))) == [(wire.Free(slot=3), 0)]


def test_a_frame_may_be_as_long_as_is_allowed_and_no_longer() -> None:
    """WIRE-1"""
    message = wire.Hello(protocols=(1, 1), release="x" * 4000)
    size = len(encode(message)) - HEAD.size
    assert decoded(encode(message), size) == [(message, 0)]
    with pytest.raises(WireError, match=f"announces {size} bytes; at most {size - 1}"):
        decoded(encode(message), size - 1)


def test_a_frame_that_is_too_long_is_refused_by_its_head_alone() -> None:
    """WIRE-1: not after its bytes were taken in."""
    with pytest.raises(WireError, match="at most 4096"):
        list(Decoder().feed(HEAD.pack(MAGIC, 0, 0, HELLO_BYTES_MAX + 1)))


def test_a_decoder_holds_no_more_than_one_frame() -> None:
    """WIRE-1"""
    decoder, most = Decoder(HELLO_BYTES_MAX), 0
    stream = encode(wire.Hello(protocols=(1, 1), release="x" * 4000)) * 50
    for start in range(0, len(stream), 1000):
        list(decoder.feed(stream[start : start + 1000]))
        most = max(most, decoder.buffered)
    assert 0 < most <= HELLO_BYTES_MAX + HEAD.size


def test_a_message_that_cannot_be_sent_says_what_to_do() -> None:
    huge = wire.Report(status="x" * (wire.FRAME_BYTES_MAX + 1))
    with pytest.raises(WireError, match=r"a Report message of .* too long"):
        encode(huge)


@pytest.mark.parametrize(("have", "announced"), [(0, 0), (1, wire.DESCRIPTORS_MAX), (7, wire.DESCRIPTORS_MAX), (8, 1), (12, 1)])
def test_how_many_descriptors_half_a_frame_may_bring(have: int, announced: int) -> None:
    decoder = Decoder()
    assert list(decoder.feed(encode(wire.Slot(slot=0, nbytes=1), 1)[:have])) == []
    assert decoder.announced == announced


def test_half_a_frame_without_a_descriptor_brings_none() -> None:
    decoder = Decoder()
    assert list(decoder.feed(encode(wire.Slot(slot=0, nbytes=1))[:9])) == []
    assert decoder.announced == 0


@pytest.mark.parametrize(
    ("theirs", "common"), [((1, 1), 1), ((1, 5), 1), ((0, 0), None), ((2, 9), None), ((5, 1), None), ((0, 1), 1)]
)
def test_the_newest_protocol_that_both_speak(theirs: tuple[int, int], common: int | None) -> None:
    assert wire.common_protocol(theirs) == common


@given(st.binary(max_size=300))
def test_any_bytes_are_a_wire_error_or_messages(data: bytes) -> None:
    """WIRE-2"""
    try:
        decoded(frame(data) + data)
    except WireError:
        return


@given(st.sampled_from(EVERY), st.data())
def test_any_damage_is_a_wire_error_or_another_message(message: wire.Message, data: st.DataObject) -> None:
    """WIRE-2"""
    body = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] = data.draw(st.integers(0, 255))
    try:
        decoded(bytes(body))
    except WireError:
        return
