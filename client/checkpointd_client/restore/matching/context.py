"""State that the matches of all kinds of objects share: the stored content, and the results so far.

A load changes the user's objects in steps, once every tensor is filled.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
import torch

from checkpointd.layout import tree
from checkpointd_client.capture import scalars
from checkpointd_client.capture.modules import Modules
from checkpointd_client.capture.tensor_kinds.classes import ONLY_BUILT_IN, TensorClasses
from checkpointd_client.restore import building
from checkpointd_client.restore.answers import HandedOutStates
from checkpointd_client.restore.bind import Bindings, Equal
from checkpointd_client.restore.building import Build
from checkpointd_client.restore.content import RankContent
from checkpointd_client.restore.stored import Stored, StridedView
from checkpointd_client.sharding.dtensor import FlatShard, is_dtensor


class StepOrder(IntEnum):
    """When a step is taken. Loading an object may draw random numbers or set learning rates, so the objects that hold these
    come later.
    """

    CONTAINERS = 0
    MODULES = 1
    OTHERS = 2
    OPTIMIZERS = 3
    GENERATORS = 4
    RANDOMNESS = 5


@dataclass(frozen=True, slots=True)
class Step:
    """One change to the user's objects: `apply` gets the value that `build` makes."""

    turn: StepOrder
    build: Build
    apply: Callable[[Any], object]


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """A tensor of the user's that gets the values of the tensor stored at `node`, which is of another class, by `fill`."""

    fqn: str
    live: torch.Tensor
    node: tree.Node
    fill: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Groups:
    """For each param group of an optimizer the number of the stored group whose settings it gets, None for one that keeps its
    own; or None, if nothing is loaded. `stored`: how many groups are stored.
    """

    of: list[int | None] | None
    stored: int

    @property
    def are_as_stored(self) -> bool:
        return self.of == list(range(self.stored))


