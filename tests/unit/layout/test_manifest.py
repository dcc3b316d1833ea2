"""The objects as bytes: what is written is read, what was changed is noticed, what cannot be is refused."""

from __future__ import annotations

import re
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.errors import FormatError
from checkpointd.layout.boxes import whole
from checkpointd.layout.indexes import Plan, PlanTensor
from checkpointd.layout.keys import WORLD_SIZE_MAX, index_name
from checkpointd.layout.manifest import (
    LEASE_S_MAX,
    LISTING_BYTES_MAX,
    BesideFile,
    ErrorReport,
    IndexRef,
    Lease,
    Mirrored,
    PlanRef,
    ReadBack,
    Shown,
    SmallObject,
    Vote,
    WriterIdentity,
    decode,
    digest,
    encode,
)
from tests.forged_roots import edited

KEY = "tag/00000001-0/object"
texts = st.text(st.characters(codec="utf-8"), max_size=20)
sizes = st.integers(0, 2**63 - 1)
digests = st.binary(max_size=4).map(digest)
writers = st.builds(WriterIdentity, host=texts, pid=sizes, time=texts)
errors = st.none() | st.builds(ErrorReport, code=texts, message=texts, phase=texts)
shapes = st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple)
scopes = st.sampled_from(["rank", "global"])
plan_tensors = st.builds(
    lambda fqn, dtype, shape, scope: PlanTensor(fqn, dtype, shape, whole(shape), scope), texts, texts, shapes, scopes
)


@st.composite
def votes(draw: st.DrawFn) -> Vote:
    world_size = draw(st.integers(1, WORLD_SIZE_MAX))
    rank = draw(st.integers(0, world_size - 1))
    nbytes = draw(st.integers(0, LISTING_BYTES_MAX))
    plan = st.builds(PlanRef, size=st.integers(0, nbytes), digest=digests)
    ref = st.builds(IndexRef, name=st.just(index_name(rank)), size=st.just(nbytes), digest=digests, plan=plan)
    return Vote(
        tag=draw(texts),
        attempt=draw(texts),
        rank=rank,
        world_size=world_size,
        step=draw(sizes),
        n=draw(sizes),
        save_latest=draw(st.booleans()),
        vote=draw(st.sampled_from(["yes", "no"])),
        index=draw(st.none() | ref),
        raw_bytes=draw(sizes),
        stored_bytes=draw(sizes),
        tensors=draw(sizes),
        error=draw(errors),
        writer=draw(writers),
    )


small_objects: st.SearchStrategy[SmallObject] = st.one_of(
    st.builds(Lease, process=texts, job=texts, count=sizes, length_s=st.floats(0.001, LEASE_S_MAX), writer=writers),
    st.builds(Plan, rank=sizes, world_size=sizes, tensors=st.lists(plan_tensors, max_size=3).map(tuple)),
    votes(),
    st.builds(
        Shown,
        tag=texts,
        attempt=texts,
        order=st.tuples(sizes, sizes),
        files=st.lists(texts, max_size=3).map(tuple),
    ),
)

WRITER = WriterIdentity(host="node7", pid=4711, time="2026-01-01T00:00:00.000+00:00")
VOTE = Vote(
    tag="global_step1",
    attempt="00000001-0",
    rank=1,
    world_size=2,
    step=1,
    n=0,
    save_latest=True,
    vote="yes",
    index=IndexRef(name="00001.index", size=100, digest=digest(b"index"), plan=PlanRef(size=60, digest=digest(b"plan"))),
    writer=WRITER,
)


@given(small_objects)
def test_what_is_encoded_is_decoded(obj: SmallObject) -> None:
    data = encode(obj)
    assert decode(data, type(obj), KEY) == obj  # type: ignore[type-var]  # one of the five, whichever was drawn
    assert encode(obj) == data


@given(small_objects)
def test_format_stands_first_and_the_checksum_last_on_a_line_of_its_own(obj: SmallObject) -> None:
    lines = encode(obj).decode().split("\n")
    assert re.fullmatch(r'  "format": "checkpointd\.[a-z-]+",', lines[1])
    assert lines[2] == '  "version": 3,'
    assert re.fullmatch(r'  "checksum": "[0-9a-f]{32}"', lines[-3])
    assert lines[-2:] == ["}", ""]


def every_object() -> list[SmallObject]:
    return [
        VOTE,
        Lease(process="p", job="j", count=3, length_s=30.0, writer=WRITER),
        ReadBack(rank=1, nbytes=5, writer=WRITER),
        Shown(
            tag="runs--a",
            attempt="00000001-0",
            order=(1, 0),
            files=("a_states.pt",),
            beside=(BesideFile("trainer_state.json", 17, 1 << 60),),
        ),
        Mirrored(begun=("global_step4/00000002-0",), writer=WRITER),
    ]


def test_every_kind_of_small_object_is_tried() -> None:
    assert {type(obj) for obj in every_object()} == set(get_args(SmallObject))


@pytest.mark.parametrize("obj", every_object(), ids=lambda obj: type(obj).__name__)
def test_every_change_of_a_single_byte_is_noticed(obj: SmallObject) -> None:
    data = encode(obj)
    for position in range(len(data)):
        for flip in (*(1 << bit for bit in range(8)), 0xFF):
            changed = bytearray(data)
            changed[position] ^= flip
            with pytest.raises(FormatError):
                decode(bytes(changed), type(obj), KEY)  # type: ignore[type-var]  # one of the five


@pytest.mark.parametrize("obj", every_object(), ids=lambda obj: type(obj).__name__)
def test_every_truncation_and_every_addition_is_noticed(obj: SmallObject) -> None:
    data = encode(obj)
    for changed in (*(data[:size] for size in range(len(data))), data + b"\n", data + b" ", b" " + data, data + data):
        with pytest.raises(FormatError):
            decode(changed, type(obj), KEY)  # type: ignore[type-var]  # one of the five


def test_an_object_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(FormatError, match=r"tag/00000001-0/object is not a checkpointd\.lease object .*checkpointd\.vote"):
        decode(encode(VOTE), Lease, KEY)


@pytest.mark.parametrize("version", [0, 1, 2, 4, 1 << 70])
def test_an_unknown_version_is_refused_with_what_to_do(version: int) -> None:
    with pytest.raises(FormatError, match=f"has format version {version}, and this release reads version 3: read it with"):
        decode(edited(encode(VOTE), version=version), Vote, KEY)


def test_keys_of_a_newer_release_are_ignored() -> None:
    assert decode(edited(encode(VOTE), compressed_with=["love", {"x": None}]), Vote, KEY) == VOTE


@pytest.mark.parametrize("length_s", [0.0, -1.0, LEASE_S_MAX + 1])
def test_a_lease_that_nobody_could_wait_for_is_refused(length_s: float) -> None:
    lease = Lease(process="p", count=1, length_s=length_s, writer=WRITER)
    with pytest.raises(FormatError, match="which cannot be"):
        decode(encode(lease), Lease, KEY)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000])
def test_what_is_no_object_at_all_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=re.escape(KEY)):
        decode(data, Vote, KEY)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(every_object()), st.data())
def test_a_sealed_object_with_any_value_anywhere_is_read_or_refused(obj: SmallObject, data: st.DataObject) -> None:
    fields = msgspec.json.decode(encode(obj))
    name = data.draw(st.sampled_from([key for key in fields if key != "checksum"]))
    changed = edited(encode(obj), **{name: data.draw(json_values)})
    try:
        found = decode(changed, type(obj), KEY)  # type: ignore[type-var]  # one of the five
    except FormatError:
        return
    assert isinstance(found, type(obj))
