"""Matches composite tensors: sparse, nested and quantized ones, and those of wrapper classes.

Invariants
  COMPOSITE-1  If the user's tensor is of the stored kind with the same context, and its inner tensors have the stored shapes,
      they are filled in place. Otherwise a tensor of the kind is made once all bytes are verified, and the user's tensor gets
      its content.
  COMPOSITE-2  A composite tensor is loaded whole, or stays as it is and is reported.
  COMPOSITE-3  Filled inner tensors that contradict each other are an error, before anything uses them.
  COMPOSITE-4  If a rank stored its part of a DTensor as it is, only a rank that holds the same part loads it.
  COMPOSITE-5  An element of a DTensor is loaded only with the context of the rank that stored it (`content.check_contexts`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch

from checkpointd.errors import FormatError, StateError
from checkpointd.layout import tree
from checkpointd_client.capture.aliasing import MemoryRegion, overlapping_pairs
from checkpointd_client.capture.dtypes import ALL, DTYPES
from checkpointd_client.capture.tensor_kinds import contexts, tiles
from checkpointd_client.capture.tensor_kinds.blocks import BLOCKS, inner_held, range_of
from checkpointd_client.capture.tensor_kinds.kind import Apart, Inner, OuterFacts, TensorKind, swap
from checkpointd_client.capture.tensor_kinds.sharded import LOCAL, OWN_PART, ROWS, boxes_of, is_elementwise, within
from checkpointd_client.capture.tensors import PLAIN_TENSORS, is_meta
from checkpointd_client.restore import building
from checkpointd_client.restore.bind import Binding, allocate
from checkpointd_client.restore.building import Build
from checkpointd_client.restore.matching import conversion
from checkpointd_client.restore.matching.context import Context, StepOrder
from checkpointd_client.restore.matching.match_optimizer import Trial
from checkpointd_client.sharding.dtensor import LocalShard, ReplicaGroup, held_by, is_dtensor


def match_composite(match: Context, live: Any, node: tree.Node, fqn: str) -> Build | None:
    """Match a live tensor with a stored one, if either is composite."""
    if not isinstance(node, tree.Tensor | tree.Composite) or not isinstance(live, torch.Tensor):
        return match.note_kind(live, node, fqn)
    if is_dtensor(live):
        _match_sharded(match, live, node, fqn)
        return None
    if isinstance(node, tree.Composite) and node.kind == OWN_PART:
        match.mismatched.append(_other_part(node, fqn))
        return None
    _, known = match.composites.setdefault(id(live), (live, node))
    if known is not node and not match.are_alike(known, node):
        match.mismatched.append(
            f"{fqn}: this tensor is tied to another one now, and was stored as different tensors of different values"
        )
        return None
    kind = match.classes.kind_of(live)
    if isinstance(node, tree.Composite) and kind is not None and _is_alike(node, kind, live):
        return _match_alike(match, live, node, kind, fqn)
    shape = conversion.shape_of(match, node)
    _convert(match, node, live, (0, math.prod(shape)), shape, fqn)
    return None


def _is_alike(node: tree.Composite, kind: TensorKind, live: torch.Tensor) -> bool:
    """Whether both are of one kind, shape and dtype; a class that keeps blocks only shows its dtype to others."""
    facts = OuterFacts.of(live)
    dtype = str(facts.dtype).removeprefix("torch.")
    return node.kind == kind.name and node.shape == facts.shape and (node.dtype == dtype or kind.name in BLOCKS)


def _match_alike(match: Context, live: torch.Tensor, node: tree.Composite, kind: TensorKind, fqn: str) -> Build | None:
    """Match a live tensor with a stored one of the same kind, shape and dtype."""
    if is_meta(live):
        _replace(match, live, node, fqn, partial(_swap_meta, live, fqn))
        return None
    facts = _facts(node, fqn)
    try:
        apart = kind.apart(live)
        context = _context(match, node)
    except (StateError, ValueError, RuntimeError) as error:
        match.mismatched.append(f"{fqn}: {words(node)} is stored, and this one cannot be filled: {error}")
        return None
    was, is_now = kind.packed_shape(context), kind.packed_shape(apart.context)
    if was != is_now and None not in (was, is_now):
        match.mismatched.append(f"{fqn}: {words(node)} is stored, packed from the shape {was}, and this one from {is_now}")
        return None
    inner = _inner(node, kind, fqn)
    if _fits_in_place(match, kind, apart, context, inner) and _is_its_memory(kind, live, apart):
        trial = Trial(match)
        for name, one in apart.inner.items():
            match.tensor(one, inner[name], f"{fqn}.{name}")
        if trial.fits(fqn):
            trial.join()
            match.finally_do(partial(_checked, kind, facts, apart.inner, context, fqn))
        return None
    if kind.name in BLOCKS:
        _convert(match, node, live, (0, live.numel()), tuple(live.shape), fqn)
        return None
    if kind.swaps:
        _replace(match, live, node, fqn, partial(_refill, kind, live, fqn))
        return None
    return match.do(StepOrder.CONTAINERS, fresh(match, node, fqn, live.device), partial(_refill, kind, live, fqn))


def _replace(match: Context, live: Any, node: tree.Composite, fqn: str, apply: Callable[[torch.Tensor], None]) -> None:
    """Make the stored tensor anew, for `apply` to swap it with `live`."""
    if weakref.getweakrefcount(live):
        match.mismatched.append(
            f"{fqn}: {words(node)} is stored whose parts do not fit into this one as it is, and torch cannot change it, since "
            "something, such as compiled code, holds a weak reference to it: load before that is made"
        )
        return
    device = None if is_meta(live) else live.device
    match.do(StepOrder.CONTAINERS, fresh(match, node, fqn, device), apply)


def conflicts(match: Context) -> list[str]:
    """A line for every two tensors that share memory now, if one is ordinary and gets the values of a composite tensor, and
    the other gets other values. Drops the matches of both.
    """
    plain = [one for one in match.converted if type(one.live) in PLAIN_TENSORS and match.classes.kind_of(one.live) is None]
    if not plain:
        return []
    bound = [(fqn, live) for fqn, live in match.bindings.filled() if not is_meta(live)]
    fqns = [*(one.fqn for one in plain), *(fqn for fqn, _ in bound)]
    regions = [MemoryRegion.of(live) for live in (*(one.live for one in plain), *(live for _, live in bound))]
    lines: list[str] = []
    dropped: set[str] = set()
    for i, j in map(sorted, overlapping_pairs(regions)):
        both = i < j < len(plain) and regions[i].equals(regions[j]) and match.are_alike(plain[i].node, plain[j].node)
        if i < len(plain) and not both:
            lines.append(f"{fqns[i]} and {fqns[j]} share memory now, and were stored as different tensors")
            dropped |= {fqns[i], fqns[j]}
    match.bindings.drop(dropped)
    match.converted = [one for one in match.converted if one.fqn not in dropped]
    return lines


# --- DTensors -------------------------------------------------------------------------------------------------------


def _match_sharded(match: Context, live: Any, node: tree.Tensor | tree.Composite, fqn: str) -> None:
    """Match this rank's part of a DTensor: in place if the stored rows are of its class, otherwise converted."""
    local, shape = live._local_tensor, conversion.shape_of(match, node)
    kind = match.classes.kind_of(local)
    try:
        held = held_by(live, fqn)
    except StateError as error:
        match.mismatched.append(str(error))
        return
    if isinstance(node, tree.Composite) and node.kind == OWN_PART:
        _match_own_part(match, local, node, held, fqn)
        return
    if kind is not None and kind.name not in BLOCKS and held.is_whole:
        match.tensor(local, node, fqn)  # as if it were no DTensor
        return
    wanted = range_of(held)
    if shape != tuple(live.shape) or is_meta(local):
        match.mismatched.append(f"{fqn}: {_words(match, node)} is stored, and {words_of(live, kind)} is there now")
        return
    part, inside = (node, held) if wanted is None else _containing(match, node, held, wanted)
    try:
        targets = _sharded_targets(match, local, kind, part, inside, fqn)
    except ValueError:  # the class cannot be taken apart, or its blocks do not fit into this part
        targets = None
    if targets is None and wanted is None:
        match.mismatched.append(
            f"{fqn}: {_words(match, node)} is stored, and {words_of(live, kind)} is there now; this rank holds other parts of "
            "it than consecutive whole rows"
        )
    elif targets is None and wanted is not None:
        _convert(match, node, local, wanted, tuple(local.shape), fqn)
    trial = Trial(match)
    for child, memory, here, scratch in targets or ():
        place, held_here = match.stored.place(child.fqn), None if here is None or here.is_whole else here
        match.bindings.add(
            Binding(child, place, memory.device, memory.detach(), memory, held=held_here, scratch=scratch),
            again=child.fqn in match.bindings.by_fqn,
        )
    trial.join()


