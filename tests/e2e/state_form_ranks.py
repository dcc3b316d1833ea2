"""Jobs of 1 to 4 ranks, one after the other: one model's state in every form and layout, with every optimizer.

    state_form_ranks.py FOLDER [every]

`every`: all of the matrix, in place of what is chosen from it. Every rank of a job notes what is wrong in each case, in the
folder of the job (`save-4`): see `rank_cases.py`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what a DTensor imports when it is first used, here once for all ranks
import torch.distributed as dist

from checkpointd.errors import CheckpointdError
from checkpointd_client import Checkpointer
from tests.e2e.forked_ranks import all_well
from tests.e2e.rank_cases import CaseNotes
from tests.e2e.state_form_models import FORMS, LAYOUTS, OPTIMIZERS, Job, build

CHOSEN = {
    # Saved on four ranks; loaded on how many, and into which layout. The first use of an operation of DTensors is slow, so
    # there is one optimizer, the one whose state has shapes of its own.
    ("module", "dp_tp", "factored"): (1, "ddp"),
    ("module", "fsdp2", "factored"): (2, "fsdp2"),
    ("module", "ddp", "factored"): (2, "fsdp2"),
    ("state_dict", "dp_tp", "factored"): (2, "fsdp2"),
    ("get_state_dict", "dp_tp", "factored"): (2, "hsdp"),
    ("flat", "dp_tp", "factored"): (1, "ddp"),
}
Case = tuple[str, str, str]
"""Form, layout, optimizer."""


def saved(world: int, *, every: bool) -> list[Case]:
    """What is saved on so many ranks."""
    if every:
        return list(itertools.product(FORMS, LAYOUTS, OPTIMIZERS)) if world in (2, 4) else []
    return list(CHOSEN) if world == 4 else []


def loaded(world: int, *, every: bool) -> Iterator[tuple[Case, int, str]]:
    """What is loaded on so many ranks: the case, by how many it was saved, and into which layout."""
    for by in (2, 4):
        for case in saved(by, every=every):
            number = FORMS.index(case[0]) + LAYOUTS.index(case[1])
            if every:
                yield case, by, case[1]
                yield case, by, LAYOUTS[(number + world + by) % len(LAYOUTS)]
            elif CHOSEN[case][0] == world:
                yield case, by, CHOSEN[case][1]


class Rank:
    """One process of one job: its saves, or its loads."""

    def __init__(self, folder: Path, number: int, world: int, notes: CaseNotes, *, every: bool) -> None:
        self.folder, self.root, self.number, self.world, self.every = folder, folder / "root", number, world, every
        self.notes = notes

    def wrong(self, what: object) -> None:
        self.notes.wrong.append(str(what))

    def save_all(self) -> None:
        with Checkpointer(self.root, afresh=True) as ckpt:
            for form, layout, optimizer in saved(self.world, every=self.every):
                tag = f"{form}-{layout}-{optimizer}-{self.world}"
                with self.notes.case(f"save {tag}"):
                    self._save(ckpt, tag, form, layout, optimizer)

    def _save(self, ckpt: Checkpointer, tag: str, form: str, layout: str, optimizer: str) -> None:
        job = build(layout, optimizer, self.world)
        for number in range(2):
            job.step(number)
        full = job.full()
        if self.number == 0:
            torch.save(full, self.folder / f"{tag}.pt")
        try:
            ckpt.save(2, job.state(form), tag=tag).wait()
        except CheckpointdError as error:
            self.wrong(repr(error))

    def load_all(self) -> None:
        references: dict[tuple[str, str], Job] = {}
        with Checkpointer(self.root) as ckpt:
            for (form, layout, optimizer), by, target in loaded(self.world, every=self.every):
                if (target, optimizer) not in references:
                    references[target, optimizer] = build(target, optimizer, 78)
                    references[target, optimizer].step(9)
                tag = f"{form}-{layout}-{optimizer}-{by}"
                with self.notes.case(f"{tag} into {target} on {self.world}"):
                    self._load(ckpt, tag, form, target, optimizer, references[target, optimizer])

    def _load(self, ckpt: Checkpointer, tag: str, form: str, target: str, optimizer: str, reference: Job) -> None:
        job = build(target, optimizer, 77)
        if form == "flat":  # what is not there yet is in none of its names
            job.step(8)
        full = torch.load(self.folder / f"{tag}.pt", weights_only=True)
        try:
            done: Any = ckpt.load(job.state(form), tag)
        except CheckpointdError as error:
            self.wrong(repr(error))
            return
        if done.per_rank_left or done.step != 2:
            self.wrong(done)
        self._compare("as loaded", job.full(), full)
        reference.fill(full)
        for either in (job, reference):
            either.step(5)
        self._compare("a step later", job.full(), reference.full(), exact=False)

    def _compare(self, name: str, ours: dict[str, Any], theirs: dict[str, Any], *, exact: bool = True) -> None:
        if ours.keys() != theirs.keys():
            self.wrong(f"{name}: {sorted(ours.keys() ^ theirs.keys())}")
            return
        # Sums of other parts are rounded otherwise.
        alike = torch.equal if exact else lambda a, b: torch.allclose(a, b, rtol=1e-4, atol=1e-6)
        different = [key for key in theirs if not alike(ours[key], theirs[key])]
        if different:
            self.wrong(f"{name}: {different} differ")


def job_of(kind: str, world: int, *, every: bool) -> Callable[[Path, int], None]:
    """What each process of a job does, from its process group on: torch keeps what it knows of meshes, so that a process must
    not be a rank of two jobs.
    """

    def run(folder: Path, number: int) -> None:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / f"rendezvous-{kind}-{world}"), world)
        dist.init_process_group("gloo", store=store, rank=number, world_size=world, timeout=timedelta(seconds=600))
        notes = CaseNotes(folder / f"{kind}-{world}", number)
        rank = Rank(folder, number, world, notes, every=every)
        rank.save_all() if kind == "save" else rank.load_all()
        notes.finish()

    return run


def main() -> None:
    folder, every = Path(sys.argv[1]), "every" in sys.argv
    jobs = [("save", world) for world in (2, 4) if saved(world, every=every)]
    jobs += [("load", world) for world in (1, 2, 3, 4) if list(loaded(world, every=every))]
    for kind, world in jobs:
        (folder / f"{kind}-{world}").mkdir()
    sys.exit(not all(all_well(folder, world, job_of(kind, world, every=every)) for kind, world in jobs))


if __name__ == "__main__":
    main()
