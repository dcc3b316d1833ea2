"""dtensor.py and write_split.py, against torch's own way to cut tensors: every rank of many meshes, put together again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from checkpointd.layout.boxes import Box, boxes_of_range, tiling_fault, whole
from checkpointd_client.sharding.dtensor import (
    Axis,
    LocalBox,
    LocalShard,
    MeshLayout,
    ReplicaGroup,
    _parts,
    axes_of,
    replicated,
    rows_of,
    sharded_like,
)
from checkpointd_client.sharding.write_split import SLICED_BYTES_MIN, slice_of, written_parts
from tests.unit.client.simulated_ranks import rank_of

SHAPES = [(8,), (7,), (1,), (3,), (0,), (6, 4), (5, 7), (4, 1, 3), (9, 10), (2, 0, 3)]
MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 3), (3, 2), (2, 3), (2, 4), (2, 2, 2)]


def _numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


def _coordinates(mesh: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, mesh))


def _placements(ndim: int, mesh: tuple[int, ...]) -> Iterator[tuple[Placement, ...]]:
    choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(ndim))]
    yield from itertools.product(choices, repeat=len(mesh))


def _local(full: torch.Tensor, mesh: tuple[int, ...], placements: tuple[Placement, ...], at: tuple[int, ...]) -> torch.Tensor:
    """What torch gives the rank at `at`: its placements one after the other, from left to right."""
    for size, index, placement in zip(mesh, at, placements, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            full = placement._split_tensor(full, size, with_padding=False)[0][index]
    return full


def _check(
    full: torch.Tensor, local: torch.Tensor, layout: MeshLayout, at: tuple[int, ...], *, as_stated: bool = False
) -> None:
    """The parts of the rank at `at` have the elements of its local tensor, each at its place."""
    rows = rows_of(layout, at, as_stated=as_stated)
    assert tuple(sum(n for _, n in runs) for runs in rows) == tuple(local.shape) or 0 in local.shape
    seen = torch.zeros(local.shape, dtype=torch.int64)
    for part in _parts(layout.shape, rows):
        part.box.check(layout.shape)
        cut = tuple(slice(o, o + n) for o, n in zip(part.box.offsets, part.box.sizes, strict=True))
        assert torch.equal(part.of(local), full[cut])
        part.of(seen).add_(1)
    assert bool((seen == 1).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_has_what_torch_gives_it(shape: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    full = _numbered(shape)
    for placements in _placements(len(shape), mesh):
        layout = MeshLayout(shape, mesh, axes_of(placements))
        for at in _coordinates(mesh):
            _check(full, _local(full, mesh, placements, at), layout, at)


@pytest.mark.parametrize("size", range(20))
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 3), (4, 2), (3, 3)], ids=str)
def test_fsdp_over_tensor_parallelism_is_split_right_to_left(size: int, mesh: tuple[int, int]) -> None:
    """As FSDP2 does it, uneven sizes included: parameters say _StridedShard, and are chunks of a tensor-parallel part."""
    full = _numbered((size, 3))
    layout = MeshLayout((size, 3), mesh, axes_of((_StridedShard(0, split_factor=mesh[1]), Shard(0))))
    for dp, tp in _coordinates(mesh):
        mine = Shard(0)._split_tensor(full, mesh[1], with_padding=False)[0][tp]
        _check(full, Shard(0)._split_tensor(mine, mesh[0], with_padding=False)[0][dp], layout, (dp, tp))


@pytest.mark.parametrize("size", range(20))
def test_a_strided_tensor_that_torch_cut_itself(size: int) -> None:
    mesh, placements = (2, 3), (_StridedShard(0, split_factor=3), Shard(0))
    full = _numbered((size,))
    layout = MeshLayout((size,), mesh, axes_of(placements))
    for at in _coordinates(mesh):
        _check(full, _local(full, mesh, placements, at), layout, at, as_stated=True)


def test_strided_by_what_is_not_there_is_read_from_left_to_right() -> None:
    full = _numbered((12,))
    placement = _StridedShard(0, split_factor=3)
    layout = MeshLayout((12,), (2,), (Axis(0, 3),))
    for rank in range(2):
        _check(full, placement._split_tensor(full, 2, with_padding=False)[0][rank], layout, (rank,))
    assert [part.box for part in _parts((12,), rows_of(layout, (1,)))] == [Box((o,), (2,)) for o in (2, 6, 10)]


# --- who writes what ---


def _held(shape: tuple[int, ...], replica: int, replicas: int) -> LocalShard:
    return replicated(shape, ReplicaGroup(replica, replicas))


@pytest.mark.parametrize("replicas", range(1, 9))
@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 3), (16384,), (16385, 2), (3, 40000), (2, 3, 20000), (100000,)], ids=str)
def test_replicas_write_every_element_once(shape: tuple[int, ...], replicas: int) -> None:
    written = [part for r in range(replicas) for part in written_parts(f"w{shape}", _held(shape, r, replicas), 4)]
    assert tiling_fault(shape, [part.box for part in written]) is None
    assert all(part.shape == shape for part in written)


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_large_boxes_are_shared_evenly(replicas: int) -> None:
    shape = (1000, 64)
    sizes = [part.box.numel() for r in range(replicas) for part in written_parts("w", _held(shape, r, replicas), 4)]
    assert len(sizes) == replicas
    assert max(sizes) - min(sizes) <= 64


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("columns", [2048, 2049])
def test_large_boxes_of_whole_rows_are_written_as_halves(columns: int, replicas: int) -> None:
    """Whoever loads the tensor by columns reads half of what is in its way."""
    full = torch.arange(4096 * columns, dtype=torch.float32).view(4096, columns)
    written = [p for r in range(replicas) for p in written_parts(f"h{columns}", _held(tuple(full.shape), r, replicas), 4)]
    assert tiling_fault(tuple(full.shape), [part.box for part in written]) is None
    assert {part.box.sizes[1] for part in written} == {columns // 2, columns - columns // 2}
    for part in written:
        cut = tuple(slice(o, o + n) for o, n in zip(part.box.offsets, part.box.sizes, strict=True))
        assert torch.equal(part.of(full), full[cut])


@pytest.mark.parametrize(
    ("shape", "box"),
    [((4096, 2048), Box((0, 1024), (4096, 1024))), ((1 << 21, 16), whole((1 << 21, 16))), ((512, 512), whole((512, 512)))],
    ids=["columns", "short rows", "small"],
)
def test_other_boxes_stay_whole(shape: tuple[int, ...], box: Box) -> None:
    held = LocalShard(shape, (LocalBox(shape, box, (0, 0)),))
    assert [part.box for part in written_parts(f"o{shape}", held, 4)] == [box]


def test_small_boxes_go_to_one_rank_each_and_to_all_of_them_in_the_end() -> None:
    writers = {
        r for i in range(100) for r in range(4) for part in written_parts(f"b{i}", _held((2048,), r, 4), 4) if part.box.numel()
    }
    assert writers == {0, 1, 2, 3}


@pytest.mark.parametrize("shape", [(), (8,), (1024,)])
def test_tiny_boxes_all_go_to_the_first_rank(shape: tuple[int, ...]) -> None:
    found = {
        (i, r) for i in range(50) for r in range(4) for p in written_parts(f"t{i}", _held(shape, r, 4), 4) if p.box.numel()
    }
    assert found == {(i, 0) for i in range(50)}


def test_a_rank_that_writes_nothing_still_says_what_it_takes_the_tensor_for() -> None:
    named = [written_parts("b", _held((8,), r, 2), 4) for r in range(2)]
    assert {part.box for parts in named for part in parts} == {Box((0,), (0,)), whole((8,))}


def test_what_is_broadcast_is_written_by_who_broadcasts_it() -> None:
    large = (SLICED_BYTES_MIN,)
    parts = [written_parts("buffer", replicated(large, ReplicaGroup(r, 3), first_writes=True), 4) for r in range(3)]
    assert [[part.box.numel() for part in found] for found in parts] == [[large[0]], [0], [0]]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("shape", [(7,), (5, 7), (3, 4, 6), (2, 5, 9001), ()], ids=str)
def test_a_range_of_elements_in_a_row_is_written_as_boxes(shape: tuple[int, ...], replicas: int) -> None:
    """As FullyShardedDataParallel keeps a parameter: three ranges, each of which `replicas` ranks hold after other elements."""
    full = _numbered(shape)
    seen = torch.zeros(shape, dtype=torch.int64)
    cuts = [0, full.numel() // 3, full.numel() * 2 // 3, full.numel()]
    for start, stop in itertools.pairwise(cuts):
        local = torch.cat([torch.full((3,), -1), full.reshape(-1)[start:stop], torch.full((2,), -1)])
        parts = []
        at = 3
        for box in boxes_of_range(shape, start, stop):
            parts.append(LocalBox(shape, box, (0,) * len(shape), (at, box.sizes)))
            at += box.numel()
        for replica in range(replicas):
            held = LocalShard(shape, tuple(parts), replica, replicas)
            for part in written_parts(f"w{shape}{start}", held, 4):
                cut = tuple(slice(o, o + n) for o, n in zip(part.box.offsets, part.box.sizes, strict=True))
                assert torch.equal(part.of(local), full[cut])
                seen[cut] += 1
    assert bool((seen == 1).all())


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_slice_is_cut_where_there_is_most_to_cut(count: int) -> None:
    part = LocalBox((4, 9), Box((1, 2), (1, 6)), (0, 1))
    slices = [found for i in range(count) if (found := slice_of(part, i, count)) is not None]
    assert sum(found.box.numel() for found in slices) == 6
    assert all(found.box.offsets[0] == 1 and found.at[1] - found.box.offsets[1] == -1 for found in slices)


LAYER = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (4096,), (4096,)]
"""Shapes of a transformer; norms are the small boxes that go to one replica as a whole."""


def _bytes_written(layers: int, helds: Sequence[Sequence[LocalShard]]) -> list[int]:
    """Bytes of bf16 that each rank writes of `layers` layers: `helds` is what it holds of each tensor of one."""
    return [
        sum(
            part.box.numel() * 2
            for layer in range(layers)
            for number, held in enumerate(held_of)
            for part in written_parts(f"layers.{layer}.{number}", held, 2)
        )
        for held_of in helds
    ]


def test_each_of_eight_ddp_ranks_writes_an_eighth() -> None:
    written = _bytes_written(32, [[_held(shape, rank, 8) for shape in LAYER] for rank in range(8)])
    assert sum(written) == 32 * sum(2 * math.prod(shape) for shape in LAYER)
    assert max(written) / (sum(written) / 8) < 1.001


@pytest.mark.parametrize(("groups", "shards"), [(1, 8), (2, 4), (4, 2)])
def test_ranks_of_fsdp_and_hybrid_sharding_write_alike(groups: int, shards: int) -> None:
    def held(shape: tuple[int, ...], at: tuple[int, int]) -> LocalShard:
        rows = rows_of(MeshLayout(shape, (groups, shards), (None, Axis(0))), at)
        return LocalShard(shape, _parts(shape, rows), at[0], groups)

    written = _bytes_written(32, [[held(shape, at) for shape in LAYER] for at in _coordinates((groups, shards))])
    assert sum(written) == 32 * sum(2 * math.prod(shape) for shape in LAYER)
    assert max(written) / (sum(written) / 8) < 1.001


def test_a_new_tensor_lies_where_the_shard_lies_that_it_is_like() -> None:
    """Not where the mesh is: FSDP2 can offload shards to host memory, while its mesh is one of accelerators."""
    with rank_of(0, 2):
        mesh = DeviceMesh("meta", [0, 1])  # in place of accelerators
        spec = DTensor.from_local(torch.empty(2, 3, device="meta"), mesh, [Shard(0)], run_check=False)._spec
        offloaded = DTensor(torch.ones(2, 3), spec, requires_grad=False)
        local, made = sharded_like(offloaded, torch.bfloat16, torch.device("cpu"))
    assert isinstance(made, DTensor)
    assert made._local_tensor is local
    assert (local.device.type, local.dtype, made.dtype) == ("cpu", torch.bfloat16, torch.bfloat16)
    assert (made.shape, made.stride(), made.placements) == ((4, 3), (3, 1), (Shard(0),))
