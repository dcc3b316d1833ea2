"""Who writes what: checks that the parts the ranks wrote are the whole, each element exactly once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from checkpointd.layout.boxes import tiling_fault
from checkpointd.layout.manifest import Index, Plan, PlanTensor


def union_fault(plans: Mapping[int, Plan]) -> str | None:
    """Why the plans of all ranks are not one whole state, naming FQN and ranks; None where they are.

    A rank-scoped tensor must be covered by its own rank; a global one by all ranks together, under one dtype and shape.
    """
    shared: dict[str, list[tuple[int, PlanTensor]]] = defaultdict(list)
    for rank, plan in plans.items():
        own: dict[str, list[tuple[int, PlanTensor]]] = defaultdict(list)
        for part in plan.tensors:
            (own if part.scope == "rank" else shared)[part.fqn].append((rank, part))
        fault = _first_fault(own)
        if fault:
            return fault
    return _first_fault(shared)


def _first_fault(groups: Mapping[str, list[tuple[int, PlanTensor]]]) -> str | None:
    return next(filter(None, (_group_fault(fqn, parts) for fqn, parts in groups.items())), None)


def _group_fault(fqn: str, parts: list[tuple[int, PlanTensor]]) -> str | None:
    ranks = sorted({rank for rank, _ in parts})
    first = parts[0][1]
    for rank, part in parts:
        if (part.dtype, part.shape) != (first.dtype, first.shape):
            return (
                f"{fqn} is {first.dtype}{list(first.shape)} on rank {parts[0][0]} "
                f"and {part.dtype}{list(part.shape)} on rank {rank}"
            )
    fault = tiling_fault(first.shape, [part.box for _, part in parts])
    return f"{fqn} (ranks {ranks}): {fault}" if fault else None


def cover_fault(plan: Plan, index: Index) -> str | None:
    """Why `index` is not what `plan` promised: a part missing, extra, or of another size; None where it is."""
    promised = {_identity(part): part for part in plan.tensors}
    for entry in index.tensors:
        part = PlanTensor(entry.fqn, entry.dtype, entry.shape, entry.box, entry.scope)
        if promised.pop(_identity(part), None) is None:
            return f"{entry.fqn} was written but stands not in the plan"
    missing = next(iter(promised.values()), None)
    return f"{missing.fqn} stands in the plan but was not written" if missing else None


def _identity(part: PlanTensor) -> tuple[object, ...]:
    return (part.fqn, part.dtype, part.shape, part.box, part.scope)


def raw_bytes(index: Index, fqns: Iterable[str] | None = None) -> int:
    """Bytes of tensors before encoding, of all or of the given FQNs."""
    wanted = None if fqns is None else set(fqns)
    return sum(c.raw for t in index.tensors if wanted is None or t.fqn in wanted for c in t.chunks)
