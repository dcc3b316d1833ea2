"""What saves and loads cost on an accelerator: the call, staging beside a pinned copy, the stall of a step, training, loads.

    python benchmarks/gpu.py --mib 4096 --json gpu.json

A model of linear layers is trained by AdamW. Times are taken with events of the device where torch can time them, otherwise
with the host's clock. Each run measures everything once, and a ratio compares figures of one run. The loop with saves and the
loop without take turns at being first.

With `--simulated`, it runs on the simulated device of the tests, and also counts launches and bytes. Times mean nothing on
that device.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import document, report
from checkpointd_client import Checkpointer
from checkpointd_client.selftest import facts, rates
from checkpointd_client.selftest.clock import Clock
from checkpointd_client.selftest.lateness import Work

MIB = 1 << 20
ADAM = 3
"""Tensors that AdamW's state has for each parameter, with the parameter itself."""
WARM_STEPS = 3
WORK_BYTES = 128 * MIB


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What the simulated device counted for one save. `call_launches`: those that the training thread queued in the call."""

    call_launches: int
    launches: int
    read_bytes: int
    copies: int
    copied_bytes: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run. Rates in bytes per second, times in seconds; steps with saves and without have the same number."""

    state_bytes: int
    tensors: int
    arena_copy_bps: float
    pinned_copy_bps: float
    call_s: float
    staging_s: float
    stall_s: float
    load_s: float
    steps: int
    saves: int
    undisturbed_s: float
    with_saves_s: float
    counted: Counted | None

    @property
    def staging_bps(self) -> float:
        """Bytes of the state over the time until a step may begin."""
        return self.state_bytes / self.staging_s

    @property
    def lost_s(self) -> float:
        """Training time that one save costs."""
        return (self.with_saves_s - self.undisturbed_s) / self.saves


