"""Bindings: the places in the user's objects, existing or still to be made, that load targets fill.

Invariants
  BINDING-1  A stored tensor that any binding needs as a whole is read once, into one target, and copied to its other bindings.
      If all of its bindings are local shards, each of them is a target.
  BINDING-2  Bindings that were tied when saved are tied after loading if their memory is made here and none is sharded. If the
      user's objects hold them apart, each gets a copy.
  BINDING-3  No memory is filled with two different stored tensors. If bindings are tied now, two stored tensors that are equal
      bit for bit count as one.
  BINDING-4  Every binding gets the stored values in its own dtype. They are converted at most once: never first to the dtype of
      another binding.
  BINDING-5  New memory has the strides that it had when it was saved, unless BINDING-2 ties it to memory with other strides.
      If an optimizer's state had the strides of its parameter, it has those of the parameter here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from checkpointd.errors import FormatError, StateError
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.regions import slices
from checkpointd.layout.strides import contiguous_stride
from checkpointd_client.capture.aliasing import MemoryRegion, address_of, extent, overlapping, overlapping_pairs
from checkpointd_client.capture.dtypes import DTYPES, copy_bits, empty, overlaps_itself
from checkpointd_client.capture.tensors import array_dtype, stride_like, tensor_array
from checkpointd_client.restore.stored import Entries, StridedView
from checkpointd_client.sharding.dtensor import LocalShard, is_sharded, sharded_like

Equal = Callable[[str, str], bool]
"""Whether two stored tensors of one dtype and shape are the same, bit for bit."""


@dataclass(frozen=True, slots=True)
class Target:
    """The memory that one stored tensor is read into: `tensor` is filled in place, and is detached. It may have any strides and
    device, but no two of its elements share memory. Its dtype is the stored one, unless another was asked for. `held`: the
    parts of the stored tensor that it holds, if it does not hold all of it.
    """

    fqn: str
    tensor: torch.Tensor
    held: LocalShard | None = None

    def boxes(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes of the stored tensor that belong here, each with the view of `tensor` that it fills."""
        if self.held is None:
            yield whole(tuple(self.tensor.shape)), self.tensor
        else:
            yield from ((part.box, part.of(self.tensor)) for part in self.held.parts)


@dataclass(slots=True)
class Binding:
    """One place for one stored tensor. `value`: the tensor or array that the user's containers hold or will hold."""

    node: tree.Tensor | tree.Array
    place: StridedView
    device: torch.device
    """The device of new memory, if there is no live memory."""
    live: torch.Tensor | None = None
    """The existing memory, detached."""
    value: object = None
    replaceable: bool = False
    """Whether a new tensor may take the place of the live one."""
    held: LocalShard | None = None
    """The parts of the stored tensor that belong here, if `live` is the local part of a sharded tensor."""
    like: object = None
    """The sharded tensor whose sharding a new one gets."""
    dtype: torch.dtype | None = None
    """The dtype of a new tensor, if not the stored one."""
    stride: tuple[int, ...] | None = None
    """The strides of a new tensor; None if it is row-major, or if it is sharded and has those of `like`."""
    scratch: bool = False
    """Whether `live` is memory that was allocated for this load, and that only `Context.checks` use."""

    @property
    def fqn(self) -> str:
        return self.place.fqn

    def wanted(self, stored: torch.dtype) -> torch.dtype:
        """The dtype that elements stored as `stored` get here."""
        return self.live.dtype if self.live is not None else self.dtype or stored

    def vacate(self) -> None:
        """Replace the live tensor by a new one with the same dtype, sharding and strides."""
        if self.held is not None and is_sharded(self.value):
            self.like = self.value
        elif self.live is not None:
            self.stride = stride_like(self.live)
        self.dtype = None if self.live is None else self.live.dtype
        self.live = self.value = None


Live = tuple[Binding, MemoryRegion]
"""A binding with existing memory, and that memory."""


