"""Hostile roots, as made by an attacker who may write there: each case, and the words of the error that refuses it.

A case changes the newest checkpoint of a root; its digests fit. `verify`: whether verification finds it, too (it reads all that
loading reads, but builds no values). `undecided`: what the next start makes of it where the attempt is undecided (of the chunks
it looks at the objects' sizes alone).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import zstandard

from tests.forged_roots import Fields, Forger, chunk_of, opened, sealed

MIB, GIB = 1 << 20, 1 << 30
RAW = np.arange(64 * 48, dtype=np.float32).tobytes()
"""What the model's weight, 64 x 48 in float32, holds where a case stores it anew."""


@dataclass(frozen=True)
class Case:
    """`forge` does it; the error must match `words`."""

    words: str
    forge: Callable[[Forger], None]
    verify: bool = True
    undecided: Literal["abort", "commit"] = "abort"


def weight(*chunks: list[Any], shape: tuple[int, ...] = (64, 48), dtype: str = "float32") -> list[Any]:
    return ["model.weight", dtype, shape, [[0] * len(shape), shape], "rank", chunks]


def stored(data: bytes, *chunks: list[Any], **changes: Any) -> Callable[[Forger], None]:
    """The weight in `chunks` of an object that is `data`; `changes` of the index."""
    return lambda forger: forger.put_chunks(data, [weight(*chunks)], **changes)


def entry(**changes: Any) -> Callable[[Forger], None]:
    """The weight described otherwise."""

    def forge(forger: Forger) -> None:
        old = forger.index()["tensors"][0]
        names = ("fqn", "dtype", "shape", "box", "scope", "chunks")
        forger.edit_index(tensors=[[changes.get(name, value) for name, value in zip(names, old, strict=True)]])

    return forge


def index(**changes: Any) -> Callable[[Forger], None]:
    return lambda forger: forger.edit_index(**changes)


def index_ref(name: str, size: int, *, plan: int = 0) -> Fields:
    """How a vote names an index, with a plan of so many bytes."""
    return {"name": name, "size": size, "digest": "0" * 32, "plan": {"size": plan, "digest": "0" * 32}}


def raw_index(head: bytes, key: str) -> Callable[[Forger], None]:
    """An index whose value of `key` is the bytes `head` and nothing after them."""

    def forge(forger: Forger) -> None:
        plan, content = forger.parts()
        part = plan if key == "tensors" else content
        fields: Fields = msgspec.msgpack.decode(part)
        del fields[key]
        data = msgspec.msgpack.encode(fields)
        data = bytes([data[0] + 1]) + data[1:] + msgspec.msgpack.encode(key) + head
        forger.put_parts(data if part is plan else plan, content if part is plan else data)

    return forge


def chunks_object(name: str) -> Callable[[Forger], None]:
    return index(objects=[{"name": name, "size": 9}])


def vote(**changes: Any) -> Callable[[Forger], None]:
    return lambda forger: forger.edit_vote(**changes)


def commit(**changes: Any) -> Callable[[Forger], None]:
    return lambda forger: forger.edit_commit(**changes)


def log_entry(change: Callable[[bytes], bytes]) -> Callable[[Forger], None]:
    """The entry of the commit, as JSON without its checksum, after `change`."""

    def forge(forger: Forger) -> None:
        text = msgspec.json.encode(opened(forger.entry.read_bytes()))
        forger.entry.write_bytes(sealed(change(text)[:-1]))

    return forge


def deep(text: bytes, depth: int = 100_000) -> bytes:
    """A JSON object with one more key, whose value is nested."""
    return text[:-1] + b',"deep":' + b"[" * depth + b"]" * depth + b"}"


def deep_vote(forger: Forger) -> None:
    text = msgspec.json.encode(opened((forger.folder / "00000.vote").read_bytes()))
    forger.put_vote(sealed(deep(text)[:-1]))


def client_state(node: bytes) -> Callable[[Forger], None]:
    """A tree whose client_state is the msgpack `node`."""

    def forge(forger: Forger) -> None:
        [_, _, [[_, state], _], _] = msgspec.msgpack.decode(forger.index()["tree"])
        head = b"\x94\xa1D\xa4dict\x92" + msgspec.msgpack.encode(["state", state])
        forger.edit_index(tree=head + b"\x92\xacclient_state" + node + b"\xc0")

    return forge


