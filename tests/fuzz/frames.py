"""Inputs for the fuzzers: mutated frames of every message, and sequences of messages that advance a session."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec

from checkpointd.daemon.memory.layouts import wire_tensors
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.wire import HEAD, encode
from checkpointd.errors import WireError
from checkpointd.layout.boxes import Box
from checkpointd.layout.indexes import Alias
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.shard import PAGE
from tests.builders import make_shard, rank_arrays
from tests.unit.daemon.protocol.test_wire import EVERY

SHARD = make_shard(rank_arrays(0))
FRAMES = tuple(encode(message, number % 2) for number, message in enumerate(EVERY))
TOKENS = (b"\xc7\x4b\x00\x00", b"\xdc\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xcb\x7f\xf0" + bytes(6))
"""A head, and the beginnings of long arrays, maps and byte strings, and an infinity."""


def stream(source: random.Random) -> bytes:
    """One to four frames, most of them damaged."""
    return b"".join(damaged(source, source.choice(FRAMES)) for _ in range(source.randint(1, 4)))


def damaged(source: random.Random, frame: bytes) -> bytes:
    data = bytearray(frame)
    for _ in range(source.choice((0, 0, 1, 2, 5))):
        data = source.choice(MUTATIONS)(source, data)
    if source.random() < 0.7 and len(data) >= HEAD.size:
        data[4:8] = max(0, len(data) - HEAD.size).to_bytes(4, "big")  # a whole frame: what is broken is its map
    return bytes(data)


def _flip(source: random.Random, data: bytearray) -> bytearray:
    if data:
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return data


def _replace(source: random.Random, data: bytearray) -> bytearray:
    if data:
        data[source.randrange(len(data))] = source.choice((0, 0x7F, 0x80, 0x90, 0xC1, 0xFF, source.randrange(256)))
    return data


def _cut(source: random.Random, data: bytearray) -> bytearray:
    start = source.randint(0, len(data))
    del data[start : start + source.randint(1, 16)]
    return data


def _insert(source: random.Random, data: bytearray) -> bytearray:
    at = source.randint(0, len(data))
    data[at:at] = source.choice((*TOKENS, source.randbytes(source.randint(1, 8))))
    return data


def _graft(source: random.Random, data: bytearray) -> bytearray:
    other = source.choice(FRAMES)
    at = source.randint(0, len(other))
    data[source.randint(0, len(data)) :] = other[at:]
    return data


MUTATIONS: tuple[Callable[[random.Random, bytearray], bytearray], ...] = (_flip, _replace, _cut, _insert, _graft)

# --- messages that make sense together ---------------------------------------------------------------------------------

_COUNTS = (0, 1, 2, 3, 4096, 1 << 53, 1 << 62)


def conversation(source: random.Random, root: str) -> list[tuple[wire.Message, bool]]:
    """What one client says, and whether a descriptor comes with it: a plausible start, then anything in any order."""
    said: list[tuple[wire.Message, bool]] = []
    if source.random() < 0.9:
        said.append((wire.Join(root=root, rank=0, world_size=source.choice((1, 1, 2))), False))
    if source.random() < 0.9:
        said.append((_good_begin(source), False))
    if source.random() < 0.8:
        said += [(wire.Slot(slot=0, nbytes=len(SHARD.buffer) + PAGE), True), (_layout(source, good=True), False)]
    if source.random() < 0.25:
        tag, attempt = source.choice("abcd"), f"00000001-{source.randrange(100)}"
        save = wire.Save(save=0, tag=tag, attempt=attempt, step=1, n=1, save_latest=True, left_s=10.0)
        announced = wire.Announced(save=0, slot=0, layout=0, mark=1)
        start = [save, wire.Contents(save=0, tree=SHARD.tree), announced, wire.Staged(save=0)]
        if source.random() < 0.3:
            del start[source.randrange(4)]
        said += [(message, False) for message in start]
    for _ in range(source.randint(1, 14)):
        message = source.choice(_ANY)(source)
        said.append((message, isinstance(message, wire.Slot) if source.random() < 0.95 else source.random() < 0.5))
    return said


def _good_begin(source: random.Random) -> wire.Begin:
    return wire.Begin(
        start=1,
        nonce="n",
        compression=source.choice(("none", "zstd", "planes", "auto")),
        chunk_bytes=4096,
        budget_bytes=1 << 26,
        commit_timeout_s=10.0,
    )


def _begin(source: random.Random) -> wire.Begin:
    return wire.Begin(
        start=source.choice(_COUNTS),
        nonce="n",
        compression=source.choice(("none", "none", "none", "zstd", "planes", "auto", "pickle")),
        chunk_bytes=source.choice((4096, 4096, 4096, *_COUNTS)),
        budget_bytes=source.choice((1 << 26, 1 << 26, *_COUNTS)),
        commit_timeout_s=source.choice((1.0, 1.0, 0.0, 2678400.0)),
    )


def _layout(source: random.Random, good: bool = False) -> wire.Layout:
    tensors = wire_tensors(SHARD.tensors)
    if not good:
        at = source.randrange(len(tensors))
        sizes = tuple(source.choice((0, 1, 33, -1, 1 << 62)) for _ in range(source.randint(0, 3)))
        bad = wire.WireTensor(
            source.choice(("model.half", "x", "")),
            source.choice(("float16", "float16", "object")),
            sizes,
            Box((0,) * len(sizes), sizes),
            "rank",
            source.choice((0, 64, 63, -64, 1 << 40, 12352)),
        )
        tensors = (*tensors[:at], bad, *tensors[at + 1 :])
    nbytes = len(SHARD.buffer) if good else source.choice((len(SHARD.buffer), *_COUNTS))
    return wire.Layout(
        layout=0 if good else source.randint(0, 5), nbytes=nbytes, tensors=tensors, more=not good and source.random() < 0.3
    )


def _save(source: random.Random) -> wire.Save:
    return wire.Save(
        save=source.randint(0, 2),
        tag=source.choice(("a", "b", "c", "d", "..", "latest", "a/b", "")),
        attempt=source.choice(("00000001-0", "00000001-0", "00000001-1", "00000002-0", "../..", "")),
        step=source.choice(_COUNTS),
        n=source.choice(_COUNTS),
        save_latest=source.random() < 0.5,
        left_s=source.choice((1.0, 1.0, 0.0, 1e-9)),
        unfinished=source.choice(("", "", "00000001-0", "..", "../..", "a/b")),
    )


def _announced(source: random.Random) -> wire.Announced:
    return wire.Announced(
        save=source.randint(0, 2),
        slot=source.choice((0, 0, 0, 1, 2)),
        layout=source.randint(0, 5),
        mark=source.randint(1, 3),
    )


def _contents(source: random.Random) -> wire.Contents:
    return wire.Contents(
        save=source.randint(0, 2),
        aliases=source.choice(((), (Alias("a", "w", (2,) * 40, (1,) * 40, 0),) * 30)),
        excluded=source.choice(((), ("x" * 500,) * 20)),
        tree=source.choice((SHARD.tree, b"", b"\xff" * 64, bytes(40_000))),
    )


def _error(source: random.Random) -> ErrorReport:
    return ErrorReport(
        code=source.choice(("StagingError", "SkippedError", "MismatchError", "DamagedError", "Exception", "")),
        message=source.choice(("", "why\nERROR", "x" * 5000)),
    )


def _mutant(source: random.Random) -> wire.Message:
    """A damaged message that is still one."""
    for _ in range(20):
        try:
            return wire.decode(damaged(source, source.choice(FRAMES))[HEAD.size :])
        except WireError:
            continue
    return wire.Ping()


_ANY: tuple[Callable[[random.Random], wire.Message], ...] = (
    _save,
    _save,
    _announced,
    _announced,
    _contents,
    lambda s: wire.Staged(save=s.randint(0, 2), held_s=s.choice((0.0, 1.0, math.pi))),
    lambda s: wire.Staged(save=s.randint(0, 2)),
    lambda s: wire.Spoiled(save=s.randint(0, 2), error=_error(s), held_s=s.choice((0.0, 1.0, math.pi))),
    lambda s: wire.Slot(slot=s.randint(0, 5), nbytes=s.choice((len(SHARD.buffer) + PAGE,) * 3 + _COUNTS)),
    lambda s: wire.DropSlot(slot=s.randint(0, 2)),
    lambda s: _layout(s, good=s.random() < 0.5),
    lambda s: wire.Fetch(tag=s.choice("abcd"), attempt="00000001-0"),
    lambda _: wire.Leave(),
    lambda _: wire.Look(),
    lambda _: wire.Ping(),
    _begin,
    lambda s: wire.Join(root=s.choice(("/", "/etc", "/fuzz/..", "relative", "")), rank=0, world_size=1),
    _mutant,
)


def as_json(message: wire.Message) -> str:
    """One message of a failing sequence, for people."""
    return msgspec.json.encode(message).decode()
