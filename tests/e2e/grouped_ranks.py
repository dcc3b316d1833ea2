"""One of four ranks: ranks 1 and 3 train together, rank 2 alone, rank 0 not at all. Each group has a root of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from checkpointd.errors import UsageError
from checkpointd_client import Checkpointer, open_checkpoint
from tests.e2e.forked_ranks import forked, join_job
from tests.e2e.rank_cases import CaseNotes, leave_process_group

PAIR, ALONE = (1, 3), (2,)


class Training:
    """Sharded weights, replicated ones, and a value of each rank."""

    def __init__(self, group: dist.ProcessGroup, mesh: DeviceMesh, seed: int) -> None:
        torch.manual_seed(seed)
        self.sharded = nn.Linear(6, 4)
        fully_shard(self.sharded, mesh=mesh)
        self.replicated = nn.parallel.DistributedDataParallel(nn.Linear(3, 2), process_group=group)
        self.own = torch.full((2,), float(seed + dist.get_rank(group)))

    def state(self) -> dict[str, object]:
        return {"sharded": self.sharded, "replicated": self.replicated, "own": {f"of_rank_{dist.get_rank()}": self.own}}

    def values(self) -> list[torch.Tensor]:
        found = [*self.sharded.parameters(), *self.replicated.parameters(), self.own]
        return [(one.to_local() if isinstance(one, DTensor) else one).detach().clone() for one in found]


def run(folder: Path, rank: int) -> None:
    join_job(folder, rank, 4)
    notes = CaseNotes(folder, rank)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in (PAIR, ALONE)}
    meshes = {ranks: DeviceMesh("cpu", list(ranks)) for ranks in groups}
    own = next((ranks for ranks in groups if rank in ranks), None)
    root = folder / f"root-{len(own or ())}"
    if own is None:
        with notes.case("outside"):
            for group in groups.values():
                with pytest.raises(UsageError, match="this rank is not in process_group"):
                    Checkpointer(root, process_group=group)
            with pytest.raises(UsageError, match=r"mesh\.get_group"):
                Checkpointer(root, process_group=meshes[PAIR])  # type: ignore[arg-type]
    else:
        group = groups[own]
        with notes.case("saves"):
            trained = Training(group, meshes[own], seed=1)
            with Checkpointer(root, process_group=group) as ckpt:
                ckpt.save(1, trained.state(), client_state={"at": rank}).wait()
                assert ckpt.status().world_size == len(own)
        with notes.case("loads"):
            other = Training(group, meshes[own], seed=5)
            with Checkpointer(root, process_group=group) as ckpt:
                loaded = ckpt.load(other.state())
            assert loaded is not None
            assert all(map(torch.equal, other.values(), trained.values()))
        with notes.case("is read in the group"):
            other = Training(group, meshes[own], seed=5)
            with open_checkpoint(root, "global_step1", process_group=group) as opened:
                assert opened.load(other.state()).per_rank_left == ()
            assert all(map(torch.equal, other.values(), trained.values()))
        with notes.case("is read by others"), open_checkpoint(root) as opened:
            assert {"own.of_rank_2"} & set(opened.tensors()) == ({"own.of_rank_2"} if rank == 2 else set())
    notes.finish()
    dist.barrier()
    leave_process_group()


if __name__ == "__main__":
    forked(Path(sys.argv[1]), 4, run)
