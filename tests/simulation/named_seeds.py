"""The seeds that catch mutations. `seeds.json` names one for each, so that a run need not search.

If a change alters the order of effects in the simulation, another seed may be the one that catches a mutation. The test then
fails, searches, and says which. `pytest tests/simulation --name-seeds -k NAME`, in one process, writes the seeds of the tests
that it runs to the file. The night searches as well, and fails if only the named seed catches a mutation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

FILE = Path(__file__).with_name("seeds.json")

Breaks = Callable[[int], str | None]
"""What breaks under a seed; None where nothing does."""


@dataclass
class NamedSeeds:
    """`names`: write new seeds to the file; `searches`: look for one even where the named one catches."""

    names: bool
    searches: bool
    seeds: dict[str, int] = field(default_factory=lambda: json.loads(FILE.read_text()))

    def caught(self, mutation: str, breaks: Breaks, searched: Iterable[int]) -> tuple[int, str]:
        """A seed that catches the mutation, and what broke. AssertionError where the named seed, or a search, finds nothing."""
        if self.names:
            return self._named_anew(mutation, breaks, searched)
        others = [seed for seed in searched if seed != self.seeds.get(mutation)]
        broken = breaks(self.seeds[mutation]) if mutation in self.seeds else None
        if broken is None:
            then = advice(first_broken(breaks, others))
            raise AssertionError(f"the seed named for {mutation!r}, if any, catches nothing; {then}")
        if self.searches:
            assert first_broken(breaks, others), (
                f"only the named seed catches {mutation!r}: give it faults that show it more often"
            )
        return self.seeds[mutation], broken

    def _named_anew(self, mutation: str, breaks: Breaks, searched: Iterable[int]) -> tuple[int, str]:
        found = first_broken(breaks, searched)
        assert found, f"no seed catches {mutation!r}"
        self.seeds[mutation] = found[0]
        FILE.write_text(json.dumps(self.seeds, indent=1, sort_keys=True) + "\n")
        return found


def advice(found: tuple[int, str] | None) -> str:
    if found is None:
        return "no other does: the mutation is harmless now, or its faults no longer meet it, and must follow your change"
    return f"seed {found[0]} does ({found[1]}). If your change only altered the order of effects, name it: --name-seeds"


def first_broken(breaks: Breaks, searched: Iterable[int]) -> tuple[int, str] | None:
    for seed in searched:
        if broken := breaks(seed):
            return seed, broken
    return None
