"""One of four processes that save and load models in every layout, as jobs of 1, 2, 3 and 4 ranks one after the other.

    sharded_ranks.py FOLDER PROCESS few|many|all

`all`: each pair of layouts is loaded for each pair of worlds, in every dtype. `many`: each pair of layouts is loaded for half
of the pairs of worlds, in one dtype, by turns: so any two of the layouts, worlds and dtypes meet still. `few`: three ranks load
what two saved in one dtype, in a quarter of the pairs of layouts, and only a few of the other cases are run.

Every process notes what is wrong in each case: see `rank_cases.py`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkpointd.errors import AbortedError, CheckpointdError
from checkpointd_client import Checkpointer
from checkpointd_client.sharding import write_split
from tests.e2e.rank_cases import CaseNotes, leave_process_group
from tests.e2e.sharded_cases import (
    contexts_of_their_own,
    objects_that_load_themselves,
    one_rank_changes,
    placements,
    readers,
    replicas,
    stages,
    steps_go_on,
)
from tests.e2e.sharded_example import example
from tests.e2e.sharded_fsdp1 import flat, flat_in_part
from tests.e2e.sharded_models import DTYPES, LAYOUTS, Job, build, distribute_like, locals_of, plain_tensors, state_of

PROCESSES = 4
WORLDS = (1, 2, 3, 4)
FEW_DTYPES = ("bf16",)
LIMIT = timedelta(seconds=600)
PARALLEL = tuple(layout for layout in LAYOUTS if layout != "plain")


def _go_together(source: str, target: str) -> bool:
    """ZeroRedundancyOptimizer is tried with itself and DDP alone, which is the same model: the matrix is large enough."""
    return "zero" not in (source, target) or {source, target} <= {"zero", "ddp"}


class Process(CaseNotes):
    """This process in all the jobs that it takes part in."""

    def __init__(self, folder: Path, number: int, amount: str) -> None:
        super().__init__(folder, number)
        self.root, self.number, self._every, self.few = folder / "root", number, amount == "all", amount == "few"
        self.saves, self.loads = ((2,), (3,)) if self.few else (WORLDS, WORLDS)
        self._stride = 4 if self.few else 2
        self.dtypes = {name: dtype for name, dtype in DTYPES.items() if not self.few or name in FEW_DTYPES}
        self.store = dist.FileStore(str(folder / "rendezvous"), PROCESSES)
        self.store.set_timeout(timedelta(seconds=1700))
        self.saved: dict[str, dict[str, torch.Tensor]] = {}
        self.folder = folder

    @contextmanager
    def job(self, name: str, world: int) -> Iterator[bool]:
        """Whether this process is one of the first `world`, which are a process group meanwhile. All leave together."""
        if self.number < world:
            store = dist.PrefixStore(name, self.store)
            dist.init_process_group("gloo", store=store, rank=self.number, world_size=world, timeout=LIMIT)
        yield self.number < world
        if self.number < world:
            leave_process_group()
        self.store.set(f"{name}/left/{self.number}", "")
        self.store.wait([f"{name}/left/{number}" for number in range(PROCESSES)])

    @contextmanager
    def nothing(self) -> Iterator[None]:
        """In place of what the others have."""
        yield None

    def save_all(self, world: int) -> None:
        """A checkpoint of each layout and dtype, two steps old; what it holds goes to a file beside it."""
        with self.job(f"save-{world}", world) as mine:
            if not mine:
                return
            with Checkpointer(self.root, chunk_bytes=16 << 10) as ckpt:
                for layout in PARALLEL:
                    for dtype in self.dtypes:
                        self._save(ckpt, f"{layout}-{dtype}-{world}", build(layout, DTYPES[dtype], world))

    def _save(self, ckpt: Checkpointer, tag: str, job: Job) -> None:
        for number in range(2):
            job.step(number)
        plain = plain_tensors(job)
        if self.number == 0:
            torch.save(plain, self.folder / f"{tag}.pt")
        ckpt.save(2, job.state, tag=tag).wait()

    def load_all(self, world: int) -> None:
        """Every layout into every layout; optimizer state is there or not, by turns."""
        with self.job(f"load-{world}", world) as mine:
            if not mine:
                return
            with Checkpointer(self.root) as ckpt:
                for b, target in enumerate(LAYOUTS if world == 1 else PARALLEL, start=0 if world == 1 else 1):
                    pairs = {name: (build(target, dtype, 77), build(target, dtype, 78)) for name, dtype in self.dtypes.items()}
                    for a, source in enumerate(PARALLEL):
                        for saved_by in self.saves if _go_together(source, target) else ():
                            if not self._every and target != "plain" and (a + b + saved_by // 2 + world // 2) % self._stride:
                                continue
                            for c, dtype in enumerate(self.dtypes):
                                if not self._every and (a + saved_by + world + c) % len(self.dtypes):
                                    continue
                                tag, fresh = f"{source}-{dtype}-{saved_by}", (a + saved_by + c) % 3 == 0
                                self._load(ckpt, tag, f"{target} on {world}", *pairs[dtype], fresh=fresh)

    def _load(self, ckpt: Checkpointer, tag: str, target: str, job: Job, reference: Job, *, fresh: bool) -> None:
        if fresh:
            state_of(job).clear()
        loaded = ckpt.load(job.state, tag)
        assert loaded is not None
        plain = torch.load(self.folder / f"{tag}.pt", weights_only=True)
        name = f"{tag} into {target}"
        if loaded.per_rank_left or loaded.step != 2:
            self.wrong.append(f"{name}: {loaded}")
        distribute_like(reference, plain)
        self._compare(name, job, reference)
        for either in (job, reference):
            either.step(5)
        self._compare(f"{name}, a step later", job, reference)

    def _compare(self, name: str, job: Job, reference: Job) -> None:
        ours, theirs = locals_of(job), locals_of(reference)
        if len(ours) != len(theirs):
            self.wrong.append(f"{name}: {len(ours)} tensors, not {len(theirs)}")
        different = [i for i, (one, two) in enumerate(zip(ours, theirs, strict=False)) if not _same(one, two)]
        if different:
            self.wrong.append(f"{name}: {len(different)} of {len(ours)} tensors differ, the first is number {different[0]}")


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return one.numel() == two.numel() == 0
    return one.contiguous().view(torch.uint8).equal(two.contiguous().view(torch.uint8)) if one.dim() else one.equal(two)


# --- ranks that do not describe the same -----------------------------------------------------------------------------


def _weight(rank: int, fault: str) -> object:
    """A tensor that rank 1 of 2 describes otherwise than rank 0, in the way that `fault` says."""
    both = DeviceMesh("cpu", [0, 1])
    if fault == "overlap":  # each on a mesh of its own, and both of the same name
        full = torch.full((6, 4), float(rank))
        return distribute_tensor(full, DeviceMesh("cpu", [rank]), [Replicate()], src_data_rank=None)
    if rank == 1 and fault == "gap":
        return torch.ones(6, 4)
    dtype = torch.float64 if rank == 1 and fault == "dtype" else torch.float32
    shape = (4, 4) if rank == 1 and fault == "shape" else (3, 4)
    return DTensor.from_local(torch.ones(shape, dtype=dtype), both, [Shard(0)], shape=_sizes(shape), stride=(4, 1))


def _sizes(shape: tuple[int, int]) -> torch.Size:
    return torch.Size((2 * shape[0], shape[1]))


FAULTS = {
    "dtype": r"w is float32\[6, 4\] on rank 0 and float64\[6, 4\] on rank 1",
    "shape": r"w is float32\[6, 4\] on rank 0 and float32\[8, 4\] on rank 1",
    "gap": r"w \(ranks \[0\]\): 12 of 24 elements are written by no rank",
    "overlap": r"w: ranks 0 and 1 both stored the box .* and their values differ: if it is one tensor",
}


def disagree(process: Process) -> None:
    """Each disagreement aborts the save on both ranks, with the FQN and the ranks; the next save works."""
    with process.job("faults", 2) as mine:
        if not mine:
            return
        with Checkpointer(process.folder / "faults") as ckpt:
            for step, (fault, words) in enumerate(FAULTS.items()):
                try:
                    told: object = ckpt.save(step, {"w": _weight(process.number, fault)}).wait(300)
                except CheckpointdError as error:
                    told = error
                if not isinstance(told, AbortedError) or not re.search(words, str(told)):
                    process.wrong.append(f"{fault}: {told!r}")
            ckpt.save(9, {"w": _weight(process.number, "none")}).wait()


# --- a restart beside a sidecar --------------------------------------------------------------------------------------


def restart(process: Process) -> None:
    """Saved in every layout beside a sidecar, and then gone without a word: the next ranks load it from memory."""
    socket = os.environ["SIDECAR"]
    for layout in PARALLEL:
        root = process.folder / f"beside-{layout}"
        with process.job(f"beside-{layout}", 2) as mine:
            if mine:
                ckpt = Checkpointer(root, sidecar=socket)
                job = build(layout, torch.float32, 3)
                job.step(0)
                ckpt.save(0, job.state).wait()
                expected = [tensor.clone() for tensor in locals_of(job)]
                leave(ckpt)
        with process.job(f"again-{layout}", 2) as mine:
            if mine:
                with Checkpointer(root, sidecar=socket) as ckpt:
                    again = build(layout, torch.float32, 4)
                    loaded = ckpt.load(again.state)
                same = all(map(_same, locals_of(again), expected))
                if loaded is None or loaded.source != "memory" or not same:
                    process.wrong.append(f"{layout} beside a sidecar: {loaded}, the same bits: {same}")


def leave(ckpt: Checkpointer) -> None:
    """As a trainer that is killed: the sidecar hears no more of it, and no word of farewell."""
    sidecar = ckpt._core._sidecar
    assert sidecar is not None

    async def hang_up() -> None:
        (await sidecar.link()).lose("as if killed")

    ckpt._core._writer.call(hang_up(), 10.0)
    ckpt.close()


def main() -> None:
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    # So that these small tensors, too, are written as large ones are.
    write_split.HALVED_BYTES_MIN, write_split.HALVED_ROW_BYTES_MIN = 256, 8
    process: Any = Process(folder, number, sys.argv[3])
    for world in process.saves:
        with process.case(f"save on {world}"):
            process.save_all(world)
    for world in process.loads:
        with process.case(f"load on {world}"):
            process.load_all(world)
    few = (disagree, replicas, one_rank_changes)
    many = (
        readers,
        restart,
        placements,
        stages,
        objects_that_load_themselves,
        steps_go_on,
        contexts_of_their_own,
        flat,
        flat_in_part,
        example,
    )
    for case in few if process.few else (*few, *many):
        with process.case(case.__name__):
            case(process)
    process.finish()
    os._exit(0)  # gloo's threads of groups that are gone need not be waited for


if __name__ == "__main__":
    main()
