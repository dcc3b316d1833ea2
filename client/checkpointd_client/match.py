"""The match of what is stored against what the user's objects hold: where each stored tensor goes, and what fits nowhere.

Nothing is touched and nothing is allocated here. The outcome is a set of slots, steps to take once the slots are filled, and
three lists of what did not match.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from functools import partial
from operator import setitem
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from checkpointd.errors import StateError
from checkpointd.layout import tree
from checkpointd_client import building, objects, tensors, values
from checkpointd_client.answers import Answers
from checkpointd_client.building import Build
from checkpointd_client.content import Content
from checkpointd_client.dtypes import NAMES, is_floating
from checkpointd_client.flat import HeldTensor, Several
from checkpointd_client.match_objects import hands_out_weights, match_object
from checkpointd_client.modules import Modules
from checkpointd_client.sharding import FlatShard, held_by, is_sharded, local_of
from checkpointd_client.slots import Equal, Slot, Slots
from checkpointd_client.steps import Step, Turn
from checkpointd_client.stored import Place, Stored

_CPU = torch.device("cpu")


class Matcher:
    """One match. A method that returns a Build wants its value put into the parent; None leaves the parent's value in place."""

    def __init__(
        self,
        stored: Stored,
        content: Content,
        modules: Modules,
        *,
        cast: bool,
        equal: Equal,
        answers: Answers | None = None,
    ) -> None:
        self.slots = Slots()
        self.steps: list[Step] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.elsewhere: list[str] = []
        """Unexpected as well, but for what only some of the saving ranks had."""
        self.mismatched: list[str] = []
        self.stored = stored
        self.per_rank_left: list[str] = []
        self.stateless: list[str] = []
        """Where the state of a parameter would stand, and none is stored."""
        self.modules = modules
        self.cast = cast
        self._equal = equal
        self.answers = answers or Answers()
        """What the objects hand out that may be asked for their state."""
        self._content, self._excluded = content, frozenset(content.excluded)
        self._left_below = {path[:at] for path in content.left for at in _dots(path)}

    # --- what is there -------------------------------------------------------------------------------------------

    def value(self, live: Any, node: tree.Node, fqn: str) -> Build | None:
        """Match one value of the user's, whatever it is."""
        if live is None:
            self.per_rank_left += self.left_below(fqn)
            return self.fresh(node)
        if isinstance(live, torch.Tensor | FlatShard):
            return self.tensor(live, node, fqn)
        if isinstance(live, HeldTensor | Several):
            return self._held(live.places if isinstance(live, Several) else (live,), node, fqn)
        if type(live) is np.ndarray:
            return self._array(live, node, fqn)
        if isinstance(live, dict) and not objects.is_object(live):
            return self._counter(live, node, fqn) if isinstance(live, collections.Counter) else self.mapping(live, node, fqn)
        if isinstance(live, list | tuple) and not objects.is_object(live):
            return self._sequence(live, node, fqn)
        if isinstance(live, set | frozenset):
            return self._set(live, node, fqn)
        if values.is_scalar(live):
            return building.constant(node) if building.is_scalar(node) else self.note_kind(live, node, fqn)
        return self._object(live, node, fqn)

    def note_kind(self, live: object, node: tree.Node, fqn: str) -> Build | None:
        self.mismatched.append(f"{fqn}: {building.words(node)} is stored, and {values.type_name(live)} is there now")
        return None

    # --- tensors -------------------------------------------------------------------------------------------------

    def tensor(self, live: torch.Tensor | FlatShard, node: tree.Node, fqn: str, *, replaceable: bool = False) -> Build | None:
        try:
            held = held_by(live, fqn) if is_sharded(live) else None
        except StateError as error:
            self.mismatched.append(str(error))
            return None
        why = tensors.refusal(live) if held is None and isinstance(live, torch.Tensor) else None
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
        memory = local_of(live) if is_sharded(live) else live.detach()  # type: ignore[union-attr]  # a FlatShard is sharded
        slot = Slot(node, place, live.device, memory, live, replaceable, held)
        self.slots.add(slot)
        return (lambda: slot.value) if replaceable else None

    def _held(self, places: tuple[HeldTensor, ...], node: tree.Node, fqn: str) -> Build | None:
        """Memory for parts of a stored tensor, whose own shape need not be theirs."""
        if not isinstance(node, tree.Tensor):
            return self.note_kind(places[0], node, fqn)
        place = self.stored.place(node.fqn)
        for one in places:
            dtype = NAMES.get(one.tensor.dtype, str(one.tensor.dtype))
            converted = self.cast and one.tensor.is_floating_point() and is_floating(place.dtype)
            if not self._fits(fqn, (dtype if converted else place.dtype, place.shape), (dtype, one.held.shape)):
                return None
        for one in places:
            slot = Slot(node, place, one.tensor.device, one.tensor.detach(), one.tensor, held=one.held)
            self.slots.add(slot, again=one is not places[0])
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
        self.slots.add(Slot(node, place, _CPU, tensors.array_tensor(live, fqn), live))
        return None

    def _fits(self, fqn: str, stored: tuple[str, tuple[int, ...]], live: tuple[str, tuple[int, ...]]) -> bool:
        wrong = [
            f"{what} {was} is stored, and {now} is there now"
            for what, was, now in zip(("dtype", "shape"), stored, live, strict=True)
            if was != now
        ]
        if wrong:
            self.mismatched.append(f"{fqn}: {'; '.join(wrong)}")
        return not wrong

    # --- what is not there yet -----------------------------------------------------------------------------------

    def fresh(
        self,
        node: tree.Node,
        device: torch.device | None = None,
        like: torch.Tensor | FlatShard | None = None,
        was: Place | None = None,
    ) -> Build:
        """Whatever is stored, made anew: on `device`, or on the kind of device where it was. A tensor of the shape of `like`
        gets its sharding and its strides.

        With cast=True it gets the dtype of `like` as well, unless it was of another dtype than the tensor at `was`, which
        stood where `like` stands now: a master copy in float32 stays one.
        """
        if isinstance(node, tree.Tensor | tree.Array):
            place = self.stored.place(node.fqn)
            if isinstance(node, tree.Array):
                tensors.array_dtype(node.dtype, place.dtype)
            where = _CPU if isinstance(node, tree.Array) else device or _device(node.device)
            slot = Slot(node, place, where, replaceable=True)
            if like is not None and isinstance(node, tree.Tensor):
                self._made_like(slot, like, was)
            self.slots.add(slot)
            return lambda: slot.value
        if isinstance(node, tree.Dict):
            children = self.stored.children(node)
            return building.dict_of(node.kind, {key: self.fresh(child, device, like, was) for key, child in children})
        if isinstance(node, tree.Sequence):
            return building.sequence_of(node.kind, [self.fresh(child, device, like, was) for child in node.items])
        return building.constant(node)

    def _made_like(self, slot: Slot, like: torch.Tensor | FlatShard, was: Place | None) -> None:
        if slot.place.shape != tuple(like.shape):
            return
        if is_sharded(like):
            slot.like, slot.held = like, held_by(like, slot.fqn)
        elif isinstance(like, torch.Tensor):
            slot.stride = tensors.stride_like(like)  # fused optimizers take parameter and state in the order of memory
        follows = was is None or was.dtype == slot.place.dtype
        if self.cast and follows and like.is_floating_point() and is_floating(slot.place.dtype):
            slot.dtype = like.dtype

    # --- containers ----------------------------------------------------------------------------------------------

    def mapping(self, live: MutableMapping[Any, Any], node: tree.Node, fqn: str) -> Build | None:
        """Match a dict key by key, to be changed in place; an empty one takes whatever is stored."""
        if not isinstance(node, tree.Dict):
            return self.note_kind(live, node, fqn)
        if not live:
            self.per_rank_left += self.left_below(fqn)
            return self.do(Turn.CONTAINERS, self.fresh(node), live.update)
        stored = dict(self.stored.children(node))
        for key, child in live.items():
            path = _join(fqn, key)
            if key not in stored:
                self._note_absent(child, path)
                continue
            build = self.value(child, stored.pop(key), path)
            if build is not None:
                self.do(Turn.CONTAINERS, build, partial(setitem, live, key))
        for key in stored:
            self.note_unexpected(_join(fqn, key))
        return None

    def _counter(self, live: collections.Counter[Any], node: tree.Node, fqn: str) -> Build | None:
        if not isinstance(node, tree.Dict):
            return self.note_kind(live, node, fqn)
        return self.do(Turn.CONTAINERS, self.fresh(node), partial(_refill, live))

    def _sequence(self, live: list[Any] | tuple[Any, ...], node: tree.Node, fqn: str) -> Build | None:
        kind = "list" if isinstance(live, list) else "Size" if isinstance(live, torch.Size) else "tuple"
        if not isinstance(node, tree.Sequence) or node.kind != kind or hasattr(live, "_fields"):
            return self.note_kind(live, node, fqn)
        if not _holds_objects(live):
            build = self.fresh(node)
            return self.do(Turn.CONTAINERS, build, partial(setitem, live, slice(None))) if isinstance(live, list) else build
        for i in range(len(node.items), len(live)):
            self.note_missing(f"{fqn}.{i}")
        for i in range(len(live), len(node.items)):
            self.note_unexpected(f"{fqn}.{i}")
        pairs = enumerate(zip(live, node.items, strict=False))
        changes = {i: change for i, (child, stored) in pairs if (change := self.value(child, stored, f"{fqn}.{i}")) is not None}
        if isinstance(live, tuple):
            return (lambda: tuple(changes[i]() if i in changes else old for i, old in enumerate(live))) if changes else None
        for i, change in changes.items():
            self.do(Turn.CONTAINERS, change, partial(setitem, live, i))
        return None

    def _set(self, live: set[Any] | frozenset[Any], node: tree.Node, fqn: str) -> Build | None:
        if not isinstance(node, tree.Sequence) or node.kind != ("set" if isinstance(live, set) else "frozenset"):
            return self.note_kind(live, node, fqn)
        build = self.fresh(node)
        return self.do(Turn.CONTAINERS, build, partial(_refill, live)) if isinstance(live, set) else build

    def _note_absent(self, live: object, fqn: str) -> None:
        """A tensor that is trained with, say, is not left half as it was without a word that ends the load."""
        if isinstance(live, torch.Tensor) and fqn in self._content.left:
            self.note_different(fqn)
        else:
            self.note_missing(fqn)

    def is_shared(self, fqn: str) -> bool:
        """Whether ranks held the stored tensor `fqn` together."""
        return self.stored.place(fqn).owner not in self._content.owners

    def are_alike(self, one: tree.Node, two: tree.Node) -> bool:
        """Whether the same is stored at both, whatever the order of keys."""
        if isinstance(one, tree.Dict) and isinstance(two, tree.Dict):
            ours, theirs = ({tree.encode(key): child for key, child in node.items} for node in (one, two))
            return ours.keys() == theirs.keys() and all(self.are_alike(child, theirs[key]) for key, child in ours.items())
        if isinstance(one, tree.Tensor) and isinstance(two, tree.Tensor):
            was, other = self.stored.place(one.fqn), self.stored.place(two.fqn)
            if not was.whole or not other.whole or (was.dtype, was.shape) != (other.dtype, other.shape):
                return one.fqn == two.fqn
            return was.owner == other.owner or self._equal(was.owner, other.owner)
        return tree.encode(one) == tree.encode(two)

    def note_missing(self, fqn: str) -> None:
        if fqn in self._content.left:
            self.per_rank_left.append(fqn)
        elif fqn not in self._excluded:
            self.missing.append(fqn)

    def note_unexpected(self, fqn: str) -> None:
        is_elsewhere = any(fqn[:at] in self._content.elsewhere for at in _dots(fqn))
        (self.elsewhere if is_elsewhere else self.unexpected).append(fqn)

    def note_different(self, fqn: str) -> None:
        """What training cannot go on without, and the saving ranks had different values of."""
        self.mismatched.append(
            f"{fqn}: the ranks that saved it had different values, each its own, and the number of ranks has changed since: "
            "load it with as many ranks as saved it"
        )

    def left_below(self, fqn: str) -> list[str]:
        """What the saving ranks had different values of, at or below `fqn`."""
        if fqn not in self._left_below:
            return []
        return sorted(path for path in self._content.left if path == fqn or path.startswith(f"{fqn}."))

    def do(self, turn: Turn, build: Build, apply: Callable[[Any], object]) -> Build | None:
        """Note a step; what it changes is no matter of the parent's."""
        self.steps.append(Step(turn, build, apply))
        return None

    def _object(self, live: Any, node: tree.Node, fqn: str) -> Build | None:
        matched = match_object(self, live, node, fqn)
        return None if matched else self.note_kind(live, node, fqn)