class Bindings:
    """All bindings of one load. Each FQN has one binding, and may have more with existing memory (`again`)."""

    def __init__(self) -> None:
        self.by_fqn: dict[str, Binding] = {}
        self._again: list[Binding] = []
        self._wholes: dict[str, frozenset[str]] = {}
        """By FQN, the FQNs that are filled together or not at all."""

    def add(self, binding: Binding, *, again: bool = False) -> None:
        if again:
            self._again.append(binding)
            return
        if binding.fqn in self.by_fqn:
            raise FormatError(f"the state tree names {binding.fqn} twice", fqn=binding.fqn)
        self.by_fqn[binding.fqn] = binding

    def drop_after(self, count: int) -> None:
        """Forget all bindings but the first `count`."""
        for fqn in list(self.by_fqn)[count:]:
            del self.by_fqn[fqn]

    def join_after(self, count: int) -> None:
        """Fill all bindings but the first `count` together, or none of them."""
        whole = frozenset(list(self.by_fqn)[count:])
        self._wholes.update(dict.fromkeys(whole, whole))

    def conflicts(self, equal: Equal) -> Iterator[str]:
        """The reasons why live memory cannot hold the stored tensors, as sentences; drops the bindings concerned."""
        dropped: set[str] = set()
        live = [binding for binding in self._all() if binding.live is not None]
        for fqn, words in [*self._self_overlaps(live), *self._shared(live, equal)]:
            dropped.add(fqn)
            yield words
        self.drop(dropped)

    def drop(self, fqns: Iterable[str]) -> None:
        """Forget the bindings of `fqns`, and those that are filled together with them."""
        for fqn in fqns:
            for one in self._wholes.get(fqn, (fqn,)):
                self.by_fqn.pop(one, None)

    def _all(self) -> Iterator[Binding]:
        yield from self.by_fqn.values()
        yield from (binding for binding in self._again if binding.fqn in self.by_fqn)

    def filled(self) -> list[tuple[str, torch.Tensor]]:
        """The memory of the user's objects, with the FQNs of the stored tensors that fill it."""
        return [(one.fqn, one.live) for one in self._all() if one.live is not None and not one.scratch]

    def _self_overlaps(self, live: Sequence[Binding]) -> Iterator[tuple[str, str]]:
        for binding in live:
            assert binding.live is not None
            if not overlaps_itself(binding.live) or _same_overlap(binding, MemoryRegion.of(binding.live)):
                continue
            if binding.replaceable:
                binding.vacate()
            else:
                yield (
                    binding.fqn,
                    f"{binding.fqn}: its elements share memory now (it is expanded), and did not when it was saved",
                )

    def _shared(self, found: Sequence[Binding], equal: Equal) -> Iterator[tuple[str, str]]:
        for (one, one_region), (two, two_region) in _overlapping_pairs(found):
            if one.live is None or two.live is None or _consistent(one, one_region, two, two_region):
                continue
            if two.replaceable or one.replaceable:
                (two if two.replaceable else one).vacate()
                continue
            if _may_tie(one, one_region, two, two_region) and equal(one.place.owner, two.place.owner):
                self._tie(two.place.owner, one.place.owner)
                continue
            words = f"{one.fqn} and {two.fqn} share memory now, and were stored as different tensors of different values"
            yield one.fqn, words
            yield two.fqn, words

    def _tie(self, owner: str, to: str) -> None:
        """Fill the bindings of the stored tensor `owner` from `to`, which is equal."""
        for binding in self._all():
            if binding.place.owner == owner:
                binding.place = replace(binding.place, owner=to)

    def bind(self, entries: Entries) -> tuple[tuple[Target, ...], list[Callable[[], None]]]:
        """Allocate missing memory and set all values. Returns the targets, and the copies to make once they are filled."""
        groups: dict[str, list[Binding]] = {}
        for binding in self._all():
            groups.setdefault(binding.place.owner, []).append(binding)
        copies: list[Callable[[], None]] = []
        targets: list[Target] = []
        for owner, group in groups.items():
            alone = _filled_alone(group)
            if alone is not None:
                targets.append(Target(owner, alone))
            else:
                targets += _bind_group(owner, entries[owner], group, copies)
        return tuple(targets), copies


def _overlapping_pairs(bindings: Iterable[Binding]) -> Iterator[tuple[Live, Live]]:
    """Every two bindings whose existing memory is shared. Regions are made only where intervals of addresses overlap."""
    live = [(binding, binding.live) for binding in bindings if binding.live is not None]  # others were vacated since
    starts = [address_of(tensor) for _, tensor in live]
    ends = [start + extent(tensor) for start, (_, tensor) in zip(starts, live, strict=True)]
    near = [[(live[i][0], MemoryRegion.of(live[i][1])) for i in group] for group in overlapping(starts, ends)]
    for group in near:
        for i, j in overlapping_pairs([region for _, region in group]):
            yield group[i], group[j]


def _same_overlap(binding: Binding, region: MemoryRegion) -> bool:
    """Whether the binding's elements share memory in the same way as when it was saved."""
    if binding.node.overlap is not None:
        return binding.node.overlap.stride == region.byte_stride
    return region.byte_stride == _expected_stride(binding.place, region.dtype.itemsize)


def _expected_stride(place: StridedView, itemsize: int) -> tuple[int, ...]:
    return tuple(s * itemsize if n > 1 else 0 for n, s in zip(place.shape, place.stride, strict=True))


