"""What it costs a coordinator to agree with all ranks on who writes what; and how evenly they write.

    python benchmarks/planning.py --write

Ranks are simulated, their plans are real: FSDP2 over tensor parallelism, 2,000 tensors of a transformer. One process does what
each rank does (its boxes and its plan, encoded), puts all plans into a store in memory, and does what the coordinator does: it
reads, verifies and compares them. Times are processor time of one core.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec

from benchmarks import document, report
from benchmarks.amplification import Ranks, Tensor, model
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.indexes import Plan, PlanTensor, encode_plan
from checkpointd.layout.keys import index_name, object_key
from checkpointd.layout.manifest import IndexRef, PlanRef, Vote, WriterIdentity
from checkpointd.pipeline.outcome.publish import PlanCheck
from checkpointd.store.memory import MemoryStore
from checkpointd_client.sharding.write_split import written_parts

HERE = Path(__file__).resolve().parent
TENSORS, TP = 2000, 8
RANKS = (64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of processor time. `rank_s`: one rank's own part, the median; `read_s`: the coordinator's, the first time."""

    ranks: int
    rank_s: float
    plans_bytes: int
    read_s: float
    changed_s: float
    known_s: float


def tensors_of(count: int) -> list[Tensor]:
    """`count` tensors of layers of a transformer."""
    layer = model(dtypes=["bfloat16"])
    return [
        Tensor(f"layers.{n // len(layer)}.{one.fqn}", one.shape, one.tp)
        for n in range(count)
        for one in [layer[n % len(layer)]]
    ]


def plan_of(tensors: Iterable[Tensor], ranks: Ranks, rank: int) -> Plan:
    """What `rank` says that it writes."""
    parts = [
        PlanTensor(tensor.fqn, tensor.dtype, part.shape, part.box, "global")
        for tensor in tensors
        for part in written_parts(tensor.fqn, ranks.held(tensor, rank), ITEM_BYTES[tensor.dtype])
    ]
    return Plan(rank=rank, world_size=ranks.count, tensors=tuple(parts))


async def measure(tensors: list[Tensor], count: int) -> Cost:
    """The cost for `count` ranks."""
    ranks, store, votes, times, nbytes = Ranks("tp", count, TP), MemoryStore(), {}, [], 0
    for rank in range(count):
        began = time.process_time()
        ref, data = encode_plan(plan_of(tensors, ranks, rank))
        times.append(time.process_time() - began)
        votes[rank], nbytes = await _voted(store, rank, count, ref, data), nbytes + len(data)
    check = PlanCheck(store)
    read_s = await _seconds(check, votes)
    known_s = await _seconds(check, votes)
    votes[1] = await _changed(store, tensors, ranks)
    changed_s = await _seconds(check, votes)
    rank_s = statistics.median(times)
    return Cost(ranks=count, rank_s=rank_s, plans_bytes=nbytes, read_s=read_s, changed_s=changed_s, known_s=known_s)


async def _seconds(check: PlanCheck, votes: dict[int, Vote]) -> float:
    began = time.process_time()
    fault = await check.fault(votes)
    assert fault is None, fault
    return time.process_time() - began


async def _changed(store: MemoryStore, tensors: list[Tensor], ranks: Ranks) -> Vote:
    """Rank 1 lists its tensors in another order."""
    plan = plan_of(tensors, ranks, 1)
    ref, data = encode_plan(msgspec.structs.replace(plan, tensors=plan.tensors[::-1]))
    return await _voted(store, 1, ranks.count, ref, data)


async def _voted(store: MemoryStore, rank: int, count: int, plan: PlanRef, data: bytes) -> Vote:
    """The vote of `rank`, whose index has a plan and nothing else."""
    index = IndexRef(name=index_name(rank), size=len(data), digest=plan.digest, plan=plan)
    await store.put(object_key("t/00000001-0", index.name), data)
    writer = WriterIdentity(host="", pid=0, time="")
    return Vote(
        tag="t",
        attempt="00000001-0",
        rank=rank,
        world_size=count,
        step=1,
        n=0,
        save_latest=True,
        vote="yes",
        index=index,
        writer=writer,
    )


def balance(tensors: Iterable[Tensor], ranks: Ranks) -> float:
    """Bytes that the busiest rank writes over their mean."""
    known = list(tensors)
    written = [
        sum(
            part.box.numel() * ITEM_BYTES[tensor.dtype]
            for tensor in known
            for part in written_parts(tensor.fqn, ranks.held(tensor, rank), ITEM_BYTES[tensor.dtype])
        )
        for rank in range(ranks.count)
    ]
    return max(written) / statistics.mean(written)


