"""Matches stored tensors with the user's objects: where each stored tensor goes, and which fit nowhere.

A match changes and allocates nothing. Its result is a set of bindings, the steps to take once the bindings are filled, and
lists of the values that did not match.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from operator import setitem
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from checkpointd.errors import FormatError, StateError
from checkpointd.layout import tree
from checkpointd.layout.strides import check_dense, contiguous_stride
from checkpointd_client.capture import objects, scalars, tensors
from checkpointd_client.capture.dtypes import NAMES, is_floating
from checkpointd_client.capture.modules import Modules
from checkpointd_client.capture.plain import classes, values
from checkpointd_client.capture.plain.containers import NAMESPACES, is_container, pairs_in
from checkpointd_client.capture.tensor_kinds.classes import TensorClasses
from checkpointd_client.restore import building
from checkpointd_client.restore.answers import HandedOutStates
from checkpointd_client.restore.bind import Binding, Equal
from checkpointd_client.restore.building import Build
from checkpointd_client.restore.content import RankContent
from checkpointd_client.restore.matching.context import Context, StepOrder
from checkpointd_client.restore.matching.dcp_forms import with_numbers
from checkpointd_client.restore.matching.match_composite import fresh, match_composite
from checkpointd_client.restore.matching.match_objects import hands_out_weights, match_object
from checkpointd_client.restore.matching.materialise import materialise
from checkpointd_client.restore.stored import Stored, StridedView
from checkpointd_client.sharding.dtensor import FlatShard, held_by, is_sharded, local_of
from checkpointd_client.sharding.flat_range import LocalShardTensor, MultiTarget

_CPU = torch.device("cpu")
_Row = list[Any] | tuple[Any, ...] | collections.deque[Any]


class Matcher(Context):
    """One match. If a method returns a Build, the caller puts its value into the parent; None leaves the parent as it is."""

    # --- existing values -------------------------------------------------------------------------------------------

    def value(self, live: Any, node: tree.Node, fqn: str) -> Build | None:
        if live is None:
            self.per_rank_left += self.left_below(fqn)
            return self.fresh(node)
        if isinstance(live, torch.Tensor | FlatShard):
            return self.tensor(live, node, fqn)
        if isinstance(live, LocalShardTensor | MultiTarget):
            return self._held(live.places if isinstance(live, MultiTarget) else (live,), node, fqn)
        if type(live) is np.ndarray:
            return self._array(live, node, fqn)
        if isinstance(live, dict) and not objects.is_object(live):
            return self._counter(live, node, fqn) if isinstance(live, collections.Counter) else self.mapping(live, node, fqn)
        if isinstance(live, list | tuple | collections.deque) and not objects.is_object(live):
            return self._sequence(live, node, fqn)
        if isinstance(live, set | frozenset):
            return self._set(live, node, fqn)
        if type(live) in NAMESPACES and not objects.is_object(live):
            return self._namespace(live, node, fqn)
        if scalars.is_scalar(live):
            return self._scalar(live, node, fqn)
        return None if match_object(self, live, node, fqn) else self.note_kind(live, node, fqn)

    def _scalar(self, live: object, node: tree.Node, fqn: str) -> Build | None:
        if not building.is_scalar(node):
            return self.note_kind(live, node, fqn)
        build = building.constant(node, known=type(live))
        if type(live) in values.MUTABLE and isinstance(node, tree.LibraryValue) and node.kind == type(live).__name__:
            return self.do(StepOrder.CONTAINERS, build, partial(values.refill, live))
        return build

    # --- tensors -------------------------------------------------------------------------------------------------

    def tensor(
        self,
        live: torch.Tensor | FlatShard,
        node: tree.Node,
        fqn: str,
        *,
        replaceable: bool = False,
        like: torch.Tensor | FlatShard | None = None,
        was: StridedView | None = None,
    ) -> Build | None:
        if isinstance(node, tree.Composite) or self.is_composite(live):
            return match_composite(self, live, node, fqn)
        try:
            held = held_by(live, fqn) if is_sharded(live) else None
        except StateError as error:
            self.mismatched.append(str(error))
            return None
        has_no_memory = tensors.is_meta(live)
        why = None
        if held is None and isinstance(live, torch.Tensor) and not has_no_memory:
            is_plain = self.classes.is_plain_parameter(live)
            why = tensors.refusal(live.detach() if is_plain else live, in_module=isinstance(live, nn.Parameter))
        if why is not None:
            self.mismatched.append(f"{fqn}: it cannot be filled: {why}")
            return None
        if not isinstance(node, tree.Tensor):
            return self.note_kind(live, node, fqn)
        place = self.stored.place(node.fqn)
        dtype = NAMES.get(live.dtype, str(live.dtype))
        converted = self.cast and live.is_floating_point() and is_floating(place.dtype)
        if not self._fits(fqn, (dtype if converted else place.dtype, place.shape), (dtype, tuple(live.shape))):
            if place.dtype != dtype and live.is_floating_point() and is_floating(place.dtype):
                self.mismatched[-1] += " (load(..., cast=True) converts floating dtypes)"
            return None
        if has_no_memory:
            materialise(self, live, node, place, held, _device(node.device), fqn)
            return None
        memory = local_of(live) if is_sharded(live) else live.detach()  # type: ignore[union-attr]  # a FlatShard is sharded
        binding = Binding(node, place, live.device, memory, live, replaceable, held)
        stride = self._stride(node, like, was) if replaceable else None
        if replaceable and stride != _stride_of(live, tensors.stride_of):
            binding.vacate()
            binding.stride = stride or contiguous_stride(place.shape)
        self.bindings.add(binding)
        return (lambda: binding.value) if replaceable else None

    def _held(self, places: tuple[LocalShardTensor, ...], node: tree.Node, fqn: str) -> Build | None:
        """Match memory for parts of a stored tensor, which may have other shapes than the tensor."""
        if not isinstance(node, tree.Tensor):
            return self.note_kind(places[0], node, fqn)
        place = self.stored.place(node.fqn)
        for one in places:
            dtype = NAMES.get(one.tensor.dtype, str(one.tensor.dtype))
            converted = self.cast and one.tensor.is_floating_point() and is_floating(place.dtype)
            if not self._fits(fqn, (dtype if converted else place.dtype, place.shape), (dtype, one.held.shape)):
                return None
        for one in places:
            binding = Binding(node, place, one.tensor.device, one.tensor.detach(), one.tensor, held=one.held)
            self.bindings.add(binding, again=one is not places[0])
        return None

    def _array(self, live: NDArray[np.generic], node: tree.Node, fqn: str) -> Build | None:
        if not isinstance(node, tree.Array):
            return self.note_kind(live, node, fqn)
        place = self.stored.place(node.fqn)
        dtype = tensors.array_dtype(node.dtype, place.dtype)
        shape = place.shape if tensors.is_native(dtype) else place.shape[:-1]
        if not self._fits(fqn, (dtype.str, shape), (live.dtype.str, live.shape)):
            return None
        if not tensors.in_place(live):
            return self.fresh(node)
        self.bindings.add(Binding(node, place, _CPU, tensors.array_tensor(live, fqn), live))
        return None

    def _fits(self, fqn: str, stored: tuple[str, tuple[int, ...]], live: tuple[str, tuple[int, ...]]) -> bool:
        if stored == live:
            return True
        wrong = [
            f"{what} {was} is stored, and {now} is there now"
            for what, was, now in zip(("dtype", "shape"), stored, live, strict=True)
            if was != now
        ]
        self.mismatched.append(f"{fqn}: {'; '.join(wrong)}")
        return False

    # --- what is not there yet -----------------------------------------------------------------------------------

    def fresh(
        self,
        node: tree.Node,
        device: torch.device | None = None,
        like: torch.Tensor | FlatShard | None = None,
        was: StridedView | None = None,
    ) -> Build:
        if isinstance(node, tree.Tensor | tree.Array):
            place = self.stored.place(node.fqn)
            if isinstance(node, tree.Array):
                dtype = tensors.array_dtype(node.dtype, place.dtype)
                if node.stride is not None and not tensors.is_native(dtype):
                    raise FormatError(f"{node.fqn} is an array of dtype {dtype}, which cannot have strides", fqn=node.fqn)
            where = _CPU if isinstance(node, tree.Array) else device or _device(node.device)
            binding = Binding(node, place, where, replaceable=True)
            binding.stride = self._stride(node, like, was)
            if like is not None and isinstance(node, tree.Tensor):
                self._made_like(binding, like, was)
            self.bindings.add(binding)
            return lambda: binding.value
        if isinstance(node, tree.Composite):
            return fresh(self, node, _name_of(node), device)
        if isinstance(node, tree.Dict):
            children = self.stored.children(node, stand_in=self.stand_in)
            return self.dict_of(node, {key: self.fresh(child, device, like, was) for key, child in children})
        if isinstance(node, tree.Sequence):
            parts = [self.fresh(child, device, like, was) for child in node.items]
            return building.sequence_of(node, parts, stand_in=self.stand_in)
        return building.constant(node, stand_in=self.stand_in)

    def _made_like(self, binding: Binding, like: torch.Tensor | FlatShard, was: StridedView | None) -> None:
        if binding.place.shape != tuple(like.shape):
            return
        if is_sharded(like):
            binding.like, binding.held = like, held_by(like, binding.fqn)
            binding.stride = binding.stride or contiguous_stride(binding.place.shape)
        follows = was is None or was.dtype == binding.place.dtype
        if self.cast and follows and like.is_floating_point() and is_floating(binding.place.dtype):
            binding.dtype = like.dtype

    def _stride(
        self, node: tree.Tensor | tree.Array, like: torch.Tensor | FlatShard | None, was: StridedView | None
    ) -> tuple[int, ...] | None:
        """The strides of a new tensor; None if row-major. State that had the strides of its parameter gets those of `like`:
        fused optimizers take parameter and state in the order of memory.
        """
        stride, shape = node.stride, self.stored.place(node.fqn).shape
        if stride is not None:
            check_dense(node.fqn, stride, shape)
        if like is None or tuple(like.shape) != shape:
            return stride
        followed = stride is None if was is None else stride == self.stored.stride(was.fqn)
        return _stride_of(like, tensors.stride_like) if followed else stride

    def device_of(self, kind: str) -> torch.device:
        return _device(kind)

    # --- containers ----------------------------------------------------------------------------------------------

    def mapping(self, live: MutableMapping[Any, Any], node: tree.Node, fqn: str) -> Build | None:
        """Match a dict key by key and change it in place; an empty dict takes everything that is stored."""
        if not isinstance(node, tree.Dict) or node.kind in tree.NAMESPACES:
            return self.note_kind(live, node, fqn)
        return self._items(live, node, fqn)

    def _namespace(self, live: Any, node: tree.Node, fqn: str) -> Build | None:
        if not isinstance(node, tree.Dict) or node.kind != NAMESPACES[type(live)]:
            return self.note_kind(live, node, fqn)
        return self._items(vars(live), node, fqn)

    def _items(self, live: MutableMapping[Any, Any], node: tree.Dict, fqn: str) -> Build | None:
        if not live:
            self.per_rank_left += self.left_below(fqn)
            return self.do(StepOrder.CONTAINERS, self.fresh(node), partial(_update, live))
        if node.attributes is not None and type(live) in objects.ATTRIBUTED:
            self._attributes(live, node.attributes, fqn)
        stored = dict(self.stored.children(with_numbers(node, live)))
        for key, child in live.items():
            path = _join(fqn, key)
            if key not in stored:
                self._note_absent(child, path)
                continue
            build = self.value(child, stored.pop(key), path)
            if build is not None:
                self.do(StepOrder.CONTAINERS, build, partial(setitem, live, key))
        for key in stored:
            self.note_unexpected(_join(fqn, key))
        return None

    def _attributes(self, live: MutableMapping[Any, Any], node: tree.Dict, fqn: str) -> None:
        """Match the attributes of a dict. The versions in that of a module tell how its tensors are to be read."""
        build = self.fresh(node)
        versions, now = dict(self.stored.children(node)).get(objects.METADATA), vars(live).get(objects.METADATA)
        if versions is not None and now is not None and building.value_of(versions) != now:
            self.mismatched.append(
                f"{fqn}: it is a module's state_dict(), and parts of that module had another version when it was saved: pass "
                "the module itself, which converts what it loads"
            )
        else:
            self.do(StepOrder.CONTAINERS, build, vars(live).update)

    def _counter(self, live: collections.Counter[Any], node: tree.Node, fqn: str) -> Build | None:
        if not isinstance(node, tree.Dict):
            return self.note_kind(live, node, fqn)
        return self.do(StepOrder.CONTAINERS, self.fresh(node), partial(_refill, live))

    def _sequence(self, live: _Row, node: tree.Node, fqn: str) -> Build | None:
        if not isinstance(node, tree.Sequence) or node.kind != _kind(live) or not _is_named_alike(live, node):
            return self.note_kind(live, node, fqn)
        if isinstance(node, tree.Deque) and isinstance(live, collections.deque) and node.maxlen != live.maxlen:
            self.mismatched.append(f"{fqn}: a deque with maxlen {node.maxlen} is stored, and {live.maxlen} is there now")
            return None
        if not _holds_objects(live):
            build = building.sequence_of(node, [self.fresh(child) for child in node.items], known=type(live))
            if isinstance(live, tuple):
                return build
            fill = partial(setitem, live, slice(None)) if isinstance(live, list) else partial(_replace, live)
            return self.do(StepOrder.CONTAINERS, build, fill)
        for i in range(len(node.items), len(live)):
            self.note_missing(f"{fqn}.{i}")
        for i in range(len(live), len(node.items)):
            self.note_unexpected(f"{fqn}.{i}")
        pairs = enumerate(zip(live, node.items, strict=False))
        changes = {i: change for i, (child, stored) in pairs if (change := self.value(child, stored, f"{fqn}.{i}")) is not None}
        if isinstance(live, tuple):
            kept = [changes.get(i, building.given(old)) for i, old in enumerate(live)]
            return building.sequence_of(node, kept, known=type(live)) if changes else None
        for i, change in changes.items():
            self.do(StepOrder.CONTAINERS, change, partial(setitem, live, i))
        return None

    def _set(self, live: set[Any] | frozenset[Any], node: tree.Node, fqn: str) -> Build | None:
        if not isinstance(node, tree.Sequence) or node.kind != ("set" if isinstance(live, set) else "frozenset"):
            return self.note_kind(live, node, fqn)
        build = self.fresh(node)
        return self.do(StepOrder.CONTAINERS, build, partial(_refill, live)) if isinstance(live, set) else build

    def _note_absent(self, live: object, fqn: str) -> None:
        """Note a value that is not stored; a tensor that differed between the saving ranks ends the load."""
        if isinstance(live, torch.Tensor) and fqn in self._content.left:
            self.note_different(fqn)
        else:
            self.note_missing(fqn)


def matched(
    state: MutableMapping[str, Any],
    stored: Stored,
    content: RankContent,
    modules: Modules,
    *,
    equal: Equal,
    answers: HandedOutStates | None,
    classes: TensorClasses,
    cast: bool = False,
    stand_in: bool = False,
    will_load: bool = True,
) -> Matcher:
    """Match the objects in `state`, without client_state. `will_load`: whether the match leads to a load."""
    match = Matcher(stored, content, modules, cast=cast, equal=equal, answers=answers, classes=classes)
    match.stand_in, match.will_load = stand_in, will_load
    match.mapping(state, stored.state, "")
    for match_later in (*match.optimizers, *match.schedulers):
        match_later()
    return match


def with_weights(live: object, node: tree.Node, stored: Stored, fqn: str = "") -> Iterator[tuple[str, object]]:
    """By FQN, the objects in `live` that the match may ask for their state, because weights are stored for them."""
    if isinstance(live, list | tuple | collections.deque) and not objects.is_object(live):
        for i, (one, child) in enumerate(zip(live, tree.elements(node), strict=False)):
            yield from with_weights(one, child, stored, f"{fqn}.{i}")
    elif is_container(live) and not objects.is_object(live):
        there = dict(pairs_in(live))
        for key, child in stored.children(node, stand_in=True):
            if key in there:
                yield from with_weights(there[key], child, stored, _join(fqn, key))
    elif hands_out_weights(live, node, stored):
        yield fqn, live


def _stride_of(
    live: torch.Tensor | FlatShard, of_plain: Callable[[torch.Tensor], tuple[int, ...] | None]
) -> tuple[int, ...] | None:
    """The strides of the whole tensor of which `live` is all or a part; None if row-major."""
    return tensors.stride_of_whole(local_of(live), tuple(live.shape)) if is_sharded(live) else of_plain(live)  # type: ignore[arg-type]  # not a FlatShard


def _name_of(node: tree.Composite) -> str:
    """The FQN of a composite tensor, from that of its first inner tensor."""
    name, first = node.inner[0] if node.inner else ("", None)
    found = _name_of(first) if isinstance(first, tree.Composite) else next(iter(tree.fqns(first)), "")
    return found.removesuffix(f".{name}")


def _join(fqn: str, key: Hashable) -> str:
    return f"{fqn}.{scalars.key_text(key)}" if fqn else scalars.key_text(key)


def _update(live: MutableMapping[Any, Any], value: Any) -> None:
    if isinstance(value, Mapping):
        live.update(value)
        if {type(live), type(value)}.issubset(objects.ATTRIBUTED):
            vars(live).update(vars(value))
    else:
        live.update(vars(value))


def _replace(live: collections.deque[Any], value: Iterable[Any]) -> None:
    live.clear()
    live.extend(value)


def _refill(live: Any, value: Any) -> None:
    live.clear()
    live.update(value)
    if type(live) in objects.ATTRIBUTED:
        vars(live).update(vars(value))


def _holds_objects(value: object) -> bool:
    """Whether it contains anything to keep (tensors, arrays, objects); plain data is replaced as a whole."""
    if isinstance(value, torch.Tensor | np.ndarray) or objects.is_object(value):
        return True
    return any(_holds_objects(child) for _, child in pairs_in(value))


def _kind(live: _Row) -> str:
    if isinstance(live, tuple):
        return "Size" if isinstance(live, torch.Size) else "namedtuple" if classes.is_namedtuple(live) else "tuple"
    return "list" if isinstance(live, list) else "deque"


def _is_named_alike(live: _Row, node: tree.Sequence) -> bool:
    """Whether a named tuple has the class and the fields that are stored; true of every other sequence."""
    if not isinstance(node, tree.NamedTuple):
        return True
    cls: Any = type(live)
    return (cls.__module__, cls.__qualname__, cls._fields) == (node.module, node.qualname, node.fields)


def _device(kind: str) -> torch.device:
    """This process's device of the kind that a tensor was saved from; the CPU if it has none."""
    if kind == "cpu":
        return _CPU
    try:
        backend = torch.get_device_module(kind)
    except RuntimeError:  # this torch does not have the kind
        return _CPU
    if not backend.is_available():
        return _CPU
    return torch.device(kind, backend.current_device()) if hasattr(backend, "current_device") else torch.device(kind)
