"""How long a killed trainer takes to its first resumed step: from the sidecar's memory, and from the store.

    python benchmarks/recovery.py --write

A trial: a trainer with a sidecar saves, waits for the commit, and is killed with SIGKILL; the same script is started again at
once, loads, and makes an optimizer step. Ways: `memory` (the sidecar holds the snapshot), `store, cached` and `store, cache
dropped` (a sidecar that holds nothing). Every trial is fresh processes; ways are shuffled in each run; the state that was
loaded is compared by SHA-256.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import disk, document, report

WAYS = ("memory", "store, cached", "store, cache dropped")
HERE = Path(__file__).resolve().parent
STEP = 1


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """One restart. Seconds: of load() alone, and from the kill to the end of the first step; `source` is what load() said."""

    way: str
    run: int
    source: str
    load_s: float
    memcpy_s: float
    """A copy of as many bytes in the same process, on one thread."""
    first_step_s: float
    equal: bool


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5, help="size of the state (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where checkpoints go: a real disk")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write benchmarks/RECOVERY.md")
    parser.add_argument("--figures", type=Path, metavar="OUT", help="write the figures for the goals there")
    parser.add_argument("--trainer", nargs=2, metavar=("ROOT", "SOCKET"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.trainer:
        train(options)
        return 0
    shuffled = random.Random(options.seed)
    found: list[Recovery] = []
    for run in range(options.runs):
        for way in shuffled.sample(WAYS, len(WAYS)):
            found.append(trial(options, way, run))
            print(json.dumps(asdict(found[-1])), flush=True)
    text = page(options, found)
    print(text)
    if options.write:
        (HERE / "RECOVERY.md").write_text(text)
    if options.figures:
        memory = [one for one in found if one.way == "memory"]
        named = {"load": [one.load_s for one in memory], "memcpy": [one.memcpy_s for one in memory]}
        options.figures.write_text(json.dumps({f"recovery/memory/{name}": values for name, values in named.items()}) + "\n")
    expected = {"memory": "memory", "store, cached": "store", "store, cache dropped": "store"}
    return 0 if all(one.equal and one.source == expected[one.way] for one in found) else 1


def trial(options: argparse.Namespace, way: str, run: int) -> Recovery:
    folder = Path(tempfile.mkdtemp(prefix="checkpointd-recovery-", dir=options.dir))
    try:
        with sidecar(folder, held=way == "memory") as socket:
            saved = _run(options, folder, socket)
            if saved.returncode != -signal.SIGKILL:
                raise RuntimeError(f"the trainer ended with {saved.returncode} instead of being killed")
            before = json.loads(saved.stdout)["digest"]
            killed = time.monotonic()
            if way == "store, cache dropped":
                disk.drop(folder / "root" / f"global_step{STEP}")
                killed = time.monotonic()
            resumed = json.loads(_run(options, folder, socket).stdout)
    finally:
        shutil.rmtree(folder)
    return Recovery(
        way=way,
        run=run,
        source=resumed["source"],
        load_s=resumed["load_s"],
        memcpy_s=resumed["memcpy_s"],
        first_step_s=resumed["stepped_at"] - killed,
        equal=resumed["digest"] == before,
    )


def _run(options: argparse.Namespace, folder: Path, socket: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, __file__, "--gib", str(options.gib), "--trainer", str(folder / "root"), str(socket)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)


@contextmanager
def sidecar(folder: Path, *, held: bool) -> Iterator[Path]:
    """`checkpointd serve`; without `held` it holds no snapshot for a restart."""
    socket = folder / "run" / "socket"
    command = [sys.executable, "-m", "checkpointd", "serve", "--socket", str(socket), "--root", str(folder)]
    command += ["--uid", str(os.geteuid())]  # root has to be named
    options = [] if held else ["--held-mib", "0"]
    with (folder / "sidecar.log").open("w") as log:
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        if not process.stdout.readline().startswith("ready at"):
            raise RuntimeError(f"the sidecar did not start: {(folder / 'sidecar.log').read_text()}")
        yield socket
    finally:
        process.terminate()
        process.communicate()


def train(options: argparse.Namespace) -> None:
    """The trainer: saves and is killed where nothing is there to load, else loads and takes a step."""
    import torch

    from benchmarks.state import State
    from checkpointd_client import Checkpointer

    root, socket = options.trainer
    torch.set_num_threads(1)
    state = State(target_bytes=int(options.gib * report.GIB), ranks=1, rank=0, seed=options.seed)
    objects = {"model": state.model, "master": state.master, "optimizer": state.optimizer}
    ckpt = Checkpointer(root, sidecar=socket, on_sidecar_loss="raise")
    start = time.perf_counter()
    loaded = ckpt.load(objects)
    load_s = time.perf_counter() - start
    if loaded is None:
        state.advance()
        digest = _digest(state.digests())
        ckpt.save(STEP, objects).wait()
        print(json.dumps({"digest": digest}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        return
    began = time.monotonic()
    digest = _digest(state.digests())
    memcpy_s = _memcpy(int(options.gib * report.GIB))
    hashing_s = time.monotonic() - began  # ours, and no part of a recovery
    state.advance()
    told = {
        "source": loaded.source,
        "load_s": load_s,
        "memcpy_s": memcpy_s,
        "stepped_at": time.monotonic() - hashing_s,
        "digest": digest,
    }
    print(json.dumps(told), flush=True)
    ckpt.close()


def _memcpy(nbytes: int) -> float:
    """Seconds of a copy of `nbytes` between memory that was used before."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    np.copyto(target, source)
    start = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start


def _digest(digests: dict[str, str]) -> str:
    return json.dumps(digests, sort_keys=True)


def page(options: argparse.Namespace, found: list[Recovery]) -> str:
    """The measurement as a page."""
    facts = ", ".join(f"{name} {value}" for name, value in document.machine(options.dir).items())
    rows = []
    for way in WAYS:
        ours = [one for one in found if one.way == way]
        exact = "yes" if all(one.equal for one in ours) else "NO"
        memory = {one.run: one.load_s for one in found if one.way == "memory"}
        ratio = report.spread(one.load_s / memory[one.run] for one in ours)
        loads, steps = report.spread(one.load_s for one in ours), report.spread(one.first_step_s for one in ours)
        rows.append([way, str(loads), str(ratio), str(steps), exact])
    head = ["loaded from", "load(), s", "load() / from memory", "kill to first step, s", "bit-exact"]
    return f"""# Recovery

This page shows how long a killed job takes to resume.
`python benchmarks/recovery.py --gib {options.gib:g} --runs {options.runs} --write` writes it; do not edit it by hand.

Machine: {facts}.

One rank, {options.gib:g} GiB of state (`state.py`), {options.runs} runs, ways shuffled in each;
the median, and in brackets the smallest and the largest. *load()* is the call alone: the ranks agree, every
digest is verified, and the tensors are filled. *Kill to first step* also contains the start of Python, the import of torch
and the making of the model, which are the same for every way.

{report.table(head, rows)}
"""


if __name__ == "__main__":
    sys.exit(main())