def _match_own_part(match: Context, local: torch.Tensor, node: tree.Composite, held: LocalShard, fqn: str) -> None:
    """Match a part that this rank stored as it is."""
    inner = dict(node.inner).get(LOCAL)
    if not isinstance(inner, tree.Composite):
        raise FormatError(f"{fqn}: a {OWN_PART} tensor cannot have the inner tensors {', '.join(dict(node.inner))}", fqn=fqn)
    if _context(match, node) == boxes_of(held):
        match.tensor(local, inner, fqn)
    else:
        match.mismatched.append(_other_part(node, fqn))


def _other_part(node: tree.Composite, fqn: str) -> str:
    return (
        f"{fqn}: {words(node)} is stored, of which every rank keeps its own part as it is: load it with as many ranks as "
        "saved it, into a DTensor with the mesh and the placements that it was saved with"
    )


def _containing(match: Context, node: tree.Node, held: LocalShard, wanted: tuple[int, int]) -> tuple[tree.Node, LocalShard]:
    """The part of `node` that has all rows that this rank holds, and what it holds of that part."""
    if not isinstance(node, tree.Composite) or node.kind != ROWS:
        return node, held
    start, row = 0, max(1, math.prod(node.shape[1:]))
    for _, part in node.inner:
        stop = start + (conversion.shape_of(match, part) or (0,))[0]
        if start * row <= wanted[0] and wanted[1] <= stop * row:
            return part, within(held, start, stop)
        start = stop
    return node, held


