"""checkpointd in a bucket beside s3torchconnector's DCP writer, DCP over s3fs, and `obstore` alone as the limit.

    python benchmarks/objects.py --write

One SeaweedFS on loopback, started and killed by this script in a folder below --dir. A trial is one system, once: a process
that saves, and another one that loads. Each trial has a bucket of its own. Systems are shuffled in each run. The page is
OBJECTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    # Not this folder, and the tree only behind the installed packages: what is measured is what is installed.
    sys.path[0:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import environment

if TYPE_CHECKING:
    from benchmarks.objects_page import ObjectTrial
    from benchmarks.seaweed import Seaweed

HERE = Path(__file__).resolve().parent
NAMES = (
    "obstore",
    "checkpointd",
    "checkpointd-sidecar",
    "checkpointd-defaults",
    "s3torchconnector",
    "s3torchconnector-async",
    "s3fs",
)
_GIB = 1 << 30
_SPARE = 1.5
"""The disk that a save may take, by the size of the state."""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--saves", type=int, default=1, help="measured saves of each process (default: %(default)s)")
    parser.add_argument("--systems", default=",".join(NAMES), help="with commas (default: all)")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where the server keeps its files: a real disk")
    parser.add_argument("--seed", type=int, default=1, help="of the order and of the state")
    parser.add_argument("--figures", type=Path, metavar="OUT", help="write what the goals need there")
    parser.add_argument("--write", action="store_true", help="write benchmarks/OBJECTS.md")
    return parser.parse_args(given)


def main() -> int:
    """Run the benchmark; 1 where a system failed or loaded wrong bytes."""
    options = arguments()
    environment.enter()
    from benchmarks import document, figures, goals, objects_page

    systems = options.systems.split(",")
    if unknown := sorted(set(systems) - set(NAMES)):
        raise SystemExit(f"no such system: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    needed, free = (options.saves + 1) * options.gib * _SPARE, shutil.disk_usage(options.dir).free / _GIB
    if free < needed:
        raise SystemExit(f"{options.dir} has {free:.1f} GiB free; this needs {needed:.1f}")
    found = measure(options, systems)
    text = objects_page.page(
        found,
        [name for name in NAMES if name in systems],
        command=shlex.join(["python", "benchmarks/objects.py", *sys.argv[1:]]),
        machine=", ".join(f"{name} {value}" for name, value in document.machine(options.dir).items()),
        gib=options.gib,
    )
    print("\n" + text)
    named = objects_page.figures_of(found)
    print("\n".join(goals.lines(goals.verdicts(named, goals.OBJECT_GOALS))))
    if options.figures:
        figures.write(options.figures, named)
    if options.write:
        (HERE / "OBJECTS.md").write_text(text)
    return 1 if objects_page.flaws(found) else 0


def measure(options: argparse.Namespace, systems: list[str]) -> list[ObjectTrial]:
    """All trials, on one server."""
    from benchmarks import seaweed

    found: list[ObjectTrial] = []
    with tempfile.TemporaryDirectory(prefix="checkpointd-objects-", dir=options.dir, ignore_cleanup_errors=True) as directory:
        folder = Path(directory) / "server"
        folder.mkdir()
        with seaweed.serving(folder) as server:
            os.environ.update(server.environment())
            for run in range(options.runs):
                for system in random.Random(options.seed * 1000 + run).sample(systems, len(systems)):
                    found.append(trial(options, server, Path(directory), system, run))
                    print(json.dumps(_brief(found[-1])), flush=True)
    return found


def _brief(found: ObjectTrial) -> dict[str, object]:
    from benchmarks.objects_page import figures_of

    values = {
        name.partition("/")[2].partition("/")[2]: round(by_run[found.run], 3) for name, by_run in figures_of([found]).items()
    }
    words = {"error": found.error} if found.error else {}
    return {"run": found.run + 1, "system": found.system, **values, "others": round(found.other_cores, 2), **words}


def trial(options: argparse.Namespace, server: Seaweed, directory: Path, system: str, run: int) -> ObjectTrial:
    """One system once; an error becomes the trial's `error`."""
    from benchmarks.launch import others_seconds
    from benchmarks.objects_page import LoadedObjects, ObjectTrial, SavedObjects

    place = Path(tempfile.mkdtemp(prefix=f"{system}-", dir=directory))
    start, others = time.monotonic(), _others(others_seconds(), server)
    error, saved, loaded, peaks = "", [], None, {"save": 0, "load": 0}
    try:
        with server.bucket(f"{system}-{run}") as bucket:
            told, peaks["save"] = _phase(options, server, place, system, bucket, loads=False)
            saved = [SavedObjects(**one) for one in told]
            told, peaks["load"] = _phase(options, server, place, system, bucket, loads=True)
            loaded = LoadedObjects(**told)
    except RuntimeError as failure:
        error = str(failure)
    other_cores = (_others(others_seconds(), server) - others) / (time.monotonic() - start)
    shutil.rmtree(place, ignore_errors=True)
    os.sync()  # what one trial has written is not written back during the next one
    return ObjectTrial(
        system=system,
        run=run,
        nbytes=_nbytes(options.gib),
        saved=saved,
        loaded=loaded,
        save_peak_bytes=peaks["save"],
        load_peak_bytes=peaks["load"],
        other_cores=max(0.0, other_cores),
        error=error,
    )


def _others(seconds: float, server: Seaweed) -> float:
    """`seconds` of the rest of the machine, without the server's."""
    from benchmarks import processes

    return seconds - processes.cpu_seconds([server.pid])


def _nbytes(gib: float) -> int:
    """The bytes of the state that comes closest to `gib`."""
    from benchmarks.state import BYTES_PER_PARAMETER, shape_for

    return shape_for(int(gib * _GIB)).parameters * BYTES_PER_PARAMETER


def _phase(
    options: argparse.Namespace, server: Seaweed, place: Path, system: str, bucket: str, *, loads: bool
) -> tuple[Any, int]:
    """What a fresh process measured, and the most memory that it and its children held meanwhile."""
    from torch._C._distributed_c10d import TCPStore

    from benchmarks.launch import Ranks
    from benchmarks.objects_rank import Job

    phase = "load" if loads else "save"
    job = Job(
        system=system,
        bucket=bucket,
        folder=str(place),
        result=str(place / f"{phase}.json"),
        digests=str(place / "digests.json"),
        loads=loads,
        target_bytes=int(options.gib * _GIB),
        saves=options.saves,
        seed=options.seed,
        metrics_url=server.metrics_url,
        server_pid=server.pid,
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Ranks([job], place, store.port) as running:
        peaks = running.watch(120 + 240 * options.gib * (options.saves + 1))
    return json.loads(Path(job.result).read_text()), peaks.get(phase, 0)


if __name__ == "__main__":
    sys.exit(main())
