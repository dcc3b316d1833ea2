"""Tests whether data loaders can load the stored state of another one.

The state of torchdata's loaders is the position of one rank among its own samples, and of each of its workers. On other ranks
it would mean other samples, even if all ranks had stored the same. With other workers, torchdata fails at the first batch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from checkpointd.layout import tree
from checkpointd_client.restore import building
from checkpointd_client.restore.stored import by_name

_HOMES = (
    ("torchdata.stateful_dataloader.stateful_dataloader", "StatefulDataLoader"),
    ("torchdata.nodes.loader", "Loader"),
)
_RULE = "docs/howto/DATA_LOADERS.md has the rule"


@runtime_checkable
class ChecksPosition(Protocol):
    """A loader that tells beforehand which states it cannot load."""

    def misfit(self, state: Mapping[str, Any]) -> str | None:
        """Why it cannot load `state`; None if it can."""
        ...


def is_of_one_rank(live: object) -> bool:
    """Whether the state of `live` tells a position of one rank, which other ranks cannot use. A class that loads its state in a
    way of its own decides by itself.
    """
    return any(type(live).load_state_dict is cls.load_state_dict for cls in _classes(live))  # type: ignore[attr-defined]


def misfit(live: Any, node: tree.Node, fqn: str) -> str | None:
    """Why the loader cannot load the stored state; None if it can, and if it is none of these loaders."""
    if isinstance(live, ChecksPosition):
        why = live.misfit({key: child for key, child in by_name(node).items() if building.is_scalar(child)})
        return None if why is None else f"{fqn}: {why}"
    if not is_of_one_rank(live) or not hasattr(live, "num_workers"):
        return None
    was = _workers(node)
    if was is None or was == live.num_workers:
        return None
    return (
        f"{fqn}: a StatefulDataLoader with {was} workers is stored, and it has {live.num_workers} now: make it with "
        f"num_workers={was}, or use a ReshardingLoader ({_RULE})"
    )


def _workers(node: tree.Node) -> int | None:
    """The number of workers of the stored loader; None if it does not tell."""
    parts = by_name(node)
    if "_num_yielded" in parts:
        return 0
    found = by_name(by_name(parts.get("_snapshot")).get("_main_snapshot")).get("_num_workers")
    return found if isinstance(found, int) else None


def _classes(live: object) -> list[Any]:
    """The classes of torchdata that `live` has. Only modules that are imported are asked."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in _HOMES)
    return [cls for cls in found if isinstance(cls, type) and isinstance(live, cls)]