Target = tuple[tree.Tensor, torch.Tensor, LocalShard | None, bool]
"""An inner tensor that is stored, this rank's memory, the part that it is (None for all of it), and whether it is scratch."""


def _sharded_targets(
    match: Context, local: torch.Tensor, kind: TensorKind | None, node: tree.Node, held: LocalShard, fqn: str
) -> list[Target] | None:
    """The memory of this rank that the stored inner tensors fill; None if they cannot fill it as they are."""
    if kind is None:
        same = isinstance(node, tree.Tensor) and match.stored.place(node.fqn).dtype == str(local.dtype).removeprefix("torch.")
        return [(node, local, held, False)] if same and isinstance(node, tree.Tensor) else None
    if not isinstance(node, tree.Composite) or node.kind != kind.name:
        return None
    apart, context = kind.apart(local), _context(match, node)
    blocks = BLOCKS.get(kind.name)
    essence = tiles.essence if blocks is None else blocks.essence
    nodes = _inner(node, kind, kind.name)
    inner = {name: child for name, child in nodes.items() if isinstance(child, tree.Tensor)}
    if not _alike(essence(apart.context), essence(context)) or not nodes.keys() == inner.keys() == apart.inner.keys():
        return None
    if not held.parts:
        return []
    if blocks is None and tiles.is_tiled(kind.name, apart):
        return _tiled_targets(match, apart, inner, held, fqn)
    if blocks is None and not is_elementwise(apart, local):
        return None
    targets: list[Target] = []
    for name, memory in apart.inner.items():
        here, is_part = held, True
        if blocks is not None:
            size = local.numel() // memory.numel() if memory.numel() else 0
            here = inner_held(blocks, name, held, size, tuple(memory.shape), ReplicaGroup(0, 1))
            is_part = name in blocks.elements | blocks.items
        if not _is_stored_as(match, inner[name], here.shape, memory.dtype):
            return None
        targets.append((inner[name], memory, here if is_part else None, False))
    return targets


