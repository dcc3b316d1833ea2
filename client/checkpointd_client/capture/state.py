"""Capture: the user's state as tensors with FQNs, aliases and a tree of everything else.

Invariants
  CAPTURE-1  Capture copies only conjugate and negative views, whose bytes must be computed, and arrays that torch cannot share.
  CAPTURE-2  If a tensor lies inside the elements of another one, it becomes an alias, and the memory is stored once. Tensors
      that overlap in any other way are each stored in full.
  CAPTURE-3  Every FQN is unique among leaves, aliases and excluded parameters.
  CAPTURE-4  Nothing is pickled. A value without a node type is refused; the error names its FQN, its type and a remedy.
  CAPTURE-5  For a tensor that several ranks hold, each leaf is one box that this rank writes. An alias of such a tensor is an
      alias of the whole tensor.
  CAPTURE-6  The state_dict() of an object is refused, because a load would fill only the dict. The exception is a module's
      state_dict() that shares the memory of the module.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from checkpointd.errors import StateError
from checkpointd.layout import tree
from checkpointd.layout.indexes import Alias
from checkpointd.layout.strides import contiguous_stride
from checkpointd_client.capture import state_dicts
from checkpointd_client.capture.aliasing import MemoryRegion, address_of, alias_of, extent, overlap_of, overlapping
from checkpointd_client.capture.dtypes import NAMES, overlaps_itself
from checkpointd_client.capture.flatten import Flattener
from checkpointd_client.capture.leaves import Columns, Leaves, note_outer
from checkpointd_client.capture.scalars import decode_key
from checkpointd_client.capture.tensor_kinds.classes import ONLY_BUILT_IN, TensorClasses
from checkpointd_client.capture.tensors import LIKELY_LOWEST_ADDRESS, refusal
from checkpointd_client.sharding.dtensor import LocalShard, is_dtensor, local_of
from checkpointd_client.sharding.write_split import written_parts


@dataclass(frozen=True)
class Captured:
    """A captured state. Each memory has one leaf; a tied tensor has an alias for each of its other names.

    `arrangement`: captures of one `Capturer` with the same object have leaves that differ only in their addresses. They agree
    in order, FQN, dtype, shape, strides, device, part, and in whether they are optimizer-only or inference tensors.
    """

    leaves: Leaves
    aliases: tuple[Alias, ...]
    tree: tree.Node | tree.FilesNode
    excluded: tuple[str, ...]
    arrangement: object = field(default_factory=object)


def capture(
    state: Mapping[str, object],
    client_state: Mapping[str, object] | None,
    *,
    exclude_frozen_parameters: bool,
    classes: TensorClasses = ONLY_BUILT_IN,
) -> Captured:
    """Turn `state` and `client_state` into leaves and a tree, without copying tensors. StateError if a value cannot be stored.

    With `exclude_frozen_parameters`, parameters (not buffers) of modules that have requires_grad off are left out and listed.
    `classes`: the classes of tensors that may be stored.
    """
    return walked(state, client_state, exclude_frozen_parameters=exclude_frozen_parameters, classes=classes).captured


@dataclass(frozen=True, slots=True)
class Walked:
    """A capture, and what the walk has found out about the tensors by their positions. `positions`: the position of each leaf.

    `optimizer_spans`: the starts and ends of all memory that only optimizer steps change. `overlapping`: FQNs of tensors that
    share memory in a way that no alias tells.
    """

    captured: Captured
    walk: Flattener
    found: CheckedTensors
    positions: list[int]
    aliases: Aliases
    overlapping: frozenset[str]
    optimizer_spans: set[tuple[int, int]]


def walked(
    state: Mapping[str, object],
    client_state: Mapping[str, object] | None,
    *,
    exclude_frozen_parameters: bool,
    classes: TensorClasses = ONLY_BUILT_IN,
) -> Walked:
    """Do what `capture` does, and tell more."""
    walk = Flattener(exclude_frozen_parameters=exclude_frozen_parameters, classes=classes)
    try:
        refused = state_dicts.refused(state)
        if refused is not None:
            raise refused
        root = walk.root(state, client_state)
    except RecursionError as error:
        raise StateError("the state is nested too deeply for what is left of Python's stack: flatten it") from error
    _check_unique(walk, root)
    # Without this, a mode such as torch.set_default_device would turn each small call in here into a Python call.
    with torch._C.DisableTorchFunction():
        found = inspected(walk)
        aliases = _share(found)
        _share_nothing(walk, found, aliases)
        overlaps = _overlaps(found, aliases)
        spans = _optimizer_spans(walk, found)
        positions: list[int] = []
        leaves = leaves_of(found, aliases, spans, positions)
    captured = Captured(
        leaves,
        tuple(alias for _, (_, alias) in sorted(aliases.items())),
        _mark(root, overlaps) if overlaps else root,
        tuple(walk.excluded),
    )
    return Walked(captured, walk, found, positions, aliases, frozenset(overlaps), spans)


def leaves_of(found: CheckedTensors, aliases: Aliases, optimizer_spans: set[tuple[int, int]], positions: list[int]) -> Leaves:
    """The leaves of tensors that are no aliases. The position of each is added to `positions`."""
    columns, tensors = Columns([], [], [], []), list[torch.Tensor]()
    for i, (fqn, tensor, dtype) in enumerate(zip(found.fqns, found.detached, found.dtypes, strict=True)):
        if i in aliases:
            continue
        held = found.held.get(i)
        by_steps = (found.starts[i], found.ends[i]) in optimizer_spans
        for part in (None,) if held is None else written_parts(fqn, held, tensor.itemsize):
            positions.append(i)
            tensors.append(tensor if part is None else part.of(tensor))
            if i in found.outer:
                note_outer(tensors[-1], found.outer[i][1])
            columns.fqns.append(fqn)
            columns.dtypes.append(dtype)
            columns.optimizer_only.append(by_steps)
            columns.parts.append(part)
    return Leaves(columns, tensors)


def _check_unique(walk: Flattener, root: tree.Node) -> None:
    names = [*walk.fqns, *walk.excluded]
    if len(set(names)) == len(names):
        return
    fqn, count = collections.Counter(names).most_common(1)[0]
    places = [_way(path) for path, node in _places(root, ()) if node.fqn == fqn] or [f"{count} frozen parameters"]
    raise StateError(
        f"{fqn}: {count} tensors of the state would get this name, at {' and '.join(places)}: "
        "rename one (names are the keys joined by dots, so 0 and '0', or 'a.b' and a nested 'a', 'b', are the same)"
    )


def _places(node: tree.Node, path: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], tree.Tensor | tree.Array]]:
    """Every tensor of the tree with the keys that lead to it."""
    if isinstance(node, tree.Tensor | tree.Array):
        yield path, node
    elif isinstance(node, tree.Dict):
        for key, child in (*node.items, *tree.items(node.attributes)):
            yield from _places(child, (*path, decode_key(key, stand_in=True)))
    elif isinstance(node, tree.Sequence):
        for i, child in enumerate(node.items):
            yield from _places(child, (*path, i))
    elif isinstance(node, tree.Composite):
        for name, child in node.inner:
            yield from _places(child, (*path, name))


def _way(path: tuple[object, ...]) -> str:
    """The keys as the user would write them, from `state` or `client_state` on."""
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])


@dataclass(frozen=True, slots=True)
class CheckedTensors:
    """The checked tensors of a walk, in its order. `starts` and `ends` are addresses of the user's memory."""

    fqns: list[str]
    live: list[torch.Tensor]
    detached: list[torch.Tensor]
    dtypes: list[str]
    starts: list[int]
    ends: list[int]
    strided: list[int]
    """Positions of tensors that are not contiguous."""
    resolved: list[int]
    """Positions of conjugate and negative views, which were resolved into new memory."""
    held: dict[int, LocalShard]
    """By position, the local shards of distributed tensors."""
    tied: dict[int, int]
    """By position of a second name of a tensor, the position of the first, even if this rank holds no element of it."""
    outer: dict[int, tuple[str, Any]]
    """By position of an inner tensor, the composite tensor around it, with its FQN."""