def value(node: object) -> Callable[[Forger], None]:
    """A client_state with one value."""
    return client_state(msgspec.msgpack.encode(["D", "dict", [["x", node]], None]))


def zstd_header(content_size: int) -> bytes:
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", content_size) + bytes([1 | 4 << 3, 0, 0]) + b"abcd"


def bomb(size: int) -> bytes:
    """One frame of `size` zeros, made without ever holding them."""
    compressor = zstandard.ZstdCompressor().compressobj(size=size)
    return b"".join([*(compressor.compress(bytes(MIB)) for _ in range(size // MIB)), compressor.flush()])


BOMB = bomb(256 * MIB)
SIZELESS = zstandard.ZstdCompressor(write_content_size=False).compress(RAW)
PLANES_BOMB = b"\x01\x04\x01\x00" + struct.pack("<Q", len(RAW)) + struct.pack("<BQ", 1, len(BOMB)) * 4 + BOMB * 4
NESTED = b"\x93\xa1L\xa4list\x91"

INDEX = {
    "a tensor of 2**40 elements": Case("needs 4398046511104 bytes", entry(shape=(1 << 40,), box=[[0], [1 << 40]])),
    "more dimensions than can be": Case("length <= 1000", entry(shape=(1 << 62,) * 5000, box=[(0,) * 5000, (1 << 62,) * 5000])),
    "a negative shape": Case("does not lie inside", entry(shape=(-64, -48), box=[(0, 0), (-64, -48)])),
    "a box outside its tensor": Case("does not lie inside", entry(box=[(1, 0), (64, 48)])),
    "a part of a tensor": Case("stored only a part of model.weight", entry(shape=(128, 48)), verify=False),
    "an unknown dtype": Case("unknown dtype", entry(dtype="object")),
    "a chunk of 1 TiB": Case(
        "declares 1099511627776 bytes",
        lambda f: f.edit_index(
            tensors=[weight(chunk_of(b"x", b"x", raw=1 << 40), shape=(1 << 40,), dtype="uint8")],
        ),
    ),
    "a chunk beyond its object": Case("outside the objects", stored(RAW, chunk_of(RAW, RAW, offset=1))),
    "a chunk of no object": Case("outside the objects", stored(RAW, chunk_of(RAW, RAW, object=7))),
    "a chunk before its object": Case("outside the objects", stored(RAW, chunk_of(RAW, RAW, offset=-1))),
    "chunks that overlap": Case(
        "chunks overlap", stored(RAW, chunk_of(RAW[:6144], RAW[:6144]), chunk_of(RAW[4:6148], RAW[4:6148], offset=4))
    ),
    "a chunk of half an element": Case(
        "not a whole number of elements", stored(RAW, chunk_of(RAW[:2], RAW[:2]), chunk_of(RAW[2:], RAW[2:], offset=2))
    ),
    "raw bytes of another size": Case("is stored raw, and holds", stored(RAW[:-4], chunk_of(RAW[:-4], RAW))),
    "raw bytes with a checksum": Case("is stored raw and has a checksum", stored(RAW, chunk_of(RAW, RAW, checksum=7))),
    "2**32 tensors": Case("is damaged", raw_index(b"\xdd\xff\xff\xff\xff", "tensors")),
    "2**32 lists of chunks": Case("is damaged", raw_index(b"\xdd\xff\xff\xff\xff", "chunks")),
    "2**32 keys": Case("is damaged", lambda f: f.put_parts(f.parts()[0], b"\xdf\xff\xff\xff\xff")),
    "a string of 4 GiB": Case("is damaged", raw_index(b"\xdb\xff\xff\xff\xff", "tag")),
    "a tree of 4 GiB": Case("is damaged", raw_index(b"\xc6\xff\xff\xff\xff", "tree")),
    "an index nested 100,000 deep": Case("is damaged", lambda f: f.put_parts(b"\x91" * 100_000, b"")),
    "an unknown key nested 100,000 deep": Case("is damaged", raw_index(b"\x91" * 100_000 + b"\xc0", "excluded")),
    "another version": Case("format version 4", index(version=4)),
    "another rank": Case("not a chunks object of that rank", index(rank=5)),
    "another tag": Case("belongs to rank 0 of global_step1/", index(tag="global_step1")),
    "aliases of each other": Case("is not stored", index(aliases=[["a", "b", [1], [1], 0], ["b", "a", [1], [1], 0]])),
    "a tensor twice": Case("twice", lambda f: f.edit_index(tensors=f.index()["tensors"] * 2)),
    **{
        f"a chunks object called {name}": Case("is not ", chunks_object(name))
        for name in ("../../etc/passwd", "/etc/passwd", "../../global_step1/00000001-0/00000-0.chunks", "00001-0.chunks")
    },
}

CHUNKS = {
    "an object of 2**62 bytes": Case(
        "ends before byte",
        stored(RAW, chunk_of(RAW, RAW, offset=1 << 61), objects=[{"name": "00000-0.chunks", "size": 1 << 62}]),
    ),
    "a chunk of 1 GiB that is not there": Case(
        "ends before byte",
        lambda f: f.put_chunks(
            RAW,
            [weight(chunk_of(RAW, RAW, codec="zstd", stored=GIB))],
            objects=[{"name": "00000-0.chunks", "size": GIB}],
        ),
    ),
    "a bomb": Case("declares 268435456 bytes, not 12288", stored(BOMB, chunk_of(BOMB, RAW, codec="zstd"))),
    "a bomb without its size": Case("not 12288", stored(SIZELESS, chunk_of(SIZELESS, RAW, codec="zstd"))),
    "a frame that declares 2**40 bytes": Case(
        "declares 1099511627776 bytes", stored(zstd_header(1 << 40), chunk_of(zstd_header(1 << 40), RAW, codec="zstd"))
    ),
    "a bomb in each plane": Case(
        "declares 268435456 bytes, not 3072", stored(PLANES_BOMB, chunk_of(PLANES_BOMB, RAW, codec="planes"))
    ),
    "an unknown codec": Case("codec 'lzma' is unknown", stored(RAW, chunk_of(RAW, RAW, codec="lzma"))),
}
CHUNKS = {
    name: Case(case.words, case.forge, undecided="abort" if "ends before" in case.words else "commit")
    for name, case in CHUNKS.items()
}

TREES = {
    "a tree nested 100,000 deep": Case("state tree .* cannot be read", client_state(NESTED * 100_000 + b"\xc0")),
    "a tree nested 300 deep": Case("nested deeper than 256 levels", client_state(NESTED * 300 + b"\xc0")),
    "a list of 2**32 values": Case("cannot be read", client_state(b"\x93\xa1L\xa4list\xdd\xff\xff\xff\xff")),
    "bytes of 4 GiB": Case("cannot be read", client_state(b"\x92\xa1B\xc6\xff\xff\xff\xff")),
    "a node of an unknown kind": Case("cannot be read", value(["X", "os.system"])),
    "a class": Case("cannot be read", value(["D", "UserDict", []])),
}
RESTORED = {
    "a client_state that is no dict": Case("client_state of the state tree is not a dict", client_state(b"\x01")),
    "a tensor that is not stored": Case("names nobody, which is not stored", value(["T", "nobody", False, "cpu", None])),
    "a tensor named twice": Case("twice", value(["T", "model.weight", False, "cpu", None])),
    "an array of objects": Case("array of dtype '[|]O'", value(["A", "model.weight", "|O", None])),
    "a scalar that is an object": Case("cannot be read", value(["N", "|O", bytes(8)])),
    "a scalar of another size": Case("cannot be read", value(["N", "<f8", bytes(4)])),
    "an integer that is none": Case("cannot be read", value(["I", "__import__('os')"])),
    "a dtype that is a function": Case("cannot be read", value(["Y", "dtype", "load"])),
    "a device that is none": Case("cannot be read", value(["Y", "device", "/etc/passwd"])),
    "a set of lists": Case("cannot hold", value(["L", "set", [["L", "list", []]]])),
    "a key that is a list": Case("cannot be read", value(["D", "dict", [[["L", "list", []], 1]]])),
}

VOTES = {
    **{
        f"an index called {name}": Case("names an index", vote(index=index_ref(name, 9)))
        for name in ("../../etc/passwd", "/etc/passwd", "00001.index", "00000-0.chunks")
    },
    "an index of 2**62 bytes": Case("names an index", vote(index=index_ref("00000.index", 1 << 62))),
    "an index of -5 bytes": Case("names an index", vote(index=index_ref("00000.index", -5))),
    "a plan longer than its index": Case("names an index", vote(index=index_ref("00000.index", 9, plan=10))),
    "a vote of 2**60 ranks": Case("which cannot be", vote(world_size=1 << 60)),
    "a vote of rank 5": Case("which cannot be", vote(rank=5)),
    "a vote of another version": Case("format version 4", vote(version=4)),
    "a no in a commit": Case("names no index", vote(vote="no", index=None)),
    **{
        f"a vote that refers to {key}": Case("which cannot hold bytes of a checkpoint", vote(refers=[key]))
        for key in ("passwd", "../../etc/passwd", "global_step1/../00000-0.chunks", "global_step1/00000001-0/00000.vote")
    },
    "a vote nested 100,000 deep": Case("recursion", deep_vote),
}

BALLOTS = {
    "a vote that declares 1 GiB": Case("its votes do not take", lambda f: f.put_ballot([(b"", GIB)], b"")),
    "a vote that declares 2**63 bytes": Case("its votes do not take", lambda f: f.put_ballot([(b"", 1 << 63)], b"")),
    "votes that end elsewhere than the ballot": Case("its votes do not take", lambda f: f.put_ballot([(b"x", 9)], b"x")),
    "a ballot that is cut": Case("ends before byte", lambda f: f.fill_ballot(23)),
    "a ballot of nothing but zeros": Case("its table is not the one", lambda f: f.fill_ballot(1000)),
    "a ballot of more ranks": Case("its table is not the one|00001.index and 3 other objects", commit(world_size=5)),
    "the vote of another attempt": Case("has the vote of rank 0 of global_step1/", vote(tag="global_step1")),
}

ENTRIES = {
    "a commit of 2**60 ranks": Case("Expected `int` <= 262144", commit(world_size=1 << 60)),
    "a commit of -1 ranks": Case("Expected `int` >= 1", commit(world_size=-1)),
    "a commit without a ballot": Case("Expected `object`", commit(ballot=None)),
    "a ballot of nothing": Case("of 0 bytes, which cannot be", commit(ballot={"digest": "0" * 32, "size": 0})),
    "a ballot of 1 TiB": Case("bytes, which cannot be", commit(ballot={"digest": "0" * 32, "size": 1 << 40})),
    **{
        f"a commit that refers to {prefix!r}": Case("which is no attempt", commit(holders=[prefix]))
        for prefix in ("", "passwd", "../../etc", "global_step1/00000001-0/..")
    },
    "a commit of a path": Case("which is no attempt", commit(attempt="../../global_step1")),
    "a record of an unknown kind": Case("Invalid value 'gift'", commit(kind="gift")),
    "an entry of another number": Case("somebody moved it", log_entry(lambda text: text.replace(b'"number":', b'"number":9'))),
    "an entry that follows another one": Case(
        "does not follow", log_entry(lambda text: text.replace(b'"before":"', b'"before":"00'))
    ),
    "an entry nested 100,000 deep": Case("recursion", log_entry(deep)),
    "an entry of 1 GiB": Case("larger than", lambda f: os.truncate(f.entry, GIB)),
    "an entry of nothing but zeros": Case("is damaged", lambda f: f.sparse(f"log/{f.entry.name}", 1000)),
    "a number of 5,000 digits": Case(
        "out of range", log_entry(lambda text: text.replace(b'"step":2', b'"step":' + b"9" * 5000))
    ),
}
"""Entries of the log that commit the newest checkpoint. The words are those of the fault of the log."""


DECIDED = {
    **INDEX,
    **CHUNKS,
    **TREES,
    **{name: Case(case.words, case.forge, verify=False) for name, case in RESTORED.items()},
    **VOTES,
    **BALLOTS,
}
"""Every case of a checkpoint."""

UNDECIDED = {**INDEX, **CHUNKS, **VOTES}
"""Those of an attempt that recovery has to decide."""
