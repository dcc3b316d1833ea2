"""What saving cost a run: per save, read from the logs of its ranks, and beside a blocking torch.save."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median


@dataclass(frozen=True, kw_only=True)
class SaveCost:
    """Seconds from the call of `save()` on, of the slower rank; None where a save did not get so far."""

    call_s: float | None  # until save() had returned: training was held
    safe_s: float | None  # until the tensors could change: what the optimizer's step would have waited for
    durable_s: float | None  # until the rank's shard and vote were on the disk
    committed_s: float | None  # until the checkpoint was committed on all ranks


@dataclass(frozen=True, kw_only=True)
class Save:
    tag: str
    start: int  # how often torchrun had restarted the job
    phase: str
    cost: SaveCost


def read_saves(folder: Path, *, ranks: int) -> list[Save]:
    """The saves that every rank has logged, in the order in which they were made."""
    logs = [_read_rank(folder / f"saves-{rank}.jsonl") for rank in range(ranks)]
    return [_of_all_ranks([log[key] for log in logs]) for key in logs[0] if all(key in log for log in logs)]


def _read_rank(path: Path) -> dict[tuple[int, str], Save]:
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    saves = [
        Save(
            tag=entry["tag"],
            start=entry["restart"],
            phase=entry["phase"],
            cost=SaveCost(**{field.name: entry[field.name] for field in fields(SaveCost)}),
        )
        for entry in entries
    ]
    return {(save.start, save.tag): save for save in saves}


def _of_all_ranks(saves: Sequence[Save]) -> Save:
    cost = SaveCost(**{field.name: _slowest(saves, field.name) for field in fields(SaveCost)})
    return Save(tag=saves[0].tag, start=saves[0].start, phase=saves[0].phase, cost=cost)


def _slowest(saves: Sequence[Save], name: str) -> float | None:
    seconds = [getattr(save.cost, name) for save in saves]
    return None if None in seconds else max(seconds)


def typical(costs: Sequence[SaveCost]) -> SaveCost:
    """The median of each duration, over the saves that got so far."""
    return SaveCost(**{field.name: _median(getattr(cost, field.name) for cost in costs) for field in fields(SaveCost)})


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def step_seconds(folder: Path, *, ranks: int) -> float:
    """The median time of a training step over all ranks, without each rank's first, which warms up."""
    seconds: list[float] = []
    for rank in range(ranks):
        lines = (folder / f"losses-{rank}.jsonl").read_text(encoding="utf-8").splitlines()[1:]
        seconds += [json.loads(line)["step_s"] for line in lines]
    return median(seconds)