def _is_stored_as(match: Context, node: tree.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    place = match.stored.place(node.fqn)
    return (place.shape, f"torch.{place.dtype}") == (shape, str(dtype))


def _tiled_targets(
    match: Context, apart: Apart, inner: dict[str, tree.Tensor], held: LocalShard, fqn: str
) -> list[Target] | None:
    """Like `_sharded_targets`, for a class with an item for each tile. Stored tiles may be smaller if their items are equal."""
    targets: list[Target] = []
    smaller: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, memory in apart.inner.items():
        place = match.stored.place(inner[name].fqn)
        here = tiles.items_wanted(held, place.shape, tuple(memory.shape))
        if here is None or not _is_stored_as(match, inner[name], place.shape, memory.dtype):
            return None
        sizes, target = here.parts[0].box.sizes, memory
        if sizes != tuple(memory.shape):
            target = allocate(place.fqn, sizes, DTYPES[place.dtype], torch.device("cpu"))
            smaller[name] = memory, target
        targets.append((inner[name], target, here, target is not memory))
    if smaller:
        match.finally_do(partial(_fill_tiles, smaller, fqn))
    return targets


def _fill_tiles(smaller: dict[str, tuple[torch.Tensor, torch.Tensor]], fqn: str) -> None:
    for name, (memory, stored) in smaller.items():
        found = tiles.common(stored, memory.shape)
        if found is None:
            raise StateError(
                f"{fqn}: the ranks that saved it had a {name} each, and these differ. A rank that now holds more of the tensor "
                f"has only one {name} for all of it. Load it with as many ranks as saved it, or a multiple of that number, or "
                "load it with cast=True into an ordinary tensor"
            )
        memory.copy_(found)


# --- conversions ----------------------------------------------------------------------------------------------------


def _convert(
    match: Context,
    node: tree.Tensor | tree.Composite,
    live: torch.Tensor,
    wanted: tuple[int, int],
    shape: tuple[int, ...],
    fqn: str,
) -> None:
    """Fill `live`, of the class or dtype that it has, with the range `wanted` of the stored tensor, if that is allowed.

    `shape`: the shape that these elements have.
    """
    kind = match.classes.kind_of(live)
    has_numbers = live.is_floating_point() or live.is_quantized
    can = has_numbers and not live.is_nested and live.layout is torch.strided and not is_meta(live)
    can = can and (kind is None or kind.rounds)
    alike = can and tuple(live.shape) == shape and wanted[1] - wanted[0] == math.prod(shape)
    if not alike or not (match.cast or match.low_bit):
        hint = " (load(..., cast=True) converts it)" if alike else ""
        if kind is not None and not kind.rounds and isinstance(node, tree.Composite):
            hint = "; load it into a tensor of the stored shape, or, with cast=True, an ordinary tensor"
        if is_meta(live):
            hint = (
                "; it is on the meta device: make it a tensor of the stored kind, or, for cast=True, give it memory "
                "first, as to_empty(device=...) of the module does"
            )
        hint = _unknown(match, node) or hint
        match.mismatched.append(f"{fqn}: {_words(match, node)} is stored, and {words_of(live, kind)} is there now{hint}")
        return
    if wanted[0] < wanted[1]:
        # Classes round float32 to their blocks; many take no float64.
        fill = partial(_take, live, shape, None if kind is None else torch.float32)
        conversion.convert(match, node, live, wanted, fill, fqn)


def _unknown(match: Context, node: tree.Node) -> str:
    """What to do if tensors of the stored class cannot be made here; "" if they can."""
    if not isinstance(node, tree.Composite) or node.kind in (ROWS, OWN_PART):
        return ""
    try:
        match.classes.kind(node.kind)
    except StateError as error:
        return f". The stored one cannot be made: {error}"
    return ""


def _take(live: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None, row: torch.Tensor) -> None:
    live.copy_(row.reshape(shape).to(dtype))


def fresh(match: Context, node: tree.Composite, fqn: str, device: torch.device | None = None) -> Build:
    """Make a stored composite tensor anew, once its inner tensors are filled."""
    if node.kind == OWN_PART:
        match.mismatched.append(_other_part(node, fqn))
        return building.given(None)
    facts = _facts(node, fqn)
    try:
        kind = match.classes.kind(node.kind)
        context = _context(match, node)
    except StateError as error:
        match.mismatched.append(f"{fqn}: {error}")
        return building.given(None)
    nodes = _inner(node, kind, fqn)
    builds = {name: match.fresh(child, device) for name, child in nodes.items()}
    owners = {
        name: place.owner
        for name, child in nodes.items()
        if isinstance(child, tree.Tensor) and (place := match.stored.place(child.fqn)).whole
    }

    def build() -> torch.Tensor:
        inner = {name: one() for name, one in builds.items()}
        # Nested tensors fit each other only if they have the same offsets object, so it is shared as it was.
        inner |= {name: match.inner.setdefault((owner, device), inner[name]) for name, owner in owners.items()}
        return _made(kind, facts, inner, context, fqn)

    return match.late(build)


def _made(kind: TensorKind, facts: OuterFacts, inner: Inner, context: Any, fqn: str) -> torch.Tensor:
    try:
        return kind.made(facts, inner, context)
    except Exception as error:  # of torch's checks, or of the user's class
        raise FormatError(f"{fqn}: the stored {kind.name} tensor cannot be made: {error}", fqn=fqn) from error


def _checked(kind: TensorKind, facts: OuterFacts, inner: Inner, context: Any, fqn: str) -> None:
    try:
        kind.check(facts, inner, context)
    except (ValueError, RuntimeError) as error:
        raise FormatError(f"{fqn}: the stored {kind.name} tensor contradicts itself: {error}", fqn=fqn) from error


def _refill(kind: TensorKind, live: Any, fqn: str, made: torch.Tensor) -> None:
    try:
        with torch.no_grad():
            kind.refill(live, made)
    except Exception as error:  # of torch, or of the user's class
        raise StateError(
            f"{fqn}: it cannot get the content of the stored {kind.name} tensor, and the objects are now loaded in part: "
            f"{error}"
        ) from error


def _swap_meta(live: torch.Tensor, fqn: str, made: torch.Tensor) -> None:
    if not is_meta(live):
        return  # another name of the same tensor
    try:
        swap(live, made)
    except (RuntimeError, AttributeError) as error:
        raise StateError(f"{fqn}: it is on the meta device, and torch cannot give it memory in place: {error}") from error


def _facts(node: tree.Composite, fqn: str) -> OuterFacts:
    dtype = ALL.get(node.dtype)
    if dtype is None:
        raise FormatError(f"{fqn} has the dtype {node.dtype!r}, which this torch does not have", fqn=fqn)
    return OuterFacts(node.shape, dtype, node.requires_grad)


def _context(match: Context, node: tree.Composite) -> Any:
    return contexts.decode(node.context, match.classes.in_context)


def _inner(node: tree.Composite, kind: TensorKind, fqn: str) -> dict[str, tree.Node]:
    """The inner tensors by name; FormatError if they are not those of `kind`."""
    found = dict(node.inner)
    strange = kind.names is not None and not kind.needed <= found.keys() <= kind.names
    if strange or len(found) != len(node.inner) or not all(isinstance(n, tree.Tensor | tree.Composite) for n in found.values()):
        raise FormatError(f"{fqn}: a {kind.name} tensor cannot have the inner tensors {', '.join(found) or 'none'}", fqn=fqn)
    return found


def _fits_in_place(match: Context, kind: TensorKind, apart: Apart, context: object, inner: dict[str, tree.Node]) -> bool:
    """Whether the stored inner tensors can fill those of the live tensor."""
    blocks = BLOCKS.get(kind.name)
    one, two = (apart.context, context) if blocks is None else map(blocks.essence, (apart.context, context))
    if apart.inner.keys() != inner.keys() or not _alike(one, two):
        return False
    for name, live in apart.inner.items():
        node = inner[name]
        if not isinstance(node, tree.Tensor):
            continue
        place = match.stored.place(node.fqn)
        if tuple(live.shape) != place.shape or str(live.dtype) != f"torch.{place.dtype}":
            return False
    return True


def _is_its_memory(kind: TensorKind, live: torch.Tensor, apart: Apart) -> bool:
    """Whether the inner tensors are the memory of `live`. If its class copies them, they have other addresses each time."""
    again = kind.apart(live).inner
    return all(
        one.data_ptr() == again[name].data_ptr()
        for name, one in apart.inner.items()
        if type(one) in PLAIN_TENSORS and one.numel()
    )


def _alike(one: Any, two: Any) -> bool:
    try:
        return type(one) is type(two) and bool(one == two)
    except Exception:  # the comparison of a class in a context, which may raise anything
        return False


def _words(match: Context, node: tree.Tensor | tree.Composite) -> str:
    if isinstance(node, tree.Composite):
        return words(node)
    place = match.stored.place(node.fqn)
    return f"a tensor of {place.dtype}{list(place.shape)}"


def words(node: tree.Composite) -> str:
    """A stored composite tensor in words."""
    if node.kind == OWN_PART and node.inner and isinstance(node.inner[0][1], tree.Composite):
        return words(msgspec.structs.replace(node, kind=node.inner[0][1].kind))
    return f"a {node.kind} tensor of {node.dtype}{list(node.shape)}"


def words_of(live: Any, kind: TensorKind | None) -> str:
    """A live tensor in words."""
    facts = OuterFacts.of(live)
    is_plain = type(live) in PLAIN_TENSORS or is_dtensor(live)
    name = f"{kind.name} " if kind is not None else "" if is_plain else f"{contexts.name_of(type(live))} "
    return f"a {name}tensor of {str(facts.dtype).removeprefix('torch.')}{list(facts.shape)}"