def _consistent(one: Binding, one_region: MemoryRegion, two: Binding, two_region: MemoryRegion) -> bool:
    """Whether filling both bindings writes the same bytes wherever their memory meets."""
    if one.place.owner == two.place.owner:
        if one.place.whole and two.place.whole and one_region.equals(two_region):
            return True
        origin = _origin(one.place, one_region)
        plain = one.held is None and two.held is None
        if plain and origin is not None and origin == _origin(two.place, two_region):
            return True
    was, is_now = (one.node.overlap, two.node.overlap), (one_region, two_region)
    if was[0] is None or was[1] is None or was[0].group != was[1].group:
        return False
    return was[1].offset - was[0].offset == two_region.start - one_region.start and all(
        (w.stride, (w.conjugate, w.negative)) == (r.byte_stride, r.lazy_bits) for w, r in zip(was, is_now, strict=True) if w
    )


def _may_tie(one: Binding, one_region: MemoryRegion, two: Binding, two_region: MemoryRegion) -> bool:
    """Whether both are the same memory, and whole tensors that may be equal."""
    alike = (one.place.dtype, one.place.shape) == (two.place.dtype, two.place.shape)
    if one.held is None or two.held is None:
        alike = alike and one.held is two.held
    else:
        alike = alike and one.held.alike(two.held)
    return alike and one.place.whole and two.place.whole and one_region.equals(two_region)


def _origin(place: StridedView, region: MemoryRegion) -> int | None:
    """The address at which the owner's elements would begin, if the binding lies in them as when it was saved; else None."""
    if any(region.lazy_bits) or region.byte_stride != _expected_stride(place, region.dtype.itemsize):
        return None
    return region.start - place.offset * region.dtype.itemsize


def _filled_alone(group: list[Binding]) -> torch.Tensor | None:
    """The live memory of the only binding of a stored tensor, if it is the target; None if `_bind_group` must look."""
    binding = group[0]
    if len(group) > 1 or binding.held is not None or not binding.place.whole or binding.live is None:
        return None
    return binding.live if _fillable(binding.live) else None


def _bind_group(
    owner: str, entry: tuple[str, tuple[int, ...]], group: list[Binding], copies: list[Callable[[], None]]
) -> Iterator[Target]:
    """Give memory to all bindings of one stored tensor. Live memory that holds all of it in plain elements is the target."""
    sharded = [binding for binding in group if binding.held is not None]
    plain = [binding for binding in group if binding.held is None]
    filled: torch.Tensor | None = None
    if plain or not all(binding.place.whole for binding in sharded):
        filled = _bind_plain(owner, entry, group, plain, copies)
        yield Target(owner, filled.detach())
    bound: list[Binding] = []
    for binding in sharded:
        if binding.live is None:
            _make_sharded(binding)
        if any(_same_part(binding, other) for other in bound):
            continue
        bound.append(binding)
        assert binding.live is not None
        if filled is None:
            yield Target(owner, binding.live, binding.held)
        else:
            copies.append(_copy_parts(binding, filled))


def _bind_plain(
    owner: str, entry: tuple[str, tuple[int, ...]], group: list[Binding], plain: list[Binding], copies: list[Callable[[], None]]
) -> torch.Tensor:
    """The memory that the whole stored tensor is read into, for the bindings `plain` and the others in `group`."""
    stored, shape = DTYPES[entry[0]], entry[1]
    dtypes = {binding.wanted(stored) for binding in group}
    # If all bindings want one other dtype, the reader converts. If they differ, each is converted from the stored values.
    read = dtypes.pop() if len(dtypes) == 1 else stored
    whole: dict[torch.dtype, torch.Tensor] = {}
    for binding in plain:
        if binding.place.whole and binding.live is not None and _fillable(binding.live):
            whole.setdefault(binding.live.dtype, binding.live)
    for dtype in (read, *(binding.wanted(stored) for binding in plain if binding.live is None)):
        if dtype not in whole:
            new = [binding for binding in plain if binding.live is None and binding.wanted(stored) == dtype]
            made = whole[dtype] = allocate(owner, shape, dtype, _device_of(new or plain or group), _stride_of(new))
            if dtype != read:
                copies.append(partial(_fill, made, whole[read]))
    direct = whole[read]
    for binding in plain:
        if binding.live is None:
            binding.live = _made(binding, whole[binding.wanted(stored)], direct, copies)
            binding.value = _value(binding)
        elif not _tied(binding, direct):
            copies.append(_copy(binding.live, direct, binding.place))
    return direct


