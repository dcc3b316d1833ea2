"""One of two processes that save and load through DCP on a checkpointd root.

    dcp_ranks.py FOLDER PROCESS

Every process notes what is wrong in each case: see `rank_cases.py`.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkpointd_client import Checkpointer
from checkpointd_client.integrations.dcp import CheckpointdReader, CheckpointdWriter
from tests.e2e.rank_cases import CaseNotes

PROCESSES = 2


def plain_state() -> dict[str, torch.Tensor]:
    """What the state holds, as plain tensors; the same on every process."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    plain = {f"model.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return plain | {"tp": torch.randn(3, 7), "both": torch.randn(4, 2), "plain": torch.randn(6), "number": torch.tensor(4.0)}


def sharded_state(plain: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The same under FSDP2, tensor parallelism on a second dimension of the mesh, replicated, and plain."""
    mesh = init_device_mesh("cpu", (PROCESSES, 1), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    for name, tensor in model.state_dict().items():
        part = distribute_tensor(plain[f"model.{name}"], tensor.device_mesh, tensor.placements)
        tensor.to_local().copy_(part.to_local())
    return {
        "model": model.state_dict(),
        "tp": distribute_tensor(plain["tp"], mesh, [Shard(1), Replicate()]),
        "both": distribute_tensor(plain["both"], mesh, [Replicate(), Shard(0)]),
        "plain": plain["plain"].clone(),
        "number": plain["number"].clone(),
        "epoch": 5,
    }


def leaves(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in state.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def local_of(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def clear(state: dict[str, Any]) -> None:
    for value in leaves(state).values():
        if isinstance(value, torch.Tensor):
            local_of(value).zero_()
    state["epoch"] = 0


class Failing(DefaultSavePlanner):
    """Loses its data on rank 1."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if dist.get_rank() == 1:
            raise OSError("the data is gone")
        return super().resolve_data(write_item)


class Ranks:
    """This process in the job of two."""

    def __init__(self, folder: Path, number: int) -> None:
        self.notes = CaseNotes(folder, number)
        self.root = folder / "root"
        self.plain = plain_state()
        self.expected = leaves(sharded_state(self.plain))

    def check(self, state: dict[str, Any]) -> None:
        for fqn, value in leaves(state).items():
            one, two = local_of(value), local_of(self.expected[fqn])
            same = one.equal(two) if isinstance(one, torch.Tensor) else one == two
            if not same:
                self.notes.wrong.append(f"{fqn} differs")

    def load(self, tag: str | None = None) -> None:
        state = sharded_state(self.plain)
        clear(state)
        dcp.load(state, storage_reader=CheckpointdReader(self.root, tag))
        self.check(state)

    def run(self) -> None:
        state = sharded_state(self.plain)
        writer = CheckpointdWriter(self.root, "one")
        with self.notes.case("save"):
            dcp.save(state, storage_writer=writer)
            self.load()
        with self.notes.case("async_save"):
            dcp.async_save(state, storage_writer=CheckpointdWriter(self.root, "two")).result()  # type: ignore[union-attr]
            self.load("two")
        with self.notes.case("a rank fails"):
            self.fail(state, writer)
        with self.notes.case("a save after a failure"):
            dcp.save(state, checkpoint_id="after", storage_writer=writer)
            self.load()
        with self.notes.case("with a Checkpointer"):
            self.with_checkpointer(state)
        self.notes.finish()

    def fail(self, state: dict[str, Any], writer: CheckpointdWriter) -> None:
        try:
            dcp.save(state, checkpoint_id="failed", storage_writer=writer, planner=Failing())
            self.notes.wrong.append("a rank failed, and the save did not")
        except CheckpointException as error:
            if 1 not in error.failures or "the data is gone" not in str(error.failures[1][0]):
                self.notes.wrong.append(f"the failure of rank 1 is told as {error}")

    def with_checkpointer(self, state: dict[str, Any]) -> None:
        target = {"model": sharded_state(self.plain)["model"], "tp": torch.zeros(3, 7), "epoch": 0}
        for tensor in target["model"].values():
            tensor.to_local().zero_()
        with Checkpointer(self.root) as ckpt:
            ckpt.load(target, "one", strict=False)
            ckpt.save(7, state).wait()
        self.check({"model": target["model"], "epoch": target["epoch"]})
        if not target["tp"].equal(self.plain["tp"]):
            self.notes.wrong.append("the plain tensor differs")
        dist.barrier()
        self.load("global_step7")


def main() -> None:
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    store = dist.FileStore(str(folder / "rendezvous"), PROCESSES)
    dist.init_process_group("gloo", store=store, rank=number, world_size=PROCESSES, timeout=timedelta(seconds=600))
    Ranks(folder, number).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
