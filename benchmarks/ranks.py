"""Cost against the number of ranks: the coordinator's work, the metadata of a load, dedup's look at the checkpoint before.

    python benchmarks/ranks.py                 # 64, 256 and 1,024 ranks: some minutes
    python benchmarks/ranks.py --full --write  # up to 16,384 votes, 800 ranks x 300 tensors; writes RANKS.md and ranks.svg

The ranks are simulated: one process writes what each of them writes, by the pipelines that jobs use (`roots.py`), on a disk
that leaves out fsync. Then the real code of one rank runs, on the real file system through a disk that counts calls.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    # Behind the installed packages: what is measured is what is installed. In .venv that is the tree.
    sys.path[0:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import uvloop

from benchmarks import costs, curves, document, roots
from benchmarks.costs import Cost, Meter, Reading
from benchmarks.roots import Saver
from checkpointd.config import LoadConfig, Ranks
from checkpointd.layout.boxes import Box
from checkpointd.layout.keys import default_tag
from checkpointd.pipeline.root import root_view, starts
from checkpointd.store.posix.store import PosixStore
from checkpointd_client.ranks.writer import WriterThread
from checkpointd_client.restore.bind import Target
from checkpointd_client.restore.store_source import StoredSource
from checkpointd_client.sharding.dtensor import LocalBox, LocalShard

HERE = Path(__file__).resolve().parent
VOTES, VOTES_FULL, VOTES_QUICK = (64, 256, 1024), (64, 256, 1024, 4096, 16_384), (16, 64, 256)
LOADS, LOADS_FULL, LOADS_QUICK = (25, 50, 100), (50, 200, 800), (4, 8, 16)
TENSORS, TENSORS_QUICK = 300, 30
"""Of every rank, in a sharded load."""
DEDUP, DEDUP_FULL, DEDUP_QUICK = (64, 256, 1024), (64, 256, 1024, 4096), (16, 64, 256)
FIRST, KNOWN, METADATA, LOAD, LOOK = "first commit", "later commit", "metadata", "whole load", "look at the checkpoint before"
HALF, TWICE = "whole load on half as many ranks", "whole load on twice as many ranks"
BUDGET_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything that one run measured: costs by the number of ranks."""

    coordinator: list[Cost]
    load: list[Cost]
    load_tensors: int
    dedup: list[Cost]


# --- the coordinator -----------------------------------------------------------------------------------------


async def coordinating(path: Path, ranks: int) -> tuple[Reading, Reading]:
    """Rank 0's own save and its commit of `ranks` votes that are there: with plans that it does not know, then known ones."""
    async with roots.counted(path, durable=False) as (quick, _):
        start = (await starts.take(quick, ranks)).start
        voters = Saver(store=quick, start=start, world_size=ranks)
        for number in (0, 1):
            await voters.votes(number, float(number))
    os.sync()
    async with roots.counted(path) as (store, work):
        saver, meter, found = voters.as_job(store), Meter(work), []
        state = saver.writer()
        for number in (0, 1):
            with meter:
                await saver.coordinate(state, number, float(number))
            found.append(meter.reading)
    return found[0], found[1]


def coordinator(directory: Path, ranks: int) -> list[Cost]:
    """The costs of both commits."""
    with tempfile.TemporaryDirectory(prefix="checkpointd-ranks-", dir=directory) as folder:
        found = uvloop.run(coordinating(Path(folder) / "root", ranks))
    return [costs.summed_up(name, ranks, [one]) for name, one in zip((FIRST, KNOWN), found, strict=True)]


# --- a sharded load ------------------------------------------------------------------------------------------


async def saved(path: Path, ranks: int, tensors: int) -> Saver:
    """A root with one checkpoint of that many ranks and tensors."""
    async with roots.counted(path, durable=False) as (store, _):
        saver = Saver(store=store, start=(await starts.take(store, ranks)).start, world_size=ranks, tensors=tensors)
        await saver.save(saver.writer(), 1)
    return saver