def _stride_of(bindings: Iterable[Binding]) -> tuple[int, ...] | None:
    """The strides of new memory that all of `bindings` share. Parts of a tensor need contiguous elements, and arrays need the
    strides that they had.
    """
    if not all(binding.place.whole for binding in bindings):
        return None
    arrays = [binding for binding in bindings if isinstance(binding.node, tree.Array)]
    return next((one.stride for one in arrays or bindings if arrays or one.stride is not None), None)


def _same_part(binding: Binding, other: Binding) -> bool:
    """Whether both are the same memory, so that filling one fills the other."""
    assert binding.live is not None
    assert other.live is not None
    return bool(binding.live.numel()) and MemoryRegion.of(binding.live).equals(MemoryRegion.of(other.live))


def _make_sharded(binding: Binding) -> None:
    assert binding.like is not None
    try:
        binding.live, binding.value = sharded_like(
            binding.like, binding.dtype or DTYPES[binding.place.dtype], binding.device, binding.stride
        )
    except RuntimeError as error:  # out of memory
        raise StateError(f"{binding.fqn}: its part of a new {binding.place.dtype} tensor cannot be made: {error}") from error


def _copy_parts(binding: Binding, filled: torch.Tensor) -> Callable[[], None]:
    """Fill the local part of a sharded tensor from all of the stored one."""

    def copy() -> None:
        assert binding.live is not None
        assert binding.held is not None
        source = filled if binding.place.whole else _view(filled.contiguous(), binding.place)
        with torch.no_grad():
            for part in binding.held.parts:
                _fill(part.of(binding.live), source[slices(whole(tuple(source.shape)), part.box)])

    return copy


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the elements: bit for bit, or converted if the dtypes differ."""
    if target.dtype == source.dtype:
        copy_bits(target, source)
    else:
        target.copy_(source)


def allocate(
    fqn: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, stride: tuple[int, ...] | None = None
) -> torch.Tensor:
    """New memory for the tensor `fqn`. StateError if there is none."""
    try:
        return empty(shape, dtype, device, stride)
    except RuntimeError as error:  # torch raises it for lack of memory and for impossible sizes
        raise StateError(f"{fqn}: there is no memory on {device} for a new {dtype} tensor of shape {shape}: {error}") from error


def _device_of(group: Iterable[Binding]) -> torch.device:
    bindings = list(group)
    return next((binding.device for binding in bindings if binding.place.whole), bindings[0].device)


def _fillable(tensor: torch.Tensor) -> bool:
    return not (tensor.is_conj() or tensor.is_neg() or overlaps_itself(tensor))


def _made(binding: Binding, filled: torch.Tensor, direct: torch.Tensor, copies: list[Callable[[], None]]) -> torch.Tensor:
    """The memory for a binding that has none: tied to `filled` if possible, else new memory that is copied from `direct`."""
    place = binding.place
    # numpy sees only host memory, and a dtype that torch lacks needs the bytes of each item in a row.
    has_its_strides = filled.stride() == (binding.stride or contiguous_stride(place.shape))
    fit_for_array = filled.device.type == "cpu" and has_its_strides
    if fit_for_array or isinstance(binding.node, tree.Tensor):
        if place.whole:
            return filled.detach()
        if filled.is_contiguous():
            return _view(filled, place)
    made = allocate(binding.fqn, place.shape, filled.dtype, binding.device, binding.stride)
    copies.append(_copy(made, direct, place))
    return made


def _value(binding: Binding) -> object:
    assert binding.live is not None
    if isinstance(binding.node, tree.Array):
        return tensor_array(binding.live, array_dtype(binding.node.dtype, binding.place.dtype))
    # Only floating and complex tensors can require gradients.
    wants = binding.node.requires_grad and (binding.live.is_floating_point() or binding.live.is_complex())
    value = binding.live.detach()
    return value.requires_grad_() if wants else value


def _tied(binding: Binding, filled: torch.Tensor) -> bool:
    """Whether filling `filled` fills the binding's live memory as well."""
    assert binding.live is not None
    if binding.live is filled and binding.place.whole:
        return True
    region, base = MemoryRegion.of(binding.live), MemoryRegion.of(filled)
    if binding.place.whole and region.equals(base):
        return True
    return filled.is_contiguous() and region.start < region.end and _origin(binding.place, region) == base.start


def _view(filled: torch.Tensor, place: StridedView) -> torch.Tensor:
    return filled.detach().as_strided(place.shape, place.stride, filled.storage_offset() + place.offset)


def _copy(live: torch.Tensor, filled: torch.Tensor, place: StridedView) -> Callable[[], None]:
    def copy() -> None:
        with torch.no_grad():
            _fill(live, filled if place.whole else _view(filled.contiguous(), place))

    return copy
