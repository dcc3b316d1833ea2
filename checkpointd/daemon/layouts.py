"""Layouts of slots as they come over the socket: checked, so that nothing later reads outside a slot."""

from __future__ import annotations

from collections import OrderedDict

from checkpointd.daemon.memory import Account
from checkpointd.daemon.wire import Layout, WireTensor
from checkpointd.errors import CheckpointdError, UsageError
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.pipeline.pages import page_up
from checkpointd.pipeline.shard import TENSOR_ALIGNMENT, ShardTensor

LAYOUTS_KEPT = 4
TENSOR_COST = 1024
"""Bytes that one tensor of a layout counts for: about what it takes."""


class KnownLayouts:
    """The layouts of one client, by number: the newest LAYOUTS_KEPT, counted in its account."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._known: OrderedDict[int, tuple[int, tuple[ShardTensor, ...]]] = OrderedDict()

    def add(self, layout: Layout) -> None:
        """Take one in. UsageError where it cannot be, or there is no room for it."""
        tensors = shard_tensors(layout)
        self._account.take(len(tensors) * TENSOR_COST)
        self._forget(layout.layout)
        self._known[layout.layout] = (layout.nbytes, tensors)
        while len(self._known) > LAYOUTS_KEPT:
            self._forget(next(iter(self._known)))

    def get(self, number: int) -> tuple[int, tuple[ShardTensor, ...]] | None:
        """Its size in bytes and its tensors; the one that was not asked for longest is forgotten first."""
        known = self._known.get(number)
        if known is not None:
            self._known.move_to_end(number)
        return known

    def _forget(self, number: int) -> None:
        known = self._known.pop(number, None)
        if known is not None:
            self._account.give_back(len(known[1]) * TENSOR_COST)


def shard_tensors(layout: Layout) -> tuple[ShardTensor, ...]:
    """The tensors of `layout`; UsageError where one lies outside it, over another, or describes what cannot be."""
    if layout.nbytes != page_up(max(layout.nbytes, 1)):
        raise UsageError(f"a layout has {layout.nbytes} bytes; it must be a whole number of pages")
    tensors = tuple(_tensor(tensor) for tensor in layout.tensors)
    if len({tensor.fqn for tensor in tensors}) != len(tensors):
        raise UsageError("a layout names one tensor twice")
    end = 0
    for tensor in tensors:
        if tensor.offset < end or tensor.offset % TENSOR_ALIGNMENT:
            raise UsageError(f"{tensor.fqn} lies at byte {tensor.offset}, over what is before it or at no multiple of 64")
        end = tensor.offset + tensor.nbytes
    if end > layout.nbytes:
        raise UsageError(f"the tensors end at byte {end} of a layout of {layout.nbytes}")
    return tensors


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
    """`tensors` as they go over the socket."""
    return tuple(WireTensor(t.fqn, t.dtype, t.shape, t.box, t.scope, t.offset) for t in tensors)