def inspected(walk: Flattener) -> CheckedTensors:
    """Check every tensor and note its addresses. One flat loop, because it runs for every tensor inside every save()."""
    found = CheckedTensors(walk.fqns, walk.tensors, [], [], [], [], [], [], walk.held, walk.tied, walk.outer)
    for i, tensor in enumerate(walk.tensors):
        if tensor.layout is not torch.strided or tensor.is_nested:
            _refuse(tensor, walk.fqns[i])
        name = NAMES.get(tensor.dtype)
        start = tensor.data_ptr()
        if name is None or start < LIKELY_LOWEST_ADDRESS:
            _refuse(tensor, walk.fqns[i])
        if not tensor.is_cpu:
            start = address_of(tensor)
        contiguous = tensor.is_contiguous()
        if not contiguous:
            found.strided.append(i)
        found.starts.append(start)
        found.ends.append(start + (tensor.nbytes if contiguous else extent(tensor)))
        found.dtypes.append(name or "")
        detached = tensor.detach()
        lazy_bits = tensor.is_neg() or (tensor.is_complex() and tensor.is_conj())
        if lazy_bits:
            found.resolved.append(i)
        found.detached.append(detached.resolve_conj().resolve_neg() if lazy_bits else detached)
    return found


def _refuse(tensor: torch.Tensor, fqn: str) -> None:
    why = refusal(tensor)
    if why is not None:
        raise StateError(f"{fqn}: {why}")


