"""One of four ranks that load what they hold together, each byte read once: run by test_shared_reads.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checkpointd.errors import CheckpointdError
from checkpointd.pipeline.read.shared_reads import CircleBroken
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import Checkpointer, Loaded
from checkpointd_client.ranks.reading_circle import ReadingCircle
from tests.e2e.rank_cases import FINISHED, CaseNotes, noted_cases
from tests.faults.jobs import wait_until

RANKS = 4
DYING = 3
SOON_S = 15.0
Send = Callable[[ReadingCircle, Any, memoryview, int], None]


class Model(nn.Module):
    """Layers large enough to be read in place, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Ranks:
    """This rank, its model and its checkpointer."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.model = DistributedDataParallel(Model())
        self.asked = 0
        get_range = PosixStore.get_range

        async def counted(store: PosixStore, key: str, offset: int, into: memoryview) -> None:
            self.asked += memoryview(into).nbytes if key.endswith(".chunks") else 0
            await get_range(store, key, offset, into)

        PosixStore.get_range = counted  # type: ignore[method-assign, assignment]

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for number, parameter in enumerate(self.model.parameters()):
                parameter.fill_(value + number / 64)

    def load(self, ckpt: Checkpointer, **options: Any) -> Loaded:
        self.fill(-1.0)
        dist.barrier()
        self.asked = 0
        loaded = ckpt.load({"model": self.model}, share_reads=True, **options)
        assert loaded is not None
        return loaded

    def wrong(self, value: float) -> list[str]:
        """The parameters that are not as `fill` made them."""
        found = enumerate(self.model.named_parameters())
        return [name for number, (name, p) in found if not torch.equal(p, torch.full_like(p, value + number / 64))]

    def of_all(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, value)
        return found


@contextmanager
def sending(send: Send) -> Iterator[None]:
    """Every turn of this rank goes through `send` instead."""
    real = ReadingCircle._pass_on
    ReadingCircle._pass_on = send  # type: ignore[method-assign]
    try:
        yield
    finally:
        ReadingCircle._pass_on = real  # type: ignore[method-assign]


def run(notes: CaseNotes, ranks: Ranks) -> None:
    """All cases."""
    root, real = ranks.folder / "root", ReadingCircle._pass_on
    with Checkpointer(root, compression="none", dedup=False, read_back=False, job="shared") as ckpt:
        for step in (1, 2):
            ranks.fill(float(step))
            ckpt.save(step, {"model": ranks.model}).wait()
        nbytes = sum(p.nbytes for p in ranks.model.parameters())

        with notes.case("each byte is read by one rank"):
            step = ranks.load(ckpt).step
            asked = ranks.of_all(ranks.asked)
            notes.wrong += ranks.wrong(2.0) if step == 2 else [f"step {step}"]
            if not nbytes <= sum(asked) < 1.5 * nbytes or max(asked) > nbytes / 2:
                notes.wrong.append(f"the ranks asked for {asked} of {nbytes} bytes")

        with notes.case("everything is verified first"):
            notes.wrong += [] if ranks.load(ckpt, verify_first=True).step == 2 else ["another step"]
            notes.wrong += ranks.wrong(2.0)

        def falsify(circle: ReadingCircle, group: Any, memory: memoryview, source: int) -> None:
            sent = memoryview(bytearray(memory))
            sent[0] ^= 1
            real(circle, group, sent if source == circle.place else memory, source)

        with notes.case("wrong bytes of a rank are found, and read from the storage"), sending(falsify):
            loaded = ranks.load(ckpt)
            notes.wrong += [*ranks.wrong(2.0), *loaded.fell_back_from]

        turns = 0

        def leave(circle: ReadingCircle, group: Any, memory: memoryview, source: int) -> None:
            nonlocal turns
            turns += 1
            if ranks.rank == 2 and turns == 2:
                raise CircleBroken("as the test wants it")
            real(circle, group, memory, source)

        with notes.case("a rank that leaves breaks nothing"), sending(leave):
            loaded = ranks.load(ckpt)
            notes.wrong += [*ranks.wrong(2.0), *loaded.fell_back_from]

        with notes.case("damage of the storage makes all ranks load the one before"):
            if ranks.rank == 0:
                path = root / "global_step2" / "00000001-0" / "00001-0.chunks"
                data = bytearray(path.read_bytes())
                data[1000] ^= 1
                path.write_bytes(data)
            loaded = ranks.load(ckpt)
            notes.wrong += [
                *ranks.wrong(1.0),
                *([] if loaded.step == 1 and len(loaded.fell_back_from) == 1 else [repr(loaded)]),
            ]

    with Checkpointer(root, commit_timeout_s=SOON_S, read_back=False, job="shared") as ckpt:
        die_in_the_circle(notes, ranks, ckpt, real)


def die_in_the_circle(notes: CaseNotes, ranks: Ranks, ckpt: Checkpointer, real: Send) -> None:
    """The last case: the ranks that are left name the one that died."""

    def die(circle: ReadingCircle, group: Any, memory: memoryview, source: int) -> None:
        if ranks.rank == DYING and source == circle.place:
            notes.finish()
            os._exit(0)
        real(circle, group, memory, source)

    with notes.case("a rank that dies is named"), sending(die):
        try:
            loaded = ranks.load(ckpt, tag="global_step1")
            notes.wrong.append(repr(loaded))
        except CheckpointdError as error:
            if f"rank {DYING} did not answer" not in str(error):
                notes.wrong.append(str(error))
    notes.finish()
    if ranks.rank == 0:  # it is the host of torch's store
        wait_until(lambda: all(noted_cases(ranks.folder, rank)[-1][0] == FINISHED for rank in range(RANKS)), "all have heard")
    os._exit(0)  # the checkpointer's goodbye would wait for the dead rank


def main() -> None:
    folder, rank, port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    run(CaseNotes(folder, rank), Ranks(folder, rank))


if __name__ == "__main__":
    main()
