"""Tests whether a captured state could be loaded again into the objects that it came from.

Invariants
  LOADABLE-1  A state whose checkpoint could never be loaded is refused at save(), by the code that matches at a load. So no
      such checkpoint commits.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, cast

from checkpointd.errors import StateError
from checkpointd.layout import tree
from checkpointd_client.capture.state import Walked
from checkpointd_client.capture.tensor_kinds.classes import ONLY_BUILT_IN, TensorClasses
from checkpointd_client.ranks import mismatches
from checkpointd_client.restore.answers import HandedOutStates
from checkpointd_client.restore.content import RankContent
from checkpointd_client.restore.matching.matcher import matched
from checkpointd_client.restore.stored import Entries, Stored


def check_loadable(state: Mapping[str, object], whole: Walked, classes: TensorClasses = ONLY_BUILT_IN) -> None:
    """StateError if a load could not give back all of the state. It changes and allocates nothing, and asks no other rank.

    A state with values that an integration will put back itself is not looked at.
    """
    if whole.walk.has_foreign:
        return
    captured = whole.captured
    assert isinstance(captured.tree, tree.Dict)
    entries = _entries(whole)
    content = RankContent(root=captured.tree, entries=entries, owners={}, aliases=captured.aliases, excluded=captured.excluded)
    match = matched(
        cast(MutableMapping[str, Any], state),  # a match changes nothing
        Stored(captured.tree, entries, captured.aliases),
        content,
        whole.walk.modules,
        equal=lambda _one, _two: False,
        answers=HandedOutStates(lazily=False),  # objects may wait for all ranks when they are asked
        classes=classes,
        will_load=False,
    )
    missing = (f"{fqn}: a load would not find it in the checkpoint" for fqn in match.missing)
    unexpected = (f"{fqn}: a load would have no place for it" for fqn in match.unexpected)
    found = [*missing, *unexpected, *match.mismatched, *match.bindings.conflicts(lambda _one, _two: False)]
    if found:
        raise StateError(
            "a checkpoint of this state could not be loaded into the same objects, so it is not saved. Give these values other "
            "names, or leave them out of the state:\n  " + "\n  ".join(found[: mismatches.TOLD_MAX])
        )


def _entries(whole: Walked) -> Entries:
    """Dtype and shape of all tensors that the ranks store together, also of those that another rank writes."""
    found = whole.found
    return {
        fqn: (found.dtypes[i], found.held[i].shape if i in found.held else tuple(found.detached[i].shape))
        for i, fqn in enumerate(found.fqns)
        if i not in whole.aliases
    }
