"""Whether two runs ended the same, bit for bit: losses, parameters, optimizer, scheduler, loader and generators."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Comparison:
    """How many values of one kind one rank has, and the names of those that differ between the two runs."""

    kind: str
    rank: int
    values: int
    different: tuple[str, ...]


def compare_runs(ours: Path, reference: Path, *, ranks: int) -> list[Comparison]:
    """Compare the logs that two runs of the training script left in these folders (see runlog.py).

    A value that only one of the runs has counts as different, and so does a kind that neither has.
    """
    result = []
    for rank in range(ranks):
        a, b = _values(ours, rank), _values(reference, rank)
        result += [_compare(kind, rank, a.get(kind, {}), b.get(kind, {})) for kind in sorted(a.keys() | b.keys())]
    return result


def _compare(kind: str, rank: int, ours: Mapping[str, str], reference: Mapping[str, str]) -> Comparison:
    names = sorted(ours.keys() | reference.keys())
    different = tuple(name for name in names if ours.get(name) != reference.get(name))
    return Comparison(kind, rank, len(names), different)


def _values(folder: Path, rank: int) -> dict[str, dict[str, str]]:
    """Kind -> name -> exact value: the loss of every step, and every leaf of the final state by its top-level name."""
    values: dict[str, dict[str, str]] = {"losses": {}}
    for line in (folder / f"losses-{rank}.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        name = f"step {entry['step']}"
        if name in values["losses"]:
            raise ValueError(f"{folder}: rank {rank} wrote the loss of {name} twice")
        values["losses"][name] = entry["loss"]
    digests: dict[str, str] = json.loads((folder / f"final-{rank}.json").read_text(encoding="utf-8"))
    for name, digest in digests.items():
        values.setdefault(name.partition(".")[0], {})[name] = digest
    return values
