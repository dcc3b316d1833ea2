"""Every wrapper, at any depth and in any order, gives the same names, and a checkpoint loads with any other wrappers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from checkpointd_client.capture.state import capture
from checkpointd_client.sharding.wrappers import Names
from tests.unit.client.capture_and_fill import same, save

Wrap = Callable[[nn.Module], nn.Module]

WRAPPERS: dict[str, Wrap] = {
    "compile": lambda module: torch.compile(module),  # type: ignore[dict-item, return-value]  # it gives a module for one
    "recompute": checkpoint_wrapper,
    "offload": offload_wrapper,
    "DDP": DistributedDataParallel,
    "DataParallel": DataParallel,
    "average": AveragedModel,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)


class Named(nn.Module):
    """It has parts with the names that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self._orig_mod = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
        self._orig_mod.module = nn.Linear(2, 2)


@pytest.fixture(autouse=True)
def process_group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """`names`: the innermost wrapper first."""
    for name in names:
        module = WRAPPERS[name](module)
    return module


def names_of(module: nn.Module) -> set[str]:
    """The stored names, without the counts of averages."""
    captured = capture({"m": module}, None, exclude_frozen_parameters=False)
    found = {leaf.fqn for leaf in captured.leaves} | {alias.fqn for alias in captured.aliases}
    return {fqn for fqn in found if not fqn.endswith("n_averaged")}


COMBINATIONS = [names for count in (1, 2, 3) for names in permutations(WRAPPERS, count)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_wrappers_1_every_order_around_a_module_gives_the_names_of_the_bare_one(count: int) -> None:
    for make in (Block, Named):
        bare = names_of(make())
        for names in list(permutations(WRAPPERS, count))[:: 1 if count < 3 else 4]:
            assert names_of(wrapped(make(), names)) == bare, names


@pytest.mark.nightly
def test_wrappers_1_at_any_depth() -> None:
    def made(outer: Sequence[str], middle: Sequence[str], inner: Sequence[str]) -> nn.Module:
        block = Block()
        block.inner = wrapped(block.inner, inner)  # type: ignore[assignment]
        return wrapped(nn.Sequential(wrapped(block, middle), nn.ReLU()), outer)

    bare = names_of(made((), (), ()))
    some = [
        (),
        ("compile",),
        ("recompute",),
        ("compile", "recompute"),
        ("recompute", "compile"),
        ("average",),
        ("DDP", "compile"),
    ]
    for where in product(some, repeat=3):
        assert names_of(made(*where)) == bare, where


def test_wrappers_1_a_module_at_two_places_has_clean_names_at_both() -> None:
    block = wrapped(nn.Linear(2, 2), ("compile",))
    assert names_of(nn.ModuleList([block, block])) == names_of(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))


@pytest.mark.parametrize("names", [(), ("recompute",), ("compile",), ("compile", "recompute")])
def test_wrappers_1_in_both_kinds_of_fsdp(names: Sequence[str]) -> None:
    def made(names: Sequence[str]) -> nn.Module:
        return nn.Sequential(wrapped(nn.Linear(2, 2), names), nn.Linear(2, 2))

    def flat(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            module, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True
        )

    bare = names_of(made(()))
    assert names_of(fully_shard(made(names))) == bare
    assert names_of(flat(made(names))) == bare
    average: Any = AveragedModel(nn.Linear(1, 1))
    average.module = nn.ModuleList([DistributedDataParallel(nn.Linear(2, 2)), flat(made(names))])
    assert names_of(average) == names_of(nn.ModuleList([nn.Linear(2, 2), made(())]))


@pytest.mark.parametrize("names", COMBINATIONS[:: len(COMBINATIONS) // 24])
def test_a_checkpoint_loads_with_other_wrappers_and_so_does_its_optimizer(names: Sequence[str]) -> None:
    for saved_as, loaded_as in ((names, ()), ((), names)):
        block = Block()
        trained, mine = (nn.Sequential(wrapped(one, how)) for one, how in ((block, saved_as), (Block(), loaded_as)))
        if "average" in names:  # its count is a tensor more
            continue
        optimizers = [torch.optim.AdamW(module.parameters()) for module in (trained, mine)]
        sum(p.sum() for p in trained.parameters()).backward()  # type: ignore[union-attr]  # a tensor
        optimizers[0].step()
        save({"m": trained, "o": optimizers[0]}).load({"m": mine, "o": optimizers[1]})
        for one, two in zip(trained.parameters(), mine.parameters(), strict=True):
            assert same(one.detach(), two.detach())
        assert same(optimizers[0].state_dict()["state"], optimizers[1].state_dict()["state"])


def test_the_average_of_a_model_loads_into_the_model() -> None:
    trained = Block()
    average = AveragedModel(copy.deepcopy(trained))
    saved = save({"m": average})
    mine = Block()
    saved.fill(found := saved.prepare({"m": mine}, strict=False))
    found.finish()
    assert found.unexpected == ("m.n_averaged",)
    assert same(dict(mine.state_dict()), dict(trained.state_dict()))


def test_raw_is_the_inverse_of_clean() -> None:
    block = Block()
    block.inner = wrapped(block.inner, ("compile", "average"))  # type: ignore[assignment]
    module = nn.Sequential(wrapped(block, ("recompute",)))
    names = Names(module, module.state_dict())
    for key in module.state_dict():
        if not key.endswith("n_averaged"):  # which the average has, and the module inside has not
            assert names.raw(names.clean(key)) == key
    assert names.raw("0.inner.more") == "0.inner.module._orig_mod.more"
    assert names.raw("elsewhere.more") == "elsewhere.more"