Aliases = dict[int, tuple[int, Alias]]
"""Position of an alias -> position of its owner, and the alias."""


def _share(found: CheckedTensors) -> Aliases:
    """Find the tensors that lie inside others."""
    aliases: Aliases = {}
    tied = {i: o for i, o in found.tied.items() if found.held[i].shape}
    for overlap in overlapping(found.starts, found.ends):
        positions = [i for i in overlap if i not in tied]
        regions = {i: MemoryRegion.of(found.live[i]) for i in positions}
        owners: list[int] = []
        # The owner is the largest tensor, contiguous ones first. Among equals it is a distributed one, then the first one.
        for i in sorted(
            positions, key=lambda i: (not _plain(regions[i]), regions[i].start - regions[i].end, i not in found.held, i)
        ):
            named = ((o, _alias(found, i, regions[i], o, regions[o])) for o in owners)
            owner = next(((o, alias) for o, alias in named if alias is not None), None)
            if owner is None:
                owners.append(i)
            else:
                aliases[i] = owner
    for i, o in tied.items():
        shape = found.held[i].shape
        alone = (o, Alias(found.fqns[i], found.fqns[o], shape, contiguous_stride(shape), 0))
        owner_of, alias = aliases.get(o, alone)
        aliases[i] = (owner_of, msgspec.structs.replace(alias, fqn=found.fqns[i]))
    return aliases


def _share_nothing(walk: Flattener, found: CheckedTensors, aliases: Aliases) -> None:
    """Find the aliases among sharded tensors of which this rank holds no element, as the ranks that hold some find them."""
    owners: dict[object, int] = {}
    for i, tensor in walk.sharded.items():
        if found.starts[i] < found.ends[i]:
            continue
        # Two names of one object, or of two objects that were detached from the same one.
        memory = found.live[i].untyped_storage()._cdata if is_dtensor(tensor) else id(tensor)
        o = owners.setdefault(memory, i)
        if o != i and found.held[i].alike(found.held[o]) and found.dtypes[i] == found.dtypes[o]:
            shape = found.held[o].shape
            aliases[i] = o, Alias(found.fqns[i], found.fqns[o], shape, contiguous_stride(shape), 0)


