"""Held snapshots: which one the ranks have in common, and what is not taken from the sidecar."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from checkpointd.admin.gc import deletion
from checkpointd.codec.checksum import xxh3_128
from checkpointd.config import Ranks
from checkpointd.daemon.memory.layouts import wire_tensors
from checkpointd.daemon.protocol.wire import RetainedSnapshot, Snapshot
from checkpointd.errors import DamagedError, MismatchError, SidecarError, StoreError
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box
from checkpointd.layout.log_records import LogState
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.shard import PAGE
from checkpointd.store.memory import MemoryStore
from checkpointd_client.restore.bind import Target
from checkpointd_client.restore.memory_source import FetchedSnapshot, MemorySource, common, counts
from checkpointd_client.sharding.dtensor import LocalBox, LocalShard
from tests.builders import Piece, leave_in_doubt, make_shard, rank_arrays, save_checkpoint

TWO = Ranks(rank=0, world_size=2)
SHARD = make_shard(rank_arrays(0))


def _held(step: int, *, start: int = 1, world_size: int = 2, nonce: str = "n") -> RetainedSnapshot:
    return RetainedSnapshot(
        tag=f"global_step{step}",
        attempt=f"{start:08d}-{step}",
        step=step,
        order=(start, step),
        world_size=world_size,
        nbytes=PAGE,
        phase="staged",
        nonce=nonce,
    )


def _descriptor(data: bytes) -> int:
    descriptor = os.memfd_create("held")
    os.write(descriptor, data)
    return descriptor


def _snapshot(**changes: Any) -> Snapshot:
    """What a sidecar gives back of SHARD."""
    digests = tuple(xxh3_128(SHARD.buffer[t.offset : t.offset + t.nbytes]) for t in SHARD.tensors)
    snapshot = Snapshot(
        held=_held(1),
        nbytes=len(SHARD.buffer),
        tensors=wire_tensors(SHARD.tensors),
        aliases=(),
        excluded=(),
        tree=SHARD.tree,
        digests=digests,
    )
    return msgspec.structs.replace(snapshot, **changes)


def test_the_newest_that_all_ranks_hold() -> None:
    assert common({0: (_held(3), _held(5)), 1: (_held(5), _held(3))}, TWO) == _held(5)
    assert common({0: (_held(3), _held(5)), 1: (_held(3), _held(7))}, TWO) == _held(3)


def test_the_newer_start_wins_over_the_higher_step() -> None:
    both = (_held(9, start=1), _held(4, start=2))
    assert common({0: both, 1: both}, TWO) == _held(4, start=2)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({}, id="a rank that said nothing"),
        pytest.param({1: ()}, id="a rank that holds nothing"),
        pytest.param({1: (_held(4),)}, id="another step"),
        pytest.param({1: (_held(3, start=2),)}, id="another attempt at the same step"),
        pytest.param({1: (_held(3, nonce="m"),)}, id="another root's"),
        pytest.param({1: (_held(3),), 2: (_held(3),)}, id="more ranks than there are"),
    ],
)
def test_nothing_in_common(other: dict[int, tuple[RetainedSnapshot, ...]]) -> None:
    assert common({0: (_held(3),), **other}, TWO) is None


def test_what_another_number_of_ranks_saved_is_not_taken() -> None:
    three = (_held(3, world_size=3),)
    assert common({0: three, 1: three}, TWO) is None


async def _saved(store: MemoryStore, *, failing: bool = False) -> None:
    await save_checkpoint(store, step=1, failing={1: StoreError("full")} if failing else {})


async def _held_in(store: MemoryStore, phase: str) -> RetainedSnapshot:
    nonce = (await starts.read(store, 1)).nonce
    return msgspec.structs.replace(_held(1, nonce=nonce), attempt="00000001-0", phase=phase)


async def test_retained_3_what_the_store_shows_as_committed_is_taken_and_what_it_shows_as_removed_is_not() -> None:
    store = MemoryStore()
    await _saved(store)
    held = await _held_in(store, "committed")
    assert counts(await root_view.state_of(store), held)
    assert not counts(await root_view.state_of(store), msgspec.structs.replace(held, nonce="another root's"))
    await deletion(store, "global_step1", force=True, dry_run=False)
    state = await root_view.state_of(store)
    assert not counts(state, held)
    assert not counts(LogState(begins=state.begins), held), "nor when the log has forgotten it, too"


async def test_retained_3_what_was_aborted_is_not_taken() -> None:
    store = MemoryStore()
    await _saved(store, failing=True)
    assert not counts(await root_view.state_of(store), await _held_in(store, "aborted"))


@pytest.mark.parametrize(("phase", "taken"), [("staged", True), ("persisting", True), ("prepared", True), ("failed", False)])
async def test_retained_3_what_is_in_doubt_is_taken_while_its_sidecar_is_at_it(phase: str, taken: bool) -> None:
    store = MemoryStore()
    await leave_in_doubt(store, voting=(0,))
    assert counts(await root_view.state_of(store), await _held_in(store, phase)) is taken


def test_a_snapshot_is_checked_and_copied() -> None:
    held = FetchedSnapshot(_snapshot(), _descriptor(bytes(SHARD.buffer)), 0)
    held.check(held.tensors)
    copies: dict[str, bytes] = {}
    for tensor in held.tensors:
        held.give(tensor, tensor.box, lambda _, data, fqn=tensor.fqn: copies.setdefault(fqn, data.tobytes()))  # type: ignore[misc]
    assert copies == {fqn: np.ascontiguousarray(array).tobytes() for fqn, array in rank_arrays(0).items()}


def test_one_bit_that_changed_is_found_where_it_is_wanted_and_ignored_where_not() -> None:
    buffer = bytearray(SHARD.buffer)
    first = SHARD.tensors[0]
    buffer[first.offset + 5] ^= 4
    held = FetchedSnapshot(_snapshot(), _descriptor(bytes(buffer)), 1)
    with pytest.raises(DamagedError, match=rf"{first.fqn} of the retained snapshot global_step1 changed in memory \(rank 1\)"):
        held.check(held.tensors[:2])
    held.check(held.tensors[1:2])


def _out_of_range(snapshot: Snapshot) -> Snapshot:
    last = snapshot.tensors[0]
    return msgspec.structs.replace(snapshot, tensors=(msgspec.structs.replace(last, offset=snapshot.nbytes),))


def _over_another(snapshot: Snapshot) -> Snapshot:
    one, two = snapshot.tensors[:2]
    return msgspec.structs.replace(snapshot, tensors=(one, msgspec.structs.replace(two, offset=one.offset)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: msgspec.structs.replace(s, nbytes=s.nbytes + PAGE), "has .* bytes, and its layout"),
        (lambda s: msgspec.structs.replace(s, nbytes=s.nbytes - 1), "whole number of pages"),
        (lambda s: msgspec.structs.replace(s, digests=s.digests[1:]), "5 digests, 6 tensors"),
        (_out_of_range, "cannot be read"),
        (_over_another, "cannot be read"),
    ],
)
def test_a_snapshot_that_cannot_be_is_damaged_and_its_descriptor_closed(
    change: Callable[[Snapshot], Snapshot], words: str
) -> None:
    descriptor = _descriptor(bytes(SHARD.buffer))
    with pytest.raises(DamagedError, match=words):
        FetchedSnapshot(change(_snapshot()), descriptor, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_descriptor_that_cannot_be_mapped_is_damaged() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(DamagedError):
        FetchedSnapshot(_snapshot(nbytes=0), reading, 0)
    with pytest.raises(DamagedError, match="cannot be mapped"):
        FetchedSnapshot(_snapshot(nbytes=0), _descriptor(b""), 0)


def test_a_part_of_a_tensor_is_not_taken_for_the_whole() -> None:
    tensors = wire_tensors(SHARD.tensors)
    part = msgspec.structs.replace(tensors[0], shape=(128, 48), box=Box((0, 0), (64, 48)))
    held = FetchedSnapshot(_snapshot(tensors=(part, *tensors[1:])), _descriptor(bytes(SHARD.buffer)), 0)
    source = MemorySource(held, {}, 0)
    target = Target(part.fqn, torch.empty(128, 48))
    with pytest.raises(DamagedError, match=f"{part.fqn} is held in part"):
        source.verify([target], source.content())


def test_what_ranks_hold_with_different_values_is_taken_from_nobody() -> None:
    """Its save was still in doubt, and the coordinator would have aborted it."""
    snapshots = []
    for value in (1.0, 2.0):
        shard = make_shard({"tied": np.full(12, value)})
        tensors = tuple(msgspec.structs.replace(tensor, scope="global") for tensor in wire_tensors(shard.tensors))
        digests = tuple(xxh3_128(shard.buffer[t.offset : t.offset + t.nbytes]) for t in shard.tensors)
        snapshot = _snapshot(nbytes=len(shard.buffer), tensors=tensors, tree=shard.tree, digests=digests)
        snapshots.append(FetchedSnapshot(snapshot, _descriptor(bytes(shard.buffer)), 0))
    source = MemorySource(snapshots[0], {1: snapshots[1]}, 0)
    [tied] = [tensor.fqn for tensor in snapshots[0].tensors if tensor.fqn == "tied"]
    with pytest.raises(SidecarError, match="ranks hold different values of tied in this node's memory"):
        source.verify([Target(tied, torch.empty(12, dtype=torch.float64))], source.content())


def test_equal_values_of_what_two_ranks_hold_are_read_from_one_of_them() -> None:
    snapshots = []
    for rank in (0, 1):
        shard = make_shard({"tied": np.full(12, 7.0)})
        tensors = tuple(msgspec.structs.replace(tensor, scope="global") for tensor in wire_tensors(shard.tensors))
        digests = tuple(xxh3_128(shard.buffer[t.offset : t.offset + t.nbytes]) for t in shard.tensors)
        snapshot = _snapshot(nbytes=len(shard.buffer), tensors=tensors, tree=shard.tree, digests=digests)
        snapshots.append(FetchedSnapshot(snapshot, _descriptor(bytes(shard.buffer)), rank))
    source = MemorySource(snapshots[0], {1: snapshots[1]}, 0)
    found = torch.empty(12, dtype=torch.float64)
    for work in (source.verify, source.fill):
        work([Target("tied", found)], source.content())
    assert torch.equal(found, torch.full((12,), 7.0, dtype=torch.float64))


@pytest.mark.parametrize("other", [8, 4])
def test_elements_of_a_rank_with_another_context_are_not_taken(other: int) -> None:
    """COMPOSITE-5, where the sidecar's memory has both ranks' elements."""
    snapshots = {}
    for rank, block in ((0, 8), (1, other)):
        shard = make_shard({}, pieces=[Piece.part("w.high", np.arange(12.0).reshape(4, 3), Box((2 * rank, 0), (2, 3)))])
        node = tree.Composite("user:Halves", (4, 3), "float64", (("high", tree.Tensor("w.high")),), block)
        root = tree.Dict("dict", (("state", tree.Dict("dict", (("w", node),))), ("client_state", None)))
        data, tensors = bytes(shard.buffer), wire_tensors(shard.tensors)
        digests = (xxh3_128(data[: shard.tensors[0].nbytes]),)
        held = _snapshot(nbytes=len(data), tensors=tensors, tree=tree.encode(root), digests=digests)
        snapshots[rank] = FetchedSnapshot(held, _descriptor(data), rank)
    source = MemorySource(snapshots[0], {1: snapshots[1]}, 0)
    whole_of, content = Target("w.high", torch.empty(4, 3, dtype=torch.float64)), source.content()
    if other == 8:
        source.locate([whole_of], content)
    else:
        with pytest.raises(MismatchError, match="w: its elements for this rank are from rank 1"):
            source.locate([whole_of], content)
    held_rows = LocalShard((4, 3), (LocalBox((4, 3), Box((0, 0), (2, 3)), (0, 0)),))
    source.locate([Target("w.high", torch.empty(2, 3, dtype=torch.float64), held_rows)], content)


@pytest.mark.parametrize("cut_alike", [True, False])
def test_held_tensors_are_equal_where_every_bit_of_them_is(monkeypatch: pytest.MonkeyPatch, cut_alike: bool) -> None:
    if not cut_alike:
        monkeypatch.setattr("checkpointd_client.restore.memory_source.same_prints", lambda *_: None)
    weight = np.arange(12.0).reshape(3, 4)
    shard = make_shard({"a": weight, "b": weight.copy(), "c": weight + 1})
    digests = tuple(xxh3_128(shard.buffer[t.offset : t.offset + t.nbytes]) for t in shard.tensors)
    snapshot = _snapshot(nbytes=len(shard.buffer), tensors=wire_tensors(shard.tensors), tree=shard.tree, digests=digests)
    source = MemorySource(FetchedSnapshot(snapshot, _descriptor(bytes(shard.buffer)), 0), {}, 0)
    content = source.content()
    assert source.equal("a", "b", content)
    assert not source.equal("a", "c", content)


def test_whether_tensors_are_equal_of_which_a_part_is_on_another_node_is_the_stores_to_tell() -> None:
    tensors = wire_tensors(SHARD.tensors)
    part = msgspec.structs.replace(tensors[0], shape=(128, 48), box=Box((0, 0), (64, 48)), scope="global")
    held = FetchedSnapshot(_snapshot(tensors=(part, *tensors[1:])), _descriptor(bytes(SHARD.buffer)), 0)
    source = MemorySource(held, {}, 0)
    with pytest.raises(SidecarError, match="does not hold all of"):
        source.equal(part.fqn, part.fqn, source.content())
