"""Layouts of slots. They are checked as they arrive, so that later code never reads outside a slot."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from checkpointd.daemon.accounts import Account, Charge
from checkpointd.daemon.protocol.wire import TENSORS_MAX, Layout, WireTensor
from checkpointd.errors import CheckpointdError, UsageError
from checkpointd.layout.boxes import Box
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.pipeline.pages import page_up
from checkpointd.pipeline.shard import TENSOR_ALIGNMENT, ShardTensor

LAYOUTS_KEPT = 4
SLICE = 128
"""Tensors that are checked in one turn of the loop."""
TENSOR_COST = 1024
"""Bytes that one tensor of a layout takes at most, without its name and its dimensions."""
DIMENSION_COST = 120
"""Bytes that one dimension of a tensor takes at most: an int in its shape, and two in its box."""


@dataclass(frozen=True, slots=True)
class KnownLayout:
    """A whole layout: the bytes of the buffer, the tensors in it, and the memory that the layout itself costs."""

    nbytes: int
    tensors: tuple[ShardTensor, ...]
    cost: int


class KnownLayouts:
    """The layouts of one client by number, charged to its account: LAYOUTS_KEPT, and one whose parts still arrive."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._known: OrderedDict[int, tuple[KnownLayout, Charge]] = OrderedDict()
        self._coming: _Coming | None = None
        self._refused: int | None = None
        """The layout of which a part was refused, while more parts may still arrive."""

    def add(self, part: Layout) -> Iterator[None]:
        """Take one part; the last part completes the layout. A step takes about a millisecond.

        UsageError if the layout is invalid, SidecarFullError if there is no room for it. Its other parts are then ignored.
        """
        if part.layout == self._refused:
            self._refused = part.layout if part.more else None
            return
        self._refused = None
        if self._coming is None or self._coming.number != part.layout:
            self._give_up()
            self._coming = _Coming(part.layout, part.nbytes, Charge(self._account))
        coming = self._coming
        try:
            yield from coming.add(part)
        except BaseException:
            self._give_up()
            self._refused = part.layout if part.more else None
            raise
        if not part.more:
            self._forget(part.layout)
            self._known[part.layout] = (coming.whole(), coming.charge)
            self._coming = None
        while len(self._known) > LAYOUTS_KEPT:
            self._forget(next(iter(self._known)))

    def get(self, number: int) -> KnownLayout | None:
        """The layout, if it is known. The layout that was not used for longest is forgotten first."""
        known = self._known.get(number)
        if known is None:
            return None
        self._known.move_to_end(number)
        return known[0]

    def clear(self) -> None:
        """The client has gone."""
        self._give_up()
        for number in list(self._known):
            self._forget(number)

    def _give_up(self) -> None:
        if self._coming is not None:
            self._coming.charge.release()
            self._coming = None

    def _forget(self, number: int) -> None:
        known = self._known.pop(number, None)
        if known is not None:
            known[1].release()


@dataclass(slots=True)
class _Coming:
    """A layout whose parts still arrive; each tensor is checked against those before it."""

    number: int
    nbytes: int
    charge: Charge
    tensors: list[ShardTensor] = field(default_factory=list)
    boxes: set[tuple[str, Box]] = field(default_factory=set)
    end: int = 0

    def add(self, part: Layout) -> Iterator[None]:
        """UsageError if a tensor lies outside the layout, overlaps another one, or is invalid."""
        if self.nbytes != part.nbytes or self.nbytes != page_up(max(self.nbytes, 1)):
            raise UsageError(f"a layout has {part.nbytes} bytes; it must be a whole number of pages, and the same in all parts")
        if len(self.tensors) + len(part.tensors) > TENSORS_MAX:
            raise UsageError(f"a layout has more than {TENSORS_MAX} tensors: save fewer, larger ones")
        for at in range(0, len(part.tensors), SLICE):
            some = part.tensors[at : at + SLICE]
            self.charge.resize(self.charge.nbytes + sum(map(cost_of, some)))
            for tensor in some:
                self._add(_tensor(tensor))
            yield

    def _add(self, tensor: ShardTensor) -> None:
        if tensor.offset < self.end or tensor.offset % TENSOR_ALIGNMENT:
            raise UsageError(
                f"{tensor.fqn} overlaps the tensor before it, or its offset {tensor.offset} is not a multiple of 64"
            )
        if (tensor.fqn, tensor.box) in self.boxes:
            raise UsageError("a layout names one box of a tensor twice")
        self.end = tensor.offset + tensor.nbytes
        if self.end > self.nbytes:
            raise UsageError(f"the tensors end at byte {self.end} of a layout of {self.nbytes}")
        self.boxes.add((tensor.fqn, tensor.box))
        self.tensors.append(tensor)

    def whole(self) -> KnownLayout:
        return KnownLayout(self.nbytes, tuple(self.tensors), self.charge.nbytes)


def cost_of(tensor: WireTensor) -> int:
    """Bytes that a tensor of a layout takes at most."""
    return (
        TENSOR_COST + 4 * len(tensor.fqn) + DIMENSION_COST * max(map(len, (tensor.shape, tensor.box.offsets, tensor.box.sizes)))
    )


def shard_tensors(layout: Layout) -> tuple[ShardTensor, ...]:
    """The tensors of a layout in one part; UsageError as in `KnownLayouts.add`."""
    coming = _Coming(layout.layout, layout.nbytes, Charge(Account(sys.maxsize)))
    for _ in coming.add(layout):
        pass
    return coming.whole().tensors


def _tensor(tensor: WireTensor) -> ShardTensor:
    if tensor.dtype not in ITEM_BYTES:
        raise UsageError(f"{tensor.fqn} has the dtype {tensor.dtype!r}, which this daemon does not know; upgrade it")
    try:
        tensor.box.check(tensor.shape)
    except CheckpointdError as error:
        raise UsageError(f"{tensor.fqn}: {error}") from error
    item = ITEM_BYTES[tensor.dtype]
    nbytes = tensor.box.numel() * item
    return ShardTensor(tensor.fqn, tensor.dtype, tensor.shape, tensor.box, tensor.scope, tensor.offset, nbytes, item)


def wire_tensors(tensors: tuple[ShardTensor, ...]) -> tuple[WireTensor, ...]:
    """`tensors` as messages have them."""
    return tuple(WireTensor(t.fqn, t.dtype, t.shape, t.box, t.scope, t.offset) for t in tensors)
