"""A sampler and a data loader that go on with the samples that no rank has seen, on any number of ranks and workers.

Invariants
  RESHARD-1  All ranks read one order of samples, which follows from seed and epoch alone. At any step they have together seen
      a first part of it, so the length of that part is the whole position.
  RESHARD-2  The position counts the batches that were handed to the training loop. What workers have read ahead does not count.
  RESHARD-3  A pass that goes on from a position reads each sample of the rest once. Only to give all ranks equally many, up to
      one sample a rank is read twice or left out at the end of an epoch, as DistributedSampler does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from checkpointd.errors import UsageError

_POSITION = frozenset({"epoch", "samples_seen", "dataset_size", "shuffle", "seed"})


class ReshardingSampler(DistributedSampler[int]):
    """A DistributedSampler that can begin anywhere in the order of an epoch. Its arguments and its order are the same.

    Without a process group there is one rank. `start`: how many samples of the epoch all ranks together have seen before the
    next pass.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None and rank is None and not torch.distributed.is_initialized():
            num_replicas, rank = 1, 0
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]  # it only asks for the length
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch. If `epoch` is the one at which it is, the position in it stays."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def left(self) -> int:
        """How many samples each rank gets in the next pass."""
        rest = max(self.size - self.start, 0)
        return rest // self.num_replicas if self.drop_last else -(-rest // self.num_replicas)

    @property
    def size(self) -> int:
        """How many samples the dataset has."""
        return len(self.dataset)  # type: ignore[arg-type]  # a map-style dataset has a length

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        total = self.left() * self.num_replicas
        rest = order[self.start : self.start + total]
        rest += islice(cycle(order), total - len(rest))
        return iter(rest[self.rank :: self.num_replicas])

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.size))
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        return torch.randperm(self.size, generator=generator).tolist()


class ReshardingLoader:
    """A data loader of a map-style dataset whose state is a position in the order that all ranks share.

    `loader` is a StatefulDataLoader or a torch DataLoader with a ReshardingSampler and a batch size. Put this object into the
    state in its place. Its state is the same on all ranks, so it loads on any number of ranks, with any number of workers and
    any batch size. The next pass then continues after the samples that were seen. After a whole pass, the next one is the next
    epoch. If you leave a pass early, the next one begins the epoch again, as with torch's loaders.

    Raises UsageError if `loader` has no such sampler, no batch size, or workers with in_order=False.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        if not isinstance(loader.sampler, ReshardingSampler):
            raise UsageError(
                f"a ReshardingLoader needs a data loader with a ReshardingSampler, and this one has a "
                f"{type(loader.sampler).__name__}: pass sampler=ReshardingSampler(dataset). An iterable dataset has no order "
                "that ranks share: put its StatefulDataLoader itself into the state"
            )
        if loader.batch_size is None:
            raise UsageError("a ReshardingLoader needs a data loader with batch_size: it counts the samples of each batch")
        if loader.num_workers and not getattr(loader, "in_order", True):
            raise UsageError(
                "a ReshardingLoader needs its batches in the order of the samples, and this data loader has in_order=False: "
                "leave that out, since the position would skip samples that a slow worker still holds"
            )
        self.loader, self.sampler = loader, loader.sampler
        self._batch_size = loader.batch_size
        self._taken = 0
        """The batches that this pass has given out."""
        self._pass: int | None = None
        """The epoch of the pass that is under way, or was left."""
        self._turn: object = None
        """That pass, unless a position was loaded since."""

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch. If `epoch` is the one at which the loader is, the position in it stays."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """The number of batches of this rank in a whole epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._pass == self.sampler.epoch:
            self.sampler.start = 0
        epoch, turn = self.sampler.epoch, object()
        self._taken, self._pass, self._turn = 0, epoch, turn
        for batch in self.loader:
            self._check(turn)
            self._taken += 1
            yield batch
        self._check(turn)
        if self.sampler.epoch == epoch:
            self._begin(epoch + 1, 0)

    def _check(self, turn: object) -> None:
        if self._turn is not turn:
            raise UsageError(
                "a position was loaded, or another pass was begun, while this pass over the data was under way, so its batches "
                "do not count any more: leave its loop, and begin another `for batch in loader`"
            )

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that were given out: the epoch, and how many samples of it all ranks have seen."""
        sampler, batch_size = self.sampler, self._batch_size
        taken = self._taken if self._pass == sampler.epoch else 0
        left = sampler.left()
        batches = left // batch_size if self.loader.drop_last else -(-left // batch_size)
        seen = sampler.start + min(taken * batch_size, left) * sampler.num_replicas
        epoch, seen = (sampler.epoch, seen) if taken < batches else (sampler.epoch + 1, 0)
        return {
            "epoch": epoch,
            "samples_seen": seen,
            "dataset_size": sampler.size,
            "shuffle": sampler.shuffle,
            "seed": sampler.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position, which any number of ranks may have saved. Takes the stored seed.

        Raises UsageError if the samples have another order here, so that the position does not fit.
        """
        if (why := self.misfit(state)) is not None:
            raise UsageError(why)
        self.sampler.seed = state["seed"]
        self._begin(state["epoch"], state["samples_seen"])

    def misfit(self, state: Mapping[str, Any]) -> str | None:
        """Why it cannot go on from the position `state`: the order of the samples is another one now. None if it can."""
        if not state.keys() >= _POSITION:
            return (
                "the stored state is not that of a ReshardingLoader: leave the loader out of the state and begin an epoch, or "
                "load into a loader of the kind that was saved"
            )
        for name, now in (("dataset_size", self.sampler.size), ("shuffle", self.sampler.shuffle)):
            if state[name] != now:
                return (
                    f"{name} was {state[name]} and is {now} now, so the samples have another order: load with the dataset and "
                    "the sampler as they were, or leave the loader out of the state and begin an epoch"
                )
        return None

    def _begin(self, epoch: int, seen: int) -> None:
        self.sampler.epoch, self.sampler.start = epoch, seen
        self._taken, self._pass, self._turn = 0, None, None