class Training:
    """`layers` linear layers, trained by AdamW, whose whole state has about `nbytes`."""

    def __init__(self, nbytes: int, layers: int, batch: int, device: torch.device) -> None:
        width = max(int((nbytes / (4 * ADAM * layers)) ** 0.5) // 8 * 8, 8)
        made = [torch.nn.Linear(width, width, bias=False, device=device) for _ in range(layers)]
        self.net = torch.nn.Sequential(*made)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-6)
        self._data = torch.randn(batch, width, device=device)
        for _ in range(WARM_STEPS):  # the first one makes the moments
            self.step()

    @property
    def state(self) -> dict[str, Any]:
        """For save() and load()."""
        return {"net": self.net, "optimizer": self.optimizer}

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the state on the device. AdamW keeps its steps in host memory."""
        moments = [tensor for entry in self.optimizer.state.values() for name, tensor in entry.items() if name != "step"]
        return [*self.net.parameters(), *moments]

    def step(self) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        self.net(self._data).square().mean().backward()
        self.optimizer.step()


def measure(options: argparse.Namespace, clock: Clock, work: Work, root: Path, run: int) -> Run:
    """One run, in a new root."""
    training = Training(int(options.mib * MIB), options.layers, options.batch, clock.device)
    nbytes = sum(tensor.nbytes for tensor in training.tensors())
    copy = rates.copy_rates(clock, nbytes // ADAM, 1)
    with Checkpointer(root, compression="none", retention=2, read_back=False, on_no_progress="ignore") as checkpointer:
        saving = rates.Saving(checkpointer, training.state, clock, work)
        cost = saving.median(1)

        def undisturbed() -> float:
            return timed(clock, lambda: [training.step() for _ in range(options.steps)])

        def with_saves() -> float:
            def steps() -> None:
                for step in range(options.steps):
                    training.step()
                    if step % options.every == 0:
                        saving.save()

            seconds = timed(clock, steps)
            checkpointer.wait()
            return seconds

        times = {loop: loop() for loop in ((undisturbed, with_saves) if run % 2 == 0 else (with_saves, undisturbed))}
        counted = counted_save(checkpointer, saving) if options.simulated else None
        load_s = rates.load_s(checkpointer, training.state, clock.device)
    return Run(
        state_bytes=nbytes,
        tensors=len(training.tensors()),
        arena_copy_bps=copy.arena_bps,
        pinned_copy_bps=copy.pinned_bps,
        call_s=cost.call_s,
        staging_s=cost.staging_s,
        stall_s=cost.stall_s,
        load_s=load_s,
        steps=options.steps,
        saves=-(-options.steps // options.every),
        undisturbed_s=times[undisturbed],
        with_saves_s=times[with_saves],
        counted=counted,
    )


def timed(clock: Clock, work: Callable[[], object]) -> float:
    """The time that `work` takes on the device."""
    torch.accelerator.synchronize(clock.device)
    first = clock.mark()
    work()
    return clock.seconds(first, clock.mark())


def counted_save(checkpointer: Checkpointer, saving: rates.Saving) -> Counted:
    """One more save on the simulated device, with nothing beside it."""
    from tests.accelerator.simulated import simulator

    before = simulator.counts()
    saving.save()
    called = simulator.counts().since(before)
    checkpointer.wait()
    done = simulator.counts().since(before)
    return Counted(
        call_launches=called.launched_here,
        launches=done.launches,
        read_bytes=done.read_bytes,
        copies=done.copies_down,
        copied_bytes=done.bytes_down,
    )


# --- the answer -------------------------------------------------------------------------------------------------------

ROWS: tuple[tuple[str, Callable[[Run], float]], ...] = (
    ("copy into memory pinned as the arena is, GiB/s", lambda run: run.arena_copy_bps / report.GIB),
    ("copy into memory pinned by torch, GiB/s", lambda run: run.pinned_copy_bps / report.GIB),
    ("staging, GiB/s", lambda run: run.staging_bps / report.GIB),
    ("staging / pinned copy", lambda run: run.staging_bps / run.arena_copy_bps),
    ("call of save(), ms", lambda run: run.call_s * 1e3),
    ("wait of a step right after save(), ms", lambda run: run.staging_s * 1e3),
    ("wait of a step after work that is longer than the copy, ms", lambda run: run.stall_s * 1e3),
    ("step without saves, ms", lambda run: run.undisturbed_s / run.steps * 1e3),
    ("steps with saves / without", lambda run: run.with_saves_s / run.undisturbed_s),
    ("lost to one save, ms", lambda run: run.lost_s * 1e3),
    ("load, GiB/s", lambda run: run.state_bytes / run.load_s / report.GIB),
)
COUNTS: tuple[tuple[str, Callable[[Counted], float]], ...] = (
    ("launches of the training thread in the call", lambda counted: counted.call_launches),
    ("launches in all", lambda counted: counted.launches),
    ("copies to the host", lambda counted: counted.copies),
    ("MiB copied to the host", lambda counted: counted.copied_bytes / MIB),
    ("MiB read by kernels", lambda counted: counted.read_bytes / MIB),
)


def page(runs: list[Run], told: dict[str, str]) -> str:
    """The tables: the median of the runs, and in brackets the smallest and the largest."""
    lines = [f"{name}: {value}" for name, value in told.items()]
    lines += [f"state: {runs[0].state_bytes / MIB:.0f} MiB in {runs[0].tensors} tensors; {len(runs)} run(s)", ""]
    lines.append(report.table(["figure", "median (range)"], [[name, str(report.spread(map(of, runs)))] for name, of in ROWS]))
    counted = [run.counted for run in runs if run.counted is not None]
    if counted:
        rows = [[name, str(report.spread(map(of, counted)))] for name, of in COUNTS]
        lines += ["", "Times of the simulated device mean nothing. Counts of one save:", ""]
        lines.append(report.table(["count", "median (range)"], rows))
    return "\n".join(lines) + "\n"


def arguments(given: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=1024, help="size of the state: parameters and two moments (default: 1024)")
    parser.add_argument("--layers", type=int, default=48, help="layers, which are three tensors each (default: 48)")
    parser.add_argument("--batch", type=int, default=4096, help="rows of a batch; more make a step longer (default: 4096)")
    parser.add_argument("--steps", type=int, default=200, help="steps with saves, and as many without (default: 200)")
    parser.add_argument("--every", type=int, default=50, help="steps from one save to the next (default: 50)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints are written meanwhile")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also keep all measurements in this file")
    parser.add_argument("--simulated", action="store_true", help="on the simulated device of the tests; needs a C++ compiler")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Measure and print."""
    options = arguments(given)
    if options.simulated:
        from tests.accelerator.simulated import plugin

        plugin.load()
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        sys.stderr.write(f"there is no accelerator: torch {torch.__version__} sees none (--simulated runs without one)\n")
        return 2
    device = torch.device(found.type, 0)
    torch.accelerator.set_device_index(device)
    clock = Clock(device)
    work = Work(clock, WORK_BYTES)
    runs = []
    for run in range(options.runs):
        root = Path(tempfile.mkdtemp(prefix="checkpointd-gpu-", dir=options.dir))
        try:
            runs.append(measure(options, clock, work, root, run))
        finally:
            shutil.rmtree(root)
    machine = document.machine(options.dir)
    told = {fact.name: fact.value for fact in facts.facts(device, clock.name)}
    told |= {name: machine[name] for name in ("cores", "memory", "file system", "date")}
    sys.stdout.write(page(runs, told))
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": told, "runs": [asdict(run) for run in runs]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
