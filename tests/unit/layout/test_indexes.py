"""The index as bytes: what is written is read, and nothing that could lead a reader astray is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from checkpointd.errors import FormatError, UsageError
from checkpointd.layout import indexes as module
from checkpointd.layout.boxes import whole
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.indexes import (
    CHUNK_BYTES_MAX,
    Alias,
    BaseChunk,
    Chunk,
    Index,
    Scope,
    TensorEntry,
    decode_index,
    encode_index,
)
from checkpointd.layout.keys import AttemptId, chunks_name, is_tag
from checkpointd.layout.manifest import ObjectRef, PlanRef

KEY = "tag/00000001-0/00003.index"
texts = st.text(st.characters(codec="utf-8"), max_size=20)
sizes = st.integers(0, 2**63 - 1)
scopes: st.SearchStrategy[Scope] = st.sampled_from(["rank", "global"])

CHUNK = Chunk(0, 0, 48, 48, "raw", None, bytes(16))
ENTRY = TensorEntry("model.weight", "float32", (3, 4), whole((3, 4)), "rank", (CHUNK,))
INDEX = Index(
    tag="global_step1",
    attempt="00000001-0",
    rank=3,
    world_size=4,
    step=1,
    objects=(ObjectRef(name=chunks_name(3, 0), size=4096),),
    tensors=(ENTRY,),
    aliases=(Alias("model.tied", "model.weight", (3, 4), (4, 1), 0),),
    excluded=("model.frozen",),
    tree=b"\xc0",
)


def written(index: Index) -> tuple[bytes, PlanRef]:
    """The bytes of `index`, and the reference to its plan."""
    ref, data = encode_index(index, "00003.index")
    return data, ref.plan


def read(data: bytes, plan: PlanRef) -> Index:
    return decode_index(data, plan, KEY)


def behind(content: bytes) -> tuple[bytes, PlanRef]:
    """What INDEX has behind its plan, behind this one."""
    data, plan = written(INDEX)
    return content + data[plan.size :], PlanRef(size=len(content), digest="")


def edited_plan(**changes: Any) -> tuple[bytes, PlanRef]:
    """INDEX with another plan."""
    data, plan = written(INDEX)
    return behind(msgspec.msgpack.encode(msgspec.msgpack.decode(data[: plan.size]) | changes))


def edited_index(**changes: Any) -> tuple[bytes, PlanRef]:
    """INDEX with other content behind its plan."""
    data, plan = written(INDEX)
    return data[: plan.size] + msgspec.msgpack.encode(msgspec.msgpack.decode(data[plan.size :]) | changes), plan


def with_chunks(*chunks: Chunk, size: int = 4096) -> Index:
    """An index of one tensor that just holds what the chunks declare."""
    count = sum(chunk.raw for chunk in chunks) // 4
    entry = TensorEntry("model.weight", "float32", (count,), whole((count,)), "rank", chunks)
    objects = (ObjectRef(name=chunks_name(3, 0), size=size),)
    return structs.replace(INDEX, objects=objects, tensors=(entry,), aliases=())


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    rank = draw(st.integers(0, 100_000))
    entries, offset = [], 0
    for number in range(draw(st.integers(0, 4))):
        shape = draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
        dtype = draw(st.sampled_from(["float32", "bool", "complex128"]))
        item = ITEM_BYTES[dtype]
        left, chunks = whole(shape).numel() * item, []
        while left:
            raw = min(left, item * draw(st.integers(1, 50)))
            stored = draw(st.integers(1, 100))
            codec = draw(st.sampled_from(["raw", "zstd", "planes"]))
            stored = raw if codec == "raw" else stored
            checksum = None if codec == "raw" else draw(st.integers(0, 2**64 - 1))
            raw_digest = draw(st.binary(min_size=16, max_size=16))
            chunks.append(Chunk(0, offset, stored, raw, codec, checksum, raw_digest))
            left, offset = left - raw, offset + stored
        entries.append(TensorEntry(f"t{number}", dtype, shape, whole(shape), draw(scopes), tuple(chunks)))
    return Index(
        tag=draw(texts),
        attempt=draw(texts),
        rank=rank,
        world_size=draw(sizes),
        step=draw(sizes),
        objects=(ObjectRef(name=chunks_name(rank, draw(st.integers(0, 1))), size=offset),),
        tensors=tuple(entries),
        aliases=tuple(Alias("a", e.fqn, e.shape, (0,) * len(e.shape), 0) for e in entries[:1]),
        excluded=tuple(draw(st.lists(texts, max_size=2))),
        tree=draw(st.binary(max_size=30)),
    )


@given(indexes())
def test_an_index_is_read_as_it_was_written(index: Index) -> None:
    assert read(*written(index)) == index


def test_the_index_that_the_others_are_made_from_is_sound() -> None:
    assert read(*edited_index()) == INDEX


def test_an_index_of_another_format_is_refused() -> None:
    with pytest.raises(FormatError, match=r"is not a checkpointd\.index object \(it says 'checkpointd\.vote'\)"):
        read(*edited_index(format="checkpointd.vote"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "checkpointd.index"}, r"is not a checkpointd\.plan object"),
        ({"version": 1}, "has format version 1"),
        ({"tensors": 7}, "is damaged"),
        ({"rank": 2}, "its plan is another one's"),
        ({"world_size": 5}, "its plan is another one's"),
        ({"tensors": []}, "its plan is another one's"),
    ],
)
def test_an_index_with_another_plan_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        read(*edited_plan(**changes))


def test_plans_of_the_same_boxes_have_the_same_bytes() -> None:
    (data, plan), (other, same) = written(INDEX), written(structs.replace(INDEX, tag="global_step2", step=2, tree=b"\xc2"))
    assert plan == same
    assert data[: plan.size] == other[: plan.size]
    assert data[plan.size :] != other[plan.size :]


def test_an_index_that_a_reader_would_refuse_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LISTING_BYTES_MAX", len(written(INDEX)[0]) - 1)
    with pytest.raises(UsageError, match="use larger chunks or fewer tensors"):
        written(INDEX)


def test_keys_of_a_newer_release_in_an_index_are_ignored() -> None:
    assert read(*edited_index(novelty=[1, {"x": b"y"}])) == INDEX


def test_what_a_newer_release_adds_to_an_array_is_ignored() -> None:
    part, chunks, aliases = (msgspec.to_builtins(one) for one in (ENTRY.part, ENTRY.chunks, INDEX.aliases))
    longer = [[[*chunk[:6], bytes(16), None, "new"] for chunk in chunks]]
    assert read(*edited_plan(tensors=[[*part, {"new": 1}]])) == INDEX
    assert read(*edited_index(chunks=longer, aliases=[[*aliases[0], 7]])) == INDEX


@given(st.data())
def test_an_index_with_any_bytes_changed_is_read_or_refused(data: st.DataObject) -> None:
    right, plan = written(INDEX)
    changed = bytearray(right)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        read(bytes(changed), plan)
    except FormatError:
        return


CHUNK_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "outside: negative object": ({"object": -1}, "outside the objects"),
    "outside: far end": ({"offset": 2**63 - 1}, "outside the objects"),
    "stored too large": ({"stored": CHUNK_BYTES_MAX + 1}, f"stored as {CHUNK_BYTES_MAX + 1}"),
    "nothing stored": ({"stored": 0}, "stored as 0"),
    "nothing in it": ({"raw": 0}, "declares 0 bytes"),
    "negative": ({"stored": -48}, "stored as -48"),
    "digest": ({"digest": bytes(15)}, "digest of 15 bytes"),
    "encoded without a checksum": ({"codec": "zstd"}, "is encoded and has none"),
}


@pytest.mark.parametrize("fault", CHUNK_FAULTS)
def test_a_chunk_that_cannot_be_is_refused(fault: str) -> None:
    changes, words = CHUNK_FAULTS[fault]
    bad = structs.replace(CHUNK, **changes)
    filler = Chunk(0, 96, 50, 52 - bad.raw % 4, "zstd", 7, bytes(16))
    with pytest.raises(FormatError, match=words) as caught:
        read(*written(with_chunks(bad, filler)))
    assert caught.value.fqn == "model.weight"
    assert caught.value.key == KEY


BASE = BaseChunk(1, 0, 30, "planes", 8, bytes(16))
DELTA_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no base": ({"base": None}, "is a delta without a base"),
    "no delta": ({"codec": "planes"}, "has a base and is no delta"),
    "of a delta": ({"base": structs.replace(BASE, codec="delta")}, "is a delta of a delta"),
    "of the same attempt": (
        {"base": structs.replace(BASE, object=0)},
        "base that lies in an object of the same attempt",
    ),
    "outside: object": ({"base": structs.replace(BASE, object=2)}, "base that lies outside the objects"),
    "outside: end": ({"base": structs.replace(BASE, offset=4090)}, "base that lies outside the objects"),
    "base digest": ({"base": structs.replace(BASE, digest=bytes(3))}, "base that has a digest of 3 bytes"),
}


def with_delta(**changes: Any) -> Index:
    older = ObjectRef(name="00003-1.chunks", size=4096, held_by="global_step0/00000001-0")
    delta = structs.replace(CHUNK, codec="delta", checksum=7, base=BASE)
    index = with_chunks(structs.replace(delta, **changes), structs.replace(CHUNK, offset=96))
    return structs.replace(index, objects=(*index.objects[:1], older), since_full=1)


@pytest.mark.parametrize("fault", DELTA_FAULTS)
def test_a_delta_that_cannot_be_is_refused(fault: str) -> None:
    changes, words = DELTA_FAULTS[fault]
    with pytest.raises(FormatError, match=words) as caught:
        read(*written(with_delta(**changes)))
    assert caught.value.fqn == "model.weight"


def test_bases_that_overlap_other_chunks_are_refused() -> None:
    index, older = with_delta(), Chunk(1, 20, 40, 48, "zstd", 8, bytes(16))
    [entry] = [entry for entry in index.tensors if entry.chunks]
    index = structs.replace(
        index,
        tensors=tuple(structs.replace(e, chunks=(e.chunks[0], older)) if e is entry else e for e in index.tensors),
    )
    with pytest.raises(FormatError, match=r"chunks overlap at byte 20 of 00003-1.chunks"):
        read(*written(index))


# --- objects of older attempts ------------------------------------------------------------------------------------


def referring(held_by: object, name: str = chunks_name(3, 0)) -> tuple[bytes, PlanRef]:
    return edited_index(objects=[{"name": name, "size": 4096, "held_by": held_by}])


@given(st.text(max_size=40))
def test_whatever_stands_for_a_holder_is_an_attempt_or_is_refused(held_by: str) -> None:
    try:
        [ref] = read(*referring(held_by)).objects
    except FormatError:
        return
    tag, _, attempt = ref.held_by.rpartition("/")
    assert ref.held_by == "" or (is_tag(tag) and AttemptId.parse(attempt) is not None)


def test_the_own_attempt_is_no_older_one() -> None:
    with pytest.raises(FormatError, match="is its own"):
        read(*referring("global_step1/00000001-0"))
