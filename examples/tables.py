"""The tables and notes of the demonstration, for a terminal or, plain, for a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from compare import Comparison
from costs import Save, SaveCost, typical
from launch import Strike

MEGA = 1e6

COSTS_EXPLAINED = (
    "From the call on, of the slower rank. call: until save() returned. safe: until the tensors could change again;\n"
    "training goes on meanwhile, up to the next optimizer step. durable: until the rank's shard is on the disk."
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
        f"{strike.tag}/{strike.attempt}: {strike.written / MEGA:.0f} of {strike.reserved / MEGA:.0f} MB on disk.\n"
        f"  In that attempt: {', '.join(strike.present)}; no vote of rank {strike.rank}, no outcome. "
        f"`latest` says {strike.latest}."
    )


def costs(saves: Sequence[Save], killed: Strike | None, blocking: Sequence[SaveCost]) -> Table:
    """Each save of the run, their median, and torch.save of the same state."""
    table = _table("save", "start", "call", "safe", "durable", "committed", "phase")
    shown = False
    for save in saves:
        if killed is not None and save.start > 0 and not shown:
            table.add_row(killed.tag, "1st", "", "", "", "", "[red]killed in flight[/]")
            shown = True
        table.add_row(save.tag, "1st" if save.start == 0 else "restart", *_cells(save.cost), save.phase)
    table.add_section()
    table.add_row("[bold]median[/]", "", *_cells(typical([save.cost for save in saves])), "")
    table.add_row("[bold]torch.save[/] + fsync, blocking", "", *_cells(typical(blocking)), "no commit")
    return table


def _cells(cost: SaveCost) -> list[str]:
    return [_seconds(value) for value in (cost.call_s, cost.safe_s, cost.durable_s, cost.committed_s)]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value * 1e3:.1f} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table
