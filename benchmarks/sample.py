"""What the sample costs that proves a snapshot to be of one moment, as a part of copying the same bytes.

    python benchmarks/sample.py --write

It is taken from the sources inside save(), and compared with the slot on the stager's thread. Before each thing that is timed
128 MiB are written elsewhere, so that nothing is left in the caches; before the sample is taken the state is captured, as in
save(). Processor time of one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import document, report
from checkpointd_client.capture.dtypes import copy_bits
from checkpointd_client.capture.state import capture
from checkpointd_client.staging.arena import Slot
from checkpointd_client.staging.places import Remembered, sampled
from checkpointd_client.staging.slot_layout import plan_slot
from checkpointd_client.staging.torn_check import Sample

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
STATES = {
    "700 tensors, 1 GiB": (700, GIB // 700),
    "8 tensors, 1 GiB": (8, GIB // 8),
    "10,000 tensors of 64 KiB": (10_000, 64 << 10),
    "10,000 tensors of 4 KiB": (10_000, 4 << 10),
    "10,000 tensors of 256 bytes": (10_000, 256),
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one run. `memcpy_s`: the bytes in one piece; `copy_s`: tensor by tensor, as a snapshot copies them."""

    memcpy_s: float
    copy_s: float
    planned_s: float
    taken_s: float
    compared_s: float


def measure(count: int, nbytes: int, runs: int) -> list[Cost]:
    """The cost for `count` tensors of `nbytes` each."""
    tensors = [torch.randint(-100, 100, (nbytes // 4,), dtype=torch.int32) for _ in range(count)]
    state = {"tensors": tensors}
    captured = capture(state, None, exclude_frozen_parameters=False)
    layout = plan_slot(captured)
    slot = Slot(layout.nbytes)
    slot.populate(layout.nbytes)
    targets = slot.views(layout.parts)
    offsets = [offset for offset, *_ in layout.parts]
    piece, other = torch.zeros(count * nbytes, dtype=torch.uint8), torch.zeros(128 << 20, dtype=torch.uint8)

    def copied() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            copy_bits(target, tensor)

    def run() -> Cost:
        def cold(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
            other.add_(1)
            before()
            began = time.thread_time()
            work()
            return time.thread_time() - began

        def walk() -> None:
            capture(state, None, exclude_frozen_parameters=False)

        samples: list[Sample] = []
        known, key = Remembered(sampled), (layout, layout)

        def take() -> Sample:
            return Sample.take(known.of(tensors, offsets, key), slot.buffer)

        planned_s = cold(take, walk)
        memcpy_s = cold(lambda: slot.memory[: piece.numel()].copy_(piece))
        taken_s = cold(lambda: samples.append(take()), walk)
        copy_s = cold(copied)
        found: list[int | None] = []
        compared_s = cold(lambda: found.append(samples[0].torn()))
        assert found == [None]
        return Cost(memcpy_s=memcpy_s, copy_s=copy_s, planned_s=planned_s, taken_s=taken_s, compared_s=compared_s)

    return [run() for _ in range(runs)]


def row(name: str, costs: list[Cost]) -> list[str]:
    """One line of the table."""

    def median(pick: Callable[[Cost], float]) -> float:
        return statistics.median(map(pick, costs))

    return [
        name,
        f"{median(lambda c: c.memcpy_s) * 1e3:.2f}",
        f"{median(lambda c: c.copy_s) * 1e3:.2f}",
        f"{median(lambda c: c.planned_s - c.taken_s) * 1e3:.2f}",
        f"{median(lambda c: c.taken_s) * 1e3:.2f}",
        f"{median(lambda c: c.compared_s) * 1e3:.2f}",
        f"{median(lambda c: (c.taken_s + c.compared_s) / c.memcpy_s):.1%}",
        f"{median(lambda c: (c.taken_s + c.compared_s) / c.copy_s):.1%}",
    ]


def page(rows: list[list[str]], runs: int) -> str:
    """The measurement as a page."""
    facts = ", ".join(f"{name} {value}" for name, value in document.machine(HERE).items() if name in ("cores", "torch", "date"))
    head = ["state", "memcpy, ms", "copy, ms", "plan, ms", "take, ms", "compare, ms", "of memcpy", "of copy"]
    return f"""# The sample

This page shows the cost of the sample with which `save()` detects torn snapshots. `python benchmarks/sample.py --write` writes
it; do not edit it by hand.

Machine: {facts}. Medians of {runs} runs, ratios within one run.

`save()` takes a sample of the tensors that are copied beside training: 64 bytes of every 32 KiB, and the whole of tensors of up
to 1 KiB. After the copy, the sample is compared with the slot
([OPERATING](../docs/OPERATING.md#changes-while-a-snapshot-is-taken) says which changes this detects).

{report.table(head, rows)}

Processor time of one thread. *memcpy*: the same bytes in one piece. *copy*: tensor by tensor, as a snapshot copies them.
*plan*: where to look; it is kept as long as the tensors stay where they are. *take*: inside `save()`. *compare*: on the
stager's thread. The last columns are take and compare together. For small tensors, the work for
each tensor costs more than the work for its bytes, both in the copy and in the sample.
"""


def main() -> int:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="write SAMPLE.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = page([row(name, measure(*shape, options.runs)) for name, shape in STATES.items()], options.runs)
    if options.write:
        (HERE / "SAMPLE.md").write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
