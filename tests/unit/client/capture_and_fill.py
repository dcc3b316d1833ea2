"""A miniature writer and reader: copies captured tensors byte by byte, and fills load targets by FQN."""

from __future__ import annotations

import struct
from collections.abc import Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from checkpointd.layout import indexes, tree
from checkpointd_client.capture.dtypes import DTYPES, copy_bits, overlaps_itself
from checkpointd_client.capture.state import Captured, capture
from checkpointd_client.capture.tensor_kinds.classes import ONLY_BUILT_IN, TensorClasses
from checkpointd_client.restore.content import RankContent
from checkpointd_client.restore.plan import LoadOptions, Restoration, Target, prepare


@dataclass(frozen=True)
class Saved:
    """What would lie in the store: bytes by FQN, and the rest of the index as it is read back."""

    data: dict[str, bytes]
    entries: dict[str, tuple[str, tuple[int, ...]]]
    aliases: tuple[indexes.Alias, ...]
    tree: tree.Node
    excluded: tuple[str, ...]

    def prepare(
        self,
        state: MutableMapping[str, Any],
        *,
        strict: bool = True,
        cast: bool = False,
        left: Sequence[str] = (),
        classes: TensorClasses = ONLY_BUILT_IN,
    ) -> Restoration:
        """`left`: what the saving ranks had different values of."""
        content = RankContent(
            root=_without(self.tree, "", {f"state.{path}" for path in left}),
            entries=self.entries,
            owners={},
            aliases=self.aliases,
            excluded=self.excluded,
            left=frozenset(left),
        )
        options = LoadOptions(strict, cast, classes=classes)
        return prepare(state, content, options, equal=lambda one, two: self.data[one] == self.data[two])

    def load(
        self,
        state: MutableMapping[str, Any],
        *,
        strict: bool = True,
        cast: bool = False,
        classes: TensorClasses = ONLY_BUILT_IN,
    ) -> dict[str, object]:
        """Load into `state`, returning client_state."""
        restoration = self.prepare(state, strict=strict, cast=cast, classes=classes)
        self.fill(restoration, cast=cast)
        return restoration.finish()

    def fill(self, restoration: Restoration, *, cast: bool = False) -> None:
        for target in restoration.targets:
            self.fill_one(target, cast=cast)

    def fill_one(self, target: Target, *, cast: bool = False) -> None:
        dtype, shape = self.entries[target.fqn]
        assert tuple(target.tensor.shape) == shape
        assert cast or target.tensor.dtype == DTYPES[dtype]
        # What Target promises to whoever fills it.
        assert not (target.tensor.is_conj())
        assert not (target.tensor.is_neg())
        assert not (overlaps_itself(target.tensor))
        stored = tensor_of(self.data[target.fqn], dtype, shape)
        copy_bits(target.tensor, stored.to(target.tensor.dtype) if cast else stored)


def _without(node: tree.Node, path: str, left: AbstractSet[str]) -> tree.Node:
    if not isinstance(node, tree.Dict):
        return node
    below = ((key, child, f"{path}.{key}" if path else str(key)) for key, child in node.items)
    kept = tuple((key, _without(child, at, left)) for key, child, at in below if at not in left)
    return tree.Dict(node.kind, kept, node.attributes)


def tensor_of(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(DTYPES[dtype]).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The row-major elements of `tensor`, bit for bit."""
    held = torch.empty(tensor.numel() * tensor.itemsize, dtype=torch.uint8)
    if tensor.numel():
        copy_bits(held.view(tensor.dtype).view(tensor.shape), tensor.detach().resolve_conj().resolve_neg().cpu())
    return held.numpy().tobytes()


def write(captured: Captured) -> Saved:
    # A conjugate or negative bit would be lost on the way: a leaf's memory must be its elements.
    assert not any(leaf.tensor.is_conj() or leaf.tensor.is_neg() for leaf in captured.leaves)
    return Saved(
        {leaf.fqn: bytes_of(leaf.tensor) for leaf in captured.leaves},
        {leaf.fqn: (leaf.dtype, tuple(leaf.tensor.shape)) for leaf in captured.leaves},
        captured.aliases,
        tree.decode(tree.encode(captured.tree)),
        captured.excluded,
    )


def save(
    state: Mapping[str, object],
    client_state: Mapping[str, object] | None = None,
    *,
    exclude_frozen: bool = False,
    classes: TensorClasses = ONLY_BUILT_IN,
) -> Saved:
    return write(capture(state, client_state, exclude_frozen_parameters=exclude_frozen, classes=classes))


def same(one: Any, two: Any) -> bool:
    """Whether two values are alike in class, order and every bit."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape, one.requires_grad) == (two.dtype, two.shape, two.requires_grad) and bytes_of(
            one
        ) == bytes_of(two)
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype.str, one.shape) == (two.dtype.str, two.shape) and one.tobytes() == two.tobytes()
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", two)
    if isinstance(one, complex):
        return same((one.real, one.imag), (two.real, two.imag))
    if isinstance(one, dict):
        return same(list(one.items()), list(two.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)
