"""DeepSpeed's save_checkpoint against checkpointd's, with real engines: the call, until it is durable, training lost, loading.

    python benchmarks/zero.py --write

A trial: two ranks train a model at one ZeRO stage, save it twice at rest, once while they go on training, and load that
last checkpoint with the page cache dropped, after one plain read of its files: some disks read faster the second time, whoever
reads. Every trial is fresh processes; ways and stages are shuffled in each run. After the load the same steps as before must
give the same losses. Stock saving does not make anything durable: its files are synced beside the training, and the column says
when that was done. Needs deepspeed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
sys.path[0] = str(REPOSITORY)

from benchmarks import disk, document, figures, recovery, report  # noqa: E402

WAYS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "checkpointd, DeepSpeed's files": {"layout": "deepspeed"},
    "checkpointd, DeepSpeed's files, sidecar": {"layout": "deepspeed"},
    "checkpointd, own format": {"layout": "checkpointd"},
}
STAGES = (1, 3)
RANKS = 2
WIDTH = 1024
BYTES_PER_PARAMETER = 14
"""bf16 weights; fp32 masters, and AdamW's two."""
LAST = "last"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One way at one stage, once: seconds of the slower rank. `stored` is bytes; `equal`: the losses after the load."""

    way: str
    stage: int
    run: int
    call_s: float
    durable_s: float
    lost_s: float
    load_s: float
    stored: int
    equal: bool


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5, help="state of all ranks together (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--ways", default=";".join(WAYS), help="by semicolons (default: all)")
    parser.add_argument("--stages", default="1,3", help="(default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where checkpoints go: a real disk")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--figures", type=Path, metavar="OUT", help="write what the goals need there")
    parser.add_argument("--write", action="store_true", help="write benchmarks/DEEPSPEED.md")
    parser.add_argument("--rank-of", nargs=3, metavar=("OPTIONS", "STAGE", "FOLDER"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.rank_of:
        from benchmarks import zero_rank

        attached, stage, folder = options.rank_of
        zero_rank.measure(json.loads(attached), int(stage), Path(folder), layers_of(options.gib), WIDTH)
        return 0
    shuffled = random.Random(options.seed)
    found: list[Trial] = []
    cases = [(way, int(stage)) for way in options.ways.split(";") for stage in options.stages.split(",")]
    for run in range(options.runs):
        for way, stage in shuffled.sample(cases, len(cases)):
            found.append(trial(options, way, stage, run))
            print(json.dumps(asdict(found[-1])), flush=True)
    if options.figures:
        figures.write(options.figures, figures_of(found))
    text = page(options, found)
    print(text)
    if options.write:
        (HERE / "DEEPSPEED.md").write_text(text)
    return 0 if all(one.equal for one in found) else 1


def figures_of(found: list[Trial]) -> figures.Figures:
    """The seconds of every load: `deepspeed/<stage>/<way>/load`."""
    named: figures.Figures = {}
    for one in found:
        named.setdefault(f"deepspeed/{one.stage}/{one.way}/load", {})[one.run] = one.load_s
    return named


def layers_of(gib: float) -> int:
    """How many layers make a state of that size."""
    return max(1, round(gib * report.GIB / BYTES_PER_PARAMETER / WIDTH**2))


def trial(options: argparse.Namespace, way: str, stage: int, run: int) -> Trial:
    folder = Path(tempfile.mkdtemp(prefix="checkpointd-zero-", dir=options.dir))
    try:
        with recovery.sidecar(folder, held=False) if way.endswith("sidecar") else nullcontext() as socket:
            attached = WAYS[way]
            if attached is not None and socket is not None:
                attached = {**attached, "sidecar": str(socket), "on_sidecar_loss": "raise"}
            reports = _ranks(options, attached, stage, folder)
        stored = disk.size(folder / "root" / LAST)
    finally:
        shutil.rmtree(folder)
        os.sync()  # the freed blocks are discarded now, and not during the next trial
    worst = {name: max(one[name] for one in reports) for name in ("call_s", "durable_s", "lost_s", "load_s")}
    return Trial(way=way, stage=stage, run=run, stored=stored, equal=all(one["equal"] for one in reports), **worst)


def _ranks(options: argparse.Namespace, attached: dict[str, Any] | None, stage: int, folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__]
    command += ["--gib", str(options.gib), "--rank-of", json.dumps(attached), str(stage), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False)
    files = sorted(folder.glob("rank-*.json"))
    if len(files) != RANKS:
        raise RuntimeError(f"the ranks of {attached} at stage {stage} failed ({done.returncode}):\n{done.stdout[-6000:]}")
    return [json.loads(file.read_text()) for file in files]


def page(options: argparse.Namespace, found: list[Trial]) -> str:
    """The measurement as a page."""
    facts = ", ".join(f"{name} {value}" for name, value in document.machine(options.dir).items())
    head = ["ZeRO, way", "call, s", "durable, s", "lost, s", "load, s", "on disk, MiB", "same losses"]
    rows = []
    for stage, way in sorted({(one.stage, one.way) for one in found}, key=lambda pair: (pair[0], list(WAYS).index(pair[1]))):
        these = [one for one in found if (one.stage, one.way) == (stage, way)]
        times = [report.spread(getattr(one, name) for one in these) for name in ("call_s", "durable_s", "lost_s", "load_s")]
        size = report.spread(one.stored / (1 << 20) for one in these)
        exact = "yes" if all(one.equal for one in these) else "NO"
        rows.append([f"{stage}, {way}", *map(str, times), str(size), exact])
    return f"""# DeepSpeed's save_checkpoint

This page compares DeepSpeed's `save_checkpoint`, stock and with checkpointd.
`python benchmarks/zero.py --gib {options.gib:g} --runs {options.runs} --write` writes it; do not edit it by hand.

Machine: {facts}.

{RANKS} ranks (gloo), a bf16 model with fp32 masters and AdamW, {options.gib:g} GiB of state together, {options.runs} runs, ways
and stages shuffled in each; the slower rank; the median, and in brackets the smallest and the largest. *call*: until
`engine.save_checkpoint()` returns. *durable*: from the call until a power cut loses nothing of the checkpoint. Stock saving
syncs nothing, so the benchmark syncs its files right after the call, beside the training. *lost*: seconds of training
that the save cost, from the call until the first step that ends after it is durable. *load*: `engine.load_checkpoint()` with
the page cache dropped, after one plain read of the files: some disks read faster the second time, whoever reads. *same losses*:
the steps after the load give the same losses as before, bit for bit.

{report.table(head, rows)}
"""


if __name__ == "__main__":
    sys.exit(main())
