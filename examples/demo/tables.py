"""The tables and notes of the demonstration, for a terminal or, plain, for a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from compare import Comparison
from costs import Save, SaveCost, start_of, typical, typical_requests
from launch import Strike
from second_act import Recovery

MEGA = 1e6

COSTS_EXPLAINED = (
    "Of the slower rank. Training was held for call (until save() returned) and for fence (by the next optimizer step). "
    "Counted from the call on: safe, until the tensors could change again; durable, until the shard was in the store; "
    "committed on all ranks. torch.save of the same state holds training for all of its call; it is durable after the fsync."
)


def comparison(comparisons: Sequence[Comparison]) -> Table:
    """One line per kind of value: how many each rank has, and whether all of them are equal."""
    table = _table("values compared", "rank 0", "rank 1", "equal")
    for kind in dict.fromkeys(c.kind for c in comparisons):
        of_kind = [c for c in comparisons if c.kind == kind]
        different = [f"rank {c.rank} {name}" for c in of_kind for name in c.different]
        table.add_row(kind, *(str(c.values) for c in of_kind), _differences(different))
    return table


def _differences(names: Sequence[str]) -> str:
    return f"[red]{len(names)} differ: {', '.join(names[:3])} ...[/]" if names else "[green]all[/]"


def strike(strike: Strike) -> str:
    """What the kill left in the store, in a few lines."""
    return (
        f"  [bold red]SIGKILL[/] rank {strike.rank} (process {strike.pid}) while it was writing "
        f"{strike.tag}/{strike.attempt}.\n"
        f"  It had written {strike.written / MEGA:.1f} MB; its shard took {strike.expected / MEGA:.1f} MB the time before.\n"
        f"  In that attempt: {', '.join(strike.present)}.\n"
        f"  No vote of rank {strike.rank} and no outcome. `latest` says {strike.latest}."
    )


def costs(saves: Sequence[Save], killed: Strike | None, blocking: Sequence[SaveCost]) -> Table:
    """Each save of the run, first those before the kill, their median, and torch.save of the same state."""
    counted = any(save.requests is not None for save in saves)
    table = _table("milliseconds", "call", "fence", "safe", "durable", "committed", "end", *(["requests"] if counted else []))
    attempts = [save.attempt for save in saves] + ([killed.attempt] if killed else [])
    for start in sorted(set(map(start_of, attempts))):
        for save in saves:
            if start_of(save.attempt) == start:
                requests = [str(sum(save.requests.values()))] if save.requests is not None else []
                table.add_row(save.tag, *_cells(save.cost), save.phase, *requests)
        if killed is not None and start_of(killed.attempt) == start:
            table.add_row(killed.tag, *_cells(SaveCost()), "[red]killed[/]")
        table.add_section()
    table.add_row("median", *_cells(typical([save.cost for save in saves])), "", style="bold")
    table.add_row("torch.save + fsync", *_cells(typical(blocking)), "", style="bold")
    return table


def requests(saves: Sequence[Save]) -> str:
    """What a save asks of a bucket, in a line; empty where the root is not in one."""
    kinds = typical_requests(saves)
    if not kinds:
        return ""
    words = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return (
        f"Requests of both ranks per save (median of each kind): {words}; together {sum(kinds.values())}. They include the "
        "looks of ranks that wait for each other, and the reading back of the save before."
    )


def _cells(cost: SaveCost) -> list[str]:
    durations = (cost.call_s, cost.fence_s, cost.safe_s, cost.durable_s, cost.committed_s)
    return ["" if seconds is None else f"{seconds * 1e3:.1f}" for seconds in durations]


RECOVERIES_EXPLAINED = (
    "load() on rank 0, which waits for the slower rank; and from the kill (memory) or the start (store) to the end of the "
    "first step, most of which is Python starting and importing torch. A store on this machine is read from the page cache."
)


def recoveries(found: Sequence[Recovery]) -> Table:
    """One line per restart."""
    table = _table("loaded from", "checkpoint", "load(), s", "first step after, s")
    for recovery in found:
        table.add_row(recovery.source, recovery.tag, f"{recovery.load_s:.2f}", f"{recovery.first_step_s:.2f}")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table
