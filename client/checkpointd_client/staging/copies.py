"""Copies of tensors in host memory into the slot, many at a time, that are made after save().

Invariants
  COPIES-1  A source is read as the memory that it had at save(). Its storage is held, and looked at before it is read: if it
      was freed or moved in between, the copy raises StagingError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch

from checkpointd.errors import StagingError
from checkpointd_client.capture.aliasing import array_at
from checkpointd_client.capture.dtypes import copy_bits
from checkpointd_client.staging.places import Where

Version = Callable[[torch.Tensor], int | None]


def bytes_of(tensors: Sequence[torch.Tensor], where: Where) -> list[torch.Tensor]:
    """The bytes of contiguous tensors by their addresses. This keeps no memory alive."""
    if not tensors:
        return []
    base = min(where.addresses)
    nbytes = max(map(int.__add__, where.addresses, where.nbytes)) - base
    window = torch.from_numpy(array_at(base, (nbytes,), (1,), 1, kind="u"))
    starts = [address - base for address in where.addresses]
    return list(map(torch.Tensor.narrow, repeat(window), repeat(0), starts, where.nbytes))


def storages_of(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storage of each tensor, which keeps its memory alive."""
    return list(map(torch.Tensor.untyped_storage, tensors))


def addresses_of(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    """The address of each storage."""
    return list(map(torch.UntypedStorage.data_ptr, storages))


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Copies that one thread makes together. `versions`: the version counters of `tensors` at save(), as `version` tells them.

    `storages`: those of the tensors, and their addresses at save(); empty if the tensors themselves are the sources.
    """

    fqns: Sequence[str]
    tensors: Sequence[torch.Tensor]
    version: Version
    versions: Sequence[int | None]
    sources: Sequence[torch.Tensor]
    targets: Sequence[torch.Tensor]
    storages: tuple[Sequence[torch.UntypedStorage], Sequence[int]] = ((), ())

    def run(self) -> None:
        """Make the copies."""
        storages, addresses = self.storages
        if not storages:
            for target, source in zip(self.targets, self.sources, strict=True):
                copy_bits(target, source)
            return
        if addresses_of(storages) != addresses:
            raise StagingError("the memory of one of them was freed or resized after save()")
        torch._foreach_copy_(list(self.targets), list(self.sources))  # no Python code runs for a single tensor

    def changed(self) -> str | None:
        """The first tensor that torch has counted a change of."""
        now = list(map(self.version, self.tensors))
        if now == self.versions:
            return None
        return next(fqn for fqn, one, was in zip(self.fqns, now, self.versions, strict=True) if one != was)
