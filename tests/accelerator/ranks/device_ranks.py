"""One of two processes that train, save and load on the simulated device, as jobs of one and two ranks one after the other.

    device_ranks.py FOLDER PROCESS

Each rank computes on a device of its own. What it must be, bit for bit, is what gloo ranks in host memory compute. Every
process notes what is wrong in each case: see `tests/e2e/rank_cases.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpointd_client import Checkpointer
from tests.accelerator.ranks import device_cases
from tests.accelerator.simulated import plugin, process_group, simulator
from tests.e2e.rank_cases import CaseNotes, leave_process_group
from tests.e2e.sharded_models import Job, build, distribute_like, locals_of, plain_tensors

PROCESSES = 2
LIMIT = timedelta(seconds=240)
STEPS = 3
LAYOUTS = ("ddp", "zero", "fsdp2", "offload", "tp", "hsdp")


class Process(CaseNotes):
    """This process in all the jobs that it takes part in."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(folder, number)
        self.folder, self.number = folder, number
        self.device = torch.device("sim", number)
        self.store = dist.FileStore(str(folder / "rendezvous"), PROCESSES)
        self.store.set_timeout(timedelta(seconds=300))
        self.plain: dict[str, list[dict[str, torch.Tensor]]] = {}
        """For each layout, the whole state after each step, as gloo ranks in host memory have it."""

    @contextmanager
    def job(self, name: str, world: int = PROCESSES, backend: str = process_group.BACKEND) -> Iterator[bool]:
        """Whether this process is one of the first `world`, which are a process group meanwhile. All leave together."""
        torch.accelerator.set_device_index(self.number)
        if self.number < world:
            store = dist.PrefixStore(name, self.store)
            dist.init_process_group(backend, store=store, rank=self.number, world_size=world, timeout=LIMIT)
        yield self.number < world
        if self.number < world:
            leave_process_group()
        self.store.set(f"{name}/left/{self.number}", "")
        self.store.wait([f"{name}/left/{number}" for number in range(PROCESSES)])

    @contextmanager
    def in_any_order(self, seed: int) -> Iterator[None]:
        """The streams of this process run in an order that the seed and the rank choose; a race is noted."""
        with simulator.races() as races, simulator.chaos(seed * PROCESSES + self.number):
            yield
        self.wrong += races

    def train_in_host_memory(self, layout: str, dtype: torch.dtype) -> None:
        with self.job(f"{layout} in host memory", backend="gloo"):
            job = build("fsdp2" if layout == "offload" else layout, dtype, 3)
            self.plain[layout] = [self._stepped(job, step) for step in range(STEPS + 1)]

    def _stepped(self, job: Job, step: int) -> dict[str, torch.Tensor]:
        job.step(step)
        return plain_tensors(job)

    def build(self, layout: str, dtype: torch.dtype, seed: int) -> Job:
        return build(layout, dtype, seed, self.device)

    def compare(self, name: str, job: Job, layout: str, step: int, dtype: torch.dtype, saved_as: str | None = None) -> None:
        """Note where `job` is not bit for bit the state after `step`."""
        expected = self.build(layout, dtype, 78)
        distribute_like(expected, self.plain[saved_as or layout][step])
        pairs = list(zip(locals_of(job), locals_of(expected), strict=True))
        different = [number for number, (one, two) in enumerate(pairs) if not one.equal(two)]
        if different:
            self.wrong.append(f"{name}: {len(different)} of {len(pairs)} tensors differ, the first is number {different[0]}")

    def train_and_save(self, layout: str, dtype: torch.dtype) -> None:
        """Steps in random orders of the streams, with a save after each, beside which the next step runs."""
        with self.job(f"{layout} is saved"), Checkpointer(self.folder / layout) as ckpt:
            job = self.build(layout, dtype, 3)
            handles = []
            for step in range(STEPS):
                with self.in_any_order(step):
                    job.step(step)
                    handles.append(ckpt.save(step, job.state))
            for handle in handles:
                handle.wait()
            self.compare(f"{layout}, trained", job, layout, STEPS - 1, dtype)

    def load_all(self, layout: str, dtype: torch.dtype, world: int) -> None:
        """Each checkpoint into a new job, which then goes on."""
        with self.job(f"{layout} is loaded on {world}", world) as mine:
            if not mine:
                return
            with Checkpointer(self.folder / layout) as ckpt:
                for step in range(STEPS):
                    job = self.build(layout, dtype, 77)
                    with self.in_any_order(step):
                        ckpt.load(job.state, f"global_step{step}")
                    self.compare(f"{layout} of step {step} on {world}", job, layout, step, dtype)
                    if world == PROCESSES:  # on fewer, sums are rounded in another order
                        job.step(step + 1)
                        self.compare(f"{layout} of step {step}, a step later", job, layout, step + 1, dtype)


def main() -> None:
    plugin.load()
    simulator.spare_freed_memory()
    torch.set_num_threads(1)
    process: Any = Process(Path(sys.argv[1]), int(sys.argv[2]))
    for layout in LAYOUTS:
        dtype = torch.bfloat16 if layout in ("fsdp2", "ddp") else torch.float32
        for action in ("train_in_host_memory", "train_and_save"):
            with process.case(f"{layout}: {action}"):
                getattr(process, action)(layout, dtype)
        for world in (2, 1):
            with process.case(f"{layout}: load on {world}"):
                process.load_all(layout, dtype, world)
    for case in device_cases.CASES:
        with process.case(case.__name__):
            case(process)
    process.finish()
    os._exit(0)  # gloo's threads of groups that are gone need not be waited for


if __name__ == "__main__":
    main()
