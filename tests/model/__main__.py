"""`python -m tests.model [--small] [--mutations] [SCOPE...]`: explores these scopes, or all, and prints what it found.

`--small`: with the sizes of the gate. `--mutations`: the mutations instead of the scopes.
"""

from __future__ import annotations

import sys

from tests.model.explore import Verdict, explore
from tests.model.mutations import MUTATIONS, is_right
from tests.model.scopes import SCOPES


def say(name: str, found: Verdict) -> None:
    print(f"{name}: {found.worlds:,} worlds, {found.steps:,} steps, {found.seconds:.1f} s: {found.words}", flush=True)


def main(arguments: list[str]) -> int:
    size, failed = 0 if "--small" in arguments else 1, 0
    wanted = [one for one in arguments if not one.startswith("--")]
    if "--mutations" in arguments:
        for mutation in MUTATIONS:
            if not wanted or mutation.scope in wanted:
                found = mutation.explored()
                failed += not is_right(mutation, found)
                say(f"{'' if is_right(mutation, found) else 'WRONG '}{mutation.name} [{mutation.scope}]", found)
        return 1 if failed else 0
    for name in wanted or SCOPES:
        scope = SCOPES[name](size, "")
        print(f"{name}: {scope.about}")
        found = explore(scope)
        say("    it has", found)
        failed += found.violation is not None
        for step in found.trace:
            print(f"        {step}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
