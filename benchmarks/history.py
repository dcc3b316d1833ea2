"""Cost against the number of checkpoints at a root: list, choose, start, remove, status, monitor, gc.

    python benchmarks/history.py                 # 100, 316 and 1,000 tags of one rank; 5 tags of 100 ranks
    python benchmarks/history.py --full --write  # up to 10,000 tags, 50 tags of 1,000 ranks; the page and its picture
    python benchmarks/history.py --strace 100    # only the system calls of each operation, as strace counts them

The roots are written by the pipelines that jobs use (`roots.py`), each checkpoint a few tensors of a few bytes. Each operation
runs the code of the command or of the job, on the real file system through a disk that counts calls.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Behind the installed packages: what is measured is what is installed. In .venv that is the tree.
    sys.path[0:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[1]))

import uvloop

from benchmarks import costs, curves, document, roots
from benchmarks.costs import Cost, Meter, Reading, Work
from benchmarks.roots import Saver
from checkpointd.admin.gc import collection
from checkpointd.commit.retention import Retention
from checkpointd.daemon.roots.root_scan import RootScanner
from checkpointd.layout.keys import default_tag
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.candidates import candidates
from checkpointd.pipeline.root.leases import Beginner
from checkpointd.report.listing import listing
from checkpointd.report.status import standing
from checkpointd.store.base import Store
from checkpointd_client.ranks import startup

HERE = Path(__file__).resolve().parent
TAGS, TAGS_FULL, TAGS_QUICK = (100, 316, 1000), (100, 1000, 10_000), (30, 100, 300)
WIDE, WIDE_FULL, WIDE_QUICK = (5, 100), (50, 1000), (3, 20)
"""Tags and ranks of the root whose checkpoints have many ranks."""
BUDGET_S = 20.0
"""An operation is repeated `--runs` times, or for this many seconds."""


@dataclass(frozen=True)
class Root:
    """A root with `tags` checkpoints of `ranks` ranks."""

    path: Path
    tags: int
    ranks: int = 1


# --- the operations ------------------------------------------------------------------------------------------


async def lists(_root: Root, store: Store, meter: Meter) -> None:
    """`checkpointd list`."""
    with meter:
        await listing(store)


async def chooses(_root: Root, store: Store, meter: Meter) -> None:
    """A `load()` that names no tag chooses a checkpoint."""
    with meter:
        found = candidates(await root_view.state_of(store))
    assert found


async def job_starts(root: Root, store: Store, meter: Meter) -> None:
    """A job starts: it takes the start and decides what is undecided."""
    with meter:
        started = await startup.begin(store, Beginner(world_size=root.ranks, job="benchmark"))
    await started.lease.release()


async def stands(_root: Root, store: Store, meter: Meter) -> None:
    """`checkpointd status`."""
    with meter:
        await standing(store)


async def looks_first(_root: Root, store: Store, meter: Meter) -> None:
    """The sidecar's root monitor looks for the first time."""
    with meter:
        await RootScanner().look(store)


async def looks_again(_root: Root, store: Store, meter: Meter) -> None:
    """It looks once more."""
    scanner = RootScanner()
    await scanner.look(store)
    with meter:
        await scanner.look(store)


async def collects(_root: Root, store: Store, meter: Meter) -> None:
    """`checkpointd gc --dry-run`."""
    with meter:
        await collection(store, Retention(), dry_run=True)


async def removes(root: Root, store: Store, meter: Meter) -> None:
    """Retention removes one checkpoint: a save that removes the oldest one, less a save that removes nothing.

    It counts until the checkpoint is gone, whether the save waits for that or not.
    """
    known = await root_view.checkpoints(store)
    newest, oldest = known[0].commit.step, known[-1].commit.step
    start = (await starts.take(store, root.ranks)).start
    plain = Saver(store=store, start=start, world_size=root.ranks).as_job(store)
    removing = replace(plain, retention=Retention(keep_last=len(known)))
    state = removing.writer()
    async with roots.counted(root.path, durable=False) as (quick, _):
        for number in range(newest + 1, newest + 5):
            await replace(plain, store=quick).votes(number, float(number))
    known_plans = plain.writer()
    await plain.coordinate(known_plans, newest + 1, 0.0)
    with meter:
        await plain.coordinate(known_plans, newest + 2, 0.0)
    less = meter.reading
    await proved(store, newest + 2)
    await removing.coordinate(state, newest + 3, 0.0)  # removes three: there are as many as before
    await state.tidier.rest()
    await roots.removed(root.path, default_tag(oldest + 2))
    await proved(store, newest + 3)
    with meter:
        await removing.coordinate(state, newest + 4, 0.0)
        await state.tidier.rest()
        await roots.removed(root.path, default_tag(oldest + 3))
    meter.reading = meter.reading.less(less)