def with_weights(live: object, node: tree.Node, stored: Stored, fqn: str = "") -> Iterator[tuple[str, object]]:
    """By FQN, the objects in `live` that the match may want to ask for their state: those for which weights are stored."""
    if isinstance(live, Mapping) and not objects.is_object(live):
        for key, child in stored.children(node) if isinstance(node, tree.Dict) else ():
            if key in live:
                yield from with_weights(live[key], child, stored, _join(fqn, key))
    elif isinstance(live, list | tuple) and not objects.is_object(live):
        for i, (one, child) in enumerate(zip(live, node.items if isinstance(node, tree.Sequence) else (), strict=False)):
            yield from with_weights(one, child, stored, f"{fqn}.{i}")
    elif hands_out_weights(live, node, stored):
        yield fqn, live


def _dots(path: str) -> list[int]:
    """Where `path` can be cut between keys, and its end."""
    return [i for i, letter in enumerate(path) if letter == "."] + [len(path)]


def _join(fqn: str, key: Hashable) -> str:
    return f"{fqn}.{values.key_text(key)}" if fqn else values.key_text(key)


def _refill(live: Any, value: Any) -> None:
    live.clear()
    live.update(value)


def _holds_objects(value: object) -> bool:
    """Whether anything inside must be kept (tensors, arrays, objects); plain data is replaced whole."""
    if isinstance(value, torch.Tensor | np.ndarray) or objects.is_object(value):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_objects, value.values()))
    return isinstance(value, list | tuple) and any(map(_holds_objects, value))


def _device(kind: str) -> torch.device:
    """This process's device of the kind where a tensor was when it was saved; the host where there is none."""
    if kind == "cpu":
        return _CPU
    try:
        backend = torch.get_device_module(kind)
    except RuntimeError:  # a kind that this torch does not have
        return _CPU
    if not backend.is_available():
        return _CPU
    return torch.device(kind, backend.current_device()) if hasattr(backend, "current_device") else torch.device(kind)
