"""The joint plan: which rank stored which box, and what a hostile one may not do."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.errors import FormatError
from checkpointd.layout.boxes import Box, intersect, whole
from checkpointd.layout.indexes import Plan, PlanTensor
from checkpointd.layout.joint_plan import BLOCK_BYTES, Block, JointPlan, JointTensor, decode_joint_plan, joint_plan, twins_of
from checkpointd.layout.manifest import StoredContent
from checkpointd.layout.plan import NumberedPlan, TensorNumbers
from tests.box_strategies import shapes, tilings_of

KEY = "tag/00000001-0/plan"
Parts = dict[int, list[PlanTensor]]


def encoded(parts: Parts, order: list[int] | None = None) -> bytes:
    """The joint plan of ranks that list `parts` and are all twins, whose plans are read in `order`."""
    names, listings = TensorNumbers(), {}
    for rank in order or sorted(parts):
        listings[rank] = NumberedPlan.of(Plan(rank=rank, world_size=len(parts), tensors=tuple(parts[rank])), names)
    return joint_plan(listings, names).encode([StoredContent(frame="f")] * len(parts))


def joint(parts: Parts) -> JointPlan:
    return decode_joint_plan(encoded(parts), KEY)


def part(fqn: str, shape: tuple[int, ...], box: Box) -> PlanTensor:
    return PlanTensor(fqn, "float32", shape, box, "global")


def rows(ranks: int, fqn: str = "w", height: int = 4) -> Parts:
    shape = (ranks * height, 8)
    return {rank: [part(fqn, shape, Box((rank * height, 0), (height, 8)))] for rank in range(ranks)}


def test_a_box_names_the_ranks_that_stored_its_elements() -> None:
    plan = joint(rows(16))
    assert plan.world_size == 16
    assert plan.tensors == {"w": JointTensor("w", "float32", (64, 8), 16)}
    assert plan.ranks_of("w", Box((20, 0), (4, 8))) == (5,)
    assert plan.ranks_of("w", Box((23, 3), (2, 2))) == (5, 6)
    assert plan.ranks_of("w", whole((64, 8))) == tuple(range(16))
    assert plan.ranks_of("w", Box((20, 0), (0, 8))) == ()


@given(shapes, st.data())
def test_any_tiling_over_any_ranks(shape: tuple[int, ...], data: st.DataObject) -> None:
    boxes = data.draw(tilings_of(shape))
    world = data.draw(st.integers(1, 5))
    owners = [data.draw(st.integers(0, world - 1)) for _ in boxes]
    parts: Parts = {rank: [] for rank in range(world)}
    for box, rank in zip(boxes, owners, strict=True):
        parts[rank].append(part("t", shape, box))
    plan = joint(parts)
    for wanted in [whole(shape), *boxes]:
        if "t" in plan.tensors and shape:
            touching = {rank for box, rank in zip(boxes, owners, strict=True) if intersect(box, wanted)}
            assert plan.ranks_of("t", wanted) == tuple(sorted(touching))


def test_the_bytes_do_not_depend_on_the_order_in_which_plans_are_read() -> None:
    parts = {rank: [*found, *rows(8, "v", 2)[rank]] for rank, found in rows(8).items()}
    assert encoded(parts) == encoded(parts, [5, 0, 7, 1, 2, 6, 3, 4])


def test_a_regular_grid_takes_a_few_bytes_a_tensor_whatever_the_number_of_ranks() -> None:
    def size(ranks: int) -> int:
        found = {rank: [p for n in range(50) for p in rows(ranks, f"model.layers.{n}")[rank]] for rank in range(ranks)}
        return len(encoded(found))

    assert size(128) < 2 * size(16)


def test_several_blocks_are_decoded_one_by_one() -> None:
    wide = BLOCK_BYTES // (5 * 8) + 1
    parts: Parts = {0: [], 1: []}
    for name in ("a", "b", "c"):
        for row in range(wide):
            parts[row % 2].append(part(name, (wide, 2), Box((row, 0), (1, 2))))
    plan = joint(parts)
    assert plan.ranks_of("b", Box((7, 0), (1, 1))) == (1,)
    assert len(plan._blocks) == 3
    assert list(plan._decoded) == [1]


# --- twins ---


def content(frame: str, **values: str) -> StoredContent:
    return StoredContent(frame=frame, own_values=values)


def test_twins_have_one_frame_and_own_values_of_the_same_names() -> None:
    found = [content("f", a="1"), content("f", a="2"), content("g", a="1"), content("f"), content("g", a="1"), content("f")]
    assert twins_of(found) == ([0, 0, 2, 3, 2, 3], ["a"])


def test_a_value_that_is_equal_on_all_ranks_that_have_it_does_not_differ() -> None:
    assert twins_of([content("f", a="1", b="1"), content("f", a="1"), content("f", b="2")])[1] == ["b"]


def test_a_rank_of_unknown_content_is_nobodys_twin() -> None:
    assert twins_of([None, content("f"), None, content("f")]) == ([0, 1, 2, 1], [])


# --- damage ---


def edited(**changes: object) -> bytes:
    fields = msgspec.msgpack.decode(encoded(rows(4)))
    return msgspec.msgpack.encode({**fields, **changes})


def packed(value: object) -> dict[str, object]:
    data = msgspec.msgpack.encode(value)
    return {"names": zstandard.compress(data), "names_nbytes": len(data)}


def block(values: list[int], tensors: int = 1, nbytes: int | None = None) -> Block:
    data = np.array(values, "<i8").tobytes()
    return Block(tensors, len(data) if nbytes is None else nbytes, zstandard.compress(data))


def column(*twins: int) -> bytes:
    return zstandard.compress(np.diff(np.array(twins), prepend=0).astype("<i8").tobytes())


ONE = ["w", "float32", [8], 1]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is damaged"),
        (edited(format="checkpointd.plan"), "is not a checkpointd.joint-plan object"),
        (edited(version=4), "has format version 4"),
        (edited(world_size=0), "declares 0 ranks"),
        (edited(world_size=1 << 40), "declares 1099511627776 ranks"),
        (edited(names=b"no frame"), "is damaged"),
        (edited(names_nbytes=5), "does not have the 5 bytes that it declares"),
        (edited(names_nbytes=1 << 40), "bytes of names"),
        (edited(**packed([ONE, ONE])), "lists a tensor twice"),
        (edited(**packed([["w", "float32", [8], -1]])), "declares -1 boxes of w"),
        (edited(**packed([["w", "float32", [1] * 1001, 1]])), "length <= 1000"),
        (edited(blocks=[]), "has blocks for 0 of 1 tensors"),
        (edited(**packed([ONE]), blocks=[block([0, 0])]), "has 16 bytes for 3 numbers"),
        (edited(**packed([ONE]), blocks=[block([0, 0, 8], tensors=2)]), "blocks for 2 of 1 tensors"),
        (edited(**packed([ONE]), blocks=[block([0, 0, 8], tensors=0)]), "a block of 0 tensors"),
        (edited(twins=column(0, 0, 0)), "does not have the 32 bytes"),
        (edited(twins=column(0, 1, 3, 3)), "twins of later ranks"),
        (edited(twins=column(0, 0, 1, 0)), "ranks with another twin"),
        (edited(twins=column(0, -1, 0, 0)), "twins of later ranks"),
        (edited(**packed([ONE]), blocks=[block([0, 0, 8], nbytes=1 << 40)]), "a block of 1 tensors and 1099511627776 bytes"),
    ],
)
def test_damage_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        decode_joint_plan(data, KEY)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (block([4, 0, 8]), "gives w to ranks that there are not"),
        (block([-1, 0, 8]), "gives w to ranks that there are not"),
        (Block(1, 24, zstandard.compress(b"x" * 25)), "does not have the 24 bytes"),
        (Block(1, 24, b"no frame"), "is damaged"),
    ],
)
def test_damage_of_a_block_is_refused_when_it_is_needed(found: Block, words: str) -> None:
    plan = decode_joint_plan(edited(**packed([ONE]), blocks=[found]), KEY)
    with pytest.raises(FormatError, match=words):
        plan.ranks_of("w", whole((8,)))
