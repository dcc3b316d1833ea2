"""One process in place of any rank of a job without its other ranks: meshes and DTensors are real; collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_python_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


def forget_meshes() -> None:
    """Forget the meshes of the ranks before: torch takes meshes of the same ranks for one, whichever rank it was."""
    _clear_python_sharding_prop_cache()
    _clear_fast_path_sharding_prop_cache()


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """This process is rank `rank` of `world`."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    forget_meshes()
    try:
        yield
    finally:
        forget_meshes()
        dist.destroy_process_group()