def _alias(found: CheckedTensors, i: int, part: MemoryRegion, o: int, owner: MemoryRegion) -> Alias | None:
    """`i` as an alias of `o`, or None. For a distributed tensor, the alias has the shape of the global tensor."""
    one, two = found.held.get(i), found.held.get(o)
    if two is not None and not two.shape:
        return None  # only the rank that writes a scalar has it in its index, so other ranks could not refer to it
    if (one is None or one.is_whole) if two is None else (one is None and two.is_whole):
        return alias_of(found.fqns[i], part, found.fqns[o], owner)
    if one is None or two is None or not one.alike(two) or not part.equals(owner):
        return None
    return Alias(found.fqns[i], found.fqns[o], two.shape, contiguous_stride(two.shape), 0)


def _plain(region: MemoryRegion) -> bool:
    return region.contiguous and not any(region.lazy_bits)


def _overlaps(found: CheckedTensors, aliases: Aliases) -> dict[str, tree.Overlap]:
    """By FQN, how tensors lie in shared memory, if their aliases do not tell it."""
    folded = {i for i in found.strided if i not in aliases and overlaps_itself(found.live[i])}
    groups = [group for group in overlapping(found.starts, found.ends) if _needs_telling(group, aliases, folded)]
    alone = folded.difference(*groups)
    return {
        found.fqns[i]: overlap_of(MemoryRegion.of(found.live[i]), number, min(found.starts[j] for j in group))
        for number, group in enumerate([*groups, *([i] for i in sorted(alone))])
        for i in group
    }


def _needs_telling(group: list[int], aliases: Aliases, folded: set[int]) -> bool:
    """Whether the group has two owners, which overlap, or an owner whose own elements overlap."""
    owners = {aliases[i][0] if i in aliases else i for i in group}
    return len(owners) > 1 or not folded.isdisjoint(owners)


def _optimizer_spans(walk: Flattener, found: CheckedTensors) -> set[tuple[int, int]]:
    """The memory that only optimizer steps change, so a state_dict counts as its module."""
    if not walk.optimizers and not walk.optimizer_only:
        return set()
    spans = list(zip(found.starts, found.ends, strict=True))
    optimizer_spans = {spans[i] for i in walk.optimizer_only}
    known = dict(zip(map(id, found.live), spans, strict=True))
    known.update((id(tensor), spans[i]) for i, tensor in walk.sharded.items())
    for parameter in (p for o in walk.optimizers for group in o.param_groups for p in group["params"]):
        span = known.get(id(parameter))
        memory = local_of(parameter) if is_dtensor(parameter) else parameter  # a state_dict() has another DTensor on it
        if span is None and refusal(memory) is None:
            start = address_of(memory)
            span = start, start + extent(memory)
        if span is not None:
            optimizer_spans.add(span)
    return optimizer_spans


def _mark(node: tree.Node, overlaps: Mapping[str, tree.Overlap]) -> tree.Node:
    """The tree with each overlap added to its tensor."""
    match node:
        case tree.Tensor(fqn) | tree.Array(fqn) if fqn in overlaps:
            return msgspec.structs.replace(node, overlap=overlaps[fqn])
        case tree.Dict():
            return _marked(node, overlaps)
        case tree.Sequence(_, items):
            return tree.with_elements(node, (_mark(child, overlaps) for child in items))
        case tree.Composite():
            return msgspec.structs.replace(node, inner=tuple((name, _mark(child, overlaps)) for name, child in node.inner))
        case _:
            return node


def _marked(node: tree.Dict, overlaps: Mapping[str, tree.Overlap]) -> tree.Dict:
    attributes = None if node.attributes is None else _marked(node.attributes, overlaps)
    return tree.Dict(node.kind, tuple((key, _mark(child, overlaps)) for key, child in node.items), attributes)
