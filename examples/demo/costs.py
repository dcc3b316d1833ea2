"""What saving cost a run: per save, read from the logs of its ranks, and beside a blocking torch.save."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median


@dataclass(frozen=True, kw_only=True)
class SaveCost:
    """Seconds from the call of `save()` on, of the slower rank; None where a save did not get so far."""

    call_s: float | None = None  # until save() had returned: training was held
    fence_s: float | None = (
        None  # not from the call on: how long the next optimizer step was held, since the snapshot was not whole
    )
    safe_s: float | None = (
        None  # until the tensors could change again; beside the forward and backward pass, which do not change them
    )
    durable_s: float | None = None  # until the rank's shard was on the disk and it had voted
    committed_s: float | None = None  # until the checkpoint was committed on all ranks


def start_of(attempt: str) -> int:
    """An attempt is called `<start>-<k>`."""
    return int(attempt.partition("-")[0])


@dataclass(frozen=True, kw_only=True)
class Save:
    tag: str
    attempt: str
    phase: str
    cost: SaveCost
    requests: Mapping[str, int] | None = None
    """Those of all ranks to a bucket, by kind, since the save before; None where the root is not in a bucket."""


def read_saves(folder: Path, *, ranks: int) -> list[Save]:
    """The saves that every rank has logged, in the order in which they were made."""
    logs = [_read_rank(folder / f"saves-{rank}.jsonl") for rank in range(ranks)]
    return [_of_all_ranks([log[key] for log in logs]) for key in logs[0] if all(key in log for log in logs)]


def _read_rank(path: Path) -> dict[tuple[str, str], Save]:
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    saves = [
        Save(
            tag=entry["tag"],
            attempt=entry["attempt"],
            phase=entry["phase"],
            cost=SaveCost(**{field.name: entry[field.name] for field in fields(SaveCost)}),
            requests=entry["requests"],
        )
        for entry in entries
    ]
    return {(save.tag, save.attempt): save for save in saves}


def _of_all_ranks(saves: Sequence[Save]) -> Save:
    cost = SaveCost(**{field.name: _slowest(saves, field.name) for field in fields(SaveCost)})
    first, counts = saves[0], [save.requests for save in saves if save.requests is not None]
    requests = {kind: sum(count[kind] for count in counts) for kind in counts[0]} if counts else None
    return Save(tag=first.tag, attempt=first.attempt, phase=first.phase, cost=cost, requests=requests)


def _slowest(saves: Sequence[Save], name: str) -> float | None:
    seconds = [getattr(save.cost, name) for save in saves]
    return None if None in seconds else max(seconds)


def typical(costs: Sequence[SaveCost]) -> SaveCost:
    """The median of each duration, over the saves that got so far."""
    return SaveCost(**{field.name: _median(getattr(cost, field.name) for cost in costs) for field in fields(SaveCost)})


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def typical_requests(saves: Sequence[Save]) -> dict[str, int]:
    """The median of each kind of request, over the saves that counted them; empty where none did."""
    counts = [save.requests for save in saves if save.requests is not None]
    return {kind: round(median(count[kind] for count in counts)) for kind in counts[0]} if counts else {}


def step_seconds(folder: Path, *, ranks: int, save_every: int) -> tuple[float, float]:
    """Median seconds of a training step over all ranks: of those beside which a save began, and of the others."""
    beside: list[float] = []
    others: list[float] = []
    for rank in range(ranks):
        for line in (folder / f"losses-{rank}.jsonl").read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["step_s"] is not None:
                (others if entry["step"] % save_every else beside).append(entry["step_s"])
    return median(beside), median(others)
