"""The seeds that catch mutations. `seeds.json` names one for each, so that a run need not search.

A change of the simulated code moves its moments, and another seed may then be the one that catches. The test fails, searches,
and says which. `pytest tests/simulation --name-seeds`, in one process, writes all of them to the file again. The night searches
as well, so a mutation that only its named seed still catches is seen.
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
        named = self.seeds.get(mutation, -1)
        broken = breaks(named) if named >= 0 else None
        if broken is None:
            found = first_broken(breaks, searched)
            raise AssertionError(f"seed {named} of {mutation!r} catches nothing; of those searched: {found}. See --name-seeds")
        if self.searches:
            assert first_broken(breaks, searched), f"only the named seed {named} catches {mutation!r}: give it better faults"
        return named, broken

    def _named_anew(self, mutation: str, breaks: Breaks, searched: Iterable[int]) -> tuple[int, str]:
        found = first_broken(breaks, searched)
        assert found, f"no seed catches {mutation!r}"
        self.seeds[mutation] = found[0]
        FILE.write_text(json.dumps(self.seeds, indent=1, sort_keys=True) + "\n")
        return found


def first_broken(breaks: Breaks, searched: Iterable[int]) -> tuple[int, str] | None:
    for seed in searched:
        if broken := breaks(seed):
            return seed, broken
    return None
