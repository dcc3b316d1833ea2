"""The content of all ranks as one: which rank's bytes each tensor is read from."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointd.codec.checksum import xxh3_128
from checkpointd.layout import tree
from checkpointd.layout.boxes import whole
from checkpointd.layout.indexes import Chunk, Index, TensorEntry
from checkpointd.layout.joint_plan import JointPlan, twins_of
from checkpointd.pipeline.read.checkpoint_view import CheckpointView
from checkpointd.pipeline.read.contents import content_of
from checkpointd_client import RngState
from checkpointd_client.restore.content import RankContent, merged_content
from checkpointd_client.restore.plan import LoadOptions, Target, prepare
from checkpointd_client.restore.store_source import wants
from tests.unit.client.capture_and_fill import Saved, save, tensor_of


def index_of(saved: Saved, rank: int, world_size: int) -> Index:
    def entry(fqn: str) -> TensorEntry:
        dtype, shape = saved.entries[fqn]
        data = saved.data[fqn]
        chunk = Chunk(0, 0, len(data), len(data), "raw", None, xxh3_128(data))
        return TensorEntry(fqn, dtype, shape, whole(shape), "rank", (chunk,))

    return Index(
        tag="t",
        attempt="1-0",
        rank=rank,
        world_size=world_size,
        step=1,
        objects=(),
        tensors=tuple(map(entry, saved.entries)),
        aliases=saved.aliases,
        excluded=(),
        tree=tree.encode(saved.tree),
    )


class Job:
    """Ranks that each saved a state of their own."""

    def __init__(self, *states: dict[str, Any]) -> None:
        self.ranks = [save(state) for state in states]
        indexes = {rank: index_of(saved, rank, len(states)) for rank, saved in enumerate(self.ranks)}
        checkpoint: Any = SimpleNamespace(tag="t", commit=SimpleNamespace(world_size=len(states)))
        self.world = CheckpointView(checkpoint, indexes)

    def load(self, state: dict[str, Any], content: RankContent) -> tuple[str, ...]:
        restoration = prepare(state, content, LoadOptions(strict=False))
        for target in restoration.targets:
            self.fill(target, content)
        restoration.finish()
        return restoration.per_rank_left

    def fill(self, target: Target, content: RankContent) -> None:
        [want] = wants([target], content, fill=False)
        assert want.rank is not None
        saved = self.ranks[want.rank]
        target.tensor.copy_(tensor_of(saved.data[want.fqn], *saved.entries[want.fqn]))


def rank_state(value: float, name: str) -> dict[str, Any]:
    """A tensor that ranks have different values of, and a view of it that only this rank has."""
    own = torch.full((4,), value)
    return {"own": own, name: own[:2]}


@pytest.mark.parametrize(("keep", "own"), [(None, 0.0), (0, 1.0), (1, 2.0)])
def test_a_view_is_read_from_the_rank_that_saved_it(keep: int | None, own: float) -> None:
    """The ranks' own tensors have one name and different values."""
    job = Job(rank_state(1.0, "first"), rank_state(2.0, "second"))
    loaded = {"own": torch.zeros(4), "first": torch.zeros(2), "second": torch.zeros(2)}
    job.load(loaded, merged_content(job.world, keep=keep, alone=keep is None))
    assert {name: tensor[0].item() for name, tensor in loaded.items()} == {"own": own, "first": 1.0, "second": 2.0}


@pytest.mark.parametrize(("saved", "alone", "left"), [(1, False, ("rng", "own")), (2, False, ()), (1, True, ()), (2, True, ())])
def test_several_ranks_do_not_all_go_on_with_the_random_numbers_of_one(saved: int, alone: bool, left: tuple[str, ...]) -> None:
    """Ranks that drew the same numbers before go on to draw the same."""
    torch.manual_seed(1)
    job = Job(*({"rng": RngState(), "own": torch.Generator().manual_seed(1), "count": 3} for _ in range(saved)))
    torch.manual_seed(2)
    loaded = {"rng": RngState(), "own": torch.Generator().manual_seed(2), "count": 0}
    assert job.load(loaded, merged_content(job.world, keep=None, alone=alone)) == left
    own = loaded["own"]
    assert isinstance(own, torch.Generator)
    assert torch.get_rng_state().equal(torch.Generator().manual_seed(2 if left else 1).get_state())
    assert own.get_state().equal(torch.Generator().manual_seed(2 if left else 1).get_state())
    assert loaded["count"] == 3


def test_names_that_are_tied_on_each_rank_stay_tied() -> None:
    job = Job(rank_state(1.0, "first"), rank_state(1.0, "second"))
    content = merged_content(job.world, keep=None, alone=True)
    assert {alias.owner for alias in content.aliases} == {"own"} == content.owners.keys()


def states(seed: int, ranks: int) -> list[dict[str, Any]]:
    """States of a few ranks: equal parts, own values that differ or are missing somewhere, lists, dicts, views."""
    rng = random.Random(seed)
    weight = torch.arange(4.0)

    def own() -> Any:
        value = float(rng.randrange(2))
        return rng.choice([value, torch.full((2,), value), [value, torch.full((2,), value)], {"deep": value}, [{"a": value}]])

    def state() -> dict[str, Any]:
        names = [name for name in ("seed", "count", "rng") if rng.random() < 0.8]
        shared = {"weight": weight, "view": weight[: rng.choice([2, 2, 3])]}
        return {"model": shared, **{name: own() for name in names}, "nested": {name: own() for name in names}}

    return [state() for _ in range(ranks)]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("kept", [False, True])
def test_the_index_of_one_of_several_twins_gives_the_same_content(seed: int, kept: bool) -> None:
    job = Job(*states(seed, 5))
    twins, differing = twins_of(content_of(index) for index in job.world.indexes.values())
    plan = JointPlan("plan", 5, {}, (), {}, twins, frozenset(differing))
    keep = seed % 5 if kept else None
    needed = {rank: index for rank, index in job.world.indexes.items() if rank in twins or rank == keep}
    few = CheckpointView(job.world.checkpoint, needed)
    assert merged_content(few, keep=keep, alone=False, plan=plan) == merged_content(job.world, keep=keep, alone=False)