def curve(costs: list[Cost]) -> str:
    """Ranks against seconds as an SVG drawing: the coordinator's points, and the line through zero and the last one."""
    width, height, edge = 640, 320, 48
    last, top = costs[-1].ranks, max(cost.read_s for cost in costs) * 1.1

    def at(ranks: float, seconds: float) -> str:
        return f"{edge + (width - 2 * edge) * ranks / last:.1f},{height - edge - (height - 2 * edge) * seconds / top:.1f}"

    places = [at(cost.ranks, cost.read_s) for cost in costs]
    marks = "\n".join(_mark(place, cost) for place, cost in zip(places, costs, strict=True))
    box = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="#57606a"'
    title = "processor seconds of the coordinator, once for a layout; dashed: in proportion to the ranks"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {box}>
<rect width="{width}" height="{height}" fill="#ffffff"/>
<polyline points="{at(0, 0)} {at(last, costs[-1].read_s)}" stroke="#d0d7de" stroke-dasharray="4 4" fill="none"/>
<polyline points="{edge},{edge} {at(0, 0)} {width - edge},{height - edge}" stroke="#57606a" fill="none"/>
<polyline points="{" ".join(places)}" stroke="#1f6feb" stroke-width="2" fill="none"/>
{marks}
<text x="{width - edge}" y="{height - 16}" text-anchor="end">ranks, {TENSORS:,} tensors each</text>
<text x="{edge}" y="28">{title}</text>
</svg>
"""


def _mark(place: str, cost: Cost) -> str:
    x, y = place.split(",")
    # Below the line and to its right, where there is room; the last one ends at the edge.
    right = cost.ranks < RANKS[-1]
    side = f'x="{float(x) + 8:.1f}" y="{float(y) + 14:.1f}"' if right else f'x="{x}" y="{float(y) - 10:.1f}" text-anchor="end"'
    text = f"<text {side}>{cost.ranks}: {cost.read_s:.2f} s</text>"
    return f'<circle cx="{x}" cy="{y}" r="4" fill="#1f6feb"/>\n{text}'


def page(costs: list[Cost]) -> str:
    """The measurement as a page."""
    facts = ", ".join(
        f"{name} {value}" for name, value in document.machine(HERE).items() if name in ("cores", "Python", "date")
    )
    head = ["ranks", "a rank's own, ms", "plans, MB", "coordinator, s", "ms per rank", "after one changed, s", "known, ms"]
    rows = [
        [
            f"{cost.ranks:,}",
            f"{cost.rank_s * 1e3:.1f}",
            f"{cost.plans_bytes / 1e6:.0f}",
            f"{cost.read_s:.2f}",
            f"{cost.read_s / cost.ranks * 1e3:.2f}",
            f"{cost.changed_s:.2f}",
            f"{cost.known_s * 1e3:.2f}",
        ]
        for cost in costs
    ]
    layouts = [Ranks("ddp", 8), Ranks("fsdp", 8), Ranks("hsdp", 8), Ranks("tp", 8, 2), Ranks("fsdp", 64), Ranks("hsdp", 64)]
    tensors = [*model(), *tensors_of(100)]
    balances = [[str(ranks), f"{balance(tensors, ranks):.4f}"] for ranks in layouts]
    return f"""# Planning

This page shows what it costs to agree on which rank writes what. `python benchmarks/planning.py --write` writes it; do not edit
it by hand.

Machine: {facts}.

Each rank decides alone which boxes it writes, and stores its plan once for a layout, named by its digest. The coordinator
reads the plans, verifies them and proves that all ranks together write every element of every tensor exactly once. The model
has {TENSORS:,} tensors of a transformer, under FSDP2 over tensor parallelism of {TP}. The store is in memory. Times are
processor time of one core.

{report.table(head, rows)}

![seconds against ranks](planning.svg)

*A rank's own*: to make and encode its boxes and its plan, which happens in the background. *After one changed*: a save for
which one rank has another plan than before. *Known*: every other save.

Each line is measured once. Processor time grows if other work shares the cores and their caches, so compare lines only from a
quiet machine.

## Balance

The table shows the bytes that the busiest rank writes over the mean of all ranks, for eleven layers of a transformer of width
4096:

{report.table(["layout", "max / mean"], balances)}
"""


def main() -> int:
    """Print the page, or write it and its drawing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--write", action="store_true", help="write PLANNING.md and planning.svg")
    options = parser.parse_args()
    costs = []
    for count in RANKS:
        costs.append(asyncio.run(measure(tensors_of(options.tensors), count)))
        print(costs[-1], flush=True)
    text = page(costs)
    if options.write:
        (HERE / "PLANNING.md").write_text(text)
        (HERE / "planning.svg").write_text(curve(costs))
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