class Context(ABC):
    """The stored content, the changes that the load would make, and everything that does not fit."""

    def __init__(
        self,
        stored: Stored,
        content: RankContent,
        modules: Modules,
        *,
        cast: bool,
        equal: Equal,
        answers: HandedOutStates | None = None,
        classes: TensorClasses = ONLY_BUILT_IN,
    ) -> None:
        self.bindings = Bindings()
        self.classes = classes
        self.materialised: dict[int, str] = {}
        """By the id() of each tensor on the meta device that gets memory, the stored tensor that fills it."""
        self.composites: dict[int, tuple[torch.Tensor, tree.Node]] = {}
        """By its id(), each tensor that is composite or gets the values of one, and the stored tensor that fills it."""
        self.addresses: set[int] = set()
        """Where the memory begins that these tensors have got."""
        self.low_bit = False
        """Whether the state of a low-bit optimizer is matched, whose tensors may be converted."""
        self.checks: list[Callable[[], None]] = []
        """Run once every tensor is filled, before the steps."""
        self.converted: list[Conversion] = []
        """Filled after the checks."""
        self.inner: dict[object, torch.Tensor] = {}
        """New inner tensors of composite tensors, by their stored tensor and device."""
        self.has_late = False
        """Whether some values can be made only when every tensor is filled."""
        self.filled = False
        """Whether every tensor is filled, so that composite tensors can be made."""
        self.will_load = True
        self.steps: list[Step] = []
        self.optimizers: list[Callable[[], None]] = []
        """The matches of optimizers, which come after those of all modules."""
        self.schedulers: list[Callable[[], None]] = []
        """The matches of their schedulers, which come after those of all optimizers."""
        self.groups: dict[int, Groups] = {}
        """The param groups of each optimizer, by its id()."""
        self.renamed: dict[str, str] = {}
        """By FQN of a stored parameter, that of the one here which gets its values, if its module has renamed it."""
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.elsewhere: list[str] = []
        """Unexpected values that only some of the saving ranks had."""
        self.mismatched: list[str] = []
        self.stored = stored
        self.per_rank_left: list[str] = []
        self.stateless: list[str] = []
        """The FQNs of parameter states that are not stored."""
        self.modules = modules
        self.cast = cast
        self.stand_in = False
        """Whether new values whose class this process does not have get stand-ins."""
        self._equal = equal
        self.answers = answers or HandedOutStates()
        """The states that objects hand out, of those that may be asked."""
        self.resharded = content.resharded
        """Whether another number of ranks has saved it."""
        self.spread = content.spread
        """Whether one rank has saved it, and several load it."""
        self._content, self._excluded = content, frozenset(content.excluded)
        self._left_below = {path[:at] for path in content.left for at in _dots(path)}

    def note_kind(self, live: object, node: tree.Node, fqn: str) -> Build | None:
        self.mismatched.append(f"{fqn}: {building.words(node)} is stored, and {scalars.type_name(live)} is there now")
        return None

    def is_shared(self, fqn: str) -> bool:
        """Whether the saving ranks held the stored tensor `fqn` together."""
        return self.stored.place(fqn).owner not in self._content.owners

    def are_alike(self, one: tree.Node, two: tree.Node) -> bool:
        """Whether both nodes store the same values, in any order of keys."""
        if isinstance(one, tree.Dict) and isinstance(two, tree.Dict):
            ours, theirs = ({tree.encode(key): child for key, child in node.items} for node in (one, two))
            return ours.keys() == theirs.keys() and all(self.are_alike(child, theirs[key]) for key, child in ours.items())
        if isinstance(one, tree.Composite) and isinstance(two, tree.Composite):
            heads = (tree.encode(msgspec.structs.replace(node, inner=())) for node in (one, two))
            inner, others = dict(one.inner), dict(two.inner)
            same = len(set(heads)) == 1 and inner.keys() == others.keys()
            return same and all(self.are_alike(child, others[name]) for name, child in inner.items())
        if isinstance(one, tree.Tensor) and isinstance(two, tree.Tensor):
            was, other = self.stored.place(one.fqn), self.stored.place(two.fqn)
            if not was.whole or not other.whole or (was.dtype, was.shape) != (other.dtype, other.shape):
                return one.fqn == two.fqn
            return was.owner == other.owner or self._equal(was.owner, other.owner)
        return tree.encode(one) == tree.encode(two)

    def are_equal(self, one: str, two: str) -> bool:
        """Whether two stored tensors are the same, bit for bit."""
        return one == two or (self.stored.entries[one] == self.stored.entries[two] and self._equal(one, two))

    def was_excluded(self, fqn: str) -> bool:
        """Whether the save left out the frozen parameter `fqn`."""
        return fqn in self._excluded

    def note_missing(self, fqn: str) -> None:
        if fqn in self._content.left:
            self.per_rank_left.append(fqn)
        elif fqn not in self._excluded:
            self.missing.append(fqn)

    def note_unexpected(self, fqn: str) -> None:
        is_elsewhere = any(fqn[:at] in self._content.elsewhere for at in _dots(fqn))
        (self.elsewhere if is_elsewhere else self.unexpected).append(fqn)

    def note_different(self, fqn: str) -> None:
        """Note a value that training needs and that differed between the saving ranks."""
        self.mismatched.append(
            f"{fqn}: the ranks that saved it had different values, and the number of ranks has changed since: "
            "load it with as many ranks as saved it"
        )

    def left_below(self, fqn: str) -> list[str]:
        """The FQNs at or below `fqn` whose values differed between the saving ranks."""
        if fqn not in self._left_below:
            return []
        return sorted(path for path in self._content.left if path == fqn or path.startswith(f"{fqn}."))

    def do(self, turn: StepOrder, build: Build, apply: Callable[[Any], object]) -> Build | None:
        """Note a step. Returns None, since the parent has nothing to change."""
        self.steps.append(Step(turn, build, apply))
        return None

    def is_composite(self, live: object) -> bool:
        """Whether `live` is a composite tensor, or one whose local part is."""
        one = live._local_tensor if is_dtensor(live) else live
        return isinstance(one, torch.Tensor) and self.classes.kind_of(one) is not None

    def dict_of(self, node: tree.Dict, parts: Mapping[Hashable, Build]) -> Build:
        """A dict like the stored one, of other parts."""
        return building.dict_of(node.kind, parts, None if node.attributes is None else self.fresh(node.attributes))

    def finally_do(self, check: Callable[[], None]) -> None:
        """Run `check` once every tensor is filled."""
        self.checks.append(check)

    def note_filled(self) -> None:
        """Every tensor is filled."""
        self.filled = True

    def late(self, build: Build) -> Build:
        """`build`, which needs filled tensors: until then, a tensor without elements stands for its value."""
        self.has_late = True
        return lambda: build() if self.filled else torch.empty(0)

    @abstractmethod
    def device_of(self, kind: str) -> torch.device:
        """This process's device of a kind; the CPU if it has none."""

    @abstractmethod
    def value(self, live: Any, node: tree.Node, fqn: str) -> Build | None:
        """Match one value of the user's, of any kind."""

    @abstractmethod
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
        """Match one tensor. `replaceable`: another tensor may take its place, and does if the stored one had other strides;
        `like` and `was` decide on these as in `fresh`.
        """

    @abstractmethod
    def fresh(
        self,
        node: tree.Node,
        device: torch.device | None = None,
        like: torch.Tensor | FlatShard | None = None,
        was: StridedView | None = None,
    ) -> Build:
        """Make the stored value anew: on `device`, or on the kind of device that it was saved from. A tensor of the shape of
        `like` gets its sharding, and its strides if it had those of `was`.

        With cast=True it also gets the dtype of `like`, unless its stored dtype differs from that of `was`, the stored
        counterpart of `like`: a master copy in float32 stays one.
        """


def _dots(path: str) -> list[int]:
    """The positions at which `path` can be cut between keys, and its end."""
    return [dot.start() for dot in re.finditer(r"\.", path)] + [len(path)]