async def proved(store: Store, step: int) -> None:
    """Read a checkpoint back: retention removes none before a newer one was."""
    await read_back(store, await root_view.find(store, default_tag(step)))


Operation = Callable[[Root, Store, Meter], Coroutine[Any, Any, None]]
OPERATIONS: dict[str, Operation] = {
    "list": lists,
    "choose at load": chooses,
    "start": job_starts,
    "one removal": removes,
    "status": stands,
    "monitor, first look": looks_first,
    "monitor, later look": looks_again,
    "gc --dry-run": collects,
}
COMMAND = "list, command"
ON_WIDE = ("list", "one removal")
"""Operations that are measured at the root of many ranks, too."""


async def reading(operation: Operation, root: Root) -> Reading:
    """One run of an operation, by a process that does not know the root yet."""
    async with roots.counted(root.path) as (store, work):
        meter = Meter(work)
        await operation(root, store, meter)
        return meter.reading


def command(root: Root) -> Reading:
    """One run of the command `checkpointd list`, with the start of Python."""
    called = [sys.executable, "-m", "checkpointd", "list", str(root.path)]
    before = os.times()
    with Meter(Work()) as meter:
        subprocess.run(called, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return replace(meter.reading, cpu_s=spent)


def measured(root: Root, wanted: tuple[str, ...], runs: int) -> list[Cost]:
    """The cost of the operations `wanted` at `root`."""
    found = [
        costs.gathered(name, root.tags, lambda n=name: uvloop.run(reading(OPERATIONS[n], root)), runs, BUDGET_S)  # type: ignore[misc]
        for name in wanted
    ]
    if root.ranks == 1:
        found.append(costs.gathered(COMMAND, root.tags, lambda: command(root), runs, BUDGET_S))
    return found


# --- the whole run -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class History:
    """Everything that one run measured: roots of one rank by tags, and one root of `wide_ranks` ranks."""

    tags: list[Cost]
    wide_ranks: int
    wide: list[Cost]
    saves: int
    pending: int
    """Of `saves` saves back to back, the most attempts that had committed and still waited for retention."""


def measure(directory: Path, tags: tuple[int, ...], wide: tuple[int, int], runs: int) -> History:
    """Build the roots below `directory`, one after the other, and measure each."""
    found: list[Cost] = []
    pending, saves = 0, min(100, tags[0])
    for count in tags:
        with built(directory, count, 1) as root:
            found += said(measured(root, tuple(OPERATIONS), runs), "tags")
            if count == tags[-2]:
                pending = uvloop.run(roots.most_pending(root.path, count, saves))
    with built(directory, *wide) as root:
        of_wide = said(measured(root, ON_WIDE, runs), f"tags x {wide[1]:,} ranks")
    return History(tags=found, wide_ranks=wide[1], wide=of_wide, saves=saves, pending=pending)


@contextmanager
def built(directory: Path, tags: int, ranks: int) -> Iterator[Root]:
    """A root in a folder of its own, which goes at the end."""
    with tempfile.TemporaryDirectory(prefix="checkpointd-history-", dir=directory) as folder:
        root = Root(Path(folder) / "root", tags, ranks)
        uvloop.run(roots.history(root.path, tags, ranks))
        os.sync()
        yield root


def said(found: list[Cost], size: str) -> list[Cost]:
    """`found`, after it was printed."""
    print(costs.table(found, size), flush=True)
    return found


def picture(found: History) -> str:
    """The drawing of all operations against the number of tags."""
    seconds = {name: costs.points(found.tags, name, "seconds") for name in costs.names(found.tags)}
    return curves.drawing("seconds of one operation", "checkpoints at the root", seconds)


def page(found: History, called: str) -> str:
    """The measurement as a page."""
    facts = ", ".join(f"{name} {value}" for name, value in document.machine(HERE).items())
    return f"""# Cost against the length of the history

This page shows what operations on a root cost, by the number of checkpoints there. `{called}` writes it; do
not edit it by hand.

Machine: {facts}.

Every checkpoint has one rank and a few tensors of a few bytes, and the real pipelines have written it. Times are medians. A
process that does not know the root yet runs each operation, on the real file system through a disk that counts calls. *stats*
counts the names of listings, too.

![seconds against checkpoints](history.svg)

The exponents that fit: 0 if the cost does not grow with the history, 1 if it grows in proportion.

{costs.exponents(found.tags)}

{costs.table(found.tags, "tags")}

The same for a root whose checkpoints have {found.wide_ranks:,} ranks each:

{costs.table(found.wide, "tags")}

*one removal*: a save whose retention removes the oldest checkpoint, less a save that removes nothing, until the checkpoint is
gone. *list, command*: the whole command, with the start of Python.

Of {found.saves} saves back to back, at most {found.pending} had committed and still waited for retention.
"""


# --- cross-check ---------------------------------------------------------------------------------------------

CALLS = "fsync,fdatasync,sync_file_range,stat,lstat,fstat,newfstatat,statx,getdents64,open,openat,openat2,read,pread64"


def traced(root: Root, name: str) -> dict[str, int]:
    """The system calls of one operation in a process of its own, and those of Python's start, by `strace -c -f`."""
    with tempfile.NamedTemporaryFile(dir=root.path.parent) as out:
        called = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--once",
            name,
            str(root.path),
            str(root.tags),
            str(root.ranks),
        ]
        strace = ["strace", "-c", "-f", "-qq", "-e", f"trace={CALLS}", "-o", out.name]
        subprocess.run([*strace, *called], check=True, stdout=subprocess.DEVNULL)
        return counts_of(Path(out.name).read_text())