def loads(directory: Path, ranks: int, tensors: int, runs: int) -> list[Cost]:
    """What one rank reads to load its part: before the tensors' bytes, and with them (a few KiB); on as many ranks as saved,
    and on half and twice as many.
    """
    with tempfile.TemporaryDirectory(prefix="checkpointd-ranks-", dir=directory) as folder:
        path = Path(folder) / "root"
        saver = uvloop.run(saved(path, ranks, tensors))
        os.sync()
        cases = ((METADATA, ranks, False), (LOAD, ranks, True), (HALF, ranks // 2, True), (TWICE, 2 * ranks, True))
        return [
            costs.gathered(name, ranks, lambda m=many, w=whole: loading(path, saver, m, whole=w), runs, BUDGET_S)  # type: ignore[misc]
            for name, many, whole in cases
        ]


def loading(path: Path, saver: Saver, ranks: int, *, whole: bool) -> Reading:
    """One load of the middle one of `ranks` ranks by a process that knows nothing of the checkpoint; with `whole`, up to the
    filled tensors.
    """
    writer = WriterThread(2)
    try:
        disk = roots.CountingDisk(str(path))
        store = PosixStore(path, disk)
        checkpoint = writer.call(root_view.find(store, default_tag(1)), 60.0)
        before = resident(reset=True)
        with Meter(disk.work) as meter:
            source = StoredSource(store, writer, LoadConfig(), 600.0, Ranks(rank=ranks // 2, world_size=ranks), checkpoint)
            content = source.content()
            if whole:
                source.fill(targets(saver, ranks), content)
        peak = resident(peak=True) - before
        writer.call(disk.close(), 60.0)
    finally:
        writer.close()
    return replace(meter.reading, peak_bytes=max(0, peak))


def targets(saver: Saver, ranks: int) -> list[Target]:
    """The tensors that the middle one of `ranks` ranks fills: its rows, as FSDP2 holds them, or its part of a row."""
    rows, parts, rank = max(1, saver.world_size // ranks), max(1, ranks // saver.world_size), ranks // 2
    width = saver.row // parts
    box = Box((rank // parts * rows, rank % parts * width), (rows, width))
    held = LocalShard((saver.world_size, saver.row), (LocalBox((saver.world_size, saver.row), box, (0, 0)),))
    return [Target(f"model.{name}", torch.zeros(rows, width), held) for name in saver.names]


def resident(*, reset: bool = False, peak: bool = False) -> int:
    """Bytes of memory of this process; with `peak`, the most since the last `reset`."""
    if reset:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    wanted = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted))


# --- dedup ---------------------------------------------------------------------------------------------------


async def looking(path: Path, plain: Saver, rank: int, number: int) -> Reading:
    """A save of `rank` whose values have not changed, after a restart, less the same without dedup."""
    async with roots.counted(path) as (store, work):
        meter = Meter(work)
        with meter:
            await replace(plain, store=store).vote(number, rank, 1.0)
        less = meter.reading
        with meter:
            await replace(plain, store=store, dedup=True).vote(number + 1, rank, 1.0)
        return meter.reading.less(less)


def dedup(directory: Path, ranks: int, runs: int) -> Cost:
    """What one rank's look at the checkpoint before costs."""
    with tempfile.TemporaryDirectory(prefix="checkpointd-ranks-", dir=directory) as folder:
        path, numbers = Path(folder) / "root", iter(range(2, 1 << 20, 2))
        saver = uvloop.run(saved(path, ranks, 4))
        os.sync()
        return costs.gathered(LOOK, ranks, lambda: uvloop.run(looking(path, saver, ranks // 2, next(numbers))), runs, BUDGET_S)


# --- the whole run -------------------------------------------------------------------------------------------


def measure(
    directory: Path, votes: tuple[int, ...], load: tuple[int, ...], tensors: int, looks: tuple[int, ...], runs: int
) -> Measured:
    """All three, each at its numbers of ranks."""
    coordinated = [cost for ranks in votes for cost in said(coordinator(directory, ranks))]
    loaded = [cost for ranks in load for cost in said(loads(directory, ranks, tensors, runs))]
    looked = [cost for ranks in looks for cost in said([dedup(directory, ranks, runs)])]
    return Measured(coordinator=coordinated, load=loaded, load_tensors=tensors, dedup=looked)


def said(found: list[Cost]) -> list[Cost]:
    """`found`, after it was printed."""
    print(costs.table(found, "ranks"), flush=True)
    return found


def picture(found: Measured) -> str:
    """The drawing: processor seconds of one rank."""
    curve = {f"coordinator, {name}": costs.points(found.coordinator, name, "cpu_s") for name in (FIRST, KNOWN)}
    curve[f"load of {found.load_tensors} tensors"] = costs.points(found.load, LOAD, "cpu_s")
    curve["dedup's look"] = costs.points(found.dedup, LOOK, "cpu_s")
    return curves.drawing("processor seconds of one rank", "ranks", curve)


def page(found: Measured, called: str) -> str:
    """The measurement as a page."""
    facts = ", ".join(f"{name} {value}" for name, value in document.machine(HERE).items())
    return f"""# Cost against the number of ranks

This page shows what a save and a load cost one rank, by the number of ranks. `{called}` writes it; do not edit it by hand.

Machine: {facts}.

The ranks are simulated: one process writes what each of them writes, by the real pipelines. Then the code of one rank runs
on the real file system, through a disk that counts calls. *stats* counts the names of listings, too.

![processor seconds against ranks](ranks.svg)

The exponents that fit: 0 if the cost does not depend on the number of ranks, 1 if it grows in proportion.

{costs.exponents([*found.coordinator, *found.load, *found.dedup])}

## The coordinator

Rank 0 saves its own small shard and commits, when the votes of all other ranks are there. *{FIRST}*: it does not know the
ranks' plans yet. *{KNOWN}*: they are those of the save before.

{costs.table(found.coordinator, "ranks")}

## A sharded load

One rank loads its rows of {found.load_tensors} tensors that all ranks hold together, each a few bytes. *{METADATA}*: until it
knows what is stored. *{LOAD}*: until its tensors are filled. Each rank has a seed of its own beside the tensors.

{costs.table(found.load, "ranks")}

## Dedup

One rank has been started again and saves values that have not changed, less the same save without dedup.

{costs.table(found.dedup, "ranks")}
"""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="up to 16,384 votes; loads of up to 800 ranks")
    parser.add_argument("--quick", action="store_true", help="up to 256 votes, and 16 ranks that load 30 tensors, once each")
    parser.add_argument("--runs", type=int, default=7, help="runs of loads and looks, unless they take too long (default: 7)")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where the roots go: a real disk")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the measurements there")
    parser.add_argument("--write", action="store_true", help="write RANKS.md and ranks.svg")
    return parser.parse_args(given)


def main() -> int:
    """Measure, print, and write what was asked for."""
    options = arguments()
    if options.quick:
        found = measure(options.dir, VOTES_QUICK, LOADS_QUICK, TENSORS_QUICK, DEDUP_QUICK, 1)
    elif options.full:
        found = measure(options.dir, VOTES_FULL, LOADS_FULL, TENSORS, DEDUP_FULL, options.runs)
    else:
        found = measure(options.dir, VOTES, LOADS, TENSORS, DEDUP, options.runs)
    if options.json:
        options.json.write_text(json.dumps(asdict(found), indent=1) + "\n")
    print(costs.exponents([*found.coordinator, *found.load, *found.dedup]))
    if options.write:
        (HERE / "RANKS.md").write_text(page(found, f"python benchmarks/ranks.py {' '.join(sys.argv[1:])}"))
        (HERE / "ranks.svg").write_text(picture(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