def counts_of(printed: str) -> dict[str, int]:
    """The number of each system call in the summary of strace."""
    rows = re.findall(r"^\s*[\d.]+\s+[\d.]+\s+\d+\s+(\d+)\s+(?:\d+\s+)?(\w+)$", printed, re.MULTILINE)
    return {name: int(count) for count, name in rows if name != "total"}


def cross_check(directory: Path, tags: int) -> None:
    """Print the system calls of every operation, without those of a process that only starts."""
    with built(directory, tags, 1) as root:
        for name, operation in OPERATIONS.items():
            idle = traced(root, "")
            extra = {call: count - idle.get(call, 0) for call, count in traced(root, name).items()}
            work = uvloop.run(reading(operation, root)).work
            shown = ", ".join(f"{call} {count}" for call, count in sorted(extra.items()) if count)
            print(f"{name}: counted {work}\n  strace: {shown}", flush=True)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="up to 10,000 tags, and 50 tags of 1,000 ranks")
    parser.add_argument("--quick", action="store_true", help="up to 300 tags, once each")
    parser.add_argument("--runs", type=int, default=7, help="runs of an operation, unless they take too long (default: 7)")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where the roots go: a real disk")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the measurements there")
    parser.add_argument("--write", action="store_true", help="write HISTORY.md and history.svg")
    parser.add_argument("--strace", type=int, metavar="TAGS", help="only this cross-check, with strace")
    parser.add_argument("--once", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main() -> int:
    """Measure, print, and write what was asked for."""
    options = arguments()
    if options.once:
        name, path, tags, ranks = options.once
        if name:
            uvloop.run(reading(OPERATIONS[name], Root(Path(path), int(tags), int(ranks))))
        return 0
    if options.strace:
        cross_check(options.dir, options.strace)
        return 0
    tags, wide = (TAGS_QUICK, WIDE_QUICK) if options.quick else (TAGS_FULL, WIDE_FULL) if options.full else (TAGS, WIDE)
    found = measure(options.dir, tags, wide, 1 if options.quick else options.runs)
    if options.json:
        options.json.write_text(json.dumps(asdict(found), indent=1) + "\n")
    print(costs.exponents(found.tags))
    if options.write:
        (HERE / "HISTORY.md").write_text(page(found, f"python benchmarks/history.py {' '.join(sys.argv[1:])}"))
        (HERE / "history.svg").write_text(picture(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
